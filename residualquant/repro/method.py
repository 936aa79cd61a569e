"""One key vector followed through the method and back, with pictures: what ``00_method`` shows.

``follow_vector`` takes the keys of one token, layer and KV head in all loops, and keeps every intermediate state of
Sec. 3.2: rotation, anchor, prediction, residual, codes, bytes, and the way back. Everything comes from the public
codec (``encode``, ``decode``), so the pictures show what the cache really stores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.affine import FP8, dequantize
from residualquant.config import KVQuantConfig, preset
from residualquant.layout import PageLayout, Plane, loop_bytes
from residualquant.pages import allocate_pages, read_pages, write_pages
from residualquant.repro.plots import GREY, INK, TEXT, Picture, house_style, new_figure
from residualquant.residual import PackedKV, decode, encode
from residualquant.rotation import rotation_for

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

LOOP_COLOURS = ("#f0a37a", "#d9b25f", "#7fb9dd", "#134e7e", "#6b4f9e", "#3f8f6b", "#a34a6b", "#4a4f57")
SLOT = 5  # where in the page the token is put; any of its 16 slots would do
BYTES_PER_LINE = 36  # of the page as it is drawn
PARTS = {"codes": "#7fb9dd", "metadata": "#f0c27a", "alpha": "#e08a8a"}


@dataclass(frozen=True, eq=False)
class Journey:
    """The keys of one token in all loops and everything the method makes of them.

    x, z: [L, D] FP32, the keys as the model made them and rotated. prediction: [L, D], alpha times the reconstructed
    reference (0 for the anchor). residual: [L, D], what is left to code. coded: [L, D], its dequantised codes.
    rebuilt: [L, D] in rotated space. back: [L, D] in the original space, read from ``page``. alpha: [L], 0 for the
    anchor. page: uint8 [bytes], one head's page of the cache, with this token's keys in ``slot`` and zeros elsewhere.
    """

    config: KVQuantConfig
    packed: PackedKV
    layout: PageLayout
    page: Tensor
    slot: int
    x: Tensor
    z: Tensor
    alpha: Tensor
    prediction: Tensor
    residual: Tensor
    coded: Tensor
    rebuilt: Tensor
    back: Tensor
    title: str

    @property
    def anchor(self) -> int:
        """The anchor loop, from 0."""
        return self.config.anchor

    @property
    def others(self) -> list[int]:
        """The loops that are coded as residuals, from 0."""
        return [r for r in range(self.config.loops) if r != self.anchor]


def follow(x: Tensor, config: KVQuantConfig, title: str = "") -> Journey:
    """Follow the keys ``x`` [L, D] of one token and head through ``config``.

    Raises:
        ValueError: direct coding (which has no anchor), raw loops, or another number of loops than the configuration.
    """
    if config.anchor is None or 16 in config.bits:
        raise ValueError(f"to follow a residual the configuration needs an anchor and codes, got {config}")
    x = x.to(torch.bfloat16).float()
    rotation = rotation_for(config, x.shape[-1])
    packed = encode(x[:, None, None], config)  # [L, T=1, H=1, D], as the cache holds it
    layout, slots = PageLayout(config, x.shape[-1]), torch.tensor([SLOT])
    pages = allocate_pages(layout, blocks=1, heads=1)
    write_pages(pages, layout, slots, packed, encode(torch.zeros_like(x)[:, None, None], config))
    read, _ = read_pages(pages, layout, slots)
    back = decode(replace(read, rotation=rotation))
    z = x if rotation is None else rotation.rotate(x)
    rebuilt = decode(packed, space="rotated")[:, 0, 0]
    alpha, prediction, coded = torch.zeros(len(x)), torch.zeros_like(x), torch.zeros_like(x)
    for loop, stored in enumerate(packed.loops):
        if (reference := config.reference_of(loop)) is not None:
            alpha[loop] = stored.alpha.float().item() if config.stores_alpha(loop) else 1.0
            prediction[loop] = alpha[loop] * rebuilt[reference]
        if config.bits[loop]:
            metadata = stored.metadata.view(FP8).unflatten(-1, (-1, 2))
            coded[loop] = dequantize(packed.unpacked_codes(loop), metadata)[0, 0]
    return Journey(
        config, packed, layout, pages[0, 0], SLOT, x, z, alpha, prediction, z - prediction, coded, rebuilt,
        back[:, 0, 0], title,
    )  # fmt: skip


def follow_vector(
    model: str = "mini-ouro-maths",
    task: str = "words",
    problem: int = 3,
    layer: int = 3,
    head: int = 2,
    token: int = 100,
    precision: str = "INT2/4 g=32",
    reference: str = "last",
    rotation: str = "hadamard",
) -> Journey:
    """Run a model on one training problem and follow the keys of one token, layer and KV head (from 1) in all loops.

    Raises:
        ValueError: a layer, head, token or precision that does not exist.
    """
    from residualquant.models import load_model
    from residualquant.repro.traces import collect_trace, problem_tokens

    loaded = load_model(model)
    ids = problem_tokens(loaded, task, problem)
    if not 1 <= token <= len(ids):
        raise ValueError(f"token must be between 1 and {len(ids)}, got {token}")
    config = preset(precision, loops=loaded.kv_shape.loops, reference=reference, rotation=rotation)
    trace = collect_trace(loaded, ids, layer, head)
    word = loaded.tokenizer.decode([ids[token - 1]])
    title = f"{loaded.name}, layer {layer}, KV head {head}, token {token} ({word!r}), {config.label}"
    return follow(trace.k[:, token - 1], config, title)


def _nmse(rebuilt: Tensor, x: Tensor) -> Tensor:
    """|rebuilt - x|^2 / |x|^2 per loop, [L]."""
    return (rebuilt - x).square().sum(-1) / x.square().sum(-1)


def journey_table(journey: Journey) -> pd.DataFrame:
    """One row per loop: role, bits, alpha, bytes, energy left after prediction, and the error after the way back.

    ``direct_nmse`` is the error of coding the same loop alone with the same bits and rotation.
    """
    import pandas as pd

    c = journey.config
    direct = decode(encode(journey.x, KVQuantConfig.from_dict({**c.to_dict(), "reference": "direct"})))
    left = journey.residual.square().sum(-1) / journey.z.square().sum(-1)
    return pd.DataFrame(
        {
            "loop": loop + 1,
            "role": "anchor" if loop == journey.anchor else f"residual of loop {c.reference_of(loop) + 1}",
            "bits": c.bits[loop],
            "group_size": c.group_sizes[loop],
            "alpha": float(journey.alpha[loop]) if loop != journey.anchor else float("nan"),
            "bytes": loop_bytes(c, loop, journey.x.shape[-1]),
            "energy_left": float(left[loop]),
            "nmse": float(_nmse(journey.back, journey.x)[loop]),
            "direct_nmse": float(_nmse(direct, journey.x)[loop]),
        }
        for loop in range(c.loops)
    )


# ------------------------------------------------------------------------------------------------ pictures


def _channels(axis: Axes, head_dim: int, group_size: int | None = None) -> None:
    axis.set_xlim(-0.5, head_dim - 0.5)
    axis.set_xticks(range(0, head_dim + 1, 32))
    axis.axhline(0, color=GREY, linewidth=0.5)
    for edge in range(group_size or head_dim, head_dim, group_size or head_dim):
        axis.axvline(edge - 0.5, color=GREY, linewidth=0.5, linestyle=(0, (2, 2)))


def _group_levels(axis: Axes, journey: Journey, loop: int) -> None:
    """The 2^b values each group can take, as thin lines across the group."""
    size, bits = journey.config.group_sizes[loop], journey.config.bits[loop]
    scale, offset = journey.packed.loops[loop].metadata.view(FP8).float().reshape(-1, 2).unbind(-1)
    for group, (s, o) in enumerate(zip(scale.tolist(), offset.tolist())):
        levels = [o + s * code for code in range(2**bits)]
        axis.hlines(levels, group * size - 0.5, (group + 1) * size - 0.5, color="#c3c9d1", linewidth=0.4, zorder=0)


def draw_loops(journey: Journey) -> Picture:
    """The same token's keys in every loop, one line each: similar, which is what residual coding uses."""
    loops, head_dim = journey.x.shape
    with house_style():
        figure = new_figure(TEXT, 0.55 + 0.75 * loops)
        axes = figure.subplots(loops, 1, sharex=True, sharey=True, squeeze=False).ravel()
        for loop, axis in enumerate(axes):
            axis.bar(range(head_dim), journey.x[loop].tolist(), width=0.9, color=LOOP_COLOURS[loop % 8])
            _channels(axis, head_dim)
            axis.set_ylabel(f"$K_{loop + 1}$", rotation=0, va="center", labelpad=10)
        axes[-1].set_xlabel("channel")
        axes[0].set_title(journey.title)
    return Picture(figure, "The keys of one token in every loop")


