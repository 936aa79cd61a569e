"""Figures 2 and 5: key magnitudes of one layer and head across loops, as 3-D surfaces on shared scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residualquant.repro.plots import INK, TEXT, Picture, house_style, new_figure
from residualquant.repro.traces import Trace, figure2_surfaces, figure5_surfaces

if TYPE_CHECKING:
    from matplotlib.colors import Colormap, Normalize
    from mpl_toolkits.mplot3d import Axes3D

COLOURS, SHADES = "viridis", 64  # few enough for a file that names shades instead of colours
MOST_TOKENS, MOST_CHANNELS = 96, 128  # drawn cells; a bin shows its largest value, so no outlier is lost


def pool_peaks(values: Tensor, most_rows: int, most_columns: int) -> Tensor:
    """``values`` [T, D] reduced to at most ``most_rows`` x ``most_columns`` cells, each the largest value it covers."""
    rows, columns = min(most_rows, values.shape[0]), min(most_columns, values.shape[1])
    return torch.nn.functional.adaptive_max_pool2d(values[None, None].float(), (rows, columns))[0, 0]


def _surface(axis: Axes3D, values: Tensor, norm: Normalize, colours: Colormap, height: float, title: str) -> None:
    import numpy as np

    tokens, channels = values.shape
    z = pool_peaks(values, MOST_TOKENS, MOST_CHANNELS).numpy()
    x, y = np.meshgrid(np.linspace(1, channels, z.shape[1]), np.linspace(1, tokens, z.shape[0]))
    axis.plot_surface(
        x, y, z, cmap=colours, norm=norm, rstride=1, cstride=1, linewidth=0, antialiased=False, rasterized=True
    )
    axis.set_facecolor("none")
    axis.set_zlim(0, height)
    axis.set_xlim(1, channels)
    axis.set_ylim(1, tokens)
    axis.view_init(elev=28, azim=-52)
    axis.set_box_aspect((1.15, 1.15, 0.72), zoom=1.04)
    axis.set_xticks([1, channels // 2, channels])
    axis.set_yticks([tokens // 2, tokens])
    axis.locator_params(axis="z", nbins=4)
    axis.tick_params(labelsize=5.5, pad=-4)
    axis.set_xlabel("channel", fontsize=6, labelpad=-10)
    axis.set_ylabel("token", fontsize=6, labelpad=-10)
    axis.text2D(0.12, 0.95, title, transform=axis.transAxes, ha="left", va="top", fontsize=9)
    for side in (axis.xaxis, axis.yaxis, axis.zaxis):
        side.set_pane_color((0.965, 0.97, 0.98, 1.0))
        side.line.set_linewidth(0.4)
        side._axinfo["grid"].update(color="#dfe3e8", linewidth=0.4)


def where_taken(trace: Trace) -> str:
    """One line on what is shown, and how it differs from the layer and head that were asked for."""
    at = f"layer {trace.layer}, KV head {trace.head}"
    if [trace.layer, trace.head] != trace.asked:
        at += f" (nearest to the paper's layer {trace.asked[0]}, KV head {trace.asked[1]})"
    return f"{trace.model}, {at}, {trace.prompt}, {trace.k.shape[1]} tokens"


def _draw(rows: list[dict[str, Tensor]], names: list[str], trace: Trace, alt: str) -> Picture:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = [v for row in rows for v in row.values()]
    peak = max(float(v.max()) for v in values)
    norm = Normalize(0, max(float(pool_peaks(v, MOST_TOKENS, MOST_CHANNELS).flatten().quantile(0.995)) for v in values))
    colours = colormaps[COLOURS].resampled(SHADES)
    columns, height = len(rows[0]), 0.3 + 1.9 * len(rows)
    with house_style():
        figure = new_figure(TEXT, height)
        figure.set_layout_engine("none")
        left, right, bottom = 0.03, 0.915, 0.3 / height
        wide, tall = (right - left) / columns, (1 - bottom) / len(rows)
        for i, row in enumerate(rows):
            for j, (title, surface) in enumerate(row.items()):
                place = (left + j * wide, 1 - (i + 1) * tall, wide, tall)
                axis = figure.add_axes(place, projection="3d")
                _surface(axis, surface, norm, colours, peak, title)
                if j < columns - 1:  # one height scale for all, written once per row
                    axis.set_zticklabels([])
            figure.text(0.006, 1 - (i + 0.5) * tall, names[i], rotation=90, va="center", weight="bold", color=INK)
        bar = figure.add_axes((0.945, bottom + 0.1, 0.013, 1 - bottom - 0.2))
        scale = figure.colorbar(ScalarMappable(norm, colours), cax=bar, extend="max", extendfrac=0.03)
        scale.outline.set_visible(False)
        bar.tick_params(labelsize=6)
        figure.text(0.5, 0.08 / height, where_taken(trace), ha="center", fontsize=6.2)
    return Picture(figure, alt)


def draw_figure2(trace: Trace) -> Picture:
    """Figure 2: |K_1|, |K_2| and |K_2 - alpha_2 K_1| (loop 1 as reference, LS, unquantised)."""
    return _draw([figure2_surfaces(trace)], [""], trace, "Keys of loops 1 and 2, and what loop 1 does not explain")


def draw_figure5(trace: Trace) -> Picture:
    """Figure 5: for each loop before the last, |K_r|, |K_L| and |K_r - K_L|, all on one height and colour scale."""
    rows = figure5_surfaces(trace)
    names = [f"loop {r + 1}" for r in range(len(rows))]
    return _draw(rows, names, trace, "Keys of each loop, of the last loop, and their difference")
