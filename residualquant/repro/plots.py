"""The style of every picture, and the pictures of tables; no dates in the files, so drawing twice changes no byte.

Each ``draw_*`` function takes the data of one paper label and returns a :class:`Picture`, which shows itself in a
notebook and saves itself as PNG and PDF. Colour says how the cache is coded (warm: direct, cool: residual), shade
says whether a rotation is applied (dark: yes). Filled markers are measured here, hollow diamonds are the paper's.
"""

from __future__ import annotations

import io
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.repro.labels import FAMILIES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE_FILE = Path(__file__).with_name("style.mplstyle")
COLUMN, TEXT = 3.35, 6.9  # inches: one column and the full text width of a two-column paper
SCREEN_DPI = 110
INK, GREY, PALE = "#23272e", "#6b7280", "#e8ebef"
WARM, COOL, PALE_COOL = "#f0a37a", "#134e7e", "#7fb9dd"

# Colour and marker of a series, by its words in ``layouts.with_words``.
SERIES = {
    "direct": (WARM, "o"),
    "direct + OSCAR": ("#d9743f", "^"),
    "direct + OptR-H": ("#b8371f", "s"),
    "unit": ("#a9b4bf", "o"),
    "norm ratio": ("#77838f", "v"),
    "LS": (PALE_COOL, "o"),
    "LS + OSCAR": ("#3f86b5", "^"),
    "LS + OptR-H": (COOL, "s"),
    "residual": (PALE_COOL, "o"),
    "residual + OptR-H": (COOL, "s"),
    "no rotation": (PALE_COOL, "o"),
    "OSCAR": ("#3f86b5", "^"),
    "OptR-H": (COOL, "s"),
}


@contextmanager
def house_style():
    """Matplotlib with this package's style and the file-writing backend, whatever the caller has set."""
    import matplotlib
    import matplotlib.style

    with matplotlib.rc_context():
        matplotlib.style.use(["default", STYLE_FILE])
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of ``width`` x ``height`` inches that no global state holds on to."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True, eq=False)
class Picture:
    """A finished figure: shown in a notebook by its PNG, saved as PNG and PDF without dates."""

    figure: Figure
    alt: str

    def _render(self, kind: str, metadata: dict) -> bytes:
        buffer = io.BytesIO()
        with house_style():
            self.figure.savefig(buffer, format=kind, metadata=metadata)
        return buffer.getvalue()

    @cached_property
    def png(self) -> bytes:
        """The picture as PNG of at most 128 colours (a quarter of the bytes), the same bytes every time."""
        from PIL import Image

        drawn, buffer = Image.open(io.BytesIO(self._render("png", {"Software": None}))), io.BytesIO()
        drawn.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
        return buffer.getvalue()

    @cached_property
    def pdf(self) -> bytes:
        """The picture as PDF, the same bytes every time."""
        return self._render("pdf", {"CreationDate": None, "Creator": None, "Producer": None})

    def _repr_png_(self) -> tuple[bytes, dict]:
        width, height = self.figure.get_size_inches()
        return self.png, {"width": round(width * SCREEN_DPI), "height": round(height * SCREEN_DPI)}

    def save(self, folder: str | Path, label: str) -> list[Path]:
        """Write ``folder/label.png`` and ``.pdf``; each appears whole or not at all. Returns their paths."""
        from residualquant.repro.paths import write_atomic

        written = [Path(folder) / f"{label}{suffix}" for suffix in (".png", ".pdf")]
        for path, content in zip(written, (self.png, self.pdf)):
            write_atomic(path, content)
        return written


# ---------------------------------------------------------------------------------------------- tables as dots

# label -> (panel, place on the x axis, series): columns of ``layouts.with_words``
DOTS = {
    "table2": ("place", "precision", "method"),
    "table3": ("precision", "reference_loop", "scaling"),
    "table4": ("precision", "coding", "turn"),
    "table5": ("place", "bits_and_group", "method"),
    "table8": ("precision", "loops", "turn"),
    "table9": ("precision", "reference_loop", "scaling"),
}


