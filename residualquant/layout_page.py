"""The documentation page of the page layout, generated so that it cannot disagree with layout.py.

``python -m residualquant.layout_page`` writes docs/page_layout.md.
"""

from __future__ import annotations

from residualquant.config import preset
from residualquant.layout import PLANE_ALIGNMENT, PageLayout
from residualquant.repro.paths import show, workspace, write_atomic

EXAMPLES = (("INT2/4 g=32", "last"), ("INT2/4 g=16", "last"), ("INT2/4 g=32", "direct"))

TEXT = """# Page layout, version {version}

Generated from `residualquant/layout.py` by `python -m residualquant.layout_page`; do not edit.

A page holds S tokens (a multiple of 16) of one layer, all loops, as `uint8 [blocks, H, page_bytes_per_head]`.

- Per head: K, then V. Within each: loop group by loop group (Ouro has one). Within a group: the planes of the anchor,
  then of every other loop in order; with direct coding, of every loop in order.
- Planes of a loop: **codes** (C = b D / 8 bytes per token; raw BF16 for 16 bits), **metadata** (2 bytes per group:
  FP8 e4m3fn scale, then FP8 e4m3fn offset), **alpha** (BF16, least significant byte first). A plane without bytes is
  absent.
- A plane covers all S tokens and starts at a multiple of {alignment} bytes. S being a multiple of 16, planes need no
  padding: a page is as large as the storage arithmetic says.
- Codes of a token: code i sits at bits `b (i mod 8/b)` of byte `i // (8/b)`. 3-bit codes are D/4 bytes with their low
  two bits, then D/8 bytes with their high bits.
- Byte j of token t lies at `offset + t C + j`. **V codes** are interleaved by token pair in 16-bit words: byte j of
  token t lies at `offset + (t // 2) 2C + (j // 2) 4 + (t mod 2) 2 + (j mod 2)`. So one 32-bit load has the same
  channels of two tokens, in its low and high half, and a token's write never shares a half-word with another's.

Loops are counted from 0. A slot s (of a serving engine's slot mapping) is token `s mod S` of block `s // S`.
"""


def page_markdown() -> str:
    """The page: the rules, then the offsets of every plane of a few configurations at D = 128, S = 16."""
    first = PageLayout(preset(EXAMPLES[0][0]), 128)
    sections = [TEXT.format(version=first.version, alignment=PLANE_ALIGNMENT)]
    for label, reference in EXAMPLES:
        layout = PageLayout(preset(label, reference=reference), 128)
        rows = [
            f"| {plane.kv.upper()} | {plane.loop} | {plane.kind}{' (interleaved)' * plane.interleaved} "
            f"| {plane.offset} | {plane.token_bytes} |"
            for plane in layout.planes
        ]
        title = f"## {label}, {reference}, D = {layout.head_dim}, S = {layout.page_tokens}"
        size = f"{layout.page_bytes_per_head} bytes per head and page."
        head = "| K or V | loop | plane | offset | bytes per token |\n|---|---|---|---|---|"
        sections.append("\n".join([title, "", size, "", head, *rows, ""]))
    return "\n".join(sections)


if __name__ == "__main__":
    path = workspace() / "docs" / "page_layout.md"
    write_atomic(path, page_markdown())
    print(f"wrote {show(path)}")
