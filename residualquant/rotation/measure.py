"""How far attention errs when K or V are read as a configuration codes them: what a rotation is worth (App. G)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.cache import LayerRotations, RotationMap
from residualquant.config import KVQuantConfig
from residualquant.models.base import KVShape, LoopedModel
from residualquant.rotation import Rotation
from residualquant.rotation.calibration import PAPER_SIZES, CalibrationSizes, output_gram
from residualquant.rotation.optr_h import output_energy, recode_texts, value_loss
from residualquant.rotation.states import BATCH_VALUES, LAST_QUERIES, States, attend, batches, states_of
from residualquant.trace import collect

if TYPE_CHECKING:
    import pandas as pd


def rotation_errors(
    model: LoopedModel,
    task: str,
    configs: Sequence[KVQuantConfig],
    rotations: Mapping[int, RotationMap],
    sizes: CalibrationSizes = PAPER_SIZES,
    n: int = 64,
) -> pd.DataFrame:
    """Attention-output error of configurations on a third split, which neither fitting nor choosing has seen.

    Args:
        model: a looped model.
        task: any of the tasks whose training problems to use.
        configs: how K and V are coded; such as one per rotation.
        rotations: of the configurations (by index) whose rotation is calibrated.
        sizes: of the calibration: the split starts after its problems.
        n: problems.

    Returns:
        One row per configuration, layer, loop group, K or V and head (all from 1): ``error`` of
        :func:`attention_errors`, ``n``, and ``split`` in words.

    Raises:
        ValueError: a calibrated rotation that is missing, or an unknown task.
        ResidualQuantError: the model has no tokenizer.
    """
    import pandas as pd

    from residualquant.evals.texts import calibration_tasks, unseen_texts

    texts = unseen_texts(model, task, sizes.fit, sizes.holdout, n)
    first, tasks = sizes.fit + sizes.holdout, "+".join(calibration_tasks(model, task))
    about = {"n": n, "split": f"training problems {first} to {first + n - 1} of {tasks}"}
    rows = []
    for index, errors in enumerate(attention_errors(model, configs, texts, rotations)):
        cfg = configs[index]
        coded = {"rotation": cfg.rotation, "config": cfg.label, "reference": cfg.reference}
        for (group, layer, kind), heads in errors.items():
            place = {"layer": layer + 1, "loop_group": group + 1, "of": kind.upper()}
            for head, error in enumerate(heads.tolist(), start=1):
                rows.append({"model": model.name, **coded, **place, "head": head, "error": error, **about})
    return pd.DataFrame(rows)


def compare_rotations(errors: pd.DataFrame, rotation: str, against: str) -> dict[str, float]:
    """How one rotation's errors compare with another's in a table of :func:`rotation_errors`.

    Returns:
        ``mean_ratio`` and ``median_ratio``: mean (median) error over that of ``against``; ``lower``: share of
        (configuration, layer, loop group, head, K or V) whose error is lower; ``cells``: how many there are.

    Raises:
        ValueError: a rotation that the table does not have, or two that do not code the same.
    """
    places = ["model", "config", "reference", "layer", "loop_group", "of", "head"]
    sides = [errors[errors["rotation"] == name].set_index(places)["error"].sort_index() for name in (rotation, against)]
    for name, side in zip((rotation, against), sides):
        if side.empty:
            raise ValueError(f"the table has no errors of rotation {name!r}")
    own, other = sides
    if not own.index.equals(other.index):
        raise ValueError(f"{rotation!r} and {against!r} were not measured on the same configurations")
    return {
        "mean_ratio": float(own.mean() / other.mean()),
        "median_ratio": float(own.median() / other.median()),
        "lower": float((own < other).mean()),
        "cells": len(own),
    }


@torch.no_grad()
def attention_errors(
    model: LoopedModel,
    configs: Sequence[KVQuantConfig],
    texts: Sequence[Sequence[int]],
    rotations: Mapping[int, RotationMap] = {},
    queries: int = LAST_QUERIES,
) -> list[dict[tuple[int, int, str], Tensor]]:
    """Attention-output error of every (loop group, layer, "k" or "v"), [H] fp32, averaged over texts and loops.

    ``E((Shat - S) V)`` for K alone, and ``E(S (Vhat - V))`` for V alone, of the last ``queries`` queries of each text:
    K's and V's rotations are judged independently.

    Args:
        model: a looped model.
        configs: how K and V are coded.
        texts: token ids.
        rotations: of the configurations (by index) whose rotation is calibrated.
        queries: last queries of each text that count.

    Returns:
        The errors of each configuration.
    """
    shape = model.kv_shape
    known = [LayerRotations(cfg, shape, model.device, rotations.get(i)) for i, cfg in enumerate(configs)]
    errors: list[dict[tuple[int, int, str], Tensor]] = [{} for _ in configs]
    for layer in range(shape.layers):
        gram = output_gram(model, layer)
        captured = collect(model, texts, [layer], queries)
        for cfg, matrices, found in zip((c.for_layer(layer) for c in configs), known, errors):
            for group in range(shape.loops // cfg.loops):
                states = [states_of(text, [(group, layer)], [layer], cfg.loops) for text in captured]
                parts = batches(states, BATCH_VALUES[model.device.type])
                for kind, error in (("k", _key_error), ("v", _value_error)):
                    basis = _basis(matrices.get(group, layer, kind), shape, model.device)
                    found[group, layer, kind] = torch.cat([error(part, gram, cfg, *basis) for part in parts], 1).mean(1)
    return errors


def _basis(rotation: Rotation | None, shape: KVShape, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The matrix of every head, and the fixed means in the original basis."""
    if rotation is None:
        return torch.eye(shape.head_dim, device=device).expand(shape.kv_heads, -1, -1), None
    centres = None if rotation.means is None else rotation.unrotate(rotation.means)
    matrix = rotation.matrix.float().expand(shape.kv_heads, -1, -1)
    return matrix, centres if centres is None or centres.dim() == 3 else centres[:, None]


def _key_error(states: States, gram: Tensor, cfg: KVQuantConfig, matrix: Tensor, centres: Tensor | None) -> Tensor:
    read = states.log_weights(recode_texts(states.k, cfg, matrix, centres)).exp()
    return states.mean_of(output_energy(attend(read - states.own_weights, states.v.float()), gram))


def _value_error(states: States, gram: Tensor, cfg: KVQuantConfig, matrix: Tensor, centres: Tensor | None) -> Tensor:
    return value_loss(states, gram, recode_texts(states.v, cfg, matrix, centres), states.own_weights)
