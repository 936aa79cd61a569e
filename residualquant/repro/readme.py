"""Fill the generated blocks of README.md and docs/serving.md from the committed records: no number is typed by hand.

A block lies between ``<!-- generated:NAME -->`` and ``<!-- /generated:NAME -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.profiles import PROFILES
from residualquant.repro.served import checks_block, choice_block, speed_block

if TYPE_CHECKING:
    import pandas as pd

COMMITTED = ("mini", "full")
DOCUMENTS = ("README.md", "docs/serving.md")
_BLOCK = re.compile(r"(<!-- generated:(\w+) -->\n).*?(<!-- /generated:\2 -->)", re.DOTALL)


def accuracy_block(label: str) -> str:
    """One accuracy table as the paper lays it out, of the largest profile measured; the paper's in brackets."""
    from residualquant.repro.layouts import markdown, summary
    from residualquant.repro.tables import table

    def of(profile: str) -> str:
        found = table(label, profile)
        mean = table("table2_mean", profile) if label == "table2" else None
        sizes = " to ".join(str(n) for n in sorted({found["n"].min(), found["n"].max()}))
        about = f"n = {sizes} problems a cell; 95 % intervals and paired tests in `data/{profile}/{label}.csv`."
        laid_out = summary(label, found, mean)
        shown = _in_parts(laid_out) if label == "table2" else markdown(laid_out)
        return "\n\n".join(filter(None, (about, found.attrs["note"], shown)))

    return _of_each((COMMITTED[-1], *COMMITTED[:-1]), of, once=True)


def _in_parts(laid_out: pd.DataFrame) -> str:
    """Table 2, too wide for a page, as the means and, folded away, the tasks of each family."""
    from residualquant.repro.layouts import markdown

    means = [name for name in laid_out if name.startswith("mean, ")]
    names = [name for name in laid_out if "," not in name]
    parts = [markdown(laid_out[[*names, *means]]), "<details>\n<summary><b>The tasks one by one</b></summary>"]
    for family in ("Ouro", "Huginn"):
        tasks = {name: name.removesuffix(f", {family}") for name in laid_out if name.endswith(f", {family}")}
        tasks.pop(f"mean, {family}", None)
        parts += [f"{family}-shaped:", markdown(laid_out[[*names, *tasks]].rename(columns=tasks))]
    return "\n\n".join([*parts, "</details>"])


def table1_block() -> str:
    """Table 1 as the paper lays it out, of the largest profile measured; the paper's in brackets."""
    from residualquant.repro.layouts import markdown
    from residualquant.repro.tables import table

    def of(profile: str) -> str:
        rows = table("table1", profile)
        shown = [f"{ours:.2f} ({paper:.2f})" for ours, paper in zip(rows.nmse_x1000, rows.paper_nmse_x1000)]
        wide = rows.assign(shown=shown).pivot(index="loop", columns="reference", values="shown").reset_index()
        wide = wide.rename(columns={"loop": "Loop", "first": "First loop", "last": "Last loop"})
        about = f"n = {rows.n.min()} problems; 95 % intervals in `data/{profile}/table1.csv`."
        return f"{about}\n\n{markdown(wide)}"

    return _of_each((COMMITTED[-1], *COMMITTED[:-1]), of, once=True)


def claims_block() -> str:
    """The paper's ordering claims with their verdicts, in every profile whose records are committed."""
    import pandas as pd

    from residualquant.repro.claims import whole_claims
    from residualquant.repro.layouts import markdown
    from residualquant.repro.tables import table

    columns = {}
    for profile in COMMITTED:
        whole = whole_claims(table("claims", profile))
        columns["Claim of the paper"] = [
            f"({number}) {text}" if family == "all" else f"({number}) on {family.capitalize()} alone"
            for number, text, family in zip(whole.claim, whole.text, whole.family)
        ]
        columns[f"`{profile}`"] = [_short(*row) for row in zip(whole.verdict, whole.comparisons)]
    return markdown(pd.DataFrame(columns))


def _short(verdict: str, comparisons: str) -> str:
    """ "reproduced (4 of 4)"; a claim without results says so in two words."""
    return f"{verdict} ({found})" if (found := _count(comparisons)) else verdict


