"""Tables and figures of the paper, computed or read back. What the notebooks call:

    table(label, profile, compute=False)    figure(label, profile)
    summary(label, table)   compare(table)   provenance_table(profile)

``profile`` is "smoke", "mini", "full" or "paper". With ``compute=False`` the committed records are read and no model
runs; with ``compute=True`` whatever answers are missing are computed first. A table is a DataFrame; one that is
computed, or made by ``make tables``, is ``data/<profile>/<label>.csv`` as well. Nothing heavy is imported before it is
used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "table": "tables",
    "figure": "figures",
    "summary": "layouts",
    "compare": "layouts",
    "provenance_table": "provenance",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'residualquant.repro' has no attribute {name!r}")
    return getattr(importlib.import_module(f"residualquant.repro.{_HOME[name]}"), name)