def draw_rotation(journey: Journey) -> Picture:
    """The anchor's keys before and after the rotation: the energy spreads over all channels, so ranges shrink."""
    a, head_dim = journey.anchor, journey.x.shape[-1]
    size = journey.config.group_sizes[a]
    with house_style():
        figure = new_figure(TEXT, 2.5)
        axes = figure.subplots(2, 1, sharex=True, sharey=True)
        pairs = ((journey.x[a], "as the model made it"), (journey.z[a], f"rotated ({journey.config.rotation})"))
        for axis, (values, name) in zip(axes, pairs):
            axis.bar(range(head_dim), values.tolist(), width=0.9, color=LOOP_COLOURS[a % 8])
            _channels(axis, head_dim, size)
            spans = values.unflatten(-1, (-1, size))
            width = (spans.amax(-1) - spans.amin(-1)).mean()
            title = f"$K_{a + 1}$ {name}: mean range of a group of {size} channels is {width:.2f}"
            axis.set_title(title, weight="normal")
        axes[-1].set_xlabel("channel")
    return Picture(figure, "The anchor's keys before and after the rotation")


def draw_anchor(journey: Journey) -> Picture:
    """The anchor is coded alone: grey lines are the values its codes can take, dots what was stored."""
    a, head_dim = journey.anchor, journey.x.shape[-1]
    with house_style():
        figure = new_figure(TEXT, 2.1)
        axis = figure.subplots()
        _group_levels(axis, journey, a)
        axis.vlines(range(head_dim), journey.z[a].tolist(), journey.rebuilt[a].tolist(), color="#b8371f", linewidth=1.2)
        axis.plot(range(head_dim), journey.z[a].tolist(), "_", color=INK, markersize=4, label="rotated key")
        axis.plot(
            range(head_dim),
            journey.rebuilt[a].tolist(),
            ".",
            color=LOOP_COLOURS[a % 8],
            markersize=4,
            label=f"stored with {journey.config.bits[a]} bits",
        )
        _channels(axis, head_dim, journey.config.group_sizes[a])
        axis.grid(visible=False)
        axis.set_xlabel("channel")
        axis.set_title(f"Anchor, loop {a + 1}")
        axis.legend(loc="upper right", bbox_to_anchor=(1, 1.16), ncols=2)
    return Picture(figure, "The anchor's keys, the values its codes can take, and what is stored")


