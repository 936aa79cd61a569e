"""The numbers printed in the paper, from ``data/paper/*.csv`` (one file per label)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.repro.paths import paper_dir, show

if TYPE_CHECKING:
    import pandas as pd

OURO = "ouro-1.4b"


def read_paper(label: str) -> pd.DataFrame:
    """One label's numbers as printed; bits per loop stay text ("2,2,2,4").

    Raises:
        ValueError: no such label.
        ResidualQuantError: the file cannot be read.
    """
    import pandas as pd

    file = paper_dir() / f"{label}.csv"
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in paper_dir().glob("*.csv")))
        raise ValueError(f"the paper's numbers have no label {label!r}; known: {known or 'none found'}")
    try:
        return pd.read_csv(file, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise ResidualQuantError(f"{show(file)} could not be read: {error}") from error


def table2_accuracy(method: str, bits: str, group_size: int, model: str = OURO) -> dict[str, float]:
    """{benchmark: accuracy in %} of one row of Table 2 for one model; ``method`` as in the file ("residual_ls")."""
    table = read_paper("table2")
    rows = table[(table.method == method) & (table.model == model)]
    if method != "bf16":
        rows = rows[(rows.bits_per_loop == bits) & (rows.int2_group_size == group_size)]
    return dict(zip(rows.benchmark, rows.accuracy_pct))
