"""The numbers printed in the paper, from ``data/paper/*.csv`` (one file per label)."""

from __future__ import annotations

import csv

from residualquant.errors import ResidualQuantError
from residualquant.repro.paths import paper_dir, show


def printed(label: str) -> list[dict[str, str]]:
    """One label's rows as printed, every cell as text so that no digit is lost.

    Raises:
        ValueError: no such label.
        ResidualQuantError: the file cannot be read.
    """
    file = paper_dir() / f"{label}.csv"
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in paper_dir().glob("*.csv")))
        raise ValueError(f"the paper's numbers have no label {label!r}; known: {known or 'none found'}")
    try:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError) as error:
        raise ResidualQuantError(f"{show(file)} could not be read: {error}") from error
    if not rows:
        raise ResidualQuantError(f"{show(file)} holds no numbers")
    return rows
