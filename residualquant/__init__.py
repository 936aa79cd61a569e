"""ResidualQuant: KV cache quantisation for looped transformers with 2-bit residuals.

``encode`` and ``decode`` turn the K or V states of one loop group into packed bytes and back; ``KVQuantConfig`` and
``preset`` say how; ``load_model`` and ``generate`` run a looped model on such a cache.
"""

from __future__ import annotations

from typing import Any

from residualquant.config import PRESETS, KVQuantConfig, preset
from residualquant.residual import PackedKV, decode, encode

__version__ = "0.1.0"

__all__ = ["PRESETS", "KVQuantConfig", "PackedKV", "decode", "encode", "generate", "load_model", "preset"]


def __getattr__(name: str) -> Any:
    """Models and the engine are imported when they are first used."""
    if name == "load_model":
        from residualquant.models import load_model

        return load_model
    if name == "generate":
        from residualquant.engine import generate

        return generate
    raise AttributeError(f"module 'residualquant' has no attribute {name!r}")
