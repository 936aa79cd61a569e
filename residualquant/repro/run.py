"""``make reproduce``: compute everything anew, resume what was interrupted, compare with what is committed.

The policy, per profile:

* The first run on a clone moves the committed tables and records to ``data/<profile>/.committed``; they are what the
  run is compared with at the end, never its input.
* ``data/<profile>/.run.json`` remembers the run. Interrupted (even by SIGKILL): the same command goes on where it
  stopped. Finished, with code, models and outputs unchanged: "up to date". ``fresh`` starts over.
* ``regenerate`` (``make tables``, ``make figures``, ``make table2`` …) reads the records and runs no model.

Models run in this process, with progress bars; then the notebooks run and find every answer there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.cells import compute_cells
from residualquant.repro.profiles import Profile, profile_of
from residualquant.repro.provenance import package_hash
from residualquant.repro.records import Lock

Log = Callable[[str], None]


def marker_path(profile: str) -> Path:
    """``data/<profile>/.run.json``."""
    return paths.data_dir(profile) / ".run.json"


def read_marker(profile: str) -> dict:
    """What is known of the profile's last run: {"state": "never" | "starting" | "running" | "finished", ...}."""
    try:
        marker = json.loads(marker_path(profile).read_text())
    except (OSError, ValueError):
        return {"state": "never"}
    return marker if isinstance(marker, dict) and "state" in marker else {"state": "never"}


def _write_marker(profile: str, **content) -> None:
    paths.write_atomic(marker_path(profile), json.dumps(content, indent=1, sort_keys=True) + "\n")


def fingerprint(profile: Profile) -> str:
    """Hash of what a finished run depends on: the profile, the package, the notebooks, the models, the paper."""
    digest = hashlib.sha256(json.dumps([profile.to_dict(), package_hash()], sort_keys=True, default=str).encode())
    folders = [paths.models_dir() / m for m in sorted(set(profile.models.values()))]
    for folder in (*folders, paths.notebooks_dir(), paths.paper_dir()):
        for file in sorted(folder.glob("*")):
            if file.is_file():
                digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _outputs(profile: str) -> dict[str, str]:
    """{path: sha256} of every file of the profile under data/ and figures/, hidden ones left out."""
    found = {}
    for top in (paths.data_dir(profile), paths.figures_dir(profile)):
        for file in sorted(top.rglob("*")):
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(top).parts):
                found[paths.show(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def reproduce(profile: str | Profile = "mini", fresh: bool = False, log: Log = print) -> None:
    """Compute every table and figure of ``profile`` (the policy is in the module's text).

    Raises:
        ResidualQuantError: the profile cannot run here, another run is at it, a notebook failed, the disk is full.
    """
    from residualquant.repro.notebooks import run_notebooks

    profile = profile_of(profile)
    profile.check()
    with Lock(paths.data_dir(profile.name) / "run"):
        marker, now = read_marker(profile.name), fingerprint(profile)
        if not fresh and _is_up_to_date(marker, now, profile.name):
            log(f"{profile.name} is up to date (finished {marker['finished']}); FRESH=1 computes it again")
            return
        if fresh or marker["state"] in ("never", "starting"):
            started = _start_over(profile.name)
            log(f"{profile.name}: computing everything anew ({profile.cost})")
        else:
            started = marker["started"]
            log(f"{profile.name}: going on with the run of {started}; answers that are there are kept")
        _write_marker(profile.name, state="running", started=started)
        compute_cells(profile)
        run_notebooks(profile.name, compute=True)
        _report(profile.name, log)
        for line in compare_with_committed(profile.name):
            log(line)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        _write_marker(
            profile.name, state="finished", started=started, finished=finished, fingerprint=now,
            outputs=_outputs(profile.name),
        )  # fmt: skip


def _is_up_to_date(marker: dict, now: str, profile: str) -> bool:
    return marker["state"] == "finished" and marker.get("fingerprint") == now and marker["outputs"] == _outputs(profile)


def _start_over(profile: str) -> str:
    """Set committed outputs aside (an earlier run's own are removed) and return the start time.

    Killed half way, the marker says "starting" and the next run goes through it again: what was moved stays moved.
    """
    data, aside = paths.data_dir(profile), paths.committed_dir(profile)
    _write_marker(profile, state="starting")
    aside.mkdir(parents=True, exist_ok=True)
    for item in sorted(data.iterdir()):
        if item.name.startswith("."):
            continue
        if not (aside / item.name).exists():
            item.rename(aside / item.name)
        elif item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()
    return datetime.now(UTC).isoformat(timespec="seconds")


def _report(profile: str, log: Log) -> None:
    from residualquant.repro.report import write_report

    log(f"report: {paths.show(write_report(profile))}")


# ------------------------------------------------------------------------------------ regenerate from records


def notebooks_by_label() -> dict[str, str]:
    """{label: notebook name}: ``10_table2.ipynb`` makes "table2"."""
    return {path.stem.split("_", 1)[1]: path.stem for path in sorted(paths.notebooks_dir().glob("[0-9][0-9]_*.ipynb"))}


TABLES = ("storage", "table2", "figure1_left")
FIGURES = ("storage", "figure2", "figure5", "table2", "figure1_left")


def regenerate(profile: str | Profile = "mini", labels: Sequence[str] = ()) -> None:
    """Run the notebooks of ``labels`` (all when empty) on the records; no model runs.

    Raises:
        ValueError: an unknown label.
        ResidualQuantError: records are missing or damaged, or a notebook failed.
    """
    from residualquant.repro.notebooks import run_notebooks

    profile = profile_of(profile)
    known = notebooks_by_label()
    if unknown := [label for label in labels if label not in known]:
        raise ValueError(f"no notebook makes {unknown[0]!r}; known labels: {', '.join(known)}")
    run_notebooks(profile.name, [known[label] for label in labels or known], compute=False)


# ------------------------------------------------------------------------------------ compare with committed

_WHAT = ["step", "model", "benchmark", "config", "bits_per_loop"]
_ROW_KEY = [*_WHAT, "group_size", "reference", "coefficient", "rotation"]


def compare_with_committed(profile: str) -> list[str]:
    """One sentence per committed CSV: cells identical / within our 95 % interval / outside it."""
    aside = paths.committed_dir(profile)
    files = sorted(aside.glob("*.csv"))
    if not files:
        return [f"{profile}: nothing is committed to compare with"]
    return [_compare_file(file, paths.data_dir(profile) / file.name) for file in files]


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
    key = [name for name in _ROW_KEY if name in new.columns and name in old.columns]
    both = new.merge(old, on=key, suffixes=("", "_old"))
    same = (both.correct == both.correct_old) & (both.n == both.n_old)
    near = ~same & (both.accuracy_pct_old >= both.ci_low) & (both.accuracy_pct_old <= both.ci_high)
    text = f"{ours.name}: {len(both)} cells against the committed ones: {int(same.sum())} identical, "
    text += f"{int(near.sum())} within the 95 % interval, {int((~same & ~near).sum())} outside"
    alone = len(new) + len(old) - 2 * len(both)
    return text + (f"; {alone} rows are in only one of the two" if alone else "")
