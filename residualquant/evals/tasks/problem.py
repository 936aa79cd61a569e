"""One procedural problem, and how train and test prompts are kept apart."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A prompt, its worked solution and its gold answer.

    Code problems also carry what EvalPlus needs: the function's name and the argument lists it is tried on;
    their ``answer`` is the canonical solution, ready to be appended to (stubs) or run after (asserts) the prompt.
    """

    task: str
    level: int
    problem_id: str
    prompt: str
    solution: str
    answer: str
    entry_point: str | None = None
    base_input: tuple[tuple, ...] = ()
    atol: float = 0.0


def rng_for(task: str, level: int, seed: int | str) -> random.Random:
    """The random stream of one problem: a function of (task, level, seed) alone."""
    return random.Random(f"{task}/{level}/{seed}")


def is_test_prompt(prompt: str) -> bool:
    """Whether a prompt belongs to the test split: 1 in 32, by hash, so no prompt is in both splits."""
    return hashlib.sha256(prompt.encode()).digest()[0] < 8


def ancestry(name: str, parent: dict[str, str | None]) -> list[str]:
    """``name``, the one it is defined from, and so on to the one that is simply given (whose parent is None)."""
    chain = [name]
    while (above := parent[chain[-1]]) is not None:
        chain.append(above)
    return chain
