"""Accuracy tables laid out for readers: the words of a row, the paper's own layout, and Paper | Ours | Δ | verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residualquant.repro.labels import FAMILIES, LABELS

if TYPE_CHECKING:
    import pandas as pd

ROTATION_NAMES = {"none": "", "hadamard": "Hadamard", "oscar": "OSCAR", "optr_h": "OptR-H"}
COEFFICIENT_NAMES = {"ls": "LS", "unit": "unit", "norm_ratio": "norm ratio"}
BENCHMARK_NAMES = {"gsm8k": "GSM8K", "math500": "MATH500", "humaneval": "HumanEval", "mbpp": "MBPP", "mean": "mean"}
STEPS = {
    "bf16": "BF16",
    "direct_int2": "direct INT2",
    "last_loop_residual": "+ last-loop residual",
    "ls_scaling": "+ LS scaling",
    "rotation_optr_h": "+ OptR-H rotation",
    "mixed_precision": "+ INT4 anchor",
}
PAPER_MODELS = ("ouro-1.4b", "huginn-0125")  # as checkpoints are named: their values are judged, not only orders


def place_title(row: pd.Series) -> str:
    """ "words (GSM8K), Huginn" for a mini on a task; the benchmark's own name for the paper's model."""
    stands_for = BENCHMARK_NAMES.get(row["stands_for"], row["stands_for"])
    family = next((f.capitalize() for f in FAMILIES if f in str(row["model"]).lower()), "all")
    task = stands_for if row["benchmark"] in BENCHMARK_NAMES else f"{row['benchmark']} ({stands_for})"
    return f"{task}, {family}"


def with_words(table: pd.DataFrame) -> pd.DataFrame:
    """An accuracy table with the columns that layouts and pictures are arranged by, all of them text.

    Adds: place; precision ("INT2/4 g=32"); method ("residual + OptR-H" and the like, "other" for what Table 2 has not,
    "BF16"); coding (direct or residual); scaling ("LS + OSCAR"); turn (the rotation); bits_and_group; loops;
    reference_loop; step_name (of Figure 1).

    Raises:
        ValueError: a needed column is missing.
    """
    needed = {"model", "benchmark", "stands_for", "config", "bits_per_loop", "group_size", "reference", "coefficient"}
    if missing := sorted((needed | {"rotation", "accuracy_pct", "paper_pct"}) - set(table.columns)):
        raise ValueError(f"the table lacks the column {missing[0]!r}; it has {list(table.columns)}")
    words = [_words(row) for _, row in table.iterrows()]
    return table.assign(**{name: [w[name] for w in words] for name in (words[0] if words else ())})


def _words(row: pd.Series) -> dict[str, str]:
    rotation = ROTATION_NAMES[row["rotation"]]
    turned = f" + {rotation}" if rotation else ""
    bits = row["bits_per_loop"].split(",")
    is_bf16, is_direct = row["reference"] == "none", row["reference"] == "direct"
    coding = "BF16" if is_bf16 else "direct" if is_direct else "residual"
    in_table2 = is_direct or (row["reference"], row["coefficient"]) == ("last", "ls")
    scaling = coding if is_bf16 or is_direct else COEFFICIENT_NAMES[row["coefficient"]]
    mixed = sorted(bits) == ["2", "2", "2", "4"]
    shown = "[" + ",".join(bits) + "]" if len(bits) <= 4 else f"[{len(bits) - 1} x {bits[0]}, {bits[-1]}]"
    return {
        "place": place_title(row),
        "precision": f"INT2/4 g={row['group_size']}" if mixed else row["config"],
        "method": "BF16" if is_bf16 else coding + turned if in_table2 else "other",
        "coding": coding,
        "scaling": "BF16" if is_bf16 else scaling + turned,
        "turn": "BF16" if is_bf16 else rotation or "no rotation",
        "bits_and_group": "BF16" if is_bf16 else f"{shown} g={row['group_size']}",
        "loops": "BF16" if is_bf16 else f"{len(bits)} loops",
        "reference_loop": "BF16" if is_bf16 else f"direct {''.join(bits)}" if is_direct and mixed else row["reference"],
        "step_name": STEPS.get(str(row.get("step")), ""),
    }


def method_name(row: pd.Series) -> str:
    """ "Direct", "Direct + OptR-H", "Residual LS (last) + OSCAR" and so on, for one row of a table."""
    if row["reference"] == "none":
        return "BF16"
    base = "Direct"
    if row["reference"] != "direct":
        base = f"Residual {COEFFICIENT_NAMES[row['coefficient']]} ({row['reference']})"
    return base + (f" + {ROTATION_NAMES[row['rotation']]}" if row["rotation"] != "none" else "")


# label -> the columns that name a row of the paper's layout, and the one whose values are its columns
LAYOUTS: dict[str, tuple[dict[str, str], str]] = {
    "table2": ({"precision": "Precision", "method": "Method", "bits": "Effective bits"}, "place"),
    "figure1_left": ({"step_name": "Step", "precision": "Precision"}, "place"),
    "table3": ({"precision": "Precision", "reference_loop": "Reference"}, "scaling"),
    "table4": ({"precision": "Precision", "coding": "Method"}, "turn"),
    "table5": ({"bits_and_group": "Bits per loop"}, "method"),
    "table8": ({"loops": "Loops per group", "precision": "Precision"}, "turn"),
    "table9": ({"precision": "Precision", "reference_loop": "Reference"}, "scaling"),
}


def summary(label: str, table: pd.DataFrame, mean: pd.DataFrame | None = None) -> pd.DataFrame:
    """An accuracy table as the paper lays it out: ours, and the paper's in brackets; "–" where nothing was measured.

    Args:
        label: one of ``LABELS``; its layout is taken.
        table: its rows.
        mean: Table 2's means, for a last column each.

    Raises:
        ValueError: another label.
    """
    import pandas as pd

    if label not in LABELS:
        raise ValueError(f"no layout for {label!r}; known: {', '.join(LABELS)}")
    rows, column = LAYOUTS[label]
    both = with_words(table if mean is None else pd.concat([table, mean], ignore_index=True))
    if "bits" in rows:
        both = both.assign(bits=_bits_of_families(both))
    laid_out: dict[tuple, dict] = {}
    for _, row in both.iterrows():
        names = {title: row[key] for key, title in rows.items()}
        line = laid_out.setdefault(tuple(names.values()), names)
        line[row[column]] = f"{_one_decimal(row['accuracy_pct'])} ({_one_decimal(row['paper_pct'])})"
    made = _baseline_first(pd.DataFrame(list(laid_out.values()))).fillna("")
    made.attrs = table.attrs
    return made


def _bits_of_families(words: pd.DataFrame) -> list[str]:
    """ "2.594 / 2.625" for every row of Table 2: effective bits of its configuration, by the families' head sizes."""
    names = words["precision"] + words["method"]
    tasks = words["benchmark"] != "mean"
    shown = words["effective_bits"][tasks].map("{:.4g}".format).groupby(names[tasks], sort=False).unique()
    return [" / ".join(shown[name]) for name in names]


