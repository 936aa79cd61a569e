"""What the Python snippets of a page print, below them, made by running them::

    python -m residualquant.repro.snippets docs/bring_your_own_model.md

A block of text right below a snippet is its output. The snippets of a page run in order, in one namespace, in the
current folder.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from residualquant.repro.paths import write_atomic

_SNIPPET = re.compile(r"(```python\n(.*?)```\n)(?:\n```text\n.*?```\n)?", re.DOTALL)


def with_outputs(page: str) -> str:
    """``page`` with the output of every snippet made anew; a snippet that prints nothing has none."""
    names: dict = {}

    def run(match: re.Match) -> str:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(match[2], names)
        shown = "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
        return match[1] + (f"\n```text\n{shown}\n```\n" if shown else "")

    return _SNIPPET.sub(run, page)


def main(pages: Sequence[str]) -> None:
    """Rewrite the files ``pages``."""
    for page in map(Path, pages):
        changed = write_atomic(page, with_outputs(page.read_text()))
        print(f"{page} {'rewritten' if changed else 'was current'}")


if __name__ == "__main__":
    main(sys.argv[1:])
