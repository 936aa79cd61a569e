"""Launch parameters of the Triton kernels: ``tuning.json``, by operation and GPU name, with a default for any other.

An entry "NAME, D=256" is for one head size: larger heads need smaller tiles to fit an older GPU's shared memory.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch


@lru_cache(maxsize=64)
def tuned(operation: str, device: torch.device, head_dim: int) -> dict[str, int]:
    """Launch parameters of ``operation`` on ``device``: the keyword arguments of its kernel that only affect speed."""
    entries = json.loads(Path(__file__).with_name("tuning.json").read_text())[operation]
    names = ["default"] if device.type != "cuda" else [torch.cuda.get_device_name(device), "default"]
    names = [*(f"{name}, D={head_dim}" for name in names), *names]
    return next(entries[name] for name in names if name in entries)
