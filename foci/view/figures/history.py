"""Draws a History: a panel per statistic, with a row per head and the steps of the training along the other axis."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from foci.record.history import History
from foci.view.figures import theme
from foci.view.figures.plots import write_figure
from foci.view.figures.theme import create_colormap, import_pyplot, use_figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The height in inches of the row of a head, and the least and largest height of a panel.
ROW_HEIGHT, MIN_PANEL_HEIGHT, MAX_PANEL_HEIGHT = 0.06, 1.6, 6.0
PANEL_WIDTH = 3.4
MAX_LAYER_TICKS, MAX_STEP_TICKS = 16, 5


@use_figure_style()
def plot_history(history: History, statistic: str | None = None) -> Figure:
    """Draws every statistic, or one of them, in a new figure."""
    if statistic is not None and statistic not in history.statistics:
        raise ValueError(f"statistic must be one of {', '.join(history.statistics)}, got {statistic!r}")
    names = history.statistics if statistic is None else [statistic]
    if not names:
        raise ValueError("history must hold a logged step to be drawn, got none")
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    height = min(max(ROW_HEIGHT * len(history.heads), MIN_PANEL_HEIGHT), MAX_PANEL_HEIGHT)
    figure, axes = import_pyplot().subplots(
        rows, columns, figsize=(PANEL_WIDTH * columns, (height + 0.5) * rows), layout="constrained", squeeze=False
    )
    for ax, name in zip(axes.flat, names, strict=False):
        draw_panel(ax, history, name)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    drawn: Figure = figure
    return drawn


def draw_panel(ax: Axes, history: History, statistic: str) -> None:
    """Draws one statistic: the heads from top to bottom, the steps from left to right."""
    values, steps = history.values(statistic).numpy(), history.steps
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + 0.5]
    image = ax.pcolormesh(edges, range(values.shape[1] + 1), values.T, cmap=create_colormap(), rasterized=True)
    if not values[values != 0].size:
        # Without a sink its mass is 0 everywhere.
        image.set_clim(0, 1)
    ax.invert_yaxis()
    starts, names = list_layer_ticks(history.layers)
    ax.set_yticks(starts, theme.format_labels(names))
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(theme.create_integer_locator(MAX_STEP_TICKS))
    ax.set_title(statistic.replace("_", " "), color=theme.TEXT_COLOR)
    bar: Any = ax.figure.colorbar(image, ax=ax, pad=0.02, aspect=30)
    bar.outline.set_visible(False)


def list_layer_ticks(layers: dict[str, int]) -> tuple[list[float], list[str]]:
    """Where the middle of each layer's rows is, and its name; every second, third, ... layer if there are many."""
    middles, start = [], 0
    for heads in layers.values():
        middles.append(start + heads / 2)
        start += heads
    stride = -(-len(layers) // MAX_LAYER_TICKS)
    return middles[::stride], list(layers)[::stride]


def write_history_figure(history: History, path: str | os.PathLike[str], dpi: int = 150) -> None:
    """Writes the figure of all statistics as PNG, SVG or PDF, by the suffix."""
    write_figure(plot_history(history).axes[0], path, dpi)
