"""Pictures of the analyses without generation: Table 1, Figure 3 (middle) and Figure 3 (right)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residualquant.repro.plots import COLUMN, GREY, INK, Picture, house_style, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

WARM, COOL, PALE_COOL = "#f0a37a", "#134e7e", "#7fb9dd"


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
