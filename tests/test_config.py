"""Configurations: what is refused, the paper's labels, and the roles of loops under each reference policy."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from residualquant import PRESETS, KVQuantConfig, preset


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", ()),
        ("bits", (2, 5)),
        ("bits", (2.0, 4)),
        ("bits", (0, 0, 0, 0)),
        ("group_size", 8),
        ("int4_group_size", 128),
        ("reference", "nearest"),
        ("coefficient", "median"),
        ("rotation", "random"),
        ("int2_clip", 0.0),
        ("int2_clip", 1.5),
        ("int2_clip", float("nan")),
        ("rounding", "fp16"),
        ("sink_tokens", -1),
        ("recent_tokens", 1.5),
        ("recent_tokens", True),
    ],
)
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ValueError) as error:
        KVQuantConfig(**{field: value})
    wrong = {(2, 5): "5", (2.0, 4): "2.0", (): "()"}.get(value, str(value)) if isinstance(value, tuple) else repr(value)
    assert wrong in str(error.value)


@pytest.mark.parametrize("value", [5, "24", None, (True, 2), ("2", "4"), ((2,), (4,)), (2, None)], ids=repr)
def test_what_is_no_sequence_of_bits_is_named(value):
    wrong = value if not isinstance(value, tuple) else next(b for b in value if type(b) is not int)
    with pytest.raises(ValueError, match="bits") as error:
        KVQuantConfig(bits=value)
    assert repr(wrong) in str(error.value)


@pytest.mark.parametrize("value", [[2, 4], np.array([2, 4]), (np.int64(2), np.int8(4)), torch.tensor([2, 4])], ids=repr)
def test_any_sequence_of_integers_gives_the_same_configuration(value):
    assert KVQuantConfig(bits=value) == KVQuantConfig(bits=(2, 4))
    assert [type(bits) for bits in KVQuantConfig(bits=value).bits] == [int, int]


# ---- layers with bits of their own --------------------------------------------------------------------------------

FIRST_HIGHER = KVQuantConfig(layer_bits=[(2, [4, 4, 4, 4]), (0, [16] * 4)])


def test_each_layer_has_its_bits():
    assert FIRST_HIGHER.layer_bits == ((0, (16,) * 4), (2, (4,) * 4))
    assert [FIRST_HIGHER.for_layer(n).label for n in range(4)] == ["BF16", "INT2/4 g=32", "INT4 g=32", "INT2/4 g=32"]
    assert not any(FIRST_HIGHER.for_layer(n).layer_bits for n in range(4))
    assert FIRST_HIGHER.label == "INT2/4 g=32, layer 0 BF16, layer 2 INT4"
    plain = preset("INT2/4 g=32")
    assert plain.for_layer(3) is plain


def test_layer_bits_survive_json_and_leave_other_configurations_records_alone():
    stored = json.loads(json.dumps(FIRST_HIGHER.to_dict()))
    assert stored["layer_bits"] == [[0, [16] * 4], [2, [4] * 4]]
    assert KVQuantConfig.from_dict(stored) == FIRST_HIGHER and len({FIRST_HIGHER, KVQuantConfig()}) == 2
    assert "layer_bits" not in KVQuantConfig().to_dict()


def test_off_means_every_layer():
    off = preset("BF16")
    assert not dataclasses.replace(off, layer_bits=((0, (4,) * 4),)).is_off
    assert dataclasses.replace(off, layer_bits=((0, (16,) * 4),)).is_off
    assert not dataclasses.replace(preset("INT4 g=32"), layer_bits=((0, (16,) * 4),)).is_off


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "pairs .layer, bits of every loop., got 5"),
        ([(0,)], r"got \[\(0,\)\]"),
        ([("0", [4] * 4)], "pairs"),
        ([(0, [4] * 3)], "each with bits of 4 loops, got"),
        ([(0, [4] * 4), (0, [8] * 4)], "distinct layers"),
        ([(-1, [4] * 4)], "layers from 0"),
        ([(0, 4)], "layer_bits must be a sequence of one precision per loop, got 4"),
        ([(0, (4, 4, 4, 5))], "layer_bits of a loop must be one of 0, 1, 2, 3, 4, 8, 16, got 5"),
        ([(0, (2, 2, 2, 0))], "loop 3 has no reference"),
    ],
    ids=str,
)
def test_wrong_layer_bits_are_named(value, message):
    with pytest.raises(ValueError, match=message):
        KVQuantConfig(layer_bits=value)


def test_layers_that_run_once_are_coded_directly():
    edge = preset("INT2/4 g=16", rotation="hadamard", sink_tokens=2).for_edge
    assert edge == KVQuantConfig(bits=(4,), reference="direct", sink_tokens=2)
    assert edge.label == "INT4 g=32" and preset("BF16", sink_tokens=1).for_edge.is_off


def test_bf16_rounding_is_for_no_rotation():
    with pytest.raises(ValueError, match="hadamard"):
        KVQuantConfig(rounding="bf16", rotation="hadamard")


@pytest.mark.parametrize("reference", ["last", "first", "previous", "next", "direct"])
def test_only_loops_with_a_reference_may_have_no_bits(reference):
    bits = {"last": (0, 2, 0, 4), "next": (0, 2, 0, 4), "first": (4, 0, 2, 0), "previous": (4, 0, 2, 0)}
    if reference == "direct":
        with pytest.raises(ValueError, match="loop 1 has no reference"):
            KVQuantConfig(bits=(4, 0, 2, 4), reference=reference)
    else:
        assert KVQuantConfig(bits=bits[reference], reference=reference).loops == 4


@pytest.mark.parametrize(
    ("reference", "anchor", "references"),
    [
        ("last", 3, [3, 3, 3, None]),
        ("first", 0, [None, 0, 0, 0]),
        ("previous", 0, [None, 0, 1, 2]),
        ("next", 3, [1, 2, 3, None]),
        ("direct", None, [None] * 4),
    ],
)
def test_reference_policies(reference, anchor, references):
    cfg = preset("INT2 g=32", reference=reference)
    assert cfg.anchor == anchor
    assert [cfg.reference_of(loop) for loop in range(4)] == references
    assert [cfg.stores_alpha(loop) for loop in range(4)] == [r is not None for r in references]
    unit = dataclasses.replace(cfg, coefficient="unit")
    assert not any(unit.stores_alpha(loop) for loop in range(4))


def test_raw_loops_have_no_reference():
    cfg = KVQuantConfig(bits=(2, 16, 2, 16))
    assert [cfg.reference_of(loop) for loop in range(4)] == [3, None, 3, None]


def test_presets_are_the_papers_labels():
    bits = {label: (cfg.bits, cfg.group_size) for label, cfg in PRESETS.items()}
    assert bits == {
        "BF16": ((16, 16, 16, 16), 32),
        "INT2 g=32": ((2, 2, 2, 2), 32),
        "INT2 g=16": ((2, 2, 2, 2), 16),
        "INT2/4 g=32": ((2, 2, 2, 4), 32),
        "INT2/4 g=16": ((2, 2, 2, 4), 16),
        "INT4 g=32": ((4, 4, 4, 4), 32),
    }
    for label, cfg in PRESETS.items():
        assert cfg.label == label
        assert (cfg.reference, cfg.coefficient, cfg.rotation) == ("last", "ls", "none")
        assert cfg.is_off == (label == "BF16")
        assert KVQuantConfig.from_dict(cfg.to_dict()) == cfg


@pytest.mark.parametrize(
    ("reference", "bits"),
    [
        ("last", (2, 2, 2, 4)),
        ("next", (2, 2, 2, 4)),
        ("direct", (2, 2, 2, 4)),
        ("first", (4, 2, 2, 2)),
        ("previous", (4, 2, 2, 2)),
    ],
)
def test_the_anchor_has_the_four_bits(reference, bits):
    cfg = preset("INT2/4 g=16", reference=reference)
    assert cfg.bits == bits
    assert cfg.label == "INT2/4 g=16"


def test_other_precisions_are_spelt_out():
    assert KVQuantConfig(bits=(3, 2, 1, 4)).label == "INT[3,2,1,4] g=32"
    assert KVQuantConfig(bits=(4, 2, 2, 2), group_size=16).label == "INT[4,2,2,2] g=16"
    assert preset("INT2/4 g=16", loops=8).bits == (2,) * 7 + (4,)
    assert preset("BF16", loops=2).bits == (16, 16)


def test_unknown_preset_and_field():
    with pytest.raises(ValueError, match=r"unknown preset 'INT3'; known presets: BF16, INT2 g=32"):
        preset("INT3")
    with pytest.raises(ValueError, match="int3_clip"):
        preset("INT2 g=32", int3_clip=0.9)
    with pytest.raises(ValueError, match="got 0"):
        preset("INT2 g=32", loops=0)


# Group size of each loop of every row of Table 5: it goes with the bits, not with the role of the loop.
TABLE5_GROUPS = {
    ((4, 4, 4, 4), 32): (32, 32, 32, 32),
    ((2, 2, 2, 2), 32): (32, 32, 32, 32),
    ((2, 2, 2, 2), 16): (16, 16, 16, 16),
    ((4, 2, 2, 2), 32): (32, 32, 32, 32),
    ((4, 2, 2, 2), 16): (32, 16, 16, 16),
    ((2, 2, 2, 4), 32): (32, 32, 32, 32),
    ((2, 2, 2, 4), 16): (16, 16, 16, 32),
}


@pytest.mark.parametrize(("row", "groups"), TABLE5_GROUPS.items())
@pytest.mark.parametrize("reference", ["direct", "last"])
def test_group_sizes_of_table5(row, groups, reference):
    bits, group_size = row
    assert KVQuantConfig(bits=bits, group_size=group_size, reference=reference).group_sizes == groups


def test_loops_without_codes_have_no_groups():
    assert KVQuantConfig(bits=(0, 3, 8, 16, 1, 4), group_size=64).group_sizes == (None, 64, 32, None, 64, 32)