def draw_table(label: str, table: pd.DataFrame) -> Picture:
    """An accuracy table as a picture: dots with 95 % intervals, the paper's numbers beside them, BF16 as a line.

    Args:
        label: one of ``DOTS``, which says what is a panel, a place on the x axis and a series.
        table: its rows.

    Raises:
        ValueError: a needed column is missing.
    """
    from residualquant.repro.layouts import with_words

    rows = with_words(table)
    panel, x, series = DOTS[label]
    bf16, coded = rows[rows["coding"] == "BF16"], rows[(rows["coding"] != "BF16") & (rows[series] != "other")]
    panels = list(dict.fromkeys(coded[panel]))
    columns = min(len(panels), 4 if len(panels) > 4 else 2)
    lines = math.ceil(len(panels) / columns)
    with house_style():
        figure = new_figure(TEXT, 0.75 + 1.95 * lines)
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
        for axis, name in zip(axes, panels):
            baseline = bf16[bf16["place"] == name] if panel == "place" else bf16
            _dots(axis, coded[coded[panel] == name], baseline.iloc[0], x, series)
            axis.set_title(name.replace(", ", "\n") if columns > 2 else name)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[::columns]:
            axis.set_ylabel("accuracy, %")
        _legend(figure, [name for name in SERIES if name in set(coded[series])])
    return Picture(figure, f"Accuracy of every row of {label}, with intervals, beside the paper's numbers")


def _dots(axis: Axes, rows: pd.DataFrame, bf16: pd.Series, x: str, series: str) -> None:
    """One panel; what was not measured is left out, its paper's value is not."""
    axis.axhspan(bf16["ci_low"], bf16["ci_high"], color=PALE, zorder=0, linewidth=0)
    axis.axhline(bf16["accuracy_pct"], color=INK, linewidth=0.9, zorder=1)
    axis.axhline(bf16["paper_pct"], color=GREY, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    places = list(dict.fromkeys(rows[x]))
    side_by_side = {place: [name for name in SERIES if name in set(rows[rows[x] == place][series])] for place in places}
    step = 0.8 / max(map(len, side_by_side.values()))
    for name in SERIES:
        colour, marker = SERIES[name]
        part = rows[rows[series] == name]
        at = [
            places.index(place) + step * (names.index(name) - (len(names) - 1) / 2)
            for place, names in ((place, side_by_side[place]) for place in part[x])
        ]
        axis.vlines(at, part["ci_low"], part["ci_high"], color=colour, linewidth=1.4, zorder=2)
        axis.plot(at, part["accuracy_pct"], marker, color=colour, zorder=3, markersize=4.2)
        axis.plot(at, part["paper_pct"], "D", markersize=2.8, markerfacecolor="white", markeredgecolor=colour,
                  markeredgewidth=0.8, zorder=4)
    axis.set_xticks(range(len(places)), [place.replace(" ", "\n", 1) for place in places])
    axis.set_xlim(-0.5, len(places) - 0.5)
    axis.set_ylim(0, 100)


def _legend(figure: Figure, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=SERIES[n][0], marker=SERIES[n][1], linewidth=1.4, label=n) for n in names]
    handles += [
        Line2D([], [], color=INK, linewidth=0.9, label="BF16, ours"),
        Line2D([], [], color=GREY, linewidth=0.8, linestyle=(0, (4, 2)), label="BF16, paper"),
        Line2D([], [], color="none", marker="D", markersize=3.2, markerfacecolor="white", markeredgecolor=GREY,
               label="paper"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))


# ---------------------------------------------------------------------------------------------- Pareto


