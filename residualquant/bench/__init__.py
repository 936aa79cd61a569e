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
