"""Attention of a step over packed past and BF16 present, against FP32 torch (Triton's interpreter without a GPU)."""

import pytest
import torch

triton = pytest.importorskip("triton")


from residualquant import KVQuantConfig, preset  # noqa: E402
from residualquant.bench import gpu  # noqa: E402
from residualquant.bench import prefill as bench  # noqa: E402
from residualquant.errors import ResidualQuantError  # noqa: E402
from residualquant.kernels.pack_kv import pack_kv_reference  # noqa: E402
from residualquant.kernels.prefill_attention import (  # noqa: E402
    prefill_attention,
    prefill_attention_cost,
    prefill_attention_reference,
)
from residualquant.layout import PageLayout  # noqa: E402
from residualquant.pages import allocate_pages  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = 0x7F  # as FP8 metadata: NaN


pytestmark = pytest.mark.usefixtures("loaded_loop_bounds")


def problem(layout, heads, repeat, past, new, dtype, seed=0):
    """Arguments of the attention but the loop: sequences with ``past`` packed and ``new`` present tokens each."""
    generator = torch.Generator().manual_seed(seed)
    cfg, head_dim, page = layout.config, layout.head_dim, layout.page_tokens

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    matrices = means = None
    if cfg.rotation != "none":
        matrices = torch.linalg.qr(torch.randn(2, heads, head_dim, head_dim, generator=generator))[0]
        matrices = matrices.half().contiguous().to(DEVICE)
        means = random(cfg.loops, heads, head_dim) * 0.3 if cfg.rotation == "optr_h" else None
    turn = (*(matrices if matrices is not None else (None, None)), means)
    width = -(-max(p + n for p, n in zip(past, new)) // page)
    table = torch.randperm(len(past) * width, generator=generator).view(len(past), width).int().to(DEVICE)
    slots = [table[b].long().repeat_interleave(page)[:p] * page + torch.arange(p, device=DEVICE) % page
             for b, p in enumerate(past)]  # fmt: skip
    pages = allocate_pages(layout, table.numel(), heads, DEVICE).fill_(GARBAGE)
    states = (random(cfg.loops, sum(past), heads, head_dim) for _ in range(2))
    pack_kv_reference(pages, layout, torch.cat(slots), *states, *turn)
    q, k, v = (random(sum(new), h, head_dim).to(dtype) for h in (heads * repeat, heads, heads))
    start = torch.tensor([0, *new]).cumsum(0).int().to(DEVICE)
    lens = torch.tensor([p + n for p, n in zip(past, new)]).int().to(DEVICE)
    return q, k, v, pages, table, start, lens, turn


def check(layout, heads, repeat, past, new, dtype, loops=None, out_dtype=None):
    """The relative L2 error of every query and head is below 2e-3; 4e-3 of BF16 states, whose weights are BF16 too."""
    q, k, v, pages, table, start, lens, turn = problem(layout, heads, repeat, past, new, dtype)
    for loop in loops or range(layout.config.loops):
        out = torch.full_like(q, torch.nan, dtype=out_dtype)
        scale = layout.head_dim**-0.5
        prefill_attention(out, q, k, v, pages, layout, loop, table, start, lens, max(new), scale, *turn)
        expected = prefill_attention_reference(q, k, v, pages, layout, loop, table, start, lens, scale, *turn)
        error = ((out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
        assert error < (4e-3 if dtype == torch.bfloat16 else 2e-3), (loop, error)


CASES = {  # layout, KV heads, query heads per KV head, past, present
    "last, key means": (PageLayout(preset("INT2/4 g=32", loops=2, rotation="optr_h"), 64), 1, 1, [17, 0], [3, 2]),
    "next, chained": (PageLayout(KVQuantConfig(bits=(2, 3, 4), reference="next"), 64), 1, 2, [5], [2]),
    "direct, g=16": (PageLayout(KVQuantConfig(bits=(1, 8), group_size=16, reference="direct"), 64), 2, 3, [5], [4]),
    "unit, 0 bits": (PageLayout(KVQuantConfig(bits=(0, 2, 4), coefficient="unit"), 96), 1, 1, [3], [1]),
    "first, g=64": (PageLayout(KVQuantConfig((4, 2), group_size=64, reference="first"), 128), 1, 1, [15, 16], [1, 3]),
    "D = 256": (PageLayout(preset("INT2/4 g=32", loops=2, rotation="optr_h"), 256), 1, 2, [37], [40]),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_reference(name):
    check(*CASES[name], dtype=torch.float32)


@pytest.mark.parametrize("name", ["last, key means", "D = 256"])
def test_attention_of_16_bit_states_is_the_reference(name):
    """They go by larger tiles."""
    check(*CASES[name], dtype=torch.float16)


@pytest.mark.parametrize(("rotation", "size"), [("optr_h", 7e4), ("none", 4e5)])
def test_queries_beyond_fp16_saturate(rotation, size):
    """One of such a size looks at a single token; without bounds all became NaN."""
    layout = PageLayout(preset("INT2/4 g=32", loops=2, rotation=rotation), 64)
    q, k, v, pages, table, start, lens, turn = problem(layout, 1, 1, [17], [2], torch.float32)
    q[1] = torch.eye(64, device=DEVICE)[5] * size
    out = torch.full_like(q, torch.nan)
    prefill_attention(out, q, k, v, pages, layout, 0, table, start, lens, 2, 0.125, *turn)
    expected = prefill_attention_reference(q, k, v, pages, layout, 0, table, start, lens, 0.125, *turn)
    assert ((out - expected).norm(dim=-1) < 2e-3 * expected.norm(dim=-1)).all()


def test_no_past_is_causal_attention():
    layout = PageLayout(preset("INT2/4 g=32", loops=2, rotation="optr_h"), 64)
    q, k, v, pages, table, start, lens, turn = problem(layout, 1, 2, [0], [5], torch.float32)
    out = torch.empty_like(q)
    prefill_attention(out, q, k, v, pages, layout, 1, table, start, lens, 5, 0.125, *turn)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))),
        is_causal=True,
        scale=0.125,
    )
    assert torch.allclose(out, expected.transpose(0, 1), atol=1e-5)


