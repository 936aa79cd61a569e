"""Unpacking: one loop's keys and values of whole sequences, packed past and present, for any attention (Sec. 4).

::

    past      (Zhat + mu) T^T along the chain of references (Sec. 3.2; planes: pack_kv.py)
    present   copied, so that each sequence lies in one piece: states[0, start[b] + t, h, i], states[1] the same of v

A prefill with many queries reads each past token once here and as BF16 afterwards; :mod:`prefill_attention` rebuilds it
for every 128 queries instead.

Precision: Zhat is rebuilt in FP16, to some 3e-4 of its size, the rotation sums FP16 products in FP32 from the last
loop's mean on, and ``states`` rounds once more to its dtype, which in BF16 costs more than all before.

Roofline: a past token and head of Ouro (INT2/4 g=32, D = 128) is 228 bytes of a residual loop and 512 written; 16,384
tokens of 16 heads are 194 MB, 45 us at 4.3 TB/s. A program keeps the matrix of its head (32 KB) for several tiles: read
for every tile of 64 tokens, it would be 268 MB from the second-level cache. Rebuilding, 5 instructions a value, and
turning, rounding and storing, as many, fill half the slots of these 45 us.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from residualquant.errors import check_count
from residualquant.kernels.checks import FLOATS, check_cost, check_packed, check_tensors, sizes
from residualquant.kernels.pack_kv import rotation_of
from residualquant.kernels.pack_kv_cuda import first_words, head_stride
from residualquant.kernels.triton_common import (
    MAGIC,
    chain,
    check_device,
    earlier_means,
    load_mean,
    natural_order,
    rebuild,
)
from residualquant.kernels.tuning import tuned
from residualquant.layout import PageLayout, loop_bytes, loops_read
from residualquant.pages import read_pages
from residualquant.residual import decode

MATRIX_COLUMNS = 128  # of a program, which has them in shared memory: with 256 channels 64 KB


def unpack_kv_reference(
    states: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    layout: PageLayout,
    loop: int,
    block_table: Tensor,
    query_start: Tensor,
    state_start: Tensor,
    k_matrix: Tensor | None = None,
    v_matrix: Tensor | None = None,
    k_means: Tensor | None = None,
    *,
    group: int = 0,
) -> None:
    """What :func:`unpack_kv` does, in plain torch, sequence by sequence."""
    for row, table in enumerate(block_table.long()):
        first, last = query_start[row : row + 2].tolist()
        begin, end = state_start[row : row + 2].tolist()
        past = torch.arange(end - begin - (last - first), device=states.device)
        slots = table[past // layout.page_tokens] * layout.page_tokens + past % layout.page_tokens
        turns = (k_matrix, k_means), (v_matrix, None)
        for kept, packed, turn, present in zip(states, read_pages(pages, layout, slots, group), turns, (k, v)):
            rebuilt = decode(replace(packed, rotation=rotation_of(*turn, k.shape[1])))[loop]
            kept[begin:end] = torch.cat((rebuilt, present[first:last].float()))


@triton.jit(
    do_not_specialize=["table_stride"],  # what differs from step to step must not compile the kernel anew
    do_not_specialize_on_alignment=["block_table", "query_start", "state_start"],
)
def unpack_kv_kernel(
    states, k, v, words, block_table, query_start, state_start, k_matrix, v_matrix, k_means,
    kind_stride, state_token_stride, state_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    k_matrix_stride, v_matrix_stride, block_stride, page_head_stride, table_stride, k_start, v_start, magic,
    CHAIN: tl.constexpr, ALPHA: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """TILES times BLOCK_N tokens of one head; program axis 2 is the sequence, then K or V, then which COLUMNS channels.

    CHAIN, and strides in units of 8 words, as in prefill attention.
    """
    PARTS: tl.constexpr = BLOCK_D // COLUMNS
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64) // (2 * PARTS)
    is_v = tl.program_id(2) // PARTS % 2
    column = tl.program_id(2) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(state_start + sequence).to(tl.int64)
    length = (tl.load(state_start + sequence + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * (TILES * BLOCK_N)
    if first >= length:
        return
    asked = tl.load(query_start + sequence).to(tl.int64)
    past = length - (tl.load(query_start + sequence + 1) - asked).to(tl.int32)
    end = tl.minimum(first + TILES * BLOCK_N, length)

    rows = states + is_v * kind_stride + begin * state_token_stride + head * state_head_stride + column[None, :]
    if first < past:
        pages = words + head * (page_head_stride * 8)
        table, stop = block_table + sequence * table_stride, tl.minimum(end, past)
        if is_v > 0:
            _unpack(
                rows, pages + v_start * 8, table, first, stop, v_matrix, head * v_matrix_stride, None, head, column,
                state_token_stride, block_stride, magic, 1, CHAIN, ALPHA, S, D, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        else:
            _unpack(
                rows, pages + k_start * 8, table, first, stop, k_matrix, head * k_matrix_stride, k_means, head, column,
                state_token_stride, block_stride, magic, 0, CHAIN, ALPHA, S, D, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    own = v + head * v_head_stride if is_v > 0 else k + head * k_head_stride
    own_stride = v_token_stride if is_v > 0 else k_token_stride
    for start in range(tl.maximum(first, past), end, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        kept = (t < end)[:, None] & (column < D)[None, :]
        x = tl.load(own + (asked + t - past)[:, None] * own_stride + column[None, :], mask=kept, other=0.0)
        tl.store(rows + t.to(tl.int64)[:, None] * state_token_stride, x.to(states.dtype.element_ty), mask=kept)


@triton.jit
def _unpack(
    rows, pages, table, first, end, matrix, matrix_begin, means, head, column, token_stride, block_stride, magic,
    INTERLEAVED: tl.constexpr, CHAIN: tl.constexpr, ALPHA: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Packed tokens ``first`` to ``end`` of a sequence, the channels in ``column`` of K or of V, to their rows."""
    before = earlier_means(means, head, CHAIN, D, W, tl.float16)
    if matrix is not None:
        channel = tl.arange(0, W)
        inside = (column < D)[:, None] & (channel < D)[None, :]
        at = matrix + matrix_begin + column[:, None] * D + channel[None, :]
        factor = tl.load(at, mask=inside, other=0.0)
        shift = tl.zeros([column.shape[0]], tl.float32)
        if means is not None:
            shift += tl.sum(factor.to(tl.float32) * load_mean(means, CHAIN[-1][0], head, channel, D)[None, :], 1)
        factor = tl.trans(_octet_ordered(factor))
    for start in range(first, end, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        known = tl.minimum(t, end - 1)  # there is no need to ask again which token is one
        page = pages + tl.load(table + known // S).to(tl.int64) * (block_stride * 8)
        z = rebuild(page, known % S, before, magic, INTERLEAVED, CHAIN, ALPHA, D, W, tl.float16)
        if matrix is not None:
            z = tl.dot(z, factor, tl.broadcast_to(shift[None, :], [BLOCK_N, column.shape[0]]))
        else:
            z = natural_order(z)
        kept = (t < end)[:, None] & (column < D)[None, :]
        tl.store(rows + t.to(tl.int64)[:, None] * token_stride, z.to(rows.dtype.element_ty), mask=kept)


@triton.jit
def _octet_ordered(x):
    """[M, W] with its channels in ``octet_order``: the matrix so, once, instead of every tile in natural order."""
    octets = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 2, 4])
    return tl.reshape(tl.permute(octets, (0, 1, 3, 2)), x.shape)


