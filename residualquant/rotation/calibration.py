"""Calibrate the rotations of whole models (Sec. 3.3, App. G).

Queries, keys and values are captured once and shared by all configurations; the heads of as many loop groups and
layers as fit the memory are then fitted by one tensor program. A processor, which gains nothing from width, takes one
loop group and layer at a time. Memory: as many layers at a time as fit a budget, at least one; each time costs one
forward pass per text.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residualquant.cache import RotationMap, loop_groups
from residualquant.config import KVQuantConfig
from residualquant.errors import check_count
from residualquant.models.base import LoopedModel
from residualquant.rotation.artefact import FORMAT, Artefact, comparable, load_rotations, loss_table
from residualquant.rotation.optr_h import (
    PAPER_SETTINGS,
    Fit,
    OptRHSettings,
    check_seed,
    fit_optr_h,
    gram_of,
    hadamard_start,
    judge,
    losses_of,
    storable,
)
from residualquant.rotation.oscar import fit_oscar
from residualquant.rotation.states import BATCH_VALUES, States, Unit, batches, states_of
from residualquant.trace import captured_bytes, collect

__all__ = [
    "CALIBRATED",
    "PAPER_SIZES",
    "CalibrationSizes",
    "artefact_folder",
    "calibrate",
    "calibrated",
    "calibrated_many",
    "load_rotations",
    "loss_table",
    "output_gram",
    "rotations_hash",
]

CALIBRATED = ("oscar", "optr_h")
CPU_MEMORY = 2 * 2**30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's names of settings of its allocator
CUDA_MEMORY_FRACTION = 0.3

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class CalibrationSizes:
    """How much a calibration looks at; the defaults are the paper's (App. G)."""

    fit: int = 128
    """Training problems to fit with."""
    holdout: int = 128
    """Others, to choose each head's rotation with."""
    steps: int = 80
    """Optimiser steps for K, and as many for V (OptR-H)."""
    seed: int = 0
    """Which problems are which, and the order in which they are drawn."""

    def __post_init__(self) -> None:
        for name, least in (("fit", 1), ("holdout", 1), ("steps", 0)):
            check_count(name, getattr(self, name), least)
        check_seed(self.seed)


PAPER_SIZES = CalibrationSizes()


def calibrated(
    model: LoopedModel,
    config: KVQuantConfig,
    task: str,
    sizes: CalibrationSizes = PAPER_SIZES,
    folder: str | Path | None = None,
    progress: bool = True,
) -> RotationMap:
    """The rotations of one configuration: :func:`calibrated_many` of it alone."""
    return calibrated_many(model, [config], task, sizes, folder, progress)[0]


def calibrated_many(
    model: LoopedModel,
    configs: Sequence[KVQuantConfig],
    task: str,
    sizes: CalibrationSizes = PAPER_SIZES,
    folder: str | Path | None = None,
    progress: bool = True,
    memory_bytes: float | None = None,
) -> list[RotationMap]:
    """The rotations of every configuration: those kept under ``folder``, and the others calibrated and kept there.

    Tasks that share a set of training problems (``evals.texts.calibration_tasks``) share their rotations too. Every
    artefact has a folder of its own, whose name tells model, configuration, texts and sizes apart.

    Args:
        model: a looped model.
        configs: how K and V will be coded; the rotation of each is "oscar" or "optr_h".
        task: any of the tasks whose training problems, with their solutions, to use.
        sizes: how many of them, and how long to fit.
        folder: where the artefacts are kept; ``data/runs/rotations`` when None.
        progress: show a bar, and one line per configuration with its losses before (Hadamard) and after.
        memory_bytes: as for :func:`calibrate`.

    Returns:
        ``{(group, layer, "k" or "v"): Rotation}`` of each configuration, on the model's device, as the engine takes it.

    Raises:
        ValueError: a configuration without calibrated rotation, loops that do not divide, or an unknown task.
        ResidualQuantError: an artefact that is damaged, or of something else; or a model without tokenizer.
    """
    given = _calibration_of(model, task, sizes)
    folders = [_folder(model, cfg, given, folder) for cfg in configs]
    found = calibrate(model, dict(zip(folders, configs)), progress=progress, memory_bytes=memory_bytes, **given)
    return [found[name] for name in folders]


