"""Draws a mask: a row per query, a column per key, dark where the key is visible."""

from __future__ import annotations

import html as markup
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foci.masks.base import Mask
from foci.runtime.checks import PICTURE_SUFFIXES, parse_suffix
from foci.view.colors import LIGHT_RAMP
from foci.view.figures import theme
from foci.view.figures.plots import MAX_BLOCKS, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Larger masks are shown in blocks, and without the lines between cells.
MAX_CELLS = 64
MASK_PAGE = (
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title} · foci</title>\n{picture}</html>\n'
)


@theme.use_figure_style()
def plot_mask(visible: Tensor, title: str, ax: Axes | None = None) -> Axes:
    """Plot a bool matrix (Tq, Tk); of a large one, the share of visible keys in each block.

    >>> from foci.view.figures.masks import plot_mask
    >>> plot_mask(foci.causal.dense(4), "causal").get_xlabel()
    'key'
    """
    queries, keys = visible.shape
    shares = average_mask_blocks(visible)
    cells = max(queries, keys) <= MAX_CELLS
    across, down = (theme.PLAIN_CELL_SIDE * n if cells else theme.LONG_AXIS_SIDE for n in (keys, queries))
    ax = theme.get_axes(ax, (0.8 + across, 0.8 + down))
    box = (-0.5, keys - 0.5, queries - 0.5, -0.5)
    colors = theme.create_colormap((LIGHT_RAMP[0], LIGHT_RAMP[-2]))
    ax.imshow(shares.numpy(), cmap=colors, vmin=0, vmax=1, extent=box, interpolation="nearest")
    ax.set_aspect("equal" if cells else "auto")
    if cells:
        ax.set_xticks([n - 0.5 for n in range(1, keys)], minor=True)
        ax.set_yticks([n - 0.5 for n in range(1, queries)], minor=True)
        ax.grid(which="minor", color="white", linewidth=0.6)
        ax.tick_params(which="minor", length=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(theme.create_integer_locator())
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    theme.set_title(ax, title)
    return ax


def average_mask_blocks(visible: Tensor) -> Tensor:
    """Return the share of visible entries in each of at most MAX_BLOCKS blocks along each axis."""
    rows, columns = (min(n, MAX_BLOCKS) for n in visible.shape)
    return torch.nn.functional.adaptive_avg_pool2d(visible.float().unsqueeze(0), (rows, columns))[0]


def save_mask(visible: Tensor, title: str, path: str | os.PathLike[str], dpi: int = 300) -> None:
    """Write the picture of a mask, by the suffix of the path."""
    if parse_suffix(path, *PICTURE_SUFFIXES) == ".html":
        page = MASK_PAGE.format(title=markup.escape(title), picture=render_mask(visible, title))
        Path(path).write_text(page, "utf-8")
    else:
        write_figure(plot_mask(visible, title), path, dpi)


def render_mask(visible: Tensor, title: str) -> str:
    """Render a mask as an <svg> element."""
    file = io.StringIO()
    write_figure(plot_mask(visible, title), file, file_format="svg")
    return file.getvalue().partition("<svg")[1] + file.getvalue().partition("<svg")[2]


def render_mask_in_notebook(mask: Mask) -> dict[str, str]:
    """Render the drawing as text, and the picture if matplotlib is installed."""
    visible = mask.dense()
    text = {"text/plain": str(mask) if max(visible.shape) <= MAX_CELLS else repr(mask)}
    try:
        return text | {"text/html": render_mask(visible, repr(mask))}
    except ImportError:
        return text