def _count(comparisons: str) -> str:
    """ "4 of 4", nothing where none was measured."""
    found = re.match(r"(\d+ of \d+) comparisons reproduced", comparisons)
    return found[1] if found else ""


_JUDGED = {
    "2": "residual above direct coding of the same bits",
    "4b": "residual coding with a rotation above the rotation alone",
    "1": "residual coding alone above OptR-H alone",
    "8": "both together not worse than BF16",
}
_VERDICTS = ("reproduced", "not reproduced", "undecided", "not measured")


def conclusions_block() -> str:
    """Table 2 and the claims in a few sentences, of the largest profile measured; numbers and verdicts are read."""
    return _of_each((COMMITTED[-1], *COMMITTED[:-1]), _conclusions, once=True)


def _conclusions(profile: str) -> str:
    from residualquant.repro.claims import whole_claims
    from residualquant.repro.layouts import with_words
    from residualquant.repro.tables import table

    words, whole = with_words(table("table2_mean", profile)), whole_claims(table("claims", profile))
    said = []
    for family in ("ouro", "huginn"):
        mean = words[words.model == family].set_index(["precision", "method"]).accuracy_pct
        if mean.isna().any():
            continue
        direct, rotated, residual, both = (
            f"{mean['INT2/4 g=32', method]:.1f} %"
            for method in ("direct", "direct + OptR-H", "residual", "residual + OptR-H")
        )
        said.append(
            f"**{family.capitalize()}-shaped, INT2/4 g=32, mean of four tasks:** {direct} with direct coding, "
            f"{rotated} with OptR-H alone, {residual} with residual coding, {both} with both; with the BF16 cache "
            f"{mean['BF16', 'BF16']:.1f} %. {_judged(whole[whole.family == family])}"
        )
    whole = whole[whole.family == "all"]
    said.append(f"**The paper's {len(whole)} claims about order:** {_listed(whole, whole.claim)}.")
    return "\n\n".join(said)


def _judged(whole: pd.DataFrame) -> str:
    """The claims of ``_JUDGED`` on one family of models, by verdict."""
    rows = whole.set_index("claim").loc[list(_JUDGED)].reset_index()
    counts = rows.comparisons.map(_count)
    text = _listed(rows, rows.claim.map(_JUDGED) + counts.map(lambda count: f" ({count})" if count else ""))
    return f"{text[0].upper()}{text[1:]}."


def _listed(rows: pd.DataFrame, names: pd.Series) -> str:
    """ "reproduced: …; not reproduced: …": ``names`` of the rows by their verdict."""
    parts = {verdict: ", ".join(names[rows.verdict == verdict]) for verdict in _VERDICTS}
    return "; ".join(f"{verdict}: {part}" for verdict, part in parts.items() if part)


def profiles_block() -> str:
    """What each profile computes, and what the models of its committed run took (a local one does not count)."""
    import pandas as pd

    from residualquant.bench.runs import recorded
    from residualquant.repro.cost import machine_of, model_time
    from residualquant.repro.layouts import markdown

    rows = []
    for profile in PROFILES.values():
        whole = recorded(profile.name)
        models = model_time(profile.name) if profile.name in COMMITTED else None
        seconds, machine = models or (None, machine_of(whole["provenance"]) if whole else "–")
        rows.append(
            {
                "Profile": f"`{profile.name}`",
                "Problems per cell, and cells": profile.describe(),
                "Time": _duration(whole["seconds"]) if whole else profile.cost,
                "Model time": _duration(seconds),
                "Measured on": machine,
            }
        )
    told = (
        "Model time is that of calibrating and decoding (`data/<profile>/records/timing.csv`), the processes that "
        "share a GPU one after the other."
    )
    table = _without_empty(pd.DataFrame(rows))
    return f"{markdown(table)}\n\n{told}" if "Model time" in table else markdown(table)


def _without_empty(table: pd.DataFrame) -> pd.DataFrame:
    """``table`` without the columns in which nothing was measured."""
    return table.loc[:, table.ne("–").any()]


