"""Who made a number: versions, machine, commit. Kept beside results, never part of their key."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import os
import platform
import subprocess
import tokenize
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from residualquant.repro import paths

if TYPE_CHECKING:
    import pandas as pd

# What decides an answer, besides weights, problems, scorers and settings that are in the key themselves.
METHOD_SOURCES = (
    "affine.py", "attention.py", "batch.py", "cache.py", "config.py", "engine.py", "residual.py",
    "models/base.py", "models/huginn.py", "models/ouro.py", "rotation/__init__.py", "rotation/hadamard.py",
)  # fmt: skip
_PACKAGES = ("torch", "numpy", "scipy", "pandas", "tokenizers", "safetensors", "evalplus", "math-verify")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _git(*arguments: str) -> str | None:
    """Output of a git command in the checkout this package runs from; None without git or outside a checkout."""
    command = ["git", "-C", str(paths.PACKAGE.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str:
    """Commit of the checkout, with "+" when a tracked source differs from it; "none" outside a checkout.

    RESIDUALQUANT_COMMIT names it where the sources were copied to a machine without their history.
    """
    if named := os.environ.get("RESIDUALQUANT_COMMIT"):
        return named
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != paths.PACKAGE.parent or not (head := _git("rev-parse", "HEAD")):
        return "none"
    edited = _git("status", "--porcelain", "--untracked-files=no", "--", "residualquant", "kernels")
    return head[:12] + ("+" if edited else "")


def is_committed(folder: Path) -> bool:
    """Whether ``folder`` holds files that git tracks, all as they were committed and none besides."""
    return bool(_git("ls-files", "--", str(folder))) and _git("status", "--porcelain", "--", str(folder)) == ""


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def provenance(device: str = "cpu") -> dict:
    """Versions, machine, commit and time, as plain JSON; no host name, user name or path."""
    import torch

    made = {
        "residualquant": _package_version("residualquant"),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "packages": {name: _package_version(name) for name in _PACKAGES},
    }
    if torch.device(device).type == "cuda":
        made["gpu"], made["cuda"] = torch.cuda.get_device_name(device), torch.version.cuda
    return made


def _meaning(source: str) -> str:
    """A module's text without docstrings, comments and blank lines, so that wording does not count.

    (Not its syntax tree: how that prints depends on the Python version.)
    """
    lines = source.splitlines()
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(kept for line in lines if (kept := line.rstrip()))


def hash_sources(files: Iterable[Path]) -> str:
    """sha256 of what the Python files ``files`` do, whatever their comments and docstrings say."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"\0{file.name}\0".encode() + _meaning(file.read_text()).encode())
    return digest.hexdigest()


@functools.cache
def method_hash() -> str:
    """Hash of the code that turns a prompt and a configuration into an answer (``METHOD_SOURCES``)."""
    return hash_sources(file for name in METHOD_SOURCES if (file := paths.PACKAGE / name).is_file())[:16]


def package_hash() -> str:
    """Hash of every module of the package: a finished run is "up to date" only while this is the same."""
    files = paths.PACKAGE.rglob("*.py")
    return hash_sources(f for f in files if "kernels" not in f.relative_to(paths.PACKAGE).parts)[:16]


def provenance_table(profile: str) -> pd.DataFrame:
    """What made the records of ``profile``: one row per (made on, with), and how many cells each accounts for.

    Without records the table describes this machine instead.
    """
    import pandas as pd

    from residualquant.repro.records import Records, list_records

    rows: dict[str, dict] = {}
    for file in list_records(paths.shipped_records_dir(profile)):
        for cell in Records(file).cells.values():
            row = _flat(cell.provenance) | {"device": cell.identity["device"], "dtype": cell.identity["dtype"]}
            row.pop("date", None)
            rows.setdefault(repr(row), {"cells": 0} | row)["cells"] += 1
    return pd.DataFrame(list(rows.values()) or [{"cells": 0} | _flat(provenance())])


def _flat(made: dict) -> dict:
    """Provenance with its package versions in one line of text."""
    return made | {"packages": ", ".join(f"{name} {v}" for name, v in made["packages"].items())}
