"""The measured cells of a profile: read from its records, or computed where they are missing.

Computing can be split between processes or machines: part i of k takes every k-th configuration of each model (so no
rotation is calibrated twice) and keeps records of its own, which ``collect_cells`` brings together. Scoring can be left
to another machine: answers without a score stay open until ``collect_cells`` scores them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from subprocess import Popen

from residualquant.config import KVQuantConfig
from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.cost import TIMING, collect_timings, timed
from residualquant.repro.labels import LABELS
from residualquant.repro.markup import counted
from residualquant.repro.profiles import Place, Plan, Profile, profile_of
from residualquant.repro.provenance import cores
from residualquant.repro.records import Cell, Records, Writer, finished_name, list_records, read_records

Cells = dict[tuple[str, str, KVQuantConfig], Cell]
CPU_MEMORY_GIB = 6  # for the caches of all processes together
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def records_name(profile: Profile, place: Place) -> str:
    """Plain name of the records of (family, task): ``<model>.<task>.jsonl``."""
    return f"{profile.model_name(place)}.{place[1]}.jsonl"


def read_cells(profile: str | Profile, labels: Iterable[str] = LABELS) -> Cells:
    """{(family, task, configuration): cell} of what ``labels`` show, from the records, running no model.

    A cell without all its answers and scores is left out; :func:`coverage` says how many are.

    Raises:
        ResidualQuantError: not one of the cells is there, or a record line is damaged.
    """
    profile = profile_of(profile)
    labels, found = list(labels), {}
    plan = profile.cells_of(labels)
    for place, wanted in plan.items():
        records = read_records(paths.shipped_records_dir(profile.name) / records_name(profile, place))
        for config in wanted:
            if cell := _complete(records, profile, place, config):
                found[*place, config] = cell
    if plan and not found:
        raise ResidualQuantError(f"no cell of {', '.join(labels)} is measured; {_remedy(profile)} computes them")
    return found


def _complete(records: Records, profile: Profile, place: Place, config: KVQuantConfig) -> Cell | None:
    """The newest complete cell asked for (there can be one per calibration of its rotations)."""
    asked = {"task": place[1], "n": profile.n_of(place), "seed": profile.seed, "kv": config.to_dict()}
    matching = (c for c in records.cells.values() if all(c.identity.get(name) == v for name, v in asked.items()))
    return max((c for c in matching if c.is_complete), key=lambda c: c.provenance["date"], default=None)


def coverage(profile: str | Profile, labels: Iterable[str] = LABELS) -> str:
    """"30 of 73 cells measured; …" where the records lack cells of ``labels``, else nothing.

    Raises:
        ResidualQuantError: as for :func:`read_cells`.
    """
    profile, labels = profile_of(profile), list(labels)
    there, wanted = len(read_cells(profile, labels)), sum(map(len, profile.cells_of(labels).values()))
    return "" if there == wanted else f"{there} of {wanted} cells measured; {_remedy(profile)} computes the rest"


def _remedy(profile: Profile) -> str:
    if profile.name == "paper":
        return "nothing in this version"
    return f"`make reproduce PROFILE={profile.name}`"


# ------------------------------------------------------------------------------------------------ compute


def compute_cells(
    profile: str | Profile,
    labels: Iterable[str] = LABELS,
    *,
    models: Iterable[str] = (),
    tasks: Iterable[str] = (),
    part: tuple[int, int] | None = None,
    memory_bytes: int | None = None,
    score: bool = True,
    progress: bool = True,
) -> None:
    """Bring the records up to date: whatever answer is missing is computed, model by model and task by task.

    All configurations of a task are decoded together; calibrated rotations stay in ``data/runs/<profile>/rotations``.
    What every step took is beside the records, in ``timing.csv`` (:mod:`residualquant.repro.cost`).

    Args:
        labels: whose cells.
        models, tasks: only these; all when empty.
        part: (i, k): only the i-th of k parts, from 1, into records of its own (see :func:`collect_cells`).
        memory_bytes: most memory for caches and captured states, for a device shared with others; the engine's and the
            calibration's own defaults when None.
        score: False leaves the answers unscored.

    Raises:
        ValueError: an unknown model or task, or a part that is not 1 … k.
        ResidualQuantError: the profile cannot run here, another run writes the same records, or the disk is full.
    """
    from residualquant.models import load_model

    profile = profile_of(profile)
    plan = _chosen(profile, profile.cells_of(labels), list(models), list(tasks))
    profile.check(plan)
    mine, folder = _share(profile, part)
    for name, places in _by_model(profile, plan).items():
        model = load_model(name, device=profile.device)
        for place in places:
            if configs := [c for c in plan[place] if c in mine[name]]:
                _evaluate(profile, model, place, configs, folder, memory_bytes, score, progress)


def compute_all_cells(profile: str | Profile) -> None:
    """:func:`compute_cells` of all labels, of a profile without records by as many processes as it says.

    They share the machine: its cores, and ``CPU_MEMORY_GIB`` for their caches. A run that was cut off goes on, where
    there are fewer cores than before in this process alone.

    Raises:
        ResidualQuantError: as there, or one of the processes failed, which has said why itself.
    """
    profile = profile_of(profile)
    begun = any(map(Path.is_dir, _own_parts(profile)))
    if 1 < profile.processes <= cores() and (begun or not list_records(paths.records_dir(profile.name))):
        _run_parts(profile, profile.processes)
        begun = True
    if begun:
        for _ in collect_cells(profile):
            pass
        remove_parts(profile)
    compute_cells(profile)


def remove_parts(profile: Profile) -> None:
    """Remove what :func:`compute_all_cells` left when it was cut off."""
    for folder in filter(Path.is_dir, _own_parts(profile)):
        shutil.rmtree(folder)


def _own_parts(profile: Profile) -> list[Path]:
    """Folders of the parts of :func:`compute_all_cells`; none where one process computes everything."""
    count = profile.processes
    return [_part_folder(profile, i, count) for i in range(1, count + 1)] if count > 1 else []


def _run_parts(profile: Profile, count: int) -> None:
    """Compute the parts 1 … count by a process each; all end when one fails or this one is interrupted."""
    command = [sys.executable, "-m", "residualquant.cli", "cells", "--profile", profile.name, "--no-score"]
    command += ["--memory-gib", str(CPU_MEMORY_GIB / count), "--part"]
    environment = {"OMP_NUM_THREADS": str(cores() // count)} | os.environ
    parts: list[Popen] = []
    try:
        for i in range(count):
            place = {"TQDM_POSITION": str(i)}  # of its progress bar
            given = {"env": environment | place, "process_group": 0, "preexec_fn": _end_with_parent}
            parts.append(Popen([*command, f"{i + 1}/{count}"], **given))
        while any(part.poll() is None for part in parts) and not any(part.poll() for part in parts):
            time.sleep(0.2)
        if failed := [i for i, part in enumerate(parts, 1) if part.poll()]:
            raise ResidualQuantError(f"part {failed[0]}/{count} of the cells of {profile.name} failed, as said above")
    finally:
        for part in parts:
            if part.poll() is None:
                part.send_signal(signal.SIGINT)
        for part in parts:
            part.wait()


def _end_with_parent() -> None:
    """Take interrupts, also where the parent runs in the background; on Linux be interrupted when it is killed.

    The records are then free for the next run, and what the step took until then is written down.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG


