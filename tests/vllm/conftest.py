"""Tests on the real vLLM engine, on the CPU; collected only where vLLM is installed (`make test-vllm`)."""

import gc
import importlib.util
import os

import pytest

INSTALLED = importlib.util.find_spec("vllm")
if INSTALLED is None or INSTALLED.origin is None:  # without an origin it is this folder
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines in this process start sooner and can be looked into
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "TORCH_COMPILE_DISABLE": "1",  # vLLM's sampler would compile for minutes
    }

MAX_MODEL_LEN = 256


@pytest.fixture(scope="session")
def tiny_ouro(tmp_path_factory):
    """A random Ouro with grouped queries, weights large enough that greedy choices are no ties."""
    import torch

    from residualquant.models.loading import save_model
    from residualquant.models.ouro import Ouro, OuroConfig

    torch.manual_seed(0)
    config = OuroConfig(
        hidden_size=256, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=320, total_ut_steps=4, max_position_embeddings=MAX_MODEL_LEN,
    )  # fmt: skip
    model = Ouro(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return save_model(model, tmp_path_factory.mktemp("tiny_ouro"))


@pytest.fixture(scope="session")
def memory():
    """Options of an engine that shares its GPU with others."""
    import torch

    return {"gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 2**28} if torch.cuda.is_available() else {}


@pytest.fixture(scope="module")
def start_engine(memory):
    """A function that starts an engine in this process; a module's engines end with it, for each takes a gigabyte."""
    from vllm import LLM

    engines = []

    def start(model, **options):
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "block_size": 16,
            **memory,
        }
        engines.append(LLM(str(model), **(defaults | options)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()
    engines.clear()
    gc.collect()
