"""OptR-H: a Hadamard rotation, turned until attention errs least (Sec. 2.2, 3.3, App. G).

Per KV head ``T = H exp(A - A^T)`` from ``A = 0``, by Adam on a few texts a step. With the head's slice W_O of the
output projection and ``E(Delta) = |Delta W_O|^2 / (Nq d_model)``, over the last queries of each text::

    L_K = mean_q KL(S | Shat) + E((Shat - S) V)        L_V = E(Shat (Vhat - V)), Shat from the final K

averaged over the loops of the group (and over the query heads that share a KV head). K is fitted first, then V. K is
coded with fixed means, those of the fit texts under the rotation in question; V without. Every 20 steps the rotation
as it would be stored is tried on held-out texts, and each head keeps its best one, the start included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residualquant.config import KVQuantConfig
from residualquant.errors import check_count, check_type
from residualquant.rotation.hadamard import hadamard_matrix
from residualquant.rotation.recoding import fixed_means, recode
from residualquant.rotation.states import BATCH_VALUES, LAST_QUERIES, States, attend, batch, batches, tokens_of


@dataclass(frozen=True)
class OptRHSettings:
    """How OptR-H is fitted; the defaults are the paper's (App. G), and how often held-out texts are asked is ours."""

    steps: int = 80
    """Adam steps for K, and as many for V."""
    learning_rate: float = 0.02
    batch: int = 2
    """Fit texts per step."""
    queries: int = LAST_QUERIES
    """Last queries of each text that count."""
    check_every: int = 20
    """Steps between two looks at the held-out texts."""
    seed: int = 0
    """Of the order in which texts are drawn."""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("queries", 1), ("check_every", 1), ("steps", 0)):
            check_count(name, getattr(self, name), least)
        check_type("learning_rate", self.learning_rate, float)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate!r}")
        check_seed(self.seed)


def check_seed(seed: int) -> None:
    """Raises ValueError unless torch's generators take ``seed``."""
    check_count("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2^63, got {seed}")


PAPER_SETTINGS = OptRHSettings()


@dataclass(frozen=True, eq=False)
class Fit:
    """The rotations of K or V of some heads, and what they gained on the held-out texts.

    Attributes:
        matrix: [H, D, D] fp16, as stored.
        means: [L, H, D] fp32 in the rotated space, or None.
        before: [H] fp32, held-out loss at the start: Hadamard.
        after: [H] fp32, held-out loss of ``matrix``.
        step: [H] int64, the step at which each head's rotation was taken.
    """

    matrix: Tensor
    means: Tensor | None
    before: Tensor
    after: Tensor
    step: Tensor

    def heads(self, part: slice) -> Fit:
        """The fit of some of the heads."""
        means = None if self.means is None else self.means[:, part]
        return Fit(self.matrix[part], means, self.before[part], self.after[part], self.step[part])


