"""What models' work took: a row of ``timing.csv``, beside the records, for every step that computed something.

Columns: part (of a run that was split, "1of4"), model, task, step ("calibrate", or "decode" with the scoring that was
not left for later), configs, seconds and cpu_seconds (of the step's own process), machine, cores, threads, torch,
python, commit, date. A step that found everything there has no row; one cut off by SIGKILL has none either.
"""

from __future__ import annotations

import csv
import io
import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.provenance import provenance

TIMING = "timing.csv"
_ON_CPU = " cores of "
COLUMNS = (
    "part", "model", "task", "step", "configs", "seconds", "cpu_seconds", "machine", "cores", "threads", "torch",
    "python", "commit", "date",
)  # fmt: skip


@contextmanager
def timed(file: Path, made: Path, device: str, **about) -> Iterator[None]:
    """Append a row to ``file`` for the work in the block, unless it changed nothing under the folder ``made``."""
    before, begun, cpu = _state(made), time.monotonic(), time.process_time()
    try:
        yield
    finally:
        if _state(made) != before:
            took = {"seconds": time.monotonic() - begun, "cpu_seconds": time.process_time() - cpu}
            row = {"part": ""} | about | {name: f"{value:.2f}" for name, value in took.items()} | _where(device)
            _append(file, row)


def collect_timings(file: Path, parts: Iterable[Path]) -> None:
    """Put the rows of ``parts``, files in folders named as parts are, into ``file``, instead of what it has of them."""
    new = {part.parent.name: read_timings(part) for part in parts}
    rows = [row for row in read_timings(file) if row["part"] not in new]
    rows += [row | {"part": name} for name, of_part in new.items() for row in of_part]
    if rows:
        paths.write_atomic(file, _text(rows))


def read_timings(file: Path) -> list[dict[str, str]]:
    """The rows of ``file``; none where it is not there.

    Raises:
        ResidualQuantError: it is damaged.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(Path(file).read_text())))
        for row in rows:
            sound = tuple(row) == COLUMNS and None not in row.values() and 0 <= float(row["seconds"]) < math.inf
            if not sound or not re.fullmatch(r"(\d+of[1-9]\d*)?", row["part"]):
                raise ValueError(f"the row {row} is none of a timing")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ResidualQuantError(f"{paths.show(file)} is damaged: {error}") from error
    return rows


def model_time(profile: str) -> tuple[float, str] | None:
    """(seconds, machines) of all steps of the profile's committed run, one after the other.

    On a CPU the parts of a split run, whose shares are alike, run at the same time: their mean counts.
    """
    rows = read_timings(paths.shipped_records_dir(profile) / TIMING)
    if not rows:
        return None
    seconds = sum(float(row["seconds"]) / _at_a_time(row) for row in rows)
    return seconds, ", ".join(dict.fromkeys(row["machine"] for row in rows))


def _at_a_time(row: dict[str, str]) -> int:
    """k of a part "iofk" on a CPU; else 1."""
    return int(row["part"].split("of")[1]) if row["part"] and _ON_CPU in row["machine"] else 1


def machine_of(made: dict) -> str:
    """ "NVIDIA H200", or "2 cores of …" without a GPU, from a record's provenance."""
    return made.get("gpu") or f"{made['cores']}{_ON_CPU}{made['cpu']}"


def _where(device: str) -> dict:
    made = provenance(device)
    kept = {name: made[name] for name in ("cores", "threads", "python", "commit", "date")}
    return kept | {"machine": machine_of(made), "torch": made["packages"]["torch"]}


def _state(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of every file under ``folder``, hidden ones left out."""
    files = (f for f in sorted(Path(folder).rglob("*")) if f.is_file() and not f.name.startswith("."))
    return [(str(f), (stat := f.stat()).st_size, stat.st_mtime_ns) for f in files]


def _append(file: Path, row: dict[str, object]) -> None:
    """Add one row at once: processes that share a folder may do so at the same time."""
    text = _text([row])
    file.parent.mkdir(parents=True, exist_ok=True)
    with Path(file).open("a") as out:
        out.write(text if out.tell() == 0 else text.split("\n", 1)[1])


def _text(rows: Iterable[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
