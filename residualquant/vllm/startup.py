"""At start: try the packed path on random states, and say what a token costs and how many fit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, set_num_threads  # by name: vLLM's CPU worker puts another one, which does nothing, in torch
from vllm.logger import init_logger

from residualquant.attention import PackedAttention
from residualquant.cache import PackedCache
from residualquant.errors import ResidualQuantError
from residualquant.models.base import KVShape
from residualquant.vllm.metrics import bytes_per_token
from residualquant.vllm.paged import PackedPages, StepBatch

if TYPE_CHECKING:
    from residualquant.vllm.attention import LoopedAttention

T = TypeVar("T")
TOLERANCE = 2e-2  # of attention outputs of order 1; kernels multiply in BF16
PIECES = (21, 5, 1, 1)  # tokens of a prompt in two pieces, then of decode steps

logger = init_logger("vllm.residualquant")  # vLLM shows what is logged under its own name


def on_one_thread(check: Callable[..., T]) -> Callable[..., T]:
    """``check`` on one CPU thread: its tensors are so small that waiting for threads on a busy machine takes longer.

    And vLLM may fork this process afterwards: OpenMP's threads, once there, would be waited for in vain in the fork.
    """

    @functools.wraps(check)
    def run(*args, **kwargs) -> T:
        threads = torch.get_num_threads()
        set_num_threads(1)
        try:
            return check(*args, **kwargs)
        finally:
            set_num_threads(threads)

    return run


@on_one_thread
def check_paged(
    paged: PackedPages, groups: int, kv_heads: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> float:
    """Run a prompt in two pieces and two decode steps of two requests through scattered pages and the reference cache.

    Args:
        groups: query heads per KV head.
        dtype: of queries, keys and values; kernels that are compiled for it here are those that serving needs.

    Returns:
        The largest difference of an attention output.

    Raises:
        ResidualQuantError: a difference beyond what rounding explains.
    """
    begun, layout = time.monotonic(), paged.layout
    shape = KVShape(layout.groups * layout.config.loops, 1, kv_heads, layout.head_dim)
    rotations = {(group, 0, kind): paged.rotation(group, kind) for group in range(layout.groups) for kind in "kv"}
    config = layout.config
    if config.rotation != "none":  # by a name with which the cache takes these very matrices: kernels round them
        config = replace(config, rotation="oscar")
    reference = PackedAttention(PackedCache(shape, config, rotations))
    pages = torch.full((9, kv_heads, layout.page_bytes_per_head), 255, dtype=torch.uint8, device=device)
    generator = torch.Generator().manual_seed(0)
    worst, done = 0.0, 0
    for size in PIECES:
        batch = _trial_batch(done, size, paged.page_tokens, device)
        steps = _trial_states(generator, shape, groups, 2 * size, device, dtype)
        staged = pages.new_empty(2, shape.loops, 2 * size, kv_heads, shape.head_dim, dtype=paged.step_dtype)
        for loop, (q, k, v) in enumerate(steps):
            paged.stage(staged[:, loop], k, v)
            out = paged.attend(loop, q, *staged[:, loop], pages, batch).float()
            own = (x.float().unflatten(0, (2, size)) for x in (q, k, v))
            difference = (out.unflatten(0, (2, size)) - reference(loop, 0, *own)).abs().max().item()
            worst = difference if difference != difference else max(worst, difference)
        paged.write(pages, batch.slots, *staged)
        done += size
    if not worst <= TOLERANCE:
        raise ResidualQuantError(
            f"the packed attention of this machine differs from the reference by {worst:.3g} "
            f"(at most {TOLERANCE} is rounding): please report the GPU, its driver and the versions in use"
        )
    logger.info("residualquant: packed attention checked in %.1f s, off by %.1g", time.monotonic() - begun, worst)
    return worst


def _trial_batch(done: int, size: int, page_tokens: int, device: torch.device) -> StepBatch:
    """Two requests that have ``done`` tokens and get ``size`` more; their pages are neither in order nor adjacent."""
    table = torch.tensor([[7, 2, 5, 8], [1, 6, 3, 4]], dtype=torch.int32, device=device)
    columns = torch.arange(done, done + size, device=device)
    starts = torch.tensor([0, size, 2 * size], dtype=torch.int32, device="cpu")
    return StepBatch(
        query_start=starts.to(device),
        query_start_cpu=starts,
        seq_lens=torch.full((2,), done + size, dtype=torch.int32, device=device),
        block_table=table,
        slots=(table[:, columns // page_tokens] * page_tokens + columns % page_tokens).flatten(),
        decodes=2 if size == 1 else 0,
        beginnings=0 if done else 2,
    )


def _trial_states(
    generator: torch.Generator, shape: KVShape, groups: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of every loop, of variance one, each loop near the one before, as a looped model's are."""

    def draw(heads: int) -> Tensor:
        sizes = tokens, heads, shape.head_dim
        return torch.randn(sizes, generator=generator, dtype=torch.float32, device=generator.device)

    heads = shape.kv_heads * groups, shape.kv_heads, shape.kv_heads
    base, loops = [draw(count) for count in heads], []
    for _ in range(shape.loops):
        base = [(x + 0.3 * draw(count)) / 1.09**0.5 for x, count in zip(base, heads)]
        loops.append(tuple(x.to(device, dtype) for x in base))
    return loops


def report_pages(layers: list[LoopedAttention]) -> None:
    """Log what a token costs in this process, given all its layers, and how many fit."""
    token, bf16 = bytes_per_token(layers)
    fit = len(layers[0].kv_cache) * layers[0].paged.page_tokens
    logger.info(
        "residualquant: KV of one token takes %s bytes, in BF16 %s (%.2fx)", f"{token:,}", f"{bf16:,}", bf16 / token
    )
    logger.info("residualquant: %s tokens fit (BF16: %s)", f"{fit:,}", f"{fit * token // bf16:,}")
    logger.info(
        "residualquant: staging takes %s bytes for steps of up to %s tokens (max_num_batched_tokens)",
        f"{sum(layer.staged.nbytes for layer in layers):,}", f"{layers[0].staged.shape[2]:,}",
    )  # fmt: skip
