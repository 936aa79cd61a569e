"""The ``residualquant`` part of vLLM's ``additional_config``, and every refusal in one place.

    --additional-config '{"residualquant": {"preset": "INT2/4 g=32", "rotation": "hadamard"}}'

Names are ``preset`` (the paper's label) with ``loops`` (of a group), any field of
:class:`residualquant.config.KVQuantConfig`, and ``rotations`` (the folder that `residualquant calibrate` wrote).
Without the part, K and V are kept raw at the model's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import torch

from residualquant.cache import LayerRotations, RotationMap, loop_groups
from residualquant.config import RAW_BITS, KVQuantConfig, preset
from residualquant.errors import ResidualQuantError, check_count, check_type
from residualquant.layout import check_head_dim
from residualquant.models.base import KVShape
from residualquant.models.huginn import HuginnConfig
from residualquant.models.loading import ARCHITECTURES, config_of, model_folder, weights_hash
from residualquant.models.ouro import OuroConfig
from residualquant.rotation import Rotation
from residualquant.rotation.calibration import CALIBRATED, load_rotations
from residualquant.rotation.hadamard import hadamard_matrix

NAME = "residualquant"
RAW_LABEL = "BF16"
OTHER_NAMES = ("preset", "loops", "rotations")
NAMES = (*OTHER_NAMES, *(field.name for field in fields(KVQuantConfig)))
MODELS = {
    "OuroForCausalLM": "residualquant.vllm.ouro:OuroForCausalLM",
    "RavenForCausalLM": "residualquant.vllm.huginn:RavenForCausalLM",
}


@dataclass(frozen=True)
class Settings:
    """How one model's K and V are kept: ``config`` of a loop group, and the folder of its rotations or None."""

    config: KVQuantConfig
    rotations: str | None = None

    @classmethod
    def read(cls, values: Mapping[str, Any] | None, shape: KVShape) -> Settings:
        """The settings that ``values``, the ``residualquant`` part, asks for; the raw cache when None.

        Raises:
            ValueError: an unknown name, values that contradict each other, one that the codec, the model or the paged
                cache does not take, or a calibrated rotation without its folder.
        """
        if values is None:
            return cls(KVQuantConfig(bits=(RAW_BITS,) * shape.loops))
        if not isinstance(values, Mapping):
            raise ValueError(f'"{NAME}" must be an object such as {{"preset": "INT2/4 g=32"}}, got {values!r}')
        if unknown := [name for name in values if name not in NAMES]:
            raise ValueError(f"unknown name in a KV configuration: {', '.join(map(str, unknown))}")
        config, rotations = _config(dict(values), shape), values.get("rotations")
        loop_groups(shape, config)
        if not config.is_off:
            check_head_dim(config, shape.head_dim)
            if config.rotation == "hadamard":
                hadamard_matrix(shape.head_dim)  # refuses sizes that have none
        if config.layer_bits:
            raise ValueError(f"pages of all layers have one size, got layer_bits={config.layer_bits}")
        if config.sink_tokens or config.recent_tokens:
            raise ValueError(
                f"a paged cache has no BF16 windows, got sink_tokens={config.sink_tokens} "
                f"and recent_tokens={config.recent_tokens}"
            )
        if (config.rotation in CALIBRATED) != (rotations is not None):
            what = "needs the folder of its" if config.rotation in CALIBRATED else "takes no"
            raise ValueError(f'rotation="{config.rotation}" {what} "rotations", got {rotations!r}')
        if rotations is not None:
            check_type("rotations", rotations, str)
        return cls(config, rotations)


def _config(values: dict[str, Any], shape: KVShape) -> KVQuantConfig:
    """The configuration of a loop group that ``values`` ask for by a label, its own fields, or both."""
    label, loops = values.get("preset"), values.get("loops")
    if label is None and "bits" not in values:
        raise ValueError(f'"{NAME}" must name a "preset" such as "INT2/4 g=32", or "bits", got {values!r}')
    if "loops" in values:
        check_count("loops", loops, most=shape.loops)
    if "int2_clip" in values and type(values["int2_clip"]) not in (int, float):
        raise ValueError(f"int2_clip must be a number, got {values['int2_clip']!r}")
    changes = {name: value for name, value in values.items() if name not in OTHER_NAMES}
    if label is None:
        config = KVQuantConfig.from_dict(changes)
    else:
        check_type("preset", label, str)
        config = preset(label, loops or min(4, shape.loops), **changes)
        if label == RAW_LABEL and not config.is_off:
            raise ValueError(f'preset "{label}" keeps K and V as they are, got bits={config.bits}')
    if loops not in (None, config.loops):
        raise ValueError(f"loops and bits must be of equally many loops, got loops={loops} and bits={config.bits}")
    return config


@dataclass(frozen=True)
class _Checkpoint:
    """What of a model :func:`load_rotations` compares a calibration with."""

    name: str
    weights_hash: str
    kv_shape: KVShape
    device: torch.device


def settings_of(vllm_config) -> Settings:
    """The settings of a looped model's vLLM configuration."""
    return Settings.read(_part(vllm_config), kv_shape(vllm_config.model_config.hf_config))


def kv_shape(hf_config) -> KVShape:
    """Shape of the KV cache of a looped model's looped layers, all heads."""
    if hf_config.model_type == "huginn_raven":
        layers = hf_config.n_layers_in_recurrent_block
        return KVShape(hf_config.mean_recurrence, layers, hf_config.n_heads, hf_config.head_dim)
    return KVShape(
        hf_config.total_ut_steps, hf_config.num_hidden_layers, hf_config.num_key_value_heads, hf_config.head_dim
    )


