"""The residual codec against a plain per-loop reading of Sec. 3.2, and the properties the cache relies on."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from residualquant import KVQuantConfig, decode, encode, preset
from residualquant import residual as residual_module
from residualquant.affine import dequantize, quantize
from residualquant.layout import stored_bytes
from residualquant.residual import coding_steps, concatenate, reconstruct
from residualquant.rotation import Rotation, rotation_for

REFERENCES = ("last", "first", "previous", "next", "direct")


def looped_states(tokens=9, heads=2, head_dim=128, loops=4, seed=0):
    """States that resemble each other across loops, as K and V do: [L, T, H, D] bf16."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, tokens, heads, head_dim, generator=generator) * 2
    return (common + torch.randn(loops, tokens, heads, head_dim, generator=generator)).bfloat16()


def random_rotation(head_dim, heads, loops=4):
    generator = torch.Generator().manual_seed(head_dim)
    matrix = torch.linalg.qr(torch.randn(heads, head_dim, head_dim, generator=generator)).Q
    return Rotation(matrix, torch.randn(loops, heads, head_dim, generator=generator))


def reconstruct_reference(x, cfg, rotation):
    """Zhat, codes and alpha of every loop, one loop after the other (Sec. 3.2)."""
    z = x.float() if rotation is None else rotation.rotate(x)

    def rounded(value):
        return value.bfloat16().float() if cfg.rounding == "bf16" else value

    def mean(loop):
        return rotation.means[loop] if rotation is not None and rotation.means is not None else torch.zeros(())

    order = {"last": [3, 0, 1, 2], "next": [3, 2, 1, 0], "direct": [0, 1, 2, 3]}.get(cfg.reference, [0, 1, 2, 3])
    zhat, codes, alphas = {}, {}, {}
    for loop in order:
        if cfg.bits[loop] == 16:
            zhat[loop] = z[loop]
            continue
        parent = {"last": 3, "first": 0, "previous": loop - 1, "next": loop + 1}.get(cfg.reference)
        alone = cfg.reference == "direct" or loop == order[0]
        prediction = torch.zeros(())
        if not alone:
            r = zhat[parent]
            alphas[loop] = {
                "unit": torch.ones(()),
                "ls": (z[loop].double() * r).sum(-1, keepdim=True) / r.double().square().sum(-1, keepdim=True),
                "norm_ratio": z[loop].double().norm(dim=-1, keepdim=True) / r.double().norm(dim=-1, keepdim=True),
            }[cfg.coefficient].bfloat16()
            prediction = rounded(alphas[loop].float() * r)
        value = torch.zeros(())
        if cfg.bits[loop]:
            target = z[loop] if alone else rounded(z[loop] - prediction)
            codes[loop], metadata = quantize(target - mean(loop), cfg.bits[loop], cfg.group_sizes[loop], cfg.int2_clip)
            value = dequantize(codes[loop], metadata)
        zhat[loop] = rounded(prediction + value + mean(loop))
    return torch.stack([zhat[loop] for loop in range(4)]), codes, alphas


def check_against_reference(x, cfg, rotation=None):
    packed = encode(x, cfg, rotation)
    expected, codes, alphas = reconstruct_reference(x, cfg, packed.rotation)
    assert torch.equal(decode(packed, "rotated"), expected)
    assert torch.equal(reconstruct(x, cfg, rotation), expected)
    for loop in range(4):
        if loop in codes:
            assert torch.equal(packed.unpacked_codes(loop).float(), codes[loop])
        assert (packed.loops[loop].alpha.shape[-1] == 1) == (loop in alphas and cfg.coefficient != "unit")
        if packed.loops[loop].alpha.numel():
            assert torch.equal(packed.loops[loop].alpha, alphas[loop])


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("coefficient", ["ls", "norm_ratio", "unit"])
@pytest.mark.parametrize("label", ["INT2 g=32", "INT2 g=16", "INT2/4 g=32", "INT2/4 g=16", "INT4 g=32"])
def test_every_policy_coefficient_and_precision(reference, coefficient, label):
    cfg = preset(label, reference=reference, coefficient=coefficient)
    check_against_reference(looped_states(), cfg)
    check_against_reference(looped_states(), dataclasses.replace(cfg, rounding="bf16"))
    check_against_reference(looped_states(head_dim=96), dataclasses.replace(cfg, rotation="hadamard"))


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("bits", [(3, 2, 1, 4), (8, 1, 3, 2), (4, 0, 2, 4), (2, 16, 0, 2), (16, 4, 2, 16), (16,) * 4])
def test_any_bits_per_loop(reference, bits):
    if any(b == 0 for b in bits) and reference == "direct":
        bits = tuple(b or 1 for b in bits)
    cfg = KVQuantConfig(bits=bits, reference=reference, group_size=16)
    check_against_reference(looped_states(head_dim=64), cfg)
    check_against_reference(looped_states(head_dim=64), dataclasses.replace(cfg, rotation="hadamard"))


