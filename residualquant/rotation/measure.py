"""How far attention errs when K or V are read as a configuration codes them: what a rotation is worth (App. G)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.cache import LayerRotations, RotationMap
from residualquant.config import KVQuantConfig
from residualquant.rotation import Rotation
from residualquant.rotation.calibration import output_gram
from residualquant.rotation.optr_h import output_energy, value_loss
from residualquant.rotation.recoding import recode
from residualquant.rotation.states import LAST_QUERIES, States, collect_states

if TYPE_CHECKING:
    from residualquant.models import Ouro


@torch.no_grad()
def attention_errors(
    model: Ouro,
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
        states = collect_states(model, texts, [layer], queries)[layer]
        for group in range(shape.loops // cfg.loops):
            parts = [s.group(group, cfg.loops) for s in states]
            key, value = (_basis(known.get(group, layer, kind), parts[0]) for kind in "kv")
            errors[group, layer, "k"] = sum(_key_error(s, gram, recode(s.k, cfg, *key)) for s in parts) / len(parts)
            errors[group, layer, "v"] = sum(_value_error(s, gram, recode(s.v, cfg, *value)) for s in parts) / len(parts)
    return errors


def _basis(rotation: Rotation | None, states: States) -> tuple[Tensor, Tensor | None]:
    """The matrix of every head, and the fixed means in the original basis."""
    heads, dim = states.k.shape[1], states.k.shape[3]
    if rotation is None:
        return torch.eye(dim, device=states.k.device).expand(heads, -1, -1), None
    centres = None if rotation.means is None else rotation.unrotate(rotation.means)
    matrix = rotation.matrix.float()
    return matrix.expand(heads, -1, -1), centres if centres is None or centres.dim() == 3 else centres[:, None]


def _key_error(states: States, gram: Tensor, k: Tensor) -> Tensor:
    moved = states.log_weights(k).exp() - states.log_weights(states.k.float()).exp()
    return output_energy(moved @ states.v.float().unsqueeze(2), gram).mean((0, 2, 3))


def _value_error(states: States, gram: Tensor, v: Tensor) -> Tensor:
    return value_loss(states, gram, v, states.log_weights(states.k.float()).exp())
