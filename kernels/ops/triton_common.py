"""What the Triton kernels share: where words of a page lie, what they stand for, a token rebuilt (Sec. 3.2)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from residualquant.kernels.pack_kv_cuda import coding_plan
from residualquant.layout import PageLayout, loops_read


def check_device(device: torch.device) -> None:
    """Raises ValueError for a device that is no GPU, unless Triton interprets."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"the Triton kernels need tensors on a CUDA device, got {device}")


def chain(layout: PageLayout, loop: int) -> dict[str, object]:
    """CHAIN: for each loop from the anchor to ``loop``, it, its bits, group size, and the first word of its codes,
    metadata and alpha, counted from the start of K or V; ALPHA: whether coefficients are stored."""
    plan = {entry[0]: entry for entry in coding_plan(layout)}
    read = tuple((*plan[stored][:3], *plan[stored][5:]) for stored in reversed(loops_read(layout.config, loop)))
    return {"CHAIN": read, "ALPHA": layout.config.coefficient != "unit"}


@triton.jit
def word_offsets(t, word, interleaved, TOKEN: tl.constexpr):
    """Where word ``word`` of token ``t`` of a page lies in a plane of TOKEN words per token."""
    odd = tl.where(interleaved > 0, 1, TOKEN)
    return t // 2 * (2 * TOKEN) + t % 2 * odd + word * (1 + interleaved)


@triton.jit
def round_bf16(x):
    """BF16 bits of finite x, to nearest even, and their value."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits >> 16, bits.to(tl.float32, bitcast=True)


@triton.jit
def times_matrix(x, matrix, D: tl.constexpr, TRANSPOSED: tl.constexpr):
    """x T or x T^T of rows [M, W]: FP16 products summed in FP32.

    W of 256 goes by quarters of the columns: the whole matrix would not fit an older GPU's shared memory.
    """
    x = x.to(tl.float16)
    W: tl.constexpr = x.shape[1]
    if W <= 128:
        z = _times_columns(x, matrix, 0, W, D, TRANSPOSED)
    else:
        Q: tl.constexpr = W // 4
        left = _beside(_times_columns(x, matrix, 0, Q, D, TRANSPOSED), _times_columns(x, matrix, Q, Q, D, TRANSPOSED))
        right = _beside(
            _times_columns(x, matrix, 2 * Q, Q, D, TRANSPOSED), _times_columns(x, matrix, 3 * Q, Q, D, TRANSPOSED)
        )
        z = _beside(left, right)
    return z


@triton.jit
def _times_columns(x, matrix, BEGIN: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, TRANSPOSED: tl.constexpr):
    """COUNT columns of the product, from BEGIN."""
    row = tl.arange(0, x.shape[1])
    column = BEGIN + tl.arange(0, COUNT)
    if TRANSPOSED:
        inside = (column < D)[:, None] & (row < D)[None, :]
        factor = tl.trans(tl.load(matrix + column[:, None] * D + row[None, :], mask=inside, other=0.0))
    else:
        inside = (row < D)[:, None] & (column < D)[None, :]
        factor = tl.load(matrix + row[:, None] * D + column[None, :], mask=inside, other=0.0)
    return tl.dot(x, factor)


@triton.jit
def _beside(a, b):
    """[M, N] and [M, N] as [M, 2 N], a's columns first."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def rebuild(
    page, t, inside, means, head, INTERLEAVED: tl.constexpr,
    CHAIN: tl.constexpr, ALPHA: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Zhat of tokens t of their pages, [N, W] fp32; 0 (or the means) for those not inside.

    ``page`` points to the first 16-bit word of K or V of each token's page; CHAIN and ALPHA are those of :func:`chain`.
    """
    z = tl.zeros([t.shape[0], W], tl.float32)
    for i in tl.static_range(len(CHAIN)):
        if i > 0 and ALPHA:
            alpha = _load_words(page, t, inside, 0, CHAIN[i][5], 1, 0, 1)
            z *= (alpha << 16).to(tl.float32, bitcast=True)
        if CHAIN[i][1] > 0:
            codes = _load_codes(page, t, inside, INTERLEAVED, CHAIN[i][3], CHAIN[i][1], D, W)
            z += _dequantize(page, t, inside, codes, CHAIN[i][4], CHAIN[i][2], D)
        if means is not None:
            channel = tl.arange(0, W)
            mean = means + (CHAIN[i][0] * tl.num_programs(1) + head) * D + channel
            z += tl.load(mean, mask=channel < D, other=0.0)[None, :]
    return z


@triton.jit
def _dequantize(page, t, inside, codes, FIRST: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """``offset + scale * code`` of codes [N, W], by the metadata plane from word FIRST (Sec. 2.1)."""
    N: tl.constexpr = codes.shape[0]
    W: tl.constexpr = codes.shape[1]
    metadata = _load_words(page, t, inside, 0, FIRST, D // G, 0, W // G)
    scale = e4m3_value(metadata & 0xFF)[:, :, None]
    offset = e4m3_value(metadata >> 8)[:, :, None]
    return tl.reshape(offset + scale * tl.reshape(codes.to(tl.float32), [N, W // G, G]), [N, W])


@triton.jit
def e4m3_value(code):
    """The value of FP8 e4m3fn bits: those of an FP16 number 2^8 times smaller, shifted by its three mantissa bits."""
    half = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _load_codes(
    page, t, inside, interleaved: tl.constexpr,
    FIRST: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Codes of BITS bits of tokens t of their pages, [N, W] int32."""
    if BITS == 3:
        low = _load_words(page, t, inside, interleaved, FIRST, 3 * D // 16, 0, W // 8)
        high = _load_words(page, t, inside, interleaved, FIRST, 3 * D // 16, D // 8, W // 16)
        codes = _unpack(low, 2) | (_unpack(high, 1) << 2)
    else:
        codes = _unpack(_load_words(page, t, inside, interleaved, FIRST, BITS * D // 16, 0, BITS * W // 16), BITS)
    return codes


@triton.jit
def _unpack(words, BITS: tl.constexpr):
    """The inverse of the writer's packing: [N, W b / 16] words to codes [N, W]."""
    PER_WORD: tl.constexpr = 16 // BITS
    parts = words[:, :, None] >> (tl.arange(0, PER_WORD) * BITS)[None, None, :]
    return tl.reshape(parts & (2**BITS - 1), [words.shape[0], words.shape[1] * PER_WORD])


@triton.jit
def _load_words(
    page, t, inside, interleaved: tl.constexpr,
    FIRST: tl.constexpr, TOKEN: tl.constexpr, BEGIN: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """COUNT words from BEGIN of each token, of TOKEN words, in the plane from word FIRST: [N, COUNT] int32, unsigned.

    Words past the token's last belong to channels that are padding: they are read as 0.
    """
    word = BEGIN + tl.arange(0, COUNT)
    at = page[:, None] + FIRST + word_offsets(t[:, None], word[None, :], interleaved, TOKEN)
    return tl.load(at, mask=inside[:, None] & (word < TOKEN)[None, :], other=0).to(tl.int32) & 0xFFFF
