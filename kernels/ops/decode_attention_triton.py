"""Decode attention over the packed past in Triton: the way for GPUs, layouts and compilers that the CUDA kernel lacks.

Same splits and the same scratch as the CUDA kernel, plain dequantisation in FP32 instead of its code space: simple,
right on every layout, and several times slower.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from residualquant.attention import rotate
from residualquant.kernels.decode_attention import LOG2_E, Past, Workspace
from residualquant.kernels.prefill_attention import e4m3_value
from residualquant.layout import PageLayout, loops_read

TILE = 16  # tokens at a time


@triton.jit
def _rebuild(page, t, used, channel, PLANES: tl.constexpr, D: tl.constexpr, KV: tl.constexpr, means, head):
    """Zhat [T, D] of the tokens ``t`` of their pages: alpha Zhat_p + offset + scale c + mu along the chain."""
    value = tl.zeros([page.shape[0], channel.shape[0]], tl.float32)
    for i in tl.static_range(len(PLANES)):
        value = _add_loop(value, page, t, used, channel, PLANES, i, D, KV)
        if means is not None:
            mean = means + PLANES[i][8] + head * D + channel
            value += tl.load(mean, mask=channel < D, other=0.0)[None, :]
    return value


@triton.jit
def _add_loop(
    value, page, t, used, channel, PLANES: tl.constexpr, i: tl.constexpr, D: tl.constexpr, KV: tl.constexpr
):  # fmt: skip
    """alpha Zhat_p + offset + scale c of the i-th loop of PLANES, for Zhat_p in ``value``."""
    BITS: tl.constexpr = PLANES[i][0]
    GROUP: tl.constexpr = PLANES[i][1]
    CODES: tl.constexpr = PLANES[i][2 + 3 * KV]
    METADATA: tl.constexpr = PLANES[i][3 + 3 * KV]
    ALPHA: tl.constexpr = PLANES[i][4 + 3 * KV]
    if ALPHA >= 0:
        pointer = page + ALPHA + 2 * t
        low = tl.load(pointer, mask=used, other=0).to(tl.int32)
        high = tl.load(pointer + 1, mask=used, other=0).to(tl.int32)
        value *= ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)[:, None]
    if BITS > 0:
        ROW: tl.constexpr = BITS * D // 8
        inside = used[:, None] & (channel < D)[None, :]
        byte = channel * BITS // 8
        if KV == 1:
            at = (t // 2 * 2 * ROW + t % 2 * 2)[:, None] + (byte // 2 * 4 + byte % 2)[None, :]
        else:
            at = (t * ROW)[:, None] + byte[None, :]
        packed = tl.load(page[:, None] + CODES + at, mask=inside, other=0).to(tl.int32)
        code = (packed >> (channel % (8 // BITS) * BITS)[None, :]) & (2**BITS - 1)
        at = page[:, None] + METADATA + (t * (2 * D // GROUP))[:, None] + (channel // GROUP * 2)[None, :]
        scale = e4m3_value(tl.load(at, mask=inside, other=0).to(tl.int32))
        offset = e4m3_value(tl.load(at + 1, mask=inside, other=0).to(tl.int32))
        value += offset + scale * code.to(tl.float32)
    return value


@triton.jit
def decode_attention_kernel(
    q, pages, block_table, lengths, means, partial, lse, page_stride, page_head_stride, table_stride,
    PLANES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr,
    PER_HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One split (axis 0) of one sequence (axis 2) for the query heads of one KV head (axis 1).

    q is [B, Hq, D] fp32, rotated and times the scale in log2.  PLANES holds for each stored loop that is read, anchor
    first: bits, group size, first byte of codes, metadata and alpha (-1: none) of K, the same of V, and where its mean
    lies from the first loop's.
    """
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    per_split = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)

    channel = tl.arange(0, BLOCK_D)
    query = tl.arange(0, BLOCK_Q)
    query_row = (row * tl.num_programs(1) + head) * PER_HEAD + query
    inside = (query < PER_HEAD)[:, None] & (channel < D)[None, :]
    queries = tl.load(q + query_row[:, None] * D + channel[None, :], mask=inside, other=0.0)
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    values = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    start = begin
    while start < end:
        token = start + tl.arange(0, TILE)
        used = token < end
        block = tl.load(block_table + row * table_stride + token // S, mask=used, other=0).to(tl.int64)
        page = pages + block * page_stride + head * page_head_stride
        z = _rebuild(page, token % S, used, channel, PLANES, D, 0, means, head)
        scores = tl.sum(queries[:, None, :] * z[None, :, :], 2)
        scores = tl.where(used[None, :], scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - new)
        p = tl.exp2(scores - new[:, None])
        z = _rebuild(page, token % S, used, channel, PLANES, D, 1, None, head)
        values = values * shrink[:, None] + tl.sum(p[:, :, None] * z[None, :, :], 1)
        total = total * shrink + tl.sum(p, 1)
        maximum = new
        start += TILE
    at = query_row * splits + split
    safe = tl.where(total > 0, total, 1.0)
    tl.store(partial + at[:, None] * D + channel[None, :], values / safe[:, None], mask=inside)
    tl.store(lse + at, maximum + tl.log2(safe), mask=query < PER_HEAD)


def attend_past(q: Tensor, past: Past, loop: int, scratch: Workspace, scale: float) -> None:
    """Fill ``scratch`` with every split's values and weight; arguments as for
    :func:`residualquant.kernels.decode_attention.decode_attention`."""
    layout, pages, k_means = past.layout, past.pages, past.k_means
    dim, heads, splits = layout.head_dim, pages.shape[1], scratch.lse.shape[2]
    per_head = q.shape[1] // heads
    rotated = rotate(q.float(), None if past.k_matrix is None else past.k_matrix.float()) * (scale * LOG2_E)
    decode_attention_kernel[(splits, heads, q.shape[0])](
        rotated.contiguous(),
        pages,
        past.block_table,
        past.lengths,
        k_means,
        scratch.partial,
        scratch.lse,
        pages.stride(0),
        pages.stride(1),
        past.block_table.stride(0),
        PLANES=planes_read(layout, loop, past.group, heads),
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        S=layout.page_tokens,
        PER_HEAD=per_head,
        BLOCK_Q=triton.next_power_of_2(per_head),
        TILE=TILE,
    )


def planes_read(layout: PageLayout, loop: int, group: int, heads: int) -> tuple[tuple[int, ...], ...]:
    """What the kernel calls PLANES, for one loop of one group."""
    cfg, rows = layout.config, []
    for kind in loops_read(cfg, loop)[::-1]:
        row = [cfg.bits[kind], cfg.group_sizes[kind] or layout.head_dim]
        for kv in ("k", "v"):
            offsets = {plane.kind: plane.offset for plane in layout.planes_of(kv, group) if plane.loop == kind}
            row += [offsets.get(name, -1) for name in ("codes", "metadata", "alpha")]
        rows.append((*row, kind * heads * layout.head_dim))
    return tuple(rows)
