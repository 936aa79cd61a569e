"""Which picture belongs to which label, and where it is saved: ``figures/<profile>/<label>.png`` and ``.pdf``.

Pictures are drawn from the profile's records and CSVs; none of this runs a model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from residualquant.repro.paths import figures_dir
from residualquant.repro.plots import (
    DOTS,
    Picture,
    draw_figure1_left,
    draw_figure3_middle,
    draw_figure3_right,
    draw_pareto,
    draw_storage,
    draw_table,
    draw_table1,
)
from residualquant.repro.storage import accesses_table, bits_table, reads_table
from residualquant.repro.surfaces import draw_figure2, draw_figure5
from residualquant.repro.tables import table
from residualquant.repro.traces import kept_trace


def _dots(label: str, profile: str) -> Picture:
    return draw_table(label, table(label, profile))


FIGURES: dict[str, Callable[[str], Picture]] = {
    "storage": lambda profile: draw_storage(bits_table(), reads_table(), accesses_table()),
    "figure1_left": lambda profile: draw_figure1_left(table("figure1_left", profile)),
    "figure2": lambda profile: draw_figure2(kept_trace(profile)),
    "figure3_middle": lambda profile: draw_figure3_middle(table("figure3_middle", profile)),
    "figure3_right": lambda profile: draw_figure3_right(table("figure3_right", profile)),
    "figure5": lambda profile: draw_figure5(kept_trace(profile)),
    "table1": lambda profile: draw_table1(table("table1", profile)),
    **{label: partial(_dots, label) for label in DOTS},
    "pareto": lambda profile: draw_pareto(table("table2_mean", profile)),
}


def figure(label: str, profile: str = "mini") -> Picture:
    """The picture of ``label`` for a profile, saved under ``figures/<profile>/`` and returned.

    Raises:
        ValueError: an unknown label.
        ResidualQuantError: the profile's records are missing or damaged.
    """
    if label not in FIGURES:
        raise ValueError(f"no figure {label!r}; known figures: {', '.join(FIGURES)}")
    picture = FIGURES[label](profile)
    picture.save(figures_dir(profile), label)
    return picture
