"""The group quantiser: its formula spelt out again in scalars, its edges, and its bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residualquant.affine import CLIP, FP8, dequantize, pack_codes, quantize, unpack_codes

ALL_BITS = (1, 2, 3, 4, 8)


def e4m3(value: float) -> float:
    return torch.tensor(value).clamp(-448, 448).to(FP8).item()


def quantize_reference(group: torch.Tensor, bits: int, clip: float) -> tuple[list[int], float, float]:
    """One group by the formula of Sec. 2.1, fp32 operations one by one."""
    lo, hi, half = group.min(), group.max(), torch.tensor(2.0)
    centre, radius = (lo + hi) / half, (hi - lo) / half * torch.tensor(clip)
    offset = e4m3((centre - radius).item())
    scale = e4m3((half * radius / (2**bits - 1)).item())
    codes = []
    for value in group:
        n = ((value - torch.tensor(offset)) / torch.tensor(scale if scale > 0 else 1.0)).item()
        code = math.floor(n) + (n - math.floor(n) > 0.5)
        codes.append(min(max(code, 0), 2**bits - 1))
    return codes, scale, offset


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("group_size", [16, 32, 64])
@pytest.mark.parametrize("spread", [1e-4, 0.3, 20.0, 3000.0])
def test_quantize_is_the_formula(bits, group_size, spread):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(bits)) * spread + spread / 2
    codes, metadata = quantize(x, bits, group_size)
    values = dequantize(codes, metadata)
    assert metadata.shape == (3, 64 // group_size, 2)
    clip = 0.9 if bits == 2 else CLIP[bits]
    for row in range(3):
        for j, group in enumerate(x[row].split(group_size)):
            expected, scale, offset = quantize_reference(group, bits, clip)
            part = slice(j * group_size, (j + 1) * group_size)
            assert codes[row, part].tolist() == expected
            assert metadata[row, j].float().tolist() == [scale, offset]
            assert values[row, part].tolist() == [offset + scale * code for code in expected]


def test_clip_of_two_bits_is_a_parameter():
    x = torch.randn(8, 64)
    for clip in (0.7, 1.0):
        for row, group in enumerate(x[:, :32]):
            assert quantize(x, 2, 32, clip)[0][row, :32].tolist() == quantize_reference(group, 2, clip)[0]


def test_a_half_rounds_down():
    # lo 0 and hi 15 give offset 0 and scale 1 at 4 bits, so values are their own n.
    x = torch.tensor([0.0, 15.0, 0.5, 1.5, 2.5, 2.5000002, 0.50000006, 14.5] + [0.0] * 8)
    assert quantize(x, 4, 16)[0][:8].tolist() == [0, 15, 0, 1, 2, 3, 1, 14]


def test_codes_come_from_the_stored_metadata():
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0)) * 3 + 1
    codes, metadata = quantize(x, 4, 32)
    lo, hi = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    ideal = ((x - lo) / ((hi - lo) / 15)).round().clamp(0, 15)
    error = (dequantize(codes, metadata) - x).square().mean()
    assert (dequantize(ideal, metadata) - x).square().mean() > 1.8 * error


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.3, -7.3, 400.0])
def test_zero_range(bits, value):
    codes, metadata = quantize(torch.full((2, 32), value), bits, 32)
    scale, offset = metadata.float().unbind(-1)
    assert not scale.any() and not torch.signbit(scale).any()
    assert torch.equal(offset, torch.full((2, 1), e4m3(value)))
    assert torch.equal(dequantize(codes, metadata), torch.full((2, 32), e4m3(value)))
    expected = min(max(math.ceil(torch.tensor(value).item() - e4m3(value) - 0.5), 0), 2**bits - 1)
    assert codes.unique().tolist() == [expected]


def test_a_zero_has_no_sign():
    zeros = torch.zeros(4, 32)
    zeros[1::2] = -0.0
    zeros[2, ::2] = -0.0
    assert not quantize(zeros, 2, 16)[1].view(torch.uint8).any()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_metadata_is_clamped_before_the_cast(bits):
    for x in (torch.tensor([-65504.0, 65504.0] * 16), torch.full((32,), 65504.0), torch.full((32,), -65504.0)):
        codes, metadata = quantize(x, bits, 32)
        assert metadata.float().isfinite().all() and metadata.float().abs().max() <= 448
        assert dequantize(codes, metadata).isfinite().all()


@pytest.mark.parametrize("bits", (0, 1, 2, 3, 4, 8))
@pytest.mark.parametrize(
    ("head_dim", "group_size"), [(d, g) for d in (64, 96, 128, 256) for g in (16, 32, 64) if d % g == 0]
)
def test_pack_and_unpack_are_inverse(bits, head_dim, group_size):
    if bits:
        codes = quantize(torch.randn(5, 3, head_dim), bits, group_size)[0].to(torch.uint8)
    else:
        codes = torch.zeros(5, 3, head_dim, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, 3, head_dim * bits // 8)
    assert torch.equal(unpack_codes(packed, bits, head_dim), codes)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from((1, 2, 3, 4, 8)), st.data())
def test_byte_order(bits, data):
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=16, max_size=16))
    packed = pack_codes(torch.tensor(codes), bits).tolist()

    def plane(values, width):
        per_byte = 8 // width
        out = [0] * (len(values) // per_byte)
        for i, value in enumerate(values):
            out[i // per_byte] |= value << width * (i % per_byte)
        return out

    if bits == 3:
        assert packed == plane([code & 3 for code in codes], 2) + plane([code >> 2 for code in codes], 1)
    else:
        assert packed == plane(codes, bits)


def test_wrong_arguments():
    x = torch.zeros(2, 64)
    for bits in (0, 5, 16):
        with pytest.raises(ValueError, match=f"got {bits}"):
            quantize(x, bits, 32)
    for group_size in (0, 48):
        with pytest.raises(ValueError, match=f"got {group_size}"):
            quantize(x, 2, group_size)
    with pytest.raises(ValueError, match="got 16"):
        pack_codes(x, 16)
    with pytest.raises(ValueError, match=r"must be torch\.uint8, got torch\.int32"):
        unpack_codes(torch.zeros(16, dtype=torch.int32), 2, 64)
    with pytest.raises(ValueError, match="take 16 bytes, got 15"):
        unpack_codes(torch.zeros(15, dtype=torch.uint8), 2, 64)


@pytest.mark.parametrize(
    ("codes", "bits", "message"),
    [
        (torch.full((8,), 4), 2, "codes of 2 bits must be whole numbers from 0 to 3, got 4"),
        (torch.full((8,), -1), 4, "from 0 to 15, got -1"),
        (torch.full((8,), 0.5), 8, "from 0 to 255, got 0.5"),
        (torch.full((8,), float("nan")), 4, "got nan"),
        (torch.full((8,), float("inf")), 4, "got inf"),
        (torch.ones(8), 0, "from 0 to 0, got 1.0"),
        (torch.ones(8, dtype=torch.bool), 1, "whole numbers, got torch.bool"),
        (torch.zeros(2, 12), 2, r"a multiple of 8, got \[2, 12\]"),
        (torch.zeros(()), 2, r"got \[\]"),
    ],
)
def test_what_is_no_code_is_not_packed(codes, bits, message):
    with pytest.raises(ValueError, match=message):
        pack_codes(codes, bits)