INT = torch.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": None}, "out must be a tensor, got None"),
        ({"out": torch.zeros(2, 1, 64, dtype=torch.int32)}, "out must be .* torch.int32"),
        ({"q": torch.zeros(2, 64)}, r"q must be .* \[T, Hq, D\], got \[2, 64\]"),
        ({"q": torch.zeros(2, 0, 64)}, "got 0 and 1"),
        ({"q": torch.zeros(2, 33, 64), "out": torch.zeros(2, 33, 64)}, "at most 32 query heads .* got 33"),
        ({"k": torch.zeros(2, 3, 64)}, "pages must be .* got"),
        ({"k": torch.zeros(2, 1, 64, device="meta")}, "k must be on .* got meta"),
        ({"k": lambda x: x.repeat(1, 1, 2)[..., ::2]}, "k must be contiguous"),
        ({"v": torch.zeros(2, 1, 64, dtype=torch.float64)}, "v must be .* torch.float64"),
        ({"v": None}, "v must be a tensor, got None"),
        ({"pages": None}, "pages must be a tensor .* got None"),
        ({"loop": 2}, "loop must be an integer from 0 to 1, got 2"),
        ({"loop": 1.0}, "loop must be an integer from 0 to 1, got 1.0"),
        ({"group": 2}, "group must be an integer from 0 to 0, got 2"),
        ({"block_table": None}, r"block_table must be .* \[B, M\], got None"),
        ({"block_table": torch.zeros(9, dtype=INT)}, r"block_table must be .* \[B, M\], got \[9\]"),
        ({"block_table": torch.zeros(1, 9, dtype=torch.int64)}, "block_table must be .* torch.int64"),
        ({"query_start": torch.zeros(1, dtype=INT)}, r"query_start must be \[2\] .* got \[1\]"),
        ({"query_start": None}, "query_start must be a tensor, got None"),
        ({"seq_lens": torch.zeros(1)}, "seq_lens must be .* torch.float32"),
        ({"seq_lens": None}, r"seq_lens must be .* \[B\], got None"),
        ({"max_queries": -1}, "max_queries must be at least 0, got -1"),
        ({"max_queries": 2.0}, "max_queries must be an integer, got 2.0"),
        ({"scale": float("inf")}, "scale must be a finite number, got inf"),
        ({"scale": None}, "scale must be a finite number, got None"),
        ({"k_matrix": None}, r"needs both matrices, got \['v_matrix'\]"),
        ({"k_means": torch.zeros(2, 1, 96)}, r"k_means must be \[2, 1, 64\] .* got \[2, 1, 96\]"),
        ({"check_table": True, "max_queries": 1}, r"by at most 1, got \[0, 2\]"),
        ({"check_table": True, "query_start": torch.tensor([0, 3], dtype=INT)}, r"within 2 tokens .* got \[0, 3\]"),
        ({"check_table": True, "seq_lens": torch.tensor([5000], dtype=INT)}, r"pages of a row, got \[4998\]"),
        ({"check_table": True, "seq_lens": torch.tensor([1], dtype=INT)}, r"pages of a row, got \[-1\]"),
        ({"check_table": True, "block_table": torch.full((1, 9), 77, dtype=INT)}, "got 77 to 77"),
    ],
)
def test_wrong_arguments(change, message):
    layout = CASES["last, key means"][0]
    q, k, v, pages, table, start, lens, turn = problem(layout, 1, 1, [3], [2], torch.float32)
    arguments = {"out": torch.empty_like(q), "q": q, "k": k, "v": v, "pages": pages, "layout": layout, "loop": 0}
    arguments |= {"block_table": table, "query_start": start, "seq_lens": lens, "max_queries": 2, "scale": 1.0}
    arguments |= dict(zip(("k_matrix", "v_matrix", "k_means"), turn))
    for name, x in change.items():
        here = isinstance(x, torch.Tensor) and x.device.type != "meta"
        arguments[name] = x.to(DEVICE) if here else x(arguments[name]) if callable(x) else x
    with pytest.raises(ValueError, match=message):
        prefill_attention(**arguments)


