"""The Triton kernels compile for GPUs that are not here: what the interpreter accepts, the compiler may not.

Triton decides at import whether it interprets or compiles, so each kernel is compiled by a fresh process. It calls the
public functions: a kernel is compiled for their arguments (alignments, sizes of 1) and launch parameters, as on a GPU.
"""

import os
import re
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from residualquant import KVQuantConfig
from residualquant.kernels import decode_attention_triton, pack_kv, prefill_attention, stage_kv
from residualquant.kernels.decode_attention import Past, workspace
from residualquant.layout import PageLayout
from residualquant.pages import allocate_pages

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", ARCH, 32)
    get_current_device = get_current_stream = lambda self, *_: 0

def compile_only(self, *arguments, warmup, launch=JITFunction.run, **more):
    made = launch(self, *arguments, warmup=True, **more)
    print(f"shared memory: {made.metadata.shared}", made.asm["ttir"], made.asm["ptx"], sep="\\n")

triton.runtime.driver.set_active(Driver())
JITFunction.run = compile_only
for module in (decode_attention_triton, pack_kv, prefill_attention, stage_kv):
    module.check_device = lambda device: None

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)

def turned(layout, heads):
    if layout.config.rotation == "none":
        return None, None, None
    matrices = (zeros(heads, layout.head_dim, layout.head_dim, dtype=torch.float16) for _ in "kv")
    return *matrices, zeros(layout.config.loops, heads, layout.head_dim, dtype=torch.float32)

def writer(head_dim, tokens=64, heads=16, dtype=torch.bfloat16, processors=0, watched=False, **config):
    layout = PageLayout(KVQuantConfig(**config), head_dim)
    pack_kv.processors = lambda device: processors
    k, v = (zeros(layout.config.loops, tokens, heads, head_dim, dtype=dtype) for _ in "kv")
    more = {}
    if watched:
        more = dict(sanitised=zeros(1, dtype=torch.int32), rotated=zeros(2, *k.shape, dtype=torch.float32))
    pages = allocate_pages(layout, tokens // 16 + 1, heads)
    pack_kv.pack_kv(pages, layout, torch.arange(tokens), k, v, *turned(layout, heads), **more)

def prefill(head_dim, loop, heads=16, repeat=1, dtype=torch.bfloat16, out=None, **config):
    layout = PageLayout(KVQuantConfig(**config), head_dim)
    q, k, v = (zeros(64, n, head_dim, dtype=dtype) for n in (heads * repeat, heads, heads))
    table, start, lens = (zeros(*shape, dtype=torch.int32) for shape in ((1, 16), (2,), (1,)))
    past = allocate_pages(layout, 16, heads), layout, loop, table, start, lens
    out = torch.empty_like(q, dtype=out)
    prefill_attention.prefill_attention(out, q, k, v, *past, 64, 1.0, *turned(layout, heads))

def decode(head_dim, loop, heads=16, repeat=1, **config):
    layout = PageLayout(KVQuantConfig(**config), head_dim)
    table, lengths = (zeros(*shape, dtype=torch.int32) for shape in ((8, 16), (8,)))
    past = Past(allocate_pages(layout, 16, heads), layout, table, lengths, *turned(layout, heads))
    scratch = workspace(8, heads * repeat, heads, head_dim, 4096, "cpu")
    decode_attention_triton.attend_past(zeros(8, heads * repeat, head_dim), past, loop, scratch, 1.0)

def staging(tokens, heads, head_dim):
    staged, k = zeros(2, tokens, heads, head_dim), zeros(tokens, heads, head_dim)
    stage_kv.stage_kv(staged, k, k.clone(), zeros(1, dtype=torch.int32))

EXPRESSION
"""

OURO = "bits=(2, 2, 2, 4), rotation='optr_h'"
FP32 = "dtype=torch.float32"
LEAST_SHARED = 99 * 1024  # bytes a block may have on sm_86, sm_89 and sm_120; sm_80 and sm_90 give more
KERNELS = {  # architecture, call
    "writer, Ouro": (90, f"writer(128, {OURO})"),
    "writer, Ouro, one token, a part for each residual": (90, f"writer(128, tokens=1, processors=132, {OURO})"),
    "writer, Ouro, FP32": (90, f"writer(128, {FP32}, watched=True, {OURO})"),
    "writer, Huginn, g = 16": (90, f"writer(96, heads=55, group_size=16, {OURO})"),
    "writer, chained, D = 96": (120, "writer(96, bits=(3, 1, 0, 8), reference='next', coefficient='norm_ratio')"),
    "writer, direct": (90, "writer(64, bits=(2, 4), reference='direct')"),
    "writer, D = 256, FP32": (120, f"writer(256, {FP32}, {OURO})"),
    "staging": (90, "staging(64, 3, 96)"),
    "prefill, Ouro": (90, f"prefill(128, 0, {OURO})"),
    "prefill, Ouro, FP32 output": (90, f"prefill(128, 0, out=torch.float32, {OURO})"),
    "prefill, Huginn's anchor": (90, f"prefill(96, 3, heads=55, {OURO})"),
    "prefill, chained, 3 bits": (120, "prefill(64, 1, repeat=2, bits=(4, 3), group_size=16, reference='previous')"),
    "prefill, FP32": (120, f"prefill(128, 0, {FP32}, {OURO})"),
    "prefill, D = 256, FP32": (90, f"prefill(256, 0, {FP32}, {OURO})"),
    "decode, Ouro": (90, f"decode(128, 0, {OURO})"),
    "decode, Ouro's anchor": (90, f"decode(128, 3, {OURO})"),
    "decode, Huginn, chained": (90, f"decode(96, 0, heads=55, reference='next', group_size=16, {OURO})"),
    "decode, D = 256, 3 query heads": (120, "decode(256, 1, repeat=3, bits=(8, 0, 1), reference='previous')"),
}
for arch in (80, 90, 120):
    KERNELS |= {
        f"writer, D = 256, sm_{arch}": (arch, f"writer(256, tokens=131, heads=3, watched=True, {OURO})"),
        f"prefill, D = 256, 0, sm_{arch}": (arch, f"prefill(256, 0, repeat=2, {OURO})"),
        f"prefill, D = 256, 3, sm_{arch}": (arch, f"prefill(256, 3, repeat=2, {OURO})"),
        f"decode, D = 256, sm_{arch}": (arch, f"decode(256, 0, repeat=3, {OURO})"),
    }


@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name):
    arch, call = KERNELS[name]
    run = subprocess.run(
        [sys.executable, "-c", COMPILE.replace("ARCH", str(arch)).replace("EXPRESSION", call)],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count(".visible .entry") == 1
    assert int(re.match(r"shared memory: (\d+)", run.stdout)[1]) < LEAST_SHARED
    casts = re.findall(r"tt\.bitcast .* -> tensor<([\dx]+)x!tt\.ptr", run.stdout)
    assert casts or not name.startswith("prefill")
    assert all(shape.endswith("x1") for shape in casts)  # a cast row would stay contiguous, in elements of another size
    if name.startswith("writer"):  # either would round some codes otherwise than the reference
        assert "fma.rn.f32" not in run.stdout and "div.full.f32" not in run.stdout
