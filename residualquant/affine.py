"""The group-wise affine quantiser and its bytes (Sec. 2.1).

Per token and head, groups of ``g`` consecutive channels share an FP8 scale and an FP8 offset.  Nothing crosses tokens
or heads and every step is elementwise or a min/max, so a token's bytes do not depend on what it is batched with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residualquant.config import BITS, RAW_BITS

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # overflow is NaN in some FP8 casts and 448 in others, so everything is clamped before a cast

# Factor on the half-range of a group.  A 2-bit group has the configuration's int2_clip instead (0.9 by default).
CLIP = {1: 0.6, 3: 0.97, 4: 1.0, 8: 1.0}

_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}  # as many bytes as one byte has codes of 1, 2 or 4 bits


def quantize(x: Tensor, bits: int, group_size: int, int2_clip: float = 0.9) -> tuple[Tensor, Tensor]:
    """Codes, and the FP8 metadata they were computed from (Sec. 2.1).

    ::

        lo, hi = min, max of the group;  2 rad = (hi - lo) * clip
        offset = e4m3fn((lo + hi)/2 - rad);  scale = e4m3fn(2 rad / (2^b - 1))
        n = (x - offset) / (scale if scale > 0 else 1);  code = clamp(round n, a half down, 0, 2^b - 1)

    Codes come from the *stored* scale and offset: ideal ones would double the INT4 error.

    Args:
        x: [..., D] fp32, finite.
        bits: 1, 2, 3, 4 or 8.
        group_size: channels per group; divides D.
        int2_clip: clip of 2-bit groups.

    Returns:
        codes: [..., D] fp32, whole numbers from 0 to 2^b - 1.
        metadata: [..., D/g, 2] float8_e4m3fn, scale and offset.

    Raises:
        ValueError: other ``bits``, or a ``group_size`` that does not divide D.
    """
    if bits != 2 and bits not in CLIP:
        raise ValueError(f"bits must be one of 1, 2, 3, 4, 8, got {bits!r}")
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"group_size must divide {x.shape[-1]} channels, got {group_size!r}")
    return quantize_by(x, 2**bits - 1, int2_clip if bits == 2 else CLIP[bits], group_size)


def quantize_by(x: Tensor, levels: float | Tensor, clip: float | Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """:func:`quantize`, unchecked, by the largest code and the clip: numbers, or tensors that [..., D/g] broadcasts."""
    groups = x.unflatten(-1, (-1, group_size))
    lo, hi = groups.amin(-1), groups.amax(-1)
    width = (hi - lo) * clip
    # a tensor: by a scalar, a GPU multiplies with the rounded reciprocal
    steps = levels if isinstance(levels, Tensor) else width.new_full((1,), levels)
    metadata = torch.stack((width / steps, (lo + hi - width) / 2), -1)
    metadata += 0.0  # a zero has no sign in the bytes: the sign of min(-0, 0) depends on the order of the reduction
    metadata = metadata.clamp_(-FP8_MAX, FP8_MAX).to(FP8)

    scale, offset = metadata.float().split(1, -1)
    codes = (groups - offset).div_(torch.where(scale > 0, scale, 1.0))
    # ceil(n - 1/2) is floor(n) + [frac(n) > 1/2]: a half rounds down.
    codes = codes.sub_(0.5).ceil_().clamp_(min=0)
    codes = torch.minimum(codes, steps[..., None], out=codes)
    return codes.flatten(-2), metadata


def dequantize(codes: Tensor, metadata: Tensor) -> Tensor:
    """Values ``offset + scale * code`` (Sec. 2.1).  The product is exact in FP32, so fusing changes no bit.

    Args:
        codes: [..., D] whole numbers, uint8 or fp32.
        metadata: [..., D/g, 2] float8_e4m3fn.

    Returns:
        [..., D] fp32.
    """
    scale, offset = metadata.float().split(1, -1)
    groups = codes.float().unflatten(-1, (metadata.shape[-2], -1))
    return (scale * groups).add_(offset).flatten(-2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Bytes of the codes: code i sits at bits ``b (i mod 8/b)`` of byte ``i // (8/b)``.

    3-bit codes are a plane of their low 2 bits followed by a plane of their high bit.

    Args:
        codes: [..., D] whole numbers from 0 to 2^b - 1; D a multiple of 8.
        bits: 0, 1, 2, 3, 4 or 8.

    Returns:
        [..., D b / 8] uint8.

    Raises:
        ValueError: other ``bits``, codes that are no whole numbers of so many bits, or a D that is no multiple of 8.
    """
    _check_packable(bits)
    if codes.dim() == 0 or codes.shape[-1] % 8:
        raise ValueError(f"codes must be [..., D] with D a multiple of 8, got {list(codes.shape)}")
    if codes.dtype == torch.bool or codes.is_complex():
        raise ValueError(f"codes must be whole numbers, got {codes.dtype}")
    whole = codes.to(torch.int64)
    wrong = codes[(whole < 0) | (whole >= 2**bits) | (whole != codes)]
    if wrong.numel():
        raise ValueError(f"codes of {bits} bits must be whole numbers from 0 to {2**bits - 1}, got {wrong[0].item()}")
    return pack_valid_codes(codes, bits)


def pack_valid_codes(codes: Tensor, bits: int) -> Tensor:
    """:func:`pack_codes` without its checks, for the codes of :func:`quantize`: a check would wait for the GPU."""
    codes = codes.to(torch.uint8)
    if bits == 0:
        return codes[..., :0]
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat((pack_valid_codes(codes & 3, 2), pack_valid_codes(codes >> 2, 1)), -1)
    # The 8/b codes of one byte lie in the bytes of one word; shifts bring each to its place in the lowest byte.
    words = codes.contiguous().view(_WORDS[bits])
    packed = words
    for shift in range(8 - bits, words.element_size() * (8 - bits), 8 - bits):
        packed = packed | words >> shift
    return packed.to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """The codes that :func:`pack_codes` packed.

    Args:
        packed: [..., D b / 8] uint8.
        bits: 0, 1, 2, 3, 4 or 8.
        head_dim: D.

    Returns:
        [..., D] uint8; zeros for 0 bits.

    Raises:
        ValueError: other ``bits``, or another number or kind of bytes.
    """
    _check_packable(bits)
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed codes must be torch.uint8, got {packed.dtype}")
    if packed.shape[-1] != head_dim * bits // 8:
        raise ValueError(f"{head_dim} codes of {bits} bits take {head_dim * bits // 8} bytes, got {packed.shape[-1]}")
    if bits == 0:
        return packed.new_zeros(*packed.shape[:-1], head_dim)
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed.split((head_dim // 4, head_dim // 8), -1)
        return unpack_codes(low, 2, head_dim) | unpack_codes(high, 1, head_dim) << 2
    words = packed.to(_WORDS[bits])  # the inverse of pack_codes: spread one byte's codes over the bytes of a word
    spread = words
    for shift in range(8 - bits, words.element_size() * (8 - bits), 8 - bits):
        spread = spread | words << shift
    mask = int.from_bytes(bytes([2**bits - 1]) * words.element_size(), "little")
    return (spread & mask).view(torch.uint8)


def _check_packable(bits: int) -> None:
    if bits not in BITS or bits == RAW_BITS:
        raise ValueError(f"bits of packed codes must be one of 0, 1, 2, 3, 4, 8, got {bits!r}")
