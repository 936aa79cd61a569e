"""Where everything lies. No other module spells a directory name.

Outputs go under the workspace: the folder named by ``RESIDUALQUANT_HOME``, else the checkout this package runs from,
else (an installed wheel) the current folder. Inputs that ship with the project — the paper's numbers, the mini
models, the notebooks, the committed records — are looked for there first and then inside the installed package.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from residualquant.errors import ResidualQuantError

PACKAGE = Path(__file__).resolve().parents[1]


def workspace() -> Path:
    """The folder that outputs are written under (see the module's text).

    Raises:
        ResidualQuantError: ``RESIDUALQUANT_HOME`` names something else than a folder.
    """
    if home := os.environ.get("RESIDUALQUANT_HOME"):
        if os.path.exists(home) and not os.path.isdir(home):
            raise ResidualQuantError(f"RESIDUALQUANT_HOME must name a folder, got the file {home}")
        return Path(home)
    checkout = PACKAGE.parent
    return checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()


def _shipped(*parts: str) -> Path:
    """A shipped input: the workspace's copy when there is one, else the installed package's or the checkout's."""
    mine = workspace().joinpath(*parts)
    if mine.exists():
        return mine
    for base in (PACKAGE, PACKAGE.parent):
        if (found := base.joinpath(*parts)).exists():
            return found
    return mine


def _name(profile: str) -> str:
    """Folder name of a profile; ``data/paper`` is taken by the paper's own numbers."""
    return "paper_models" if profile == "paper" else profile


def data_dir(profile: str) -> Path:
    """``data/<profile>``: the CSVs and records of one profile (``data/paper_models`` for the profile "paper")."""
    return workspace() / "data" / _name(profile)


def records_dir(profile: str) -> Path:
    """``data/<profile>/records``: one JSONL file per (model, task), compressed once it is finished."""
    return data_dir(profile) / "records"


def committed_dir(profile: str) -> Path:
    """``data/<profile>/.committed``: what a fresh run set aside, to compare itself with at the end."""
    return data_dir(profile) / ".committed"


def shipped_data_dir(profile: str, *parts: str) -> Path:
    """``data/<profile>``, or a file in it, as shipped: the workspace's, or the copy inside an installed wheel."""
    return _shipped("data", _name(profile), *parts)


def shipped_records_dir(profile: str) -> Path:
    """``data/<profile>/records`` as shipped: the workspace's own once it has any, whatever else lies beside them."""
    return _shipped("data", _name(profile), "records")


def figures_dir(profile: str) -> Path:
    """``figures/<profile>``: pictures and the report page."""
    return workspace() / "figures" / profile


def runs_dir(profile: str) -> Path:
    """``data/runs/<profile>``: executed notebooks (not committed)."""
    return workspace() / "data" / "runs" / profile


def rotations_dir(profile: str) -> Path:
    """``data/runs/<profile>/rotations``: calibrated rotations, a folder per model and configuration (not committed)."""
    return runs_dir(profile) / "rotations"


def parts_dir(profile: str) -> Path:
    """``data/runs/<profile>/parts``: records of a run that was split, one folder per part (not committed)."""
    return runs_dir(profile) / "parts"


def models_dir() -> Path:
    """``data/models``: the shipped checkpoints."""
    return _shipped("data", "models")


def kernels_dir() -> Path:
    """``build/kernels``: compiled CUDA kernels (not committed)."""
    return workspace() / "build" / "kernels"


def paper_dir() -> Path:
    """``data/paper``: the numbers printed in the paper. (The profile of that name makes a folder there, too.)"""
    return _shipped("data", "paper", "table2.csv").parent


def notebooks_dir() -> Path:
    """``notebooks``: one notebook per label of the paper, stripped of outputs."""
    return _shipped("notebooks")


def parse_json(text: str | bytes) -> dict[str, Any]:
    """The object that a JSON text holds.

    Raises:
        ValueError: it is no JSON, nested beyond reason, or holds something else than an object.
    """
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"it must hold an object, got {type(found).__name__}")
    return found


def write_atomic(path: Path, content: str | bytes) -> bool:
    """Write ``content`` whole or not at all: a temporary file, fsync, rename. Returns False if it was there already.

    Raises:
        ResidualQuantError: the disk is full or the folder cannot be written; no partial file is left.
    """
    content = content.encode() if isinstance(content, str) else content
    path = Path(path)
    if path.is_file() and path.read_bytes() == content:
        return False
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        sentence = f"{show(path)} could not be written ({error.strerror}); nothing was changed"
        raise ResidualQuantError(sentence) from error
    return True


def show(path: Path) -> str:
    """``path`` as written in messages: relative to the workspace where it lies inside it."""
    path = Path(path)
    return str(path.relative_to(workspace())) if path.is_relative_to(workspace()) else str(path)


def visible_outputs(profile: str) -> list[Path]:
    """Every file under the profile's data and figures, sorted; hidden ones and those in hidden folders left out."""
    tops = (data_dir(profile), figures_dir(profile))
    files = ((f, f.relative_to(top).parts) for top in tops for f in sorted(top.rglob("*")) if f.is_file())
    return [f for f, parts in files if not any(part.startswith(".") for part in parts)]
