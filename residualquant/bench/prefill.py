"""Prefill in chunks over packed pages beside causal BF16 attention over the same tokens; run by ``make bench-gpu``.

Expected before measuring: bound by the two products, so packed attention does not beat BF16; it adds rebuilding and the
rotations of queries and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from residualquant.bench.gpu import (
    BF16_SECONDS,
    CACHE_BYTES,
    MODELS,
    random_layer,
    repeat_pages,
    row_of,
    time_launches,
)
from residualquant.errors import ResidualQuantError
from residualquant.kernels.prefill_attention import (
    prefill_attention,
    prefill_attention_cost,
    prefill_attention_reference,
)
from residualquant.vllm.flash_attention import flash_attention_prefill_ways

QUERIES = 2048
PASTS = (0, 2048, 16384)
LOOPS = {"residual loop": 0, "anchor loop": 3}
TOLERANCE = 4e-3  # of BF16 output, against FP32


@dataclass(frozen=True)
class PrefillTiming:
    """One row of data/h200/prefill.csv: a step of ``queries`` new tokens of one sequence, one loop; in microseconds.

    ``bf16_us`` is the fastest causal BF16 attention over the same tokens, ``speedup`` over it.
    """

    gpu: str
    torch: str
    model: str
    config: str
    operation: str
    queries: int
    past: int
    moved_bytes: int
    operations: int
    median_us: float
    p20_us: float
    p80_us: float
    tb_per_s: float
    tflop_per_s: float
    error: float
    bf16_way: str
    bf16_us: float
    speedup: float


class PrefillCase:
    """A step of ``QUERIES`` new tokens of one sequence, in as many sets as the cache asks for.

    Args:
        model: a key of ``MODELS``.
        past: packed tokens before them.
        device: where.
        dtype: of q, k, v and the output.
    """

    def __init__(self, model: str, past: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16):
        self.model, (heads, head_dim) = model, MODELS[model]
        self.past, self.queries = past, QUERIES
        self.layout, matrices, means, template = random_layer(heads, head_dim, "last", device)
        draw = torch.Generator(device).manual_seed(0)
        self.turn = (*matrices, means)
        sets = max(1, math.ceil(CACHE_BYTES / self.cost(LOOPS["anchor loop"])[0]))
        width = max(1, -(-past // self.layout.page_tokens))
        self.pages = repeat_pages(template, sets * width, draw)
        self.tables = torch.randperm(len(self.pages), generator=draw, device=device).int().view(sets, 1, width)
        shape = (self.queries, heads, head_dim)
        self.states = [
            [torch.randn(shape, generator=draw, device=device).to(dtype) for _ in "qkv"] for _ in range(sets)
        ]
        self.start = torch.tensor([0, self.queries], dtype=torch.int32, device=device)
        self.lens = torch.tensor([past + self.queries], dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.states[0][0])

    def cost(self, loop: int) -> tuple[int, int]:
        """Bytes and operations of a launch."""
        heads = MODELS[self.model][0]
        return prefill_attention_cost(self.layout, loop, self.queries, self.past, heads, heads)

    def arguments(self, loop: int, which: int) -> tuple:
        """What kernel and reference have in common, but the scale."""
        return *self.states[which], self.pages, self.layout, loop, self.tables[which], self.start, self.lens

    def launch(self, loop: int, which: int) -> None:
        """One launch of the op on one set."""
        scale = self.layout.head_dim**-0.5
        prefill_attention(self.out, *self.arguments(loop, which), self.queries, scale, *self.turn)

    def error(self, loop: int) -> float:
        """Largest relative L2 error of a query and head, of output poisoned before.

        Raises:
            ResidualQuantError: it is above ``TOLERANCE``, or something was not written.
        """
        self.out.fill_(torch.nan)
        self.launch(loop, 0)
        expected = prefill_attention_reference(*self.arguments(loop, 0), self.layout.head_dim**-0.5, *self.turn)
        error = ((self.out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
        if not error < TOLERANCE:
            where = f"loop {loop} of {self.queries} queries after {self.past} tokens"
            raise ResidualQuantError(f"prefill of {where} is wrong by {error}: no time given")
        return error


def best_bf16_prefill(case: PrefillCase) -> tuple[str, float]:
    """The fastest causal BF16 attention of a step's tokens over the past and each other, and its median seconds."""
    (heads, head_dim), total = MODELS[case.model], case.past + case.queries
    states = [
        [q, *(torch.empty(total, heads, head_dim, dtype=q.dtype, device=q.device).normal_() for _ in "kv")]
        for q, _, _ in case.states
    ]
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    backends += [] if case.past else [SDPBackend.CUDNN_ATTENTION]  # it knows no causal mask that ends at the last token
    ways = prefill_ways(case.queries, case.past, backends)
    ways |= flash_attention_prefill_ways(case.queries, case.past)
    times = {}
    for name, way in ways.items():
        try:
            times[name] = time_launches([lambda way=way, qkv=qkv: way(*qkv) for qkv in states], BF16_SECONDS)[0]
        except RuntimeError:  # this build of torch lacks the backend, or it refuses the shape
            torch.cuda.synchronize()
    return min(times.items(), key=lambda item: item[1])


def prefill_ways(
    queries: int, past: int, backends: Sequence[SDPBackend]
) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """torch's ways of causal attention of the last ``queries`` of ``past + queries`` tokens, by name.

    Returns:
        functions of q [T, H, D], k and v [past + T, H, D] that give [T, H, D].
    """

    def attend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = dict(attn_mask=causal_lower_right(queries, past + queries)) if past else dict(is_causal=True)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), **mask)
        return out[0].transpose(0, 1)

    return {f"sdpa {backend.name.lower()}": partial(attend, backend) for backend in backends}


def measure_prefill(case: PrefillCase, operation: str, bf16_way: str, bf16_seconds: float) -> PrefillTiming:
    """One row of prefill, after a comparison with the reference."""
    loop = LOOPS[operation]
    error = case.error(loop)
    seconds = time_launches([lambda which=which: case.launch(loop, which) for which in range(len(case.states))])
    moved, operations = case.cost(loop)
    return PrefillTiming(
        **row_of(case, seconds),
        operation=operation,
        queries=case.queries,
        past=case.past,
        moved_bytes=moved,
        operations=operations,
        tb_per_s=moved / seconds[0] / 1e12,
        tflop_per_s=operations / seconds[0] / 1e12,
        error=error,
        bf16_way=bf16_way,
        bf16_us=bf16_seconds * 1e6,
        speedup=bf16_seconds / seconds[0],
    )


def measure(model: str) -> Iterator[PrefillTiming]:
    """All rows of a model."""
    for past in PASTS:
        case = PrefillCase(model, past)
        best = best_bf16_prefill(case)
        for operation in LOOPS:
            yield measure_prefill(case, operation, *best)
        del case  # its memory, before the next
        torch.cuda.empty_cache()