def _pareto_panel(axis: Axes, points: pd.DataFrame, column: str, title: str) -> None:
    bf16 = points.loc[points["coding"] == "BF16", column].iloc[0]
    if not math.isnan(bf16):
        axis.axhline(bf16, color=INK, linewidth=0.9)
        axis.annotate("BF16, 16 bits", (2.42, bf16), xytext=(0, 2.5), textcoords="offset points", fontsize=6.5)
    for method, part in points[points["coding"] != "BF16"].groupby("method", sort=False):
        colour = SERIES[method][0]
        for _, family in part.sort_values("effective_bits").groupby("bits_per_loop", sort=False):
            axis.plot(family["effective_bits"], family[column], color=colour, linewidth=0.8, alpha=0.55, zorder=2)
        if column == "accuracy_pct":
            axis.vlines(part["effective_bits"], part["ci_low"], part["ci_high"], color=colour, linewidth=1)
        for _, point in part.iterrows():
            face = colour if point["group_size"] == 32 else "white"
            shape = "s" if point["bits_per_loop"].endswith("4") else "o"
            axis.plot(point["effective_bits"], point[column], shape, markerfacecolor=face, markeredgecolor=colour,
                      markeredgewidth=1, markersize=4.4, zorder=3)
    axis.set_xlim(2.38, 3.6)
    axis.set_title(title)


def draw_pareto(table_mean: pd.DataFrame) -> Picture:
    """Mean accuracy against effective bits for every Table 2 configuration, a row per family; ours left, paper right.

    Args:
        table_mean: the rows of ``table2_mean.csv``.

    Raises:
        ResidualQuantError: no mean is measured.
    """
    from matplotlib.lines import Line2D

    from residualquant.repro.layouts import with_words

    points = with_words(table_mean)
    if points["accuracy_pct"].isna().all():
        raise ResidualQuantError("no mean of Table 2 can be drawn: none has all of its tasks measured")
    with house_style():
        figure = new_figure(TEXT, 4.6)
        axes = figure.subplots(2, 2, sharey="row", sharex=True)
        for (left, right), family in zip(axes, FAMILIES):
            here = points[points["model"] == family]
            _pareto_panel(left, here, "accuracy_pct", f"Ours, {family.capitalize()}, mean of four tasks")
            _pareto_panel(right, here, "paper_pct", f"Paper, {family.capitalize()}, mean of four benchmarks")
            left.set_ylabel("mean accuracy, %")
        for axis in axes[1]:
            axis.set_xlabel("effective bits per element of the loops")
        coded = points.loc[points["coding"] != "BF16", "method"]
        handles = [Line2D([], [], color=SERIES[n][0], linewidth=2, label=n) for n in dict.fromkeys(coded)]
        for shape, face, name in (("o", GREY, "INT2 g=32"), ("o", "white", "INT2 g=16"),
                                  ("s", GREY, "INT2/4 g=32"), ("s", "white", "INT2/4 g=16")):
            handles.append(Line2D([], [], color="none", marker=shape, markerfacecolor=face, markeredgecolor=GREY,
                                  label=name))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return Picture(figure, "Mean accuracy against effective bits per element, ours and the paper's")


# ---------------------------------------------------------------------------------------------- Figure 1 left

STEP_LABELS = {
    "bf16": ("BF16", "#9aa1ab"),
    "direct_int2": ("Direct\nINT2", WARM),
    "last_loop_residual": ("+ last-loop\nresidual", "#b9d8ec"),
    "ls_scaling": ("+ LS\nscaling", PALE_COOL),
    "rotation_optr_h": ("+ OptR-H\nrotation", "#3f86b5"),
    "mixed_precision": ("+ INT4\nanchor", COOL),
}


def draw_figure1_left(table: pd.DataFrame) -> Picture:
    """The progression of Figure 1 left: bars are ours with 95 % intervals, hollow diamonds the paper's.

    Args:
        table: rows of ``figure1_left.csv``: step, accuracy_pct, ci_low, ci_high, paper_pct, effective_bits.
    """
    rows = table.set_index("step")
    if unknown := sorted(set(rows.index) - set(STEP_LABELS)):
        raise ValueError(f"unknown step {unknown[0]!r}; known steps are {list(STEP_LABELS)}")
    with house_style():
        figure = new_figure(COLUMN, 2.55)
        axis = figure.subplots()
        for x, step in enumerate(rows.index):
            row, (_, colour) = rows.loc[step], STEP_LABELS[step]
            axis.bar(x, row["accuracy_pct"], width=0.68, color=colour, zorder=2)
            axis.vlines(x, row["ci_low"], row["ci_high"], color=GREY, linewidth=1, zorder=3)
            axis.plot(x, row["paper_pct"], "D", markerfacecolor="white", markeredgecolor=INK, markeredgewidth=0.9,
                      markersize=4, zorder=4)
            if math.isnan(row["accuracy_pct"]):  # not measured in this profile
                continue
            axis.annotate(f"{row['accuracy_pct']:.1f}", (x, row["ci_high"]), xytext=(0, 2), ha="center", va="bottom",
                          textcoords="offset points", fontsize=7, fontweight="bold")
        labels = [f"{STEP_LABELS[s][0]}\n{rows.loc[s, 'effective_bits']:.2g} bit" for s in rows.index]
        axis.set_xticks(range(len(rows)), labels, fontsize=6)
        axis.set_ylim(0, 109)
        axis.set_yticks(range(0, 101, 20))
        axis.set_ylabel("accuracy, %")
        axis.plot([], [], "D", markerfacecolor="white", markeredgecolor=INK, markersize=4, label="paper (MATH500)")
        figure.legend(loc="outside upper right")
    return Picture(figure, "From direct INT2 to the full method, one ingredient at a time")


