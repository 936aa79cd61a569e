"""The Triton kernels compile for GPUs that are not here: what the interpreter accepts, the compiler may not.

Triton decides at import whether it interprets or compiles, so each kernel is compiled by a fresh process.
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
from residualquant import KVQuantConfig
from residualquant.kernels import decode_attention_triton, pack_kv, prefill_attention, stage_kv, triton_common
from residualquant.kernels.tuning import tuned as tuned_for
from residualquant.layout import PageLayout

def assembly(kernel, arch, pointers, constants, **options):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=values)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return f"shared memory: {made.metadata.shared}\\n{made.asm['ptx']}"

def writer(arch, rotated, head_dim, parts=1, **config):
    layout = PageLayout(KVQuantConfig(**config), head_dim)
    pointers = dict(words="*i16", slots="*i64", k="*bf16", v="*bf16", k_matrix="*fp16", v_matrix="*fp16",
                    k_means="*fp32", sanitised="*i32", rotated="*fp32")
    width = triton.next_power_of_2(head_dim)
    warps = width // pack_kv.WARP_CHANNELS
    constants = dict(RUNS=pack_kv.coding_runs(layout), LOOPS=layout.config.loops, S=16, D=head_dim, BLOCK_D=width,
                     COEFFICIENT=layout.config.coefficient, CHAINED=layout.config.reference in ("previous", "next"),
                     BLOCK_T=16, WARPS=warps, PARTS=parts)
    if not rotated:
        constants |= dict.fromkeys(("k_matrix", "v_matrix", "k_means", "sanitised", "rotated"))
    options = dict(num_warps=warps, enable_fp_fusion=False)
    return assembly(pack_kv.pack_kv_kernel, arch, pointers, constants, **options)

def prefill(arch, head_dim, loop, tuned, **config):
    layout = PageLayout(KVQuantConfig(**config), head_dim)
    pointers = dict.fromkeys(("out", "q", "k", "v"), "*bf16") | dict.fromkeys(("k_matrix", "v_matrix"), "*fp16")
    pointers |= dict.fromkeys(("block_table", "query_start", "seq_lens"), "*i32")
    pointers |= dict(words="*i16", k_means="*fp32", scale="fp32")
    tuned = dict(BLOCK_M=32, BLOCK_N=16, num_warps=4) | tuned
    blocks = {name: tuned.pop(name) for name in ("BLOCK_M", "BLOCK_N")}
    constants = dict(**triton_common.chain(layout, loop), R=2, S=16, D=head_dim,
                     BLOCK_D=triton.next_power_of_2(head_dim), **blocks)
    return assembly(prefill_attention.prefill_attention_kernel, arch, pointers, constants, **tuned)

def decode(arch, head_dim, loop, means, per_head=1, **config):
    layout = PageLayout(KVQuantConfig(**config), head_dim)
    pointers = dict.fromkeys(("q", "k_means", "partial", "lse"), "*fp32")
    pointers |= dict(words="*i16", block_table="*i32", lengths="*i32")
    constants = dict(**triton_common.chain(layout, loop), D=head_dim, S=16,
                     BLOCK_D=triton.next_power_of_2(head_dim), PER_HEAD=per_head,
                     BLOCK_Q=triton.next_power_of_2(per_head), TILE=decode_attention_triton.TILE)
    if not means:
        constants["k_means"] = None
    return assembly(decode_attention_triton.decode_attention_kernel, arch, pointers, constants, num_warps=4)

def staging(arch):
    constants = dict(COUNT=288, LIMIT=stage_kv.BF16_LIMIT, CODED=stage_kv.LIMIT, BLOCK=stage_kv.BLOCK)
    pointers = dict.fromkeys(("staged", "k", "v"), "*bf16") | {"sanitised": "*i32"}
    return assembly(stage_kv.stage_kv_kernel, arch, pointers, constants)

print(EXPRESSION)
"""

OURO = "bits=(2, 2, 2, 4), rotation='optr_h'"
TUNED = "tuned_for('prefill_attention', torch.device('cpu'), {})"
LEAST_SHARED = 99 * 1024  # bytes a block may have on sm_86, sm_89 and sm_120; sm_80 and sm_90 give more
KERNELS = {
    "writer, Ouro": f"writer(90, True, 128, {OURO})",
    "writer, Ouro, a part for each residual": f"writer(90, True, 128, 3, {OURO})",
    "writer, Huginn, g = 16": f"writer(90, True, 96, group_size=16, {OURO})",
    "writer, chained, D = 96": "writer(120, False, 96, bits=(3, 1, 0, 8), reference='next', coefficient='norm_ratio')",
    "writer, direct": "writer(90, False, 64, bits=(2, 4), reference='direct')",
    "staging": "staging(90)",
    "prefill, Ouro": f"prefill(90, 128, 0, {TUNED.format(128)}, {OURO})",
    "prefill, Huginn's anchor": f"prefill(90, 96, 3, {TUNED.format(96)}, {OURO})",
    "prefill, chained, 3 bits": "prefill(120, 64, 1, {}, bits=(4, 3), group_size=16, reference='previous')",
    **{
        f"prefill, D = 256, {loop}, sm_{arch}": f"prefill({arch}, 256, {loop}, {TUNED.format(256)}, {OURO})"
        for arch in (80, 120)
        for loop in (0, 3)
    },
    **{f"writer, D = 256, sm_{arch}": f"writer({arch}, True, 256, {OURO})" for arch in (80, 120)},
    "decode, Ouro": f"decode(90, 128, 0, True, {OURO})",
    "decode, Ouro's anchor": f"decode(90, 128, 3, True, {OURO})",
    "decode, Huginn, chained": f"decode(90, 96, 0, True, reference='next', group_size=16, {OURO})",
    "decode, D = 256, 3 query heads": "decode(120, 256, 1, False, 3, bits=(8, 0, 1), reference='previous')",
}


@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name):
    run = subprocess.run(
        [sys.executable, "-c", COMPILE.replace("EXPRESSION", KERNELS[name])],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert ".visible .entry" in run.stdout
    if "D = 256" in name:
        assert int(re.match(r"shared memory: (\d+)", run.stdout)[1]) < LEAST_SHARED
    if name.startswith("writer"):  # either would round some codes otherwise than the reference
        assert "fma.rn.f32" not in run.stdout and "div.full.f32" not in run.stdout
