"""Packed states in and out of pages, in plain torch: what :class:`residualquant.layout.PageLayout` means, executably.

Kernels and the serving plugin are tested against these functions.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from residualquant.config import RAW_BITS
from residualquant.errors import check_count, check_type
from residualquant.layout import PageLayout, Plane
from residualquant.residual import PackedKV, PackedLoop

DTYPES = {"metadata": torch.uint8, "alpha": torch.bfloat16}  # and codes: uint8, or bf16 where a loop is raw


def allocate_pages(layout: PageLayout, blocks: int, heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Zeroed pages of one layer: uint8 [blocks, H, page_bytes_per_head].

    Raises:
        ValueError: no layout, or a count that is no integer or negative.
    """
    check_type("layout", layout, PageLayout)
    check_count("blocks", blocks, 0)
    check_count("heads", heads, 0)
    return torch.zeros(blocks, heads, layout.page_bytes_per_head, dtype=torch.uint8, device=device)


def write_pages(pages: Tensor, layout: PageLayout, slots: Tensor, k: PackedKV, v: PackedKV, group: int = 0) -> None:
    """Write the packed tokens of one loop group into their slots, in place.

    Args:
        pages: uint8 [blocks, H, page_bytes_per_head].
        layout: of the pages.
        slots: integers [T]; slot s is token ``s mod S`` of block ``s // S``, the slot mapping of serving engines.
        k, v: packed states, [T, H, D] of each loop.
        group: which loop group of the layer.

    Raises:
        ValueError: pages of another layout, slots that they do not have, or states of another configuration or head
            size, of another number of tokens or heads, or raw FP16.
    """
    _check(pages, layout, slots)
    for kv, packed in (("k", k), ("v", v)):
        if (packed.config, packed.head_dim) != (layout.config, layout.head_dim):
            raise ValueError(f"{kv} is coded as {packed.config}, the pages are laid out for {layout.config}")
        for plane in layout.planes_of(kv, group):
            stored = getattr(packed.loops[plane.loop], plane.kind)
            shape, expected = list(stored.shape[:-1]), [len(slots), pages.shape[1]]
            if shape != expected:
                raise ValueError(f"{kv} must hold [T, H] = {expected} states, got {shape}")
            if stored.dtype != _dtype(layout, plane):
                raise ValueError(f"pages hold {plane.kind} as {_dtype(layout, plane)}, got {stored.dtype}")
            words = stored.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))
            _words(pages, layout, plane)[_index(layout, slots)] = words


def read_pages(
    pages: Tensor, layout: PageLayout, slots: Tensor, group: int = 0, loops: Collection[int] | None = None
) -> tuple[PackedKV, PackedKV]:
    """Packed K and V, [T, H, D] of each loop, of the tokens in ``slots``: the inverse of :func:`write_pages`.

    The rotation and the count of sanitised values are not part of a page: None and 0 here. Loops of the group that are
    not among ``loops`` (all when None) are empty.

    Raises:
        ValueError: pages of another layout, or slots that they do not have.
    """
    _check(pages, layout, slots)
    return _read(pages, layout, slots, "k", group, loops), _read(pages, layout, slots, "v", group, loops)


def _check(pages: Tensor, layout: PageLayout, slots: Tensor) -> None:
    """Raises ValueError unless ``pages`` are of ``layout`` and have all ``slots``."""
    check_type("layout", layout, PageLayout)
    check_type("pages", pages, Tensor)
    check_type("slots", slots, Tensor)
    if pages.dtype != torch.uint8 or pages.dim() != 3 or pages.shape[2] != layout.page_bytes_per_head:
        wanted = f"[blocks, H, {layout.page_bytes_per_head}] of torch.uint8"
        raise ValueError(f"pages must be {wanted}, got {list(pages.shape)} of {pages.dtype}")
    if slots.dtype not in (torch.int64, torch.int32) or slots.dim() != 1:
        raise ValueError(f"slots must be [T] of torch.int64 or int32, got {list(slots.shape)} of {slots.dtype}")
    places = len(pages) * layout.page_tokens
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < places:
        raise ValueError(f"slots must be from 0 to {places - 1}, got {int(slots.min())} to {int(slots.max())}")


def _read(
    pages: Tensor, layout: PageLayout, slots: Tensor, kv: str, group: int, loops: Collection[int] | None
) -> PackedKV:
    cfg = layout.config
    absent = pages.new_empty(len(slots), pages.shape[1], 0)
    parts = [{"codes": absent, "metadata": absent, "alpha": absent.bfloat16()} for _ in cfg.bits]
    for plane in layout.planes_of(kv, group):
        if loops is None or plane.loop in loops:
            stored = _words(pages, layout, plane)[_index(layout, slots)].flatten(-2)
            parts[plane.loop][plane.kind] = stored.view(_dtype(layout, plane))
    packed = tuple(PackedLoop(**part) for part in parts)
    return PackedKV(cfg, layout.head_dim, packed, None, torch.zeros((), dtype=torch.int32, device=pages.device))


def _dtype(layout: PageLayout, plane: Plane) -> torch.dtype:
    raw = plane.kind == "codes" and layout.config.bits[plane.loop] == RAW_BITS
    return torch.bfloat16 if raw else DTYPES.get(plane.kind, torch.uint8)


def _words(pages: Tensor, layout: PageLayout, plane: Plane) -> Tensor:
    """A view of one plane by token pair, token of the pair, head, 16-bit word, byte: [blocks, S/2, 2, H, C/2, 2]."""
    pairs, words = layout.page_tokens // 2, plane.token_bytes // 2
    stored = pages[..., plane.offset : plane.offset + layout.page_tokens * plane.token_bytes]
    if plane.interleaved:
        return stored.unflatten(-1, (pairs, words, 2, 2)).permute(0, 2, 4, 1, 3, 5)
    return stored.unflatten(-1, (pairs, 2, words, 2)).permute(0, 2, 3, 1, 4, 5)


def _index(layout: PageLayout, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Block, token pair and token of the pair of every slot."""
    tokens = slots % layout.page_tokens
    return slots // layout.page_tokens, tokens // 2, tokens % 2
