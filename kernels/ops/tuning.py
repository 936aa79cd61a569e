"""Launch parameters of the Triton kernels: ``tuning.json``, by operation and GPU name, with a default for any other.

An entry "NAME, D=256" is for one head size, "NAME, float32" for states of one dtype, and comes before it: wider rows
need smaller tiles, and their loops no copies ahead, to fit an older GPU's shared memory.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch


@lru_cache(maxsize=64)
def tuned(operation: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Launch parameters of ``operation`` on ``device`` for states of ``head_dim`` values of ``dtype``: the keyword
    arguments of its kernel that only affect speed and memory."""
    entries = json.loads(Path(__file__).with_name("tuning.json").read_text())[operation]
    names = ["default"] if device.type != "cuda" else [torch.cuda.get_device_name(device), "default"]
    kinds = (f", {str(dtype).removeprefix('torch.')}", f", D={head_dim}", "")
    return next(entries[name + kind] for kind in kinds for name in names if name + kind in entries)
