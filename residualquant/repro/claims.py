"""The paper's ten claims about order, judged on our own results by paired tests; ``claims.csv``.

"Better" is an exact McNemar test at 5 % (on the mean of several tasks a z test, every task weighing the same), "not
worse" a non-inferiority test with a margin of 3 points; in Table 1, where every problem gives a number and not a
verdict, "lower" and "higher" are sign tests over the problems. A claim about both families of models is judged on all
their tasks, as the paper does, and on each family alone. The p-values of a claim's comparisons are corrected after
Holm. A comparison is *reproduced* when its test says so, *not reproduced* when the opposite is significant, and
*undecided* otherwise.

A claim is reproduced when all its comparisons are (where the paper says "most": more than half), not reproduced when
one is refuted (more than half), and undecided otherwise, also where a profile measures only some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.repro.cells import Cells, compute_cells, coverage, read_cells
from residualquant.repro.labels import BF16, FAMILIES, Line, coded, direct_of, lines, name_of
from residualquant.repro.profiles import Profile, profile_of
from residualquant.repro.stats import (
    MARGIN,
    Pair,
    bootstrap_mean,
    holm,
    mcnemar_exact,
    noninferiority,
    paired_difference,
    paired_test,
    rounded_p,
    tost,
)
from residualquant.repro.tables import NONE, pair_of, write_table

if TYPE_CHECKING:
    import pandas as pd

ALPHA = 0.05
REPRODUCED, REFUTED, UNDECIDED, UNMEASURED = "reproduced", "not reproduced", "undecided", "not measured"
PRECISIONS = ("INT2 g=32", "INT2 g=16", "INT2/4 g=32", "INT2/4 g=16")


@dataclass(frozen=True)
class Comparison:
    """On the mean over the benchmarks of ``label``, ``first`` is better than ``second`` (or "not worse")."""

    label: str
    first: KVQuantConfig
    second: KVQuantConfig
    kind: str = "better"


@dataclass(frozen=True)
class NmseComparison:
    """In Table 1, at ``loop`` ("1" … or "avg"), the reference Last has a "lower" (or "higher") error than First."""

    loop: str
    kind: str = "lower"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the comparisons that all (or ``most``) must be reproduced."""

    number: str
    text: str
    comparisons: tuple[Comparison | NmseComparison, ...]
    most: bool = False


def _rotated(config: KVQuantConfig, rotation: str = "optr_h") -> KVQuantConfig:
    return replace(config, rotation=rotation)


_RESIDUAL = {name: preset(name) for name in PRECISIONS}
_DIRECT = {name: direct_of(config) for name, config in _RESIDUAL.items()}
_OSCAR = _rotated(_RESIDUAL["INT2 g=16"], "oscar")
_ASCENDING_G32, _UNIFORM_G16 = _RESIDUAL["INT2/4 g=32"], _RESIDUAL["INT2 g=16"]


def _ls_against_unit() -> tuple[Comparison, ...]:
    unit = (line.config for line in lines("table9") if line.config.coefficient == "unit")
    return tuple(Comparison("table9", replace(config, coefficient="ls"), config) for config in unit)


def _ascending_against_descending() -> tuple[Comparison, ...]:
    return tuple(
        Comparison("table5", coded("2,2,2,4", g, "last", "ls", r), coded("4,2,2,2", g, "last", "ls", r))
        for g in ("32", "16")
        for r in ("none", "optr_h")
    )


def _last_against_others(**column: str) -> tuple[Comparison, ...]:
    return tuple(
        Comparison("table3", preset(p, **column), preset(p, reference=other, **column), kind)
        for other, kind in (("previous", "not worse"), ("next", "not worse"), ("first", "better"))
        for p in ("INT2 g=16", "INT2/4 g=32")
    )