@pytest.mark.parametrize("reference", REFERENCES)
def test_rotations_per_head_with_means(reference):
    cfg = preset("INT2/4 g=32", reference=reference, rotation="optr_h")
    check_against_reference(looped_states(head_dim=64), cfg, random_rotation(64, 2))


def test_steps_code_references_first_and_merge_equal_loops():
    def loops(cfg):
        return [list(step.loops) for step in coding_steps(cfg)]

    assert loops(preset("INT2/4 g=32")) == [[3], [0, 1, 2]]
    assert loops(preset("INT2/4 g=32", reference="first")) == [[0], [1, 2, 3]]
    assert loops(preset("INT2 g=32", reference="direct")) == [[0, 1, 2, 3]]
    assert loops(preset("INT2 g=32", reference="previous")) == [[0], [1], [2], [3]]
    assert loops(preset("INT2 g=32", reference="next")) == [[3], [2], [1], [0]]
    assert loops(KVQuantConfig(bits=(2, 1, 2, 4))) == [[3], [0], [1], [2]]
    assert loops(KVQuantConfig(bits=(2, 16, 4, 2), reference="previous")) == [[0], [1], [2], [3]]


ALL_PRESETS = [preset(label) for label in ("BF16", "INT2 g=32", "INT2 g=16", "INT2/4 g=32", "INT2/4 g=16", "INT4 g=32")]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("loops", [2, 4, 8])
def test_nbytes_is_the_storage_arithmetic(head_dim, loops):
    tokens, heads = 5, 3
    x = looped_states(tokens, heads, head_dim, loops)
    overrides = itertools.product(REFERENCES, ("ls", "unit"), ("none", "hadamard"))
    for (reference, coefficient, rotation), base in itertools.product(overrides, ALL_PRESETS):
        fields = {"reference": reference, "coefficient": coefficient, "rotation": rotation}
        cfg = preset(base.label, loops=loops, **fields)
        packed = encode(x, cfg)
        assert packed.nbytes == tokens * heads * stored_bytes(cfg, head_dim)
        assert 8 * packed.nbytes == pytest.approx(cfg.effective_bits(head_dim) * x.numel(), rel=1e-12)
    cfg = KVQuantConfig(bits=(3, 1, 0, 8, 16, 2)[:loops] + (4,) * max(0, loops - 6))
    assert encode(x, cfg).nbytes == tokens * heads * stored_bytes(cfg, head_dim)


