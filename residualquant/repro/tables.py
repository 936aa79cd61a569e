"""Tables of measured accuracy: ``table2``, ``table2_mean`` and ``figure1_left``, each a DataFrame and a CSV.

Every function takes ``profile`` (a name or a Profile) and ``compute``: False reads the committed records and runs no
model; True first computes the answers that are missing. Either way the same CSV is written under ``data/<profile>/``.

Rows that are OptR-H in the paper are measured with a Hadamard rotation, and the ``rotation`` column says so.
``p_*`` are exact McNemar tests on the same problems. The mean over tasks weighs each task equally; its interval
combines the tasks' Wilson intervals (``stats.mean_interval``), its tests pool the discordant problems of all tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from residualquant.repro import paper, paths
from residualquant.repro.cells import Cells, compute_cells, read_cells
from residualquant.repro.profiles import FIGURE1, FIGURE1_TASK, Method, Profile, profile_of
from residualquant.repro.records import Cell
from residualquant.repro.stats import Pair, mcnemar_exact, mean_interval, wilson

if TYPE_CHECKING:
    import pandas as pd

BF16 = Method("bf16")
NONE = float("nan")


def table2(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Table 2: every method of the profile on every task, with intervals and paired tests; ``table2.csv``.

    Columns: model, benchmark, config, bits_per_loop, group_size, reference, coefficient, rotation, effective_bits, n,
    correct, accuracy_pct, ci_low, ci_high (Wilson, 95 %), p_vs_direct (same bits and group size, no rotation),
    p_vs_bf16, paper_pct (Ouro-1.4B on the benchmark that the task stands for).

    Raises:
        ResidualQuantError: answers are missing and ``compute`` is False, or they cannot be computed here.
    """
    profile = profile_of(profile)
    if compute:
        compute_cells(profile)
    cells = read_cells(profile)
    rows = [_row(profile, cells, (task,), method) for task in profile.tasks for method in profile.methods]
    return write_table("table2", rows, profile)


