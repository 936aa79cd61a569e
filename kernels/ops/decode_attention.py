"""Decode attention: one query token per sequence over the packed past and its own BF16 K and V (Sec. 4).

::

    score_t = (q U_K) . Zhat_K,t       out = softmax-weighted sum of Zhat_V,t, U_V^T applied once, merged with the
                                             current token by log-sum-exp

Bytes read of one past token and KV head, K and V together (planes of ``residualquant.layout.PageLayout``: codes b D/8,
metadata 2 D/g, alpha 2 bytes per stored loop), for one of the loops of Ouro-1.4B at INT2/4 g=32, D = 128:

    loop              stored loops read        bytes               BF16
    anchor            itself                   2 (64 + 8)  = 144    512
    residual          anchor and itself        2 (72 + 42) = 228    512
    all four                                   828                 2048      2.47 times less

Attention does 4 D operations per token and query head, 2 an operation of BF16's byte: at any group of query heads that
occurs it is bound by memory, so the roofline is those bytes over the copy bandwidth. Taking the codes apart is what
could spoil that; kernels/cuda/decode_attention.cu says how it is avoided, with instruction counts.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from residualquant.affine import FP8, dequantize, unpack_codes
from residualquant.attention import rotate, rotate_back
from residualquant.errors import ResidualQuantError, check_count, check_type
from residualquant.kernels.build import MOST_KINDS, library_on, start, variant_for, warn_of_triton
from residualquant.kernels.checks import (
    FLOATS,
    check_cost,
    check_packed,
    check_pages,
    check_place,
    check_query_heads,
    check_scale,
    check_tensors,
    sizes,
)
from residualquant.kernels.pack_kv_cuda import head_stride
from residualquant.layout import PageLayout, loop_bytes, loops_read
from residualquant.pages import read_pages

LEAST_SPLIT = 256  # tokens: what a split must have at least to be worth its start
SPLIT_OVERHEAD = 500  # tokens that could be read in the time a split takes to start and end
BLOCKS_PER_PROCESSOR = 1  # thread blocks that a multiprocessor needs to be busy
MOST_SPLITS = 128
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class Past:
    """The packed past of one layer and loop group, for a batch of sequences.

    Attributes:
        pages: uint8 [blocks, H, page_bytes_per_head].
        layout: of the pages; bits 2 and 4 by CUDA, 0, 1, 2, 3, 4, 8 by Triton; rounding "fp32".
        block_table: int32 [B, M]; entry i of a row is the page of tokens i S to (i+1) S - 1. Entries past the end of a
            sequence are not used.
        lengths: int32 [B], tokens of the past, the current one not among them; 0 is allowed.
        k_matrix, v_matrix: rotations, [H, D, D] or [D, D] fp16, or None.
        k_means: [L, H, D] fp32 (OptR-H), or None.
        group: which loop group of the layer.
    """

    pages: Tensor
    layout: PageLayout
    block_table: Tensor
    lengths: Tensor
    k_matrix: Tensor | None = None
    v_matrix: Tensor | None = None
    k_means: Tensor | None = None
    group: int = 0


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch of the op, allocated once and fixed in address and number of splits, as CUDA graphs need.

    Attributes:
        partial: [B, Hq, splits, D] fp32, normalised values of each split of the past, rotated space.
        lse: [B, Hq, splits] fp32, log2 of each split's weight; -inf where a split is empty.
        arrived: [B, Hq] int32, zero between launches: how many splits are done, so that the last one merges them.
    """

    partial: Tensor
    lse: Tensor
    arrived: Tensor