def _baseline_first(laid_out: pd.DataFrame) -> pd.DataFrame:
    """BF16, which is a row and has no scaling or rotation, stands in the first column of its row."""
    if "BF16" not in laid_out:
        return laid_out
    others = laid_out.drop(columns="BF16")
    first = next(name for name in others if others[name].isna()[0])
    return others.assign(**{first: others[first].fillna(laid_out["BF16"])})


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """An accuracy table row by row: Paper | Ours | Δ | n | 95 % CI | verdict.

    A model other than the paper's gets no verdict on values: only "above (or below) direct coding of the same bits"
    is judged, by McNemar's test at 5 %.
    """
    import pandas as pd

    key = ["model", "benchmark", "bits_per_loop", "group_size"]
    plain = table[(table["reference"] == "direct") & (table["rotation"] == "none")]
    direct = {tuple(row[k] for k in key): row for _, row in plain.iterrows()}
    rows = []
    for (_, row), place in zip(table.iterrows(), with_words(table)["place"]):
        measured = row["accuracy_pct"] == row["accuracy_pct"]
        rows.append(
            {
                "Task": place,
                "Precision": row["config"] + _other_loops(row),
                "Method": method_name(row),
                "Bits": f"{row['effective_bits']:.4g}",
                "Bits, whole model": f"{row['model_bits']:.4g}" if measured else "–",
                "Paper": _one_decimal(row["paper_pct"]),
                "Ours": _one_decimal(row["accuracy_pct"]),
                "Δ": f"{row['delta_pct']:+.1f}" if measured else "–",
                "n": row["n"] if measured else "–",
                "95 % CI": f"{row['ci_low']:.1f} – {row['ci_high']:.1f}" if measured else "–",
                "Verdict": _verdict(row, direct.get(tuple(row[k] for k in key))),
            }
        )
    made = pd.DataFrame(rows)
    made.attrs = table.attrs
    return made


def _other_loops(row: pd.Series) -> str:
    """ ", 8 loops" where a group has not four."""
    loops = row["bits_per_loop"].count(",") + 1
    return "" if loops == 4 else f", {loops} loops"


def _verdict(row: pd.Series, direct: pd.Series | None) -> str:
    """The paper's value for the paper's own model; for another model only the order relative to direct coding."""
    if row["accuracy_pct"] != row["accuracy_pct"]:
        return "–"
    if row["model"].lower() in PAPER_MODELS:
        return "reproduced" if row["ci_low"] <= row["paper_pct"] <= row["ci_high"] else "not reproduced"
    if direct is None or row["p_vs_direct"] != row["p_vs_direct"]:
        return "–"
    order = "above" if row["paper_pct"] >= direct["paper_pct"] else "below"
    if row["p_vs_direct"] >= 0.05:
        return f"undecided: {order} direct"
    same = (row["accuracy_pct"] > direct["accuracy_pct"]) == (order == "above")
    return f"{'reproduced' if same else 'not reproduced'}: {order} direct"


def _one_decimal(value: float) -> str:
    return f"{value:.1f}" if value == value else "–"


def markdown(table: pd.DataFrame) -> str:
    """A laid-out table as GitHub Markdown (numbers as they are, nothing re-rounded)."""
    return table.to_markdown(index=False, disable_numparse=True)
