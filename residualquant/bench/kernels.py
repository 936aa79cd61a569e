"""Decode attention, prefill and the writer of pages on a GPU, beside the best BF16 attention: ``make bench-gpu``.

Expected before measuring: both are bound by memory, so packed attention takes its bytes (``decode_attention_cost``)
over the copy bandwidth, and all four loops of INT2/4 g=32 at most 2.47 times less than BF16. The goals are 75 % of the
copy bandwidth per loop and 1.9 times BF16 over four loops, at D = 128, 16k tokens, batch 8 and more. Loops coded along
a chain (reference "next") read 1.3 times as much. The writer is to take at most 3 % of a decode step.

Every timing has a cold second-level cache: a CUDA graph goes through as many disjoint sets of pages as make up several
times that cache, and the time of a launch is a replay's over the number of launches. After a launch outside the graph
and one replay, it is the median of replays during 80 ms (30 ms for each BF16 way, of which the fastest counts), at
least 5 and at most 200. A time is only reported after the same launch, on poisoned output, agreed with the reference:
attention within a tolerance, for the first and last sequence and all heads; the writer to the byte.

Rows are kept as they come, in data/h200/NAME.partial.csv; a table of data/h200 is replaced when its whole grid is done,
so never by a run with options, and the figure is drawn then. `make kernels` beforehand saves compiling in turn.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from residualquant.bench import Table, prefill
from residualquant.bench.gpu import (
    BF16_SECONDS,
    CACHE_BYTES,
    MODELS,
    Copy,
    copy_bandwidth,
    orthogonal,
    random_layer,
    repeat_pages,
    row_of,
    time_launches,
)
from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.kernels.decode_attention import (
    Past,
    decode_attention,
    decode_attention_cost,
    decode_attention_reference,
    workspace,
)
from residualquant.kernels.pack_kv import pack_kv, pack_kv_cost, pack_kv_reference
from residualquant.layout import PageLayout
from residualquant.pages import allocate_pages
from residualquant.repro.paths import data_dir, figures_dir, show
from residualquant.vllm.flash_attention import flash_attention_ways

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
QUICK = ((16384, 1), (16384, 8), (16384, 32), (4096, 64))
LOOPS = {"residual loop": (0,), "anchor loop": (3,), "four loops": (0, 1, 2, 3)}
OPERATIONS = {"last": tuple(LOOPS), "next": ("four loops",)}  # by what a loop is coded against
WRITER_TOKENS = (1, 8, 64, 256, 2048, 8192)
WRITER_LAYERS = 24  # as many launches a graph, each on its own states
POISON = 0xA5  # of pages before the writer
ROTATION_TOLERANCE = 1e-4  # of a rotated value, against FP64
TOLERANCE = 2e-3  # relative L2 per query and head, against FP64
MEMORY_BYTES = 100 * 2**30  # of pages or of BF16 states; larger cases are left out


@dataclass(frozen=True)
class Timing:
    """One row of data/h200/kernels.csv; times in microseconds, speeds in TB/s.

    ``copy_way`` is what copied fastest, ``bf16_us`` is the fastest BF16 attention for as many loops, ``speedup`` over
    it; ``ideal_speedup`` over BF16 that would run at the copy bandwidth.
    """

    gpu: str
    torch: str
    model: str
    config: str
    reference: str
    operation: str
    backend: str
    context: int
    batch: int
    splits: int
    read_bytes: int
    median_us: float
    p20_us: float
    p80_us: float
    tb_per_s: float
    copy_way: str
    copy_tb_per_s: float
    fraction_of_copy: float
    error: float
    bf16_way: str
    bf16_us: float
    speedup: float
    ideal_speedup: float


@dataclass(frozen=True)
class WriterTiming:
    """One row of data/h200/writer.csv: packing new tokens of one layer, all loops, K and V; times in microseconds."""

    gpu: str
    torch: str
    model: str
    config: str
    rotation: str
    tokens: int
    moved_bytes: int
    median_us: float
    p20_us: float
    p80_us: float
    tb_per_s: float


class Case:
    """Packed pages of one layer for ``batch`` sequences of ``context`` tokens, in as many sets as the cache asks for.

    Args:
        model: a key of ``MODELS``.
        context, batch: past tokens and sequences.
        prefer: as for ``decode_attention``.
        reference: what the loops are coded against.
    """

    def __init__(self, model: str, context: int, batch: int, prefer: str | None, reference: str = "last"):
        self.model, (self.heads, self.head_dim) = model, MODELS[model]
        self.context, self.batch, self.prefer = context, batch, prefer
        self.layout, self.matrices, self.means, template = random_layer(self.heads, self.head_dim, reference, "cuda")
        draw = torch.Generator("cuda").manual_seed(0)
        per_sequence = -(-context // self.layout.page_tokens)
        smallest = decode_attention_cost(self.layout, 3, context * batch, self.heads, self.heads)[0]
        self.sets = max(1, math.ceil(CACHE_BYTES / smallest))
        count = self.sets * batch * per_sequence
        self.pages = repeat_pages(template, count, draw)
        order = torch.randperm(count, generator=draw, device="cuda").int()
        self.tables = order.view(self.sets, batch, per_sequence)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        shape = (batch, self.heads, self.head_dim)
        self.q, self.k, self.v = (torch.randn(shape, generator=draw, device="cuda").bfloat16() for _ in "qkv")
        self.scratch = workspace(batch, self.heads, self.heads, self.head_dim, context, "cuda")
        self.out = torch.empty_like(self.q)
        self.errors: dict[int, float] = {}

    @staticmethod
    def page_bytes(model: str, context: int, batch: int) -> int:
        """Bytes that the pages of such a case take at least, and BF16 states of one loop."""
        heads, head_dim = MODELS[model]
        packed = PageLayout(preset("INT2/4 g=32"), head_dim).page_bytes_per_head / 16
        return int(context * batch * heads * max(packed, 4 * head_dim))

    def past(self, which: int, rows: slice = slice(None)) -> Past:
        """One set of pages, of some sequences."""
        return Past(self.pages, self.layout, self.tables[which, rows], self.lengths[rows], *self.matrices, self.means)

    def launch(self, loop: int, which: int, out: Tensor | None = None) -> None:
        """One launch of the op on one set of pages."""
        out = self.out if out is None else out
        decode_attention(self.q, self.k, self.v, self.past(which), loop, self.scratch, out=out, prefer=self.prefer)

    def error(self, loop: int) -> float:
        """Largest relative L2 error over the heads of the first and last sequence, of FP32 output poisoned before.

        Computed once a loop.

        Raises:
            ResidualQuantError: it is above ``TOLERANCE``, or something was not written.
        """
        if loop in self.errors:
            return self.errors[loop]
        out = torch.full(self.q.shape, torch.nan, device="cuda")
        self.launch(loop, 0, out)
        rows = slice(None, None, max(1, self.batch - 1))
        tokens = self.q[rows], self.k[rows], self.v[rows]
        reference = decode_attention_reference(*tokens, self.past(0, rows), loop)
        error = ((out[rows] - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()
        if not error < TOLERANCE or not out.isfinite().all():
            raise ResidualQuantError(f"loop {loop} at {self.context} x {self.batch} is wrong by {error}: no time given")
        self.errors[loop] = error
        return error


def best_bf16(heads: int, head_dim: int, context: int, batch: int) -> tuple[str, float]:
    """The fastest way to attend with one BF16 query token to the context, and its median seconds: torch's, or
    FlashAttention 3 where vLLM brings it, over contiguous states and over pages of 16 tokens."""
    shape = (batch, heads, context, head_dim)
    sets = max(1, math.ceil(CACHE_BYTES / (4 * math.prod(shape))))
    q = torch.randn(batch, heads, 1, head_dim, device="cuda").bfloat16()
    states = [[torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in "kv"] for _ in range(sets)]

    def sdpa(backend: SDPBackend, k: Tensor, v: Tensor) -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v)

    def products(k: Tensor, v: Tensor) -> None:
        torch.softmax(q @ k.mT * head_dim**-0.5, -1) @ v

    ways: dict[str, Callable] = {"two products": products, **flash_attention_ways(heads, head_dim, context, batch)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        ways[f"sdpa {backend.name.lower()}"] = lambda k, v, backend=backend: sdpa(backend, k, v)
    times = {}
    for name, way in ways.items():
        try:
            times[name] = time_launches([lambda way=way, kv=kv: way(*kv) for kv in states], budget=BF16_SECONDS)[0]
        except RuntimeError:  # this build of torch lacks the backend, or it refuses the shape
            torch.cuda.synchronize()
    return min(times.items(), key=lambda item: item[1])


def measure(model: str, context: int, batch: int, copy: Copy, prefer: str | None) -> Iterator[Timing]:
    """Rows of one case: a residual loop, the anchor loop, the four loops of a layer, and those of a chain."""
    best = best_bf16(*MODELS[model], context, batch)
    for reference, operations in OPERATIONS.items():
        case = Case(model, context, batch, prefer, reference)
        for operation in operations:
            yield measure_operation(case, operation, copy, *best)
        del case  # its memory, before the next


def measure_operation(case: Case, operation: str, copy: Copy, bf16_way: str, bf16_seconds: float) -> Timing:
    """One row, after a comparison with the reference."""
    loops, tokens = LOOPS[operation], case.context * case.batch
    error = max(case.error(loop) for loop in loops)
    seconds = time_launches(
        [lambda which=which: [case.launch(loop, which) for loop in loops] for which in range(case.sets)]
    )
    read = sum(decode_attention_cost(case.layout, loop, tokens, case.heads, case.heads)[0] for loop in loops)
    bf16_bytes = len(loops) * 4 * case.head_dim * case.heads * tokens
    return Timing(
        **row_of(case, seconds),
        reference=case.layout.config.reference,
        operation=operation,
        backend=case.prefer or "cuda",
        context=case.context,
        batch=case.batch,
        splits=case.scratch.lse.shape[2],
        read_bytes=read,
        tb_per_s=read / seconds[0] / 1e12,
        copy_way=copy.way,
        copy_tb_per_s=copy.speed / 1e12,
        fraction_of_copy=read / seconds[0] / copy.speed,
        error=error,
        bf16_way=bf16_way,
        bf16_us=len(loops) * bf16_seconds * 1e6,
        speedup=len(loops) * bf16_seconds / seconds[0],
        ideal_speedup=bf16_bytes / copy.speed / seconds[0],
    )


class WriterCase:
    """New tokens of ``WRITER_LAYERS`` layers and the pages of one.

    Args:
        model: a key of ``MODELS``.
        rotation: "optr_h" or "none".
        tokens: new ones.
        device: where.
    """

    def __init__(self, model: str, rotation: str, tokens: int, device: str = "cuda"):
        self.model, (heads, head_dim) = model, MODELS[model]
        self.layout = PageLayout(preset("INT2/4 g=32", rotation=rotation), head_dim)
        draw = torch.Generator(device).manual_seed(0)
        self.turn = (None, None, None)
        if rotation != "none":
            means = torch.randn(self.layout.config.loops, heads, head_dim, generator=draw, device=device)
            self.turn = (*(orthogonal(heads, head_dim, draw) for _ in "kv"), means)
        shape = (2, self.layout.config.loops, tokens, heads, head_dim)
        self.layers = [torch.randn(shape, generator=draw, device=device).bfloat16() for _ in range(WRITER_LAYERS)]
        self.pages = allocate_pages(self.layout, tokens // self.layout.page_tokens + 1, heads, device)
        self.slots = torch.randperm(len(self.pages) * self.layout.page_tokens, generator=draw, device=device)[:tokens]

    def launch(self, kv: Tensor, **more: Tensor) -> None:
        """Write one layer's tokens."""
        pack_kv(self.pages, self.layout, self.slots, *kv, *self.turn, **more)

    def check(self) -> None:
        """Compare what a launch on poisoned pages leaves with the reference, byte for byte.

        A rotated value may round to either side of a tie, so the reference then codes the values that the same launch
        rotated, which are compared with FP64.

        Raises:
            ResidualQuantError: a byte or a rotated value is wrong.
        """
        states, turn = self.layers[0], self.turn
        self.launch_poisoned(states)
        written = self.pages.clone()
        if turn[0] is not None:
            rotated = torch.full(states.shape, torch.nan, device=states.device)
            self.launch_poisoned(states, rotated=rotated)
            self._agree(torch.equal(self.pages, written), "other bytes where the rotated values are asked for")
            for given, z, matrix in zip(states, rotated, turn):
                for loop in range(len(given)):
                    exact = torch.einsum("thd,hde->the", given[loop].half().double(), matrix.double())
                    error = (z[loop] - exact).abs().max().item() if exact.numel() else 0.0
                    self._agree(error < ROTATION_TOLERANCE, f"a rotated value wrong by {error}")
            identity = torch.eye(self.layout.head_dim, dtype=torch.float16, device=states.device)
            states, turn = rotated, (identity, identity, turn[2])
        expected = self.pages.fill_(POISON)
        pack_kv_reference(expected, self.layout, self.slots, *states, *turn)
        self._agree(torch.equal(expected, written), "other bytes than the reference")

    def launch_poisoned(self, kv: Tensor, **more: Tensor) -> None:
        """The same, on pages of ``POISON``."""
        self.pages.fill_(POISON)
        self.launch(kv, **more)

    def _agree(self, right: bool, what: str) -> None:
        if not right:
            raise ResidualQuantError(f"the writer of {len(self.slots)} tokens of {self.model}: {what}; no time given")


