"""One self-contained HTML page with every table and figure of a profile, the paper's numbers beside ours.

The page is made from the records and runs no model. Pictures are embedded, nothing is loaded, no date is written:
the same records give the same bytes. A section whose records are missing says so; the others are still made.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from residualquant import __version__
from residualquant.config import preset
from residualquant.errors import ResidualQuantError
from residualquant.layout import capacity_ratio, traffic_ratio
from residualquant.repro import paths
from residualquant.repro.claims import whole_claims
from residualquant.repro.figures import figure
from residualquant.repro.layouts import compare, summary, with_words
from residualquant.repro.markup import TABLE_CSS, table_html
from residualquant.repro.plots import SCREEN_DPI
from residualquant.repro.profiles import Profile, profile_of
from residualquant.repro.provenance import provenance_table
from residualquant.repro.storage import accesses_table, bytes_table, reads_table
from residualquant.repro.tables import table
from residualquant.repro.traces import kept_trace, surface_table

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


# ------------------------------------------------------------------------------------------------ sections


def _claims(s: Section, profile: Profile) -> list[Card]:
    found = table("claims", profile)
    whole, single = whole_claims(found), found[found["comparison"] != "all"]
    s.table(table_html(whole))
    columns = ["claim", "family", "comparison", "n", "unit", "first", "second", "difference", "ci_low", "ci_high"]
    columns += ["test", "p", "p_holm", "p_same", "paper_difference", "verdict"]
    if len(single):
        s.folded("Every comparison", table_html(single[columns], new_block="claim"))
    whole = whole[whole["family"] == "all"]
    counts = whole["verdict"].value_counts()
    text = f"claims reproduced; {counts.get('undecided', 0)} undecided, {counts.get('not reproduced', 0)} not"
    return [Card(f"{counts.get('reproduced', 0)} of {len(whole)}", text)]


def _accuracy(s: Section, profile: Profile) -> list[Card]:
    found = table(s.label, profile)
    mean = table("table2_mean", profile) if s.label == "table2" else None
    sizes = ", ".join(map(str, sorted({int(n) for n in found["n"].dropna()}))) or "none here"
    note = f"Accuracy in percent, the paper's in brackets. n: {sizes}. {found.attrs['note']}"
    s.table(table_html(summary(s.label, found, mean)), note)
    s.picture(s.label, profile.name)
    s.folded("Every cell: Paper, Ours, Δ, n, interval, verdict", table_html(compare(found), new_block="Task"))
    if mean is None:
        return []
    words, cards = with_words(mean), []
    for family, method, precision in (
        ("ouro", "BF16", "BF16"), ("ouro", "residual + OptR-H", "INT2/4 g=32"), ("ouro", "direct", "INT2/4 g=32"),
        ("huginn", "BF16", "BF16"), ("huginn", "residual + OptR-H", "INT2/4 g=32"),
    ):  # fmt: skip
        here = (words["model"] == family) & (words["method"] == method) & (words["precision"] == precision)
        for accuracy in words[here]["accuracy_pct"].dropna():
            cards.append(Card(f"{accuracy:.1f} %", f"{family.capitalize()}, mean of four tasks: {precision} {method}"))
    return cards


def _analysis(s: Section, profile: Profile) -> list[Card]:
    s.picture(s.label, profile.name)
    s.table(table_html(table(s.label, profile)))
    return []


def _rotations(s: Section, profile: Profile) -> list[Card]:
    s.table(table_html(table(s.label, profile)))
    return []


def _pareto(s: Section, profile: Profile) -> list[Card]:
    s.picture("pareto", profile.name)
    return []


def _surfaces(s: Section, profile: Profile) -> list[Card]:
    trace = kept_trace(profile.name)
    s.picture(s.label, profile.name)
    s.folded("The same in numbers", table_html(surface_table(trace, s.label), new_block="loop"))
    return []


def _storage(s: Section, profile: Profile) -> list[Card]:
    found = table("storage", profile)
    s.picture("storage", profile.name)
    s.table(table_html(bytes_table()), "One token and head, K or V, four loops, 128 channels.")
    s.table(table_html(reads_table()), "Read per decode step under each reference policy, INT2/4 g=32.")
    s.folded("Logical reads of a shared anchor and of a chain", table_html(accesses_table()))
    s.folded(f"All {len(found)} numbers the paper prints", table_html(found, new_block="where"))
    full = preset("INT2/4 g=32")
    same = int((found["verdict"] == "reproduced").sum())
    return [
        Card(f"{same} of {len(found)}", "printed bit, byte and read numbers reproduced exactly"),
        Card(f"{capacity_ratio(full, 128):.2f}x", f"smaller than BF16; {traffic_ratio(full, 128):.2f}x less is read"),
    ]


def _made(s: Section, profile: Profile) -> list[Card]:
    made = provenance_table(profile.name).T.reset_index()
    made.columns = ["field", *(f"records {i + 1}" for i in range(len(made.columns) - 1))]
    s.table(table_html(made))
    return []


_MINIS = (
    "Small looped models on procedural tasks that stand for the paper's benchmarks. Another model on other tasks: "
    "compare orders, not values."
)
_MATH500 = "On the Ouro-shaped model and the task that stands for MATH500. "
_SURFACES = "Post-RoPE keys over tokens and channels; one height and colour scale for all surfaces."
SECTIONS: dict[str, tuple[str, str, str, Callable[[Section, Profile], list[Card]]]] = {
    "claims": (
        "Claims", "What the paper claims about order",
        "Judged on our own results, problem by problem: “better” by the exact McNemar test, “not worse” by a "
        "non-inferiority test with a margin of 3 points, at 5 % after Holm's correction. Undecided: too few problems.",
        _claims,
    ),
    "table2": ("Table 2", "Table 2: direct and residual coding, with and without OptR-H", _MINIS, _accuracy),
    "pareto": ("Pareto", "Accuracy against bits", "Every Table 2 configuration, mean of four tasks.", _pareto),
    "figure1_left": ("Figure 1", "Figure 1 (left): one ingredient at a time", _MATH500, _accuracy),
    "table3": ("Table 3", "Table 3: references and coefficients", _MATH500, _accuracy),
    "table4": ("Table 4", "Table 4: rotations", _MATH500, _accuracy),
    "table5": ("Table 5", "Table 5: bits per loop", _MATH500, _accuracy),
    "table8": (
        "Table 8", "Table 8: loops per group",
        "On the Huginn-shaped model and the task that stands for GSM8K; direct rows are Table 2's.", _accuracy,
    ),
    "table9": ("Table 9", "Table 9: every reference, coefficient and rotation", _MATH500, _accuracy),
    "table1": (
        "Table 1", "Table 1: what the reference leaves of the keys",
        "Error of reconstructed keys over their energy, INT2 g=32, alpha = 1, no rotation; nothing is generated.",
        _analysis,
    ),
    "figure2": ("Figure 2", "Figure 2: what one loop says about the next", _SURFACES, _surfaces),
    "figure3_middle": (
        "Fig. 3 middle", "Figure 3 (middle): norms across loops", "Mean norm of post-RoPE K and of V.", _analysis
    ),
    "figure3_right": (
        "Fig. 3 right", "Figure 3 (right): what least squares takes off the prediction error",
        "Mean squared distance of a loop's keys from the coded last loop, before any residual is coded.", _analysis,
    ),
    "rotations": (
        "Rotations", "Rotations on problems that no fit has seen",
        "Attention-output error of one rotation over another's, INT2/4 g=32; nothing is generated.", _rotations,
    ),
    "figure5": ("Figure 5", "Figure 5: every loop against the last", _SURFACES, _surfaces),
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
    profile = profile_of(profile)
    sections, cards = [], []
    for label, (short, title, text, fill) in SECTIONS.items():
        section = Section(label, short, title, text)
        try:
            cards += fill(section, profile)
        except ResidualQuantError as error:
            section.missing, section.parts = str(error), []
        sections.append(section)
    models = ", ".join(dict.fromkeys(map(profile.model_name, profile.plan)))
    page = jinja2.Environment(autoescape=True).from_string(TEMPLATE.read_text()).render(
        profile=profile.name, version=__version__, table_css=TABLE_CSS, cards=cards, sections=sections,
        subtitle=f"KV cache quantisation for looped transformers with 2-bit residuals, measured on {models}: profile "
        f"“{profile.name}”, {profile.cost}.",
    )  # fmt: skip
    path = paths.figures_dir(profile.name) / "report.html"
    paths.write_atomic(path, page)
    return path
