"""Decode attention over the packed past in Triton: the way for GPUs, layouts and compilers that the CUDA kernel lacks.

Same splits and the same scratch as the CUDA kernel, plain dequantisation in FP32 instead of its code space: simple,
right on every layout, and several times slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residualquant.attention import rotate
from residualquant.kernels.decode_attention import LOG2_E, Past, Workspace
from residualquant.kernels.pack_kv_cuda import first_words
from residualquant.kernels.triton_common import (
    MAGIC,
    chain,
    check_device,
    earlier_means,
    load_mean,
    octet_order,
    rebuild,
)

TILE = 16  # tokens at a time


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_table", "lengths"])
def decode_attention_kernel(
    q, words, block_table, lengths, k_means, partial, lse, block_stride, page_head_stride, table_stride,
    k_start, v_start, magic,
    CHAIN: tl.constexpr, ALPHA: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr,
    PER_HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One split (axis 0) of one sequence (axis 2) for the query heads of one KV head (axis 1).

    q is [B, Hq, D] fp32, rotated and times the scale in log2.  The other arguments are those of prefill attention.
    """
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row)
    per_split = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)

    channel = octet_order(tl.arange(0, BLOCK_D))
    query = tl.arange(0, BLOCK_Q)
    query_row = (row * tl.num_programs(1) + head) * PER_HEAD + query
    inside = (query < PER_HEAD)[:, None] & (channel < D)[None, :]
    queries = tl.load(q + query_row[:, None] * D + channel[None, :], mask=inside, other=0.0)
    shift = tl.zeros([BLOCK_Q], tl.float32)
    if k_means is not None:
        shift = tl.sum(queries * load_mean(k_means, CHAIN[-1][0], head, channel, D)[None, :], 1)
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    values = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    means = earlier_means(k_means, head, CHAIN, D, BLOCK_D, tl.float32)
    start = begin
    while start < end:
        token = start + tl.arange(0, TILE)
        known = tl.minimum(token, end - 1)
        block = tl.load(block_table + row * table_stride + known // S).to(tl.int64)
        page = words + block * (block_stride * 8) + head * (page_head_stride * 8)
        z = rebuild(page + k_start * 8, known % S, means, magic, 0, CHAIN, ALPHA, D, BLOCK_D, tl.float32)
        scores = tl.sum(queries[:, None, :] * z[None, :, :], 2) + shift[:, None]
        scores = tl.where((token < end)[None, :], scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - new)
        p = tl.exp2(scores - new[:, None])
        z = rebuild(page + v_start * 8, known % S, (), magic, 1, CHAIN, ALPHA, D, BLOCK_D, tl.float32)
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
    check_device(q.device)
    layout, words = past.layout, past.pages.view(torch.int16)
    dim, heads, splits = layout.head_dim, words.shape[1], scratch.lse.shape[2]
    per_head = q.shape[1] // heads
    rotated = rotate(q.float(), None if past.k_matrix is None else past.k_matrix.float()) * (scale * LOG2_E)
    decode_attention_kernel[(splits, heads, q.shape[0])](
        rotated.contiguous(), words, past.block_table, past.lengths, past.k_means, scratch.partial, scratch.lse,
        *(stride // 8 for stride in words.stride()[:2]), past.block_table.stride(0),
        *(first // 8 for first in first_words(layout, past.group)), MAGIC,
        **chain(layout, loop), D=dim, BLOCK_D=triton.next_power_of_2(dim), S=layout.page_tokens,
        PER_HEAD=per_head, BLOCK_Q=triton.next_power_of_2(per_head), TILE=TILE,
    )  # fmt: skip
