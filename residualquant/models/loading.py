"""Load and save looped models as ``config.json`` + safetensors + ``tokenizer.json`` + ``generation_config.json``.

A checkpoint is never run as code: the architecture is ours, the weights are safetensors, and every tensor's name
and shape is checked before use.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from residualquant.errors import ResidualQuantError, check_count
from residualquant.models.base import STOP_TOKENS, KVShape, LoopedModel
from residualquant.models.huginn import Huginn, HuginnConfig
from residualquant.models.ouro import Ouro, OuroConfig
from residualquant.repro.paths import models_dir, parse_json, write_atomic

# model_type of config.json: configuration, model, and the published class's name
ARCHITECTURES = {
    "ouro": (OuroConfig, Ouro, "OuroForCausalLM"),
    "huginn_raven": (HuginnConfig, Huginn, "RavenForCausalLM"),
}

HUB_REVISIONS = {
    "ByteDance/Ouro-1.4B": "e3b1e0993b1231a51d6069a870476dda4162c00a",
    "tomg-group-umd/huginn-0125": "bb6621b65e90b6a4b9b29ef88dc83866d450470c",
}

LOOPS = ("total_ut_steps", "mean_recurrence")
MOST_LOOPS = 1024  # of a model; what lists them all would otherwise fill the memory
WHOLE_CHECKPOINT = ("*.safetensors", "*.json", "tokenizer*")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def model_folder(name_or_path: str, fetch: tuple[str, ...] = WHOLE_CHECKPOINT) -> Path:
    """Folder of a checkpoint: a path, the name of a model shipped under ``data/models``, or a hub id.

    Args:
        fetch: which files to fetch of a checkpoint on the hub.

    Raises:
        ResidualQuantError: nothing of that name is here, or the hub cannot be reached.
    """
    for folder in (Path(name_or_path), models_dir() / name_or_path):
        if (folder / "config.json").is_file():
            return folder
    if name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/")):
        return _download(name_or_path, fetch)
    shipped = sorted(p.parent.name for p in models_dir().glob("*/config.json"))
    raise ResidualQuantError(f"no model {name_or_path!r}: give a folder with config.json, or one of {shipped}")


def _download(repo: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=HUB_REVISIONS.get(repo), allow_patterns=list(files)))
    except Exception as error:  # the hub client raises many kinds; all mean the same to the user
        raise ResidualQuantError(f"the checkpoint {repo!r} could not be fetched from the hub: {error}") from error


def _read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ResidualQuantError(f"{folder.name} holds no .safetensors file")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found = load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            what = f"{file.name} in {folder.name} is truncated or not safetensors"
            raise ResidualQuantError(f"{what}: {error}") from error
        if twice := sorted(found.keys() & weights.keys()):
            raise ResidualQuantError(f"{folder.name} holds {twice[0]} in two files, {file.name} and one before it")
        weights |= found
    return weights, weights_hash(folder)


def weights_hash(folder: Path) -> str:
    """sha256 over the sha256 of every .safetensors file of a checkpoint, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def _read_config(folder: Path) -> OuroConfig | HuginnConfig:
    with config_file(folder) as values:
        return config_of(values)


@contextmanager
def config_file(folder: Path) -> Iterator[dict[str, Any]]:
    """What a checkpoint's ``config.json`` holds, to be used in the context.

    Raises:
        ResidualQuantError: it cannot be read, or a ValueError in the context said why it cannot be used.
    """
    try:
        yield parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ResidualQuantError(f"config.json of {folder.name} cannot be used: {error}") from error


def config_of(values: Mapping[str, Any]) -> OuroConfig | HuginnConfig:
    """The configuration of the model that ``values``, those of a ``config.json``, describe.

    Raises:
        ValueError: another kind of model, a variant that is not implemented, or a number that none can have.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type is {kind!r}, expected one of {sorted(ARCHITECTURES)}")
    known = ARCHITECTURES[kind][0]()
    _check_numbers(values, known)
    defaults = {name: value for name, value in vars(known).items() if name != "head_dim"}  # which follows from others
    return type(known).from_dict(defaults | {name: value for name, value in values.items() if value is not None})


def _check_numbers(values: Mapping[str, Any], known: OuroConfig | HuginnConfig) -> None:
    """Raises ValueError where a number of config.json is none that a model can have; ``known`` has the right types."""
    for name in vars(known).keys() & values.keys():
        value, kind = values[name], type(getattr(known, name))
        if value is None:  # stands for the default
            continue
        if kind is int and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if name in LOOPS:
            check_count(name, value, most=MOST_LOOPS)
        if kind is float and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise ValueError(f"{name} must be a positive number, got {value!r}")


class _NoInit(TorchFunctionMode):
    """Modules made in this context draw no values (for the meta device torch would first import its compiler)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        draws = getattr(func, "__module__", None) == nn.init.__name__
        return kwargs["tensor"] if draws else func(*args, **kwargs)


