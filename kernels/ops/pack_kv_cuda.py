"""The writer's CUDA kernel: which layouts it knows, its arguments (kernels/cuda/pack_kv.cu)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from residualquant.affine import CLIP
from residualquant.config import KVQuantConfig
from residualquant.kernels.build import MOST_LOOPS, library_on, writer_variant_for
from residualquant.layout import PageLayout, loops_read

BLOCK_TOKENS = {True: 32, False: 16}  # of a block of threads at a time, rotated and not
BLOCKS_PER_PROCESSOR = 3  # that run at once
PARTS_PER_PROCESSOR = 3  # with as many blocks, parts of the loops are still coded beside each other
ROUNDS = 8  # of blocks, in a long prefill: each then codes several tiles with one copy of its matrix
COEFFICIENTS = {"unit": 0, "ls": 1, "norm_ratio": 2}


@dataclass(frozen=True, eq=False)
class WriterCall:
    """What :func:`residualquant.kernels.pack_kv.pack_kv` was called with, after its checks; the names are its own."""

    pages: Tensor
    layout: PageLayout
    slots: Tensor
    k: Tensor
    v: Tensor
    k_matrix: Tensor | None = None
    v_matrix: Tensor | None = None
    k_means: Tensor | None = None
    group: int = 0
    sanitised: Tensor | None = None
    rotated: Tensor | None = None


class Arguments(ctypes.Structure):
    """Mirror of ``Arguments`` in pack_kv.cu: every field has 8 bytes."""

    _fields_ = (
        [("words", ctypes.c_void_p), ("block_stride", ctypes.c_int64), ("page_head_stride", ctypes.c_int64)]
        + [("slots", ctypes.c_void_p), ("slots_are_wide", ctypes.c_int64)]
        + [(name, ctypes.c_void_p) for name in ("k", "v")]
        + [(name, ctypes.c_int64) for name in ("loop_stride", "token_stride", "head_stride")]
        + [(name, ctypes.c_void_p) for name in ("k_matrix", "v_matrix")]
        + [(name, ctypes.c_int64) for name in ("k_matrix_stride", "v_matrix_stride")]
        + [(name, ctypes.c_void_p) for name in ("k_means", "sanitised", "rotated")]
        + [(name, ctypes.c_int64) for name in ("tokens", "heads", "page_tokens", "blocks", "parts")]
        + [(name, ctypes.c_int64) for name in ("loops", "coefficient", "anchored", "chained")]
        + [(name, ctypes.c_int64 * MOST_LOOPS) for name in ("loop", "precision", "codes", "metadata", "alpha")]
        + [(name, ctypes.c_int64) for name in ("k_start", "v_start")]
        + [(name, ctypes.c_double) for name in ("first_clip", "other_clip")]
    )


def library_for(call: WriterCall) -> ctypes.CDLL | str:
    """The compiled kernel for these pages and states, or why there is none."""
    if call.pages.device.type != "cuda":
        return f"pages are on {call.pages.device}"
    if call.k.dtype != torch.bfloat16:
        return f"states must be bfloat16, got {call.k.dtype}"
    if any(x.data_ptr() % 16 for x in (call.k, call.v)) or any(stride % 8 for stride in call.k.stride()[:3]):
        return "states must start at multiples of 16 bytes"
    return _library(call.layout, call.pages.device)


@lru_cache(maxsize=64)
def _library(layout: PageLayout, device: torch.device) -> ctypes.CDLL | str:
    return library_on(device, writer_variant_for(layout))


def fill_arguments(call: WriterCall, processors: int) -> Arguments:
    """The C arguments for a call on a device of so many multiprocessors."""
    k, pages, cfg = call.k, call.pages, call.layout.config
    tokens, heads = k.shape[1:3]
    tiles, rows = -(-tokens // BLOCK_TOKENS[cfg.rotation != "none"]), 2 * heads
    blocks = max(1, min(tiles, processors * BLOCKS_PER_PROCESSOR * ROUNDS // rows))
    pointers = {name: getattr(call, name) for name in ("k_matrix", "v_matrix", "k_means", "sanitised", "rotated")}
    return Arguments(
        words=pages.data_ptr(),
        block_stride=pages.stride(0) // 2,
        page_head_stride=pages.stride(1) // 2,
        slots=call.slots.data_ptr(),
        slots_are_wide=call.slots.dtype == torch.int64,
        k=k.data_ptr(),
        v=call.v.data_ptr(),
        **dict(zip(("loop_stride", "token_stride", "head_stride"), k.stride())),
        **{name: None if x is None else x.data_ptr() for name, x in pointers.items()},
        k_matrix_stride=head_stride(call.k_matrix),
        v_matrix_stride=head_stride(call.v_matrix),
        tokens=tokens,
        heads=heads,
        blocks=-(-tiles // -(-tiles // blocks)),
        parts=choose_parts(cfg, tiles * rows, processors * PARTS_PER_PROCESSOR),
        **_layout_arguments(call.layout, call.group),
    )


@lru_cache(maxsize=64)
def _layout_arguments(layout: PageLayout, group: int) -> dict[str, object]:
    """What follows from the pages alone, with the loops in coding order: which, of which of two precisions, where their
    planes begin; and the two clips."""
    cfg, plan = layout.config, coding_plan(layout)
    other = [entry[1:3] != plan[0][1:3] for entry in plan]
    columns = {"loop": 0, "codes": 5, "metadata": 6, "alpha": 7}
    values = {name: [entry[column] for entry in plan] for name, column in columns.items()} | {"precision": other}
    clips = dict(zip(other, (entry[3] for entry in plan)))
    arrays = {name: (ctypes.c_int64 * MOST_LOOPS)(*map(int, value)) for name, value in values.items()}
    return {
        **arrays,
        "first_clip": clips[False],
        "other_clip": clips.get(True, clips[False]),
        "page_tokens": layout.page_tokens,
        "loops": cfg.loops,
        "coefficient": COEFFICIENTS[cfg.coefficient],
        "anchored": cfg.reference != "direct" and cfg.loops > 1,
        "chained": cfg.reference in ("previous", "next"),
        **dict(zip(("k_start", "v_start"), first_words(layout, group))),
    }


@lru_cache(maxsize=64)
def first_words(layout: PageLayout, group: int) -> tuple[int, int]:
    """The first 16-bit words of K and of V of a loop group, within a head's part of a page."""
    k, v = (layout.planes_of(kv, group)[0].offset // 2 for kv in "kv")
    return k, v


def choose_parts(cfg: KVQuantConfig, programs: int, slots: int) -> int:
    """Programs that share the loops of a block of tokens: one per loop but the anchor while all of them run at once.

    Each codes the anchor anew, so it pays only while a step is bound by how long one program takes.

    Args:
        cfg: of the layout.
        programs: with one part each.
        slots: programs that run at once.
    """
    chained = cfg.reference in ("previous", "next")
    most = cfg.loops if cfg.reference == "direct" else cfg.loops - 1
    return 1 if chained or programs * most > slots else max(1, most)


def coding_plan(layout: PageLayout) -> tuple[tuple, ...]:
    """For each loop in coding order: loop, bits, group size, clip, whether it has a reference, and the first 16-bit
    word of its codes, metadata and alpha, counted from the first of K or of V; 0 for what a loop does not have."""
    cfg = layout.config
    planes = layout.planes_of("k")
    first = {(plane.loop, plane.kind): plane.offset // 2 for plane in planes}
    plan = []
    for loop in sorted(range(cfg.loops), key=lambda loop: (len(loops_read(cfg, loop)), loop)):
        bits = cfg.bits[loop]
        clip = cfg.int2_clip if bits == 2 else CLIP.get(bits, 1.0)
        starts = (first.get((loop, kind), 0) for kind in ("codes", "metadata", "alpha"))
        plan.append((loop, bits, cfg.group_sizes[loop] or 0, clip, cfg.reference_of(loop) is not None, *starts))
    return tuple(plan)


def head_stride(matrix: Tensor | None) -> int:
    """Elements from one head's matrix to the next: 0 for one shared [D, D], or none."""
    return 0 if matrix is None or matrix.dim() == 2 else matrix.stride(0)
