"""Tables of measured accuracy, one row per line of the paper's table: a DataFrame, and ``data/<profile>/<label>.csv``.

``table(label, profile, compute)`` makes any of them: with ``compute`` the answers that are missing are computed first
and the CSV is written; without it the records are read, no model runs and no file changes. Rows that are not measured
hold NaN, and ``attrs["note"]`` says how many are not although the profile has them.

Columns: model, benchmark (our task, or the paper's benchmark), stands_for, config, bits_per_loop, group_size,
reference, coefficient, rotation, effective_bits (App. A.3: of the loops), model_bits (with the layers that are not
looped), n, correct, accuracy_pct, ci_low, ci_high (Wilson, 95 %), paper_pct, delta_pct, p_vs_direct (same bits and
group size, no rotation), p_vs_bf16; ``figure1_left`` begins with step and ends with p_vs_previous (the step above).

``p_*`` are exact McNemar tests on the same problems. A mean weighs each task equally; its interval combines the tasks'
Wilson intervals (``stats.mean_interval``), its tests are z tests of the mean. A p below 1e-300 is written as that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from residualquant.config import KVQuantConfig
from residualquant.layout import model_effective_bits
from residualquant.models.base import KVShape
from residualquant.repro import paths
from residualquant.repro.cells import Cells, compute_cells, coverage, read_cells
from residualquant.repro.labels import BF16, FAMILIES, HEAD_DIM, LABELS, Line, direct_of, lines
from residualquant.repro.profiles import Place, Profile, profile_of
from residualquant.repro.records import Cell
from residualquant.repro.stats import Pair, mean_interval, paired_test, rounded_p, wilson

if TYPE_CHECKING:
    import pandas as pd

NONE = float("nan")
_WRITES = ContextVar("whether the table being made becomes a file, too", default=False)


def accuracy_table(label: str, profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """One of ``LABELS`` in the columns of the module's text.

    Raises:
        ValueError: not one of ``LABELS``.
        ResidualQuantError: none of its cells is measured, or (with ``compute``) they cannot be computed here.
    """
    profile, wanted = profile_of(profile), lines(label)
    if compute:
        compute_cells(profile, [label])
    cells, rows, previous = read_cells(profile, [label]), [], None
    for line in wanted:
        row = _row(profile, cells, [line])
        if label == "figure1_left":
            row = {"step": line.step} | row | {"p_vs_previous": _p(profile, cells, [line], previous)}
            previous = None if line.config == BF16 else line.config
        rows.append(row)
    made = write_table(label, rows, profile)
    made.attrs["note"] = coverage(profile, [label])
    return made


def table2_mean(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Table 2's means, in the same columns: of each family's four tasks, then of all eight.

    A mean is of all its tasks or absent.

    Raises:
        ResidualQuantError: as for :func:`accuracy_table`.
    """
    profile = profile_of(profile)
    if compute:
        compute_cells(profile, ["table2"])
    cells, rows = read_cells(profile, ["table2"]), []
    for families in ((FAMILIES[0],), (FAMILIES[1],), FAMILIES):
        grouped: dict[KVQuantConfig, list[Line]] = {}
        for line in lines("table2"):
            if line.family in families:
                grouped.setdefault(line.config, []).append(line)
        rows += [_row(profile, cells, group) for group in grouped.values()]
    return write_table("table2_mean", rows, profile)


def write_table(label: str, rows: Sequence[dict] | pd.DataFrame, profile: Profile) -> pd.DataFrame:
    """The rows as a DataFrame, and as ``data/<profile>/<label>.csv`` where :func:`table` was told to write."""
    import pandas as pd

    made = pd.DataFrame(rows)
    for name in ("group_size", "n", "correct"):  # whole numbers, although some rows have none
        if name in made:
            made[name] = made[name].astype("Int64")
    if _WRITES.get():
        write_csv(label, made, profile)
    return made


def write_csv(label: str, made: pd.DataFrame, profile: Profile) -> None:
    """Write ``data/<profile>/<label>.csv``, whole or not at all."""
    paths.write_atomic(paths.data_dir(profile.name) / f"{label}.csv", made.to_csv(index=False, lineterminator="\n"))


# ------------------------------------------------------------------------------------------------ rows


def pair_of(cells: Cells, place: Place, first: KVQuantConfig, second: KVQuantConfig) -> Pair:
    """The paired counts of two configurations on one task."""
    return Pair.of(cells[*place, first].correct, cells[*place, second].correct)


def _p(profile: Profile, cells: Cells, group: Sequence[Line], other: KVQuantConfig | None) -> float:
    config, places = group[0].config, [profile.place_of(line) for line in group]
    if other in (None, config) or any((*p, c) not in cells for p in places for c in (config, other)):
        return NONE
    return rounded_p(paired_test(*(pair_of(cells, place, config, other) for place in places)))