def _large_groups_against_four_loops() -> tuple[Comparison, ...]:
    return tuple(
        Comparison("table8", preset(p, loops, rotation=r), preset(p, rotation=r), "not worse")
        for loops in (8, 16)
        for p in ("INT2/4 g=16", "INT2/4 g=32")
        for r in ("none", "optr_h")
    )


CLAIMS = (
    Claim(
        "1",
        "Residual coding without a rotation is above OptR-H alone, on average, at all four precisions (Table 2)",
        tuple(Comparison("table2", _RESIDUAL[p], _rotated(_DIRECT[p])) for p in PRECISIONS),
    ),
    Claim(
        "2",
        "Residual coding is above direct coding at comparable budgets (Table 2)",
        tuple(Comparison("table2", _RESIDUAL[p], _DIRECT[p]) for p in PRECISIONS),
    ),
    Claim(
        "3a", "Least-squares coefficients are above unit ones in most cells (Tables 3 and 9)", _ls_against_unit(), True
    ),
    Claim(
        "3b",
        "In particular for the Last-loop reference at INT2/4 g=32 (Table 3)",
        (Comparison("table3", _ASCENDING_G32, replace(_ASCENDING_G32, coefficient="unit")),),
    ),
    Claim(
        "4a",
        "A rotation adds to residual coding at INT2, OptR-H (Table 2) and OSCAR (Table 4)",
        (
            *(Comparison("table2", _rotated(_RESIDUAL[p]), _RESIDUAL[p]) for p in PRECISIONS[:2]),
            Comparison("table4", _OSCAR, _UNIFORM_G16),
        ),
    ),
    Claim(
        "4b",
        "Residual coding with a rotation is above the rotation alone, OptR-H (Table 2) and OSCAR at INT2 (Table 4)",
        (
            *(Comparison("table2", _rotated(_RESIDUAL[p]), _rotated(_DIRECT[p])) for p in PRECISIONS),
            Comparison("table4", _OSCAR, _rotated(_DIRECT["INT2 g=16"], "oscar")),
        ),
    ),
    Claim(
        "5",
        "Ascending precision [2,2,2,4] is above descending [4,2,2,2] under the Last-loop reference (Table 5)",
        _ascending_against_descending(),
    ),
    Claim(
        "6",
        "INT2/4 g=32 is above INT2 g=16 at an equal 3.1 bits (Table 5)",
        (
            Comparison("table5", _ASCENDING_G32, _UNIFORM_G16),
            Comparison("table5", _rotated(_ASCENDING_G32), _rotated(_UNIFORM_G16)),
        ),
    ),
    Claim(
        "7a",
        "The Last-loop reference is not worse than Previous and Next and better than First, LS and OptR-H (Table 3)",
        _last_against_others(rotation="optr_h"),
    ),
    Claim("7b", "The same, LS and no rotation (Table 3)", _last_against_others()),
    Claim("7c", "The same, unit coefficients (Table 3)", _last_against_others(coefficient="unit")),
    Claim(
        "8",
        "The full method at INT2/4 is not worse than BF16 (Table 2)",
        tuple(Comparison("table2", _rotated(_RESIDUAL[p]), BF16, "not worse") for p in PRECISIONS[2:]),
    ),
    Claim(
        "9",
        "Groups of 8 and 16 loops are as good as groups of 4, Huginn (Table 8)",
        _large_groups_against_four_loops(),
    ),
    Claim(
        "10",
        "Key NMSE is lower under Last than under First on average and at loops 1 to 3, higher at the last (Table 1)",
        (*(NmseComparison(loop) for loop in ("avg", "1", "2", "3")), NmseComparison("4", "higher")),
    ),
)


