"""The measured cells of a profile: read from its records, or computed where they are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.profiles import Method, Profile, profile_of
from residualquant.repro.records import Cell, Records, read_records

Cells = dict[tuple[str, Method], Cell]


def records_name(profile: Profile, task: str) -> str:
    """Plain name of the records of one task: ``<model>.<task>.jsonl``."""
    return f"{profile.models[task].split('/')[-1]}.{task}.jsonl"


def read_cells(
    profile: str | Profile, methods: Iterable[Method] | None = None, tasks: Sequence[str] | None = None
) -> Cells:
    """{(task, method): cell} from the records, running no model.

    Args:
        methods: all of the profile's for the task when None.
        tasks: all of the profile's when None.

    Raises:
        ResidualQuantError: answers are missing, or a record line is damaged.
    """
    profile = profile_of(profile)
    found: Cells = {}
    for task in profile.tasks if tasks is None else tasks:
        records = read_records(paths.shipped_records_dir(profile.name) / records_name(profile, task))
        for method in profile.methods_of(task) if methods is None else methods:
            found[task, method] = _complete(records, profile, task, method)
    return found


def _complete(records: Records, profile: Profile, task: str, method: Method) -> Cell:
    n = profile.problems[task]
    cell = records.find(task=task, kv=method.config.to_dict(), n=n, seed=profile.seed)
    if cell is None or not cell.is_complete:
        done = len(cell.correct) if cell else 0
        raise ResidualQuantError(
            f"{paths.show(records.path)} holds {done} of {n} answers for {task}, {method.name} {method.config.label}; "
            f"`make reproduce PROFILE={profile.name}` computes the rest"
        )
    return cell


def compute_cells(
    profile: str | Profile,
    methods: Iterable[Method] | None = None,
    tasks: Sequence[str] | None = None,
    progress: bool = True,
) -> None:
    """Bring the records up to date: whatever answer is missing is computed, task by task.

    Raises:
        ResidualQuantError: the profile cannot run here, another run writes the same records, or the disk is full.
    """
    from residualquant.evals.run import evaluate
    from residualquant.models import load_model

    profile = profile_of(profile)
    profile.check()
    model = None
    for task in profile.tasks if tasks is None else tasks:
        if model is None or model.name != profile.models[task]:
            model = load_model(profile.models[task], device=profile.device)
        wanted = profile.methods_of(task) if methods is None else methods
        evaluate(
            model,
            task,
            [m.config for m in wanted],
            profile.problems[task],
            paths.records_dir(profile.name) / records_name(profile, task),
            max_rows=profile.max_rows,
            seed=profile.seed,
            progress=progress,
        )