def measure_writer(case: WriterCase) -> WriterTiming:
    """One row of the writer, after a comparison with the reference."""
    case.check()
    seconds = time_launches([lambda kv=kv: case.launch(kv) for kv in case.layers])
    tokens, heads = len(case.slots), case.pages.shape[1]
    moved = pack_kv_cost(case.layout, tokens, heads)[0]
    return WriterTiming(
        **row_of(case, seconds),
        rotation=case.layout.config.rotation,
        tokens=tokens,
        moved_bytes=moved,
        tb_per_s=moved / seconds[0] / 1e12,
    )


def run(quick: bool, prefer: str, models: list[str]) -> list[Table]:
    """The tables of decode attention, writer and prefill, each finished if it is whole; rows are printed as they come,
    with the seconds since the start."""
    if not torch.cuda.is_available():
        raise ResidualQuantError("there is no GPU here: `make bench-gpu` needs one")
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {text}", flush=True)

    copy = copy_bandwidth()
    say(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"copy bandwidth {copy.speed / 1e12:.2f} TB/s by {copy.way}"
    )
    whole = not quick and prefer == "cuda" and set(models) == set(MODELS)
    kinds = {"kernels": Timing, "writer": WriterTiming, "prefill": prefill.PrefillTiming}
    kernels, writer, prompts = tables = [Table(data_dir("h200") / f"{name}.csv", kind) for name, kind in kinds.items()]
    for model, rotation, tokens in itertools.product(models, ("optr_h", "none"), WRITER_TOKENS):
        row = measure_writer(WriterCase(model, rotation, tokens))
        say(f"{model:11s} writer, rotation {rotation:6s} {tokens:6d} tokens {row.median_us:9.1f} us a layer")
        writer.add(row)
    if whole:
        writer.finish()
    for model in models:
        for row in prefill.measure(model):
            say(
                f"{model:11s} prefill, {row.queries} after {row.past:5d} tokens, {row.operation:13s} "
                f"{row.median_us:9.1f} us, {row.tflop_per_s:5.1f} TFLOP/s, {row.speedup:5.2f}x {row.bf16_way}, "
                f"error {row.error:.1e}"
            )
            prompts.add(row)
    if whole:
        prompts.finish()
    for model, (context, batch) in itertools.product(models, QUICK if quick else itertools.product(CONTEXTS, BATCHES)):
        if (needed := Case.page_bytes(model, context, batch)) > MEMORY_BYTES:
            say(f"{model:11s} {context:6d} x {batch:2d} left out: {needed / 2**30:.0f} GiB")
            continue
        rows = []
        for row in measure(model, context, batch, copy, prefer):
            say(
                f"{model:11s} {context:6d} x {batch:2d} {row.reference} {row.operation:13s} "
                f"{row.median_us:9.1f} us {row.fraction_of_copy:6.1%} of copying, "
                f"{row.speedup:5.2f}x {row.bf16_way}, {row.ideal_speedup:4.2f}x ideal BF16, "
                f"error {row.error:.1e}, splits {row.splits}"
            )
            rows.append(row)
        kernels.add(*rows)
        torch.cuda.empty_cache()
    if whole:
        kernels.finish()
    return tables


