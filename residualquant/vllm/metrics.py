"""Prometheus metrics of the packed cache, beside vLLM's own under ``/metrics``.

| metric | counts |
|---|---|
| ``residualquant:packed_tokens_total`` | tokens whose K and V were packed |
| ``residualquant:sanitised_values_total`` | values of K and V that were NaN, infinite or beyond +-65504, a step late |
| ``residualquant:kv_bytes_saved_total`` | bytes of pages that BF16 would have taken more for these tokens |
| ``residualquant:kv_bytes_per_token`` | bytes of one token's K and V, by ``format``: "packed" and "bf16" |

Only the processes that hold pages know these numbers, and the API server is another process: they meet in
prometheus_client's multiprocess mode. `residualquant serve` switches it on with a folder of its own; whoever runs
`vllm serve` sets ``PROMETHEUS_MULTIPROC_DIR`` to an empty folder.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from prometheus_client import Counter, Gauge
from torch import Tensor

from residualquant.vllm.serve import METRICS_FOLDER, METRICS_VARIABLE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from residualquant.vllm.attention import LoopedAttention

BF16_BYTES = 2

TOKENS = Counter("residualquant:packed_tokens", "Tokens whose K and V were packed.")
SANITISED = Counter(
    "residualquant:sanitised_values", "Values of K and V that were NaN, infinite or beyond +-65504, and replaced."
)
SAVED = Counter("residualquant:kv_bytes_saved", "Bytes of pages that BF16 would have taken more for the packed tokens.")
TOKEN_BYTES = Gauge(
    "residualquant:kv_bytes_per_token", "Bytes of the K and V of one token.", ["format"], multiprocess_mode="livesum"
)


class RunningCount:
    """A count on a device, that kernels add to and that is read without waiting for them.

    Attributes:
        tensor: int32 [1], modulo 2^32.
    """

    def __init__(self, device: torch.device):
        self.tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self._known = 0
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None

    def new(self) -> int:
        """How much was added since the last call, as far as the host knows."""
        latest = self._latest()
        added = 0 if latest is None else (latest - self._known) % 2**32
        self._known += added
        return added

    def _latest(self) -> int | None:
        if self.tensor.device.type == "cpu":
            return int(self.tensor)
        if self._copy is None:
            host = torch.empty(1, dtype=torch.int32, pin_memory=True)
            host.copy_(self.tensor, non_blocking=True)
            self._copy = host, torch.cuda.Event()
            self._copy[1].record()
        if not self._copy[1].query():
            return None
        latest, self._copy = int(self._copy[0]), None
        return latest


@lru_cache
def sanitised(device: torch.device) -> RunningCount:
    """What the packed layers of this process on ``device`` have sanitised."""
    return RunningCount(device)


def bytes_per_token(layers: Sequence[LoopedAttention]) -> tuple[int, int]:
    """Bytes of one token in the pages of ``layers``, and in BF16."""
    packed = sum(layer.kv_heads * layer.paged.token_bytes for layer in layers)
    return packed, sum(layer.kv_heads * 2 * layer.loops * layer.head_dim * BF16_BYTES for layer in layers)


class StepMetrics:
    """Counts the steps of the packed layers among ``names``, in this process.

    Of the processes and layer groups that share a model one counts its tokens, and each counts its own bytes.
    """

    def __init__(self, vllm_config: VllmConfig, names: Sequence[str], device: torch.device):
        from vllm.distributed import get_tensor_model_parallel_rank

        from residualquant.vllm.paged import PackedPages

        known = vllm_config.compilation_config.static_forward_context
        packed = {n: x for n, x in known.items() if isinstance(getattr(x, "paged", None), PackedPages)}
        own = [layer for name, layer in packed.items() if name in names]
        self._active, self._sanitised = bool(own), sanitised(device)
        self._counts_tokens = next(iter(packed), None) in names and get_tensor_model_parallel_rank() == 0
        token, bf16 = bytes_per_token(own)
        self._saved = bf16 - token
        if own:
            for name, size in zip(("packed", "bf16"), bytes_per_token(list(packed.values()))):
                TOKEN_BYTES.labels(name).set(size)

    def count_step(self, tokens: int) -> None:
        """A step of ``tokens`` tokens begins; what was sanitised in those before it is added too."""
        if not self._active:
            return
        SAVED.inc(tokens * self._saved)
        SANITISED.inc(self._sanitised.new())
        if self._counts_tokens:
            TOKENS.inc(tokens)


def remove_folder_at_exit() -> None:
    """In the process that `residualquant serve` became: remove its folder of metrics when it ends."""
    folder = Path(os.environ.get(METRICS_VARIABLE, ""))
    if folder.name.startswith(f"{METRICS_FOLDER}{os.getpid()}-"):
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
