"""What a calibration leaves: a folder with ``rotations.safetensors`` and ``calibration.json``.

The matrices are orthogonal and in FP16, the means in FP32; the JSON says what they are of (model, weights,
configuration, texts, settings) and gives the held-out losses before and after. Both files are written after every
chunk of (loop group, layer) units, so a calibration that was interrupted goes on with the next one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.cache import RotationMap
from residualquant.config import KVQuantConfig
from residualquant.errors import ResidualQuantError, check_type
from residualquant.repro.paths import parse_json, show, write_atomic
from residualquant.rotation import Rotation
from residualquant.rotation.optr_h import Fit
from residualquant.rotation.states import Unit

if TYPE_CHECKING:
    from residualquant.models.base import KVShape, LoopedModel

FORMAT = 2
ROTATIONS_FILE, ABOUT_FILE = "rotations.safetensors", "calibration.json"


def comparable(cfg: KVQuantConfig) -> dict:
    """What of a configuration a rotation depends on: BF16 windows do not count."""
    check_type("a configuration", cfg, KVQuantConfig)
    return replace(cfg, sink_tokens=0, recent_tokens=0).to_dict()


def loss_table(folder: str | Path) -> list[dict]:
    """One row per layer, loop group, K or V and head of a calibration: held-out loss before and after, and the step.

    Raises:
        ResidualQuantError: no calibration, or a damaged one.
    """
    rows = []
    for unit, kinds in Artefact.read(Path(folder)).about["losses"].items():
        group, layer = map(int, unit.split("."))
        for kind, loss in kinds.items():
            for head, (before, after, step) in enumerate(zip(loss["before"], loss["after"], loss["step"])):
                place = {"layer": layer + 1, "loop group": group + 1, "of": kind.upper(), "head": head + 1}
                change = f"{100 * (after / before - 1):+.1f} %" if before else ""
                rows.append(
                    place | {"Hadamard": f"{before:.4g}", "after": f"{after:.4g}", "change": change, "step": step}
                )
    return rows


def _fingerprint(about: Mapping) -> str:
    """Hash of an identity; ties the two files of an artefact together."""
    identity = {k: v for k, v in about.items() if k not in ("losses", "seconds", "provenance")}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


@dataclass
class Artefact:
    """The two files of a calibration, whole or in the making."""

    folder: Path
    about: dict
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def resume(cls, folder: Path, identity: dict, device: str) -> Artefact:
        """What ``folder`` holds of the calibration ``identity``; an empty artefact where it holds none."""
        from residualquant.repro.provenance import provenance

        if not (folder / ABOUT_FILE).exists():
            return cls(folder, {**identity, "losses": {}, "seconds": 0.0, "provenance": provenance(device)})
        found = cls.read(folder)
        wrong = [name for name in identity if found.about.get(name) != identity[name]]
        if wrong:
            raise ResidualQuantError(
                f"{show(folder)} holds a calibration with another {wrong[0]} "
                f"({found.about.get(wrong[0])!r}): give another folder or remove it"
            )
        return found

    @classmethod
    def read(cls, folder: Path) -> Artefact:
        """The artefact in ``folder``, without the units that only one of its files knows.

        Raises:
            ResidualQuantError: a file is absent or damaged, or the two are of different calibrations.
        """
        from safetensors import SafetensorError, safe_open

        try:
            about = parse_json((folder / ABOUT_FILE).read_bytes())
            with safe_open(folder / ROTATIONS_FILE, framework="pt") as file:
                same = (file.metadata() or {}).get("calibration") == _fingerprint(about)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = {name: x for name, x in tensors.items() if name.rsplit(".", 2)[0] in about["losses"]}
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ResidualQuantError(f"{show(folder)} holds no calibration: run `residualquant calibrate`") from error
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ResidualQuantError(f"the calibration in {show(folder)} is damaged: {error}") from error
        if not same:
            raise ResidualQuantError(f"the files in {show(folder)} belong to two different calibrations")
        return cls(folder, about, known)

    @property
    def units(self) -> set[Unit]:
        """The (loop group, layer) pairs that are finished."""
        names = (name.split(".") for name in self.tensors)
        return {(int(group), int(layer)) for group, layer, *_ in names}

    def add(self, fits: Mapping[Unit, Mapping[str, Fit]], seconds: float) -> None:
        """Keep the fits of some units, by "k" and "v", and write both files, the matrices first."""
        from safetensors.torch import save

        for (group, layer), kinds in fits.items():
            unit = f"{group}.{layer}"
            for kind, fit in kinds.items():
                self.tensors[f"{unit}.{kind}.matrix"] = fit.matrix.cpu().contiguous()
                if fit.means is not None:
                    self.tensors[f"{unit}.{kind}.means"] = fit.means.cpu().contiguous()
            self.about["losses"][unit] = {
                kind: {name: getattr(fit, name).tolist() for name in ("before", "after", "step")}
                for kind, fit in kinds.items()
            }
        self.about["seconds"] = round(self.about["seconds"] + seconds, 2)
        stored = save(dict(sorted(self.tensors.items())), {"calibration": _fingerprint(self.about)})
        write_atomic(self.folder / ROTATIONS_FILE, stored)
        write_atomic(self.folder / ABOUT_FILE, json.dumps(self.about, indent=1) + "\n")

    def rotations(self, model: LoopedModel) -> RotationMap:
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
                        where = f"loop group {group + 1} of layer {layer + 1} is missing in {show(self.folder)}"
                        raise ResidualQuantError(f"{where}: run `residualquant calibrate` again to finish it")
                    found[group, layer, kind] = self._rotation(name, shape, loops, model.device)
        return found

    def _rotation(self, name: str, shape: KVShape, loops: int, device: torch.device) -> Rotation:
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


def keep_rotations(folder: str | Path, model: LoopedModel, cfg: KVQuantConfig, rotations: RotationMap) -> None:
    """Write ``rotations`` to ``folder`` for a model and a configuration, as :func:`load_rotations` reads them there.

    Without losses or texts: a copy for another process, not a calibration to go on with.
    """
    about = {
        "format": FORMAT,
        "model": model.name,
        "weights": model.weights_hash,
        "kv_shape": asdict(model.kv_shape),
        "config": comparable(cfg),
        "seconds": 0.0,
        "losses": {},
    }
    fits: dict[Unit, dict[str, Fit]] = {}
    for (group, layer, kind), given in rotations.items():
        none = torch.empty(0)
        fits.setdefault((group, layer), {})[kind] = Fit(given.matrix, given.means, none, none, none)
    Artefact(Path(folder), about).add(fits, 0.0)


def load_rotations(folder: str | Path, model: LoopedModel, cfg: KVQuantConfig) -> RotationMap:
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

    artefact = Artefact.read(Path(folder))
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
    wanted, has = comparable(cfg), about["config"]
    wrong = [name for name in {**wanted, **has} if has.get(name) != wanted.get(name)]
    if wrong:
        raise ResidualQuantError(
            f"{where} was calibrated for {wrong[0]}={has.get(wrong[0])!r}, "
            f"the configuration has {wanted.get(wrong[0])!r}"
        )
    return artefact.rotations(model)
