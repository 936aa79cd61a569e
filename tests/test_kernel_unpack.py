"""Keys and values of whole sequences out of pages and step, against torch (Triton's interpreter without a GPU)."""

import pytest
import torch

triton = pytest.importorskip("triton")

from test_kernel_prefill import CASES, DEVICE, problem  # noqa: E402

from residualquant import KVQuantConfig, preset  # noqa: E402
from residualquant.kernels.unpack_kv import unpack_kv, unpack_kv_cost, unpack_kv_reference  # noqa: E402
from residualquant.layout import PageLayout  # noqa: E402

GAP = 3  # rows before the first sequence and after the last, which stay as they are
INT = torch.int32

pytestmark = pytest.mark.usefixtures("loaded_loop_bounds")


def check(layout, heads, past, new, dtype, loops=None, states_dtype=None):
    """NaN in all states before; pages hold garbage where no token of a past is."""
    _, k, v, pages, table, start, lens, turn = problem(layout, heads, 1, past, new, dtype)
    begin = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int() + GAP
    shape, dtype = (2, int(begin[-1]) + GAP, heads, layout.head_dim), states_dtype or dtype
    for loop in loops or range(layout.config.loops):
        found, expected = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in "ab")
        unpack_kv(found, k, v, pages, layout, loop, table, start, begin, int(lens.max()), *turn)
        unpack_kv_reference(expected, k, v, pages, layout, loop, table, start, begin, *turn)
        is_past = torch.zeros(shape[1], dtype=torch.bool)
        for first, count in zip(begin.tolist(), past):
            is_past[first : first + count] = True
        same = [x[:, ~is_past.to(DEVICE)].nan_to_num(7.0) for x in (found, expected)]
        assert torch.equal(*same)
        found, expected = (x[:, is_past.to(DEVICE)].float() for x in (found, expected))
        error = torch.linalg.norm(found - expected, dim=-1) / torch.linalg.norm(expected, dim=-1)
        assert not len(error[0]) or error.max() < (4e-3 if dtype == torch.bfloat16 else 1.5e-3)


@pytest.mark.parametrize("name", CASES)
def test_states_are_those_of_torch(name):
    layout, heads, _, past, new = CASES[name]
    check(layout, heads, past, new, torch.float32)


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("reference", ["last", "first", "next", "direct"])
def test_every_reference_head_size_and_group(reference, head_dim, group_size):
    bits = {"first": (4, 2), "next": (2, 4), "last": (2, 4), "direct": (2, 4)}[reference]
    rotation = "none" if reference == "direct" else "optr_h"
    layout = PageLayout(KVQuantConfig(bits, group_size, reference=reference, rotation=rotation), head_dim)
    check(layout, 2, [19], [3], torch.float16)


def test_sequences_of_any_size():
    """No past, a past that ends within a page or a tile, one of several programs, nothing new, nothing at all."""
    layout = PageLayout(preset("INT2/4 g=32", loops=2, rotation="optr_h"), 64)
    check(layout, 2, [70, 0, 1, 64, 0, 300, 33], [3, 5, 1, 66, 0, 1, 0], torch.float16, loops=[0])


def test_states_may_be_of_another_dtype():
    layout = PageLayout(preset("INT2/4 g=32", loops=2, rotation="optr_h"), 64)
    check(layout, 1, [21], [2], torch.float16, loops=[0], states_dtype=torch.float32)


