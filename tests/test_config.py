"""Configurations: what is refused, the paper's labels, and the roles of loops under each reference policy."""

import dataclasses

import pytest

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