def test_no_sequences_are_no_launch():
    q, k, v, pages, _, _, _, turn = problem(CASES["last, key means"][0], 1, 1, [3], [0], torch.float32)
    table, start, lens = (torch.zeros(shape, dtype=INT, device=DEVICE) for shape in ((0, 4), 1, 0))
    layout = CASES["last, key means"][0]
    prefill_attention(q.clone(), q, k, v, pages, layout, 0, table, start, lens, 0, 1.0, *turn, check_table=True)


def test_cost():
    layout = PageLayout(preset("INT2/4 g=32"), 128)
    moved, operations = prefill_attention_cost(layout, 0, queries=16, past=1000, query_heads=16, heads=16)
    assert moved == 2 * 1000 * 16 * (72 + 42) + 2 * 16 * 32 * 128 * 2
    assert operations == 4 * 16 * 128 * (16 * 1000 + 16 * 17 // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": None}, "layout must be a PageLayout, got None"),
        ({"loop": 4}, "loop must be an integer from 0 to 3, got 4"),
        ({"queries": -1}, "queries must be at least 0, got -1"),
        ({"past": -1}, "past must be at least 0, got -1"),
        ({"past": 1.0}, "past must be an integer, got 1.0"),
        ({"heads": -1}, "heads must be at least 0, got -1"),
    ],
)
def test_what_has_no_cost_is_named(change, message):
    layout = PageLayout(preset("INT2/4 g=32"), 128)
    arguments = dict(layout=layout, loop=0, queries=16, past=1000, query_heads=16, heads=16)
    with pytest.raises(ValueError, match=message):
        prefill_attention_cost(**{**arguments, **change})


