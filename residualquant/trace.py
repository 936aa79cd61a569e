"""Queries, keys and values of a looped model on given texts: seen one by one, kept in memory, or written to a file.

Everything that looks at post-RoPE states goes through :func:`visit`: calibration, the key distributions of the figures,
and ``residualquant trace``. Axis letters: L loops · N layers · Hq query heads · H KV heads · n queries · T tokens ·
D head dim. Layers that run once (``EDGE``) are seen only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from residualquant.attention import to_bf16
from residualquant.models.base import EDGE, KVShape, LoopedModel, causal_attention

if TYPE_CHECKING:
    pass

Visit = Callable[[int, int, Tensor, Tensor, Tensor], None]
FORMAT = 1


@torch.inference_mode()
def visit(model: LoopedModel, ids: Sequence[int], see: Visit, edge: bool = False) -> None:
    """Run ``ids`` through ``model`` once, calling ``see(loop, layer, q, k, v)`` for each loop and layer (from 0).

    q: [T, Hq, D]; k, v: [T, H, D], post-RoPE, rounded to BF16 (as the cache holds them) and given in the model's
    compute dtype; attention uses the same rounded values. They may be views of buffers: copy what is to be kept.
    So nothing is kept that ``see`` does not keep: a long prompt needs the memory of one layer of one loop.

    Args:
        edge: also see the layers that run once, as loop ``EDGE``.

    Raises:
        ValueError: an empty text.
    """
    if not ids:
        raise ValueError("the prompt is empty: got 0 tokens")

    def attend(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (to_bf16(x).to(q.dtype) for x in (k, v))
        if edge or loop != EDGE:
            see(loop, layer, q[0], k[0], v[0])
        return causal_attention(loop, layer, q, k, v)

    model(torch.tensor([list(ids)], device=model.device), attend=attend, last_only=True)


@dataclass(frozen=True, eq=False)
class Captured:
    """The states of some loops and layers on one text.

    Attributes:
        q: [L, N, Hq, n, D] bf16, post-RoPE queries of the last n of the T tokens.
        k: [L, N, H, T, D] bf16, post-RoPE keys.
        v: [L, N, H, T, D] bf16.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v))


@dataclass(frozen=True)
class Selection:
    """Which states to keep. None stands for all of them.

    Attributes:
        loops, layers: from 0.
        queries: how many of a text's last queries.
        edge: the layers that run once, too.
    """

    loops: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    queries: int | None = None
    edge: bool = False

    def resolve(self, model: LoopedModel) -> Selection:
        """The same with every loop and layer named.

        Raises:
            ValueError: a loop or layer that the model does not have, or edge layers where it has none.
        """
        shape = model.kv_shape
        found = {}
        for name, count in (("loops", shape.loops), ("layers", shape.layers)):
            chosen = getattr(self, name)
            chosen = tuple(range(count)) if chosen is None else tuple(chosen)
            if not chosen or any(not 0 <= i < count for i in chosen) or len(set(chosen)) < len(chosen):
                raise ValueError(f"{name} must be different numbers from 0 to {count - 1}, got {list(chosen)}")
            found[name] = chosen
        if self.edge and not model.edge_layers:
            raise ValueError(f"{model.name} has no layers that run once, got edge=True")
        return Selection(**found, queries=self.queries, edge=self.edge)

    def shapes(self, model: LoopedModel, tokens: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a text's tensors by name: "q", "k", "v", and "edge_q" … where edge layers are kept."""
        shape = model.kv_shape
        queries = tokens if self.queries is None else min(self.queries, tokens)
        made = {}
        for prefix, layers in (("", (len(self.loops), len(self.layers))), ("edge_", (1, model.edge_layers))):
            if not prefix or self.edge:
                made[f"{prefix}q"] = (*layers, model.config.num_attention_heads, queries, shape.head_dim)
                made[f"{prefix}k"] = made[f"{prefix}v"] = (*layers, shape.kv_heads, tokens, shape.head_dim)
        return made


def capture(model: LoopedModel, ids: Sequence[int], keep: Selection, into: dict[str, Tensor]) -> None:
    """Write the states of one text into tensors of ``keep.shapes``, by one forward pass; ``keep`` is resolved."""
    loop_of = {loop: i for i, loop in enumerate(keep.loops)}
    layer_of = {layer: i for i, layer in enumerate(keep.layers)}

    def see(loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if loop == EDGE:
            prefix, at = "edge_", (0, layer)
        elif loop in loop_of and layer in layer_of:
            prefix, at = "", (loop_of[loop], layer_of[layer])
        else:
            return
        for name, x in zip("qkv", (q if keep.queries is None else q[-keep.queries :], k, v)):
            into[prefix + name][at] = x.transpose(0, 1)

    visit(model, ids, see, keep.edge)


def collect(
    model: LoopedModel,
    texts: Sequence[Sequence[int]],
    layers: Sequence[int] | None = None,
    queries: int | None = None,
    done: Callable[[], Any] = lambda: None,
) -> list[Captured]:
    """The states of ``layers`` on every text, all loops, on the model's device: one forward pass per text.

    Args:
        layers: from 0; all when None.
        queries: how many of each text's last queries to keep; all when None.
        done: called after every text.
    """
    keep = Selection(layers=None if layers is None else tuple(layers), queries=queries).resolve(model)
    kept = []
    for ids in texts:
        shapes = keep.shapes(model, len(ids))
        into = {name: torch.empty(s, dtype=torch.bfloat16, device=model.device) for name, s in shapes.items()}
        capture(model, ids, keep, into)
        kept.append(Captured(**into))
        done()
    return kept


def captured_bytes(shape: KVShape, q_heads: int, texts: Sequence[Sequence[int]], queries: int | None = None) -> int:
    """Bytes that :func:`collect` keeps per layer of a model of ``shape`` and ``q_heads`` query heads."""
    tokens = [len(ids) for ids in texts]
    rows = 2 * shape.kv_heads * sum(tokens) + q_heads * sum(t if queries is None else min(queries, t) for t in tokens)
    return 2 * shape.loops * shape.head_dim * rows
