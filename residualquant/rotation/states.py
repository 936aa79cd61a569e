"""What calibration attends with: the states of many heads on a few texts, side by side in one padded tensor.

Heads share nothing, so heads of all layers and loop groups stand on one axis, and one tensor program serves them all.

Axis letters: L loops of a group · H KV heads, of all layers and loop groups together · G query heads per KV head ·
X texts · n queries · T tokens · D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from residualquant.trace import Captured

LAST_QUERIES = 64  # of each text, which OptR-H's losses look at (App. G)
HIDDEN = -1e4  # added to the score of a later token: exp(HIDDEN) is 0, and 0 * HIDDEN too

# Keys or scores of one tensor program: a few texts on a processor, whose caches hold little; many on a GPU.
BATCH_VALUES = {"cpu": 2**18, "cuda": 2**26}

Unit = tuple[int, int]  # (loop group, layer)


@dataclass(frozen=True, eq=False)
class States:
    """What some heads attend with on some texts. Padding is at the front of queries and at the end of tokens.

    Attributes:
        q: [L, H, X, G, n, D] bf16, post-RoPE queries of each text's last n tokens.
        k: [L, H, X, T, D] bf16, post-RoPE keys.
        v: [L, H, X, T, D] bf16.
        lengths: tokens of each text.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]

    def last(self, queries: int) -> States:
        """The same states with no more than the last ``queries`` queries."""
        return States(self.q[..., -queries:, :], self.k, self.v, self.lengths)

    @cached_property
    def _place(self) -> Tensor:
        """Position of each query in its text, negative for padding: [X, n] int64."""
        n = self.q.shape[-2]
        first = torch.tensor(self.lengths).unsqueeze(1) - n
        return (first + torch.arange(n)).to(self.q.device)

    @cached_property
    def query_weight(self) -> Tensor:
        """What each query counts for in its text's mean, 0 for padding: [X, 1, n] fp32."""
        there = (self._place >= 0).float()
        return (there / there.sum(-1, keepdim=True)).unsqueeze(1)

    @cached_property
    def _later(self) -> Tensor:
        """Tokens that a query does not see: [X, 1, n, T] bool."""
        tokens = torch.arange(self.k.shape[-2], device=self.k.device)
        return (tokens > self._place.unsqueeze(-1)).unsqueeze(1)

    def log_weights(self, k: Tensor) -> Tensor:
        """Logarithm of the causal softmax of the queries over keys ``k`` [L, H, X, T, D]: [L, H, X, G, n, T]."""
        groups, queries = self.q.shape[3:5]
        q = self.q.to(k.dtype) * self.q.shape[-1] ** -0.5
        scores = (q.flatten(3, 4) @ k.mT).unflatten(3, (groups, queries))
        return scores.masked_fill_(self._later, HIDDEN).log_softmax(-1)

    @cached_property
    def own_log_weights(self) -> Tensor:
        """:meth:`log_weights` of the keys themselves, in FP32."""
        return self.log_weights(self.k.float())

    @cached_property
    def own_weights(self) -> Tensor:
        """Attention weights of the keys themselves: [L, H, X, G, n, T] fp32."""
        return self.own_log_weights.exp()

    def mean_of(self, values: Tensor) -> Tensor:
        """Mean over loops, query heads and queries of [L, H, X, G, n], for each head and text: [H, X]."""
        weighted = (values * self.query_weight).sum((0, 3, 4))
        return weighted / (values.shape[0] * values.shape[3])


def attend(weights: Tensor, v: Tensor) -> Tensor:
    """Attention output [L, H, X, G, n, D] of weights [L, H, X, G, n, T] and values [L, H, X, T, D]."""
    return (weights.flatten(3, 4) @ v).unflatten(3, weights.shape[3:5])


def states_of(text: Captured, units: Sequence[Unit], layers: Sequence[int], loops: int) -> States:
    """The states of all heads of some units on one text (X = 1).

    Args:
        text: states of ``layers`` on the text, all loops.
        units: (loop group, layer) pairs; their heads follow each other.
        layers: which layers ``text`` holds, in order.
        loops: of a loop group.
    """

    def gather(x: Tensor) -> Tensor:
        parts = [x[group * loops : (group + 1) * loops, layers.index(layer)] for group, layer in units]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    k, v = gather(text.k).unsqueeze(2), gather(text.v).unsqueeze(2)
    q = gather(text.q).unflatten(1, (k.shape[1], -1)).unsqueeze(2)
    return States(q, k, v, (k.shape[3],))


def batch(texts: Sequence[States]) -> States:
    """Several texts in one, padded with zeros to the longest."""
    if len(texts) == 1:
        return texts[0]
    queries, tokens = max(t.q.shape[-2] for t in texts), max(t.k.shape[-2] for t in texts)
    q = torch.cat([F.pad(t.q, (0, 0, queries - t.q.shape[-2], 0)) for t in texts], 2)
    k, v = (
        torch.cat([F.pad(x, (0, 0, 0, tokens - x.shape[-2])) for x in part], 2)
        for part in ([t.k for t in texts], [t.v for t in texts])
    )
    return States(q, k, v, tuple(length for t in texts for length in t.lengths))


def batches(texts: Sequence[States], most_values: int) -> list[States]:
    """All texts, from short to long, in batches of at most about ``most_values`` keys or scores, at least one text."""
    made: list[list[States]] = []
    for text in sorted(texts, key=lambda t: t.k.shape[-2]):
        each = max(text.k.numel(), text.q.numel() // text.q.shape[-1] * text.k.shape[-2])
        if not made or (len(made[-1]) + 1) * each > most_values:
            made.append([])
        made[-1].append(text)
    return list(map(batch, made))


def tokens_of(keys: Sequence[Tensor], most_values: int) -> list[Tensor]:
    """Tokens of all texts' [L, H, 1, T, D], one after the other, in pieces [L, H, T', D] of about ``most_values``."""
    made: list[list[Tensor]] = []
    for x in (x.squeeze(2) for x in keys):
        if not made or sum(part.numel() for part in made[-1]) + x.numel() > most_values:
            made.append([])
        made[-1].append(x)
    return [parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in made]
