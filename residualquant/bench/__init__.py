"""Timings, each beside the ceiling that was expected before measuring."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from residualquant.repro.paths import write_atomic


def write_timings(path: Path, kind: type, rows: Sequence[Any]) -> Path:
    """Write ``rows`` of the dataclass ``kind`` as CSV, numbers to four digits; returns ``path``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(kind)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = dataclasses.asdict(row)
        writer.writerow({key: f"{v:.4g}" if isinstance(v, float) else v for key, v in values.items()})
    write_atomic(path, text.getvalue())
    return path


class Table:
    """A CSV of timings that only a whole grid replaces.

    Until then the rows measured are in ``NAME.partial.csv`` beside it: a run that is cut off loses none of them, and
    leaves nothing that looks whole.

    Args:
        path: of the CSV.
        kind: dataclass of its rows.
    """

    def __init__(self, path: Path, kind: type):
        self.path, self.kind, self.rows = path, kind, []
        self.written = path.with_suffix(".partial.csv")  # where the rows are

    def add(self, *rows: Any) -> None:
        """Keep more rows."""
        self.rows += rows
        write_timings(self.written, self.kind, self.rows)

    def finish(self) -> None:
        """All rows are there: put them in the table's place."""
        self.written = self.written.replace(self.path)