def _row(profile: Profile, cells: Cells, group: Sequence[Line]) -> dict:
    """One row: a line, or the equal-weight mean of several lines of one configuration."""
    config, is_bf16 = group[0].config, group[0].config == BF16
    found = [cells.get((*profile.place_of(line), config)) for line in group]
    bits = [_bits(line, cell) for line, cell in zip(group, found)]
    paper = sum(line.paper_pct for line in group) / len(group)
    measured = _measured(found)
    return {
        **_where(profile, group),
        "config": config.label,
        "bits_per_loop": ",".join(map(str, config.bits)),
        "group_size": None if is_bf16 else config.group_size,
        "reference": "none" if is_bf16 else config.reference,
        "coefficient": "none" if is_bf16 or config.reference == "direct" else config.coefficient,
        "rotation": config.rotation,
        "effective_bits": round(sum(core for core, _ in bits) / len(bits), 6),
        "model_bits": round(sum(model for _, model in bits) / len(bits), 6),
        **measured,
        "paper_pct": round(paper, 4),
        "delta_pct": round(measured["accuracy_pct"] - paper, 4),
        "p_vs_direct": NONE if is_bf16 else _p(profile, cells, group, direct_of(config)),
        "p_vs_bf16": _p(profile, cells, group, BF16),
    }


def _where(profile: Profile, group: Sequence[Line]) -> dict:
    if len(group) == 1:
        place = profile.place_of(group[0])
        return {"model": profile.model_name(place), "benchmark": place[1], "stands_for": group[0].benchmark}
    families = list(dict.fromkeys(line.family for line in group))
    return {"model": families[0] if len(families) == 1 else "all", "benchmark": "mean", "stands_for": "mean"}


def _bits(line: Line, cell: Cell | None) -> tuple[float, float]:
    """Effective bits of the looped layers, and of the whole model where it has others (needs a measured cell)."""
    if cell is None:
        return line.config.effective_bits(HEAD_DIM[line.family]), NONE
    shape, edge = KVShape(**cell.identity["kv_shape"]), cell.identity["edge_shape"]
    edge_layers = 0 if edge is None else edge["layers"]
    return line.config.effective_bits(shape.head_dim), model_effective_bits(line.config, shape, edge_layers)


def _measured(found: Sequence[Cell | None]) -> dict:
    if None in found:
        return {"n": None, "correct": None, "accuracy_pct": NONE, "ci_low": NONE, "ci_high": NONE}
    counts = [(sum(cell.correct.values()), len(cell.correct)) for cell in found]
    mean, low, high = (counts[0][0] / counts[0][1], *wilson(*counts[0])) if len(counts) == 1 else mean_interval(counts)
    return {
        "n": sum(n for _, n in counts),
        "correct": sum(correct for correct, _ in counts),
        "accuracy_pct": _percent(mean),
        "ci_low": _percent(low),
        "ci_high": _percent(high),
    }


def _percent(fraction: float) -> float:
    return round(100 * fraction, 4)


# ------------------------------------------------------------------------------------------------ every label


def table(
    label: str, profile: str | Profile = "mini", compute: bool = False, write: bool | None = None
) -> pd.DataFrame:
    """The table of any label.

    Args:
        label: one of ``TABLES``.
        compute: first compute what is missing; otherwise read what is kept, running no model.
        write: also write ``data/<profile>/<label>.csv``; by default where it is computed.

    Raises:
        ValueError: an unknown label or profile.
        ResidualQuantError: what it is made from is missing (the message names the command that makes it) or damaged.
    """
    if label not in TABLES:
        raise ValueError(f"no table {label!r}; known: {', '.join(TABLES)}")
    told = _WRITES.set(compute if write is None else write)
    try:
        return _makers()[label](profile_of(profile), compute)
    finally:
        _WRITES.reset(told)


def _makers() -> dict[str, Callable[[Profile, bool], pd.DataFrame]]:
    """{label: what makes its table of a profile and ``compute``}; imported here, as it imports this module."""
    from residualquant.repro import analyses, claims, rotations
    from residualquant.repro.storage import storage_table

    return {
        "storage": lambda profile, compute: write_table("storage", storage_table(), profile),
        "table1": analyses.table1,
        "figure3_middle": analyses.figure3_middle,
        "figure3_right": analyses.figure3_right,
        "rotations": rotations.rotations,
        **{label: partial(accuracy_table, label) for label in LABELS},
        "table2_mean": table2_mean,
        "claims": claims.claims,
    }


TABLES = (
    "storage", "table1", "figure3_middle", "figure3_right", "rotations", "table2", "table2_mean", *LABELS[1:], "claims"
)  # fmt: skip