def artefact_folder(
    model: LoopedModel, config: KVQuantConfig, task: str, sizes: CalibrationSizes, folder: str | Path | None = None
) -> Path:
    """Where :func:`calibrated` keeps the rotations of these arguments."""
    return _folder(model, config, _calibration_of(model, task, sizes), folder)


def _calibration_of(model: LoopedModel, task: str, sizes: CalibrationSizes) -> dict[str, Any]:
    """What :func:`calibrate` is given for a task and sizes."""
    from residualquant.evals.texts import calibration_tasks, calibration_texts

    fit_texts, held_out = calibration_texts(model, task, sizes.fit, sizes.holdout, sizes.seed)
    settings = OptRHSettings(steps=sizes.steps, seed=sizes.seed)
    tasks = "+".join(calibration_tasks(model, task))
    return {"fit_texts": fit_texts, "held_out": held_out, "task": tasks, "settings": settings}


def _folder(model: LoopedModel, cfg: KVQuantConfig, given: Mapping[str, Any], folder: str | Path | None) -> Path:
    """A legible name, and another one for another identity."""
    from residualquant.repro.paths import runs_dir

    identity = json.dumps(_identity(model, cfg, **given), sort_keys=True)
    bits = ("" if max(cfg.bits) < 10 else "-").join(map(str, cfg.bits))
    settings = f"{cfg.rotation}.{cfg.reference}.{bits}-g{cfg.group_size}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    parent = runs_dir("rotations") if folder is None else Path(folder)
    return parent / f"{model.name.replace('/', '--')}.{settings}.{digest}"


def calibrate(
    model: LoopedModel,
    configs: Mapping[Path, KVQuantConfig],
    fit_texts: Texts,
    held_out: Texts,
    *,
    task: str = "",
    settings: OptRHSettings = PAPER_SETTINGS,
    progress: bool = True,
    memory_bytes: float | None = None,
) -> dict[Path, RotationMap]:
    """The rotations of every loop group and layer under each configuration, kept in its folder; resumes what is there.

    Args:
        model: a looped model.
        configs: folder of the artefact -> how K and V will be coded; its rotation says what to fit.
        fit_texts, held_out: token ids to fit and to choose with.
        task: what the texts are, for the record.
        settings: of OptR-H; OSCAR has only ``queries`` of them, for its losses.
        progress: as for :func:`calibrated_many`.
        memory_bytes: most memory for captured states, and as much again for fitting on a GPU; 2 GiB on a CPU and 30 %
            of what is free on a GPU when None.

    Raises:
        ValueError: a configuration without calibrated rotation, loops that do not divide, or no texts.
        ResidualQuantError: a folder holds another calibration or a damaged one.
    """
    from tqdm.auto import tqdm

    if not fit_texts or not held_out:
        raise ValueError(f"texts to fit and to choose with are needed, got {len(fit_texts)} and {len(held_out)}")
    _check_ids(model, [*fit_texts, *held_out])
    jobs = []
    for folder, cfg in configs.items():
        identity = _identity(model, cfg, fit_texts, held_out, task, settings)
        groups = _check_config(model, cfg)
        artefact = Artefact.resume(Path(folder), identity, str(model.device))
        units = {(group, layer) for layer in range(model.kv_shape.layers) for group in range(groups)}
        jobs.append(_Job(cfg, artefact, units - artefact.units))
    _keep_freed_memory()
    plan = _Plan(model, jobs, fit_texts, held_out, settings, memory_bytes)
    with tqdm(total=plan.total, desc="calibrate", disable=not progress) as bar:
        for layers in plan.passes:
            fit, chosen = (collect(model, texts, layers, n, bar.update) for texts, n in plan.texts)
            for job in jobs:
                for cfg, units in plan.chunks(job, layers):
                    begun = time.monotonic()
                    gram = torch.cat([output_gram(model, layer) for _, layer in units])
                    parts = ([states_of(t, units, layers, cfg.loops) for t in texts] for texts in (fit, chosen))
                    fits = _fit(*parts, gram, cfg, units, settings, bar.update)
                    job.artefact.add(fits, time.monotonic() - begun)
                if progress and job.todo and layers[-1] == max(plan.layers):
                    bar.write(job.describe())
    return {Path(folder): job.artefact.rotations(model) for folder, job in zip(configs, jobs)}


