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

import torch
from torch import Tensor

from residualquant.config import KVQuantConfig
from residualquant.rotation.hadamard import hadamard_matrix
from residualquant.rotation.recoding import fixed_means, recode
from residualquant.rotation.states import LAST_QUERIES, States


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
        for name in ("batch", "queries", "check_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.steps < 0 or not self.learning_rate > 0:
            raise ValueError(
                f"steps must not be negative and learning_rate above 0, got {self.steps!r} and {self.learning_rate!r}"
            )


PAPER_SETTINGS = OptRHSettings()


@dataclass(frozen=True, eq=False)
class Fit:
    """The rotation of K or V of one layer and loop group, and what it gained on the held-out texts.

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


def storable(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix (polar factor, in FP64), rounded to FP16: what is stored and applied."""
    left, _, right = torch.linalg.svd(matrix.double())
    return (left @ right).half()


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
    """``|Delta W_O|^2 / d_model`` (App. G) of head outputs ``delta`` [..., H, G, n, D]: [..., H, G, n]."""
    return ((delta @ gram) * delta).sum(-1)


def key_loss(states: States, gram: Tensor, k: Tensor) -> Tensor:
    """L_K of every KV head, [H], where attention reads ``k`` [L, H, T, D] instead of the keys."""
    values = states.v.float().unsqueeze(2)
    log_true, log_read = states.log_weights(states.k.float()), states.log_weights(k)
    true, read = log_true.exp(), log_read.exp()
    divergence = (true * (log_true - log_read)).sum(-1)
    return (divergence + output_energy((read - true) @ values, gram)).mean((0, 2, 3))


def value_loss(states: States, gram: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """L_V of every KV head, [H], where attention of ``weights`` [L, H, G, n, T] reads ``v`` [L, H, T, D]."""
    return output_energy(weights @ (v - states.v.float()).unsqueeze(2), gram).mean((0, 2, 3))


Loss = Callable[[int, Tensor, Tensor | None], Tensor]  # (text, matrix, centres) -> [H]


def centres_of(fit: Fit) -> Tensor | None:
    """The means of a fit in the original basis, [L, H, D] fp32, or None."""
    return None if fit.means is None else (fit.means.unsqueeze(2) @ fit.matrix.float().mT).squeeze(2)


def judge(matrix: Tensor, centres: Tensor | None, loss: Loss, texts: Sequence[int], start: Tensor, step: int) -> Fit:
    """``matrix`` [H, D, D] fp16 as a fit: its mean loss on ``texts``, and ``start`` [H] to compare with, if given."""
    with torch.no_grad():
        losses = sum(loss(text, matrix.float(), centres) for text in texts) / len(texts)
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
    fit_texts: Sequence[int],
    held_out: Sequence[int],
    centres_for: Callable[[Tensor], Tensor | None],
    settings: OptRHSettings,
    done: Callable[[], None] = lambda: None,
) -> Fit:
    """The best rotation met on the way from ``start`` [H, D, D], head by head.

    Args:
        loss: per-head loss of one text under a matrix and centres; heads do not share anything.
        fit_texts, held_out: indices of texts.
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
        drawn = torch.randperm(len(fit_texts), generator=generator)[: settings.batch].tolist()
        optimiser.zero_grad()
        (sum(loss(fit_texts[text], matrix, centres).sum() for text in drawn) / len(drawn)).backward()
        optimiser.step()
        done()
    return best


def read_weights(states: Sequence[States], cfg: KVQuantConfig, fit: Fit) -> list[Tensor]:
    """Attention weights [L, H, G, n, T] of every text over its keys as ``fit`` codes them."""
    with torch.no_grad():
        return [s.log_weights(recode(s.k, cfg, fit.matrix.float(), centres_of(fit))).exp() for s in states]


def losses_of(states: Sequence[States], gram: Tensor, cfg: KVQuantConfig) -> tuple[Loss, Callable[[Fit], Loss]]:
    """L_K of each of ``states`` under a rotation, and the same for L_V once K's fit is known."""

    def of_key(text: int, matrix: Tensor, centres: Tensor | None) -> Tensor:
        return key_loss(states[text], gram, recode(states[text].k, cfg, matrix, centres))

    def of_value_after(key: Fit) -> Loss:
        weights = read_weights(states, cfg, key)

        def of_value(text: int, matrix: Tensor, centres: Tensor | None) -> Tensor:
            return value_loss(states[text], gram, recode(states[text].v, cfg, matrix, centres), weights[text])

        return of_value

    return of_key, of_value_after


def fit_optr_h(
    fit_states: Sequence[States],
    held_out: Sequence[States],
    gram: Tensor,
    cfg: KVQuantConfig,
    settings: OptRHSettings = PAPER_SETTINGS,
    done: Callable[[], None] = lambda: None,
) -> tuple[Fit, Fit]:
    """The rotations of K (with means) and V of one layer and loop group.

    Args:
        fit_states, held_out: the loop group's states on the texts to fit and to choose with.
        gram: [H, G, D, D], from :func:`gram_of`.
        cfg: how K and V are coded: direct or residual, any reference.
        settings: how to optimise.
        done: called after every step, ``2 * settings.steps`` times.

    Raises:
        ValueError: no text to fit or to choose with, or a head size without a Hadamard matrix.
    """
    if not fit_states or not held_out:
        raise ValueError(f"OptR-H needs texts to fit and to choose with, got {len(fit_states)} and {len(held_out)}")
    states = [s.last(settings.queries) for s in (*fit_states, *held_out)]
    to_fit, to_choose = range(len(fit_states)), range(len(fit_states), len(states))
    _, heads, _, dim = states[0].k.shape
    start = hadamard_start(heads, dim, gram.device)
    keys = [s.k for s in fit_states]
    of_key, of_value_after = losses_of(states, gram, cfg)
    key = optimise(start, of_key, to_fit, to_choose, lambda t: fixed_means(keys, cfg, t), settings, done)
    value = optimise(start, of_value_after(key), to_fit, to_choose, lambda t: None, settings, done)
    return key, value