def edge_shape(hf_config) -> KVShape:
    """Shape of the KV cache of the layers of a looped model that run once, all heads."""
    looped = kv_shape(hf_config)
    return KVShape(1, hf_config.n_layers_in_prelude + hf_config.n_layers_in_coda, looped.kv_heads, looped.head_dim)


def layer_rotations(vllm_config, heads: slice, device: torch.device) -> LayerRotations:
    """The rotations of all layers, of this process's KV ``heads``.

    Raises:
        ResidualQuantError: rotations of another model, shape or configuration, or damaged ones.
    """
    settings, shape = settings_of(vllm_config), kv_shape(vllm_config.model_config.hf_config)
    found: RotationMap = {}
    if settings.rotations is not None:
        model = vllm_config.model_config.model
        checkpoint = _Checkpoint(model, _hash_of(model), shape, device)
        for key, whole in load_rotations(settings.rotations, checkpoint, settings.config).items():
            means = None if whole.means is None else whole.means[:, heads]
            found[key] = Rotation(whole.matrix[heads], means)
    own = KVShape(shape.loops, shape.layers, heads.stop - heads.start, shape.head_dim)
    return LayerRotations(settings.config, own, device, found)


@lru_cache(maxsize=1)
def _hash_of(model: str) -> str:
    return weights_hash(model_folder(model))


def _part(vllm_config) -> Mapping[str, Any] | None:
    extra = vllm_config.additional_config
    return extra.get(NAME) if isinstance(extra, Mapping) else None


def _check_names(vllm_config) -> None:
    """Refuse names beside the ``residualquant`` part that were meant for it: they would ask for nothing."""
    extra = vllm_config.additional_config
    if not isinstance(extra, Mapping):
        return
    for name in extra.keys() - {NAME}:
        if name in NAMES or get_close_matches(re.sub(r"[^a-z]", "", str(name).lower()), [NAME], cutoff=0.8):
            raise ValueError(f'settings are given as {{"{NAME}": {{"preset": "INT2/4 g=32"}}}}, got the name {name!r}')


def looped_config(values: Mapping[str, Any], architecture: str) -> OuroConfig | HuginnConfig:
    """The configuration of a looped model, from ``values`` of a ``config.json`` and the architecture it names.

    Raises:
        ValueError: values that no such model can have.
    """
    config = config_of(values)
    if (own := ARCHITECTURES[config.model_type][2]) != architecture:
        raise ValueError(f"model_type {config.model_type!r} is {own}'s, got the architecture {architecture}")
    return config


def check_config(vllm_config) -> None:
    """Refuse what cannot work, in the process where the user is, before anything is loaded.

    Raises:
        ResidualQuantError: one sentence.
    """
    from residualquant.vllm.startup import on_one_thread

    if vllm_config.model_config is None:
        return
    architecture = vllm_config.model_config.architecture
    if architecture not in MODELS:
        if _part(vllm_config) is not None:
            raise ResidualQuantError(f"residualquant serves looped models ({', '.join(MODELS)}), got {architecture}")
        return
    try:
        looped_config(vllm_config.model_config.hf_config.to_dict(), architecture)
    except ValueError as error:
        raise ResidualQuantError(f"the model's configuration cannot be used: {error}") from error
    for refused, reason in _refusals(vllm_config):
        if refused:
            raise ResidualQuantError(f"residualquant's looped cache {reason}")
    try:
        _check_names(vllm_config)
        settings = settings_of(vllm_config)
        if settings.rotations is not None:
            heads = slice(0, kv_shape(vllm_config.model_config.hf_config).kv_heads)
            on_one_thread(layer_rotations)(vllm_config, heads, torch.device("cpu"))
        if not settings.config.is_off:
            _check_kernels(vllm_config, settings.config)
    except ValueError as error:
        raise ResidualQuantError(f"additional_config: {error}") from error


def _check_kernels(vllm_config, config: KVQuantConfig) -> None:
    """Refuse what the kernels do not read, where there is a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from residualquant.vllm.paged_cuda import why_not

    head_dim, dtype = kv_shape(vllm_config.model_config.hf_config).head_dim, vllm_config.model_config.dtype
    if needed := why_not(config, head_dim):
        raise ValueError(f"the GPU kernels need {needed}")
    if dtype == torch.float16:
        raise ValueError("the GPU kernels read BF16, got dtype float16: its range is too small for K and V")


def _refusals(vllm_config) -> list[tuple[bool, str]]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    heads, tp = vllm_config.model_config.hf_config.num_key_value_heads, parallel.tensor_parallel_size
    context = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    connector = vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None
    dtypes = ("auto", str(vllm_config.model_config.dtype).removeprefix("torch."))
    return [
        (vllm_config.speculative_config is not None, "does not support speculative decoding"),
        (parallel.pipeline_parallel_size > 1, "does not support pipeline parallelism: every loop needs all layers"),
        (context != (1, 1), f"does not support context parallelism, got sizes {context}"),
        (heads % tp != 0, f"needs a tensor_parallel_size that divides the {heads} KV heads, got {tp}"),
        (parallel.enable_dbo, "does not support dual batch overlap, which would share one step's staging"),
        (connector, "does not support KV connectors or KV offloading: they know no packed pages"),
        (cache.cache_dtype not in dtypes,
         f'has formats of its own: kv_cache_dtype must be "auto", got {cache.cache_dtype!r}'),
        (cache.block_size is not None and cache.block_size % 16 != 0,
         f"needs a block_size that is a multiple of 16, got {cache.block_size}"),
        (vllm_config.use_v2_model_runner, "needs vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0"),
    ]  # fmt: skip
