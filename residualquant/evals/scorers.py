"""Score responses as the paper does (App. A.2): extracted answers, Math-Verify, EvalPlus.

Each procedural task is scored by the scorer of the benchmark it stands for. Code and symbolic answers are judged in
a separate, long-lived process (see ``_scoring_worker``); identical (problem, response) pairs are judged once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from residualquant.errors import ResidualQuantError
from residualquant.evals._scoring_worker import MAX_LINES
from residualquant.evals.tasks.problem import Problem
from residualquant.repro.provenance import cores

FLEXIBLE_EXTRACT = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
INVALID = "[invalid]"

_SCORER_OF = {
    "words": "flexible-extract",
    "gsm8k": "flexible-extract",
    "algebra": "math-verify",
    "math500": "math-verify",
    "stubs": "evalplus",
    "asserts": "evalplus",
    "humaneval": "evalplus",
    "mbpp": "evalplus",
}
# What decides a verdict, by scorer: part of a record's key, so written here and not looked up. A machine can then
# decode without the scorers; ``score`` refuses other versions of the packages among them.
VERSIONS = {
    "flexible-extract": {"flexible-extract": "1"},
    "math-verify": {"math-verify": "0.9.0", "latex2sympy2_extended": "1.11.0"},
    "evalplus": {"evalplus": "0.3.1", "sanitize-max-lines": str(MAX_LINES)},
}
PACKAGES = ("math-verify", "latex2sympy2_extended", "evalplus")
# EvalPlus' stop strings for a completion that directly continues the prompt; a fenced answer ends with its fence.
_STOPS = {
    "stubs": ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ", "\nif __name__", "\nprint("),
    "asserts": ('\n"""', "\nassert", "\nif __name__", "\nprint("),
    "humaneval": ("\n```",),
    "mbpp": ("\n```",),
}


def extract_number(text: str) -> str:
    """The last number of ``text`` as lm-eval's flexible-extract finds it, without ``,`` ``$`` and a closing full stop.

    Returns ``[invalid]`` when there is none.
    """
    matches = FLEXIBLE_EXTRACT.findall(text)
    if not matches:
        return INVALID
    found = next(group for group in matches[-1] if group).strip()
    return found.replace(",", "").replace("$", "").removesuffix(".")


class _Worker:
    """One scoring process, started on first use, that answers a list of items with a list of verdicts."""

    def __init__(self, kind: str):
        self.kind = kind
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._folder: tempfile.TemporaryDirectory | None = None

    def _start(self) -> subprocess.Popen:
        self._folder = tempfile.TemporaryDirectory(prefix="residualquant-scoring-")
        folder = self._folder.name
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EVALPLUS_")}
        environment |= {"TMPDIR": folder, "XDG_CACHE_HOME": folder, "HF_HOME": folder, "MPLCONFIGDIR": folder}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        script = Path(__file__).with_name("_scoring_worker.py")
        processes = min(8, cores())
        with open(Path(folder) / "stderr.txt", "wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", str(script), self.kind, str(processes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=folder,
                text=True,
                start_new_session=True,
            )

    def judge(self, items: list[dict]) -> list[bool]:
        """Verdicts of ``items``, in order.

        Raises:
            ResidualQuantError: the scoring process ended; its last words are quoted.
        """
        if not items:
            return []
        with self._lock:
            if self._process is None:
                self._process = self._start()
            try:
                reply = self._ask(json.dumps(items))
                if not reply:
                    said = (Path(self._folder.name) / "stderr.txt").read_text(errors="replace").strip()
                    reason = said.splitlines()[-1] if said else "no reason given"
                    raise ResidualQuantError(f"the {self.kind} scoring process ended early: {reason}")
            except BaseException:  # an interrupted exchange would leave a reply to be taken for the next one's
                self._end()
                raise
        return json.loads(reply)

    def _ask(self, line: str) -> str:
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except BrokenPipeError:
            return ""

    def _end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process = None
        self._folder.cleanup()

    def close(self) -> None:
        """End the process, with the children it has, and remove its folder."""
        with self._lock:
            self._end()


_WORKERS = {"math-verify": _Worker("answer"), "evalplus": _Worker("code")}
_VERDICTS: dict[str, bool] = {}


@atexit.register
def close_workers() -> None:
    """End the scoring processes; they start again when needed."""
    for worker in _WORKERS.values():
        worker.close()


def _cut(text: str, stops: Sequence[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _code_item(problem: Problem, response: str, find_zero_workaround: bool) -> dict:
    fenced = problem.task in ("humaneval", "mbpp")
    response = _cut(response, _STOPS[problem.task])
    return {
        "dataset": problem.task,  # EvalPlus' special oracles go by data set, so none can touch the procedural tasks
        "task_id": problem.problem_id,
        "reference": problem.answer if fenced else problem.prompt + problem.answer,
        "solution": response if fenced else problem.prompt + response,
        "entry_point": problem.entry_point,
        "inputs": problem.base_input,
        "atol": problem.atol,
        "find_zero_workaround": find_zero_workaround,
    }


def score(
    task: str, problems: Sequence[Problem], responses: Sequence[str], *, find_zero_workaround: bool = False
) -> list[bool]:
    """Whether each response answers its problem.

    ``find_zero_workaround`` judges HumanEval/32 by EvalPlus' own criterion; without it EvalPlus 0.3.1 fails that
    problem even for the canonical solution.

    Raises:
        ValueError: an unknown task, or as many responses as problems are not given.
        ResidualQuantError: the scoring process died, or the scorer is not installed in the version of ``VERSIONS``.
    """
    for name, wanted in scorer_versions(task).items():
        if name in PACKAGES and (found := _installed(name)) != wanted:
            raise ResidualQuantError(f"{task} is scored with {name} {wanted}, {found} is installed")
    if len(problems) != len(responses):
        raise ValueError(f"{len(problems)} problems but {len(responses)} responses")
    scorer = _SCORER_OF[task]
    if scorer == "flexible-extract":
        return [extract_number(r) == extract_number(p.answer) for p, r in zip(problems, responses)]
    if scorer == "math-verify":
        items = [{"gold": p.answer, "response": r} for p, r in zip(problems, responses)]
    else:
        items = [_code_item(p, r, find_zero_workaround) for p, r in zip(problems, responses)]
    keys = [json.dumps(item) for item in items]
    missing = {k: item for k, item in zip(keys, items) if k not in _VERDICTS}
    _VERDICTS.update(zip(missing, _WORKERS[scorer].judge(list(missing.values()))))
    return [_VERDICTS[k] for k in keys]


def scorer_versions(task: str) -> dict[str, str]:
    """Name and version of everything that decides a verdict of ``task`` (part of a record's key).

    Raises:
        ValueError: an unknown task.
    """
    if task not in _SCORER_OF:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(_SCORER_OF)}")
    return dict(VERSIONS[_SCORER_OF[task]])


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
