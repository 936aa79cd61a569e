"""Rows of many configurations decoded together hold, bit for bit, what their packed caches decode to."""

import dataclasses

import pytest
import torch
from stand_ins import CODECS, ScriptedModel

from residualquant.attention import PackedAttention
from residualquant.batch import Coding, DecodeCache, RotationStack, Slots, codings, raw_slots
from residualquant.cache import LayerRotations, PackedCache
from residualquant.config import KVQuantConfig, preset
from residualquant.engine import BLOCK_VALUES, _Decoder
from residualquant.models.base import EDGE, KVShape
from residualquant.residual import Mixture, mixes_with, reconstruct_rotated
from residualquant.rotation import Rotation

CONFIGS = [
    *CODECS,
    preset("INT2/4 g=32", rotation="oscar"),
    preset("INT2/4 g=32", rotation="optr_h"),
    preset("INT2/4 g=32", rotation="hadamard", int2_clip=0.8),
    KVQuantConfig(bits=(2, 4), rotation="optr_h", reference="next"),
    preset("INT2 g=32", sink_tokens=2, recent_tokens=3),
    preset("INT2/4 g=32", rotation="optr_h", sink_tokens=1, recent_tokens=2),
    preset("INT2 g=32", rounding="bf16"),
    preset("INT2 g=32", rotation="optr_h", layer_bits=((0, (16,) * 4),)),
    preset("INT2/4 g=32", rotation="hadamard", layer_bits=((1, (4,) * 4),)),
    preset("BF16", layer_bits=((1, (2, 2, 2, 4)),)),
]
PROMPTS = [[7, 3, 9, 11], [5], [1, 2, 3, 4, 5]]
STEPS = 3


