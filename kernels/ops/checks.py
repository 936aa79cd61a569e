"""What the operations check of their arguments before a kernel starts; a message names the argument and what it was.

Shapes, dtypes, strides and devices are always checked. Numbers in a GPU's memory (slots, block tables, lengths) only
where a caller asks for it, because looking at them waits for the GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residualquant.errors import check_count, check_index, check_type
from residualquant.layout import PageLayout

HEAD_DIMS = (64, 96, 128, 256)
BITS = (0, 1, 2, 3, 4, 8)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
OPTIONAL = ("k_matrix", "v_matrix", "k_means", "sanitised", "rotated")  # arguments that may be None
WRITTEN = ("out", "pages", "staged")  # arguments that a kernel writes to and whose strides are free


def sizes(name: str, tensor: Tensor, axes: str) -> list[int]:
    """The sizes of a tensor's ``axes`` ("B, H, D").

    Raises:
        ValueError: it is no tensor, or one of other axes.
    """
    if not isinstance(tensor, Tensor) or tensor.dim() != axes.count(",") + 1:
        got = list(tensor.shape) if isinstance(tensor, Tensor) else repr(tensor)
        raise ValueError(f"{name} must be a tensor of shape [{axes}], got {got}")
    return list(tensor.shape)


def check_tensors(
    device: torch.device, **expected: tuple[Tensor | None, list[list[int]], tuple[torch.dtype, ...], int]
) -> None:
    """Check arguments by name: tensor, allowed shapes, allowed dtypes, trailing axes that must be contiguous.

    Raises:
        ValueError: the first that is no tensor (None passes for those in ``OPTIONAL``), of another shape or dtype, on
            another device, or strided; or one to write to with places shared.
    """
    for name, (tensor, shapes, dtypes, dense) in expected.items():
        if tensor is None and name in OPTIONAL:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {tensor!r}")
        shape = list(tensor.shape)
        if shape not in shapes or tensor.dtype not in dtypes:
            wanted = f"{' or '.join(map(str, shapes))} of {' or '.join(map(str, dtypes))}"
            raise ValueError(f"{name} must be {wanted}, got {shape} of {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, as the others, got {tensor.device}")
        if name in WRITTEN and _overlaps(tensor):
            raise ValueError(f"{name} must have a place of its own for each value, got strides {tensor.stride()}")
        last = range(max(0, len(shape) - dense), len(shape))
        if tensor.numel() and any(shape[i] > 1 and tensor.stride(i) != math.prod(shape[i + 1 :]) for i in last):
            raise ValueError(f"{name} must be contiguous in its last {len(last)} axes, got strides {tensor.stride()}")


def _overlaps(tensor: Tensor) -> bool:
    """Whether two indices name one place, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def check_packed(
    device: torch.device,
    heads: int,
    layout: PageLayout,
    pages: Tensor,
    k_matrix: Tensor | None,
    v_matrix: Tensor | None,
    k_means: Tensor | None,
    group: int,
    loop: int = 0,
) -> None:
    """Check pages of ``heads`` KV heads and the rotations that go with them.

    Raises:
        ValueError: a head size, bits, rounding, group or loop that the kernels do not know, tensors that do not fit or
            are not aligned, or rotations that do not go with the configuration.
    """
    check_type("layout", layout, PageLayout)
    cfg, dim = layout.config, layout.head_dim
    if dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {dim}")
    if not set(cfg.bits) <= set(BITS):
        raise ValueError(f"bits must be among {', '.join(map(str, BITS))}, got {cfg.bits}")
    if cfg.rounding != "fp32":
        raise ValueError(f'rounding must be "fp32", got {cfg.rounding!r}')
    check_index("group", group, layout.groups)
    check_index("loop", loop, cfg.loops)
    if not heads:
        raise ValueError("there must be at least one KV head, got 0")
    blocks = sizes("pages", pages, "blocks, H, page_bytes_per_head")[0]
    check_tensors(
        device,
        pages=(pages, [[blocks, heads, layout.page_bytes_per_head]], (torch.uint8,), 1),
        k_matrix=(k_matrix, [[dim, dim], [heads, dim, dim]], (torch.float16,), 3),
        v_matrix=(v_matrix, [[dim, dim], [heads, dim, dim]], (torch.float16,), 3),
        k_means=(k_means, [[cfg.loops, heads, dim]], (torch.float32,), 3),
    )
    given = {name: x for name, x in (("k_matrix", k_matrix), ("v_matrix", v_matrix)) if x is not None}
    needed, number = ("no", 0) if cfg.rotation == "none" else ("both", 2)
    if len(given) != number:
        raise ValueError(f"rotation={cfg.rotation!r} needs {needed} matrices, got {[*given]}")
    if k_means is not None and not given:
        raise ValueError(f"k_means go with a rotation, got them with rotation={cfg.rotation!r}")
    if any(stride % 16 for stride in pages.stride()[:2]):
        raise ValueError(f"pages must start at multiples of 16 bytes, got strides {pages.stride()}")
    for name, tensor in {"pages": pages, **given}.items():
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes, got address {tensor.data_ptr():#x}")


def check_cost(layout: PageLayout, loop: int = 0, **counts: int) -> None:
    """Check what the cost of an operation is asked for.

    Raises:
        ValueError: ``layout`` is none, ``loop`` is not among its loops, or a count is no integer or negative.
    """
    check_type("layout", layout, PageLayout)
    check_index("loop", loop, layout.config.loops)
    for name, value in counts.items():
        check_count(name, value, 0)


def check_place(device: torch.device | str) -> torch.device:
    """``device`` where it is the CPU or a CUDA GPU that is here.

    Raises:
        ValueError: it is not.
    """
    wrong = ValueError(f"device must be the CPU or a CUDA GPU that is here, got {device!r}")
    if not isinstance(device, (str, torch.device)):
        raise wrong
    try:
        place = torch.device(device)
    except RuntimeError:
        raise wrong from None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type != "cpu" and (place.type != "cuda" or (place.index or 0) >= gpus):
        raise wrong
    return place


def check_query_heads(query_heads: int, heads: int) -> None:
    """Check that every KV head has as many query heads.

    Raises:
        ValueError: it has not, or there are none.
    """
    if not heads or not query_heads or query_heads % heads:
        raise ValueError(f"query heads must be a multiple of the KV heads, got {query_heads} and {heads}")


def check_scale(scale: float) -> None:
    """Check the factor of the scores.

    Raises:
        ValueError: it is no finite number in FP32.
    """
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not abs(scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"scale must be a finite number, got {scale!r}")


def check_slot_mapping(slots: Tensor, count: int) -> None:
    """Check that no two tokens share a slot and that all slots but the negative ones are among ``count``.

    Raises:
        ValueError: the message holds a slot that is not.
    """
    kept = slots[slots >= 0]
    if kept.numel() and int(kept.max()) >= count:
        raise ValueError(f"slots must be below {count}, got {int(kept.max())}")
    found, times = kept.unique(return_counts=True)
    if (times > 1).any():
        raise ValueError(f"a slot must not occur twice, got {found[times > 1].tolist()}")


def check_pages(table: Tensor, lengths: Tensor, page_tokens: int, pages: int) -> None:
    """Check that the pages which ``lengths`` [B] tokens of the past need are in ``table`` [B, M] and exist.

    Raises:
        ValueError: one is missing; the message holds the lengths or the page numbers.
    """
    used = (lengths.long() + page_tokens - 1) // page_tokens
    if int(used.max()) > table.shape[1] or int(lengths.min()) < 0:
        raise ValueError(f"lengths must fit {table.shape[1]} pages of a row, got {lengths.tolist()}")
    named = table[torch.arange(table.shape[1], device=used.device) < used[:, None]]
    if named.numel() and not 0 <= int(named.min()) <= int(named.max()) < pages:
        got = f"{int(named.min())} to {int(named.max())}"
        raise ValueError(f"block_table must name pages from 0 to {pages - 1}, got {got}")
