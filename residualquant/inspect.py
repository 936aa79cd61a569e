"""Where a configuration loses accuracy: per layer, loop, head and K or V, measured on traced queries, keys and values.

Three figures, each a share of energy, from cause to effect:

* residual energy ``|Z_r - alpha Zhat_p|^2 / |Z_r|^2``: what the reference leaves to be coded (1 without a reference);
* NMSE ``|Zhat_r - Z_r|^2 / |Z_r|^2``: what coding loses (Sec. 3.2, Table 1);
* attention error ``|O' - O|^2 / |O|^2``: what a decode step then computes wrongly, with K alone or V alone coded and
  the current token in BF16 (Sec. 4).

Rotations are orthogonal, so all three are computed in the original basis. Axis letters: L loops · N layers · Hq query
heads · H KV heads · G query heads per KV head · n queries · T tokens · D head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.attention import count_unusable, make_finite
from residualquant.cache import LayerRotations, RotationMap, loop_groups
from residualquant.config import KVQuantConfig
from residualquant.errors import ResidualQuantError, check_count, check_type
from residualquant.models.base import KVShape, LoopedModel
from residualquant.repro.paths import parse_json, show
from residualquant.residual import decode, encode
from residualquant.rotation import Rotation
from residualquant.trace import FORMAT, Captured, collect

if TYPE_CHECKING:
    import pandas as pd

    from residualquant.repro.plots import Picture

MEASURES = {
    "residual_energy": "residual energy",
    "nmse": "NMSE",
    "attention_error": "attention error",
}
LEAST_ENERGY = 1e-30


def inspect_trace(
    texts: Iterable[Captured],
    config: KVQuantConfig,
    rotations: RotationMap | None = None,
    layers: Sequence[int] | None = None,
    queries: int = 64,
) -> pd.DataFrame:
    """One row per layer, loop, KV head and K or V: what ``config`` does to the states of ``texts``, taken together.

    Args:
        texts: q [L, N, Hq, n, D], k and v [L, N, H, T, D] of each text, all loops; looked at one by one.
        config: how K and V are coded; layers may have bits of their own.
        rotations: ``{(group, layer, "k" or "v"): Rotation}`` where the configuration's rotation is calibrated.
        layers: which layers the texts hold (from 0); 0 … N-1 when None.
        queries: last queries of each text that the attention error is taken over.

    Returns:
        Columns layer, loop, head (all from 1), of ("K" or "V"), bits, reference (the loop that predicts it, 0 for
        none), residual_energy, nmse, attention_error.

    Raises:
        ValueError: no text, texts of different models, loops or rotations that do not fit, or queries below 1.

    Warns:
        RuntimeWarning: values that a cache replaces before coding, such as NaN: how many.
    """
    check_count("queries", queries)
    check_type("config", config, KVQuantConfig)
    sums, replaced = None, 0
    for text in texts:
        loops, count, heads, _, dim = text.k.shape
        if sums is None:
            layers = list(range(count) if layers is None else layers)
            _check_layers(layers)
            shape = KVShape(loops, max(layers) + 1, heads, dim)
            loop_groups(shape, config)
            basis = LayerRotations(config, shape, text.k.device, rotations)
            sums = _Sums.zeros(loops, len(layers), heads)
        if (loops, count, heads, dim) != (shape.loops, len(layers), shape.kv_heads, shape.head_dim):
            raise ValueError(f"texts must hold {len(layers)} layers of {shape}, got k of {list(text.k.shape)}")
        replaced += sum(int(count_unusable(x)) for x in (text.q, text.k, text.v))
        for place, layer in enumerate(layers):
            _add_layer(sums, place, text, config.for_layer(layer), basis, layer, queries)
    if sums is None:
        raise ValueError("at least one text is needed, got none")
    if replaced:
        what = f"{replaced} values of q, k and v were NaN, infinite or beyond +-65504 and were replaced"
        warnings.warn(what, RuntimeWarning, stacklevel=2)
    return _table(sums, config, layers)


@dataclass(frozen=True, eq=False)
class Traced:
    """The states of a model on some texts, of a model at hand or of a file of ``residualquant trace``.

    Attributes:
        model, weights: name of the model and hash of its weights.
        shape: its KV shape.
        layers: the layers that are there, from 0.
        texts: the states of each text, computed or read one by one; can be gone through once.
    """

    model: str
    weights: str
    shape: KVShape
    layers: list[int]
    texts: Iterator[Captured]

    @classmethod
    def live(cls, model: LoopedModel, texts: Sequence[Sequence[int]], queries: int = 64) -> Traced:
        """The states of ``model`` on ``texts`` of token ids, with each one's last ``queries`` queries."""
        shape = model.kv_shape
        states = (collect(model, [ids], queries=queries)[0] for ids in texts)
        return cls(model.name, model.weights_hash, shape, list(range(shape.layers)), states)

    @classmethod
    def open(cls, path: str | Path) -> Traced:
        """The trace in ``path``, its names and shapes checked.

        Raises:
            ResidualQuantError: no such file, a truncated one, one that is no trace, or one without all loops.
        """
        from safetensors import SafetensorError, safe_open

        where = show(Path(path))
        try:
            file = safe_open(path, framework="pt")
            about = parse_json((file.metadata() or {})["about"])
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']!r}, this version reads {FORMAT}")
            shape, loops, layers = KVShape(**about["kv_shape"]), about["kept"]["loops"], list(about["kept"]["layers"])
            _check_layers(layers)
            count = sum(name.endswith(".k") for name in file.keys())  # noqa: SIM118
            if not count:
                raise ValueError("it holds no texts")
            for text in range(count):
                slices = [file.get_slice(f"{text}.{name}") for name in "qkv"]
                if {part.get_dtype() for part in slices} != {"BF16"}:
                    raise ValueError(f"q, k and v must be BF16, got {', '.join(part.get_dtype() for part in slices)}")
                _check_shapes(*(tuple(part.get_shape()) for part in slices), (len(loops), len(layers)), shape)
            if loops != list(range(shape.loops)):
                held = ", ".join(str(loop + 1) for loop in loops)
                raise ResidualQuantError(f"{where} holds loops {held} only, all {shape.loops} are needed")
            return cls(about["model"], about["weights"], shape, layers, _read_texts(file, count))
        except FileNotFoundError as error:
            raise ResidualQuantError(f"there is no trace {where}: `residualquant trace` makes one") from error
        except KeyError as error:
            raise ResidualQuantError(f"{where} is no trace: it lacks {error}") from error
        except (SafetensorError, OSError, TypeError, ValueError, AttributeError) as error:
            raise ResidualQuantError(f"{where} is truncated or no trace: {error}") from error