def test_no_sequences_are_no_launch():
    layout = CASES["last, key means"][0]
    _, k, v, pages, _, _, _, turn = problem(layout, 1, 1, [3], [0], torch.float32)
    table, start = (torch.zeros(shape, dtype=INT, device=DEVICE) for shape in ((0, 4), 1))
    unpack_kv(torch.zeros(2, 9, 1, 64, device=DEVICE), k, v, pages, layout, 0, table, start, start, 0, *turn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": None}, r"states must be .* \[2, N, H, D\], got None"),
        ({"states": torch.zeros(1, 9, 1, 64)}, r"states must be \[2, 9, 1, 64\] .* got \[1, 9, 1, 64\]"),
        ({"states": torch.zeros(2, 9, 1, 64, dtype=INT)}, "states must be .* torch.int32"),
        ({"states": torch.zeros(2, 1, 1, 64).expand(2, 9, 1, 64)}, "states must have a place of its own"),
        ({"k": torch.zeros(2, 64)}, r"k must be .* \[T, H, D\], got \[2, 64\]"),
        ({"k": lambda x: x.repeat(1, 1, 2)[..., ::2]}, "k must be contiguous"),
        ({"v": torch.zeros(2, 1, 64, dtype=torch.float64)}, "v must be .* torch.float64"),
        ({"v": None}, "v must be a tensor, got None"),
        ({"pages": None}, "pages must be a tensor .* got None"),
        ({"loop": 2}, "loop must be an integer from 0 to 1, got 2"),
        ({"group": 1}, "group must be an integer from 0 to 0, got 1"),
        ({"block_table": torch.zeros(9, dtype=INT)}, r"block_table must be .* \[B, M\], got \[9\]"),
        ({"query_start": torch.zeros(1, dtype=INT)}, r"query_start must be \[2\] .* got \[1\]"),
        ({"state_start": torch.zeros(2)}, "state_start must be .* torch.float32"),
        ({"longest": -1}, "longest must be at least 0, got -1"),
        ({"k_matrix": None}, r"needs both matrices, got \['v_matrix'\]"),
        ({"k_means": torch.zeros(2, 1, 96)}, r"k_means must be \[2, 1, 64\] .* got \[2, 1, 96\]"),
    ],
)
def test_wrong_arguments(change, message):
    layout = CASES["last, key means"][0]
    _, k, v, pages, table, start, lens, turn = problem(layout, 1, 1, [3], [2], torch.float32)
    arguments = {"states": torch.zeros(2, 9, 1, 64, device=DEVICE), "k": k, "v": v, "pages": pages, "layout": layout}
    arguments |= {"loop": 0, "block_table": table, "query_start": start, "state_start": start + lens, "longest": 5}
    arguments |= dict(zip(("k_matrix", "v_matrix", "k_means"), turn))
    for name, x in change.items():
        arguments[name] = x.to(DEVICE) if isinstance(x, torch.Tensor) else x(arguments[name]) if callable(x) else x
    with pytest.raises(ValueError, match=message):
        unpack_kv(**arguments)


def test_cost():
    layout = PageLayout(preset("INT2/4 g=32", rotation="hadamard"), 128)
    moved, operations = unpack_kv_cost(layout, 0, past=1000, present=16, heads=16)
    assert moved == 2 * 16 * (1000 * (72 + 42 + 256) + 16 * 512 + 128 * 128 * 2)
    assert operations == 2 * 1000 * 16 * 2 * 128 * 128
    with pytest.raises(ValueError, match="past must be at least 0, got -1"):
        unpack_kv_cost(layout, 0, past=-1, present=16, heads=16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("reference", ["last", "direct", "previous"])
def test_states_on_a_gpu(reference, head_dim, dtype):
    layout = PageLayout(preset("INT2/4 g=32", reference=reference, rotation="optr_h"), head_dim)
    check(layout, 3, [300, 17, 0, 64], [70, 1, 130, 33], dtype, loops=[0, 3])


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (5, 96)])
def test_long_pasts_on_a_gpu(heads, head_dim):
    layout = PageLayout(preset("INT2/4 g=32", rotation="optr_h"), head_dim)
    check(layout, heads, [16384], [33], torch.bfloat16, loops=[0, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [96, 128, 256])
def test_graph_replay_is_eager_on_a_gpu(head_dim):
    layout = PageLayout(preset("INT2/4 g=32", rotation="optr_h"), head_dim)
    sizes = (layout, 2, 1, [300, 17, 0, 64], [70, 1, 130, 33], torch.bfloat16)
    (_, k, v, pages, table, start, lens, turn), other = problem(*sizes), problem(*sizes, seed=1)
    begin = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int()
    shape = 4, 2, int(begin[-1]), 2, head_dim
    eager, replayed = (torch.full(shape, torch.nan, dtype=k.dtype, device=DEVICE) for _ in range(2))

    def step(all_states):
        for loop, states in enumerate(all_states):
            unpack_kv(states, k, v, pages, layout, loop, table, start, begin, 370, *turn)

    step(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(replayed)
    for given, new in zip((k, v, pages, table, *turn), (*other[1:5], *other[7])):
        given.copy_(new)
    eager.fill_(torch.nan)
    step(eager)
    for _ in range(3):
        replayed.fill_(torch.nan)
        graph.replay()
        assert eager.isfinite().all() and torch.equal(replayed, eager)
