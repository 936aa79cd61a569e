"""Decode attention over packed pages: the reference against the codec, the CUDA source run on a CPU, the Triton kernel
in its interpreter, and on a GPU the real thing."""

import ctypes
import itertools
import shutil
import subprocess

import pytest
import torch

from residualquant import encode
from residualquant.attention import attend_past_and_step
from residualquant.config import KVQuantConfig, preset
from residualquant.kernels.build import Variant, compiler, sources, variant_for
from residualquant.kernels.decode_attention import (
    choose_splits,
    decode_attention,
    decode_attention_cost,
    decode_attention_reference,
    fill_arguments,
    launch,
    workspace,
)
from residualquant.layout import PageLayout, bytes_read_per_step
from residualquant.pages import allocate_pages, write_pages
from residualquant.residual import decode
from residualquant.rotation import Rotation

TOLERANCE = 2e-3  # relative L2 per query and head: f16 weights and queries, BF16 output


class Problem:
    """Random states packed into shuffled pages, everything unused full of bytes that are NaN as FP8 and as BF16."""

    def __init__(
        self, cfg, head_dim, lengths, heads=2, queries_per_head=1, page_tokens=16, groups=1, group=0, device="cpu", seed=0
    ):
        draw = torch.Generator().manual_seed(seed)
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

    def operands(self, loop):
        return self.q, self.k, self.v, self.pages, self.layout, self.block_table, self.lengths, loop

    @property
    def rotation(self):
        return self.k_matrix, self.v_matrix, self.k_means

    def scratch(self, splits):
        shape = (*self.q.shape[:2], self.k.shape[1], self.layout.head_dim)
        made = workspace(*shape, int(self.lengths.max()), self.q.device, splits)
        made.partial.fill_(torch.nan), made.lse.fill_(torch.nan)
        return made

    def reference(self, loop):
        return decode_attention_reference(*self.operands(loop), *self.rotation, group=self.group)

    def run(self, loop, splits=None, **options):
        out = torch.full_like(self.q, torch.nan)
        options = {"out": out, "group": self.group, **options}
        return decode_attention(*self.operands(loop), self.scratch(splits), *self.rotation, **options)


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
    assert choose_splits(8 * 16, 16384, 528) == 4
    assert choose_splits(16, 16384, 528) == 33
    assert choose_splits(512, 16384, 528) == 1
    assert choose_splits(4, 100, 528) == 1


# ------------------------------------------------------------------------------------------- the CUDA source on a CPU

CASES = {  # head_dim, bits, configuration
    "ouro g32": (128, dict()),
    "ouro g16": (128, dict(group_size=16)),
    "ouro g64": (128, dict(group_size=64)),
    "INT2": (128, dict(bits=(2, 2), group_size=16)),
    "INT4 D=64": (64, dict(bits=(4, 4))),
    "descending D=64 g64": (64, dict(bits=(4, 2), group_size=64)),
    "unit": (64, dict(bits=(2, 4), coefficient="unit", reference="last")),
    "huginn g32": (96, dict()),
    "huginn g16": (96, dict(group_size=16)),
    "D=256": (256, dict(bits=(2, 4))),
    "D=256 g16": (256, dict(bits=(2, 4), group_size=16)),
    "previous": (64, dict(bits=(4, 2, 2), reference="previous")),
    "next": (128, dict(reference="next")),
    "next g16": (96, dict(bits=(2, 2, 4), group_size=16, reference="next")),
    "direct g16": (128, dict(bits=(2, 4), group_size=16, reference="direct")),
    "direct g64": (64, dict(bits=(2,), group_size=64, reference="direct")),
}


@pytest.fixture(scope="session")
def cpu_library(root, tmp_path_factory):
    """Compiles a variant of the CUDA source for this CPU: the kernels' own text, other primitives."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    for source in sources():
        shutil.copy(source, folder)
    shutil.copy(root / "tests" / "cuda_on_cpu" / "primitives.cuh", folder)
    built = {}

    def build(variant: Variant) -> ctypes.CDLL:
        if variant not in built:
            target = folder / f"variant{len(built)}.so"
            flags = ["-O1", "-std=c++17", "-x", "c++", "-shared", "-fPIC", "-fno-gnu-unique", *variant.macros]
            subprocess.run(["g++", *flags, "-o", target, folder / "decode_attention.cu"], check=True)
            built[variant] = ctypes.CDLL(str(target))
        return built[variant]

    return build


def run_on_cpu(cpu_library, problem, loop, splits, late):
    variant = variant_for(problem.layout, loop, problem.q.shape[1] // problem.k.shape[1])
    library = cpu_library(variant)
    library.set_copies_land_late(late)
    out, scratch = torch.full_like(problem.q, torch.nan), problem.scratch(splits)
    options = dict(group=problem.group, scale=problem.layout.head_dim**-0.5, out=out)
    launch(library, fill_arguments(*problem.operands(loop), scratch, *problem.rotation, **options), 0)
    return out


@pytest.mark.parametrize("name", CASES)
def test_cuda_source_on_cpu(cpu_library, name):
    head_dim, changes = CASES[name]
    cfg = KVQuantConfig(**{"rotation": "optr_h", **changes})
    problem = Problem(cfg, head_dim, [0, 1, 17, 150])
    for loop in sorted({0, cfg.loops - 1}):
        for splits, late in ((1, 0), (3, 1)):
            out = run_on_cpu(cpu_library, problem, loop, splits, late)
            assert worst_error(out, problem.reference(loop)) < TOLERANCE, (loop, splits, late)