def _evaluate(profile, model, place, configs, folder, memory_bytes, score, progress) -> None:
    from residualquant.evals.run import evaluate
    from residualquant.rotation.calibration import CALIBRATED, CalibrationSizes, calibrated_many

    learnt = [i for i, config in enumerate(configs) if config.rotation in CALIBRATED]
    sizes, where = CalibrationSizes(**profile.calibration, seed=profile.seed), paths.rotations_dir(profile.name)
    wanted = [configs[i] for i in learnt]
    about = {"device": profile.device, "model": model.name, "task": place[1]}
    rotations = []
    if learnt:
        with timed(folder / TIMING, where, step="calibrate", configs=len(wanted), **about):
            share = memory_bytes and memory_bytes / 2  # for captured states, and as much again for fitting
            rotations = calibrated_many(model, wanted, place[1], sizes, where, progress, share)
    with timed(folder / TIMING, folder, step="decode", configs=len(configs), **about):
        evaluate(
            model,
            place[1],
            configs,
            profile.n_of(place),
            folder / records_name(profile, place),
            rotations=dict(zip(learnt, rotations)),
            memory_bytes=memory_bytes,
            seed=profile.seed,
            score=score,
            progress=progress,
        )


def _by_model(profile: Profile, places: Iterable[Place]) -> dict[str, list[Place]]:
    grouped: dict[str, list[Place]] = {}
    for family, task in places:
        grouped.setdefault(profile.models[family][task], []).append((family, task))
    return grouped


