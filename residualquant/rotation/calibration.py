"""Calibrate the rotations of a whole model, and keep them (Sec. 3.3, App. G).

An artefact is a folder: ``rotations.safetensors`` (orthogonal matrices in FP16, means in FP32) and ``calibration.json``
(model, weights, configuration, texts, settings, held-out losses before and after). Both are written after every layer,
so a calibration that was interrupted goes on with the next one. Memory: as many layers at a time as fit a budget, at
least one; each time costs one forward pass per text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.cache import RotationMap, loop_groups
from residualquant.config import KVQuantConfig
from residualquant.errors import ResidualQuantError
from residualquant.repro.paths import show, write_atomic
from residualquant.rotation import Rotation
from residualquant.rotation.optr_h import (
    PAPER_SETTINGS,
    Fit,
    OptRHSettings,
    fit_optr_h,
    gram_of,
    hadamard_start,
    judge,
    losses_of,
    storable,
)
from residualquant.rotation.oscar import fit_oscar
from residualquant.rotation.states import States, collect_states, layer_bytes

if TYPE_CHECKING:
    from residualquant.models import Ouro

FORMAT = 1
CALIBRATED = ("oscar", "optr_h")
ROTATIONS_FILE, ABOUT_FILE = "rotations.safetensors", "calibration.json"
CPU_MEMORY = 2 * 2**30
CUDA_MEMORY_FRACTION = 0.3

Texts = Sequence[Sequence[int]]


def calibrate(
    model: Ouro,
    cfg: KVQuantConfig,
    fit_texts: Texts,
    held_out: Texts,
    out: str | Path,
    *,
    task: str = "",
    settings: OptRHSettings = PAPER_SETTINGS,
    progress: bool = True,
    memory_bytes: int | None = None,
) -> RotationMap:
    """The rotations of every loop group and layer, fitted and kept in the folder ``out``; resumes what is there.

    Args:
        model: a looped model.
        cfg: how K and V will be coded; its rotation says what to fit.
        fit_texts, held_out: token ids to fit and to choose with.
        out: folder of the artefact.
        task: what the texts are, for the record.
        settings: of OptR-H; OSCAR has only ``queries`` of them, for its losses.
        progress: show a bar, and one line per layer with its losses before (Hadamard) and after.
        memory_bytes: most memory for Q, K and V; 2 GiB on a CPU and 30 % of what is free on a GPU when None.

    Returns:
        ``{(group, layer, "k" or "v"): Rotation}``, as the engine takes it.

    Raises:
        ValueError: a configuration without calibrated rotation, or no texts.
        ResidualQuantError: ``out`` holds another calibration or a damaged one.
    """
    from tqdm.auto import tqdm

    groups = _check_request(model, cfg, fit_texts, held_out)
    artefact = _Artefact.resume(Path(out), _identity(model, cfg, fit_texts, held_out, task, settings))
    passes = list(_passes(model, cfg, fit_texts, held_out, artefact.layers, settings, memory_bytes))
    steps = 2 * settings.steps if cfg.rotation == "optr_h" else 1
    total = len(passes) * (len(fit_texts) + len(held_out)) + sum(map(len, passes)) * groups * steps
    with tqdm(total=total, desc=f"calibrate {cfg.rotation}", disable=not progress) as bar:
        for layers in passes:
            every = None if cfg.rotation == "oscar" else settings.queries
            fit = collect_states(model, fit_texts, layers, every, bar.update)
            chosen = collect_states(model, held_out, layers, settings.queries, bar.update)
            for layer in layers:
                begun = time.monotonic()
                states = fit.pop(layer), chosen.pop(layer)
                fits = _fit_layer(*states, output_gram(model, layer), cfg, groups, settings, bar.update)
                artefact.add(layer, fits, time.monotonic() - begun)
                if progress:
                    bar.write(describe_layer(layer, artefact.about["losses"][str(layer)]))
    return artefact.rotations(model)


def output_gram(model: Ouro, layer: int) -> Tensor:
    """``W_O W_O^T / d_model`` per query head of one layer, [H, G, D, D] fp32.

    A model whose output projection has another name gives it as ``model.output_weight(layer)``.
    """
    if hasattr(model, "output_weight"):
        weight = model.output_weight(layer)
    else:
        weight = model.model.layers[layer].self_attn.o_proj.weight
    return gram_of(weight.detach(), model.kv_shape.kv_heads, model.kv_shape.head_dim)


def _check_request(model: Ouro, cfg: KVQuantConfig, fit_texts: Texts, held_out: Texts) -> int:
    """Number of loop groups, after checking that there is something to fit."""
    if cfg.rotation not in CALIBRATED or cfg.is_off:
        what = "the BF16 cache" if cfg.is_off else f"rotation={cfg.rotation!r}"
        raise ValueError(f"only rotation='oscar' and rotation='optr_h' are calibrated, got {what}")
    if not fit_texts or not held_out:
        raise ValueError(f"texts to fit and to choose with are needed, got {len(fit_texts)} and {len(held_out)}")
    return loop_groups(model.kv_shape, cfg)


def _passes(model, cfg, fit_texts, held_out, finished, settings, memory_bytes) -> Iterator[list[int]]:
    """The layers still to do, as many together as fit the memory."""
    if memory_bytes is None:
        cuda = model.device.type == "cuda"
        memory_bytes = CUDA_MEMORY_FRACTION * torch.cuda.mem_get_info(model.device)[0] if cuda else CPU_MEMORY
    each = layer_bytes(model, fit_texts, None if cfg.rotation == "oscar" else settings.queries)
    each += layer_bytes(model, held_out, settings.queries)
    todo = [layer for layer in range(model.kv_shape.layers) if layer not in finished]
    count = max(1, int(memory_bytes // each))
    return (todo[start : start + count] for start in range(0, len(todo), count))


def _fit_layer(
    fit: list[States],
    held_out: list[States],
    gram: Tensor,
    cfg: KVQuantConfig,
    groups: int,
    settings: OptRHSettings,
    done: Callable[[], None],
) -> dict[tuple[int, str], Fit]:
    fits = {}
    for group in range(groups):
        parts = ([s.group(group, cfg.loops) for s in states] for states in (fit, held_out))
        if cfg.rotation == "oscar":
            pair = _judged_oscar(*parts, gram, cfg, settings.queries)
            done()
        else:
            pair = fit_optr_h(*parts, gram, cfg, settings, done)
        fits |= {(group, "k"): pair[0], (group, "v"): pair[1]}
    return fits


def _judged_oscar(fit: list[States], held_out: list[States], gram: Tensor, cfg: KVQuantConfig, queries: int):
    """OSCAR's rotations of K and V, with OptR-H's losses of them and of Hadamard on the held-out texts."""
    start = storable(hadamard_start(*fit[0].k.shape[1::2], gram.device))
    key, value = map(storable, fit_oscar(fit, cfg))
    of_key, of_value_after = losses_of([s.last(queries) for s in held_out], gram, cfg)
    texts = range(len(held_out))
    before = judge(start, None, of_key, texts, None, 0).after
    key = judge(key, None, of_key, texts, before, 0)
    of_value = of_value_after(key)
    before = judge(start, None, of_value, texts, None, 0).after
    return key, judge(value, None, of_value, texts, before, 0)


def describe_layer(layer: int, losses: dict) -> str:
    """One line per loop group of a layer, K and V: held-out loss of each head before (Hadamard) and after."""
    lines = []
    for name, loss in losses.items():
        group, kind = name.split(".")
        heads = (f"{a:.4g} -> {b:.4g}" for a, b in zip(loss["before"], loss["after"]))
        lines.append(f"layer {layer + 1}, loop group {int(group) + 1}, {kind.upper()}: {', '.join(heads)}")
    return "\n".join(lines)


def loss_table(folder: str | Path) -> list[dict]:
    """One row per layer, loop group, K or V and head of a calibration: held-out loss before and after, and the step.

    Raises:
        ResidualQuantError: no calibration, or a damaged one.
    """
    rows = []
    for layer, parts in _Artefact.read(Path(folder)).about["losses"].items():
        for name, loss in parts.items():
            group, kind = name.split(".")
            for head, (before, after, step) in enumerate(zip(loss["before"], loss["after"], loss["step"])):
                place = {"layer": int(layer) + 1, "loop group": int(group) + 1, "of": kind.upper(), "head": head + 1}
                change = f"{100 * (after / before - 1):+.1f} %" if before else ""
                rows.append(
                    place | {"Hadamard": f"{before:.4g}", "after": f"{after:.4g}", "change": change, "step": step}
                )
    return rows


def _comparable(cfg: KVQuantConfig) -> dict:
    """What of a configuration a rotation depends on: BF16 windows do not count."""
    return replace(cfg, sink_tokens=0, recent_tokens=0).to_dict()


def _identity(model, cfg, fit_texts, held_out, task, settings) -> dict:
    """Everything that decides the rotations."""
    texts = json.dumps([[list(map(int, ids)) for ids in part] for part in (fit_texts, held_out)])
    return {
        "format": FORMAT,
        "model": model.name,
        "weights": model.weights_hash,
        "kv_shape": asdict(model.kv_shape),
        "config": _comparable(cfg),
        "task": task,
        "texts": hashlib.sha256(texts.encode()).hexdigest(),
        "fit_texts": len(fit_texts),
        "held_out": len(held_out),
        "settings": asdict(settings),
    }


def _fingerprint(about: Mapping) -> str:
    """Hash of an identity; ties the two files of an artefact together."""
    identity = {k: v for k, v in about.items() if k not in ("losses", "seconds", "provenance")}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


@dataclass
class _Artefact:
    """The two files of a calibration, whole or in the making."""

    folder: Path
    about: dict
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def resume(cls, folder: Path, identity: dict) -> _Artefact:
        """What ``folder`` holds of the calibration ``identity``; an empty artefact where it holds none."""
        from residualquant.repro.provenance import provenance

        if not (folder / ABOUT_FILE).exists():
            return cls(folder, {**identity, "losses": {}, "seconds": {}, "provenance": provenance()})
        found = cls.read(folder)
        wrong = [name for name in identity if found.about.get(name) != identity[name]]
        if wrong:
            raise ResidualQuantError(
                f"{show(folder)} holds a calibration with another {wrong[0]} "
                f"({found.about.get(wrong[0])!r}): give another folder or remove it"
            )
        return found

    @classmethod
    def read(cls, folder: Path) -> _Artefact:
        """The artefact in ``folder``, without the layers that only one of its files knows.

        Raises:
            ResidualQuantError: a file is absent or damaged, or the two are of different calibrations.
        """
        from safetensors import SafetensorError, safe_open

        try:
            about = json.loads((folder / ABOUT_FILE).read_text())
            with safe_open(folder / ROTATIONS_FILE, framework="pt") as file:
                same = (file.metadata() or {}).get("calibration") == _fingerprint(about)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = {name: x for name, x in tensors.items() if name.split(".")[1] in about["losses"]}
        except FileNotFoundError as error:
            raise ResidualQuantError(f"{show(folder)} holds no calibration: run `residualquant calibrate`") from error
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ResidualQuantError(f"the calibration in {show(folder)} is damaged: {error}") from error
        if not same:
            raise ResidualQuantError(f"the files in {show(folder)} belong to two different calibrations")
        return cls(folder, about, known)

    @property
    def layers(self) -> set[int]:
        """The layers that are finished."""
        return {int(name.split(".")[1]) for name in self.tensors}

    def add(self, layer: int, fits: dict[tuple[int, str], Fit], seconds: float) -> None:
        """Keep one layer's fits and write both files, the matrices first."""
        from safetensors.torch import save

        losses = {}
        for (group, kind), fit in fits.items():
            self.tensors[f"{group}.{layer}.{kind}.matrix"] = fit.matrix.cpu().contiguous()
            if fit.means is not None:
                self.tensors[f"{group}.{layer}.{kind}.means"] = fit.means.cpu().contiguous()
            losses[f"{group}.{kind}"] = {name: getattr(fit, name).tolist() for name in ("before", "after", "step")}
        self.about["losses"][str(layer)] = losses
        self.about["seconds"][str(layer)] = round(seconds, 2)
        stored = save(dict(sorted(self.tensors.items())), {"calibration": _fingerprint(self.about)})
        write_atomic(self.folder / ROTATIONS_FILE, stored)
        write_atomic(self.folder / ABOUT_FILE, json.dumps(self.about, indent=1) + "\n")

    def rotations(self, model: Ouro) -> RotationMap:
        """The rotations of all loop groups and layers, on the model's device, after checking that they fit it.

        Raises:
            ResidualQuantError: a layer is missing, or a matrix is not orthogonal or has another shape.
        """
        shape, loops = model.kv_shape, len(self.about["config"]["bits"])
        found: RotationMap = {}
        for group in range(shape.loops // loops):
            for layer in range(shape.layers):
                for kind in "kv":
                    name = f"{group}.{layer}.{kind}"
                    if f"{name}.matrix" not in self.tensors:
                        where = f"layer {layer + 1} is missing in {show(self.folder)}"
                        raise ResidualQuantError(f"{where}: run `residualquant calibrate` again to finish it")
                    found[group, layer, kind] = self._rotation(name, shape, loops, model.device)
        return found

    def _rotation(self, name: str, shape, loops: int, device: torch.device) -> Rotation:
        matrix, means = self.tensors[f"{name}.matrix"], self.tensors.get(f"{name}.means")
        heads, dim = shape.kv_heads, shape.head_dim
        try:
            if tuple(matrix.shape) != (heads, dim, dim) or (means is not None and means.shape != (loops, heads, dim)):
                raise ValueError(f"its shape does not fit {heads} heads of {dim} channels and {loops} loops")
            if means is not None and not torch.isfinite(means).all():
                raise ValueError("its means are not finite")
            return Rotation(matrix.to(device), None if means is None else means.to(device))
        except ValueError as error:
            raise ResidualQuantError(f"rotation {name} in {show(self.folder)} cannot be used: {error}") from error


def load_rotations(folder: str | Path, model: Ouro, cfg: KVQuantConfig) -> RotationMap:
    """The rotations kept in ``folder``, for the model and the configuration they were calibrated for.

    (To code with a policy that borrows another one's rotations, as the paper's Next-loop does Last-loop's, load them
    for the configuration they are of and give them to the engine with the other.)

    Returns:
        ``{(group, layer, "k" or "v"): Rotation}``, on the model's device.

    Raises:
        ResidualQuantError: no calibration, a damaged or unfinished one, or one of another model, shape or
            configuration.
    """
    from residualquant.models.base import KVShape

    artefact = _Artefact.read(Path(folder))
    about, where = artefact.about, show(Path(folder))
    if about.get("format") != FORMAT:
        raise ResidualQuantError(f"{where} has format {about.get('format')!r}, this version reads {FORMAT}")
    if about["weights"] != model.weights_hash:
        raise ResidualQuantError(
            f"{where} was calibrated for {about['model']} (weights {about['weights'][:12]}), "
            f"not for {model.name} (weights {model.weights_hash[:12]})"
        )
    if about["kv_shape"] != asdict(model.kv_shape):
        raise ResidualQuantError(f"{where} is of a cache of {KVShape(**about['kv_shape'])}, not {model.kv_shape}")
    wanted = _comparable(cfg)
    wrong = [name for name in wanted if about["config"].get(name) != wanted[name]]
    if wrong:
        raise ResidualQuantError(
            f"{where} was calibrated for {wrong[0]}={about['config'].get(wrong[0])!r}, "
            f"the configuration has {wanted[wrong[0]]!r}"
        )
    return artefact.rotations(model)


def rotations_hash(rotations: RotationMap) -> str:
    """sha256 of all matrices and means: what tells two calibrations apart in a record's key."""
    digest = hashlib.sha256()
    for key in sorted(rotations):
        digest.update(repr(key).encode())
        for part in (rotations[key].matrix, rotations[key].means):
            digest.update(b"-" if part is None else part.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