def draw_residual(journey: Journey, loop: int = 1) -> Picture:
    """Loop ``loop`` (from 1): above, the key and its prediction; below, on the same scale, what is left, and its codes.

    Raises:
        ValueError: the anchor, or no such loop.
    """
    if loop - 1 not in journey.others:
        why = " (the anchor)" if loop - 1 in range(len(journey.x)) else ""
        raise ValueError(f"loop must be one of {[r + 1 for r in journey.others]}, got {loop}{why}")
    r, head_dim = loop - 1, journey.x.shape[-1]
    reference, channels = journey.config.reference_of(r), range(head_dim)
    with house_style():
        figure = new_figure(TEXT, 3.4)
        top, bottom = figure.subplots(2, 1, sharex=True, sharey=True)
        top.bar(channels, journey.z[r].tolist(), width=0.9, color=LOOP_COLOURS[r % 8], label=f"$Z_{loop}$, rotated key")
        top.step(
            channels,
            journey.prediction[r].tolist(),
            where="mid",
            color=INK,
            linewidth=0.8,
            label=f"$\\alpha\\hat{{Z}}_{reference + 1}$, prediction, $\\alpha$ = {float(journey.alpha[r]):.4f}",
        )
        if journey.config.bits[r]:
            _group_levels(bottom, journey, r)
        bottom.bar(
            channels,
            journey.residual[r].tolist(),
            width=0.9,
            color=LOOP_COLOURS[r % 8],
            alpha=0.55,
            label=f"$Z_{loop}-\\alpha\\hat{{Z}}_{reference + 1}$, residual",
        )
        bottom.plot(
            channels,
            journey.coded[r].tolist(),
            ".",
            color=INK,
            markersize=3,
            label=f"stored with {journey.config.bits[r]} bits",
        )
        left = journey.residual[r].square().sum() / journey.z[r].square().sum()
        titles = (f"Loop {loop}", f"{100 * left:.1f} % of its energy is left to code")
        for axis, title in zip((top, bottom), titles):
            _channels(axis, head_dim, journey.config.group_sizes[r])
            axis.set_title(title)
            axis.legend(loc="upper right", bbox_to_anchor=(1, 1.2), ncols=2)
        bottom.grid(visible=False)
        bottom.set_xlabel("channel")
    return Picture(figure, f"Loop {loop}: key, prediction, residual and codes")