def calibrated(shape, cfg, seed):
    """A rotation for every group, layer and head; K of OptR-H has means."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.kv_heads, shape.head_dim)
    found = {}
    for group in range(shape.loops // cfg.loops):
        for layer in range(shape.layers):
            for kind in "kv":
                matrix = torch.linalg.qr(torch.randn(*size, shape.head_dim, generator=generator))[0]
                centred = cfg.rotation == "optr_h" and kind == "k"
                means = 0.2 * torch.randn(cfg.loops, *size, generator=generator) if centred else None
                found[group, layer, kind] = Rotation(matrix, means)
    return found


def all_rotations(shape, configs):
    return {i: calibrated(shape, c, i) for i, c in enumerate(configs) if c.rotation in ("oscar", "optr_h")}


def packed_cache(model, cfg, rotations, ids):
    """The cache that holds ``ids``."""
    shape = model.kv_shape
    cache = PackedCache(shape, cfg, rotations, edge_layers=model.edge_layers)
    states = model.bf16_states(ids)
    looped = states[: shape.loops * shape.layers].unflatten(0, (shape.loops, shape.layers))
    for layer in range(shape.layers):
        cache.append(layer, *looped[:, layer, :, None].unbind(1))
    for layer in range(model.edge_layers):
        k, v = states[shape.loops * shape.layers + layer]
        cache.append(shape.layers + layer, k[None, None], v[None, None])
    return cache


def assert_rows_hold_their_packed_caches(model, lane, sequences):
    """``sequences`` {(config, prompt): (cfg, rotations, tokens)}."""
    shape = model.kv_shape
    looped = lane.cache.data[: shape.loops * shape.layers].unflatten(0, (shape.loops, shape.layers))
    for row, place in enumerate(lane.sequences.tolist()):
        cfg, rotations, ids = sequences[tuple(place)]
        assert lane.cache.lengths[row] == len(ids)
        packed = packed_cache(model, cfg, rotations, ids)
        for layer in range(shape.layers + model.edge_layers):
            own = (
                looped[:, layer]
                if layer < shape.layers
                else lane.cache.data[[layer - shape.layers - model.edge_layers]]
            )
            for index, truth in enumerate(packed.read(layer, "original")):
                mine = own[:, index, row, :, : len(ids)].transpose(1, 2)
                assert torch.equal(mine, truth[:, 0]), f"{cfg.label} {cfg.rotation}, layer {layer}, {'kv'[index]}"


def decode_and_compare(model, configs, prompts=PROMPTS, steps=STEPS, drop=()):
    rotations = all_rotations(model.kv_shape, configs)
    decoder = _Decoder(model, prompts, configs, steps + 1, set(), rotations)
    lanes = [decoder._admit([0, 1], None), decoder._admit([2], None)]
    tokens = {(c, p): list(ids) for c in range(len(configs)) for p, ids in enumerate(prompts)}

    def compare():
        for lane in lanes:
            places = map(tuple, lane.sequences.tolist())
            own = {s: (configs[s[0]], rotations.get(s[0]), tokens[s]) for s in places}
            assert_rows_hold_their_packed_caches(model, lane, own)

    compare()
    for step in range(steps):
        if step == steps // 2:
            for lane in lanes:
                lane.alive[:] = [tuple(s) not in drop for s in lane.sequences.tolist()]
                lane.shrink()
        for (_, prompt), ids in tokens.items():
            ids.append(model.following(prompts[prompt], step + 1)[-1])
        newest, _ = decoder._step(lanes, decoder._layout(lanes))
        order = [s for lane in lanes for s in lane.sequences.tolist()]
        assert newest.tolist() == [model.following(prompts[p], step + 2)[-1] for _, p in order]
    compare()


@pytest.mark.parametrize("edge_layers", [0, 2])
def test_the_dequantised_copy_equals_the_packed_cache_bit_for_bit(edge_layers):
    model = ScriptedModel(edge_layers=edge_layers)
    gone = {(c, p) for c in (1, 4, 8) for p in range(3)} | {(2, 0), (7, 1), (11, 2), (0, 2)}
    decode_and_compare(model, CONFIGS, drop=gone)


@pytest.mark.gpu
def test_the_copy_on_a_gpu_equals_the_packed_cache_bit_for_bit():
    """Caches and rotations, given on the CPU, go where the model and its tokens are."""
    decode_and_compare(ScriptedModel().cuda(), CONFIGS, drop={(1, 0), (8, 2)})


@pytest.mark.parametrize("values", [1, 9000])
def test_prompts_may_be_coded_in_blocks(monkeypatch, values):
    monkeypatch.setitem(BLOCK_VALUES, "cpu", values)
    decode_and_compare(ScriptedModel(), [CONFIGS[i] for i in (2, 8, 11, 12)], steps=1)


@pytest.mark.parametrize("loops", [4, 8, 16])
def test_thirty_two_loops_in_groups(loops):
    model = ScriptedModel(KVShape(32, 1, 2, 96), 2, 4)
    configs = [
        preset("BF16", loops),
        preset("INT2/4 g=32", loops),
        preset("INT2/4 g=16", loops, rotation="hadamard"),
        preset("INT2/4 g=32", loops, rotation="optr_h"),
    ]
    decode_and_compare(model, configs, [[7, 3], [5], [1, 2]], 1)


def test_groups_of_different_lengths_decode_together():
    model = ScriptedModel(KVShape(16, 2, 1, 64), 2, 2)
    configs = [preset("INT2/4 g=32", loops, rotation=r) for loops in (4, 8, 16) for r in ("none", "oscar", "optr_h")]
    decode_and_compare(model, configs, [[7, 3], [5], [1, 2]], 1)


def test_few_calls_code_many_configurations():
    """One for all that have the same reference, groups and rounding: rotations and windows cost none of their own."""
    slots = Slots(KVShape(4, 2, 2, 64), 2)
    same = [
        preset("INT2 g=32"),
        preset("INT2/4 g=32", rotation="hadamard", recent_tokens=4),
        preset("INT2 g=32", coefficient="norm_ratio", int2_clip=0.8),
        preset("INT2 g=16"),
        preset("INT2 g=32", reference="next"),
    ]
    made = codings(slots, [(c, torch.arange(2) + 2 * i, None) for i, c in enumerate(same)], torch.device("cpu"))
    assert [(c.slots, c.rows.tolist()) for c in made] == [
        (slice(8), list(range(6))),
        (slice(8, 10), list(range(10))),
        (slice(8), [6, 7]),
        (slice(8), [8, 9]),
    ]
    assert codings(slots, [(preset("BF16"), torch.arange(3), None)], torch.device("cpu")) == []


@pytest.mark.parametrize("reference", ["direct", "last", "first", "previous", "next"])
def test_codecs_that_mix_give_what_each_gives_alone(reference):
    generator = torch.Generator().manual_seed(3)
    bits = [(2, 2, 2, 2), (2, 2, 2, 4), (4, 2, 3, 8), (1, 4, 4, 4)]
    codecs = [KVQuantConfig(b, reference=reference, coefficient=c).codec
              for b in bits for c in ("ls", "unit", "norm_ratio")]  # fmt: skip
    codecs += [preset("INT2 g=32", reference=reference, int2_clip=0.7).codec]
    kinds = torch.randint(len(codecs), (40,), generator=generator)
    z = torch.randn(4, 40, 3, 64, generator=generator)
    z[:, 5] = 0
    z[1, 7] = -0.0
    means = 0.2 * torch.randn(4, 40, 3, 64, generator=generator)
    for mu in (None, means):
        mixed = reconstruct_rotated(z, Mixture(codecs, kinds), mu)
        for i, kind in enumerate(kinds.tolist()):
            own = None if mu is None else mu[:, [i]]
            assert torch.equal(mixed[:, [i]], reconstruct_rotated(z[:, [i]], Mixture([codecs[kind]]), own))


def test_codecs_mix_where_only_bits_clip_and_coefficient_differ():
    cfg = preset("INT2/4 g=32")
    alike = [preset("INT2 g=32"), preset("INT2/4 g=32", int2_clip=0.8), preset("INT2/4 g=32", coefficient="unit")]
    assert all(mixes_with(c.codec) == mixes_with(cfg.codec) for c in alike)
    apart = [
        preset("INT2/4 g=16"),
        preset("INT2/4 g=32", reference="first"),
        preset("INT2/4 g=32", rounding="bf16"),
        preset("INT2/4 g=32", loops=8),
        preset("INT2/4 g=32", int4_group_size=64),
        KVQuantConfig((2, 2, 0, 4)),
        KVQuantConfig((2, 2, 2, 16)),
    ]
    assert all(mixes_with(c.codec) != mixes_with(cfg.codec) for c in apart)


def test_layers_with_bits_of_their_own_are_coded_apart():
    slots = Slots(KVShape(4, 3, 2, 64))
    cfg = preset("INT2 g=32", layer_bits=((1, (4,) * 4), (0, (16,) * 4)))
    (first, second) = codings(slots, [(cfg, slice(None), None)], torch.device("cpu"))
    found = {made.mixture.like.bits: made.slots.tolist() for made in (first, second)}
    assert found == {(4, 4, 4, 4): [1, 4, 7, 10], (2, 2, 2, 2): [2, 5, 8, 11]}
    assert raw_slots(slots, cfg) == [0, 3, 6, 9]


@pytest.mark.parametrize("shared", [True, False])
def test_stacked_rotations_equal_single_ones_and_spare_rows_change_nothing(shared):
    shape = KVShape(4, 2, 2, 64)
    cfg = preset("INT2 g=32", rotation="hadamard" if shared else "optr_h")
    own = [LayerRotations(cfg, shape, "cpu", None if shared else calibrated(shape, cfg, i)) for i in range(3)]
    stack = RotationStack(own, shape)
    rows_of = {0: torch.tensor([4, 1]), 2: torch.tensor([0, 2, 5])}
    index, x = stack.index(rows_of, spare=6), torch.randn(7, 8, 2, 2, 64)
    x[6] = 0
    before = x.clone()
    for change, name in ((stack.rotate, "rotate"), (stack.unrotate, "unrotate")):
        given = x.clone()
        x[index] = change(x[index])
        for slot in range(8):
            for i, kind in enumerate("kv"):
                for place, rows in rows_of.items():
                    truth = getattr(own[place].get(0, slot % 2, kind), name)(given[rows, slot, i])
                    assert torch.equal(x[rows, slot, i], truth)
        assert torch.equal(x[[3, 6]], before[[3, 6]])


def test_attention_of_a_row_equals_attention_over_its_packed_cache():
    """What the engine hands back to the model, for every slot, rotations and windows included."""
    model = ScriptedModel(KVShape(4, 2, 2, 64), 2, 4)
    rotations = all_rotations(model.kv_shape, CONFIGS)
    prompt = [7, 3, 9, 11, 2, 30]
    decoder = _Decoder(model, [prompt], CONFIGS, 3, set(), rotations)
    lane = decoder._admit([0], None)
    seen = {}

    def record(loop, layer, q, k, v):
        seen[loop, layer] = attend(loop, layer, q, k, v)
        return seen[loop, layer]

    token, at = lane.tokens[:1, None], torch.tensor([[len(prompt)]])
    for row, cfg in enumerate(CONFIGS):
        packed = PackedAttention(packed_cache(model, cfg, rotations.get(row), prompt))
        attend = packed
        model(token, at, record)
        truth, seen = dict(seen), {}
        if row == 0:
            ours = engine_attention(model, decoder, lane)
        assert set(truth) == set(ours) and (EDGE, 1) in truth
        for place, out in truth.items():
            torch.testing.assert_close(ours[place][row], out[0, 0], atol=2e-5, rtol=2e-5)


def engine_attention(model, decoder, lane):
    """{(loop, layer): [rows, Hq, D]} of one step."""
    seen, forward = {}, type(model).forward

    def listen(ids, positions, attend, **kwargs):
        def record(loop, layer, q, k, v):
            out = attend(loop, layer, q, k, v)
            seen[loop, layer] = out[:, 0].clone()
            return out

        return forward(model, ids, positions, record, **kwargs)

    model.forward = listen
    decoder._step([lane], decoder._layout([lane]))
    del model.forward
    return seen


def test_rows_that_are_let_go_leave_the_others_as_they_were():
    slots = Slots(KVShape(2, 1, 1, 16), 1)
    cache = DecodeCache(slots, CONFIGS[:8], [4] * 8, 4, torch.randn(slots.values(8, 4)))
    before = cache.data.clone()
    order = cache.keep([1, 4, 6, 7])
    assert sorted(order) == [1, 4, 6, 7] and order[1] == 1
    assert cache.configs == [CONFIGS[row] for row in order]
    assert torch.equal(cache.data, before[:, :, order])
    assert cache.keep([]) == [] and cache.rows == 0


def test_codings_replace_states_where_they_are():
    z = torch.randn(5, 8, 2, 2, 64)
    before = z.clone()
    codec = preset("INT2 g=32").codec
    Coding(Mixture([codec]), torch.tensor([3, 1]), torch.tensor([0, 2, 4, 6]), 4).apply(z)
    changed = (z != before).flatten(2).any(-1)
    expected = torch.zeros(5, 8, dtype=torch.bool)
    expected[1, ::2] = expected[3, ::2] = True
    assert torch.equal(changed, expected)


def test_codecs_are_equal_where_the_codes_are():
    cfg = preset("INT2 g=32")
    alike = [
        dataclasses.replace(cfg, rotation="hadamard"),
        dataclasses.replace(cfg, sink_tokens=3, recent_tokens=4),
        dataclasses.replace(cfg, int4_group_size=64),
        dataclasses.replace(cfg, layer_bits=((0, (4,) * 4),)).for_layer(1),
    ]
    assert {c.codec for c in alike} == {cfg.codec}
    for change in ({"group_size": 16}, {"int2_clip": 0.8}, {"coefficient": "unit"}, {"rounding": "bf16"}):
        assert dataclasses.replace(cfg, **change).codec != cfg.codec
    direct = preset("INT4 g=32", reference="direct")
    assert dataclasses.replace(direct, coefficient="unit", group_size=16, int2_clip=0.5).codec == direct.codec
