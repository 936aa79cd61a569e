"""Launch parameters of the Triton kernels: ``tuning.json``, by operation and GPU name, with a default for any other."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch


@lru_cache(maxsize=64)
def tuned(operation: str, device: torch.device) -> dict[str, int]:
    """Launch parameters of ``operation`` on ``device``: the keyword arguments of its kernel that only affect speed."""
    by_gpu = json.loads(Path(__file__).with_name("tuning.json").read_text())[operation]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "default"
    return by_gpu.get(name, by_gpu["default"])