def stored_planes(journey: Journey) -> list[tuple[Plane, bytes]]:
    """This token's bytes of every plane of the page, K's planes in the order in which they lie there."""
    planes = []
    for plane in journey.layout.planes_of("k"):
        places = [journey.layout.offset_of(plane, journey.slot, byte) for byte in range(plane.token_bytes)]
        planes.append((plane, bytes(journey.page[places].tolist())))
    return planes


def page_table(journey: Journey) -> pd.DataFrame:
    """The planes of the page that hold keys: where each starts, what a token takes of it, and this token's bytes."""
    import pandas as pd

    return pd.DataFrame(
        {
            "loop": plane.loop + 1,
            "plane": plane.kind,
            "starts_at_byte": plane.offset,
            "bytes_per_token": plane.token_bytes,
            "this_token_at": journey.layout.offset_of(plane, journey.slot, 0),
            "first_bytes": data[:8].hex(" ") + (" …" if len(data) > 8 else ""),
        }
        for plane, data in stored_planes(journey)
    )


def draw_page(journey: Journey) -> Picture:
    """Every byte that this token and head takes in the cache, in hexadecimal: codes, FP8 metadata, coefficients."""
    planes = stored_planes(journey)
    lines: list[tuple[str, list[tuple[int, str]]]] = []
    for loop in dict.fromkeys(plane.loop for plane, _ in planes):
        cells = [(b, plane.kind) for plane, data in planes if plane.loop == loop for b in data]
        name = f"loop {loop + 1}" + (", anchor" if loop == journey.anchor else "")
        for start in range(0, len(cells), BYTES_PER_LINE):
            lines.append((name if start == 0 else "", cells[start : start + BYTES_PER_LINE]))
    with house_style():
        figure = new_figure(TEXT, 0.62 + 0.2 * len(lines))
        axis = figure.subplots()
        for y, (loop, cells) in enumerate(lines):
            axis.text(-0.4, y, loop, ha="right", va="center", fontsize=6.5)
            axis.barh(
                [y] * len(cells),
                0.94,
                left=[i + 0.03 for i in range(len(cells))],
                height=0.86,
                color=[PARTS[part] for _, part in cells],
            )
            for i, (byte, _) in enumerate(cells):
                axis.text(i + 0.5, y, f"{byte:02x}", ha="center", va="center", fontsize=5, family="DejaVu Sans Mono")
        axis.set_xlim(-4.5, BYTES_PER_LINE)
        axis.set_ylim(len(lines) - 0.4, -0.6)
        axis.axis("off")
        raw = 2 * journey.x.numel()
        total = sum(len(data) for _, data in planes)
        loops = journey.config.loops
        axis.set_title(f"{total} bytes for {loops} loops, against {raw} in BF16: {raw / total:.2f}x less")
        for part, colour in PARTS.items():
            name = {"codes": "codes", "metadata": "FP8 scale and offset per group", "alpha": "BF16 coefficient"}[part]
            axis.barh([0], 0, color=colour, label=name)
        figure.legend(loc="outside lower center", ncols=3)
    return Picture(figure, "Every stored byte of one token and head")


def draw_return(journey: Journey) -> Picture:
    """The way back: every loop's key as the model made it (bars) and as the cache gives it back (line)."""
    loops, head_dim = journey.x.shape
    errors = _nmse(journey.back, journey.x)
    with house_style():
        figure = new_figure(TEXT, 0.6 + 0.8 * loops)
        axes = figure.subplots(loops, 1, sharex=True, sharey=True, squeeze=False).ravel()
        for loop, axis in enumerate(axes):
            axis.bar(range(head_dim), journey.x[loop].tolist(), width=0.9, color=LOOP_COLOURS[loop % 8], alpha=0.75)
            axis.step(range(head_dim), journey.back[loop].tolist(), where="mid", color=INK, linewidth=0.7)
            _channels(axis, head_dim)
            axis.set_ylabel(f"$K_{loop + 1}$", rotation=0, va="center", labelpad=10)
            axis.set_title(
                f"error {100 * float(errors[loop]):.2f} % of the energy", loc="right", weight="normal", fontsize=7
            )
        axes[-1].set_xlabel("channel")
    return Picture(figure, "Keys of every loop, original and decoded")
