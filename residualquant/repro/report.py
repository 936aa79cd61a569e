"""One self-contained HTML page with every table and figure of a profile, the paper's numbers beside ours.

The page is made from the records and runs no model. Pictures are embedded, nothing is loaded, no date is written:
the same records give the same bytes. A section whose records are missing says so; the others are still made.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.markup import TABLE_CSS, cell_text, table_html
from residualquant.repro.profiles import Profile, profile_of

if TYPE_CHECKING:
    import pandas as pd

TEMPLATE = Path(__file__).with_name("report.html")


@dataclass
class Section:
    """One label of the page. ``parts`` are pictures, tables and folded tables, in order."""

    label: str
    short: str
    title: str
    text: str
    parts: list[dict] = field(default_factory=list)
    missing: str = ""

    def picture(self, label: str, profile: str) -> None:
        """Draw, save and embed a figure."""
        from residualquant.repro.figures import figure
        from residualquant.repro.plots import SCREEN_DPI

        drawn = figure(label, profile)
        width = round(drawn.figure.get_size_inches()[0] * SCREEN_DPI * 1.25)
        data = base64.b64encode(drawn.png).decode("ascii")
        self.parts.append({"kind": "picture", "alt": drawn.alt, "data": data, "width": width})

    def table(self, markup: str, note: str = "") -> None:
        self.parts.append({"kind": "table", "markup": markup, "note": note})

    def folded(self, title: str, markup: str) -> None:
        self.parts.append({"kind": "folded", "title": title, "markup": markup})


@dataclass(frozen=True)
class Card:
    """One number of the page's head."""

    value: str
    text: str


