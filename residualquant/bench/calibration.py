"""Time and memory to calibrate OptR-H for Ouro-1.4B, from one layer at its real shape and full number of texts::

    python -m residualquant.bench.calibration [data/h200/calibration.json]

A layer's work does not depend on the other layers, so the whole model takes at most that of one layer times their
number; the forward passes that capture the layers' states come on top, one per text and pass. Random states will do:
nothing in the work depends on the values.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from residualquant.config import KVQuantConfig, preset
from residualquant.models.ouro import OuroConfig
from residualquant.repro.paths import write_atomic
from residualquant.repro.provenance import provenance
from residualquant.rotation.optr_h import PAPER_SETTINGS, OptRHSettings, fit_optr_h, gram_of
from residualquant.rotation.states import States

EXAMPLES, TOKENS = 128, 400  # texts to fit with, and as many to choose with; tokens of each


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

    def describe(self) -> str:
        """Two sentences for a reader."""
        peak = "" if self.peak_bytes is None else f", {self.peak_bytes / 2**30:.1f} GiB at the peak"
        return (
            f"One layer: {self.seconds:.1f} s, {self.state_bytes / 2**30:.1f} GiB of Q, K and V{peak}. "
            f"The whole model, {self.layers} layers one at a time: {self.layers * self.seconds / 60:.1f} minutes of "
            f"fitting, in the same memory."
        )


def measure(
    device: str | torch.device,
    model: OuroConfig = OuroConfig(),  # noqa: B008
    cfg: KVQuantConfig = preset("INT2/4 g=32", rotation="optr_h"),  # noqa: B008
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


def record(path: str | Path, device: str = "cuda", examples: int = EXAMPLES) -> Cost:
    """:func:`measure` one layer of Ouro-1.4B and keep the result as JSON, with machine, versions and protocol."""
    cost = measure(device, examples=examples)
    kept = {
        "seconds_per_layer": round(cost.seconds, 2),
        "estimated_seconds": round(cost.seconds * cost.layers, 1),
        "state_gib": round(cost.state_bytes / 2**30, 2),
        "peak_gib": cost.peak_bytes and round(cost.peak_bytes / 2**30, 2),
        "layers": cost.layers,
        "protocol": {
            "what": "OptR-H, K and V of one layer of Ouro-1.4B's shape on random states, one run after a warm-up",
            "config": preset("INT2/4 g=32", rotation="optr_h").to_dict(),
            "settings": asdict(PAPER_SETTINGS),
            "fit_texts": examples,
            "held_out": examples,
            "tokens": TOKENS,
        },
        "provenance": provenance(device),
    }
    write_atomic(Path(path), json.dumps(kept, indent=1) + "\n")
    return cost


def main(path: str | None = None) -> None:
    """Measure on the GPU where there is one; on a CPU with a sixteenth of the texts, which says so."""
    device, examples = ("cuda", EXAMPLES) if torch.cuda.is_available() else ("cpu", EXAMPLES // 16)
    print(f"{device}: Ouro-1.4B, {examples} + {examples} texts of {TOKENS} tokens (the paper has {EXAMPLES})")
    cost = record(path, device, examples) if path else measure(device, examples=examples)
    print(cost.describe())


if __name__ == "__main__":
    main(*sys.argv[1:2])
