"""Queries, keys and values of a looped model on given texts: seen one by one, kept in memory, or written to a file.

Everything that looks at post-RoPE states goes through :func:`visit`: calibration, the key distributions of the figures,
and ``residualquant trace``. Axis letters: L loops · N layers · Hq query heads · H KV heads · n queries · T tokens ·
D head dim. Layers that run once (``EDGE``) are seen only where they are asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residualquant.attention import to_bf16
from residualquant.errors import ResidualQuantError
from residualquant.models.base import EDGE, KVShape, LoopedModel, causal_attention
from residualquant.repro.paths import show
from residualquant.repro.provenance import provenance

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


def write_trace(
    model: LoopedModel,
    texts: Sequence[Sequence[int]],
    out: str | Path,
    keep: Selection = Selection(),
    source: str = "",
    done: Callable[[], Any] = lambda: None,
) -> Path:
    """Write the states of every text to one safetensors file, in the memory of one layer of one loop.

    Text ``i`` (from 0) gives ``i.ids`` [T] int64, ``i.q`` [L, N, Hq, n, D], ``i.k`` and ``i.v`` [L, N, H, T, D] bf16 of
    the loops and layers kept, and with edge layers ``i.edge_q``, ``i.edge_k``, ``i.edge_v`` with L = 1 and N of them.
    The file has its full size from the start and is filled text by text; it gets its name when it is whole. Its
    metadata ``about`` is JSON: model, weights, what was kept (from 0), ``source``, and what made it.

    Args:
        source: what the texts are.
        done: called after every text.

    Raises:
        ValueError: no text, an empty one, or a selection that does not fit the model.
        ResidualQuantError: the disk is full or the folder cannot be written; no partial file is left.
    """
    keep, out = keep.resolve(model), Path(out)
    if not texts or not all(texts):
        raise ValueError(f"texts must have at least one token each, got lengths {[len(ids) for ids in texts]}")
    shapes: dict[str, tuple[int, ...]] = {f"{i}.ids": (len(ids),) for i, ids in enumerate(texts)}
    for i, ids in enumerate(texts):
        shapes |= {f"{i}.{name}": shape for name, shape in keep.shapes(model, len(ids)).items()}
    header, places, size = _header(shapes, _about(model, keep, source))
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(header)
            os.posix_fallocate(file.fileno(), 0, len(header) + size)
        for i, ids in enumerate(texts):
            names = [name for name in shapes if name.startswith(f"{i}.")]
            mapped = (_mapped(partial, len(header) + places[name], shapes[name]) for name in names)
            into = dict(zip((name.partition(".")[2] for name in names), mapped))
            into.pop("ids").copy_(torch.tensor(ids))
            capture(model, ids, keep, into)
            done()
        partial.replace(out)
    except OSError as error:
        raise ResidualQuantError(f"{show(out)} could not be written ({error.strerror}); nothing was changed") from error
    finally:
        if partial.exists():
            partial.unlink()
    return out


def _about(model: LoopedModel, keep: Selection, source: str) -> dict:
    return {
        "format": FORMAT,
        "model": model.name,
        "weights": model.weights_hash,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "kv_shape": asdict(model.kv_shape),
        "states": "post-RoPE q, k and v",
        "kept": asdict(keep),
        "source": source,
        "provenance": provenance(str(model.device)),
    }


def _header(shapes: Mapping[str, tuple[int, ...]], about: dict) -> tuple[bytes, dict[str, int], int]:
    """Header of a safetensors file, where each tensor's bytes start after it, and how many follow in all."""
    entries: dict[str, Any] = {"__metadata__": {"about": json.dumps(about, sort_keys=True)}}
    places, size = {}, 0
    for name, shape in shapes.items():  # the int64 tensors come first, so that each lies at a multiple of its size
        kind, width = ("I64", 8) if name.endswith(".ids") else ("BF16", 2)
        places[name], size = size, size + width * math.prod(shape)
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [places[name], size]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places, size


def _mapped(path: Path, start: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose memory is the file's: int64 for the ids [T], else bf16."""
    is_ids = len(shape) == 1
    array = np.memmap(path, dtype=np.int64 if is_ids else np.int16, mode="r+", offset=start, shape=shape)
    return torch.from_numpy(array) if is_ids else torch.from_numpy(array).view(torch.bfloat16)
