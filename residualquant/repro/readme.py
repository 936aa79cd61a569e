"""Fill the generated blocks of README.md from the committed records, so that no number there is typed by hand.

A block lies between ``<!-- generated:NAME -->`` and ``<!-- /generated:NAME -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.profiles import PROFILES

if TYPE_CHECKING:
    import pandas as pd

COMMITTED = ("mini", "full")
_BLOCK = re.compile(r"(<!-- generated:(\w+) -->\n).*?(<!-- /generated:\2 -->)", re.DOTALL)


def table2_block() -> str:
    """The mini profile's Table 2, ours with the paper's in brackets."""
    from residualquant.repro.tables import markdown, summary

    return markdown(summary("mini"))


def claims_block() -> str:
    """The paper's ordering claims with their verdicts, in every profile whose records are committed."""
    import pandas as pd

    from residualquant.repro.tables import markdown
    from residualquant.repro.verdicts import claims

    columns = {}
    for profile in _measured_profiles():
        whole = (table := claims(profile))[table.comparison.str.startswith("all ")]
        columns["Claim of the paper"] = whole.text
        columns[f"`{profile}`"] = [f"{v} ({t})" for v, t in zip(whole.verdict, whole.test)]
    return markdown(pd.DataFrame(columns))


_ENDS = {
    "BF16": ("bf16", "16"),
    "Direct, INT2 g=32": ("direct", "2222 g32"),
    "The full method, INT2/4 g=32": ("residual+rotation", "2224 g32"),
}


def gap_block() -> str:
    """Mean accuracy over the tasks at both ends of the method, and the distance to BF16, the paper's beside ours."""
    import pandas as pd

    from residualquant.repro.plots import with_keys
    from residualquant.repro.tables import markdown, table2_mean

    columns = {"Mean of the tasks, % (against BF16)": list(_ENDS)}
    for profile in _measured_profiles():
        mean = with_keys(table2_mean(profile)).set_index(["method", "precision"])
        columns |= {"Paper, Ouro-1.4B": _against_bf16(mean.paper_pct), f"`{profile}`": _against_bf16(mean.accuracy_pct)}
    return markdown(pd.DataFrame(columns))


def _against_bf16(accuracy: pd.Series) -> list[str]:
    bf16, *others = (float(accuracy[key]) for key in _ENDS.values())
    return [f"{bf16:.1f}", *(f"{value:.1f} ({value - bf16:+.1f})" for value in others)]


def profiles_block() -> str:
    """What each profile computes, with the time and disk of the committed run (a local one does not count)."""
    import pandas as pd

    from residualquant.repro.cost import read_cost
    from residualquant.repro.tables import markdown

    rows = []
    for profile in PROFILES.values():
        cost = read_cost(profile.name) if profile.name in COMMITTED else None
        rows.append(
            {
                "Profile": f"`{profile.name}`",
                "Problems": ", ".join(f"{task} {n}" for task, n in profile.problems.items()),
                "Configurations": len(profile.methods),
                "Time": f"{cost['seconds'] / 60:.1f} min" if cost else profile.cost,
                "Measured on": cost["machine"] if cost else "–",
                "Disk": f"{cost['bytes'] / 2**20:.1f} MiB" if cost else "–",
            }
        )
    return markdown(pd.DataFrame(rows))


BLOCKS: dict[str, Callable[[], str]] = {
    "table2": table2_block,
    "claims": claims_block,
    "gap": gap_block,
    "profiles": profiles_block,
}


def _measured_profiles() -> list[str]:
    return [name for name in COMMITTED if paths.shipped_records_dir(name).is_dir()]


def fill(text: str) -> str:
    """``text`` with the content of every generated block made anew.

    Raises:
        ResidualQuantError: a block nobody makes, or its records are missing.
    """

    def replace(match: re.Match) -> str:
        if match[2] not in BLOCKS:
            raise ResidualQuantError(f"README.md asks for the unknown block {match[2]!r}; known: {', '.join(BLOCKS)}")
        return f"{match[1]}\n{BLOCKS[match[2]]().strip()}\n\n{match[3]}"

    return _BLOCK.sub(replace, text)


def main() -> None:
    """Rewrite README.md in the workspace."""
    readme = Path(paths.workspace()) / "README.md"
    changed = paths.write_atomic(readme, fill(readme.read_text()))
    print(f"README.md {'rewritten' if changed else 'was current'}")


if __name__ == "__main__":
    main()
