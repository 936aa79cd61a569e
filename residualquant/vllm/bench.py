"""Decoding by vLLM at a published model's shape with random weights, packed and raw: tokens that fit, time of a step::

    python -m residualquant.vllm.bench data/h200/vllm_speed.json [ouro|huginn] [compiled]

A packed and a raw engine run one after the other, each in a process of its own; the file is written after every step.
Prompts are timed twice, never with a prefix hit, and the faster time counts. The time of a step is that of 65 tokens
less that of one, over 64, the prompts being prefix hits by then. Requests that do not fit all at once are not timed.
With "compiled" the engine compiles as vLLM does by itself, else CUDA graphs alone are used, which start sooner.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from residualquant.models.huginn import HuginnConfig
from residualquant.models.ouro import OuroConfig
from residualquant.repro.paths import write_atomic
from residualquant.repro.provenance import provenance

SETTINGS = {"packed": {"residualquant": {"preset": "INT2/4 g=32", "rotation": "hadamard"}}, "raw": {}}
SHAPES = {  # configuration, architecture, (tokens of a prompt, requests at a time)
    "ouro": (OuroConfig(), "OuroForCausalLM", ((2048, 1), (2048, 8), (2048, 64), (16384, 1))),
    "huginn": (HuginnConfig(), "RavenForCausalLM", ((2048, 1), (2048, 8))),
}
NEW_TOKENS = 64
OPTIONS = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "gpu_memory_utilization": 0.9, "dtype": "bfloat16"}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, 64]}


def measure(config: OuroConfig | HuginnConfig, architecture: str, points, keep, **options) -> None:
    """Start an engine for a model of this shape, and time its steps.

    Args:
        config, architecture: what ``config.json`` says.
        points: (tokens of a prompt, requests at a time).
        keep: called with (name, value) as soon as something is known; "rows" holds one dictionary a point.
        options: of the engine.
    """
    from vllm import LLM, SamplingParams

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        values = {"architectures": [architecture], "torch_dtype": "bfloat16", **config.to_dict()}
        (Path(folder) / "config.json").write_text(json.dumps(values))
        longest = max(tokens for tokens, _ in points) + 2 * NEW_TOKENS
        engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=longest, **options)
    cache = engine.llm_engine.vllm_config.cache_config
    keep("engine_seconds", round(time.perf_counter() - begun, 1))
    fit = cache.num_gpu_blocks * cache.block_size
    keep("tokens_that_fit", fit)
    draw, rows = random.Random(0), []

    def seconds(prompts: list[dict], tokens: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        outputs = engine.generate(prompts, params, use_tqdm=False)
        if any(len(output.outputs[0].token_ids) != tokens for output in outputs):
            raise RuntimeError(f"a request ended before its {tokens} tokens: no time is given")
        return time.perf_counter() - start

    for tokens, requests in points:
        if requests * (tokens + NEW_TOKENS) > fit:
            continue
        prefills = []
        for _ in range(2):  # the first time kernels may be compiled
            drawn = [[draw.randrange(10, config.vocab_size) for _ in range(tokens)] for _ in range(requests)]
            prompts = [{"prompt_token_ids": ids} for ids in drawn]
            prefills.append(seconds(prompts, 1))
        step = (seconds(prompts, 1 + NEW_TOKENS) - min(seconds(prompts, 1) for _ in range(2))) / NEW_TOKENS
        rows.append(
            {
                "tokens": tokens, "requests": requests, "step_ms": round(1e3 * step, 2),
                "tokens_per_second": round(requests / step, 1),
                "prefill_tokens_per_second": round(tokens * requests / min(prefills)),
            }
        )  # fmt: skip
        keep("rows", rows)


def run(path: Path, kind: str, family: str, compiled: bool) -> None:
    """Measure one engine, and keep what is known under ``kind`` in the file."""
    config, architecture, points = SHAPES[family]
    options = OPTIONS | {"additional_config": SETTINGS[kind]} | ({} if compiled else {"compilation_config": GRAPHS})

    def keep(name: str, value) -> None:
        record = json.loads(path.read_text()) if path.exists() else {}
        record.setdefault(kind, {})[name] = value
        packed = SETTINGS["packed"]["residualquant"]
        record |= {"protocol": {"model": family, "config": packed, "options": OPTIONS, "compiled": compiled}}
        write_atomic(path, json.dumps(record | {"provenance": provenance("cuda")}, indent=1) + "\n")
        print(f"{kind}: {name} {value}", flush=True)

    measure(config, architecture, points, keep, **options)


def main(*arguments: str) -> None:
    """Both engines; each gets a process of its own, since vLLM does not give all memory back."""
    path, words = arguments[:1], arguments[1:]
    families, kinds = ([word for word in words if word in known] for known in (SHAPES, SETTINGS))
    if not path or len(families) > 1 or len(kinds) > 1 or set(words) - {*families, *kinds, "compiled"}:
        got = " ".join(arguments) or "nothing"
        sys.exit(f"python -m residualquant.vllm.bench takes FILE [{'|'.join(SHAPES)}] [compiled], got {got}")
    if kinds:
        run(Path(*path), kinds[0], *families or ["ouro"], "compiled" in words)
        return
    for kind in SETTINGS:
        subprocess.run([sys.executable, "-m", "residualquant.vllm.bench", *path, kind, *words], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
