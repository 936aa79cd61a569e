"""What the records of vLLM on a GPU say, for README.md and docs/serving.md: speed, a recommendation, what equals what.

The records lie in ``data/h200``: ``vllm_speed*.json`` (:mod:`residualquant.vllm.bench`), ``vllm_accuracy.csv``
(:func:`residualquant.repro.serving.compare_engines`) and ``vllm.json``, a list of checks with their protocols.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from residualquant.repro import paths

PUBLISHED = {"ouro": "Ouro-1.4B", "huginn": "Huginn-0125"}
SPEEDS = {"Generated": "tokens_per_second", "Prompt": "prefill_tokens_per_second"}


def speed_block() -> str:
    """Tokens that fit and speeds of a packed and of a raw cache, and what the answers are worth."""
    import pandas as pd

    from residualquant.repro.layouts import markdown

    rows = []
    for name, speed in _speeds():
        packed, raw = speed["packed"], speed.get("raw", {})
        rows.append([name, "Tokens that fit", packed["tokens_that_fit"], raw.get("tokens_that_fit")])
        for what, key in SPEEDS.items():
            for row, other in _points(speed):
                about = f"{what} tokens per second, {row['tokens']:,} x {row['requests']}"
                rows.append([name, about, row[key], other.get(key)])
    columns = ["Model", "Past tokens x requests", "Packed", "BF16", "Ratio"]
    cells = [
        [model, about, f"{packed:,.0f}", f"{raw:,.0f}" if raw else "–", f"{packed / raw:.2f}" if raw else "–"]
        for model, about, packed, raw in rows
    ]
    answers = pd.read_csv(paths.data_dir("h200") / "vllm_accuracy.csv")
    judged = "; ".join(
        f"{row.task}: {row.vllm_correct} by vLLM and {row.torch_correct} by the torch engine of {row.n}, "
        f"{row.only_vllm} to {row.only_torch} that one alone solves, p = {row.p:.2f}"
        for row in answers.itertuples()
    )
    first = answers.iloc[0]
    said = f"Answers to the same problems ({first.model}, {first.config}, McNemar's exact test): {judged}."
    head = f"{_gpu()}, vLLM {first.vllm}, the models' shapes with random weights, {_config()}"
    return f"{head} (–: not measured):\n\n{markdown(pd.DataFrame(cells, columns=columns))}\n\n{said}"


def choice_block() -> str:
    """Which cache serves which load sooner, by the measured speeds of prompts and of answers."""
    import pandas as pd

    from residualquant.repro.layouts import markdown

    (speed,) = (speed for _, speed in _speeds() if "raw" in speed)
    rows = []
    for packed, raw in _points(speed):
        ratios = {f"{what} tokens": packed[key] / raw[key] for what, key in SPEEDS.items()}
        longer = packed["tokens"] * (1 / packed[SPEEDS["Prompt"]] - 1 / raw[SPEEDS["Prompt"]])
        gained = 1 / raw[SPEEDS["Generated"]] - 1 / packed[SPEEDS["Generated"]]
        load = {"Prompt tokens x requests": f"{packed['tokens']:,} x {packed['requests']}"}
        shown = {name: f"{ratio:.2f}" for name, ratio in ratios.items()}
        sooner = f"{longer / gained:.0f} answer tokens" if gained > 0 else "–"
        rows.append(load | shown | {"Packed is sooner from": sooner})
    fit = speed["packed"]["tokens_that_fit"] / speed["raw"]["tokens_that_fit"]
    options = speed["protocol"]["options"]
    model = PUBLISHED[speed["protocol"]["model"]]
    command = (
        f'residualquant serve MODEL --config "{_config("preset")}" --rotation {_config("rotation")} -- '
        f"--max-num-seqs {options['max_num_seqs']} --max-num-batched-tokens {options['max_num_batched_tokens']} "
        f"--gpu-memory-utilization {options['gpu_memory_utilization']}"
    )
    return (
        f"```sh\n{command}\n```\n\nholds {fit:.2f} times the tokens of BF16 ({_gpu()}, {model}'s shape). Speeds over "
        "those of BF16, and the length of answers from which packed is sooner, a prompt and its answer being timed one "
        f"after the other:\n\n{markdown(pd.DataFrame(rows))}\n\n"
        "So: packed where memory bounds the requests at a time or the prefix cache, and where answers are longer than "
        "that; raw (`--config BF16`) for long prompts with short answers that share no prefix."
    )


def checks_block() -> str:
    """Every check on the GPU with its result."""
    import pandas as pd

    from residualquant.repro.layouts import markdown

    record = _record()
    rows = [{"Check": c["name"], "Result": _result(c), "Commit": c["commit"]} for c in record["checks"]]
    notes = "\n".join(f"- {c['name']}: {c['note']}." for c in record["checks"] if "note" in c)
    missing = "; ".join(record["not_measured"])
    return f"{record['gpu']}:\n\n{markdown(pd.DataFrame(rows))}\n\n{notes}\n\nNot measured: {missing}."


def _result(check: Mapping[str, Any]) -> str:
    """The result of one check in words."""
    if "answers" in check:
        found = check["answers"]
        agree, each, difference = (
            found["tokens_that_agree"], found["tokens_each"], found.get("largest_log_probability_difference")
        )  # fmt: skip
        whole = sum(count == each for count in agree)
        what = f"{whole} of {len(agree)} answers alike, {each} tokens each"
        if whole < len(agree):
            what += f"; the others for {', '.join(str(count) for count in agree if count < each)} tokens"
        return what if difference is None else f"{what}; log-probabilities differ by {difference:.2g}"
    if "largest_relative_error" in check:
        errors = (f"{name} {error:.2g}" for name, error in check["largest_relative_error"].items())
        return f"largest relative error: {', '.join(errors)} ({check['calls']} calls)"
    if "tests" in check:
        return f"{check['tests']['passed']} passed, {len(check['tests']['failed'])} failed"
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in check["counts"].items())


def _record() -> dict:
    return paths.parse_json((paths.data_dir("h200") / "vllm.json").read_bytes())


def _gpu() -> str:
    return _record()["gpu"]


def _speeds() -> Iterator[tuple[str, dict]]:
    """(model, record) of every shape."""
    for path in sorted(paths.data_dir("h200").glob("vllm_speed*.json")):
        speed = paths.parse_json(path.read_bytes())
        yield PUBLISHED[speed["protocol"]["model"]], speed


def _config(name: str | None = None) -> str:
    """The packed cache's configuration in words, or one name of it."""
    (_, speed), *_ = _speeds()
    config = speed["protocol"]["config"]
    return config[name] if name else f"{config['preset']}, {config['rotation']}"


def _points(speed: Mapping[str, Any]) -> list[tuple[dict, dict]]:
    """What was measured of a packed and of a raw cache with the same prompts; nothing for raw where it is missing."""
    raw = {(row["tokens"], row["requests"]): row for row in speed.get("raw", {}).get("rows", ())}
    return [(row, raw.get((row["tokens"], row["requests"]), {})) for row in speed["packed"]["rows"]]