# ---------------------------------------------------------------------------------------------- Table 1, Figure 3


def _bars(axis: Axes, groups: dict[str, tuple[pd.DataFrame, str]], value: str, x: str) -> None:
    """Bars of ``value`` side by side at every ``x``, with intervals; one colour per group."""
    places = list(dict.fromkeys(str(place) for part, _ in groups.values() for place in part[x]))
    width = 0.8 / len(groups)
    for k, (name, (part, colour)) in enumerate(groups.items()):
        at = [places.index(str(place)) + (k - (len(groups) - 1) / 2) * width for place in part[x]]
        axis.bar(at, part[value], width=0.92 * width, color=colour, label=name, zorder=2)
        axis.vlines(at, part["ci_low"], part["ci_high"], color=GREY, linewidth=1, zorder=3)
        if f"paper_{value}" in part:
            axis.plot(at, part[f"paper_{value}"], "D", markerfacecolor="white", markeredgecolor=INK, markersize=3.6,
                      markeredgewidth=0.9, zorder=4, label="paper (Ouro-1.4B)" if k == len(groups) - 1 else None)
    axis.set_xticks(range(len(places)), places)


def draw_table1(table: pd.DataFrame) -> Picture:
    """Key NMSE by loop under the references First and Last, the paper's numbers as diamonds."""
    with house_style():
        figure = new_figure(COLUMN, 2.4)
        axis = figure.subplots()
        parts = {name: table[table["reference"] == name] for name in ("first", "last")}
        _bars(axis, {"First": (parts["first"], WARM), "Last": (parts["last"], COOL)}, "nmse_x1000", "loop")
        axis.set_xlabel("loop")
        axis.set_ylabel("key NMSE x 1000")
        axis.legend(loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.14))
    return Picture(figure, "Error of reconstructed keys, loop by loop, with the first or the last loop as reference")


def draw_figure3_middle(table: pd.DataFrame) -> Picture:
    """Mean norm of K and V in every loop."""
    with house_style():
        figure = new_figure(COLUMN, 2.2)
        axis = figure.subplots()
        for kind, colour, marker in (("K", COOL, "o"), ("V", WARM, "s")):
            part = table[table["kind"] == kind]
            axis.plot(part["loop"], part["norm"], marker=marker, color=colour, label=kind)
            axis.vlines(part["loop"], part["ci_low"], part["ci_high"], color=colour, linewidth=1)
        axis.set_xticks(sorted(set(table["loop"])))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("loop")
        axis.set_ylabel("mean norm")
        axis.legend()
    return Picture(figure, "Mean norm of keys and values in every loop")


