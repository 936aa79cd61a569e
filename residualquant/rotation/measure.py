"""How far attention errs when K or V are read as a configuration codes them: what a rotation is worth (App. G)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.cache import LayerRotations, RotationMap
from residualquant.config import KVQuantConfig
from residualquant.models.base import KVShape, LoopedModel
from residualquant.rotation import Rotation
from residualquant.rotation.calibration import output_gram
from residualquant.rotation.optr_h import output_energy, recode_texts, value_loss
from residualquant.rotation.states import BATCH_VALUES, LAST_QUERIES, States, attend, batches, states_of
from residualquant.trace import collect

if TYPE_CHECKING:
    pass


@torch.no_grad()
def attention_errors(
    model: LoopedModel,
    cfg: KVQuantConfig,
    texts: Sequence[Sequence[int]],
    rotations: RotationMap | None = None,
    queries: int = LAST_QUERIES,
) -> dict[tuple[int, int, str], Tensor]:
    """Attention-output error of every (loop group, layer, "k" or "v"), [H] fp32, averaged over texts and loops.

    ``E((Shat - S) V)`` for K alone, and ``E(S (Vhat - V))`` for V alone, of the last ``queries`` queries of each text:
    K's and V's rotations are judged independently, on texts that neither fitting nor choosing has seen.

    Args:
        model: a looped model.
        cfg: how K and V are coded.
        texts: token ids.
        rotations: where the configuration's rotation is calibrated.
        queries: last queries of each text that count.
    """
    shape = model.kv_shape
    known = LayerRotations(cfg, shape, model.device, rotations)
    errors: dict[tuple[int, int, str], Tensor] = {}
    for layer in range(shape.layers):
        gram = output_gram(model, layer)
        captured = collect(model, texts, [layer], queries)
        for group in range(shape.loops // cfg.loops):
            states = [states_of(text, [(group, layer)], [layer], cfg.loops) for text in captured]
            parts = batches(states, BATCH_VALUES[model.device.type])
            for kind, error in (("k", _key_error), ("v", _value_error)):
                basis = _basis(known.get(group, layer, kind), shape, model.device)
                found = torch.cat([error(part, gram, cfg, *basis) for part in parts], 1)
                errors[group, layer, kind] = found.mean(1)
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
