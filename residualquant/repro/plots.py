"""Every picture of the package: one style, no dates in the files, so drawing twice changes no byte.

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

from residualquant.repro.profiles import ROTATION

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE_FILE = Path(__file__).with_name("style.mplstyle")
COLUMN, TEXT = 3.35, 6.9  # inches: one column and the full text width of a two-column paper
SCREEN_DPI = 110
INK, GREY, PALE = "#23272e", "#6b7280", "#e8ebef"

METHODS = {
    "direct": ("Direct", "#f0a37a", "o"),
    "direct+rotation": ("Direct + rotation", "#b8371f", "s"),
    "residual": ("Residual", "#7fb9dd", "o"),
    "residual+rotation": ("Residual + rotation", "#134e7e", "s"),
}
PRECISIONS = ("2222 g32", "2222 g16", "2224 g32", "2224 g16")
PRECISION_LABELS = {
    "2222 g32": "INT2\ng=32",
    "2222 g16": "INT2\ng=16",
    "2224 g32": "INT2/4\ng=32",
    "2224 g16": "INT2/4\ng=16",
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
        """The picture as PNG, the same bytes every time."""
        return self._render("png", {"Software": None})

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


def method_of(row: pd.Series) -> str:
    """ "bf16" or a key of ``METHODS`` for a row of ``table2.csv``; "other" for what the pictures have no place for."""
    if float(row["effective_bits"]) == 16:
        return "bf16"
    coded = row["reference"], row["coefficient"]
    base = {("direct", "none"): "direct", ("last", "ls"): "residual"}.get(coded)
    if base is None or row["rotation"] not in ("none", ROTATION):
        return "other"
    return base if row["rotation"] == "none" else f"{base}+rotation"


def precision_of(row: pd.Series) -> str:
    """ "2224 g32" and the like for a row of ``table2.csv``; "16" for BF16."""
    if float(row["effective_bits"]) == 16:
        return "16"
    digits = "".join(c for c in str(row["bits_per_loop"]) if c.isdigit())
    return f"{digits} g{int(row['group_size'])}"


def with_keys(table: pd.DataFrame) -> pd.DataFrame:
    """``table2.csv`` with the columns ``method`` and ``precision`` that the pictures are arranged by.

    Raises:
        ValueError: a needed column is missing.
    """
    needed = {"benchmark", "bits_per_loop", "group_size", "reference", "coefficient", "rotation"}
    needed |= {"effective_bits", "accuracy_pct"}
    if missing := sorted(needed - set(table.columns)):
        raise ValueError(f"the table lacks the column {missing[0]!r}; it has {list(table.columns)}")
    return table.assign(method=table.apply(method_of, axis=1), precision=table.apply(precision_of, axis=1))


BENCHMARK_NAMES = {"gsm8k": "GSM8K", "math500": "MATH500", "humaneval": "HumanEval", "mbpp": "MBPP"}


def benchmark_title(benchmark: str) -> str:
    """ "words, standing for GSM8K" for a task of the shipped minis; the benchmark's own name for anything else."""
    from residualquant.evals.tasks import STANDS_FOR

    name = STANDS_FOR.get(benchmark, benchmark)
    name = BENCHMARK_NAMES.get(name, str(name))
    return f"{benchmark}, standing for {name}" if benchmark in STANDS_FOR else name


# ---------------------------------------------------------------------------------------------- Table 2


