"""Greedy decoding by vLLM, with the calling convention of :func:`residualquant.engine.iter_decode`.

What `residualquant eval --engine vllm` runs. One engine per configuration, one after the other. Prompts are prefilled
at once and prefixes are not shared, so that every prompt attends to its own BF16 K and V, as in the torch engine.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from residualquant.cache import RotationMap
from residualquant.config import KVQuantConfig
from residualquant.engine import Completion, check_request
from residualquant.errors import ResidualQuantError
from residualquant.models.base import LoopedModel
from residualquant.vllm import VLLM_VERSION
from residualquant.vllm.serve import ENVIRONMENT, MAX_NUM_BATCHED_TOKENS, check_installed, check_served
from residualquant.vllm.settings import NAME, Settings

MAX_ROWS = 256
MEMORY_FRACTION = 0.9  # of the GPU memory that is free
CPU_CACHE_BYTES = 2**30  # unless VLLM_CPU_KVCACHE_SPACE is set; vLLM would take nine tenths of the machine


def identity() -> dict:
    """What a record's key says of this engine: its name, vLLM's version, and a hash of the plugin's code."""
    from residualquant.repro.paths import PACKAGE
    from residualquant.repro.provenance import hash_sources

    sources = [*(PACKAGE / "vllm").glob("*.py"), PACKAGE / "layout.py", PACKAGE / "pages.py"]
    return {"engine": "vllm", "engine_version": VLLM_VERSION, "plugin": hash_sources(sources)[:16]}


def check(model: LoopedModel, configs: Sequence[KVQuantConfig]) -> None:
    """Refuse what vLLM cannot decode, before anything runs.

    Raises:
        ValueError: a configuration that the paged cache does not take.
        ResidualQuantError: another vLLM or none, a model that it does not serve or that was not loaded from a folder.
    """
    check_installed()
    folder = getattr(model, "folder", None)
    if folder is None:
        raise ResidualQuantError(f"vLLM loads a model from its folder, and {model.name} was not loaded from one")
    check_served(folder)
    for config in configs:
        _check_config(model, config)


def _check_config(model: LoopedModel, config: KVQuantConfig) -> None:
    from residualquant.rotation.calibration import CALIBRATED

    values = config.to_dict()
    if config.rotation in CALIBRATED and not config.is_off:
        values["rotations"] = "given with the configuration"
    Settings.read(values, model.kv_shape)


def iter_decode(
    model: LoopedModel,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[KVQuantConfig],
    max_new_tokens: int,
    eos_ids: set[int],
    max_rows: int | None = None,
    rotations: Mapping[int, RotationMap] | None = None,
    progress: bool = True,
    skip: Collection[tuple[int, int]] = (),
) -> Iterator[Completion]:
    """Greedy completions of every prompt under every configuration, yielded as they finish.

    Args:
        model: loaded from a folder; vLLM loads it again, at the same dtype and on the same kind of device.
        prompts, configs, max_new_tokens, eos_ids, rotations, progress, skip: as for the torch engine.
        max_rows: most sequences decoded at once; 256 when None.

    Raises:
        ValueError: what the torch engine refuses: no prompts, too long ones, numbers below 1.
        ResidualQuantError: the model is on another kind of device than vLLM runs on.
    """
    from tqdm.auto import tqdm

    check_request(model, prompts, configs, max_new_tokens, max_rows)
    wanted = [[row for row in range(len(prompts)) if (c, row) not in skip] for c in range(len(configs))]
    longest = max(map(len, prompts)) + max_new_tokens
    with tqdm(total=sum(map(len, wanted)), desc=f"vLLM {model.name}", disable=not progress) as bar:
        for column, (config, rows) in enumerate(zip(configs, wanted)):
            if not rows:
                continue
            with tempfile.TemporaryDirectory(prefix="residualquant-rotations-") as scratch:
                values = _settings(model, config, (rotations or {}).get(column), Path(scratch))
                engine = _start(model, values, longest, max_rows or MAX_ROWS)
            try:
                for row, tokens, finished in _run(engine, prompts, rows, max_new_tokens, eos_ids):
                    bar.update()
                    yield Completion(column, row, tokens, finished)
            finally:
                engine.engine_core.shutdown()


def _settings(model: LoopedModel, config: KVQuantConfig, rotations: RotationMap | None, scratch: Path) -> dict:
    """The ``residualquant`` part of vLLM's configuration; calibrated rotations are written to ``scratch``."""
    from residualquant.rotation.artefact import keep_rotations

    if rotations is None:
        return config.to_dict()
    keep_rotations(scratch, model, config, rotations)
    return config.to_dict() | {"rotations": str(scratch)}


def _start(model: LoopedModel, values: dict, longest: int, max_rows: int):
    """A vLLM engine for one configuration."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork of a process with threads may hang
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    device = model.device.type
    if current_platform.device_type != device:
        raise ResidualQuantError(f"vLLM runs on {current_platform.device_type} here, the model is on {device}")
    memory = {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        memory = {"gpu_memory_utilization": MEMORY_FRACTION * free / total}
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model.folder),
            skip_tokenizer_init=True,
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=longest,
            max_num_seqs=max_rows,
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, longest),
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            enforce_eager=device == "cpu",
            disable_log_stats=True,
            additional_config={NAME: values},
            **memory,
        )
    )


def _run(
    engine, prompts: Sequence[Sequence[int]], rows: Sequence[int], max_new_tokens: int, eos_ids: set[int]
) -> Iterator[tuple[int, list[int], bool]]:
    """(row, tokens without the stop token, whether one ended it) of the prompts in ``rows``, as they finish."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=max_new_tokens, stop_token_ids=sorted(eos_ids), ignore_eos=True, detokenize=False
    )
    for row in sorted(rows, key=lambda row: -len(prompts[row])):
        engine.add_request(str(row), {"prompt_token_ids": list(prompts[row])}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens = list(output.outputs[0].token_ids)
                stopped = tokens[-1] in eos_ids
                yield int(output.request_id), tokens[:-1] if stopped else tokens, stopped