def _check_layers(layers: list) -> None:
    if not layers or any(type(n) is not int or n < 0 for n in layers) or len(set(layers)) < len(layers):
        raise ValueError(f"layers must be different numbers from 0, got {layers}")


def _check_shapes(q: tuple, k: tuple, v: tuple, kept: tuple[int, int], shape: KVShape) -> None:
    wanted = (*kept, shape.kv_heads, *k[3:4], shape.head_dim)
    queries = (*kept, *q[2:4], shape.head_dim)
    if k != wanted or v != wanted or q != queries or q[2] % shape.kv_heads or not 1 <= q[3] <= k[3]:
        raise ValueError(f"q, k and v of a text have shapes {q}, {k} and {v}")


def _read_texts(file, count: int) -> Iterator[Captured]:
    return (Captured(*(file.get_tensor(f"{text}.{name}") for name in "qkv")) for text in range(count))


@dataclass
class _Sums:
    """Energies summed over tokens (or queries) and texts, each [2, L, N, H] FP64, K before V."""

    states: Tensor
    residual: Tensor
    error: Tensor
    output: Tensor
    output_error: Tensor

    @classmethod
    def zeros(cls, loops: int, layers: int, heads: int) -> _Sums:
        return cls(*torch.zeros(5, 2, loops, layers, heads, dtype=torch.float64))


