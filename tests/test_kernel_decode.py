"""Decode attention over packed pages: the reference against the codec, the CUDA source run on a CPU, the Triton kernel
in its interpreter, and on a GPU the real thing."""

import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from residualquant import encode
from residualquant.attention import attend_past_and_step
from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.kernels.build import (
    compile_variant,
    compiler,
    load_variant,
    paper_variants,
    start,
    variant_for,
)
from residualquant.kernels.checks import check_tensors
from residualquant.kernels.decode_attention import (
    Past,
    choose_splits,
    decode_attention,
    decode_attention_cost,
    decode_attention_reference,
    fill_arguments,
    workspace,
)
from residualquant.layout import PageLayout, bytes_read_per_step
from residualquant.pages import allocate_pages, write_pages
from residualquant.residual import decode
from residualquant.rotation import Rotation

TOLERANCE = 2e-3  # relative L2 per query and head, before the output is rounded to BF16: f16 queries and weights


class Problem:
    """Random states packed into shuffled pages, everything unused full of bytes that are NaN as FP8 and as BF16."""

    def __init__(
        self, cfg, head_dim, lengths, heads=2, queries_per_head=1, page_tokens=16, groups=1, group=0, device="cpu"
    ):
        draw = torch.Generator().manual_seed(0)
        self.layout = PageLayout(cfg, head_dim, page_tokens, groups)
        self.group, self.cfg = group, cfg
        batch, loops = len(lengths), cfg.loops
        rotated = cfg.rotation != "none"
        self.k_matrix = self.v_matrix = self.k_means = None
        if rotated:
            self.k_matrix, self.v_matrix = (_orthogonal(heads, head_dim, draw) for _ in "kv")
            self.k_means = 0.3 * torch.randn(loops, heads, head_dim, generator=draw)
        pages_of = [-(-length // page_tokens) for length in lengths]
        blocks = sum(pages_of) + 3
        self.pages = allocate_pages(self.layout, blocks, heads)
        self.pages.fill_(0xFF)
        self.block_table = torch.full((batch, max(*pages_of, 1) + 1), -(2**31), dtype=torch.int32)
        free = torch.randperm(blocks, generator=draw)
        self.past = []
        for row, (length, count) in enumerate(zip(lengths, pages_of)):
            mine, free = free[:count], free[count:]
            self.block_table[row, :count] = mine.int()
            positions = torch.arange(length)
            slots = mine[positions // page_tokens] * page_tokens + positions % page_tokens
            states = [_states(loops, length, heads, head_dim, draw) for _ in "kv"]
            rotations = (None, None)
            if rotated:
                rotations = (Rotation(self.k_matrix, self.k_means), Rotation(self.v_matrix))
            packed = [encode(x, cfg, rotation) for x, rotation in zip(states, rotations)]
            if length:
                write_pages(self.pages, self.layout, slots, *packed, group=group)
            self.past.append(packed)
        query_heads = heads * queries_per_head
        self.q = torch.randn(batch, query_heads, head_dim, generator=draw).bfloat16()
        self.k, self.v = (torch.randn(batch, heads, head_dim, generator=draw).bfloat16() for _ in "kv")
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        for name in ("pages", "block_table", "lengths", "q", "k", "v", "k_matrix", "v_matrix", "k_means"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, tensor.to(device))

    @property
    def paged(self):
        rotation = self.k_matrix, self.v_matrix, self.k_means
        return Past(self.pages, self.layout, self.block_table, self.lengths, *rotation, self.group)

    def operands(self, loop):
        return self.q, self.k, self.v, self.paged, loop

    def scratch(self, splits):
        shape = (*self.q.shape[:2], self.k.shape[1], self.layout.head_dim)
        made = workspace(*shape, int(self.lengths.max()), self.q.device, splits)
        made.partial.fill_(torch.nan), made.lse.fill_(torch.nan)
        return made

    def reference(self, loop):
        return decode_attention_reference(*self.operands(loop))

    def run(self, loop, splits=None, **options):
        out = torch.full(self.q.shape, torch.nan, device=self.q.device)
        return decode_attention(*self.operands(loop), self.scratch(splits), **{"out": out, **options})


def _orthogonal(heads, dim, draw):
    return torch.linalg.qr(torch.randn(heads, dim, dim, generator=draw, dtype=torch.float64))[0].half().contiguous()


def _states(loops, tokens, heads, dim, draw):
    """States that resemble each other across loops, with a different size for each channel."""
    common = torch.randn(1, tokens, heads, dim, generator=draw)
    own = torch.randn(loops, tokens, heads, dim, generator=draw)
    return (common + 0.3 * own) * torch.linspace(0.5, 2.0, dim)


def worst_error(out, reference):
    """Largest relative L2 error over queries and heads; NaN counts as infinite."""
    out, reference = out.double().cpu(), reference.double().cpu()
    error = (out - reference).norm(dim=-1) / reference.norm(dim=-1)
    return error.nan_to_num(nan=torch.inf).max().item()


@pytest.mark.parametrize("reference", ["last", "first", "previous", "next", "direct"])
def test_prefills_reference_is_decodes_for_one_token_a_sequence(reference):
    prefill = pytest.importorskip("residualquant.kernels.prefill_attention")
    problem = Problem(preset("INT2/4 g=32", reference=reference, rotation="optr_h"), 64, [7, 33], 2, 2, 16, 2, 1)
    past, starts, ends = problem.paged, torch.arange(3).int(), problem.lengths + 1
    for loop in range(4):
        found = prefill.prefill_attention_reference(
            problem.q, problem.k, problem.v, past.pages, past.layout, loop, past.block_table, starts, ends,
            64**-0.5, past.k_matrix, past.v_matrix, past.k_means, group=1,
        )  # fmt: skip
        assert worst_error(found, problem.reference(loop)) < 1e-5


@pytest.mark.parametrize("reference", ["last", "first", "previous", "next", "direct"])
@pytest.mark.parametrize("rotation", ["none", "optr_h"])
def test_reference_is_the_codec_and_plain_attention(reference, rotation):
    cfg = preset("INT2/4 g=32", reference=reference, rotation=rotation)
    problem = Problem(cfg, 64, [7, 33], queries_per_head=2, groups=2, group=1)
    for loop in range(cfg.loops):
        out = problem.reference(loop)
        for row, packed in enumerate(problem.past):
            past = tuple(decode(x, "rotated")[loop].double()[None] for x in packed)
            step = tuple(x[row].double()[None, None] for x in (problem.k, problem.v))
            matrices = (problem.k_matrix, problem.v_matrix)
            expected = attend_past_and_step(problem.q[row].double()[None, None], past, step, matrices)
            torch.testing.assert_close(out[row], expected[0, 0], rtol=1e-5, atol=1e-6)


def test_cost_is_the_storage_arithmetic():
    layout = PageLayout(preset("INT2/4 g=32"), 128)
    read = [decode_attention_cost(layout, loop, 1, 1, 1)[0] for loop in range(4)]
    assert read == [228, 228, 228, 144]
    for reference, g in itertools.product(("last", "previous", "direct"), (16, 32)):
        layout = PageLayout(preset(f"INT2/4 g={g}", reference=reference), 128)
        read = sum(decode_attention_cost(layout, loop, 10, 4, 2)[0] for loop in range(4))
        assert read == 2 * 2 * 10 * bytes_read_per_step(layout.config, 128)
    assert decode_attention_cost(layout, 0, 10, 4, 2)[1] == 4 * 128 * 10 * 4


def test_splits_fill_the_device():
    assert choose_splits(8 * 16, 16384, 132) == 1
    assert choose_splits(16, 16384, 132) == 8
    assert choose_splits(512, 16384, 132) == 1
    assert choose_splits(4, 100, 132) == 1


# ------------------------------------------------------------------------------------------- the CUDA source on a CPU

CASES = {  # head_dim, configuration, loop, what else
    "residual": (128, {}, 0, {}),
    "anchor": (128, {}, 3, {}),
    "g16": (128, {"group_size": 16}, 0, {}),
    "g64, two query heads": (128, {"bits": (2, 4), "group_size": 64}, 0, {"queries_per_head": 2}),
    "D=96, large pages": (96, {"bits": (2, 4)}, 0, {"heads": 2, "page_tokens": 32, "groups": 2, "group": 1}),
    "D=96 g16": (96, {"bits": (2, 4), "group_size": 16}, 0, {}),
    "D=256 g16": (256, {"bits": (2, 4), "group_size": 16}, 0, {}),
    "D=64 descending, unit": (64, {"bits": (4, 2), "group_size": 64, "coefficient": "unit"}, 0, {}),
    "previous": (64, {"bits": (4, 2, 2), "reference": "previous"}, 2, {"queries_per_head": 3}),
    "next": (128, {"reference": "next"}, 0, {}),
    "direct g16": (128, {"bits": (2, 4), "group_size": 16, "reference": "direct"}, 0, {}),
}


def run_on_cpu(cpu_library, problem, loop, splits, late):
    variant = variant_for(problem.layout, loop, problem.q.shape[1] // problem.k.shape[1])
    library = cpu_library(variant)
    library.set_copies_land_late(late)
    out, scratch = torch.full(problem.q.shape, torch.nan), problem.scratch(splits)
    scale = problem.layout.head_dim**-0.5
    start(library, "decode_attention", fill_arguments(*problem.operands(loop), scratch, scale, out), 0)
    return out


@pytest.mark.parametrize("name", CASES)
def test_cuda_source_on_cpu(cpu_library, name):
    head_dim, changes, loop, more = CASES[name]
    cfg = KVQuantConfig(**{"rotation": "none" if "D=64" in name else "optr_h", **changes})
    problem = Problem(cfg, head_dim, [0, 1, 90], **{"heads": 1, **more})
    reference = problem.reference(loop)
    for splits, late in ((1, True), (3, False)):
        out = run_on_cpu(cpu_library, problem, loop, splits, late)
        assert worst_error(out, reference) < TOLERANCE, (splits, late)


def test_many_tiles_on_cpu(cpu_library):
    """More tiles than a warp looks up at once, a growing maximum, and BF16 output."""
    cfg = KVQuantConfig(bits=(2,), reference="direct")
    problem = Problem(cfg, 64, [16 * 4 * 66 + 5], heads=1)
    problem.q *= 8
    out = torch.empty_like(problem.q)
    scratch = problem.scratch(1)
    library = cpu_library(variant_for(problem.layout, 0))
    start(library, "decode_attention", fill_arguments(*problem.operands(0), scratch, 0.125, out), 0)
    reference = problem.reference(0)
    assert worst_error(out, reference.bfloat16()) < 2 * TOLERANCE


@pytest.mark.parametrize("loop", [0, 3])
def test_a_pipeline_of_copies_that_land_late_on_cpu(cpu_library, loop):
    """Three tiles a warp, its lanes one after another, each lane's copies landing when it waits for them."""
    problem = Problem(preset("INT2/4 g=32", rotation="optr_h"), 128, [300], heads=1)
    assert worst_error(run_on_cpu(cpu_library, problem, loop, 1, True), problem.reference(loop)) < TOLERANCE


@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
def test_cuda_source_compiles(architecture, tmp_path):
    if compiler() is None:
        pytest.skip("no nvcc")
    log = compile_variant(variant_for(PageLayout(preset("INT2/4 g=32"), 128), 0), architecture, tmp_path / "k.so")
    assert "decode_attention_kernel" in log and not re.search(r"[1-9]\d* bytes spill", log), log


def test_variants():
    variants = paper_variants()
    assert {variant.head_dim for variant in variants} == {96, 128} and len(variants) == len(set(variants))
    assert variant_for(PageLayout(preset("INT2/4 g=16"), 128), 3).kinds == 1
    assert variant_for(PageLayout(preset("INT2/4 g=16", reference="next"), 128), 0, 4).kinds == 4
    assert "bits must be 2 or 4" in variant_for(PageLayout(KVQuantConfig(bits=(3, 4)), 128), 0)
    assert "one precision" in variant_for(PageLayout(KVQuantConfig(bits=(2, 4, 4), reference="next"), 128), 0)
    assert "at most 4" in variant_for(PageLayout(preset("INT2 g=32", 8, reference="next"), 128), 0)
    assert "head_dim" in variant_for(PageLayout(preset("INT2 g=32"), 160), 0)


# ----------------------------------------------------------------------------------------------------- the public op


def test_on_a_cpu_the_reference_runs():
    problem = Problem(preset("INT2/4 g=32", rotation="optr_h"), 64, [3, 20])
    out = problem.run(1, out=None, check_table=True)
    assert out.dtype == torch.bfloat16 and worst_error(out, problem.reference(1)) < 2 * TOLERANCE
    with pytest.raises(ResidualQuantError, match="tensors are on cpu"):
        problem.run(1, prefer="cuda")
    nobody = dataclasses.replace(problem.paged, block_table=problem.block_table[:0], lengths=problem.lengths[:0])
    out = decode_attention(problem.q[:0], problem.k[:0], problem.v[:0], nobody, 1, problem.scratch(1), check_table=True)
    assert out.shape == (0, 2, 64)


BF16 = torch.bfloat16
BAD = {
    "rounding": (dict(layout=PageLayout(KVQuantConfig(rounding="bf16"), 64)), "'bf16'"),
    "bits": (dict(layout=PageLayout(KVQuantConfig(bits=(2, 16)), 64)), r"\(2, 16\)"),
    "head_dim": (dict(layout=PageLayout(KVQuantConfig(), 32)), "head_dim must be one of .* got 32"),
    "layout": (dict(layout="INT2/4"), "layout must be a PageLayout, got 'INT2/4'"),
    "loop": (dict(loop=4), "loop must be an integer from 0 to 3, got 4"),
    "loop, text": (dict(loop="0"), "loop must be an integer from 0 to 3, got '0'"),
    "loop, truth": (dict(loop=True), "loop must be an integer from 0 to 3, got True"),
    "group": (dict(group=1), "group must be an integer from 0 to 0, got 1"),
    "no q": (dict(q=None), "q must be a tensor .* got None"),
    "flat q": (dict(q=torch.zeros(2, 64, dtype=BF16)), r"q must be .* \[B, Hq, D\], got \[2, 64\]"),
    "q": (dict(q=torch.zeros(2, 2, 64, dtype=torch.float64)), "float64"),
    "strided q": (dict(q=torch.zeros(2, 2, 128, dtype=BF16)[..., ::2]), "q must be contiguous .* got strides"),
    "no heads": (dict(k=torch.zeros(2, 0, 64, dtype=BF16)), "at least one KV head, got 0"),
    "no query heads": (dict(q=torch.zeros(2, 0, 64, dtype=BF16)), "got 0 and 2"),
    "heads": (dict(q=torch.zeros(2, 3, 64, dtype=BF16)), "got 3 and 2"),
    "k": (dict(k=torch.zeros(2, 2, 64)), "k must be .* got .*float32"),
    "k elsewhere": (dict(k=torch.zeros(2, 2, 64, dtype=BF16, device="meta")), "k must be on cpu, .* got meta"),
    "v": (dict(v=torch.zeros(2, 2, 96, dtype=BF16)), r"v must be .* got \[2, 2, 96\]"),
    "no v": (dict(v=None), "v must be a tensor, got None"),
    "out": (dict(out=torch.zeros(1, 2, 64)), r"out must be .* got \[1, 2, 64\]"),
    "no pages": (dict(pages=None), "pages must be a tensor .* got None"),
    "pages": (dict(pages=torch.zeros(5, 2, 7, dtype=torch.uint8)), r"\[5, 2, 7\]"),
    "strided pages": (dict(pages=torch.zeros(2, 3264, 5, dtype=torch.uint8).permute(2, 0, 1)), "contiguous"),
    "no lengths": (dict(lengths=None), "lengths must be a tensor, got None"),
    "lengths": (dict(lengths=torch.zeros(2, dtype=torch.int64)), "int64"),
    "strided lengths": (dict(lengths=torch.zeros(4, dtype=torch.int32)[::2]), r"contiguous .* got strides \(2,\)"),
    "no block table": (dict(block_table=None), r"block_table must be .* \[B, M\], got None"),
    "flat block table": (dict(block_table=torch.zeros(2, dtype=torch.int32)), r"\[B, M\], got \[2\]"),
    "rows": (dict(block_table=torch.zeros(3, 2, dtype=torch.int32)), r"block_table must be .* got \[3, 2\]"),
    "matrix": (dict(k_matrix=torch.zeros(64, 64)), "k_matrix must be .* got .*float32"),
    "strided matrix": (dict(v_matrix=torch.zeros(64, 128).half()[:, ::2]), "v_matrix must be contiguous"),
    "one matrix": (dict(v_matrix=torch.zeros(64, 64).half()), r"needs no matrices, got \['v_matrix'\]"),
    "means": (dict(k_means=torch.zeros(3, 2, 64)), r"k_means must be \[4, 2, 64\] .* got \[3, 2, 64\]"),
    "unaligned pages": (dict(pages=torch.zeros(32648, dtype=torch.uint8)[8:].view(5, 2, 3264)), "got address"),
    "unaligned heads": (dict(pages=torch.zeros(5, 2, 3272, dtype=torch.uint8)[..., :3264]), "multiples of 16 bytes"),
    "no scratch": (dict(scratch=None), "scratch must be a Workspace, got None"),
    "scratch": (dict(scratch=workspace(1, 2, 2, 64, 16, "cpu")), "at least 2 sequences, got 1"),
    "scratch of other heads": (dict(scratch=workspace(2, 4, 2, 64, 16, "cpu")), r"got \[2, 4, 1, 64\]"),
    "scale": (dict(scale=math.nan), "scale must be a finite number, got nan"),
    "scale, beyond FP32": (dict(scale=10**400), "scale must be a finite number, got 1000"),
    "scale, text": (dict(scale="1"), "scale must be a finite number, got '1'"),
    "prefer": (dict(prefer="tpu"), "'tpu'"),
    "table": (dict(block_table=torch.full((2, 3), 99, dtype=torch.int32), check_table=True), "got 99 to 99"),
    "negative page": (dict(block_table=torch.full((2, 3), -1, dtype=torch.int32), check_table=True), "got -1 to -1"),
    "table size": (
        dict(lengths=torch.full((2,), 99, dtype=torch.int32), check_table=True),
        r"row, got \[99, 99\]",
    ),
    "negative": (dict(lengths=torch.full((2,), -1, dtype=torch.int32), check_table=True), r"row, got \[-1, -1\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    problem = Problem(preset("INT2/4 g=32"), 64, [3, 20])
    changes, message = dict(BAD[name][0]), BAD[name][1]
    arguments = {**dict(zip(("q", "k", "v", "past", "loop"), problem.operands(0))), "scratch": problem.scratch(1)}
    of_past = {name: changes.pop(name) for name in list(changes) if hasattr(arguments["past"], name)}
    arguments |= {"past": dataclasses.replace(arguments["past"], **of_past), **changes}
    with pytest.raises(ValueError, match=message):
        decode_attention(**arguments)


def test_other_scratch_is_named():
    problem = Problem(preset("INT2/4 g=32"), 64, [3, 20])
    with pytest.raises(ValueError, match="past must be a Past, got 'past'"):
        decode_attention(problem.q, problem.k, problem.v, "past", 0, problem.scratch(1))
    for name, dtype in (("partial", torch.float16), ("lse", torch.float64), ("arrived", torch.int64)):
        scratch = problem.scratch(2)
        scratch = dataclasses.replace(scratch, **{name: getattr(scratch, name).to(dtype)})
        with pytest.raises(ValueError, match=f"{name} must be .* got .*{dtype}"):
            decode_attention(*problem.operands(0), scratch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"query_heads": 3}, "query heads .* got 3 and 2"),
        ({"kv_heads": 1.5}, "kv_heads must be an integer, got 1.5"),
        ({"head_dim": "64"}, "head_dim must be an integer, got '64'"),
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
        ({"splits": 0}, "splits must be at least 1, got 0"),
        ({"device": "foo"}, "device must be the CPU or a CUDA GPU that is here, got 'foo'"),
        ({"device": None}, "device must be .* got None"),
        ({"device": 3}, "device must be .* got 3"),
        ({"device": "meta"}, "device must be .* got 'meta'"),
        ({"device": "cuda:99"}, "device must be .* got 'cuda:99'"),
    ],
)
def test_sizes_of_scratch_are_named(change, message):
    sizes = dict(batch=1, query_heads=2, kv_heads=2, head_dim=64, max_tokens=16, device="cpu", splits=None)
    with pytest.raises(ValueError, match=message):
        workspace(**{**sizes, **change})


@pytest.mark.parametrize("splits", [None, 2])
def test_scratch_on_a_gpu_that_is_not_here_is_named(monkeypatch, splits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", torch.device("cuda", 0)):
        with pytest.raises(ValueError, match=r"device must be the CPU or a CUDA GPU that is here, got .*cuda"):
            workspace(1, 2, 2, 64, 16, device, splits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": None}, "layout must be a PageLayout, got None"),
        ({"loop": 4}, "loop must be an integer from 0 to 3, got 4"),
        ({"loop": -1}, "loop must be an integer from 0 to 3, got -1"),
        ({"tokens": -5}, "tokens must be at least 0, got -5"),
        ({"tokens": 1.5}, "tokens must be an integer, got 1.5"),
        ({"query_heads": -1}, "query_heads must be at least 0, got -1"),
        ({"kv_heads": None}, "kv_heads must be an integer, got None"),
    ],
)
def test_what_has_no_cost_is_named(change, message):
    arguments = dict(layout=PageLayout(preset("INT2/4 g=32"), 128), loop=0, tokens=1, query_heads=1, kv_heads=1)
    with pytest.raises(ValueError, match=message):
        decode_attention_cost(**{**arguments, **change})


def test_no_past_is_the_current_token():
    """Also with a table of no pages."""
    problem = Problem(preset("INT2/4 g=32", rotation="optr_h"), 64, [0, 0], queries_per_head=2)
    problem.block_table = problem.block_table[:, :0]
    assert torch.equal(problem.run(0, out=None, check_table=True), problem.v.repeat_interleave(2, 1))


INTERPRETED = """
import sys
sys.path.insert(0, {tests!r})
import test_kernel_decode as t
cases = [
    (t.preset("INT2/4 g=32", 2, rotation="optr_h"), 64, dict(queries_per_head=3)),
    (t.KVQuantConfig(bits=(0, 2, 4), group_size=16, reference="next"), 96, dict(page_tokens=32, groups=2, group=1)),
    (t.KVQuantConfig(bits=(1, 8), group_size=16, reference="direct"), 64, dict()),
    (t.KVQuantConfig(bits=(3, 4), coefficient="unit"), 64, dict()),
]
for cfg, head_dim, more in cases:
    problem = t.Problem(cfg, head_dim, [0, 1, 33], heads=1, **more)
    for loop in (0, cfg.loops - 1):
        error = t.worst_error(problem.run(loop, 2, prefer="triton"), problem.reference(loop))
        assert error < 1e-5, (cfg, loop, error)
"""


def test_triton_kernel_in_its_interpreter(root):
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    script = INTERPRETED.format(tests=str(root / "tests"))
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


# ------------------------------------------------------------------------------------------------------------ on a GPU

LENGTHS = [0, 1, 15, 16, 17, 1000, 16384]
GPU_CASES = {
    f"{name}, D={head_dim}": (head_dim, changes)
    for head_dim in (64, 96, 128, 256)
    for name, changes in {
        "INT2/4 g32": {},
        "INT2/4 g16": {"group_size": 16},
        "INT2/4 g64": {"group_size": 64},
        "INT2 g32": {"bits": (2, 2)},
        "INT2 g16": {"bits": (2, 2), "group_size": 16},
        "INT4": {"bits": (4, 4)},
        "first": {"bits": (4, 2, 2), "reference": "first"},
        "descending": {"bits": (4, 2)},
        "unit": {"bits": (2, 4), "coefficient": "unit"},
        "next": {"bits": (2, 2, 2, 4), "reference": "next"},
        "previous g16": {"bits": (4, 2, 2), "group_size": 16, "reference": "previous"},
        "direct": {"bits": (2, 4), "reference": "direct"},
        "direct g16": {"bits": (2, 4), "group_size": 16, "reference": "direct"},
    }.items()
    if head_dim % changes.get("group_size", 32) == 0
}


@pytest.fixture(scope="session")
def compiled():
    """Compiles what the GPU tests need, all at once."""
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    layouts = [PageLayout(KVQuantConfig(**changes), head_dim) for head_dim, changes in GPU_CASES.values()]
    variants = {
        variant_for(layout, loop, queries)
        for layout in layouts
        for loop in range(layout.config.loops)
        for queries in (1, 2)
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda variant: load_variant(variant, architecture), variants))


@pytest.mark.gpu
@pytest.mark.parametrize("queries_per_head", [1, 3, 4])
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_gpu(compiled, name, queries_per_head):
    head_dim, changes = GPU_CASES[name]
    cfg = KVQuantConfig(**{"rotation": "optr_h", **changes})
    problem = Problem(cfg, head_dim, LENGTHS, queries_per_head=queries_per_head, device="cuda")
    for loop in sorted({0, cfg.loops - 1}):
        reference = problem.reference(loop)
        for splits in (1, 7):
            assert worst_error(problem.run(loop, splits, prefer="cuda"), reference) < TOLERANCE, (loop, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("page_tokens", [32, 64])
def test_large_pages_and_groups_on_gpu(page_tokens):
    problem = Problem(
        preset("INT2/4 g=32", rotation="optr_h"), 96, LENGTHS, page_tokens=page_tokens, groups=2, group=1, device="cuda"
    )
    for loop in (0, 3):
        assert worst_error(problem.run(loop, 3, prefer="cuda"), problem.reference(loop)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("prefer", ["cuda", "triton"])
def test_graph_replay_is_eager_and_repeats_on_gpu(prefer):
    problem = Problem(preset("INT2/4 g=32", rotation="optr_h"), 128, [5, 300, 3000], device="cuda")
    scratch, out = problem.scratch(4), torch.full_like(problem.q, torch.nan)

    def step():
        for loop in range(4):
            decode_attention(*problem.operands(loop), scratch, out=out, prefer=prefer)

    step()
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        out.fill_(torch.nan), scratch.partial.fill_(torch.nan), scratch.lse.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_the_kernel_ahead_may_write_any_input_on_gpu(splits):
    """A launch begins before the kernel ahead of it has ended, and reads what that one writes when it has."""
    problem = Problem(preset("INT2/4 g=32", rotation="optr_h"), 128, [5, 300, 3000, 40], device="cuda")
    names = ("pages", "block_table", "lengths", "q", "k", "v", "k_matrix", "v_matrix", "k_means")
    first = {name: getattr(problem, name) for name in names}
    second = {name: x.flip(0) for name, x in first.items()}  # heads have other matrices, sequences other pages
    used = second["block_table"] >= 0
    second["block_table"] = torch.where(used, len(problem.pages) - 1 - second["block_table"], second["block_table"])
    for name, x in first.items():
        setattr(problem, name, torch.empty_like(x))
    scratch, outs = problem.scratch(splits), []
    for turn in range(2 + 4 * len(names)):
        inputs, last = (first, second)[turn % 2], turn // 2 % len(names)
        out = torch.full_like(problem.q, torch.nan)
        for name in (*names[last + 1 :], *names[: last + 1]):
            torch.maximum(inputs[name], inputs[name], out=getattr(problem, name))
        if turn < 2:
            torch.cuda.synchronize()
        outs.append(decode_attention(*problem.operands(0), scratch, out=out, prefer="cuda"))
    for turn, out in enumerate(outs):
        assert torch.equal(out, outs[turn % 2]), turn
    for name, x in first.items():
        setattr(problem, name, x)
    assert worst_error(outs[0], problem.reference(0)) < 2 * TOLERANCE


def write_and_attend(problem, splits, turns, wait, prefer):
    """The last token of every sequence is written anew, then each launch asks with what the one ahead of it found."""
    from residualquant.kernels.pack_kv import pack_kv

    draw = torch.Generator().manual_seed(1)
    shape = (2, problem.cfg.loops, len(problem.lengths), problem.k.shape[1], problem.layout.head_dim)
    last, size = problem.lengths.long() - 1, problem.layout.page_tokens
    slots = problem.block_table.long().gather(1, last[:, None] // size)[:, 0] * size + last % size
    scratch, q = problem.scratch(splits), problem.q
    for _ in range(turns):
        k, v = torch.randn(shape, generator=draw).bfloat16().to(q.device)
        pack_kv(problem.pages, problem.layout, slots, k, v, problem.k_matrix, problem.v_matrix, problem.k_means)
        for loop in range(problem.cfg.loops):
            wait()
            q = decode_attention(q, problem.k, problem.v, problem.paged, loop, scratch, prefer=prefer)
    return q


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_launches_in_a_row_see_what_those_ahead_wrote_on_gpu(splits):
    problem = Problem(preset("INT2/4 g=32", rotation="optr_h"), 128, [5, 300, 3000], device="cuda")
    one_by_one = write_and_attend(problem, splits, 8, torch.cuda.synchronize, "cuda")
    assert torch.equal(write_and_attend(problem, splits, 8, lambda: None, "cuda"), one_by_one)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["INT2/4 g32, D=128", "INT2/4 g16, D=96", "next, D=128", "INT2/4 g32, D=256"])
def test_triton_on_gpu(name):
    head_dim, changes = GPU_CASES[name]
    cfg = KVQuantConfig(**{"rotation": "optr_h", **changes})
    problem = Problem(cfg, head_dim, LENGTHS, queries_per_head=3, device="cuda")
    for loop in (0, cfg.loops - 1):
        assert worst_error(problem.run(loop, 3, prefer="triton"), problem.reference(loop)) < TOLERANCE


def test_scratch_without_splits_is_named():
    problem = Problem(preset("INT2/4 g=32"), 64, [5])
    scratch = dataclasses.replace(problem.scratch(1), partial=torch.zeros(1, 2, 0, 64), lse=torch.zeros(1, 2, 0))
    with pytest.raises(ValueError, match="at least one split, got 0"):
        decode_attention(*problem.operands(0), scratch)


@pytest.mark.parametrize("name", ["out", "pages", "staged"])
def test_places_shared_by_values_are_named(name):
    shared = torch.zeros(1, 4, 64).expand(2, -1, -1)
    with pytest.raises(ValueError, match=r"place of its own.*\(0, 64, 1\)"):
        check_tensors(shared.device, **{name: (shared, [[2, 4, 64]], (torch.float32,), 1)})
    apart = torch.zeros(4, 2, 65).transpose(0, 1)[..., :64]
    check_tensors(apart.device, **{name: (apart, [[2, 4, 64]], (torch.float32,), 1)})


def test_means_without_a_rotation_are_named():
    problem = Problem(preset("INT2/4 g=32"), 64, [5])
    past = dataclasses.replace(problem.paged, k_means=torch.zeros(4, 2, 64))
    with pytest.raises(ValueError, match="k_means go with a rotation, got them with rotation='none'"):
        decode_attention(problem.q, problem.k, problem.v, past, 0, problem.scratch(1))
