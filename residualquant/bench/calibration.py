"""What calibrating OptR-H takes: one layer of Ouro-1.4B's shape on a GPU, and estimates of other models::

    python -m residualquant.bench.calibration

writes ``data/h200/calibration.json``; ``residualquant calibrate --estimate`` reads it, and what a whole mini takes on a
CPU (:mod:`residualquant.bench.runs`).

A layer's work does not depend on the other layers, so the whole model takes at most that of one layer times their
number; the forward passes that capture the layers' states come on top, one per text and pass. Random states will do:
nothing in the work depends on the values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from residualquant.bench.runs import recorded
from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.models.base import KVShape
from residualquant.models.loading import kv_shape_of, read_kv_shape
from residualquant.models.ouro import OuroConfig
from residualquant.repro.paths import data_dir, show, write_atomic
from residualquant.repro.provenance import provenance
from residualquant.rotation.optr_h import PAPER_SETTINGS, OptRHSettings, fit_optr_h, gram_of
from residualquant.rotation.states import States
from residualquant.trace import captured_bytes

EXAMPLES, TOKENS = 128, 400  # texts to fit with, and as many to choose with; tokens of each
CONFIG = preset("INT2/4 g=32", rotation="optr_h")


@dataclass(frozen=True)
class Cost:
    """What one layer took, and what the whole model would.

    Attributes:
        seconds: wall time to fit one layer, K and V.
        state_bytes: Q, K and V of one layer on all texts.
        peak_bytes: most memory of the GPU, states included; None on a CPU.
        layers: of the whole model.
    """

    seconds: float
    state_bytes: int
    peak_bytes: int | None
    layers: int


def measure(
    device: str | torch.device,
    model: OuroConfig = OuroConfig(),  # noqa: B008
    cfg: KVQuantConfig = CONFIG,
    examples: int = EXAMPLES,
    tokens: int = TOKENS,
    settings: OptRHSettings = PAPER_SETTINGS,
) -> Cost:
    """Fit one layer of ``model``'s shape on ``device``."""
    generator = torch.Generator(device).manual_seed(0)
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim

    def draw(*middle: int) -> torch.Tensor:
        shape = (cfg.loops, kv_heads, 1, *middle, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    queries = min(settings.queries, tokens)
    texts = [
        States(draw(heads // kv_heads, queries), draw(tokens), draw(tokens), (tokens,)) for _ in range(2 * examples)
    ]
    weight = torch.randn(model.hidden_size, heads * dim, generator=generator, device=device)
    gram = gram_of(weight, kv_heads, dim)
    cuda = torch.device(device).type == "cuda"
    fit_optr_h(texts[:1], texts[1:2], gram, cfg, OptRHSettings(steps=1))  # warm-up
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    fit_optr_h(texts[:examples], texts[examples:], gram, cfg, settings)
    if cuda:
        torch.cuda.synchronize(device)
    return Cost(
        seconds=time.perf_counter() - begun,
        state_bytes=sum(x.nbytes for states in texts for x in (states.q, states.k, states.v)),
        peak_bytes=torch.cuda.max_memory_allocated(device) if cuda else None,
        layers=model.num_hidden_layers,
    )


def record(path: str | Path, device: str = "cuda") -> dict:
    """:func:`measure` one layer of Ouro-1.4B and keep the result as JSON, with machine, versions and protocol."""
    cost = measure(device)
    kept = {
        "seconds_per_layer": round(cost.seconds, 2),
        "estimated_seconds": round(cost.seconds * cost.layers, 1),
        "state_gib": round(cost.state_bytes / 2**30, 2),
        "peak_gib": cost.peak_bytes and round(cost.peak_bytes / 2**30, 2),
        "layers": cost.layers,
        "protocol": {
            "what": "OptR-H, K and V of one layer of Ouro-1.4B's shape on random states, one run after a warm-up",
            "config": CONFIG.to_dict(),
            "settings": asdict(PAPER_SETTINGS),
            "fit_texts": EXAMPLES,
            "held_out": EXAMPLES,
            "tokens": TOKENS,
        },
        "provenance": provenance(device),
    }
    write_atomic(Path(path), json.dumps(kept, indent=1) + "\n")
    return kept


def estimates(model: str) -> tuple[list[dict], str]:
    """About what calibrating ``model`` takes on the GPU of the record, Ouro-1.4B beside it; and how that is known.

    Memory and time are in proportion to a layer's queries, keys and values, but a layer with fewer than that of the
    record is not taken to be faster. No weights are read.

    Args:
        model: a shipped model's name, a folder or a hub id.

    Raises:
        ResidualQuantError: no such model, or no record of a layer.
    """
    kept, mini = recorded("calibration", "h200"), recorded("calibration")
    if kept is None:
        raise ResidualQuantError("data/h200/calibration.json is missing: python -m residualquant.bench.calibration")
    ouro, protocol = OuroConfig(), kept["protocol"]
    shapes = {model: read_kv_shape(model), "Ouro-1.4B": (kv_shape_of(ouro), ouro.num_attention_heads)}
    rows = [_estimate(name, *shape, kept) for name, shape in shapes.items()]
    how = (
        f"Estimated from one layer of Ouro-1.4B on one {kept['provenance']['gpu']}: OptR-H, "
        f"{protocol['settings']['steps']} steps on {protocol['fit_texts']} + {protocol['held_out']} texts of "
        f"{protocol['tokens']} tokens. A forward pass per text and per as many layers as fit comes on top."
    )
    if mini:
        here = mini["provenance"]
        how += (
            f"\nMeasured: `{mini['command']}`, everything included: {mini['cpu_seconds']:.0f} s of CPU time on "
            f"{here['threads']} of {here['cores']} cores ({here['cpu']})."
        )
    return rows, how


def _estimate(name: str, shape: KVShape, query_heads: int, kept: Mapping) -> dict:
    """One row: a layer's states at the sizes of the record, and time and memory in proportion to them."""
    protocol = kept["protocol"]
    texts = [range(protocol["tokens"])] * (protocol["fit_texts"] + protocol["held_out"])
    state = captured_bytes(shape, query_heads, texts, protocol["settings"]["queries"]) / 2**30
    share = state / kept["state_gib"]
    seconds = max(1.0, share) * kept["seconds_per_layer"]
    return {
        "model": name,
        "loops": shape.loops,
        "layers": shape.layers,
        "KV heads": shape.kv_heads,
        "head dim": shape.head_dim,
        "Q, K, V of a layer": f"{state:.2f} GiB",
        "peak": f"{share * kept['peak_gib']:.1f} GiB",
        "a layer": f"{seconds:.1f} s",
        "all layers": f"{shape.layers * seconds / 60:.1f} min",
    }


def main() -> None:
    """Measure a layer of Ouro-1.4B on the GPU here.

    Raises:
        ResidualQuantError: there is none.
    """
    if not torch.cuda.is_available():
        raise ResidualQuantError("a layer of Ouro-1.4B is measured on a GPU; none is visible to torch")
    path = data_dir("h200") / "calibration.json"
    record(path)
    rows, how = estimates("mini-ouro-maths")
    print(tabulate(rows, headers="keys", disable_numparse=True), how, f"wrote {show(path)}", sep="\n")


if __name__ == "__main__":
    main()
