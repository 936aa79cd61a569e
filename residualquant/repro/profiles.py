"""What a run computes, in four sizes. A profile is data: everything it decides is a field.

``smoke`` shows in minutes that everything works; ``mini`` (the default) is sized for a 2-core CPU; ``full`` runs the
same mini models on one GPU with enough problems to tell the methods apart; ``paper`` names the paper's own models and
benchmarks. Every output path contains the profile's name.

A *cell* is (family of models, task, KV configuration). A profile's cells are those of all its labels together
(:mod:`residualquant.repro.labels`), each once: ``Profile.plan`` says which, ``Profile.n_of`` on how many problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import MappingProxyType

from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.evals.benchmarks import BENCHMARKS
from residualquant.evals.tasks import MODELS, STANDS_FOR, TASKS
from residualquant.repro.labels import BF16, FAMILIES, FIGURE1_CONFIGS, LABELS, Line, direct_of, lines
from residualquant.repro.markup import counted

Place = tuple[str, str]  # (family of models, task)
Plan = Mapping[Place, tuple[KVQuantConfig, ...]]  # the configurations measured there


@dataclass(frozen=True)
class Profile:
    """Size, place and models of one run.

    Attributes:
        problems: {family: {task: n}}, the problems of a cell.
        only: {(family, task): configurations}: nothing else is computed; None: everything.
        calibration: texts to fit rotations with, held-out texts, and optimiser steps.
        texts: problems of the analyses without generation (Table 1, Figure 3).
        processes: how many compute the answers at a time; two of one thread are faster than one of two.
        models: {family: {task: checkpoint}}.
        stands_for: {task: the paper's benchmark}.
        cost: in words, where no run is committed.
    """

    name: str
    problems: Mapping[str, Mapping[str, int]]
    only: Mapping[Place, tuple[KVQuantConfig, ...]] | None = None
    calibration: Mapping[str, int] = field(default_factory=lambda: {"fit": 128, "holdout": 128, "steps": 80})
    texts: int = 512
    device: str = "cpu"
    processes: int = 1
    seed: int = 0
    models: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MODELS)
    stands_for: Mapping[str, str] = field(default_factory=lambda: STANDS_FOR)
    cost: str = ""

    def task_for(self, benchmark: str) -> str:
        """The task that stands for one of the paper's benchmarks."""
        return next(task for task, name in self.stands_for.items() if name == benchmark)

    def model_name(self, place: Place) -> str:
        """Name of the model of (family, task), without its owner."""
        family, task = place
        return self.models[family][task].split("/")[-1]

    def place_of(self, line: Line) -> Place:
        """(family, task) on which a line is measured."""
        return line.family, self.task_for(line.benchmark)

    def n_of(self, place: Place) -> int:
        """Problems of every cell there, 0 where nothing is measured."""
        family, task = place
        return self.problems.get(family, {}).get(task, 0)

    @cached_property
    def plan(self) -> Plan:
        """Every cell of the profile."""
        plan: dict[Place, list[KVQuantConfig]] = {}
        for label in LABELS:
            for line in lines(label):
                place = self.place_of(line)
                if self.n_of(place) and (self.only is None or line.config in self.only.get(place, ())):
                    plan.setdefault(place, []).append(line.config)
        return MappingProxyType({place: tuple(dict.fromkeys(configs)) for place, configs in plan.items()})

    def cells_of(self, labels: Iterable[str]) -> Plan:
        """The part of the plan that ``labels`` show, with what their rows are tested against."""
        wanted = {
            (self.place_of(line), config)
            for label in labels
            for line in lines(label)
            for config in (line.config, direct_of(line.config), BF16)
        }
        part = {place: tuple(c for c in configs if (place, c) in wanted) for place, configs in self.plan.items()}
        return {place: configs for place, configs in part.items() if configs}

    def describe(self) -> str:
        """ "Ouro: words 100, …; Huginn: …; 215 cells": the profile's size in one line."""
        sizes = (
            f"{family.capitalize()}: {', '.join(f'{task} {n}' for task, n in tasks.items())}"
            for family, tasks in self.problems.items()
        )
        return f"{'; '.join(sizes)}; {counted(sum(map(len, self.plan.values())), 'cell')}"

    def to_dict(self) -> dict:
        return {**asdict(self), "only": None if self.only is None else sorted(map(repr, self.only.items()))}

    def check(self, places: Iterable[Place] | None = None) -> None:
        """Whether this machine can run the profile, or the ``places`` of it.

        Raises:
            ResidualQuantError: no GPU where the profile wants one, or models and benchmarks that are not here.
        """
        import torch

        places = list(self.plan if places is None else places)
        lacks = []
        if self.device == "cuda" and not torch.cuda.is_available():
            lacks.append("a CUDA GPU (none is visible to torch)")
        lacks += [_lack_of_model(m) for m in dict.fromkeys(self.models[family][task] for family, task in places)]
        foreign = [task for task in dict.fromkeys(task for _, task in places) if task not in TASKS]
        if foreign:
            lacks.append(f"evaluation on the benchmarks {', '.join(foreign)} (not in this version)")
        if lacks := [lack for lack in lacks if lack]:
            raise ResidualQuantError(
                f"profile {self.name!r} cannot run here, it lacks: {'; '.join(lacks)} "
                f"(`make tables PROFILE={self.name}` reads records that are there)"
            )


def _lack_of_model(name: str) -> str:
    from residualquant.models.loading import HUB_REVISIONS
    from residualquant.repro.paths import models_dir, show

    if "/" in name:
        from huggingface_hub import try_to_load_from_cache

        revision = HUB_REVISIONS.get(name)
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        return "" if isinstance(cached, str) else f"the checkpoint {name} at revision {(revision or 'main')[:7]}"
    folder = models_dir() / name
    here = (folder / "config.json").is_file()
    return "" if here else f"the checkpoint {show(folder)} (`residualquant train` makes it)"


def _sizes(maths: int, code: int) -> dict[str, int]:
    return dict(zip(TASKS, (maths, maths, code, code)))


def _smoke_cells() -> dict[Place, tuple[KVQuantConfig, ...]]:
    """Figure 1's steps where it is measured, both calibrated rotations, and two cells of every other column."""
    few = BF16, preset("INT2 g=32", reference="direct"), preset("INT2/4 g=32")
    cells = {(family, task): few for family in FAMILIES for task in TASKS}
    cells["ouro", "algebra"] = (*FIGURE1_CONFIGS.values(), *few, preset("INT2 g=16", rotation="oscar"))
    cells["huginn", "words"] = (*few, preset("INT2/4 g=32", loops=16))
    return {place: tuple(dict.fromkeys(configs)) for place, configs in cells.items()}


_PAPER_SIZES = {"gsm8k": 1319, "math500": 500, "humaneval": 164, "mbpp": 378}
PROFILES = {
    p.name: p
    for p in (
        Profile(
            "smoke",
            {"ouro": _sizes(8, 8), "huginn": _sizes(2, 2)},
            only=_smoke_cells(),
            calibration={"fit": 2, "holdout": 2, "steps": 2},
            texts=4,
            processes=2,
            cost="some four minutes on 2 CPU cores",
        ),
        Profile(
            "mini",
            {"ouro": _sizes(100, 100), "huginn": _sizes(100, 100) | {"algebra": 50}},
            calibration={"fit": 64, "holdout": 32, "steps": 40},
            texts=100,
            processes=2,
            cost="hours on 2 CPU cores",
        ),
        Profile(
            "full",
            {"ouro": _sizes(800, 400), "huginn": _sizes(400, 400)},
            device="cuda",
            cost="a quarter of an hour on one H200, then minutes of scoring on a CPU",
        ),
        Profile(
            "paper",
            {"ouro": _PAPER_SIZES, "huginn": _PAPER_SIZES},
            device="cuda",
            models={
                "ouro": dict.fromkeys(BENCHMARKS, "ByteDance/Ouro-1.4B"),
                "huginn": dict.fromkeys(BENCHMARKS, "tomg-group-umd/huginn-0125"),
            },
            stands_for={b: b for b in BENCHMARKS},
            cost="declared; not runnable in this version",
        ),
    )
}


def profile_of(profile: str | Profile) -> Profile:
    """The profile of that name (a Profile passes through).

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(profile, Profile):
        return profile
    if not isinstance(profile, str) or profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    return PROFILES[profile]