def accuracy_matrix(table: pd.DataFrame, mean: pd.DataFrame, profile: Profile) -> str:
    """Table 2 as a grid: a row per configuration, a column per task and the mean; ours, its interval, the paper's.

    A cell is the bluer the closer it is to BF16 on the same task (white: 50 points below).
    """
    import pandas as pd

    from residualquant.repro.plots import benchmark_title
    from residualquant.repro.tables import method_name

    both = pd.concat([table, mean], ignore_index=True)
    benchmarks = list(dict.fromkeys(both["benchmark"]))
    top = both[both["effective_bits"] == 16].set_index("benchmark")["accuracy_pct"]
    titles = [benchmark_title(b).replace(", standing for ", "<br>for ") if b != "mean" else "mean" for b in benchmarks]
    head = "".join(f"<th>{t}</th>" for t in ("bits", *titles))
    rows, before = [], None
    for key, group in both.groupby(["config", "reference", "coefficient", "rotation"], sort=False, dropna=False):
        cells = group.set_index("benchmark")
        first = ' class="first"' if before not in (None, key[0]) else ""
        before = key[0]
        line = f'<td class="left bits">{key[0]}</td><td class="left">{html.escape(method_name(group.iloc[0]))}</td>'
        line += f"<td>{group.iloc[0]['effective_bits']:.4g}</td>"
        rows.append(f"<tr{first}>{line}{''.join(_accuracy_cell(cells.loc[b], top[b]) for b in benchmarks)}</tr>")
    return (
        '<div class="rq matrix"><table><thead><tr><th class="left">precision</th><th class="left">method</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _accuracy_cell(row: pd.Series, bf16: float) -> str:
    closeness = max(0.0, min(1.0, 1 - (bf16 - row["accuracy_pct"]) / 50))
    paper = cell_text(row["paper_pct"], "paper_pct")
    return (
        f'<td style="background:rgba(127,185,221,{0.55 * closeness:.2f})"><b>{row["accuracy_pct"]:.1f}</b>'
        f"<small>{row['ci_low']:.0f}–{row['ci_high']:.0f}, paper {paper}</small></td>"
    )


# ------------------------------------------------------------------------------------------------ sections


def _claims(s: Section, profile: Profile) -> list[Card]:
    from residualquant.repro.verdicts import claims

    table = claims(profile)
    whole = table[table["comparison"].str.startswith("all ")]
    s.table(table_html(whole[["text", "verdict", "test"]].rename(columns={"text": "claim", "test": "comparisons"})))
    columns = ["claim", "comparison", "n", "first_pct", "second_pct", "difference", "ci_low", "ci_high", "test", "p"]
    columns += ["p_same", "paper_difference", "verdict"]
    single = table[~table["comparison"].str.startswith("all ")]
    s.folded("Every comparison", table_html(single[columns], new_block="claim"))
    counts = whole["verdict"].value_counts()
    text = f"claims reproduced; {counts.get('undecided', 0)} undecided, {counts.get('not reproduced', 0)} not"
    return [Card(f"{counts.get('reproduced', 0)} of {len(whole)}", text)]


def _table2(s: Section, profile: Profile) -> list[Card]:
    from residualquant.repro.plots import with_keys
    from residualquant.repro.tables import compare, table2, table2_mean

    table, mean = table2(profile), table2_mean(profile)
    s.table(
        accuracy_matrix(table, mean, profile),
        f"Accuracy in percent with its 95 % interval, and the paper's Ouro-1.4B. Problems per task: "
        f"{', '.join(f'{task} {n}' for task, n in profile.problems.items())}.",
    )
    s.picture("table2", profile.name)
    s.folded("Every cell: Paper, Ours, Δ, n, interval, verdict", table_html(compare(table), new_block="Task"))
    found = with_keys(mean).set_index(["method", "precision"])
    cards = [Card(f"{found.loc[('bf16', '16'), 'accuracy_pct']:.1f} %", "mean accuracy with a BF16 cache")]
    for method, text in (("residual+rotation", "the full method"), ("direct", "direct INT2/4")):
        if (key := (method, "2224 g32")) in found.index:
            bits = found.loc[key, "effective_bits"]
            cards.append(Card(f"{found.loc[key, 'accuracy_pct']:.1f} %", f"{text} at {bits:.1f} bits"))
    return cards


def _pareto(s: Section, profile: Profile) -> list[Card]:
    s.picture("pareto", profile.name)
    return []


def _figure1_left(s: Section, profile: Profile) -> list[Card]:
    from residualquant.repro.tables import figure1_left

    table = figure1_left(profile)
    s.picture("figure1_left", profile.name)
    columns = ["step", "config", "coefficient", "rotation", "effective_bits", "n", "accuracy_pct", "ci_low", "ci_high"]
    s.table(table_html(table[[*columns, "p_vs_previous", "p_vs_bf16", "paper_pct"]]))
    return []


def _surfaces(s: Section, profile: Profile) -> list[Card]:
    from residualquant.repro.traces import kept_trace, surface_table

    trace = kept_trace(profile.name)
    s.picture(s.label, profile.name)
    s.folded("The same in numbers", table_html(surface_table(trace, s.label), new_block="loop"))
    return []


def _storage(s: Section, profile: Profile) -> list[Card]:
    from residualquant.config import preset
    from residualquant.layout import capacity_ratio, traffic_ratio
    from residualquant.repro.storage import accesses_table, bytes_table, reads_table, write_storage

    table = write_storage(profile.name)
    s.picture("storage", profile.name)
    s.table(table_html(bytes_table()), "One token and head, K or V, four loops, 128 channels.")
    s.table(table_html(reads_table()), "Read per decode step under each reference policy, INT2/4 g=32.")
    s.folded("Logical reads of a shared anchor and of a chain", table_html(accesses_table()))
    s.folded(f"All {len(table)} numbers the paper prints", table_html(table, new_block="where"))
    full = preset("INT2/4 g=32")
    same = int((table["verdict"] == "reproduced").sum())
    return [
        Card(f"{same} of {len(table)}", "printed bit, byte and read numbers reproduced exactly"),
        Card(f"{capacity_ratio(full, 128):.2f}x", f"smaller than BF16; {traffic_ratio(full, 128):.2f}x less is read"),
    ]


def _made(s: Section, profile: Profile) -> list[Card]:
    from residualquant.repro.provenance import provenance_table

    made = provenance_table(profile.name).T.reset_index()
    made.columns = ["field", *(f"records {i + 1}" for i in range(len(made.columns) - 1))]
    s.table(table_html(made))
    return []


_SURFACE_TEXT = "Post-RoPE keys over tokens and channels; one height and colour scale for all surfaces."
SECTIONS: dict[str, tuple[str, str, str, Callable[[Section, Profile], list[Card]]]] = {
    "claims": (
        "Claims", "What the paper claims about order",
        "Judged on our own records, problem by problem: “better” by the exact McNemar test at 5 %, “not worse” by a "
        "non-inferiority test with a margin of 3 points. Undecided: too few problems to tell.", _claims,
    ),
    "table2": (
        "Table 2", "Table 2: accuracy of every cache configuration",
        "Small looped models on four procedural tasks that stand for the paper's benchmarks. A Hadamard rotation "
        "stands in the rows that are OptR-H in the paper. Another model on other tasks: compare orders, not values.",
        _table2,
    ),
    "pareto": ("Pareto", "Accuracy against bits", "Every Table 2 configuration, mean of the four tasks.", _pareto),
    "figure1_left": (
        "Figure 1", "Figure 1 (left): one ingredient at a time",
        "From direct INT2 to the full method, on the task that stands for MATH500.", _figure1_left,
    ),
    "figure2": ("Figure 2", "Figure 2: what one loop says about the next", _SURFACE_TEXT, _surfaces),
    "figure5": ("Figure 5", "Figure 5: every loop against the last", _SURFACE_TEXT, _surfaces),
    "storage": (
        "Storage", "Bits, bytes and reads",
        "Analytic: nothing is measured here. Each number is computed from the configuration and rounded as the paper "
        "prints it.", _storage,
    ),
    "provenance": ("Made by", "Who made these numbers", "Versions and machine of every record of this profile.", _made),
}  # fmt: skip


def write_report(profile: str | Profile = "mini") -> Path:
    """Write ``figures/<profile>/report.html`` from the records and return its path; no model runs.

    Raises:
        ValueError: an unknown profile.
        ResidualQuantError: the page could not be written; the one before is kept.
    """
    import jinja2

    from residualquant import __version__

    profile = profile_of(profile)
    sections, cards = [], []
    for label, (short, title, text, fill) in SECTIONS.items():
        section = Section(label, short, title, text)
        try:
            cards += fill(section, profile)
        except ResidualQuantError as error:
            section.missing, section.parts = str(error), []
        sections.append(section)
    models = " and ".join(dict.fromkeys(profile.models[task].split("/")[-1] for task in profile.tasks))
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text()).render(
        profile=profile.name, version=__version__, table_css=TABLE_CSS, cards=cards, sections=sections,
        subtitle=f"KV cache quantisation for looped transformers with 2-bit residuals, measured on {models}: profile "
        f"“{profile.name}”, {profile.cost}.",
    )  # fmt: skip
    path = paths.figures_dir(profile.name) / "report.html"
    paths.write_atomic(path, page)
    return path