def storable(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, rounded to FP16: what is stored and applied.

    Args:
        matrix: [..., D, D], orthogonal up to rounding; Newton's iteration for its polar factor, in FP64, then
            squares what is missing every time.
    """
    nearest = matrix.double()
    for _ in range(4):
        nearest = 1.5 * nearest - 0.5 * nearest @ (nearest.mT @ nearest)
    return nearest.half()


def hadamard_start(heads: int, head_dim: int, device: torch.device | str) -> Tensor:
    """The normalised Hadamard matrix for every head: [H, D, D] fp32."""
    return hadamard_matrix(head_dim).to(device).expand(heads, -1, -1)


def gram_of(weight: Tensor, heads: int, head_dim: int) -> Tensor:
    """``W_O W_O^T / d_model`` of every query head: [H, G, D, D] fp32.

    Args:
        weight: [d_model, Hq D], the output projection; query heads of one KV head are consecutive.
        heads: KV heads (H).
        head_dim: D.
    """
    slices = weight.float().T.unflatten(0, (heads, -1, head_dim))
    return slices @ slices.mT / weight.shape[0]


def output_energy(delta: Tensor, gram: Tensor) -> Tensor:
    """``|Delta W_O|^2 / d_model`` (App. G) of head outputs ``delta`` [L, H, X, G, n, D]: [L, H, X, G, n]."""
    return (torch.einsum("lhxgnd,hgde->lhxgne", delta, gram) * delta).sum(-1)


def key_loss(states: States, gram: Tensor, k: Tensor) -> Tensor:
    """L_K of every KV head and text, [H, X], where attention reads ``k`` [L, H, X, T, D] instead of the keys."""
    log_true, true, log_read = states.own_log_weights, states.own_weights, states.log_weights(k)
    divergence = (true * (log_true - log_read)).sum(-1)
    moved = attend(log_read.exp() - true, states.v.float())
    return states.mean_of(divergence + output_energy(moved, gram))


def value_loss(states: States, gram: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """L_V of every KV head and text, [H, X], where attention of ``weights`` [L, H, X, G, n, T] reads ``v``."""
    return states.mean_of(output_energy(attend(weights, v - states.v.float()), gram))


Loss = Callable[[Any, Tensor, Tensor | None], Tensor]  # (texts, matrix, centres) -> [H, X]


def centres_of(fit: Fit) -> Tensor | None:
    """The means of a fit in the original basis, [L, H, D] fp32, or None."""
    return None if fit.means is None else (fit.means.unsqueeze(2) @ fit.matrix.float().mT).squeeze(2)


def judge(
    matrix: Tensor, centres: Tensor | None, loss: Loss, held_out: Sequence, start: Tensor | None, step: int
) -> Fit:
    """``matrix`` [H, D, D] fp16 as a fit: its mean loss on ``held_out``, and ``start`` [H] to compare with."""
    with torch.no_grad():
        losses = torch.cat([loss(texts, matrix.float(), centres) for texts in held_out], 1).mean(1)
    means = None if centres is None else (centres.unsqueeze(2) @ matrix.float()).squeeze(2)
    return Fit(matrix, means, losses if start is None else start, losses, torch.full_like(losses, step).long())


def _better(best: Fit, new: Fit) -> Fit:
    """Each head from whichever of two fits has the lower held-out loss; ``best`` where they are equal."""
    won = new.after < best.after
    means = None if best.means is None else torch.where(won[None, :, None], new.means, best.means)
    return Fit(
        torch.where(won[:, None, None], new.matrix, best.matrix),
        means,
        best.before,
        torch.where(won, new.after, best.after),
        torch.where(won, new.step, best.step),
    )


def optimise(
    start: Tensor,
    loss: Loss,
    draw: Callable[[list[int]], Any],
    count: int,
    held_out: Sequence,
    centres_for: Callable[[Tensor], Tensor | None],
    settings: OptRHSettings,
    done: Callable[[], Any] = lambda: None,
) -> Fit:
    """The best rotation met on the way from ``start`` [H, D, D], head by head.

    Args:
        loss: loss of each head and text under a matrix and centres; heads do not share anything.
        draw: the texts to fit with of these indices, as ``loss`` takes them.
        count: how many there are.
        held_out: texts to choose with, as ``loss`` takes them.
        centres_for: the fixed means under a matrix; between two checks they are held constant.
        settings: how to optimise.
        done: called after every step.
    """
    angles = torch.zeros_like(start).requires_grad_()
    optimiser = torch.optim.Adam([angles], lr=settings.learning_rate)
    generator = torch.Generator().manual_seed(settings.seed)
    best = None
    for step in range(settings.steps + 1):
        if step % settings.check_every == 0 or step == settings.steps:
            matrix = storable(start @ torch.linalg.matrix_exp(angles.detach() - angles.detach().mT))
            centres = centres_for(matrix.float())
            new = judge(matrix, centres, loss, held_out, best and best.before, step)
            best = new if best is None else _better(best, new)
        if step == settings.steps:
            break
        matrix = start @ torch.linalg.matrix_exp(angles - angles.mT)
        drawn = torch.randperm(count, generator=generator)[: settings.batch].tolist()
        optimiser.zero_grad()
        loss(draw(drawn), matrix, centres).mean(1).sum().backward()
        optimiser.step()
        done()
    return best


def recode_texts(x: Tensor, cfg: KVQuantConfig, matrix: Tensor, centres: Tensor | None) -> Tensor:
    """:func:`recode` of K or V of several texts, [L, H, X, T, D]."""
    return recode(x.flatten(2, 3), cfg, matrix, centres).view(x.shape)


def losses_of(gram: Tensor, cfg: KVQuantConfig) -> tuple[Loss, Callable[[States, Fit], Tensor], Loss]:
    """L_K of States; attention weights over the keys as K's fit codes them; L_V of (States, such weights)."""

    def of_key(states: States, matrix: Tensor, centres: Tensor | None) -> Tensor:
        return key_loss(states, gram, recode_texts(states.k, cfg, matrix, centres))

    @torch.no_grad()
    def read_weights(states: States, key: Fit) -> Tensor:
        return states.log_weights(recode_texts(states.k, cfg, key.matrix.float(), centres_of(key))).exp()

    def of_value(texts: tuple[States, Tensor], matrix: Tensor, centres: Tensor | None) -> Tensor:
        states, weights = texts
        return value_loss(states, gram, recode_texts(states.v, cfg, matrix, centres), weights)

    return of_key, read_weights, of_value


def fit_optr_h(
    fit_texts: Sequence[States],
    held_out: Sequence[States],
    gram: Tensor,
    cfg: KVQuantConfig,
    settings: OptRHSettings = PAPER_SETTINGS,
    done: Callable[[], Any] = lambda: None,
) -> tuple[Fit, Fit]:
    """The rotations of K (with means) and V of any heads, which do not share anything.

    Args:
        fit_texts, held_out: the heads' states on the texts to fit and to choose with, one text each.
        gram: [H, G, D, D], from :func:`gram_of`.
        cfg: how K and V are coded: direct or residual, any reference.
        settings: how to optimise.
        done: called after every step, ``2 * settings.steps`` times.

    Raises:
        ValueError: no text to fit or to choose with, or a head size without a Hadamard matrix.
    """
    if not fit_texts or not held_out:
        raise ValueError(f"OptR-H needs texts to fit and to choose with, got {len(fit_texts)} and {len(held_out)}")
    heads, dim = gram.shape[0], gram.shape[-1]
    most = BATCH_VALUES[gram.device.type]
    fit_texts = [states.last(settings.queries) for states in fit_texts]
    held_out = batches([states.last(settings.queries) for states in held_out], most)
    keys = tokens_of([states.k for states in fit_texts], most)
    start = hadamard_start(heads, dim, gram.device)
    of_key, read_weights, of_value = losses_of(gram, cfg)

    def drawn(indices: list[int]) -> States:
        return batch([fit_texts[i] for i in indices])

    def with_weights(states: States) -> tuple[States, Tensor]:
        return states, read_weights(states, key)

    count = len(fit_texts)
    key = optimise(start, of_key, drawn, count, held_out, lambda t: fixed_means(keys, cfg, t), settings, done)
    value = optimise(
        start,
        of_value,
        lambda indices: with_weights(drawn(indices)),
        count,
        [with_weights(states) for states in held_out],
        lambda t: None,
        settings,
        done,
    )
    return key, value