def _empty_model(config: OuroConfig | HuginnConfig, weights: dict[str, torch.Tensor], name: str) -> LoopedModel:
    """The model without values. Layers are counted first: building a wrong config.json's million takes hours."""
    if config.num_hidden_layers > len(weights):
        raise ResidualQuantError(f"{name}: config.json implies {config.num_hidden_layers} layers, more than it has")
    try:
        with torch.device("meta"), _NoInit():
            return ARCHITECTURES[config.model_type][1](config)
    except (RuntimeError, TypeError) as error:  # sizes that torch refuses
        raise ResidualQuantError(f"config.json of {name} cannot be used: {error}") from error


def _checked(model: LoopedModel, weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """``weights`` less those that ``model`` derives itself, when all names, shapes, dtypes and values are right."""
    own = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    wanted = own | {k: shape for k, shape in model.derived_shapes.items() if k in weights}
    missing, foreign = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or foreign:
        what = f"lacks {missing[0]!r}" if missing else f"has an unknown tensor {foreign[0]!r}"
        raise ResidualQuantError(
            f"{name} is not a checkpoint of this architecture: it {what} "
            f"({len(missing)} missing, {len(foreign)} unknown tensors)"
        )
    for key, shape in wanted.items():
        found = tuple(weights[key].shape)
        if found != shape:
            raise ResidualQuantError(f"{name}: {key} has shape {found}, config.json implies {shape}")
        if weights[key].dtype not in DTYPES:
            raise ResidualQuantError(f"{name}: {key} is stored as {weights[key].dtype}, which is not supported")
        if not torch.isfinite(weights[key]).all():
            raise ResidualQuantError(f"{name}: {key} holds values that are not finite")
    return {k: weights[k] for k in own}


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    return device


def _read_tokenizer(file: Path):
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # what tokenizers raises is a plain Exception
        raise ResidualQuantError(f"tokenizer.json of {file.parent.name} cannot be used: {error}") from error


def read_kv_shape(name_or_path: str) -> tuple[KVShape, int]:
    """KV shape and query heads of a checkpoint by its ``config.json`` alone: no weights are read, fetched or made.

    Raises:
        ResidualQuantError: no such model, or a config.json that cannot be used.
    """
    config = _read_config(model_folder(name_or_path, fetch=("config.json",)))
    return kv_shape_of(config), config.num_attention_heads


def kv_shape_of(config: OuroConfig | HuginnConfig) -> KVShape:
    """KV shape of a model of ``config``, without making its layers."""
    kind = ARCHITECTURES[config.model_type][1]
    bare = kind.__new__(kind)
    nn.Module.__init__(bare)
    bare.config = config
    return bare.kv_shape


def load_model(
    name_or_path: str = "mini-ouro-maths",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> LoopedModel:
    """A looped model in eval mode, with ``tokenizer``, ``name``, ``weights_hash`` and ``folder`` set.

    Args:
        name_or_path: a folder, a shipped model's name, or a hub id such as ``ByteDance/Ouro-1.4B``.
        device: "cuda" where there is one, else "cpu", when None.
        dtype: BF16 on a GPU and FP32 on a CPU when None. (K and V are rounded to BF16 by the cache either way.)

    Raises:
        ValueError: ``device`` names no kind of device, or ``dtype`` is none that a model can compute in.
        ResidualQuantError: no such model; a truncated, foreign or non-finite checkpoint; no GPU where one was asked.
    """
    device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ResidualQuantError("device 'cuda' was asked for, but no CUDA GPU is visible here")
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    folder = model_folder(str(name_or_path))
    config = _read_config(folder)
    weights, weights_hash = _read_weights(folder)
    model = _empty_model(config, weights, folder.name)
    weights = _checked(model, weights, folder.name)
    model.load_state_dict({k: v.to(device, dtype) for k, v in weights.items()}, assign=True)
    model.eval().requires_grad_(False)
    model.name, model.weights_hash, model.folder = folder.name, weights_hash, folder
    if (file := folder / "tokenizer.json").is_file():
        model.tokenizer = _read_tokenizer(file)
    return model


def save_model(model: LoopedModel, folder: str | Path, tokenizer=None) -> Path:
    """Write ``config.json``, ``model.safetensors`` (BF16) and, given a tokenizer, ``tokenizer.json`` to ``folder``.

    The tokenizer's end tokens go to ``generation_config.json``, so that a server of the model stops by itself.

    Raises:
        ResidualQuantError: the disk is full or the folder cannot be written; no partial file is left.
    """
    from safetensors.torch import save

    folder = Path(folder)
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    write_atomic(folder / "model.safetensors", save(weights, metadata={"format": "pt"}))
    published_name = ARCHITECTURES[model.config.model_type][2]
    config = {"architectures": [published_name], **model.config.to_dict(), "torch_dtype": "bfloat16"}
    write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        write_atomic(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
        ends = [i for i in map(tokenizer.token_to_id, STOP_TOKENS) if i is not None]
        write_atomic(folder / "generation_config.json", json.dumps({"eos_token_id": ends}, indent=2) + "\n")
    return folder