def output_gram(model: LoopedModel, layer: int) -> Tensor:
    """``W_O W_O^T / d_model`` per query head of one layer, [H, G, D, D] fp32."""
    return gram_of(model.output_weight(layer).detach(), model.kv_shape.kv_heads, model.kv_shape.head_dim)


def rotations_hash(rotations: RotationMap) -> str:
    """sha256 of all matrices and means: what tells two calibrations apart in a record's key."""
    digest = hashlib.sha256()
    for key in sorted(rotations):
        digest.update(repr(key).encode())
        for part in (rotations[key].matrix, rotations[key].means):
            digest.update(b"-" if part is None else part.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for what comes next: fetching it anew at every step is half of a CPU's time."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)


def _check_ids(model: LoopedModel, texts: Texts) -> None:
    """Texts of the model's token ids, none of them empty."""
    known = range(model.config.vocab_size)
    for ids in texts:
        if not len(ids) or (foreign := next((i for i in ids if i not in known), None)) is not None:
            what = f"got {foreign!r}" if len(ids) else "got an empty one"
            raise ValueError(f"texts must hold token ids from 0 to {len(known) - 1}, {what}")


def _check_config(model: LoopedModel, cfg: KVQuantConfig) -> int:
    """Number of loop groups, after checking that there is something to fit."""
    if cfg.rotation not in CALIBRATED or cfg.is_off:
        what = "the BF16 cache" if cfg.is_off else f"rotation={cfg.rotation!r}"
        raise ValueError(f"only rotation='oscar' and rotation='optr_h' are calibrated, got {what}")
    return loop_groups(model.kv_shape, cfg)


def _identity(
    model: LoopedModel, cfg: KVQuantConfig, fit_texts: Texts, held_out: Texts, task: str, settings: OptRHSettings
) -> dict:
    """Everything that decides the rotations."""
    texts = json.dumps([[list(map(int, ids)) for ids in part] for part in (fit_texts, held_out)])
    return {
        "format": FORMAT,
        "model": model.name,
        "weights": model.weights_hash,
        "kv_shape": asdict(model.kv_shape),
        "config": comparable(cfg),
        "task": task,
        "texts": hashlib.sha256(texts.encode()).hexdigest(),
        "fit_texts": len(fit_texts),
        "held_out": len(held_out),
        "settings": asdict(settings),
    }


@dataclass
class _Job:
    """One configuration, its artefact, and the (loop group, layer) units that it still lacks."""

    cfg: KVQuantConfig
    artefact: Artefact
    todo: set[Unit]

    def describe(self) -> str:
        """One line: mean held-out loss of K and V before (Hadamard) and after."""
        parts = []
        for kind in "kv":
            losses = [unit[kind] for unit in self.artefact.about["losses"].values()]
            before, after = (sum(sum(loss[n]) for loss in losses) for n in ("before", "after"))
            count = sum(len(loss["before"]) for loss in losses)
            parts.append(f"{kind.upper()} {before / count:.4g} -> {after / count:.4g}")
        return f"{self.artefact.folder.name}: {', '.join(parts)}"


class _Plan:
    """What is captured and fitted together, within the memory."""

    def __init__(self, model, jobs: Sequence[_Job], fit_texts, held_out, settings: OptRHSettings, memory_bytes):
        self.on_cpu = model.device.type == "cpu"
        if memory_bytes is None:
            free = 0 if self.on_cpu else torch.cuda.mem_get_info(model.device)[0]
            memory_bytes = CPU_MEMORY if self.on_cpu else CUDA_MEMORY_FRACTION * free
        self.memory_bytes, self.shape, self.settings, self.held_out = memory_bytes, model.kv_shape, settings, held_out
        self.longest = max(map(len, (*fit_texts, *held_out)))
        every = any(job.todo and job.cfg.rotation == "oscar" for job in jobs)
        self.texts = ((fit_texts, None if every else settings.queries), (held_out, settings.queries))
        self.layers = sorted({layer for job in jobs for _, layer in job.todo})
        self.query_heads = model.config.num_attention_heads
        each = sum(captured_bytes(self.shape, self.query_heads, *kept) for kept in self.texts)
        count = max(1, int(memory_bytes // each))
        self.passes = [self.layers[i : i + count] for i in range(0, len(self.layers), count)]
        chunks = [cfg for job in jobs for layers in self.passes for cfg, _ in self.chunks(job, layers)]
        steps = sum(2 * settings.steps if cfg.rotation == "optr_h" else 1 for cfg in chunks)
        self.total = len(self.passes) * (len(fit_texts) + len(held_out)) + steps

    def chunks(self, job: _Job, layers: Sequence[int]) -> Iterator[tuple[KVQuantConfig, list[Unit]]]:
        """How units of ``layers`` that the job lacks are coded, and as many of them as fit the memory; one on a CPU."""
        alike: dict[KVQuantConfig, list[Unit]] = {}
        for group, layer in sorted((u for u in job.todo if u[1] in layers), key=lambda u: (u[1], u[0])):
            alike.setdefault(job.cfg.for_layer(layer), []).append((group, layer))
        for cfg, units in alike.items():
            count = 1 if self.on_cpu else max(1, int(self.memory_bytes // self._unit_bytes(cfg)))
            yield from ((cfg, units[i : i + count]) for i in range(0, len(units), count))

    def _unit_bytes(self, cfg: KVQuantConfig) -> float:
        """About what fitting one unit holds: weights of the held-out texts thrice, and a step's intermediates."""
        heads, dim, queries = self.shape.kv_heads, self.shape.head_dim, self.settings.queries
        weights = 3 * len(self.held_out) * queries * self.query_heads * self.longest
        step = 40 * self.settings.batch * self.longest * heads * dim
        return 4 * cfg.loops * (weights + step)


def _fit(
    fit: list[States],
    held_out: list[States],
    gram: Tensor,
    cfg: KVQuantConfig,
    units: Sequence[Unit],
    settings: OptRHSettings,
    done: Callable[[], Any],
) -> dict[Unit, dict[str, Fit]]:
    """The fits of K and V of every unit, whose heads follow each other in the states."""
    if cfg.rotation == "oscar":
        pair = _judged_oscar(fit, held_out, gram, cfg, settings.queries)
        done()
    else:
        pair = fit_optr_h(fit, held_out, gram, cfg, settings, done)
    heads = gram.shape[0] // len(units)
    parts = {unit: slice(i * heads, (i + 1) * heads) for i, unit in enumerate(units)}
    return {unit: {kind: fit.heads(part) for kind, fit in zip("kv", pair)} for unit, part in parts.items()}


def _judged_oscar(fit: list[States], held_out: list[States], gram: Tensor, cfg: KVQuantConfig, queries: int):
    """OSCAR's rotations of K and V, with OptR-H's losses of them and of Hadamard on the held-out texts."""
    most = BATCH_VALUES[gram.device.type]
    start = storable(hadamard_start(gram.shape[0], gram.shape[-1], gram.device))
    key, value = map(storable, fit_oscar(batches(fit, most), cfg))
    texts = batches([s.last(queries) for s in held_out], most)
    of_key, read_weights, of_value = losses_of(gram, cfg)
    before = judge(start, None, of_key, texts, None, 0).after
    key = judge(key, None, of_key, texts, before, 0)
    texts = [(states, read_weights(states, key)) for states in texts]
    before = judge(start, None, of_value, texts, None, 0).after
    return key, judge(value, None, of_value, texts, before, 0)