def _table2_panel(axis: Axes, rows: pd.DataFrame, title: str) -> None:
    bf16 = rows[rows["method"] == "bf16"].iloc[0]
    axis.axhspan(bf16["ci_low"], bf16["ci_high"], color=PALE, zorder=0, linewidth=0)
    axis.axhline(bf16["accuracy_pct"], color=INK, linewidth=0.9, zorder=1)
    if not math.isnan(bf16["paper_pct"]):
        axis.axhline(bf16["paper_pct"], color=GREY, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
    for k, (method, (_, colour, marker)) in enumerate(METHODS.items()):
        part = rows[rows["method"] == method].set_index("precision").reindex(PRECISIONS)
        x = [i + (k - 1.5) * 0.2 for i in range(len(PRECISIONS))]
        axis.vlines(x, part["ci_low"], part["ci_high"], color=colour, linewidth=1.6, zorder=2)
        axis.plot(x, part["accuracy_pct"], marker, color=colour, zorder=3, markersize=4.6)
        axis.plot(
            [v + 0.065 for v in x],
            part["paper_pct"],
            "D",
            markerfacecolor="white",
            markeredgecolor=colour,
            markersize=3.2,
            markeredgewidth=0.8,
            zorder=4,
        )
    for i in range(1, len(PRECISIONS)):
        axis.axvline(i - 0.5, color=PALE, linewidth=0.8, zorder=0)
    axis.set_xticks(range(len(PRECISIONS)), [PRECISION_LABELS[p] for p in PRECISIONS])
    axis.set_xlim(-0.5, len(PRECISIONS) - 0.5)
    axis.set_ylim(0, 100)
    axis.set_title(title)


def _method_legend(figure: Figure, columns: int) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=c, marker=m, linewidth=1.6, label=n) for n, c, m in METHODS.values()]
    handles += [
        Line2D([], [], color=INK, linewidth=0.9, label="BF16, ours"),
        Line2D([], [], color=GREY, linewidth=0.8, linestyle=(0, (4, 2)), label="BF16, paper"),
        Line2D(
            [],
            [],
            color="none",
            marker="D",
            markersize=3.6,
            markerfacecolor="white",
            markeredgecolor=GREY,
            label="paper (Ouro-1.4B)",
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def draw_table2(table: pd.DataFrame) -> Picture:
    """Table 2 as a picture: one panel per task, dots with 95 % intervals, the paper's numbers beside them.

    Args:
        table: the rows of ``table2.csv``.

    Raises:
        ValueError: a needed column is missing.
    """
    rows = with_keys(table)
    benchmarks = list(dict.fromkeys(rows["benchmark"]))
    columns = 2 if len(benchmarks) > 1 else 1
    lines = math.ceil(len(benchmarks) / columns)
    with house_style():
        figure = new_figure(TEXT, 0.75 + 1.95 * lines)
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
        for axis, benchmark in zip(axes, benchmarks):
            _table2_panel(axis, rows[rows["benchmark"] == benchmark], benchmark_title(benchmark))
        for axis in axes[len(benchmarks) :]:
            axis.set_visible(False)
        for axis in axes[::columns]:
            axis.set_ylabel("accuracy, %")
        _method_legend(figure, columns=4)
    return Picture(figure, "Accuracy of every KV cache configuration on each task, with intervals, beside the paper's")


# ---------------------------------------------------------------------------------------------- Pareto


def _pareto_panel(axis: Axes, points: pd.DataFrame, column: str, title: str) -> None:
    bf16 = points.loc[points["method"] == "bf16", column].iloc[0]
    axis.axhline(bf16, color=INK, linewidth=0.9)
    axis.annotate("BF16, 16 bits", (2.42, bf16), xytext=(0, 2.5), textcoords="offset points", fontsize=6.5)
    for method, (_, colour, _) in METHODS.items():
        part = points[points["method"] == method].sort_values("effective_bits")
        for _, family in part.groupby(part["precision"].str[:4]):
            axis.plot(family["effective_bits"], family[column], color=colour, linewidth=0.8, alpha=0.55, zorder=2)
        if column == "accuracy_pct":
            axis.vlines(part["effective_bits"], part["ci_low"], part["ci_high"], color=colour, linewidth=1)
        for _, point in part.iterrows():
            face = colour if "g32" in point["precision"] else "white"
            shape = "o" if point["precision"].startswith("2222") else "s"
            axis.plot(
                point["effective_bits"],
                point[column],
                shape,
                markerfacecolor=face,
                markeredgecolor=colour,
                markeredgewidth=1,
                markersize=4.8,
                zorder=3,
            )
    axis.set_xlim(2.38, 3.6)
    axis.set_xlabel("effective bits per element")
    axis.set_title(title)


def draw_pareto(table_mean: pd.DataFrame) -> Picture:
    """Mean accuracy against effective bits for every Table 2 configuration; ours left, the paper's Ouro-1.4B right.

    Args:
        table_mean: the rows of ``table2_mean.csv``.
    """
    from matplotlib.lines import Line2D

    points = with_keys(table_mean)
    with house_style():
        figure = new_figure(TEXT, 3.0)
        left, right = figure.subplots(1, 2, sharey=True)
        _pareto_panel(left, points, "accuracy_pct", "Ours, mean of the four tasks")
        _pareto_panel(right, points, "paper_pct", "Paper, Ouro-1.4B, mean of four")
        left.set_ylabel("mean accuracy, %")
        handles = [Line2D([], [], color=c, linewidth=2, label=n) for n, c, _ in METHODS.values()]
        for shape, face, name in (
            ("o", GREY, "INT2 g=32"),
            ("o", "white", "INT2 g=16"),
            ("s", GREY, "INT2/4 g=32"),
            ("s", "white", "INT2/4 g=16"),
        ):
            handles.append(
                Line2D([], [], color="none", marker=shape, markerfacecolor=face, markeredgecolor=GREY, label=name)
            )
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return Picture(figure, "Mean accuracy against effective bits per element, ours and the paper's")


# ---------------------------------------------------------------------------------------------- Figure 1 left

STEP_LABELS = {
    "bf16": ("BF16", "#9aa1ab"),
    "direct_int2": ("Direct\nINT2", "#f0a37a"),
    "last_loop_residual": ("+ last-loop\nresidual", "#b9d8ec"),
    "ls_scaling": ("+ LS\nscaling", "#7fb9dd"),
    "rotation_optr_h": ("+ rotation", "#3f86b5"),
    "mixed_precision": ("+ INT4\nanchor", "#134e7e"),
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
            axis.plot(
                x,
                row["paper_pct"],
                "D",
                markerfacecolor="white",
                markeredgecolor=INK,
                markeredgewidth=0.9,
                markersize=4,
                zorder=4,
            )
            axis.annotate(
                f"{row['accuracy_pct']:.1f}",
                (x, row["ci_high"]),
                xytext=(0, 2),
                ha="center",
                va="bottom",
                textcoords="offset points",
                fontsize=7,
                fontweight="bold",
            )
        labels = [f"{STEP_LABELS[s][0]}\n{rows.loc[s, 'effective_bits']:.2g} bit" for s in rows.index]
        axis.set_xticks(range(len(rows)), labels, fontsize=6)
        axis.set_ylim(0, 109)
        axis.set_yticks(range(0, 101, 20))
        axis.set_ylabel("accuracy, %")
        axis.plot([], [], "D", markerfacecolor="white", markeredgecolor=INK, markersize=4, label="paper (MATH500)")
        figure.legend(loc="outside upper right")
    return Picture(figure, "From direct INT2 to the full method, one ingredient at a time")


# ---------------------------------------------------------------------------------------------- storage


def _stacked_bits(axis: Axes, bars: pd.DataFrame) -> None:
    parts = (
        ("codes_bits", "codes", "#134e7e"),
        ("metadata_bits", "FP8 scale + offset", "#7fb9dd"),
        ("coefficient_bits", "coefficient", "#f0a37a"),
    )
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
        colours = [GREY if p == "BF16" else "#f0a37a" if "irect" in p else "#134e7e" for p in reads["policy"]]
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
        for kind, name, colour in (("chained", "chained L(L+1)/2", "#b8371f"), ("shared", "shared 2L-1", "#134e7e")):
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
