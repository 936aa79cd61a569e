"""Engines that need processes of their own, against the package's decoder: heads split over two, and compiled."""

import json
import os
import subprocess
import sys

import pytest
import torch

from residualquant.config import preset
from residualquant.engine import iter_decode
from residualquant.evals.tasks import problems
from residualquant.models import load_model
from residualquant.models.loading import model_folder

MODEL = "mini-ouro-maths"
NEW_TOKENS = 16
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    options, prompts, new_tokens = json.load(sys.stdin)
    engine = LLM(**options)
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    print("TOKENS", json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""
TWO_PROCESSES = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": True}
ALL_PROCESSES = {"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (TWO_PROCESSES, ALL_PROCESSES, "KV of one token takes 1,584 bytes"),
        ({}, {"TORCH_COMPILE_DISABLE": "0"}, "DYNAMO_TRACE_ONCE"),
    ],
    ids=["two processes", "compiled"],
)
def test_tokens_are_those_of_the_torch_engine(tmp_path, options, environment, said):
    model = load_model(MODEL, device="cpu", dtype=torch.float32)
    prompts = [model.tokenizer.encode(p.prompt).ids for p in problems("algebra", 3)]
    defaults = {
        "model": str(model_folder(MODEL)), "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512,
        "max_num_seqs": 4, "max_num_batched_tokens": 512, "block_size": 16,
        "additional_config": {"residualquant": {"preset": "INT2/4 g=32", "rotation": "hadamard"}},
    }  # fmt: skip
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], input=json.dumps([defaults | options, prompts, NEW_TOKENS]),
        env=os.environ | environment, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert said in done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    config = preset("INT2/4 g=32", rotation="hadamard")
    decoded = iter_decode(model, prompts, [config], NEW_TOKENS, set(), progress=False)
    expected = {one.prompt_index: one.tokens for one in decoded}
    assert json.loads(line.removeprefix("TOKENS ")) == [expected[n] for n in range(len(prompts))]