def draw_roofline(rows: list[Timing]) -> list[Path]:
    """Fraction of the copy bandwidth by bytes read, one panel per operation; figures/h200/kernels.png and .pdf."""
    from residualquant.repro.plots import TEXT, Picture, house_style, new_figure

    with house_style():
        figure = new_figure(TEXT, 2.3)
        panels = figure.subplots(1, len(LOOPS), sharey=True)
        for panel, operation in zip(panels, LOOPS):
            mine = [row for row in rows if row.operation == operation and row.reference == "last"]
            for model in dict.fromkeys(row.model for row in mine):
                points = sorted((row.read_bytes / 1e6, row.fraction_of_copy) for row in mine if row.model == model)
                panel.plot(*zip(*points), ".", label=model)
            panel.axhline(0.75, linewidth=0.8, linestyle="--", color="grey")
            panel.set(xscale="log", ylim=(0, 1.05), title=operation, xlabel="MB read")
        panels[0].set_ylabel("fraction of copy bandwidth")
        panels[0].legend(loc="lower right")
        text = "Decode attention: bytes read per second over the copy bandwidth, by the bytes of a launch."
        return Picture(figure, text).save(figures_dir("h200"), "kernels")


def main() -> None:
    """Measure, print and write; ``--quick`` takes less than a minute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four shapes of Ouro-1.4B only")
    parser.add_argument("--prefer", choices=("cuda", "triton"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=None)
    arguments = parser.parse_args()
    models = arguments.models or (["Ouro-1.4B"] if arguments.quick else list(MODELS))
    kernels, *_ = tables = run(arguments.quick, arguments.prefer, models)
    written = [table.written for table in tables]
    if kernels.written == kernels.path:
        written += draw_roofline(kernels.rows)
    print(f"wrote {', '.join(map(show, written))}")


if __name__ == "__main__":
    main()
