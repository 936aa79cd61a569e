"""Engines that need processes of their own: heads split over two, and compiled.

Packed they are compared with the package's decoder, off with vLLM's own Ouro.
"""

import json
import os
import random
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
from vllm import LLM, ModelRegistry, SamplingParams

if __name__ == "__main__":
    options, prompts, new_tokens = json.load(sys.stdin)
    ModelRegistry.register_model("StockOuroForCausalLM", "vllm.model_executor.models.ouro:OuroForCausalLM")
    engine = LLM(**options)
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, logprobs=0)
    answers = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    tokens = [list(o.token_ids) for o in outputs]
    chosen = [[step[t].logprob for step, t in zip(o.logprobs, o.token_ids)] for o in outputs]
    print("ANSWERS", json.dumps([tokens, chosen]))
"""
PROMPTS = [random.Random(n).choices(range(320), k=n) for n in (1, 16, 17, 65, 100)]
STOCK = {"hf_overrides": {"architectures": ["StockOuroForCausalLM"]}, "enable_prefix_caching": False}
TWO_PROCESSES = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": True}
ALL_PROCESSES = {"TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
COMPILED = {"TORCH_COMPILE_DISABLE": "0"}, "DYNAMO_TRACE_ONCE"


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Tokens and log-probabilities of a program of its own, which must have said something."""
    program = tmp_path_factory.mktemp("processes") / "program.py"
    program.write_text(PROGRAM)

    def ask(options, prompts, new_tokens, environment, said=""):
        done = subprocess.run(
            [sys.executable, program], input=json.dumps([options, prompts, new_tokens]),
            env=os.environ | environment, capture_output=True, text=True, timeout=540,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert said in done.stdout + done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
        return json.loads(line.removeprefix("ANSWERS "))

    return ask


@pytest.fixture(scope="module")
def tiny_options(tiny_ouro):
    return {
        "model": str(tiny_ouro), "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256,
        "max_num_seqs": 8, "block_size": 16,
    }  # fmt: skip


@pytest.fixture(scope="module")
def stock(ask, tiny_options):
    """What vLLM's own Ouro answers, eager and in the program's process."""
    options = tiny_options | STOCK | {"enforce_eager": True}
    return ask(options, PROMPTS, 10, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ({"enforce_eager": True}, ALL_PROCESSES, "KV of one token takes"),
        (TWO_PROCESSES, ALL_PROCESSES, "KV of one token takes"),
        ({}, *COMPILED),
    ],
    ids=["an engine process", "two workers", "compiled"],
)
def test_off_is_vllms_own_ouro(ask, stock, tiny_options, options, environment, said):
    ours = ask(tiny_options | {"max_num_batched_tokens": 64} | options, PROMPTS, 10, environment, said)
    assert ours[0] == stock[0]
    assert torch.allclose(*(torch.tensor(chosen) for _, chosen in (ours, stock)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [(TWO_PROCESSES, ALL_PROCESSES, "KV of one token takes 1,584 bytes"), ({}, *COMPILED)],
    ids=["two processes", "compiled"],
)
def test_tokens_are_those_of_the_torch_engine(ask, options, environment, said):
    model = load_model(MODEL, device="cpu", dtype=torch.float32)
    prompts = [model.tokenizer.encode(p.prompt).ids for p in problems("algebra", 3)]
    defaults = {
        "model": str(model_folder(MODEL)), "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512,
        "max_num_seqs": 4, "max_num_batched_tokens": 512, "block_size": 16,
        "additional_config": {"residualquant": {"preset": "INT2/4 g=32", "rotation": "hadamard"}},
    }  # fmt: skip
    tokens, _ = ask(defaults | options, prompts, NEW_TOKENS, environment, said)
    config = preset("INT2/4 g=32", rotation="hadamard")
    decoded = iter_decode(model, prompts, [config], NEW_TOKENS, set(), progress=False)
    expected = {one.prompt_index: one.tokens for one in decoded}
    assert tokens == [expected[n] for n in range(len(prompts))]
