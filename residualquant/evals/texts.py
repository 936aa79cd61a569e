"""Training texts of the tasks as token ids: what rotations are calibrated on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import problems

if TYPE_CHECKING:
    from residualquant.models import Ouro


def training_texts(model: Ouro, task: str, n: int, start: int = 0) -> list[list[int]]:
    """Prompt and solution of training problems ``start`` … ``start + n - 1``, each as token ids.

    Raises:
        ValueError: an unknown task, or a negative number.
        ResidualQuantError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ResidualQuantError(f"the model {model.name} has no tokenizer.json beside its weights")
    chosen = problems(task, n, "train", start, family=model.family)
    return [model.tokenizer.encode(p.prompt + p.solution).ids for p in chosen]


def calibration_texts(model: Ouro, task: str, n: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """``n`` texts to fit with and ``n`` others to choose with (App. G): the first 2n training problems, shuffled.

    Training problems from 2n on are seen by neither.

    Raises:
        ValueError: n below 1, or an unknown task.
        ResidualQuantError: the model has no tokenizer.
    """
    if n < 1:
        raise ValueError(f"examples must be at least 1, got {n}")
    texts = training_texts(model, task, 2 * n)
    random.Random(seed).shuffle(texts)
    return texts[:n], texts[n:]