def claims(profile: str | Profile = "mini", compute: bool = False) -> pd.DataFrame:
    """Every claim, comparison by comparison and then as a whole.

    Columns: claim (its number), text, family ("all", or the one it is judged on alone), comparison, kind, tasks, n,
    unit, first, second, difference, ci_low, ci_high (95 %: Agresti-Min for accuracies, bootstrap over problems in
    Table 1), test, p, p_holm, p_same (TOST, 3 points), verdict, paper_difference. Accuracies and differences are
    equal-weight means over the tasks. The row of a whole claim has "all" as its comparison; where a claim's results are
    missing its verdict is "not measured", and ``test`` says what is missing.

    Args:
        compute: first compute what is missing.

    Raises:
        ResidualQuantError: what is missing cannot be computed here.
    """
    profile = profile_of(profile)
    if compute:
        compute_cells(profile, {c.label for claim in CLAIMS for c in claim.comparisons if isinstance(c, Comparison)})
    read = cache(lambda label: read_cells(profile, [label]))
    rows = []
    for family, claim in chain.from_iterable(map(_parts, CLAIMS)):
        try:
            judged = [row for c in claim.comparisons if (row := _judge(profile, c, family, read, compute)) is not None]
            missing = "" if judged else _why(profile, claim)
        except ResidualQuantError as error:
            judged, missing = [], str(error)
        about = {"claim": claim.number, "text": claim.text, "family": family}
        rows += [about | row for row in _decide(judged)]
        rows.append(about | _whole(claim, judged, missing))
    return write_table("claims", rows, profile)


def whole_claims(table: pd.DataFrame) -> pd.DataFrame:
    """Of the rows of :func:`claims` those of whole claims, with how many of its ``comparisons`` hold."""
    whole = table[table["comparison"] == "all"]
    return whole[["claim", "text", "family", "verdict", "test"]].rename(columns={"test": "comparisons"})


def _parts(claim: Claim) -> Iterator[tuple[str, Claim]]:
    """("all", the claim), then, where it is about several families of models, each with what is compared there."""
    yield "all", claim
    about = [(c, {line.family for line in _lines(c)}) for c in claim.comparisons if isinstance(c, Comparison)]
    families = [family for family in FAMILIES if any(family in there for _, there in about)]
    if len(families) > 1:
        for family in families:
            yield family, replace(claim, comparisons=tuple(c for c, there in about if family in there))


def _lines(comparison: Comparison, family: str = "all") -> list[Line]:
    configs = comparison.first, comparison.second
    return [line for line in lines(comparison.label) if line.config in configs and family in ("all", line.family)]


def _judge(
    profile: Profile,
    comparison: Comparison | NmseComparison,
    family: str,
    read: Callable[[str], Cells],
    compute: bool,
) -> dict | None:
    """One comparison's numbers, test and one-sided finding; None where not all of its cells are measured."""
    if isinstance(comparison, NmseComparison):
        return _judge_nmse(profile, comparison, compute)
    cells, wanted = read(comparison.label), _lines(comparison, family)
    if any((*profile.place_of(line), line.config) not in cells for line in wanted):
        return None
    return _judge_accuracy(profile, cells, comparison, wanted)


def _judge_accuracy(profile: Profile, cells: Cells, comparison: Comparison, wanted: list[Line]) -> dict:
    first, second = comparison.first, comparison.second
    places = list(dict.fromkeys(profile.place_of(line) for line in wanted))
    pairs = [pair_of(cells, place, first, second) for place in places]
    difference, low, high = paired_difference(*pairs)
    equal, better = paired_test(*pairs), comparison.kind == "better"
    name = "exact McNemar" if len(pairs) == 1 else "z of the mean over tasks"
    printed = [[line.paper_pct for line in wanted if line.config == config] for config in (first, second)]
    return {
        "comparison": f"{name_of(first)} against {name_of(second)}",
        "kind": comparison.kind,
        "tasks": " ".join(f"{family}:{task}" for family, task in places),
        "n": sum(pair.n for pair in pairs),
        "unit": "%",
        "first": _mean_accuracy(cells, places, first),
        "second": _mean_accuracy(cells, places, second),
        "difference": round(100 * difference, 4),
        "ci_low": round(100 * low, 4),
        "ci_high": round(100 * high, 4),
        "test": name if better else f"non-inferiority, {100 * MARGIN:.0f} points",
        "p": rounded_p(equal if better else noninferiority(*pairs)),
        "p_same": rounded_p(tost(*pairs)),
        "paper_difference": round(sum(printed[0]) / len(printed[0]) - sum(printed[1]) / len(printed[1]), 4),
        "_says": not better or difference > 0,
        "_opposite": equal if difference < 0 else 1.0,
    }


