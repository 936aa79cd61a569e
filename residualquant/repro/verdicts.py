"""The paper's ordering claims, judged on our own records by paired tests; ``claims.csv``.

"Better" is an exact McNemar test at 5 %; "not worse" a non-inferiority test with a margin of 3 points. A claim about
several precisions is reproduced when it is at every one of them, not reproduced when it is refuted at any, and
undecided otherwise, also where a small profile measures only some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from residualquant.repro import paper
from residualquant.repro.cells import Cells, compute_cells, read_cells
from residualquant.repro.profiles import FIGURE1, FIGURE1_TASK, PRECISIONS, TABLE2, Method, Profile, profile_of
from residualquant.repro.stats import MARGIN, mcnemar_exact, noninferiority, paired_difference, tost
from residualquant.repro.tables import BF16, pair_of, paper_accuracy, write_table

if TYPE_CHECKING:
    import pandas as pd

ALPHA = 0.05
REPRODUCED, REFUTED, UNDECIDED = "reproduced", "not reproduced", "undecided"


@dataclass(frozen=True)
class Claim:
    """``comparisons`` are (first, second) methods; the claim says the first is better, or not worse, each time."""

    name: str
    text: str
    comparisons: tuple[tuple[Method, Method], ...]
    kind: str = "better"
    tasks: tuple[str, ...] | None = None


def _at_each(first: str, second: str, precisions: Sequence = PRECISIONS) -> tuple[tuple[Method, Method], ...]:
    return tuple((Method(first, *p), Method(second, *p)) for p in precisions)


_INT2_G16, _INT24_G32 = PRECISIONS[1], PRECISIONS[2]
CLAIMS = (
    Claim(
        "residual_above_rotation",
        "Residual coding without a rotation is above the rotation alone, on average, at all four precisions (Table 2)",
        _at_each("residual_ls", "optr_h"),
    ),
    Claim(
        "residual_above_direct",
        "Residual coding is above direct coding at comparable budgets (Table 2)",
        _at_each("residual_ls", "direct"),
    ),
    Claim(
        "ls_above_unit",
        "Least-squares coefficients are above unit ones, for the Last-loop reference at INT2 g=32 (Figure 1, left)",
        ((FIGURE1["ls_scaling"], FIGURE1["last_loop_residual"]),),
        tasks=(FIGURE1_TASK,),
    ),
    Claim(
        "rotation_adds_to_residual",
        "A rotation adds to residual coding at INT2 (Tables 2 and 4)",
        _at_each("residual_ls+optr_h", "residual_ls", PRECISIONS[:2]),
    ),
    Claim(
        "residual_adds_to_rotation",
        "Residual coding with a rotation is above the rotation alone (Table 2)",
        _at_each("residual_ls+optr_h", "optr_h"),
    ),
    Claim(
        "ascending_above_uniform",
        "INT2/4 g=32 is above INT2 g=16 at an equal 3.1 bits (Table 2)",
        tuple((Method(m, *_INT24_G32), Method(m, *_INT2_G16)) for m in ("residual_ls", "residual_ls+optr_h")),
    ),
    Claim(
        "full_method_not_worse_than_bf16",
        "The full method at INT2/4 is not worse than BF16 (Table 2)",
        tuple((Method("residual_ls+optr_h", *p), BF16) for p in PRECISIONS[2:]),
        kind="not worse",
    ),
)


def claims(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Every claim that this profile's cells can judge, comparison by comparison and then as a whole.

    Columns: claim, text, comparison, kind, rotation, tasks, n, first_pct, second_pct, difference, ci_low, ci_high
    (points, 95 %), test, p, p_same (TOST, 3 points), verdict, paper_difference. Accuracies and differences are
    equal-weight means over the tasks; McNemar's test pools their problems.
    """
    profile = profile_of(profile)
    if compute:
        compute_cells(profile)
    cells = read_cells(profile)
    rows = []
    for claim in CLAIMS:
        tasks = claim.tasks or profile.tasks
        here = [c for c in claim.comparisons if all((t, m) in cells for t in tasks for m in c)]
        judged = [_judge(profile, cells, claim, tasks, first, second) for first, second in here]
        rows += judged
        if judged:
            rows.append(_whole(claim, tasks, judged))
    return write_table("claims", rows, profile)


def _name(method: Method) -> str:
    config = method.config
    kind = {"direct": "direct", "none": "none"}.get(config.reference, f"{config.reference} {config.coefficient}")
    rotation = f" + {config.rotation}" if config.rotation != "none" else ""
    return "BF16" if config.is_off else f"{config.label} {kind}{rotation}"


def _judge(profile: Profile, cells: Cells, claim: Claim, tasks: Sequence[str], first: Method, second: Method) -> dict:
    pairs = [pair_of(cells, task, first, second) for task in tasks]
    difference, low, high = paired_difference(*pairs)
    mcnemar = mcnemar_exact(*pairs)
    if claim.kind == "better":
        test, p = "exact McNemar", mcnemar
        verdict = UNDECIDED if p >= ALPHA or not difference else REPRODUCED if difference > 0 else REFUTED
    else:
        test, p = f"non-inferiority, {100 * MARGIN:.0f} points", noninferiority(*pairs)
        worse = difference < 0 and mcnemar < ALPHA
        verdict = REPRODUCED if p < ALPHA else REFUTED if worse else UNDECIDED
    rotations = {m.config.rotation for m in (first, second)} - {"none"}
    return {
        "claim": claim.name,
        "text": claim.text,
        "comparison": f"{_name(first)} against {_name(second)}",
        "kind": claim.kind,
        "rotation": ",".join(sorted(rotations)) or "none",
        "tasks": " ".join(tasks),
        "n": sum(pair.n for pair in pairs),
        "first_pct": _mean_accuracy(cells, tasks, first),
        "second_pct": _mean_accuracy(cells, tasks, second),
        "difference": round(100 * difference, 4),
        "ci_low": round(100 * low, 4),
        "ci_high": round(100 * high, 4),
        "test": test,
        "p": float(f"{p:.4g}"),
        "p_same": float(f"{tost(*pairs):.4g}"),
        "verdict": verdict,
        "paper_difference": _paper_difference(profile, tasks, first, second),
    }


def _whole(claim: Claim, tasks: Sequence[str], judged: list[dict]) -> dict:
    verdicts, wanted = [row["verdict"] for row in judged], len(claim.comparisons)
    whole = REFUTED if REFUTED in verdicts else REPRODUCED if verdicts.count(REPRODUCED) == wanted else UNDECIDED
    return {
        "claim": claim.name,
        "text": claim.text,
        "comparison": f"all {wanted}",
        "kind": claim.kind,
        "rotation": judged[0]["rotation"],
        "tasks": " ".join(tasks),
        "n": judged[0]["n"],
        "test": f"{verdicts.count(REPRODUCED)} of {wanted} comparisons reproduced",
        "verdict": whole,
    }


def _mean_accuracy(cells: Cells, tasks: Sequence[str], method: Method) -> float:
    per_task = [sum(c.values()) / len(c) for c in (cells[task, method].correct for task in tasks)]
    return round(100 * sum(per_task) / len(per_task), 4)


def _paper_difference(profile: Profile, tasks: Sequence[str], first: Method, second: Method) -> float:
    if all(m in TABLE2 for m in (first, second)):
        return round(paper_accuracy(profile, tasks, first) - paper_accuracy(profile, tasks, second), 4)
    printed = paper.read_paper("figure1_left").set_index("step").math500_pct
    step = {method: name for name, method in FIGURE1.items()}
    return round(float(printed[step[first]] - printed[step[second]]), 4)