def workspace(
    batch: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    max_tokens: int,
    device: torch.device | str,
    splits: int | None = None,
) -> Workspace:
    """Scratch for up to ``batch`` sequences of up to ``max_tokens`` past tokens, for all layers and loops of a stream.

    Args:
        batch, query_heads, kv_heads, head_dim: B, Hq, H, D.
        max_tokens: longest past. Longer ones are computed right as well, but less evenly spread.
        device: where.
        splits: parts of each past that run in parallel; None chooses them for this device.

    Raises:
        ValueError: a number that is none, below 1 (``max_tokens``: below 0), query heads not a multiple of KV heads, or
            a device that is not here.
    """
    device = check_place(device)
    for name, value in (("batch", batch), ("query_heads", query_heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        check_count(name, value)
    check_count("max_tokens", max_tokens, 0)
    check_query_heads(query_heads, kv_heads)
    if splits is not None:
        check_count("splits", splits)
    else:
        cuda = device.type == "cuda"
        processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
        splits = choose_splits(batch * kv_heads, max_tokens, processors * BLOCKS_PER_PROCESSOR)
    partial = torch.empty(batch, query_heads, splits, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=device)
    return Workspace(partial, lse, torch.zeros(partial.shape[:2], dtype=torch.int32, device=device))


def choose_splits(rows: int, max_tokens: int, slots: int) -> int:
    """The number of splits with the least time: rounds of blocks on ``slots`` places, times tokens and start-up each.

    Args:
        rows: pasts to go through, sequences times KV heads.
        max_tokens: of each.
        slots: thread blocks that keep the device busy.

    Raises:
        ValueError: a count that is no integer or negative, or no slot.
    """
    check_count("rows", rows, 0)
    check_count("max_tokens", max_tokens, 0)
    check_count("slots", slots)
    most = max(1, min(MOST_SPLITS, max_tokens // LEAST_SPLIT))
    return min(range(1, most + 1), key=lambda s: -(-rows * s // slots) * (max_tokens / s + SPLIT_OVERHEAD))


def decode_attention_cost(
    layout: PageLayout, loop: int, tokens: int, query_heads: int, kv_heads: int
) -> tuple[int, int]:
    """Bytes that must be read and floating-point operations, for ``tokens`` past tokens in all.

    Args:
        layout: of the pages.
        loop: loop within its group.
        tokens: summed over sequences.
        query_heads, kv_heads: Hq, H.

    Returns:
        bytes, operations (scores and values, 2 D each per token and query head).

    Raises:
        ValueError: no layout, a loop that it has not, a count that is no integer or negative, or KV heads with unlike
            numbers of query heads.
    """
    check_cost(layout, loop, tokens=tokens, query_heads=query_heads, kv_heads=kv_heads)
    check_query_heads(query_heads, kv_heads)
    read = sum(loop_bytes(layout.config, stored, layout.head_dim) for stored in loops_read(layout.config, loop))
    return 2 * read * tokens * kv_heads, 4 * layout.head_dim * tokens * query_heads


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, past: Past, loop: int, scale: float | None = None
) -> Tensor:
    """What :func:`decode_attention` returns, in FP64 torch, sequence by sequence.

    Returns:
        [B, Hq, D] fp64.
    """
    layout, heads, size = past.layout, past.pages.shape[1], past.layout.page_tokens
    scale = layout.head_dim**-0.5 if scale is None else scale
    k_matrix, v_matrix = (None if x is None else x.double() for x in (past.k_matrix, past.v_matrix))
    outs = []
    for row, length in enumerate(past.lengths.tolist()):
        positions = torch.arange(length, device=q.device)
        slots = past.block_table[row].long()[positions // size] * size + positions % size
        packed_k, packed_v = read_pages(past.pages, layout, slots, past.group, loops_read(layout.config, loop))
        past_k, past_v = _rebuild(packed_k, loop, past.k_means), _rebuild(packed_v, loop, None)
        query = q[row].double()
        past_scores = torch.einsum("hgd,thd->hgt", rotate(query, k_matrix).unflatten(0, (heads, -1)), past_k)
        own_score = torch.einsum("hgd,hd->hg", query.unflatten(0, (heads, -1)), k[row].double())
        weights = torch.softmax(torch.cat((past_scores, own_score[..., None]), -1) * scale, -1)
        out = torch.einsum("hgt,thd->hgd", weights[..., :-1], past_v).flatten(0, 1)
        own = (weights[..., -1:] * v[row].double()[:, None]).flatten(0, 1)
        outs.append(rotate_back(out, v_matrix) + own)
    return torch.stack(outs)


def _rebuild(packed, loop: int, means: Tensor | None) -> Tensor:
    """Zhat of ``loop``, [T, H, D] fp64 in rotated space: alpha Zhat_p + D(c) + mu along the chain (Sec. 3.2)."""
    cfg, value = packed.config, None
    for stored in reversed(loops_read(cfg, loop)):
        part = packed.loops[stored]
        if value is not None and part.alpha.shape[-1]:
            value = part.alpha.double() * value
        if cfg.bits[stored]:
            codes = unpack_codes(part.codes, cfg.bits[stored], packed.head_dim)
            coded = dequantize(codes, part.metadata.view(FP8).unflatten(-1, (-1, 2))).double()
            value = coded if value is None else value + coded
        if means is not None:
            value = value + means[stored].double()
    return value


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    loop: int,
    scratch: Workspace,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    prefer: str | None = None,
    check: bool = True,
    check_table: bool = False,
) -> Tensor:
    """Attention of one token per sequence over its packed past and itself (Sec. 4).

    Allocates nothing but ``out`` and never waits for the GPU (the Triton path allocates a few small tensors), so it can
    be captured into a CUDA graph. A sequence's result does not depend on the others. |alpha| times the scale of a group
    of V must stay below 1,023; beyond, it saturates.

    Args:
        q: [B, Hq, D] bf16, post-RoPE, not rotated; query head h belongs to KV head h // (Hq/H).
        k, v: [B, H, D] bf16 of the current token.
        past: the packed tokens before it.
        loop: loop within its group, from 0.
        scratch: from :func:`workspace`, for at least B sequences.
        scale: of the scores; D**-0.5 by default.
        out: [B, Hq, D] to write to, of the dtype of q or fp32; made by default.
        prefer: "cuda", "triton" or "reference"; by default CUDA where it was or can be compiled for this layout, else
            Triton; on a CPU the reference.
        check: raise ValueError as below; to leave out where such arguments were checked before.
        check_table: make sure that pages named by the block table exist; waits for the GPU. Always done on a CPU.

    Returns:
        ``out``.

    Raises:
        ValueError: an argument of another shape, dtype or device, or a layout that no kernel reads.
        ResidualQuantError: the preferred way does not exist here; the message says why.
    """
    if check:
        _check(q, k, v, past, loop, scratch, scale, out, prefer)
    out = torch.empty_like(q) if out is None else out
    scale = past.layout.head_dim**-0.5 if scale is None else scale
    if not len(q):
        return out
    if check_table or q.device.type == "cpu":
        check_pages(past.block_table, past.lengths, past.layout.page_tokens, len(past.pages))
    backend, library = _choose(prefer, q, past, loop)
    if backend == "cuda":
        arguments = fill_arguments(q, k, v, past, loop, scratch, scale, out)
        start(library, "decode_attention", arguments, torch.cuda.current_stream(q.device).cuda_stream)
    elif backend == "triton":
        from residualquant.kernels.decode_attention_triton import attend_past

        attend_past(q, past, loop, scratch, scale)
        merge_splits(q, k, v, past.v_matrix, scratch, scale, out)
    else:
        out.copy_(decode_attention_reference(q, k, v, past, loop, scale))
    return out


def merge_splits(
    q: Tensor, k: Tensor, v: Tensor, v_matrix: Tensor | None, scratch: Workspace, scale: float, out: Tensor
) -> None:
    """Combine the splits with the current token by log-sum-exp and rotate the past's part back once, into ``out``."""
    batch, query_heads, _ = q.shape
    per_head = query_heads // k.shape[1]
    own = (q.float() * k.repeat_interleave(per_head, 1).float()).sum(-1) * (scale * LOG2_E)
    lse = torch.cat((scratch.lse[:batch], own[..., None]), -1)
    shares = torch.exp2(lse - lse.amax(-1, keepdim=True))
    shares = (shares / shares.sum(-1, keepdim=True))[..., None]
    past = torch.where(shares[:, :, :-1] > 0, shares[:, :, :-1] * scratch.partial[:batch], 0.0).sum(2)
    past = rotate_back(past, None if v_matrix is None else v_matrix.float())
    out.copy_(past + shares[:, :, -1] * v.repeat_interleave(per_head, 1).float())


class Arguments(ctypes.Structure):
    """Mirror of ``Arguments`` in decode_attention.cu: every field has 8 bytes."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("pages",)]
        + [(name, ctypes.c_int64) for name in ("page_stride", "page_head_stride")]
        + [("block_table", ctypes.c_void_p), ("table_stride", ctypes.c_int64), ("lengths", ctypes.c_void_p)]
        + [(name, ctypes.c_void_p) for name in ("q", "k", "v")]
        + [(f"{name}_{of}", ctypes.c_int64) for name in ("q", "k", "v") for of in ("stride", "head_stride")]
        + [(name, ctypes.c_void_p) for name in ("k_matrix", "v_matrix")]
        + [(name, ctypes.c_int64) for name in ("k_matrix_stride", "v_matrix_stride")]
        + [("means", ctypes.c_void_p * MOST_KINDS), ("mean_stride", ctypes.c_int64)]
        + [(name, ctypes.c_void_p) for name in ("partial", "lse", "arrived", "out")]
        + [(name, ctypes.c_int64) for name in ("out_stride", "out_head_stride", "out_is_float")]
        + [(name, ctypes.c_int64) for name in ("batch", "query_heads", "kv_heads", "splits")]
        + [(name, ctypes.c_int64 * MOST_KINDS) for name in ("k_planes", "v_planes")]
        + [("scale", ctypes.c_double)]
    )


def fill_arguments(
    q: Tensor, k: Tensor, v: Tensor, past: Past, loop: int, scratch: Workspace, scale: float, out: Tensor
) -> Arguments:
    """The C arguments of the CUDA kernels for tensors that :func:`decode_attention` has checked."""
    pages, table, means = past.pages, past.block_table, past.k_means
    kinds, planes = _planes(past.layout, loop, past.group)
    addresses = [] if means is None else [means[kind].data_ptr() for kind in kinds]
    return Arguments(
        pages=pages.data_ptr(),
        page_stride=pages.stride(0),
        page_head_stride=pages.stride(1),
        block_table=table.data_ptr(),
        table_stride=table.stride(0),
        lengths=past.lengths.data_ptr(),
        **{name: x.data_ptr() for name, x in (("q", q), ("k", k), ("v", v))},
        **{f"{name}_stride": x.stride(0) for name, x in (("q", q), ("k", k), ("v", v))},
        **{f"{name}_head_stride": x.stride(1) for name, x in (("q", q), ("k", k), ("v", v))},
        k_matrix=_pointer(past.k_matrix),
        v_matrix=_pointer(past.v_matrix),
        k_matrix_stride=head_stride(past.k_matrix),
        v_matrix_stride=head_stride(past.v_matrix),
        means=(ctypes.c_void_p * MOST_KINDS)(*addresses),
        mean_stride=past.layout.head_dim,
        partial=scratch.partial.data_ptr(),
        lse=scratch.lse.data_ptr(),
        arrived=scratch.arrived.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        out_head_stride=out.stride(1),
        out_is_float=out.dtype == torch.float32,
        batch=q.shape[0],
        query_heads=q.shape[1],
        kv_heads=k.shape[1],
        splits=scratch.lse.shape[2],
        scale=scale,
        **planes,
    )


@lru_cache(maxsize=256)
def _planes(layout: PageLayout, loop: int, group: int) -> tuple[tuple[int, ...], dict[str, ctypes.Array]]:
    """The stored loops that rebuild a loop, the anchor first, and where their codes begin, as arguments."""
    kinds = loops_read(layout.config, loop)[::-1]
    offsets = {kv: [layout.plane(kv, kind, "codes", group).offset for kind in kinds] for kv in "kv"}
    return kinds, {f"{kv}_planes": (ctypes.c_int64 * MOST_KINDS)(*found) for kv, found in offsets.items()}


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _choose(prefer: str | None, q: Tensor, past: Past, loop: int) -> tuple:
    """Which way to go, and the library of the CUDA way."""
    if prefer in ("triton", "reference"):
        return prefer, None
    if prefer is None and q.device.type == "cpu":
        return "reference", None
    found = _library(q.device, q.dtype, past.layout, loop, q.shape[1] // past.pages.shape[1])
    if not isinstance(found, str):
        return "cuda", found
    if prefer == "cuda":
        raise ResidualQuantError(f"the CUDA decode kernel cannot be used: {found}")
    warn_of_triton("decode attention", found)
    return "triton", None


@lru_cache(maxsize=256)
def _library(device, dtype, layout: PageLayout, loop: int, queries_per_head: int) -> ctypes.CDLL | str:
    if device.type != "cuda":
        return f"tensors are on {device}"
    if dtype != torch.bfloat16:
        return f"q must be bfloat16, got {dtype}"
    return library_on(device, variant_for(layout, loop, queries_per_head))


def _check(q, k, v, past, loop, scratch, scale, out, prefer) -> None:
    check_type("past", past, Past)
    check_type("scratch", scratch, Workspace)
    if prefer not in (None, "cuda", "triton", "reference"):
        raise ValueError(f'prefer must be "cuda", "triton", "reference" or None, got {prefer!r}')
    batch, query_heads, _ = sizes("q", q, "B, Hq, D")
    heads = sizes("k", k, "B, H, D")[1]
    check_packed(q.device, heads, past.layout, past.pages, past.k_matrix, past.v_matrix, past.k_means, past.group, loop)
    check_query_heads(query_heads, heads)
    if scale is not None:
        check_scale(scale)
    dim, width = past.layout.head_dim, sizes("block_table", past.block_table, "B, M")[1]
    room, _, splits, _ = sizes("the scratch's partial", scratch.partial, "B, Hq, splits, D")
    if room < batch:
        raise ValueError(f"scratch must be for at least {batch} sequences, got {room}")
    if not splits:
        raise ValueError("scratch must have at least one split, got 0")
    check_tensors(
        q.device,
        q=(q, [[batch, query_heads, dim]], FLOATS, 1),
        k=(k, [[batch, heads, dim]], (q.dtype,), 1),
        v=(v, [[batch, heads, dim]], (q.dtype,), 1),
        out=(q if out is None else out, [[batch, query_heads, dim]], (q.dtype, torch.float32), 1),
        block_table=(past.block_table, [[batch, width]], (torch.int32,), 1),
        lengths=(past.lengths, [[batch]], (torch.int32,), 1),
        partial=(scratch.partial, [[room, query_heads, splits, dim]], (torch.float32,), 4),
        lse=(scratch.lse, [[room, query_heads, splits]], (torch.float32,), 3),
        arrived=(scratch.arrived, [[room, query_heads]], (torch.int32,), 2),
    )
