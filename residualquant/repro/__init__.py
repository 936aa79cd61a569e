"""Tables and figures of the paper, computed or read back. What the notebooks call:

    table2(profile, compute=False)        figure1_left(profile, compute=False)
    table2_mean(profile, compute=False)   claims(profile, compute=False)
    compare(table)   summary(profile)   markdown(table)   provenance_table(profile)

``profile`` is "smoke", "mini", "full" or "paper". With ``compute=False`` the committed records are read and no model
runs; with ``compute=True`` whatever answers are missing are computed first. Each table is returned as a DataFrame and
written to ``data/<profile>/<label>.csv``. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "table2": "tables",
    "table2_mean": "tables",
    "figure1_left": "tables",
    "compare": "tables",
    "summary": "tables",
    "markdown": "tables",
    "claims": "verdicts",
    "profile_of": "profiles",
    "PROFILES": "profiles",
    "read_paper": "paper",
    "provenance_table": "provenance",
    "reproduce": "run",
    "make_tables": "run",
    "make_figures": "run",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'residualquant.repro' has no attribute {name!r}")
    return getattr(importlib.import_module(f"residualquant.repro.{_HOME[name]}"), name)
