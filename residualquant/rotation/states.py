"""Queries, keys and values of a looped model on calibration texts, a few layers at a time.

Axis letters: L loops · Hq query heads · H KV heads · G query heads per KV head · n queries · T tokens · D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.attention import to_bf16
from residualquant.models.base import causal_attention

if TYPE_CHECKING:
    from residualquant.models import Ouro

LAST_QUERIES = 64  # of each text, which OptR-H's losses look at (App. G)
HIDDEN = -1e4  # added to the score of a later token: exp(HIDDEN) is 0, and 0 * HIDDEN too


@dataclass(frozen=True, eq=False)
class States:
    """What one layer attends with on one text.

    Attributes:
        q: [L, Hq, n, D] bf16, post-RoPE queries of the last n of the T tokens.
        k: [L, H, T, D] bf16, post-RoPE keys.
        v: [L, H, T, D] bf16.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    def group(self, index: int, loops: int) -> States:
        """The states of one loop group, ``loops`` loops from ``index * loops`` on."""
        part = slice(index * loops, (index + 1) * loops)
        return States(self.q[part], self.k[part], self.v[part])

    def last(self, queries: int) -> States:
        """The same states with no more than the last ``queries`` queries."""
        return States(self.q[:, :, -queries:], self.k, self.v)

    def log_weights(self, k: Tensor) -> Tensor:
        """Logarithm of the causal softmax of the queries over keys ``k`` [L, H, T, D]: [L, H, G, n, T]."""
        heads, tokens, dim = k.shape[1:]
        queries = self.q.shape[2]
        grouped = self.q.to(k.dtype).unflatten(1, (heads, -1))
        scores = (grouped.flatten(2, 3) @ k.mT * dim**-0.5).unflatten(2, (-1, queries))
        later = torch.ones(queries, tokens, dtype=torch.bool, device=k.device).triu(tokens - queries + 1)
        return scores.masked_fill(later, HIDDEN).log_softmax(-1)


@torch.inference_mode()
def visit_states(model: Ouro, ids: Sequence[int], visit: Callable[[int, int, Tensor, Tensor, Tensor], None]) -> None:
    """Run ``ids`` through ``model`` once, calling ``visit(loop, layer, q, k, v)`` for each loop and layer (from 0).

    q: [T, Hq, D]; k, v: [T, H, D], post-RoPE, rounded to BF16 (as the cache holds them) and given in the model's
    compute dtype; attention uses the same rounded values. They may be views of buffers: copy what is to be kept.

    Raises:
        ValueError: an empty text.
    """
    if not ids:
        raise ValueError("the prompt is empty: got 0 tokens")

    def attend(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (to_bf16(x).to(q.dtype) for x in (k, v))
        visit(loop, layer, q[0], k[0], v[0])
        return causal_attention(loop, layer, q, k, v)

    model(torch.tensor([list(ids)], device=model.device), attend=attend, last_only=True)


def collect_states(
    model: Ouro,
    texts: Sequence[Sequence[int]],
    layers: Collection[int],
    queries: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[int, list[States]]:
    """The states of ``layers`` on every text, on the model's device: one forward pass per text.

    Args:
        model: a looped model.
        texts: token ids.
        layers: layers to keep, from 0.
        queries: how many of each text's last queries to keep; all when None.
        done: called after every text.
    """
    loops = model.kv_shape.loops
    kept: dict[int, list[States]] = {layer: [] for layer in layers}
    for ids in texts:
        parts: dict[int, list[list[Tensor]]] = {layer: [[None] * loops for _ in "qkv"] for layer in layers}

        def keep(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor, parts=parts) -> None:
            if layer in parts:
                q = q if queries is None else q[-queries:]
                for part, x in zip(parts[layer], (q, k, v)):
                    part[loop] = x.to(torch.bfloat16).transpose(0, 1).contiguous()

        visit_states(model, ids, keep)
        for layer, part in parts.items():
            kept[layer].append(States(*map(torch.stack, part)))
        done()
    return kept


def layer_bytes(model: Ouro, texts: Sequence[Sequence[int]], queries: int | None = None) -> int:
    """Bytes that :func:`collect_states` keeps per layer."""
    shape = model.kv_shape
    heads = model.config.num_attention_heads
    rows = sum(
        2 * shape.kv_heads * len(ids) + heads * (len(ids) if queries is None else min(queries, len(ids)))
        for ids in texts
    )
    return 2 * shape.loops * shape.head_dim * rows