def table2_mean(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Table 2's mean over the tasks, one row per method, in the columns of ``table2``; ``table2_mean.csv``.

    ``paper_pct`` is the mean of the paper's Ouro-1.4B over the benchmarks that the tasks stand for.
    """
    profile = profile_of(profile)
    if compute:
        compute_cells(profile)
    cells = read_cells(profile)
    return write_table("table2_mean", [_row(profile, cells, profile.tasks, m) for m in profile.methods], profile)


def figure1_left(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Figure 1 (left): from direct INT2 to the full method, one ingredient at a time; ``figure1_left.csv``.

    Columns: step, then those of ``table2``, with ``p_vs_previous`` (the step above) in place of ``p_vs_direct``.
    Measured on the task that stands for MATH500.
    """
    profile = profile_of(profile)
    steps = list(FIGURE1.values())
    if compute:
        compute_cells(profile, steps, [FIGURE1_TASK])
    cells = read_cells(profile, steps, [FIGURE1_TASK])
    printed = paper.read_paper("figure1_left").set_index("step").math500_pct
    rows, previous = [], None
    for step, method in FIGURE1.items():
        row = {"step": step} | _row(profile, cells, (FIGURE1_TASK,), method)
        row["p_vs_direct"] = _p(cells, (FIGURE1_TASK,), method, previous)
        rows.append(row | {"paper_pct": printed[step]})
        previous = method if step != "bf16" else None
    return write_table("figure1_left", [{_RENAMED.get(k, k): v for k, v in row.items()} for row in rows], profile)


_RENAMED = {"p_vs_direct": "p_vs_previous"}


def write_table(label: str, rows: Sequence[dict], profile: Profile) -> pd.DataFrame:
    """The rows as a DataFrame, written to ``data/<profile>/<label>.csv`` (whole or not at all)."""
    import pandas as pd

    table = pd.DataFrame(rows)
    if "group_size" in table:
        table["group_size"] = table["group_size"].astype("Int64")  # whole numbers, although BF16 has none
    paths.write_atomic(paths.data_dir(profile.name) / f"{label}.csv", table.to_csv(index=False, lineterminator="\n"))
    return table


def pair_of(cells: Cells, task: str, first: Method, second: Method) -> Pair:
    """The paired counts of two methods on one task."""
    return Pair.of(cells[task, first].correct, cells[task, second].correct)


def _p(cells: Cells, tasks: Sequence[str], method: Method, other: Method | None) -> float:
    if other is None or other == method or any((task, other) not in cells for task in tasks):
        return NONE
    return float(f"{mcnemar_exact(*(pair_of(cells, task, method, other) for task in tasks)):.4g}")


def _row(profile: Profile, cells: Cells, tasks: Sequence[str], method: Method) -> dict:
    """One row of a table, over one task or (equal weights) the mean of several."""
    config, several = method.config, len(tasks) > 1
    counts = [_counts(cells[task, method]) for task in tasks]
    if several:
        mean, low, high = mean_interval(counts)
    else:
        mean, (low, high) = counts[0][0] / counts[0][1], wilson(*counts[0])
    is_bf16 = method == BF16
    return {
        "model": "mean" if several else profile.models[tasks[0]].split("/")[-1],
        "benchmark": "mean" if several else tasks[0],
        "config": config.label,
        "bits_per_loop": ",".join(map(str, config.bits)),
        "group_size": NONE if is_bf16 else config.group_size,
        "reference": "none" if is_bf16 else config.reference,
        "coefficient": "none" if is_bf16 or config.reference == "direct" else config.coefficient,
        "rotation": config.rotation,
        "effective_bits": config.effective_bits(cells[tasks[0], method].identity["kv_shape"]["head_dim"]),
        "n": sum(n for _, n in counts),
        "correct": sum(correct for correct, _ in counts),
        "accuracy_pct": _percent(mean),
        "ci_low": _percent(low),
        "ci_high": _percent(high),
        "p_vs_direct": NONE if is_bf16 else _p(cells, tasks, method, Method("direct", method.bits, method.group_size)),
        "p_vs_bf16": _p(cells, tasks, method, BF16),
        "paper_pct": paper_accuracy(profile, tasks, method),
    }


def _counts(cell: Cell) -> tuple[int, int]:
    return sum(cell.correct.values()), len(cell.correct)


def _percent(fraction: float) -> float:
    return round(100 * fraction, 4)


def paper_accuracy(profile: Profile, tasks: Sequence[str], method: Method) -> float:
    """The paper's accuracy (%) of a Table 2 method, averaged over what ``tasks`` stand for; NaN where not printed."""
    if method.coefficient != "ls":
        return NONE
    printed = paper.table2_accuracy(method.name, ",".join(map(str, method.bits)), method.group_size)
    values = [printed.get(profile.stands_for[task], NONE) for task in tasks]
    return round(sum(values) / len(values), 4)


# ------------------------------------------------------------------------------------------------ for reading


def method_name(row: pd.Series) -> str:
    """ "Direct", "Direct + hadamard", "Residual LS (last)" and so on, for one row of a table."""
    if row["reference"] == "none":
        return "BF16"
    coefficient = {"ls": "LS", "unit": "unit", "norm_ratio": "norm ratio"}.get(row["coefficient"], "")
    base = "Direct" if row["reference"] == "direct" else f"Residual {coefficient} ({row['reference']})"
    return base + (f" + {row['rotation']}" if row["rotation"] != "none" else "")


def _verdict(row: pd.Series, direct: pd.Series | None) -> str:
    """The paper's value for the paper's own model; for another model only the order relative to direct coding."""
    if row["model"].lower() == paper.OURO:
        return "reproduced" if row["ci_low"] <= row["paper_pct"] <= row["ci_high"] else "not reproduced"
    if direct is None or row["p_vs_direct"] != row["p_vs_direct"]:
        return "–"
    order = "above" if row["paper_pct"] >= direct["paper_pct"] else "below"
    if row["p_vs_direct"] >= 0.05:
        return f"undecided: {order} direct"
    same = (row["accuracy_pct"] > direct["accuracy_pct"]) == (order == "above")
    return f"{'reproduced' if same else 'not reproduced'}: {order} direct"


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """``table2`` laid out for readers: Paper | Ours | Δ | n | 95 % CI | verdict.

    A model other than the paper's gets no verdict on values: only "above (or below) direct coding of the same bits"
    is judged, by McNemar's test at 5 %.
    """
    import pandas as pd

    key = ["benchmark", "bits_per_loop", "group_size"]
    plain = table[(table["reference"] == "direct") & (table["rotation"] == "none")]
    direct = {tuple(row[k] for k in key): row for _, row in plain.iterrows()}
    rows = []
    for _, row in table.iterrows():
        rows.append(
            {
                "Task": row["benchmark"],
                "Precision": row["config"],
                "Method": method_name(row),
                "Bits": f"{row['effective_bits']:.4g}",
                "Paper": _one_decimal(row["paper_pct"]),
                "Ours": _one_decimal(row["accuracy_pct"]),
                "Δ": f"{row['accuracy_pct'] - row['paper_pct']:+.1f}" if row["paper_pct"] == row["paper_pct"] else "–",
                "n": row["n"],
                "95 % CI": f"{row['ci_low']:.1f} – {row['ci_high']:.1f}",
                "Verdict": _verdict(row, direct.get(tuple(row[k] for k in key))),
            }
        )
    return pd.DataFrame(rows)


def _one_decimal(value: float) -> str:
    return f"{value:.1f}" if value == value else "–"


def summary(profile: str | Profile = "mini") -> pd.DataFrame:
    """Table 2 as the paper lays it out: a row per method, a column per task and the mean, ours with (the paper's).

    Reads the records and runs no model.
    """
    import pandas as pd

    profile = profile_of(profile)
    both = pd.concat([table2(profile), table2_mean(profile)])
    rows: dict[tuple, dict] = {}
    for _, row in both.iterrows():
        line = rows.setdefault(
            (row["config"], method_name(row)),
            {"Precision": row["config"], "Method": method_name(row), "Bits": f"{row['effective_bits']:.4g}"},
        )
        task = row["benchmark"]
        title = f"{task} ({profile.stands_for[task]})" if task in profile.stands_for else "mean"
        line[title] = f"{row['accuracy_pct']:.1f} ({_one_decimal(row['paper_pct'])})"
    return pd.DataFrame(list(rows.values()))


def markdown(table: pd.DataFrame) -> str:
    """A laid-out table as GitHub Markdown (numbers as they are, nothing re-rounded)."""
    return table.to_markdown(index=False, disable_numparse=True)
