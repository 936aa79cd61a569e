"""ResidualQuant: KV cache quantisation for looped transformers with 2-bit residuals.

``encode`` and ``decode`` turn the K or V states of one loop group into packed bytes and back; ``KVQuantConfig`` and
``preset`` say how; ``load_model`` and ``generate`` run a looped model on such a cache.
"""

from __future__ import annotations

import importlib
from typing import Any

from residualquant.config import PRESETS, KVQuantConfig, preset

__version__ = "0.1.0"

__all__ = ["PRESETS", "KVQuantConfig", "PackedKV", "decode", "encode", "generate", "load_model", "preset"]

_HOME = {
    "PackedKV": "residual",
    "decode": "residual",
    "encode": "residual",
    "generate": "engine",
    "load_model": "models",
}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first used, so that the command line starts at once."""
    if name not in _HOME:
        raise AttributeError(f"module 'residualquant' has no attribute {name!r}")
    return getattr(importlib.import_module(f"residualquant.{_HOME[name]}"), name)