def _judge_nmse(profile: Profile, comparison: NmseComparison, compute: bool) -> dict | None:
    from residualquant.repro.analyses import nmse_by_problem
    from residualquant.repro.paper import printed

    nmse = 1000 * nmse_by_problem(profile, compute)
    last, first = nmse[f"last_{comparison.loop}"], nmse[f"first_{comparison.loop}"]
    mean, low, high = bootstrap_mean((last - first).tolist())
    lower, higher = int((last < first).sum()), int((last > first).sum())
    p = mcnemar_exact(Pair(lower, higher, len(nmse)))
    here = [row for row in printed("table1") if row["loop"] == comparison.loop]
    paper = {row["reference"]: float(row["key_nmse_x1000"]) for row in here}
    says = lower > higher if comparison.kind == "lower" else higher > lower
    return {
        "comparison": f"Last against First, {'average' if comparison.loop == 'avg' else f'loop {comparison.loop}'}",
        "kind": comparison.kind,
        "tasks": nmse.attrs["tasks"],
        "n": len(nmse),
        "unit": "NMSE x1000",
        "first": round(float(last.mean()), 4),
        "second": round(float(first.mean()), 4),
        "difference": round(mean, 4),
        "ci_low": round(low, 4),
        "ci_high": round(high, 4),
        "test": "sign test",
        "p": rounded_p(p),
        "p_same": NONE,
        "paper_difference": round(paper["last"] - paper["first"], 4),
        "_says": says,
        "_opposite": 1.0 if says else p,
    }


def _why(profile: Profile, claim: Claim) -> str:
    """Why none of a claim's comparisons can be judged."""
    labels = {c.label for c in claim.comparisons if isinstance(c, Comparison)}
    return coverage(profile, sorted(labels)) or "outside this profile"


def _decide(judged: list[dict]) -> list[dict]:
    """The rows with p-values after Holm and verdicts; refutation needs 5 % divided by the number of comparisons."""
    for row, p in zip(judged, holm([row["p"] for row in judged])):
        says, opposite = row.pop("_says"), row.pop("_opposite")
        row["p_holm"] = rounded_p(p)
        refuted = opposite < ALPHA / len(judged)
        row["verdict"] = REPRODUCED if p < ALPHA and says else REFUTED if refuted else UNDECIDED
    return judged


def _whole(claim: Claim, judged: list[dict], missing: str) -> dict:
    wanted, count = len(claim.comparisons), [row["verdict"] for row in judged].count
    needed = wanted // 2 + 1 if claim.most else wanted
    refuting = wanted // 2 + 1 if claim.most else 1
    if missing:
        return {"comparison": "all", "test": missing, "verdict": UNMEASURED}
    verdict = REPRODUCED if count(REPRODUCED) >= needed else REFUTED if count(REFUTED) >= refuting else UNDECIDED
    return {
        "comparison": "all",
        "n": max(row["n"] for row in judged),
        "test": f"{count(REPRODUCED)} of {wanted} comparisons reproduced, {count(REFUTED)} refuted"
        + (f", {wanted - len(judged)} not measured" if len(judged) < wanted else ""),
        "verdict": verdict,
    }


def _mean_accuracy(cells: Cells, places: list[tuple[str, str]], config: KVQuantConfig) -> float:
    correct = (cells[*place, config].correct for place in places)
    return round(100 * sum(sum(c.values()) / len(c) for c in correct) / len(places), 4)