def test_zero_bits_store_only_alpha():
    packed = encode(looped_states(), KVQuantConfig(bits=(0, 0, 0, 4)))
    assert [[part.shape[-1] for part in loop.tensors] for loop in packed.loops] == [[0, 0, 1]] * 3 + [[64, 8, 0]]
    rebuilt = decode(packed)
    assert torch.equal(rebuilt[0], packed.loops[0].alpha.float() * rebuilt[3])
    with pytest.raises(ValueError, match="loop 0 has no codes"):
        packed.unpacked_codes(0)
    with pytest.raises(ValueError, match="loop 4 has no codes"):
        packed.unpacked_codes(4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_sixteen_bits_are_raw(dtype, rotation):
    x = looped_states().to(dtype)
    x[0] *= 0.37
    packed = encode(x, preset("BF16", rotation=rotation))
    assert torch.equal(decode(packed), x.float())
    assert all(torch.equal(packed.loops[loop].codes, x[loop]) for loop in range(4))
    assert packed.loops[0].codes.dtype == dtype
    mixed = encode(x, KVQuantConfig(bits=(2, 2, 16, 16), rotation=rotation))
    assert torch.equal(decode(mixed)[2:], x[2:].float())


def test_sixteen_bits_of_fp32_are_bf16():
    x = torch.randn(4, 3, 64)
    assert torch.equal(decode(encode(x, preset("BF16"))), x.bfloat16().float())


def same_bytes(a, b):
    """Equal to the last bit; the view tells the signs of zeros apart."""
    return all(
        torch.equal(s.contiguous().view(torch.uint8), t.contiguous().view(torch.uint8))
        for p, q in zip(a.loops, b.loops)
        for s, t in zip(p.tensors, q.tensors)
    )


CONFIGS = st.builds(
    preset,
    st.sampled_from(["INT2 g=32", "INT2 g=16", "INT2/4 g=16", "INT4 g=32"]),
    reference=st.sampled_from(REFERENCES),
    coefficient=st.sampled_from(["ls", "norm_ratio", "unit"]),
    rotation=st.sampled_from(["none", "hadamard", "optr_h"]),
)


@settings(deadline=None, max_examples=60)
@given(CONFIGS, st.sampled_from([64, 96, 128]), st.integers(1, 3), st.integers(1, 70), st.data())
def test_chunked_whole_and_single_writes_agree(cfg, head_dim, heads, tokens, data):
    """Byte for byte, in FP32 and BF16, with zeros of both signs, and with blocks of any size."""
    x = looped_states(tokens, heads, head_dim, seed=tokens)
    if data.draw(st.booleans()):
        x = x.float() * 0.731
    x[:, :: data.draw(st.integers(2, 5)), :, : head_dim // 2] = -0.0
    rotation = random_rotation(head_dim, heads) if cfg.rotation == "optr_h" else None
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens), max_size=4)) | {0, tokens})
    whole = encode(x, cfg, rotation)
    chunked = [encode(x[:, a:b], cfg, rotation) for a, b in itertools.pairwise(cuts)]
    single = [encode(x[:, t : t + 1], cfg, rotation) for t in range(tokens)]
    assert same_bytes(whole, concatenate(chunked, 0))
    assert same_bytes(whole, concatenate(single, 0))
    batched = encode(x.unsqueeze(1).expand(-1, 2, -1, -1, -1), cfg, rotation)
    assert same_bytes(whole, batched.map(lambda stored: stored[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual_module, "CPU_BLOCK_VALUES", data.draw(st.integers(1, 20_000)))
        assert same_bytes(whole, encode(x, cfg, rotation))
        assert torch.equal(decode(whole, "rotated"), reconstruct(x, cfg, rotation))


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
@pytest.mark.parametrize("threads", [1, 2])
def test_long_writes_agree_with_short_ones(rotation, threads):
    """Past the block size and the sizes at which torch and its matrix kernels change strategy."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cfg, x = preset("INT2/4 g=32", rotation=rotation), looped_states(tokens=901)
        whole = encode(x, cfg)
        for start, length in ((0, 1), (899, 2), (517, 31), (100, 700), (200, 701)):
            part = slice(start, start + length)
            assert same_bytes(encode(x[:, part], cfg), whole.map(lambda stored, part=part: stored[part]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("space", ["original", "rotated"])
def test_decode_spaces(space):
    cfg = preset("INT4 g=32", rotation="hadamard")
    x = looped_states()
    expected = x.float() if space == "original" else rotation_for(cfg, 128).rotate(x)
    assert (decode(encode(x, cfg), space) - expected).square().mean() < 0.01 * expected.square().mean()
    with pytest.raises(ValueError, match="'other'"):
        decode(encode(x, cfg), "other")


def test_shapes_without_heads_or_tokens():
    cfg = preset("INT2/4 g=32", rotation="hadamard")
    x = looped_states()
    flat = encode(x[:, :, 0], cfg)
    assert same_bytes(flat, encode(x, cfg).map(lambda stored: stored[:, 0]))
    assert decode(encode(x[:, 0, 0], cfg)).shape == (4, 128)
    empty = encode(x[:, :0], cfg)
    assert empty.nbytes == 0 and decode(empty).shape == (4, 0, 2, 128)
    assert reconstruct(x[:, :0], cfg).shape == (4, 0, 2, 128)
    views = x.transpose(1, 2)
    assert same_bytes(encode(views, cfg), encode(x, cfg).map(lambda stored: stored.transpose(0, 1)))


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
@pytest.mark.parametrize("label", ["BF16", "INT2 g=32", "INT2/4 g=16"])
def test_non_finite_values_are_counted_and_stay_with_their_token(rotation, label):
    cfg, x = preset(label, rotation=rotation), looped_states()
    bad = x.clone()
    bad[0, 2, 0, 5], bad[1, 2, 0, 6], bad[3, 2, 1, 7], bad[3, 4, 1] = float("nan"), float("inf"), -float("inf"), 1e30
    packed = encode(bad, cfg)
    assert packed.sanitised.item() == 3 + 128 and encode(x, cfg).sanitised.item() == 0
    rebuilt = decode(packed)
    assert rebuilt.isfinite().all()
    assert torch.equal(decode(packed, "rotated"), reconstruct(bad, cfg))
    others = [t for t in range(9) if t not in (2, 4)]
    assert torch.equal(rebuilt[:, others], decode(encode(x, cfg))[:, others])
    clamped = bad.float().nan_to_num(nan=0.0).clamp(-65504, 65504)
    assert same_bytes(packed, encode(clamped, cfg))


@pytest.mark.parametrize("coefficient", ["ls", "norm_ratio"])
def test_coefficient_is_zero_where_the_reference_has_no_energy(coefficient):
    """A reference of zero energy, or of one below the smallest normal FP32 number."""
    cfg = preset("INT2/4 g=32", coefficient=coefficient)
    x = looped_states()
    x[3, 0] = 0
    x[3, 1] = -0.0
    packed = encode(x, cfg)
    assert not any(loop.alpha[:2].view(torch.uint8).any() for loop in packed.loops[:3])
    assert decode(packed).isfinite().all()
    tiny = KVQuantConfig(bits=(2, 2, 2, 16), coefficient=coefficient)
    x = torch.ones(4, 1, 64)
    x[3] = 1e-21
    assert not encode(x, tiny).loops[0].alpha.any()
    x[3] = 1e-15
    assert encode(x, tiny).loops[0].alpha.all()


def test_least_squares_is_the_best_coefficient():
    x = looped_states()
    cfg = KVQuantConfig(bits=(0, 0, 0, 16))
    rebuilt = decode(encode(x, cfg))[:3]
    errors = [((scale * rebuilt) - x[:3]).square().mean() for scale in (0.98, 1.0, 1.02)]
    assert errors[1] < errors[0] and errors[1] < errors[2]


def test_map_changes_every_part():
    packed = encode(looped_states(), preset("INT2/4 g=32"))
    order = torch.tensor([3, 0, 8])
    moved = packed.map(lambda stored: stored.index_select(0, order))
    assert torch.equal(decode(moved), decode(packed)[:, order])
    assert moved.nbytes * 3 == packed.nbytes


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 2, 64), r"\[4, ..., D\] for bits \(2, 2, 2, 4\), got \[3, 2, 64\]"),
        (torch.zeros(4), r"got \[4\]"),
        (torch.zeros(4, 2, 80), "head_dim 80 is not divisible by the group size 32 of loop 0"),
        (torch.zeros(4, 2, 64, dtype=torch.long), "torch.int64"),
    ],
)
def test_wrong_input_is_named(x, message):
    for function in (encode, reconstruct):
        with pytest.raises(ValueError, match=message):
            function(x, preset("INT2/4 g=32"))


@pytest.mark.gpu
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("rotation", ["none", "hadamard", "optr_h"])
def test_gpu_writes_the_same_bytes(reference, rotation):
    x = looped_states(tokens=700)
    bases = random_rotation(128, 2) if rotation == "optr_h" else None
    on_gpu = None if bases is None else Rotation(bases.matrix.cuda(), bases.means.cuda())
    for label in ("BF16", "INT2 g=32", "INT2/4 g=16", "INT4 g=32"):
        for coefficient in ("ls", "norm_ratio", "unit"):
            cfg = preset(label, reference=reference, rotation=rotation, coefficient=coefficient)
            packed = encode(x.cuda(), cfg, on_gpu)
            assert same_bytes(packed.map(Tensor.cpu), encode(x, cfg, bases))
            assert torch.equal(decode(packed, "rotated"), reconstruct(x.cuda(), cfg, on_gpu))
