"""Tables as HTML, with the same look in a notebook, in the report page and in print; counts in words."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residualquant.repro.stats import LEAST_P

if TYPE_CHECKING:
    import pandas as pd

TABLE_CSS = """
.rq table{border-collapse:collapse;font:13px/1.4 system-ui,-apple-system,"Segoe UI",sans-serif;
 font-variant-numeric:tabular-nums;margin:0;min-width:100%}
.rq th{position:sticky;top:0;background:#f3f5f8;color:#3a414b;font-weight:600;text-align:left;
 border-bottom:1.5px solid #9aa5b1;white-space:nowrap}
.rq th,.rq td{padding:4px 10px;vertical-align:top}
.rq td{border-bottom:1px solid #e6e9ee;color:#23272e;background:transparent}
.rq th,.rq td{text-align:left!important}
.rq .num{text-align:right!important;white-space:nowrap}.rq .short{white-space:nowrap}.rq .long{min-width:15em}
.rq tr.first td{border-top:1.5px solid #c3cad3}
.rq .yes,.rq .no,.rq .open{padding:1px 7px;border-radius:9px;font-size:12px;white-space:nowrap}
.rq .yes{background:#dff1e4;color:#14632f}.rq .no{background:#fbe0dc;color:#96230f}
.rq .open{background:#f6ecd0;color:#6f5208}
.rq{overflow-x:auto;max-width:100%;-webkit-overflow-scrolling:touch}
"""

SHORT = 34  # columns of texts up to this long are not broken into lines
_VERDICTS = {"not reproduced": "no", "reproduced": "yes", "differs": "no", "undecided": "open", "not measured": "open"}


@dataclass(frozen=True)
class Shown:
    """A table that displays itself in full in a notebook."""

    markup: str

    def _repr_html_(self) -> str:
        return f"<style>{TABLE_CSS}</style>{self.markup}"


def show(table: pd.DataFrame, columns: list[str] | None = None) -> Shown:
    """``table`` for a notebook: every row, the named columns (all when None), numbers rounded, verdicts coloured.

    What ``attrs["note"]`` says stands below it.
    """
    note = f"<p>{html.escape(text)}</p>" if (text := table.attrs.get("note")) else ""
    return Shown(table_html(table if columns is None else table[columns]) + note)


def counted(n: int, noun: str) -> str:
    """ "1 task", "2 tasks"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def cell_text(value: Any, column: str) -> str:
    """One value as read by people: percentages with one decimal, p-values with two digits, "–" for nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and not column.endswith(("_pct", "ci_low", "ci_high"))):
        return f"{int(value)}"
    if column.startswith("p_") or column == "p":
        return f"< {LEAST_P:g}" if value <= LEAST_P else f"{value:.2g}"
    if column.endswith("_pct") or column in ("ci_low", "ci_high", "difference", "paper_difference"):
        return f"{value:.1f}"
    return f"{value:.2f}" if column.endswith("ratio") else f"{value:.6g}"


def column_title(column: str) -> str:
    """A column's name as read by people: "accuracy %" for accuracy_pct, "95 % low" for ci_low."""
    known = {"ci_low": "95 % low", "ci_high": "95 % high", "p_same": "p (same)"}
    if column in known:
        return known[column]
    text = f"{column[:-4]} %" if column.endswith("_pct") else column
    return text.replace("_", " ").replace("bf16", "BF16")


def _cell(value: Any, column: str, css: str) -> str:
    text = html.escape(cell_text(value, column))
    if column.lower() == "verdict":
        kind = next((name for start, name in _VERDICTS.items() if text.startswith(start)), None)
        text = f'<span class="{kind}">{text}</span>' if kind else text
    return f'<td class="{css}">{text}</td>' if css else f"<td>{text}</td>"


def _is_number(text: str) -> bool:
    return text == "–" or text.replace(" – ", "").replace("−", "").lstrip("+-").replace(".", "", 1).isdigit()


def _column_css(texts: list[str]) -> str:
    if all(_is_number(text) for text in texts):
        return "num"
    return "short" if max(map(len, texts), default=0) <= SHORT else "long"


def table_html(table: pd.DataFrame, new_block: str | None = None) -> str:
    """A ``<div class="rq"><table>…`` of every row of ``table``.

    Args:
        new_block: a column; a rule is drawn above every row where its value changes.
    """
    records = table.to_dict("records")
    css = {c: _column_css([cell_text(values[c], c) for values in records]) for c in table.columns}
    head = "".join(f'<th class="{css[c]}">{html.escape(column_title(str(c)))}</th>' for c in table.columns)
    rows, before = [], None
    for values in records:
        block = values[new_block] if new_block else None
        start = ' class="first"' if rows and block != before else ""
        before = block
        rows.append(f"<tr{start}>" + "".join(_cell(v, c, css[c]) for c, v in values.items()) + "</tr>")
    return f'<div class="rq"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
