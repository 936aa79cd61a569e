"""What a profile's run cost: wall time, machine and disk, kept in ``data/<profile>/cost.json`` for README's table.

What its models took, step by step, is in ``data/<profile>/records/timing.csv``, however the run was split.
"""

from __future__ import annotations

import contextlib
import csv
import json
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.provenance import provenance

TIMING = "timing.csv"
SHORT = 1.0  # seconds: a step that takes less has found everything done


def disk_bytes(profile: str) -> int:
    """Bytes of a profile's data and figures (hidden files, such as what an earlier run left to compare with, aside)."""
    return sum(file.stat().st_size for file in paths.visible_outputs(profile))


def write_cost(profile: str, seconds: float, device: str) -> None:
    """Record a run that was computed from nothing to the end without interruption."""
    made = provenance(device)
    cost = {
        "seconds": round(seconds, 1),
        "bytes": disk_bytes(profile),
        "machine": made.get("gpu") or f"{made['cores']} cores of {made['cpu']}",
        "date": made["date"],
        "commit": made["commit"],
        "torch": made["packages"]["torch"],
    }
    paths.write_atomic(paths.data_dir(profile) / "cost.json", json.dumps(cost, indent=1) + "\n")


def read_cost(profile: str) -> dict | None:
    """What ``write_cost`` recorded, or None where no complete run is committed."""
    file = paths.shipped_data_dir(profile) / "cost.json"
    return json.loads(file.read_text()) if file.is_file() else None


@contextlib.contextmanager
def timed(folder: Path, device: str, **what: object) -> Iterator[None]:
    """Append what the block took to ``folder/timing.csv``, also if it was interrupted; nothing below a second.

    Args:
        folder: of the records that the block computes.
        device: of the model.
        what: which step, as columns before ``begun``, ``seconds``, ``cpu_seconds`` and the machine.
    """
    begun, wall, cpu = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic(), time.process_time()
    try:
        yield
    finally:
        seconds, cpu_seconds = time.monotonic() - wall, time.process_time() - cpu
        if seconds >= SHORT:
            took = {"begun": begun, "seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
            _append(folder / TIMING, what | took | _machine(device))


def _machine(device: str) -> dict[str, str]:
    made = provenance(device)
    machine = made.get("gpu") or f"{made['threads']} of {made['cores']} cores of {made['cpu']}"
    return {"machine": machine, "torch": made["packages"]["torch"], "commit": made["commit"]}


def _append(file: Path, row: dict[str, object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="") as out:
        writer = csv.DictWriter(out, list(row), lineterminator="\n")
        if not out.tell():
            writer.writeheader()
        writer.writerow(row)


def join_timings(folders: Iterable[Path], target: Path) -> None:
    """Put the steps of a run in parts into ``target/timing.csv``, in place of those of an earlier run."""
    texts = [file.read_text().splitlines() for folder in folders if (file := folder / TIMING).is_file()]
    if texts:
        lines = [texts[0][0], *sorted(line for text in texts for line in text[1:])]
        paths.write_atomic(target / TIMING, "\n".join(lines) + "\n")


def model_seconds(profile: str) -> tuple[float, float] | None:
    """Wall and CPU seconds that the models of the committed run took, summed over its steps; None where not recorded.

    Steps that ran side by side on one machine are counted from the first one's beginning to the last one's end.
    """
    import pandas as pd

    file = paths.shipped_records_dir(profile) / TIMING
    if not file.is_file():
        return None
    try:
        steps = pd.read_csv(file, parse_dates=["begun"]).astype({"seconds": float, "cpu_seconds": float})
        ends = steps.begun + pd.to_timedelta(steps.seconds, unit="s")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ResidualQuantError(f"{paths.show(file)} is damaged: {error}") from error
    span = (ends.max() - steps.begun.min()).total_seconds()
    return min(float(steps.seconds.sum()), span), float(steps.cpu_seconds.sum())
