"""``make reproduce``: compute everything anew, resume what was interrupted, compare with what is committed.

The policy, per profile:

* The first run on a clone moves the committed tables and records to ``data/<profile>/.committed``; they are what the
  run is compared with at the end, never its input.
* ``data/<profile>/.run.json`` remembers the run. Interrupted (even by SIGKILL): the same command goes on where it
  stopped. Finished, with code, models and outputs unchanged: "up to date". ``fresh`` starts over.
* ``make_tables`` and ``make_figures`` (``make tables``, ``make table2`` …) read the records and run no model.

Models run first, with progress bars, on a CPU in two processes; then the notebooks run, two at a time, and find every
answer there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.cells import compute_all_cells, coverage, remove_parts
from residualquant.repro.labels import LABELS
from residualquant.repro.markup import counted
from residualquant.repro.profiles import Profile, profile_of
from residualquant.repro.provenance import is_committed, package_hash
from residualquant.repro.records import Lock, Records, list_records

Log = Callable[[str], None]


_MARKER_FIELDS = {
    "starting": set(),
    "running": {"started"},
    "finished": {"started", "finished", "fingerprint", "outputs"},
}


def marker_path(profile: str) -> Path:
    """``data/<profile>/.run.json``."""
    return paths.data_dir(profile) / ".run.json"


def run_lock(profile: str) -> Lock:
    """What the one process that runs the profile holds."""
    return Lock(paths.data_dir(profile) / "run")


def read_marker(profile: str) -> dict:
    """What is known of the profile's last run: {"state": "never" | "starting" | "running" | "finished", ...}."""
    try:
        marker = paths.parse_json(marker_path(profile).read_bytes())
    except (OSError, ValueError):
        return {"state": "never"}
    needed = _MARKER_FIELDS.get(str(marker.get("state")))
    return {"state": "never"} if needed is None or not needed <= marker.keys() else marker


def _write_marker(profile: str, **content) -> None:
    paths.write_atomic(marker_path(profile), json.dumps(content, indent=1, sort_keys=True) + "\n")