def unpack_kv(
    states: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    layout: PageLayout,
    loop: int,
    block_table: Tensor,
    query_start: Tensor,
    state_start: Tensor,
    longest: int,
    k_matrix: Tensor | None = None,
    v_matrix: Tensor | None = None,
    k_means: Tensor | None = None,
    *,
    group: int = 0,
    check: bool = True,
) -> None:
    """Keys and values of one loop of whole sequences, packed past and present, into ``states`` (Sec. 4).

    Allocates nothing and never waits for the GPU.

    Args:
        states: [2, N, H, D] bf16 (or fp16 or fp32), K and V; rows that no sequence has are left as they are.
        k, v: [T, H, D] bf16, fp16 or fp32, post-RoPE, this step's tokens of all sequences one after another.
        pages: uint8 [blocks, H, page_bytes_per_head], of one layer.
        layout: of the pages; as :func:`residualquant.kernels.pack_kv.pack_kv`.
        loop: which loop of the group, from 0.
        block_table: int32 [B, blocks of a sequence].
        query_start: int32 [B + 1], where each sequence's tokens begin in k and v.
        state_start: int32 [B + 1], where each sequence, its past first, begins in ``states``.
        longest: no sequence has more tokens, past and present.
        k_matrix, v_matrix, k_means, group: as given to the writer.
        check: raise ValueError as below; to leave out where such arguments were checked before.

    Raises:
        ValueError: an argument of another shape, dtype or device, or a layout that the kernel does not read.
    """
    if check:
        _check(states, k, v, pages, layout, loop, block_table, query_start, state_start, longest, k_matrix, v_matrix,
               k_means, group)  # fmt: skip
    (heads, head_dim), sequences, words = k.shape[1:], len(block_table), pages.view(torch.int16)
    parameters = tuned("unpack_kv", pages.device, head_dim, states.dtype)
    width = triton.next_power_of_2(head_dim)
    columns = width if k_matrix is None else min(width, MATRIX_COLUMNS)
    blocks = triton.cdiv(longest, parameters["TILES"] * parameters["BLOCK_N"])
    if blocks * sequences:
        unpack_kv_kernel[(blocks, heads, 2 * width // columns * sequences)](
            states, k, v, words, block_table, query_start, state_start, k_matrix, v_matrix, k_means,
            *states.stride()[:3], *k.stride()[:2], *v.stride()[:2], head_stride(k_matrix), head_stride(v_matrix),
            *(stride // 8 for stride in words.stride()[:2]), block_table.stride(0),
            *(first // 8 for first in first_words(layout, group)), MAGIC, **chain(layout, loop),
            S=layout.page_tokens, D=head_dim, BLOCK_D=width, COLUMNS=columns, **parameters,
        )  # fmt: skip


def _check(
    states, k, v, pages, layout, loop, block_table, query_start, state_start, longest, k_matrix, v_matrix, k_means,
    group,
) -> None:  # fmt: skip
    tokens, heads, _ = sizes("k", k, "T, H, D")
    room = sizes("states", states, "2, N, H, D")[1]
    sequences, width = sizes("block_table", block_table, "B, M")
    check_device(k.device)
    check_packed(k.device, heads, layout, pages, k_matrix, v_matrix, k_means, group, loop)
    shape, starts = [heads, layout.head_dim], ([[sequences + 1]], (torch.int32,), 1)
    check_tensors(
        k.device,
        states=(states, [[2, room, *shape]], FLOATS, 1),
        k=(k, [[tokens, *shape]], FLOATS, 1),
        v=(v, [[tokens, *shape]], (k.dtype,), 1),
        block_table=(block_table, [[sequences, width]], (torch.int32,), 1),
        query_start=(query_start, *starts),
        state_start=(state_start, *starts),
    )
    check_count("longest", longest, 0)


def unpack_kv_cost(
    layout: PageLayout, loop: int, past: int, present: int, heads: int, state_bytes: int = 2
) -> tuple[int, int]:
    """Bytes that one call must move and operations of its rotations, for one sequence.

    Args:
        layout, loop: as for :func:`unpack_kv`.
        past, present: packed tokens, and those of the step.
        heads: H.
        state_bytes: of one value of k, v and states.

    Raises:
        ValueError: no layout, a loop that it has not, or a count that is no integer or negative.
    """
    check_cost(layout, loop, past=past, present=present, heads=heads, state_bytes=state_bytes)
    cfg, head_dim = layout.config, layout.head_dim
    packed = 2 * past * heads * sum(loop_bytes(cfg, read, head_dim) for read in loops_read(cfg, loop))
    states = 2 * (past + 2 * present) * heads * head_dim * state_bytes
    rotated = cfg.rotation != "none"
    matrices = 4 * heads * head_dim**2 * rotated
    return packed + states + matrices, 4 * past * heads * head_dim**2 * rotated