def draw_figure3_right(table: pd.DataFrame) -> Picture:
    """Error of predicting a loop's keys from the coded last loop, alpha = 1 beside least squares."""
    with house_style():
        figure = new_figure(COLUMN, 2.4)
        axes = figure.subplots(1, 2, sharey=True)
        for axis, anchor in zip(axes, ("INT2", "INT4")):
            here = table[table["anchor"] == anchor]
            parts = {name: here[here["coefficient"] == name] for name in ("unit", "ls")}
            _bars(axis, {r"$\alpha=1$": (parts["unit"], PALE_COOL), "LS": (parts["ls"], COOL)}, "mse", "loop")
            for place, (_, row) in enumerate(parts["ls"].iterrows()):
                axis.annotate(f"-{row['reduced_pct']:.0f} %", (place + 0.2, row["ci_high"]), xytext=(0, 2), ha="center",
                              textcoords="offset points", fontsize=6)
            axis.set_title(f"{anchor} anchor")
            axis.set_xlabel("loop")
        axes[0].set_ylabel("prediction MSE of keys")
        axes[0].legend()
    return Picture(figure, "Error of predicting each loop's keys from the last, with and without least squares")


# ---------------------------------------------------------------------------------------------- storage


def _stacked_bits(axis: Axes, bars: pd.DataFrame) -> None:
    parts = (("codes_bits", "codes", COOL), ("metadata_bits", "FP8 scale + offset", PALE_COOL),
             ("coefficient_bits", "coefficient", WARM))
    y = range(len(bars))
    left = [0.0] * len(bars)
    for column, name, colour in parts:
        axis.barh(y, bars[column], left=left, height=0.66, color=colour, label=name)
        left = [a + b for a, b in zip(left, bars[column])]
    for i, (total, config) in enumerate(zip(left, bars["config"])):
        axis.text(total + 0.06, i, f"{total:.7g}", va="center", fontsize=6.5)
        axis.text(-0.08, i, config, va="center", ha="right", fontsize=6.5)
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.set_xlim(0, 5.6)
    axis.set_xlabel("effective bits per element, L=4, D=128")
    axis.grid(axis="y", visible=False)
    axis.set_title("Stored")
    axis.legend(loc="upper center", bbox_to_anchor=(0.35, -0.16), ncols=3, handlelength=1, columnspacing=0.8)


def draw_storage(bars: pd.DataFrame, reads: pd.DataFrame, accesses: pd.DataFrame) -> Picture:
    """What is stored and what is read (Sec. 3.4, App. A.3 and D).

    Args:
        bars: config, codes_bits, metadata_bits, coefficient_bits.
        reads: policy, bytes_read, ratio (bytes per token-head and decode step, for K or V of all four loops).
        accesses: loops, shared, chained (logical reads per step).
    """
    with house_style():
        figure = new_figure(TEXT, 3.1)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _stacked_bits(left, bars)
        right.remove()
        grid = left.get_gridspec()[1].subgridspec(2, 1, hspace=0.08)
        top, bottom = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        colours = [GREY if p == "BF16" else WARM if "irect" in p else COOL for p in reads["policy"]]
        top.barh(range(len(reads)), reads["bytes_read"], height=0.66, color=colours)
        for i, row in enumerate(reads.itertuples()):
            note = f"{row.bytes_read:.0f}" + ("" if row.policy == "BF16" else f"  ({row.ratio:.2f}x less)")
            top.text(row.bytes_read + 15, i, note, va="center", fontsize=6.5)
        top.set_yticks(range(len(reads)), reads["policy"])
        top.tick_params(axis="y", length=0)
        top.invert_yaxis()
        top.set_xlim(0, 1230)
        top.set_xlabel("bytes per token, head and step", fontsize=6.5)
        top.grid(axis="y", visible=False)
        top.set_title("Read, INT2/4 g=32")
        for kind, name, colour in (("chained", "chained L(L+1)/2", "#b8371f"), ("shared", "shared 2L-1", COOL)):
            bottom.plot(accesses["loops"], accesses[kind], "-o", color=colour, markersize=3, label=name)
        bottom.set_xscale("log", base=2)
        bottom.set_yscale("log")
        bottom.set_xticks(accesses["loops"], [str(n) for n in accesses["loops"]])
        bottom.set_yticks([3, 10, 30, 100, 300], ["3", "10", "30", "100", "300"])
        bottom.minorticks_off()
        bottom.set_xlabel("loops L", fontsize=6.5)
        bottom.set_title("Logical reads per step")
        bottom.legend(loc="upper left")
    return Picture(figure, "Bits stored per element and bytes read per decode step, by configuration")