def runs_block() -> str:
    """What the package's commands take, from ``data/bench/*.json``."""
    import pandas as pd

    from residualquant.bench.runs import COMMANDS, recorded
    from residualquant.repro.cost import machine_of
    from residualquant.repro.layouts import markdown

    measured = [took for name in COMMANDS if (took := recorded(name))]
    rows = [
        {
            "Command": f"`{took['command']}`",
            "Time": _duration(took["seconds"]),
            "CPU time": _duration(took["cpu_seconds"]),
            "Peak memory": _size(took["peak_mib"]),
            "Disk": _size(took["disk_mib"]),
            "Measured on": machine_of(took["provenance"]),
        }
        for took in measured
    ]
    return markdown(_without_empty(pd.DataFrame(rows)))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _size(mib: float | None) -> str:
    return "–" if mib is None else f"{mib:,.1f} MiB"


def kernels_block() -> str:
    """Decode attention on one GPU beside the fastest BF16 attention there, from data/h200/kernels.csv."""
    import pandas as pd

    from residualquant.repro.layouts import markdown

    rows = pd.read_csv(paths.data_dir("h200") / "kernels.csv")
    rows = rows[rows.reference.eq("last") & rows.context.isin((4096, 16384, 65536)) & rows.batch.isin((1, 8, 64))]
    first = rows.iloc[0]
    shape = ["model", "context", "batch"]
    shares = rows.pivot(index=shape, columns="operation", values="fraction_of_copy").map("{:.0%}".format)
    four = rows[rows.operation == "four loops"].set_index(shape).join(shares)
    table = pd.DataFrame(
        {
            "Model": four.index.get_level_values("model"),
            "Past tokens x batch": [f"{context:,} x {batch}" for _, context, batch in four.index],
            "Residual loop, of the copy bandwidth": four["residual loop"],
            "Anchor loop": four["anchor loop"],
            "Four loops, µs": four.median_us.map("{:,.0f}".format),
            "Fastest BF16, µs": four.bf16_us.map("{:,.0f}".format),
            "which is": four.bf16_way,
            "Speed-up": four.speedup.map("{:.2f}".format),
        }
    )
    return f"{first.gpu}, {first.config}, copy bandwidth {first.copy_tb_per_s:.2f} TB/s:\n\n{markdown(table)}"


def _of_each(profiles: Sequence[str], make: Callable[[str], str], once: bool = False) -> str:
    """What ``make`` gives for each profile, or for the first that is measured; a sentence where it was not measured."""
    parts, missing = [], []
    for profile in profiles:
        try:
            parts.append(f"Profile `{profile}`:\n\n{make(profile)}")
        except ResidualQuantError:
            missing.append(f"Not measured yet in `{profile}`: `make reproduce PROFILE={profile}` does it.")
        if once and parts:
            return parts[0]
    return "\n\n".join([*parts, *(missing[:1] if once else missing)])


BLOCKS: dict[str, Callable[[], str]] = {
    **{label: partial(accuracy_block, label) for label in ("table2", "table3", "table4", "table5", "table8")},
    "table1": table1_block,
    "conclusions": conclusions_block,
    "claims": claims_block,
    "profiles": profiles_block,
    "runs": runs_block,
    "kernels": kernels_block,
    "serving": speed_block,
    "serving_choice": choice_block,
    "serving_checks": checks_block,
}


def fill(text: str) -> str:
    """``text`` with the content of every generated block made anew.

    Raises:
        ResidualQuantError: a block nobody makes, or its records are missing.
    """

    def replace(match: re.Match) -> str:
        if match[2] not in BLOCKS:
            raise ResidualQuantError(f"there is no generated block {match[2]!r}; known: {', '.join(BLOCKS)}")
        return f"{match[1]}\n{BLOCKS[match[2]]().strip()}\n\n{match[3]}"

    return _BLOCK.sub(replace, text)


def main() -> None:
    """Rewrite the documents in the workspace."""
    for name in DOCUMENTS:
        path = Path(paths.workspace()) / name
        changed = paths.write_atomic(path, fill(path.read_text()))
        print(f"{name} {'rewritten' if changed else 'was current'}")


if __name__ == "__main__":
    main()
