"""What the benchmarks of the GPU kernels share: shapes, pages, a clock with a cold second-level cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from residualquant.config import preset
from residualquant.layout import PageLayout
from residualquant.pages import allocate_pages, write_pages
from residualquant.residual import encode
from residualquant.rotation import Rotation

MODELS = {"Ouro-1.4B": (16, 128), "Huginn-0125": (55, 96)}  # KV heads, head dim; 4 loops in a group
CACHE_BYTES = 256 * 2**20  # what one go through the page sets must read at least; an H200's cache has 60 MB
SECONDS, BF16_SECONDS = 0.08, 0.03  # of replays: for a row, for each BF16 way
TEMPLATE_PAGES = 256  # distinct pages that the others repeat


@dataclass(frozen=True)
class Copy:
    """How bytes are copied fastest here, and how many are read and written in a second."""

    way: str
    speed: float


def copy_bandwidth() -> Copy:
    """The fastest way to copy 2 GiB within the device: the driver's, or a kernel that reads and writes every element.

    The driver's copy is timed outside a graph, where it is slower.
    """
    source = torch.empty(2**29, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    ways = {
        "cudaMemcpy": _time([lambda: target.copy_(source)], 0.25)[0],
        "elementwise kernel": time_launches([lambda: torch.neg(source, out=target)])[0],
    }
    way = min(ways, key=ways.get)
    return Copy(way, 2 * source.nbytes / ways[way])


def time_launches(launches: list[Callable[[], object]], budget: float = SECONDS) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of the seconds one launch takes, over replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    median, p20, p80 = _time([graph.replay], budget)
    return median / len(launches), p20 / len(launches), p80 / len(launches)


def row_of(case, seconds: tuple[float, float, float]) -> dict[str, object]:
    """What the rows of all operations say alike, with the ``seconds`` of :func:`time_launches`."""
    median, p20, p80 = (1e6 * each for each in seconds)
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": case.model,
        "config": case.layout.config.label, "median_us": median, "p20_us": p20, "p80_us": p80,
    }  # fmt: skip


def _time(launches: list[Callable[[], object]], budget: float) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of the seconds that all ``launches`` together take, by events around them."""
    torch.cuda.synchronize()
    seconds: list[float] = []
    begun = time.perf_counter()
    while len(seconds) < 5 or (time.perf_counter() - begun < budget and len(seconds) < 200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        for launch in launches:
            launch()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    tenths = statistics.quantiles(seconds, n=10)
    return statistics.median(seconds), tenths[1], tenths[7]


def orthogonal(heads: int, dim: int, draw: torch.Generator) -> Tensor:
    """Random rotations, [heads, dim, dim] fp16, where ``draw`` is."""
    return torch.linalg.qr(torch.randn(heads, dim, dim, generator=draw, device=draw.device))[0].half().contiguous()


@cache
def random_layer(
    heads: int, head_dim: int, reference: str, device: str
) -> tuple[PageLayout, list[Tensor], Tensor, Tensor]:
    """Layout at INT2/4 g=32, rotations of K and V, key means and :func:`template_pages` of a layer; made once, since
    making them takes longer than timing most cases.

    Args:
        heads, head_dim: H, D.
        reference: what the loops are coded against.
        device: where.
    """
    layout = PageLayout(preset("INT2/4 g=32", rotation="optr_h", reference=reference), head_dim)
    draw = torch.Generator(device).manual_seed(0)
    matrices = [orthogonal(heads, head_dim, draw) for _ in "kv"]
    means = 0.1 * torch.randn(layout.config.loops, heads, head_dim, generator=draw, device=device)
    return layout, matrices, means, template_pages(layout, matrices, means, draw)


def template_pages(layout: PageLayout, matrices: list[Tensor], means: Tensor, draw: torch.Generator) -> Tensor:
    """``TEMPLATE_PAGES`` pages of tokens whose loops resemble each other."""
    tokens, (loops, heads, head_dim) = TEMPLATE_PAGES * layout.page_tokens, means.shape
    pages = allocate_pages(layout, TEMPLATE_PAGES, heads, draw.device)
    packed = []
    for matrix, mean in zip(matrices, (means, None)):
        common, own = (torch.randn(n, tokens, heads, head_dim, generator=draw, device=draw.device) for n in (1, loops))
        packed.append(encode(common + 0.3 * own, layout.config, Rotation(matrix, mean)))
    write_pages(pages, layout, torch.arange(tokens, device=draw.device), *packed)
    return pages


def repeat_pages(template: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """``count`` pages, each a random one of ``template``'s, filled in pieces so that no large copy is made."""
    pages = template.new_empty(count, *template.shape[1:])
    for piece in pages.split(4096):
        choice = torch.randint(len(template), (len(piece),), generator=draw, device=draw.device)
        torch.index_select(template, 0, choice, out=piece)
    return pages