def _chosen(profile: Profile, plan: Plan, models: list[str], tasks: list[str]) -> Plan:
    known = list(dict.fromkeys(profile.model_name(place) for place in profile.plan))
    for kind, given, there in (("model", models, known), ("task", tasks, list(profile.stands_for))):
        if unknown := [name for name in given if name not in there]:
            raise ValueError(f"profile {profile.name!r} has no {kind} {unknown[0]!r}; it has {', '.join(there)}")
    return {
        place: configs
        for place, configs in plan.items()
        if (not models or profile.model_name(place) in models) and (not tasks or place[1] in tasks)
    }


def _share(profile: Profile, part: tuple[int, int] | None) -> tuple[Mapping[str, set[KVQuantConfig]], Path]:
    """{model: its configurations in this part}, whatever labels or tasks are asked for, and the records' folder."""
    from residualquant.rotation.calibration import CALIBRATED

    index, count = part or (1, 1)
    if not 1 <= index <= count:
        raise ValueError(f"part must be i/k with 1 <= i <= k, got {index}/{count}")
    mine = {}
    for name, places in _by_model(profile, profile.plan).items():
        configs = list(dict.fromkeys(config for place in places for config in profile.plan[place]))
        configs.sort(key=lambda config: config.rotation in CALIBRATED)  # every part gets its share of those too
        mine[name] = set(configs[index - 1 :: count])
    return mine, paths.records_dir(profile.name) if part is None else _part_folder(profile, index, count)


def _part_folder(profile: Profile, index: int, count: int) -> Path:
    return paths.parts_dir(profile.name) / f"{index}of{count}"


# ------------------------------------------------------------------------------------------------ collect


def collect_cells(profile: str | Profile) -> Iterator[str]:
    """Bring the records of all parts together and score what is open; yields a sentence per file. No model runs.

    A part's cell replaces what the profile's records hold for the same task, configuration, n and seed.

    Raises:
        ResidualQuantError: a part or a finished file is damaged, the scorers are not those that the records name, or
            there is no answer.
    """
    from residualquant.evals.run import score_records

    profile = profile_of(profile)
    parts: dict[str, list[Path]] = {}
    for file in map(finished_name, list_records(paths.records_dir(profile.name))):
        if file.is_file():
            read_records(file)  # a writer would go on without what is damaged
    folders = sorted(paths.parts_dir(profile.name).glob("*of*"))
    for folder in folders:
        for file in list_records(folder):
            parts.setdefault(file.name, []).append(file)
    collect_timings(paths.records_dir(profile.name) / TIMING, [folder / TIMING for folder in folders])
    for name, files in sorted(parts.items()):
        merged = merge_records(paths.records_dir(profile.name) / name, files)
        yield f"{name}: {counted(merged, 'answer')} from {counted(len(files), 'part')}"
    records = list_records(paths.records_dir(profile.name))
    if not records:
        places = " or ".join(map(paths.show, (paths.parts_dir(profile.name), paths.records_dir(profile.name))))
        raise ResidualQuantError(f"there are no answers in {places}: `residualquant cells` makes them")
    for file in records:
        yield f"{file.name}: {counted(score_records(file), 'answer')} scored"


def merge_records(target: Path, parts: Iterable[Path]) -> int:
    """Add the cells of ``parts`` to the records ``target``, in the place of older ones; returns how many answers."""

    def replaced(old: Cell, new: Cell) -> bool:
        return all(old.identity.get(k) == new.identity.get(k) for k in ("task", "kv", "n", "seed"))

    with Writer(target) as writer:
        before, count = dict(writer.records.cells), 0
        for part in parts:
            for cell in read_records(part).cells.values():
                mine = writer.start(cell.identity, cell.provenance)
                for problem, answer in cell.answers.items():
                    if problem not in mine.answers:
                        writer.add(mine, answer)
                        count += 1
        new = [cell for short, cell in writer.records.cells.items() if short not in before]
        writer.finish([short for short, old in before.items() if any(replaced(old, cell) for cell in new)])
    return count
