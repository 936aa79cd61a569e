"""What the package's own commands take on this machine, in time, memory and disk::

    python -m residualquant.bench.runs                     # all of them
    python -m residualquant.bench.runs smoke figures

Each runs in a process of its own and in an empty workspace, so that all it makes is made then, and leaves
``data/bench/<name>.json``: README's table and ``calibrate --estimate`` are made of these. CPU seconds are those of all
threads and processes, peak memory that of the largest process, disk all that is in the workspace afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from residualquant.errors import ResidualQuantError
from residualquant.repro.paths import data_dir, parse_json, shipped_data_dir, show, write_atomic
from residualquant.repro.provenance import provenance

COMMANDS: dict[str, tuple[str, ...]] = {
    "smoke": ("reproduce", "--profile", "smoke"),
    "tables": ("tables", "--profile", "full"),
    "figures": ("figures", "--profile", "full"),
    "report": ("report", "--profile", "full"),
    "calibration": ("calibrate", "--model", "mini-ouro-maths", "--fit", "128", "--holdout", "128", "--steps", "80"),
}


def measure(command: Sequence[str]) -> dict:
    """What ``residualquant`` with the arguments ``command`` takes in an empty workspace.

    Raises:
        ResidualQuantError: it fails; its output is shown before.
    """
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"RESIDUALQUANT_HOME": home}
        begun = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "residualquant.cli", *command], env=environment)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(status)  # which wait4 has taken from Popen
        if process.returncode:
            raise ResidualQuantError(f"residualquant {' '.join(command)} failed with {process.returncode}")
        disk = sum(file.stat().st_size for file in Path(home).rglob("*") if file.is_file())
    return {
        "command": " ".join(("residualquant", *command)),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": round(used.ru_maxrss / 1024),
        "disk_mib": round(disk / 2**20, 1),
        "provenance": provenance(),
    }


def record(name: str) -> Path:
    """:func:`measure` one of ``COMMANDS`` and keep the result as ``data/bench/<name>.json``.

    Raises:
        ValueError: an unknown name.
        ResidualQuantError: the command fails.
    """
    if name not in COMMANDS:
        raise ValueError(f"no command {name!r}; known: {', '.join(COMMANDS)}")
    path = data_dir("bench") / f"{name}.json"
    write_atomic(path, json.dumps(measure(COMMANDS[name]), indent=1) + "\n")
    return path


def recorded(name: str, folder: str = "bench") -> dict | None:
    """The record ``data/<folder>/<name>.json``; None where nothing was measured.

    Raises:
        ResidualQuantError: the record is damaged.
    """
    file = shipped_data_dir(folder, f"{name}.json")
    try:
        return parse_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ResidualQuantError(f"{show(file)} cannot be read: {error}") from error


def main(names: Sequence[str]) -> None:
    """Measure the commands ``names``, all when there are none."""
    for name in names or COMMANDS:
        path = record(name)
        took = recorded(name)
        print(
            f"{took['command']}: {took['seconds']} s, {took['cpu_seconds']} s of CPU time, {took['peak_mib']} MiB, "
            f"{took['disk_mib']} MiB on disk; wrote {show(path)}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
