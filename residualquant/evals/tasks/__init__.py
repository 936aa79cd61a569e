"""Four procedural tasks standing for the paper's benchmarks (App. A.2), for models small enough to ship.

Each problem is a pure function of (task, level, seed). The level at which a family of models is evaluated was chosen on
the scores of the BF16 cache and of direct INT2 (g = 32, no rotation) alone (``data/levels.csv``), then frozen here
together with ``TASKS_VERSION``. Levels 1 to 8 are what the shipped models were trained on (Mini-Huginn: 1 to 6); 9 and
10 lie between and just beyond them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from residualquant.errors import check_count
from residualquant.evals.tasks import algebra, code, words
from residualquant.evals.tasks.problem import Problem, is_test_prompt

__all__ = [
    "EOS_ID",
    "FROZEN",
    "MODELS",
    "PAD_ID",
    "STANDS_FOR",
    "TASKS",
    "TASKS_VERSION",
    "Frozen",
    "Problem",
    "frozen",
    "is_test_prompt",
    "make_problem",
    "problem_of",
    "problems",
]

TASKS_VERSION = 1
TASKS = ("words", "algebra", "stubs", "asserts")
STANDS_FOR = {"words": "gsm8k", "algebra": "math500", "stubs": "humaneval", "asserts": "mbpp"}


@dataclass(frozen=True)
class Frozen:
    """How a task is put to a family of models: the ``level`` of its problems and the longest answer in tokens."""

    level: int
    max_new_tokens: int


FROZEN = {
    "ouro": {
        "words": Frozen(8, 230),
        "algebra": Frozen(9, 290),
        "stubs": Frozen(9, 160),
        "asserts": Frozen(9, 220),
    },
    "huginn": {
        "words": Frozen(10, 250),
        "algebra": Frozen(10, 310),
        "stubs": Frozen(10, 190),
        "asserts": Frozen(10, 250),
    },
}
# The shipped model of each family for a task.
MODELS = {
    "ouro": {
        "words": "mini-ouro-maths",
        "algebra": "mini-ouro-maths",
        "stubs": "mini-ouro-code",
        "asserts": "mini-ouro-code",
    },
    "huginn": dict.fromkeys(TASKS, "mini-huginn"),
}
PAD_ID, EOS_ID = 0, 1

_MAKERS = {"words": words.make, "algebra": algebra.make, "stubs": code.make_stub, "asserts": code.make_assert}
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
MOST_PROBLEMS = 10**6  # of a split; one after the other is made, which takes minutes for so many


def frozen(task: str, family: str) -> Frozen:
    """Level and answer length of ``task`` for models of ``family``.

    Raises:
        ValueError: an unknown family or task.
    """
    if family not in FROZEN:
        raise ValueError(f"no levels are frozen for models of the family {family!r}; known: {', '.join(FROZEN)}")
    if task not in FROZEN[family]:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    return FROZEN[family][task]


def make_problem(task: str, level: int, seed: int | str) -> Problem:
    """The problem of (task, level, seed).

    Raises:
        ValueError: an unknown task or level.
    """
    if task not in _MAKERS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; known: {LEVELS[0]} to {LEVELS[-1]}")
    return _MAKERS[task](level, seed)


def problem_of(problem_id: str) -> Problem:
    """The problem of an id such as "words/8/38".

    Raises:
        ValueError: no id of a procedural task.
    """
    named = re.fullmatch(r"(\w+)/(\d{1,2})/(\d{1,18})", str(problem_id), re.ASCII)
    if not named or named[1] not in _MAKERS:
        raise ValueError(f"no procedural task has a problem {problem_id!r}")
    return make_problem(named[1], int(named[2]), int(named[3]))


def _stream(task: str, level: int, split: str) -> Iterator[Problem]:
    seed = 0
    while True:
        problem = make_problem(task, level, seed)
        if is_test_prompt(problem.prompt) == (split == "test"):
            yield problem
        seed += 1


def problems(
    task: str, n: int, split: str = "test", start: int = 0, level: int | None = None, family: str = "ouro"
) -> list[Problem]:
    """Problems ``start`` … ``start + n - 1`` of a split, at the level frozen for ``family`` unless ``level`` is given.

    Raises:
        ValueError: an unknown task, level, family or split, or a negative count.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    check_count("n", n, 0)
    check_count("start", start, 0)
    if n + start > MOST_PROBLEMS:
        raise ValueError(f"n and start must not exceed {MOST_PROBLEMS} together, got {n} and {start}")
    stream = _stream(task, frozen(task, family).level if level is None else level, split)
    for _ in range(start):
        next(stream)
    return [next(stream) for _ in range(n)]
