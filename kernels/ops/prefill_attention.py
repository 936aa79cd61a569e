"""Attention of a step's new tokens over their packed past and over each other, for prefill in chunks (Sec. 4).

Each query sees all packed tokens of its sequence and, causally, the BF16 keys and values of this step.  The past is
read tile by tile and rebuilt in registers, loop by loop along the chain of references, never written back::

    Zhat = D(c_anchor) + mu_anchor;  Zhat <- alpha Zhat + D(c_r) + mu_r         (Sec. 3.2; planes: pack_kv.py)
    past      s = (q T_K) . Zhat_K        o' = sum_t p_t Zhat_V,t               in the rotated space
    between   o = o' T_V^T                                                      the only inverse rotation
    present   s = q . k                   o += sum_t p_t v_t                    in the original space

The past is rebuilt, and queries meet it, in FP16, which saturates at 65,504: queries, also rotated times scale / ln 2,
and the scale of a group times the coefficients after it times 2^bits times one more than the loops read.

Both parts share one running maximum and sum, so turning the accumulator once between them is the whole merge.

Roofline: a tile of past tokens costs 114 bytes per token and head (INT2/4 g=32, a residual loop, D = 128) and about
5 instructions per value to rebuild, shared by all rows of a program.  With 128 rows that is 40 % of the instructions;
the two products are 4 x 128 x D operations per token: instructions and matrix units take turns, traffic is below both.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from residualquant.errors import check_count
from residualquant.kernels.checks import (
    FLOATS,
    check_cost,
    check_packed,
    check_pages,
    check_query_heads,
    check_scale,
    check_tensors,
    sizes,
)
from residualquant.kernels.pack_kv import rotation_of
from residualquant.kernels.pack_kv_cuda import first_words, head_stride
from residualquant.kernels.triton_common import (
    MAGIC,
    chain,
    check_device,
    earlier_means,
    load_mean,
    natural_order,
    octet_order,
    rebuild,
    times_matrix,
)
from residualquant.kernels.tuning import tuned
from residualquant.layout import PageLayout, loop_bytes, loops_read
from residualquant.pages import read_pages
from residualquant.residual import decode


def prefill_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    layout: PageLayout,
    loop: int,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    k_matrix: Tensor | None = None,
    v_matrix: Tensor | None = None,
    k_means: Tensor | None = None,
    *,
    group: int = 0,
) -> Tensor:
    """What :func:`prefill_attention` returns, in plain FP32 torch: [T, Hq, D] fp32, sequence by sequence."""
    repeat = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for row, table in enumerate(block_table.long()):
        first, last = query_start[row : row + 2].tolist()
        past = torch.arange(int(seq_lens[row]) - (last - first), device=q.device)
        slots = table[past // layout.page_tokens] * layout.page_tokens + past % layout.page_tokens
        states = []
        for packed, matrix, means, present in zip(
            read_pages(pages, layout, slots, group), (k_matrix, v_matrix), (k_means, None), (k, v)
        ):
            rebuilt = decode(replace(packed, rotation=rotation_of(matrix, means, k.shape[1])))[loop]
            states.append(torch.cat((rebuilt, present[first:last].float())).repeat_interleave(repeat, 1))
        scores = torch.einsum("qhd,thd->hqt", q[first:last].float(), states[0]) * scale
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(len(past) + 1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("hqt,thd->qhd", weights, states[1])
    return out


@triton.jit(
    do_not_specialize=["table_stride"],  # what differs from step to step must not compile the kernel anew
    do_not_specialize_on_alignment=["block_table", "query_start", "seq_lens"],
)
def prefill_attention_kernel(
    out, q, k, v, words, block_table, query_start, seq_lens, k_matrix, v_matrix, k_means, scale,
    out_token_stride, out_head_stride, q_token_stride, q_head_stride,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, k_matrix_stride, v_matrix_stride,
    block_stride, page_head_stride, table_stride, k_start, v_start, magic,
    CHAIN: tl.constexpr, ALPHA: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one sequence and KV head; row m is query head ``m mod R`` of query token ``m // R``.

    CHAIN holds, for each loop from the anchor to the one asked for: loop, bits, group size, and the first word of its
    codes, metadata and alpha, counted from the start of K or V.  Strides of pages, k_start and v_start are in units of
    8 words, so that it is known how pages are aligned.
    """
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    begin = tl.load(query_start + sequence).to(tl.int64)
    queries = (tl.load(query_start + sequence + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * (BLOCK_M // R)
    if first >= queries:
        return
    past = tl.load(seq_lens + sequence).to(tl.int32) - queries

    row = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    token = first + row // R
    asked = ((row < BLOCK_M // R * R) & (token < queries))[:, None] & (channel < D)[None, :]
    query_head = head * R + row % R
    at = (begin + token) * q_token_stride + query_head * q_head_stride
    query = tl.load(q + at[:, None] + channel[None, :], mask=asked, other=0.0)
    at = (begin + token) * out_token_stride + query_head * out_head_stride
    exponent = scale * 1.4426950408889634  # of 2 instead of e

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if past > 0:
        turned = _turn(query, k_matrix, head * k_matrix_stride, D, False) * exponent
        shift = tl.zeros([BLOCK_M], tl.float32)  # what the last loop's mean adds to all scores of a query
        if k_means is not None:
            shift = tl.sum(turned * load_mean(k_means, CHAIN[-1][0], head, channel, D)[None, :], 1)
        turned = _through_memory(turned, out + at[:, None], asked)
        pages = words + head * (page_head_stride * 8)
        table = block_table + sequence * table_stride
        largest, total, acc = _attend_past(
            turned, largest, total, acc, pages, table, past, k_means, head,
            block_stride, k_start, v_start, magic, CHAIN, ALPHA, S, D, BLOCK_N,
        )  # fmt: skip
        acc = natural_order(acc / total[:, None])
        acc = _turn(acc, v_matrix, head * v_matrix_stride, D, True) * total[:, None]
        largest += shift
    k += begin * k_token_stride + head * k_head_stride
    v += begin * v_token_stride + head * v_head_stride
    end = tl.minimum(first + BLOCK_M // R, queries)
    largest, total, acc = _attend_present(
        query, token, largest, total, acc, k, v, end, exponent, k_token_stride, v_token_stride, D, BLOCK_N
    )
    acc = acc / total[:, None]
    tl.store(out + at[:, None] + channel[None, :], acc.to(out.dtype.element_ty), mask=asked)


@triton.jit
def _turn(x, matrix, begin, D: tl.constexpr, TRANSPOSED: tl.constexpr):
    """x T or x T^T of rows [M, W] in FP32; x where there is no matrix."""
    if matrix is not None:
        x = times_matrix(_saturated(x), matrix + begin, D, TRANSPOSED)
    return x.to(tl.float32)


@triton.jit
def _saturated(x):
    """x as FP16; what exceeds it is its largest number, NaN stays."""
    return tl.clamp(x.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def _through_memory(x, rows, asked):
    """x [M, W] as FP16 in ``octet_order``, written to the output's rows and read again.

    What was read from memory, and not computed, is an operand of products in shared memory, not in registers.
    """
    channel = tl.arange(0, x.shape[1])[None, :]
    rows = rows.to(tl.pointer_type(tl.float16), bitcast=True)  # before the channels are added: the output may be FP32
    tl.store(rows + channel, _saturated(x), mask=asked)
    tl.debug_barrier()
    return tl.load(rows + octet_order(channel), mask=asked, other=0.0)


@triton.jit
def _attend_past(
    query, largest, total, acc, pages, table, past, k_means, head, block_stride, k_start, v_start, magic,
    CHAIN: tl.constexpr, ALPHA: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The online softmax over all packed tokens of the sequence: query, turned and times the scale in log2, and acc in
    the rotated space and ``octet_order``, scores without what the last loop's mean adds."""
    W: tl.constexpr = query.shape[1]
    means = earlier_means(k_means, head, CHAIN, D, W, tl.float16)
    for start in range(0, past, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        inside = t < past
        known = tl.minimum(t, past - 1)  # there is no need to ask again which token is one
        page = pages + tl.load(table + known // S).to(tl.int64) * (block_stride * 8)
        keys = rebuild(page + k_start * 8, known % S, means, magic, 0, CHAIN, ALPHA, D, W, tl.float16)
        scores = tl.where(inside[None, :], tl.dot(query, tl.trans(keys)), float("-inf"))
        weights, largest, total, acc = _weigh(scores, largest, total, acc)
        values = rebuild(page + v_start * 8, known % S, (), magic, 1, CHAIN, ALPHA, D, W, tl.float16)
        acc = tl.dot(weights.to(tl.float16), values, acc)
    return largest, total, acc


@triton.jit
def _attend_present(
    query, token, largest, total, acc, k, v, end, exponent, k_stride, v_stride, D: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The online softmax over this step's tokens before ``end``, causal, in the original space."""
    channel = tl.arange(0, query.shape[1])[None, :]
    for start in range(0, end, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        inside = (t < end)[:, None] & (channel < D)
        keys = tl.load(k + t[:, None].to(tl.int64) * k_stride + channel, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * exponent
        scores = tl.where((t[None, :] <= token[:, None]) & (t < end)[None, :], scores, float("-inf"))
        weights, largest, total, acc = _weigh(scores, largest, total, acc)
        values = tl.load(v + t[:, None].to(tl.int64) * v_stride + channel, mask=inside, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return largest, total, acc


@triton.jit
def _weigh(scores, largest, total, acc):
    """One tile of an online softmax to base 2: weights, and the running maximum, sum and accumulator for them."""
    larger = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - larger[:, None])
    shrink = tl.exp2(largest - larger)
    return weights, larger, total * shrink + tl.sum(weights, 1), acc * shrink[:, None]


def prefill_attention(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    layout: PageLayout,
    loop: int,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_queries: int,
    scale: float,
    k_matrix: Tensor | None = None,
    v_matrix: Tensor | None = None,
    k_means: Tensor | None = None,
    *,
    group: int = 0,
    check: bool = True,
    check_table: bool = False,
) -> None:
    """Attention of this step's queries of one loop over packed past and BF16 present, into ``out`` (Sec. 4).

    Allocates nothing and never waits for the GPU, unless ``check_table``.

    Args:
        out: [T, Hq, D], any float dtype.
        q: [T, Hq, D] bf16, fp16 or fp32, post-RoPE, the tokens of all sequences one after another; Hq a multiple of H.
        k, v: [T, H, D] of the same dtype: this loop's keys and values of the same tokens.
        pages: uint8 [blocks, H, page_bytes_per_head], of one layer.
        layout: of the pages; as :func:`residualquant.kernels.pack_kv.pack_kv`.
        loop: which loop of the group, from 0.
        block_table: int32 [B, blocks of a sequence].
        query_start: int32 [B + 1], where each sequence's tokens begin in q.
        seq_lens: int32 [B], tokens of each sequence, past and present.
        max_queries: no sequence has more tokens in q.
        scale: of the scores, 1/sqrt(D) as a rule.
        k_matrix, v_matrix, k_means, group: as given to the writer.
        check: raise ValueError as below; to leave out where such arguments were checked before.
        check_table: make sure that queries lie in q and pages named by the table exist; waits for the GPU.

    Raises:
        ValueError: an argument of another shape, dtype or device, or a layout that the kernel does not read.
    """
    if check:
        _check(out, q, k, v, pages, layout, loop, block_table, query_start, seq_lens, max_queries, scale, k_matrix,
               v_matrix, k_means, group)  # fmt: skip
    if check_table and len(seq_lens):
        _check_table(block_table, query_start, seq_lens, len(q), max_queries, layout.page_tokens, len(pages))
    (heads, head_dim), repeat, words = k.shape[1:], q.shape[1] // k.shape[1], pages.view(torch.int16)
    parameters = tuned("prefill_attention", pages.device, head_dim, q.dtype)
    blocks = triton.cdiv(max_queries, parameters["BLOCK_M"] // repeat)
    if blocks * len(seq_lens):
        prefill_attention_kernel[(blocks, heads, len(seq_lens))](
            out, q, k, v, words, block_table, query_start, seq_lens, k_matrix, v_matrix, k_means, scale,
            *(stride for tensor in (out, q, k, v) for stride in tensor.stride()[:2]),
            head_stride(k_matrix), head_stride(v_matrix), *(stride // 8 for stride in words.stride()[:2]),
            block_table.stride(0), *(first // 8 for first in first_words(layout, group)), MAGIC, **chain(layout, loop),
            R=repeat, S=layout.page_tokens, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), **parameters,
        )  # fmt: skip


def _check_table(
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    tokens: int,
    max_queries: int,
    page_tokens: int,
    pages: int,
) -> None:
    """Check that the sequences' queries lie in the step's ``tokens`` and the pages of their pasts exist."""
    starts, queries = query_start.tolist(), query_start.diff()
    if starts[0] < 0 or starts[-1] > tokens or not 0 <= int(queries.min()) <= int(queries.max()) <= max_queries:
        raise ValueError(f"query_start must rise within {tokens} tokens by at most {max_queries}, got {starts}")
    check_pages(block_table, seq_lens - queries, page_tokens, pages)


def _check(
    out, q, k, v, pages, layout, loop, block_table, query_start, seq_lens, max_queries, scale, k_matrix, v_matrix,
    k_means, group,
) -> None:  # fmt: skip
    tokens, query_heads, _ = sizes("q", q, "T, Hq, D")
    heads = sizes("k", k, "T, H, D")[1]
    (sequences,) = sizes("seq_lens", seq_lens, "B")
    width = sizes("block_table", block_table, "B, M")[1]
    check_device(q.device)
    check_packed(q.device, heads, layout, pages, k_matrix, v_matrix, k_means, group, loop)
    check_query_heads(query_heads, heads)
    rows = tuned("prefill_attention", q.device, layout.head_dim, q.dtype)["BLOCK_M"]
    if query_heads // heads > rows:
        raise ValueError(f"there may be at most {rows} query heads per KV head, got {query_heads // heads}")
    states, integers = [[tokens, heads, layout.head_dim]], (torch.int32,)
    check_tensors(
        q.device,
        out=(out, [[tokens, query_heads, layout.head_dim]], FLOATS, 1),
        q=(q, [[tokens, query_heads, layout.head_dim]], FLOATS, 1),
        k=(k, states, (q.dtype,), 1),
        v=(v, states, (q.dtype,), 1),
        block_table=(block_table, [[sequences, width]], integers, 1),
        query_start=(query_start, [[sequences + 1]], integers, 1),
        seq_lens=(seq_lens, [[sequences]], integers, 1),
    )
    check_count("max_queries", max_queries, 0)
    check_scale(scale)


def prefill_attention_cost(
    layout: PageLayout, loop: int, queries: int, past: int, query_heads: int, heads: int, state_bytes: int = 2
) -> tuple[int, int]:
    """Bytes that one call must move and operations of its products, for one sequence.

    Args:
        layout, loop: as for :func:`prefill_attention`.
        queries: tokens of this step.
        past: packed tokens.
        query_heads, heads: Hq and H.
        state_bytes: of one value of q, k, v and out.

    Raises:
        ValueError: no layout, a loop that it has not, a count that is no integer or negative, or KV heads with unlike
            numbers of query heads.
    """
    counts = dict(queries=queries, past=past, query_heads=query_heads, heads=heads, state_bytes=state_bytes)
    check_cost(layout, loop, **counts)
    check_query_heads(query_heads, heads)
    cfg, head_dim = layout.config, layout.head_dim
    packed = 2 * past * heads * sum(loop_bytes(cfg, read, head_dim) for read in loops_read(cfg, loop))
    states = 2 * queries * (query_heads + heads) * head_dim * state_bytes
    pairs = queries * past + queries * (queries + 1) // 2
    rotations = 2 * queries if cfg.rotation != "none" else 0
    matrices = 4 * heads * head_dim**2 if rotations else 0
    return packed + states + matrices, query_heads * head_dim * (4 * pairs + 2 * rotations * head_dim)
