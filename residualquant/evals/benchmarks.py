"""The paper's four benchmarks as problems, read from the files their authors publish (App. A.2).

Nothing is downloaded here: ``folder`` holds ``gsm8k/test.jsonl`` (openai/grade-school-math), ``math500/test.jsonl``
(openai/prm800k), ``humaneval/*.jsonl.gz`` and ``mbpp/*.jsonl.gz`` (EvalPlus releases v0.1.10 and v0.2.0).
"""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

from residualquant.errors import ResidualQuantError
from residualquant.evals.prompts import code_prompt, gsm8k_prompt, math500_prompt
from residualquant.evals.tasks.problem import Problem


def _gsm8k(row: dict, index: int) -> Problem:
    solution = row["answer"]
    answer = solution.split("####")[-1].strip()
    return Problem("gsm8k", 0, f"gsm8k/test/{index}", gsm8k_prompt(row["question"]), solution, answer)


def _math500(row: dict, _index: int) -> Problem:
    return Problem("math500", 0, row["unique_id"], math500_prompt(row["problem"]), row["solution"], row["answer"])


def _code(task: str, row: dict) -> Problem:
    program = row["prompt"] + row["canonical_solution"]
    arguments = tuple(tuple(arguments) for arguments in row["base_input"])
    prompt, name = code_prompt(row["prompt"]), row["entry_point"]
    return Problem(task, 0, row["task_id"], prompt, program, program, name, arguments, float(row["atol"]))


def _humaneval(row: dict, _index: int) -> Problem:
    return _code("humaneval", row)


def _mbpp(row: dict, _index: int) -> Problem:
    return _code("mbpp", row)


_READERS = {"gsm8k": _gsm8k, "math500": _math500, "humaneval": _humaneval, "mbpp": _mbpp}
BENCHMARKS = tuple(_READERS)


def benchmark_problems(name: str, folder: str | Path, n: int | None = None) -> list[Problem]:
    """The first ``n`` problems (all by default) of a benchmark, base tests only for code.

    Raises:
        ValueError: an unknown benchmark.
        ResidualQuantError: ``folder`` holds no such file, or more than one.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    pattern = "test.jsonl" if name in ("gsm8k", "math500") else "*.jsonl.gz"
    files = sorted((Path(folder) / name).glob(pattern))
    if len(files) != 1:
        raise ResidualQuantError(f"expected one {name}/{pattern} in the benchmark folder, found {len(files)}")
    with (gzip.open if files[0].suffix == ".gz" else open)(files[0], "rt", encoding="utf-8") as lines:
        return [_READERS[name](json.loads(line), i) for i, line in enumerate(islice(lines, n))]
