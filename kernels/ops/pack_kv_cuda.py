"""The writer's CUDA kernel: which layouts it knows, its arguments, its launch (kernels/cuda/pack_kv.cu)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from residualquant.affine import CLIP
from residualquant.errors import ResidualQuantError
from residualquant.kernels.build import MOST_LOOPS, WriterVariant, load_variant, writer_variant_for
from residualquant.layout import PageLayout

BLOCK_TOKENS = 32  # of a block of threads at a time
BLOCKS_PER_PROCESSOR = 3  # that run at once
PARTS_PER_PROCESSOR = 3  # with as many blocks, parts of the loops are still coded beside each other
ROUNDS = 8  # of blocks, in a long prefill: each then codes several tiles with one copy of its matrix
COEFFICIENTS = {"unit": 0, "ls": 1, "norm_ratio": 2}


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


def library_for(pages: Tensor, layout: PageLayout, k: Tensor, v: Tensor) -> ctypes.CDLL | str:
    """The compiled kernel for these pages and states, or why there is none."""
    if pages.device.type != "cuda":
        return f"pages are on {pages.device}"
    if k.dtype != torch.bfloat16:
        return f"states must be bfloat16, got {k.dtype}"
    if any(x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:3]) for x in (k, v)):
        return "states must start at multiples of 16 bytes"
    return _library(layout, pages.device)


@lru_cache(maxsize=64)
def _library(layout: PageLayout, device: torch.device) -> ctypes.CDLL | str:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"it needs compute capability 9.0, got {major}.{minor}"
    variant = writer_variant_for(layout)
    return load_variant(variant, f"sm_{major}{minor}") if isinstance(variant, WriterVariant) else variant


def fill_arguments(
    pages: Tensor,
    layout: PageLayout,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    k_matrix: Tensor | None,
    v_matrix: Tensor | None,
    k_means: Tensor | None,
    group: int,
    sanitised: Tensor | None,
    rotated: Tensor | None,
    processors: int,
) -> Arguments:
    """The C arguments for what :func:`residualquant.kernels.pack_kv.pack_kv` has checked, and its number of blocks."""
    from residualquant.kernels.pack_kv import choose_parts, coding_plan, head_stride

    cfg, words = layout.config, pages.view(torch.int16)
    tokens, heads = k.shape[1:3]
    plan = coding_plan(layout)
    tiles, rows = -(-tokens // BLOCK_TOKENS), 2 * heads
    blocks = max(1, min(tiles, processors * BLOCKS_PER_PROCESSOR * ROUNDS // rows))
    first = plan[0][1:3]
    columns = {
        "loop": [entry[0] for entry in plan],
        "precision": [int(entry[1:3] != first) for entry in plan],
        **{name: [entry[5 + i] for entry in plan] for i, name in enumerate(("codes", "metadata", "alpha"))},
    }
    clips = [cfg.int2_clip if entry[1] == 2 else CLIP[entry[1]] for entry in plan]
    pointer = {
        name: None if x is None else x.data_ptr()
        for name, x in dict(k_matrix=k_matrix, v_matrix=v_matrix, k_means=k_means, sanitised=sanitised).items()
    }
    return Arguments(
        words=words.data_ptr(),
        block_stride=words.stride(0),
        page_head_stride=words.stride(1),
        slots=slots.data_ptr(),
        slots_are_wide=slots.dtype == torch.int64,
        k=k.data_ptr(),
        v=v.data_ptr(),
        loop_stride=k.stride(0),
        token_stride=k.stride(1),
        head_stride=k.stride(2),
        **pointer,
        k_matrix_stride=head_stride(k_matrix),
        v_matrix_stride=head_stride(v_matrix),
        rotated=None if rotated is None else rotated.data_ptr(),
        tokens=tokens,
        heads=heads,
        page_tokens=layout.page_tokens,
        blocks=-(-tiles // -(-tiles // blocks)),
        parts=choose_parts(cfg, tiles * rows, processors * PARTS_PER_PROCESSOR),
        loops=cfg.loops,
        coefficient=COEFFICIENTS[cfg.coefficient],
        anchored=cfg.reference != "direct" and cfg.loops > 1,
        chained=cfg.reference in ("previous", "next"),
        **{name: (ctypes.c_int64 * MOST_LOOPS)(*values) for name, values in columns.items()},
        **{f"{kv}_start": layout.planes_of(kv, group)[0].offset // 2 for kv in "kv"},
        first_clip=clips[0],
        other_clip=next((clip for clip, other in zip(clips, columns["precision"]) if other), clips[0]),
    )


def launch(library: ctypes.CDLL, *arguments) -> None:
    """Start the kernel with the arguments of :func:`fill_arguments`, on the current stream.

    Raises:
        ResidualQuantError: the library has other arguments, or CUDA refuses; the message holds its error code.
    """
    stream = torch.cuda.current_stream(arguments[0].device).cuda_stream
    run(library, fill_arguments(*arguments), stream)


def run(library: ctypes.CDLL, arguments: Arguments, stream: int) -> None:
    """Start the kernel on ``stream``; raises as :func:`launch`."""
    if library.pack_kv_arguments_bytes() != ctypes.sizeof(Arguments):
        raise ResidualQuantError("the compiled writer takes other arguments than this version: run `make kernels`")
    if status := library.pack_kv(ctypes.byref(arguments), ctypes.c_void_p(stream)):
        raise ResidualQuantError(f"the CUDA writer could not be started: CUDA error {status}")
