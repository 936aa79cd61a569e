"""Training problems as token ids: what models are trained on, rotations are calibrated on, and keys are drawn from."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.evals.tasks import MODELS, Problem, frozen, problems

if TYPE_CHECKING:
    from residualquant.models.base import LoopedModel


def calibration_tasks(model: LoopedModel, task: str) -> tuple[str, ...]:
    """The tasks that share a calibration with ``task`` (App. G): those that one shipped model of the family serves.

    So maths and code for models like Ouro, all four tasks for models like Huginn.

    Raises:
        ValueError: an unknown task.
    """
    frozen(task, model.family)
    served_by = MODELS[model.family]
    return tuple(name for name in served_by if served_by[name] == served_by[task])


def problem_ids(tokenizer, problem: Problem) -> tuple[list[int], list[int]]:
    """Token ids of a problem's prompt and of its solution, each tokenised on its own, as decoding has them.

    (Tokenised as one text, the last characters of a prompt can join the first ones of the solution in a token.)
    """
    return tokenizer.encode(problem.prompt).ids, tokenizer.encode(problem.solution).ids


def tokenizer_of(model: LoopedModel):
    """The model's tokenizer.

    Raises:
        ResidualQuantError: it has none.
    """
    if model.tokenizer is None:
        raise ResidualQuantError(f"the model {model.name} has no tokenizer.json beside its weights")
    return model.tokenizer


def training_texts(model: LoopedModel, task: str, n: int, start: int = 0, split: str = "train") -> list[list[int]]:
    """Prompt and solution of problems ``start`` … ``start + n - 1`` of a split, each as token ids.

    Raises:
        ValueError: an unknown task or split, or a negative number.
        ResidualQuantError: the model has no tokenizer.
    """
    tokenizer, chosen = tokenizer_of(model), problems(task, n, split, start, family=model.family)
    return [prompt + solution for prompt, solution in (problem_ids(tokenizer, problem) for problem in chosen)]


def shared_texts(model: LoopedModel, task: str, n: int, start: int = 0) -> list[list[int]]:
    """Training texts ``start`` … ``start + n - 1`` of the :func:`calibration_tasks` of ``task``, which take turns.

    Raises:
        ValueError: an unknown task, or a negative number.
        ResidualQuantError: the model has no tokenizer.
    """
    tasks = calibration_tasks(model, task)
    first, last = start // len(tasks), -(-(start + n) // len(tasks))
    parts = [training_texts(model, name, last - first, first) for name in tasks]
    texts = [text for turn in zip(*parts) for text in turn]
    return texts[start - first * len(tasks) :][:n]


def calibration_texts(
    model: LoopedModel, task: str, fit: int, holdout: int, seed: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """``fit`` texts to fit with and ``holdout`` others to choose with (App. G): the first :func:`shared_texts`,
    shuffled.

    Those from ``fit + holdout`` on (:func:`unseen_texts`) are seen by neither, test problems by nobody.

    Raises:
        ValueError: a number below 1, or an unknown task.
        ResidualQuantError: the model has no tokenizer.
    """
    if fit < 1 or holdout < 1:
        raise ValueError(f"at least 1 text to fit and 1 to choose with are needed, got {fit} and {holdout}")
    texts = shared_texts(model, task, fit + holdout)
    random.Random(seed).shuffle(texts)
    return texts[:fit], texts[fit:]


def unseen_texts(model: LoopedModel, task: str, fit: int, holdout: int, n: int) -> list[list[int]]:
    """The ``n`` training texts after those of :func:`calibration_texts`: a third split, to measure on."""
    return shared_texts(model, task, n, start=fit + holdout)