@pytest.mark.parametrize("past", [0, 37])
def test_benchmark_gives_a_time_only_where_the_values_are_right(monkeypatch, past):
    monkeypatch.setitem(bench.MODELS, "tiny", (2, 64))
    monkeypatch.setattr(gpu, "TEMPLATE_PAGES", 4)
    for name, value in (("QUERIES", 5), ("CACHE_BYTES", 1)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    launched = []
    monkeypatch.setattr(
        bench, "time_launches", lambda launches, *_: launched.extend(x() for x in launches) or (2.0, 1.0, 3.0)
    )
    case = bench.PrefillCase("tiny", past, DEVICE, torch.float32)
    for operation, loop in bench.LOOPS.items():
        row = bench.measure_prefill(case, operation, "way", 4.0)
        moved, operations = prefill_attention_cost(case.layout, loop, 5, past, 2, 2)
        assert (row.operation, row.queries, row.past, row.bf16_us, row.speedup) == (operation, 5, past, 4e6, 2.0)
        assert (row.moved_bytes, row.operations, row.tflop_per_s) == (moved, operations, operations / 2e12)
        assert row.error < 1e-3
    assert len(launched) == 2
    monkeypatch.setattr(bench, "prefill_attention", lambda out, *_: out[:-1].fill_(0))
    with pytest.raises(ResidualQuantError, match=f"5 queries after {past} tokens is wrong by .*: no time given"):
        bench.measure_prefill(case, "anchor loop", "way", 4.0)
    assert len(launched) == 2


@pytest.mark.parametrize("past", [0, 6])
def test_bf16_attention_of_the_benchmark_is_causal_over_the_past(past):
    q, k, v = (torch.randn(n, 2, 16) for n in (5, past + 5, past + 5))
    scores = torch.einsum("qhd,thd->hqt", q, k) * 16**-0.5
    weights = scores.masked_fill(torch.ones_like(scores[0], dtype=bool).triu(past + 1), -torch.inf).softmax(-1)
    expected = torch.einsum("hqt,thd->qhd", weights, v)
    ways = bench.prefill_ways(5, past, [torch.nn.attention.SDPBackend.MATH])
    assert all(torch.allclose(way(q, k, v), expected, atol=1e-5) for way in ways.values()) and len(ways) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["out as the states", "out float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("reference", ["last", "direct", "previous"])
def test_attention_on_a_gpu(reference, head_dim, dtype, out_dtype):
    layout = PageLayout(preset("INT2/4 g=32", reference=reference, rotation="hadamard"), head_dim)
    check(layout, 2, 2, [300, 17, 0, 64], [70, 1, 130, 33], dtype, (0, 3), out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_graph_replay_is_eager_on_a_gpu(head_dim):
    layout = PageLayout(preset("INT2/4 g=32", rotation="optr_h"), head_dim)
    sizes = (layout, 2, 2, [300, 17, 0, 64], [70, 1, 130, 33], torch.bfloat16)
    (q, k, v, pages, table, start, lens, turn), other = problem(*sizes), problem(*sizes, seed=1)
    eager, replayed = (torch.full((4, *q.shape), torch.nan, dtype=q.dtype, device=DEVICE) for _ in range(2))

    def step(outs):
        for loop, out in enumerate(outs):
            prefill_attention(out, q, k, v, pages, layout, loop, table, start, lens, 130, head_dim**-0.5, *turn)

    step(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(replayed)
    for given, new in zip((q, k, v, pages, table, *turn), (*other[:5], *other[7])):
        given.copy_(new)
    eager.fill_(torch.nan)
    step(eager)
    for _ in range(3):
        replayed.fill_(torch.nan)
        graph.replay()
        assert eager.isfinite().all() and torch.equal(replayed, eager)
