"""What the Triton kernels share: where words of a page lie, what they stand for, a token rebuilt (Sec. 3.2)."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from residualquant.kernels.pack_kv_cuda import coding_plan
from residualquant.layout import PageLayout, loops_read


def check_device(device: torch.device) -> None:
    """Raises ValueError for a device that is no GPU, unless Triton interprets."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(f"the Triton kernels need tensors on a CUDA device, got {device}")


@lru_cache(maxsize=256)
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


# An argument of the kernels: were it a constant, to mask a code and to put it in place would be two instructions.
MAGIC = 0x64006400


@triton.jit
def octet_order(place):
    """The channel at a place of what :func:`rebuild` returns: the halves of an octet take turns, 0 4 1 5 2 6 3 7."""
    return place // 8 * 8 + place % 8 // 2 + place % 2 * 4


@triton.jit
def natural_order(x):
    """[M, W] in ``octet_order`` with its channels in their own order."""
    octets = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
    return tl.reshape(tl.permute(octets, (0, 1, 3, 2)), x.shape)


@triton.jit
def rebuild(
    page, t, means, magic, INTERLEAVED: tl.constexpr, CHAIN: tl.constexpr, ALPHA: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Zhat of tokens t of their pages without the last loop's mean, [N, W] of dtype, channels in ``octet_order``.

    A thread has whole octets of channels, and two channels of an octet lie in the halves of a word from the codes to
    the end: in FP16 they are worked on together, and nothing moves between threads.

    Args:
        page: of each token, the first 16-bit word of K or V, at a multiple of 16 bytes.
        t: tokens of their pages.
        means: those of :func:`earlier_means`, or ().
        magic: MAGIC.
        CHAIN, ALPHA: those of :func:`chain`.
    """
    weight = tl.full(t.shape, 1.0, tl.float32)
    base = tl.zeros([t.shape[0], W // 8], tl.float32)
    weights, scales = (), ()  # of the last loop first
    for i in tl.static_range(len(CHAIN) - 1, -1, -1):
        scale, offset = _metadata(page + CHAIN[i][4], t, CHAIN[i][2], D, W)
        base += weight[:, None] * (offset + scale * (6 if CHAIN[i][1] == 3 else 2 ** CHAIN[i][1] // 2))
        weights += (weight,)
        scales += (_narrow(weight[:, None] * scale, len(CHAIN), CHAIN[i][1], dtype)[:, :, None],)
        if i > 0 and ALPHA:
            weight *= (tl.load(page + CHAIN[i][5] + t).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    factors, codes = (), ()
    for i in tl.static_range(len(CHAIN)):
        if CHAIN[i][1] == 3:  # a plane of the low two bits, then one of the high bit, of the same token
            low = _load_pairs(page + CHAIN[i][3], t, INTERLEAVED, 3 * D // 16, 2, D, W)
            high = _load_pairs(page + CHAIN[i][3], t, INTERLEAVED, 3 * D // 16, 1, D, W)
            factors += (scales[-1 - i], scales[-1 - i] * 4.0)
            codes += (low, high)
        elif CHAIN[i][1] > 0:
            pairs = _load_pairs(page + CHAIN[i][3], t, INTERLEAVED, CHAIN[i][1] * D // 16, CHAIN[i][1], D, W)
            factors += (scales[-1 - i],)
            codes += (pairs,)
    base = tl.broadcast_to(_narrow(base, len(CHAIN), 0, dtype)[:, :, None], [t.shape[0], W // 8, 2])
    BITS: tl.constexpr = _bits_of_planes(CHAIN)
    z = ()
    for i in tl.static_range(4):
        z += (_sum(base, factors, codes, magic, i, BITS),)
    z = tl.permute(tl.join(tl.join(z[0], z[2]), tl.join(z[1], z[3])), (0, 1, 3, 4, 2))
    z = tl.reshape(z, [t.shape[0], W])
    for i in tl.static_range(len(means)):
        z = tl.fma(weights[-1 - i].to(dtype)[:, None], means[i][None, :], z)
    return z


@triton.jit
def earlier_means(means, head, CHAIN: tl.constexpr, D: tl.constexpr, W: tl.constexpr, dtype: tl.constexpr):
    """What :func:`rebuild` takes of ``means`` [loops, heads, D] or none: those of each loop but the last, [W] of dtype
    in ``octet_order``; to be loaded once for all tiles."""
    found = ()
    if means is not None:
        channel = octet_order(tl.arange(0, W))
        for i in tl.static_range(len(CHAIN) - 1):
            found += (load_mean(means, CHAIN[i][0], head, channel, D).to(dtype),)
    return found


@triton.jit
def load_mean(means, loop, head, channel, D: tl.constexpr):
    """The means of channels of a loop and head, 0 for channels from D on."""
    return tl.load(means + (loop * tl.num_programs(1) + head) * D + channel, mask=channel < D, other=0.0)


@triton.jit
def _metadata(plane, t, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Scales and offsets (Sec. 2.1) of every octet, [N, W / 8] fp32; 0 where there are none.

    The bits of an e4m3 number, shifted by 20, are those of an FP32 number 2^120 times smaller.  No scale is negative.
    """
    if G > 0:
        group = tl.arange(0, W // G)[None, :]
        word = _load(plane[:, None] + t[:, None] * (D // G) + group, group * G, D, W).to(tl.uint16, bitcast=True)
        word = word.to(tl.int32)
        scale = ((word << 20) & 0x7F00000).to(tl.float32, bitcast=True)
        offset = (((word << 12) & 0x7F00000) | ((word << 16) & -0x80000000)).to(tl.float32, bitcast=True)
        scale, offset = _per_octet(scale * 2.0**120, G), _per_octet(offset * 2.0**120, G)
    else:
        scale = tl.zeros([t.shape[0], W // 8], tl.float32)
        offset = scale
    return scale, offset


@triton.jit
def _per_octet(x, G: tl.constexpr):
    """A column for each group of G channels as one for each octet."""
    x = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], G // 8])
    return tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]])


@triton.jit
def _narrow(x, PARTS: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """x as dtype; in FP16 so bounded that PARTS of x times a code and one of x alone have a finite sum."""
    if dtype == tl.float16:
        LIMIT: tl.constexpr = 65504.0 / (PARTS + 1) / 2**BITS
        x = tl.clamp(x, -LIMIT, LIMIT)
    return x.to(dtype)


@triton.jit
def _load(at, channel, D: tl.constexpr, W: tl.constexpr):
    """What belongs to channels; 0 for those from D on, which are padding."""
    return tl.load(at, mask=channel < D, other=0) if W > D else tl.load(at)


@triton.jit
def _load_pairs(
    plane, t, INTERLEAVED: tl.constexpr, TOKEN: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, W: tl.constexpr
):
    """Codes of BITS bits of every octet, [N, W / 8] int32: channels 0 to 3 in the low half, 4 to 7 in the high one.

    Codes of 8 bits take two of these, for two channels of each half.  Of 3-bit codes, BITS are those of one plane.
    """
    octet = tl.arange(0, W // 8)[None, :]
    plane, t = plane[:, None], t[:, None]
    if BITS == 1:  # half a word, of the token's last ones
        at = word_offsets(t, TOKEN - D // 16 + octet // 2, INTERLEAVED, TOKEN)
        byte = _load(plane + at, octet * 8, D, W).to(tl.int32) >> octet % 2 * 8
        pairs = (_pair(byte, byte >> 4),)
    else:
        STEP: tl.constexpr = 1 + INTERLEAVED  # from one word of a token to the next
        WORDS: tl.constexpr = min(BITS // 2 * STEP, 4)  # at once, those of the other token of its pair among them
        LOADS: tl.constexpr = BITS // 2 * STEP // WORDS
        at = (plane + (t >> INTERLEAVED) * (STEP * TOKEN)).to(_pointer_to(WORDS), bitcast=True) + octet * LOADS
        words = ()
        for i in tl.static_range(LOADS):
            read = _load(at + i, octet * 8, D, W)
            for j in tl.static_range(0, WORDS, STEP):
                words += ((read >> (16 * j)).to(tl.int32) >> ((t & INTERLEAVED) * 16),)
        if BITS == 2:
            pairs = (_pair(words[0], words[0] >> 8),)
        elif BITS == 4:
            pairs = (_pair(words[0], words[1]),)
        else:
            pairs = (_pair(words[0], words[2]), _pair(words[1], words[3]))
    return pairs


@triton.constexpr_function
def _pointer_to(words):
    return tl.pointer_type({1: tl.int16, 2: tl.int32, 4: tl.int64}[words])


@triton.jit
def _pair(low, high):
    return (low & 0xFFFF) | (high << 16)


@triton.constexpr_function
def _bits_of_planes(chain):
    return tuple(bits for loop in chain for bits in {0: (), 3: (2, 1)}.get(loop[1], (loop[1],)))


@triton.jit
def _sum(z, factors, codes, magic, PAIR: tl.constexpr, BITS: tl.constexpr):
    """z + factor * code of all planes for the PAIR-th two channels of every octet, [N, W / 8, 2]."""
    for i in tl.static_range(len(factors)):
        z = tl.fma(factors[i], _codes(codes[i], magic, PAIR, BITS[i]).to(z.dtype), z)
    high, low = tl.split(z)
    return tl.join(low, high)


@triton.jit
def _codes(pairs, magic, PAIR: tl.constexpr, BITS: tl.constexpr):
    """The PAIR-th two codes of every octet less half of 2^BITS, so that rounding costs little: [N, W / 8, 2] fp16.

    From bit SHIFT of an FP16 number on, they add themselves to 2^(10 - SHIFT), which is then subtracted: all exact.
    """
    FIRST: tl.constexpr = PAIR * BITS % 16
    SHIFT: tl.constexpr = FIRST % 8
    MASK: tl.constexpr = ((2**BITS - 1) << SHIFT) * 0x10001
    pair = ((pairs[PAIR * BITS // 16] >> (FIRST - SHIFT)) & MASK) | (magic - (SHIFT << 10) * 0x10001)
    both = tl.join((pair >> 16).to(tl.int16), pair.to(tl.int16))
    return both.to(tl.float16, bitcast=True) - (2.0 ** (10 - SHIFT) + 2 ** (BITS - 1))
