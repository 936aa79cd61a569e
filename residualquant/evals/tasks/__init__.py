"""Four procedural tasks standing for the paper's benchmarks (App. A.2), for models small enough to ship.

Each problem is a pure function of (task, level, seed). The level every evaluation uses was chosen on the scores of
the BF16 cache and of direct INT2 (g = 32, no rotation) alone (``data/levels.csv``), then frozen here together with
``TASKS_VERSION``. Levels 1 to 8 are what the shipped models were trained on; level 9 lies between them.
"""

from __future__ import annotations

from collections.abc import Iterator

from residualquant.evals.tasks import algebra, code, words
from residualquant.evals.tasks.problem import Problem, is_test_prompt

__all__ = [
    "EOS_ID",
    "LEVEL",
    "MAX_NEW_TOKENS",
    "MODEL_OF_TASK",
    "PAD_ID",
    "STANDS_FOR",
    "TASKS",
    "TASKS_VERSION",
    "Problem",
    "is_test_prompt",
    "make_problem",
    "problems",
]

TASKS_VERSION = 1
TASKS = ("words", "algebra", "stubs", "asserts")
STANDS_FOR = {"words": "gsm8k", "algebra": "math500", "stubs": "humaneval", "asserts": "mbpp"}
MODEL_OF_TASK = {
    "words": "mini-ouro-maths",
    "algebra": "mini-ouro-maths",
    "stubs": "mini-ouro-code",
    "asserts": "mini-ouro-code",
}
LEVEL = {"words": 8, "algebra": 9, "stubs": 9, "asserts": 9}
MAX_NEW_TOKENS = {"words": 230, "algebra": 290, "stubs": 160, "asserts": 220}
PAD_ID, EOS_ID = 0, 1

_MAKERS = {"words": words.make, "algebra": algebra.make, "stubs": code.make_stub, "asserts": code.make_assert}
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 9)


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


def _stream(task: str, level: int, split: str) -> Iterator[Problem]:
    seed = 0
    while True:
        problem = make_problem(task, level, seed)
        if is_test_prompt(problem.prompt) == (split == "test"):
            yield problem
        seed += 1


def problems(task: str, n: int, split: str = "test", start: int = 0, level: int | None = None) -> list[Problem]:
    """Problems ``start`` … ``start + n - 1`` of a split, at the task's frozen level unless ``level`` is given.

    Raises:
        ValueError: an unknown task, level or split, or a negative count.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if n < 0 or start < 0:
        raise ValueError(f"n and start must not be negative, got {n} and {start}")
    stream = _stream(task, LEVEL[task] if task in LEVEL and level is None else level, split)
    for _ in range(start):
        next(stream)
    return [next(stream) for _ in range(n)]
