"""Which picture belongs to which label, and where it is saved: ``figures/<profile>/<label>.png`` and ``.pdf``.

Pictures are drawn from the profile's records and CSVs; none of this runs a model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from residualquant.repro.paths import figures_dir
from residualquant.repro.plots import DOTS, Picture
from residualquant.repro.tables import table


def _dots(label: str, profile: str) -> Picture:
    from residualquant.repro.plots import draw_table

    return draw_table(label, table(label, profile))


def _pareto(profile: str) -> Picture:
    from residualquant.repro.plots import draw_pareto

    return draw_pareto(table("table2_mean", profile))


def _figure1_left(profile: str) -> Picture:
    from residualquant.repro.plots import draw_figure1_left

    return draw_figure1_left(table("figure1_left", profile))


def _analysis(label: str, profile: str) -> Picture:
    from residualquant.repro import plots_analyses

    return getattr(plots_analyses, f"draw_{label}")(table(label, profile))


def _figure2(profile: str) -> Picture:
    from residualquant.repro.surfaces import draw_figure2
    from residualquant.repro.traces import kept_trace

    return draw_figure2(kept_trace(profile))


def _figure5(profile: str) -> Picture:
    from residualquant.repro.surfaces import draw_figure5
    from residualquant.repro.traces import kept_trace

    return draw_figure5(kept_trace(profile))


def _storage(profile: str) -> Picture:
    from residualquant.repro.plots import draw_storage
    from residualquant.repro.storage import accesses_table, bits_table, reads_table

    return draw_storage(bits_table(), reads_table(), accesses_table())


FIGURES: dict[str, Callable[[str], Picture]] = {
    "storage": _storage,
    "figure1_left": _figure1_left,
    "figure2": _figure2,
    **{label: partial(_analysis, label) for label in ("figure3_middle", "figure3_right")},
    "figure5": _figure5,
    "table1": partial(_analysis, "table1"),
    **{label: partial(_dots, label) for label in DOTS},
    "pareto": _pareto,
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