def fingerprint(profile: Profile) -> str:
    """Hash of what a finished run depends on: the profile, the package, the notebooks, the models, the paper."""
    digest = hashlib.sha256(json.dumps([profile.to_dict(), package_hash()], sort_keys=True, default=str).encode())
    names = {profile.models[family][task] for family, task in profile.plan}
    folders = [paths.models_dir() / name for name in sorted(names)]
    for folder in (*folders, paths.notebooks_dir(), paths.paper_dir()):
        for file in sorted(folder.glob("*")):
            if file.is_file():
                digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _outputs(profile: str) -> dict[str, str]:
    """{path: sha256} of every file of the profile under data/ and figures/, hidden ones left out."""
    return {paths.show(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in paths.visible_outputs(profile)}


def reproduce(profile: str | Profile = "mini", fresh: bool = False, log: Log = print) -> None:
    """Compute every table and figure of ``profile`` (the policy is in the module's text).

    Raises:
        ResidualQuantError: the profile cannot run here, another run is at it, a notebook failed, the disk is full.
    """
    from residualquant.repro.notebooks import run_notebooks
    from residualquant.repro.report import write_report

    profile = profile_of(profile)
    with run_lock(profile.name):
        marker, now = read_marker(profile.name), fingerprint(profile)
        if not fresh and _is_up_to_date(marker, now, profile.name):
            log(f"{profile.name} is up to date (finished {marker['finished']}); FRESH=1 computes it again")
            return
        profile.check()
        has_run = marker["state"] in ("running", "finished")
        if fresh or not has_run:
            remove_parts(profile)
            started = _start_over(profile.name, has_run)
            log(f"{profile.name}: computing everything anew ({profile.cost})")
        else:
            started = marker["started"]
            log(f"{profile.name}: going on with the run of {started}; answers that are there are kept")
        _write_marker(profile.name, state="running", started=started)
        compute_all_cells(profile)
        compute_analyses(profile)
        run_notebooks(profile.name, compute=True)
        log(f"report: {paths.show(write_report(profile.name))}")
        for line in compare_with_committed(profile.name):
            log(line)
        _write_marker(
            profile.name,
            state="finished",
            started=started,
            finished=_now(),
            fingerprint=now,
            outputs=_outputs(profile.name),
        )


def compute_analyses(profile: Profile) -> None:
    """Measure what notebooks show of states and rotations, unless it is there, since several read the same."""
    from residualquant.repro.analyses import nmse_by_problem, states_by_problem
    from residualquant.repro.rotations import rotation_errors_of

    for measure in (nmse_by_problem, states_by_problem, rotation_errors_of):
        measure(profile, compute=True)


def _is_up_to_date(marker: dict, now: str, profile: str) -> bool:
    return marker["state"] == "finished" and marker.get("fingerprint") == now and marker["outputs"] == _outputs(profile)


def _start_over(profile: str, has_run: bool) -> str:
    """Empty the profile's folder and return the start time.

    What a run here made (``has_run``) is removed. What is committed, a run's results among it once they are, is set
    aside instead of what was before. Killed meanwhile, the marker says "starting" and the next run moves the rest.
    """
    data, aside = paths.data_dir(profile), paths.committed_dir(profile)
    committed = is_committed(data)
    ours = has_run and not committed
    if not ours:
        _write_marker(profile, state="starting")
        if committed and aside.is_dir():
            shutil.rmtree(aside)
        aside.mkdir(parents=True, exist_ok=True)
    for item in sorted(data.iterdir()):
        if item.name.startswith("."):
            continue
        if not ours and not (aside / item.name).exists():
            item.rename(aside / item.name)
        elif item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()
    return _now()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# ------------------------------------------------------------------------------------ regenerate from records


def make_tables(
    profile: str | Profile = "mini", labels: Sequence[str] = (), compute: bool = False, log: Log = print
) -> None:
    """Write the CSVs of ``labels`` (all when empty) from the records; no model runs unless ``compute`` is given.

    Raises:
        ValueError: an unknown label.
        ResidualQuantError: records of a label asked for are missing or damaged; without ``labels`` that is logged only.
    """
    from residualquant.repro.tables import TABLES, table

    name = profile_of(profile).name

    def make(label: str) -> Path:
        table(label, name, compute, write=True)
        return paths.data_dir(name) / f"{label}.csv"

    _make_each("table", labels, TABLES, make, name, log)


def make_figures(profile: str | Profile = "mini", labels: Sequence[str] = (), log: Log = print) -> None:
    """Draw the figures of ``labels`` (all when empty) from the records; no model runs.

    Raises:
        ValueError: an unknown label.
        ResidualQuantError: records of a label asked for are missing or damaged; without ``labels`` that is logged only.
    """
    from residualquant.repro.figures import FIGURES, figure

    name = profile_of(profile).name

    def make(label: str) -> Path:
        figure(label, name)
        return paths.figures_dir(name) / f"{label}.png"

    _make_each("figure", labels, FIGURES, make, name, log)


_READS = {label: (label,) for label in LABELS} | {"table2_mean": ("table2",), "pareto": ("table2",), "claims": LABELS}


def _make_each(
    kind: str, labels: Sequence[str], known: Iterable[str], make: Callable[[str], Path], profile: str, log: Log
) -> None:
    """Make one label after the other; a line for each, with how many of its cells are not measured."""
    if unknown := [label for label in labels if label not in known]:
        raise ValueError(f"no {kind} {unknown[0]!r}; known: {', '.join(known)}")
    for label in labels or known:
        try:
            path = make(label)
            note = coverage(profile, _READS[label]) if label in _READS else ""
        except ResidualQuantError as error:
            if labels:
                raise
            log(f"{kind} {label} left out: {error}")
            continue
        log(paths.show(path) + (f" ({note})" if note else ""))


# ------------------------------------------------------------------------------------ compare with committed

_ROW_KEY = ["step", "model", "benchmark", "bits_per_loop", "group_size", "reference", "coefficient", "rotation"]


def compare_with_committed(profile: str) -> list[str]:
    """Sentences: per committed CSV, cells identical / within our 95 % interval / outside; answers identical."""
    ours = paths.data_dir(profile)
    aside = paths.committed_dir(profile)
    if not any(aside.glob("*")):
        return [f"{profile}: nothing is committed to compare with"]
    lines = [_compare_file(file, ours / file.name) for file in sorted(aside.glob("*.csv"))]
    same = total = 0
    for file in list_records(aside / "records"):
        theirs, mine = _responses(file), _responses(ours / "records" / file.name)
        common = theirs.keys() & mine.keys()
        same, total = same + sum(theirs[k] == mine[k] for k in common), total + len(common)
    return [*lines, f"answers: {same} of {total} identical word for word to the committed ones"]


def _responses(file: Path) -> dict[tuple[str, str], str]:
    """{(task and KV configuration, problem): response} of a records file."""
    return {
        (json.dumps([cell.identity["task"], cell.identity["kv"]], sort_keys=True), answer.problem): answer.response
        for cell in Records(file).cells.values()
        for answer in cell.answers.values()
    }


def _compare_file(committed: Path, ours: Path) -> str:
    import pandas as pd

    if not ours.is_file():
        return f"{ours.name}: committed, but this run did not make it"
    if committed.read_bytes() == ours.read_bytes():
        return f"{ours.name}: identical to the committed file, byte for byte"
    try:
        old, new = pd.read_csv(committed), pd.read_csv(ours)
    except ValueError as error:
        raise ResidualQuantError(f"{paths.show(committed)} could not be read: {error}") from error
    if "accuracy_pct" not in new.columns or "accuracy_pct" not in old.columns:
        return f"{ours.name}: differs from the committed file"
    old, new = (rows.dropna(subset=["accuracy_pct"]) for rows in (old, new))
    key = [name for name in _ROW_KEY if name in new.columns and name in old.columns]
    both = new.merge(old, on=key, suffixes=("", "_old"))
    same = (both.correct == both.correct_old) & (both.n == both.n_old)
    near = ~same & (both.accuracy_pct_old >= both.ci_low) & (both.accuracy_pct_old <= both.ci_high)
    text = f"{ours.name}: {counted(len(both), 'cell')} against the committed ones: {int(same.sum())} identical, "
    text += f"{int(near.sum())} within the 95 % interval, {int((~same & ~near).sum())} outside"
    alone = len(new) + len(old) - 2 * len(both)
    return text + (f"; {counted(alone, 'row')} in only one of the two" if alone else "")