def _add_layer(
    sums: _Sums, place: int, text: Captured, cfg: KVQuantConfig, basis: LayerRotations, layer: int, queries: int
) -> None:
    """Add one layer (the ``place``-th of the text) to the sums; ``cfg`` is how this layer is coded."""
    states = [make_finite(x[:, place].float()) for x in (text.k, text.v)]
    rebuilt = []
    for index, x in enumerate(states):
        coded, residual = _recode(x, cfg, [basis.get(g, layer, "kv"[index]) for g in range(len(x) // cfg.loops)])
        rebuilt.append(coded)
        for total, values in ((sums.states, x), (sums.residual, residual), (sums.error, coded - x)):
            total[index, :, place] += values.square().sum((2, 3)).cpu()
    for loop in range(len(states[0])):
        q = make_finite(text.q[loop, place, :, -queries:].float())
        k, v = (x[loop] for x in states)
        output, *errors = (x.square().sum((1, 2, 3)).cpu() for x in _outputs(q, k, v, *(x[loop] for x in rebuilt), cfg))
        sums.output[:, loop, place] += output
        sums.output_error[:, loop, place] += torch.stack(errors)


def _recode(x: Tensor, cfg: KVQuantConfig, rotations: Sequence[Rotation | None]) -> tuple[Tensor, Tensor]:
    """What a cache gives back for ``x`` [L, H, T, D], and what each loop's reference leaves of it; both like ``x``."""
    rebuilt, residual = torch.empty_like(x), x.clone()
    for group, rotation in enumerate(rotations):
        start = group * cfg.loops
        packed = encode(x[start : start + cfg.loops].transpose(1, 2), cfg, rotation)
        rebuilt[start : start + cfg.loops] = decode(packed).transpose(1, 2)
        for loop, stored in enumerate(packed.loops):
            if (reference := cfg.reference_of(loop)) is not None:
                alpha = stored.alpha.float().transpose(0, 1) if cfg.stores_alpha(loop) else 1.0
                residual[start + loop] -= alpha * rebuilt[start + reference]
    return rebuilt, residual


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, coded_k: Tensor, coded_v: Tensor, cfg: KVQuantConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention output of one loop [H, G, n, D], and its errors with K alone and with V alone coded.

    Args:
        q: [Hq, n, D], the last n of T tokens; the others [H, T, D], FP32.
        cfg: says which tokens a cache keeps in BF16: the current one, sinks and recent ones.
    """
    queries, tokens = q.shape[1], k.shape[1]
    at = torch.arange(tokens - queries, tokens, device=q.device).unsqueeze(1)
    token = torch.arange(tokens, device=q.device)
    raw = (token < cfg.sink_tokens) | (token >= at - cfg.recent_tokens)
    grouped = q.unflatten(0, (k.shape[0], -1)) * q.shape[-1] ** -0.5
    scores = grouped @ k.mT.unsqueeze(1)
    moved = torch.where(raw, scores, grouped @ coded_k.mT.unsqueeze(1))
    weights, moved = (x.masked_fill(token > at, -torch.inf).softmax(-1) for x in (scores, moved))
    v, change = v.unsqueeze(1), (coded_v - v).unsqueeze(1)
    return weights @ v, (moved - weights) @ v, weights.masked_fill(raw, 0) @ change


def _table(sums: _Sums, config: KVQuantConfig, layers: Sequence[int]) -> pd.DataFrame:
    import pandas as pd

    measures = {
        "residual_energy": sums.residual / sums.states.clamp(min=LEAST_ENERGY),
        "nmse": sums.error / sums.states.clamp(min=LEAST_ENERGY),
        "attention_error": sums.output_error / sums.output.clamp(min=LEAST_ENERGY),
    }
    rows = []
    for place, layer in enumerate(layers):
        cfg = config.for_layer(layer)
        for loop in range(sums.states.shape[1]):
            group, inner = divmod(loop, cfg.loops)
            predictor = cfg.reference_of(inner)
            reference = 0 if predictor is None else group * cfg.loops + predictor + 1
            for head in range(sums.states.shape[3]):
                for index, kind in enumerate("KV"):
                    where = {"layer": layer + 1, "loop": loop + 1, "head": head + 1, "of": kind}
                    found = {name: x[index, loop, place, head].item() for name, x in measures.items()}
                    rows.append(where | {"bits": cfg.bits[inner], "reference": reference} | found)
    return pd.DataFrame(rows)


def worst(table: pd.DataFrame, count: int = 10) -> pd.DataFrame:
    """The ``count`` rows with the largest attention error."""
    return table.nlargest(count, "attention_error")


def loop_means(table: pd.DataFrame) -> pd.DataFrame:
    """Mean of every measure over layers and heads, one row per K or V and loop."""
    return table.groupby(["of", "loop"], as_index=False)[list(MEASURES)].mean()


def draw_inspection(table: pd.DataFrame) -> Picture:
    """Heat maps over layers and loops, K above V: each measure on a logarithmic scale, the mean over heads.

    Args:
        table: from :func:`inspect_trace`. What is exactly 0 (loops kept in BF16) stays white.
    """
    from matplotlib.colors import LogNorm

    from residualquant.repro.plots import TEXT, Picture, house_style, new_figure

    mean = table.groupby(["of", "layer", "loop"])[list(MEASURES)].mean()
    layers, loops = (sorted(table[name].unique()) for name in ("layer", "loop"))
    with house_style():
        figure = new_figure(TEXT, 1.3 + 2 * min(2.6, max(0.7, 0.16 * len(layers))))
        axes = figure.subplots(2, len(MEASURES), sharex=True, sharey=True)
        for column, (measure, name) in enumerate(MEASURES.items()):
            shown = mean[measure].where(mean[measure] > 0)
            norm = LogNorm(shown.min(), shown.max()) if shown.notna().any() else None
            for axis, kind in zip(axes[:, column], "KV"):
                grid = shown[kind].unstack("loop")
                image = axis.imshow(grid, norm=norm, cmap="magma_r", aspect="auto", interpolation="nearest")
                axis.set_title(f"{kind}: {name}")
                axis.grid(visible=False)
            axis.set_xlabel("loop")
            figure.colorbar(image, ax=axes[:, column], shrink=0.9)
        for labels, values, set_ticks in ((8, loops, axis.set_xticks), (12, layers, axis.set_yticks)):
            step = -(-len(values) // labels)
            set_ticks(range(0, len(values), step), [str(value) for value in values[::step]])
        for axis in axes[:, 0]:
            axis.set_ylabel("layer")
    return Picture(figure, "Residual energy, NMSE and attention error of every layer and loop, K above V")
