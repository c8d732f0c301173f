"""Figures of a Record: attention matrix, head grid, alignment, image patches, entropy per layer.

Every function draws into the given axes, or into a new figure, and returns the axes. `save_figure` selects the figure
for a record and writes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foci.record.record import Record
from foci.view.colors import LIGHT_RAMP, contrasting_text_color, interpolate_color
from foci.view.figures import theme
from foci.view.figures.theme import ACCENT_COLOR, create_colormap, get_axes, use_figure_style
from foci.view.figures.word_maps import draw_patches, plot_word_maps, plot_word_steps, save_animation
from foci.view.selection import (
    SelectedHead,
    compute_unit_weights,
    list_layers,
    read_picture,
    read_rows,
    reshape_to_grid,
    select_default_head,
    select_head,
    select_patch,
)
from foci.view.units import TextUnit, list_layer_units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# An axis with more units shows positions instead of words, and the matrix is averaged in blocks along it.
MAX_NAMED_UNITS = 64
MAX_NUMBERED_UNITS = 20
MAX_BLOCKS = 256
THUMBNAIL_SIDE = 48


def plot_matrix(
    record: Record,
    head: str | None = None,
    ax: Axes | None = None,
    *,
    batch: int = 0,
    by_token: bool = False,
    numbers: bool | None = None,
) -> Axes:
    """Plot the matrix of a head, "L0H1", or the mean of a layer's heads, "L0".

    >>> from foci.view.figures import plots
    >>> record = foci.Record.from_tensors([torch.eye(3).view(1, 1, 3, 3)], tokens=["a", "b", "c"])
    >>> plots.plot_matrix(record, "L0H0").get_title(loc="left")
    'L0H0'

    Args:
        head: its name; None: a head with clear attention to distant words, or the alignment of an encoder-decoder.
        batch: which sequence.
        by_token: show single tokens instead of words.
        numbers: write the percentage into each cell; None: if there are at most 20 words.
    """
    selection = select_head(record, head) if head else select_default_head(record, batch)
    return draw_unit_matrix(record, selection, ax, batch, by_token, numbers)


def plot_alignment(
    record: Record,
    head: str | None = None,
    ax: Axes | None = None,
    *,
    batch: int = 0,
    by_token: bool = False,
    numbers: bool | None = None,
) -> Axes:
    """Plot a cross-attention head, or the mean of the layer with the clearest alignment."""
    selection = select_head(record, head) if head else select_default_head(record, batch)
    if selection.layer.queries == selection.layer.keys:
        raise ValueError(f"head must be a cross-attention head such as cross.L0H1, got {selection.name}")
    return draw_unit_matrix(record, selection, ax, batch, by_token, numbers)


@use_figure_style()
def draw_unit_matrix(
    record: Record, selection: SelectedHead, ax: Axes | None, batch: int, by_token: bool, numbers: bool | None
) -> Axes:
    queries, keys = list_layer_units(record, selection.layer, batch, by_token)
    if max(len(queries), len(keys)) > MAX_NAMED_UNITS:
        return draw_block_matrix(record, selection, ax, batch, queries, keys)
    numbers = max(len(queries), len(keys)) <= MAX_NUMBERED_UNITS if numbers is None else numbers
    cell = theme.NUMBERED_CELL_SIDE if numbers else theme.PLAIN_CELL_SIDE
    size = theme.fit_axes_size(cell * len(keys), cell * len(queries))
    ax = get_axes(ax, (1.9 + size[0], 1.2 + size[1]))
    values = compute_unit_weights(selection, batch, queries, keys)
    full = theme.find_full_color_weight(values, len(keys))
    image = ax.imshow(values.numpy(), cmap=create_colormap(), vmin=0, vmax=full)
    # Cells are square unless a side would be too short for its labels.
    ax.set_aspect("equal" if size == (cell * len(keys), cell * len(queries)) else "auto")
    theme.set_word_ticks(ax, [unit.text for unit in keys], [unit.text for unit in queries])
    if numbers:
        write_percentages(ax, values)
    finish_matrix(ax, image, selection, ["attention weight"], values)
    return ax


def draw_block_matrix(
    record: Record,
    selection: SelectedHead,
    ax: Axes | None,
    batch: int,
    queries: Sequence[TextUnit],
    keys: Sequence[TextUnit],
) -> Axes:
    """Draw the matrix of a long text: positions instead of words along a long axis, averaged in blocks."""
    values, named, whole = average_blocks(selection, batch, queries, keys)
    across, down = (
        theme.LONG_AXIS_SIDE if units is None else theme.PLAIN_CELL_SIDE * len(units) for units in reversed(named)
    )
    size = theme.fit_axes_size(across, down)
    ax = get_axes(ax, (1.9 + size[0], 1.0 + size[1]))
    lengths = [
        most if units is None else len(units) for most, units in zip(selection.layer.shape[2:], named, strict=True)
    ]
    # A tick is at the center of its cell.
    box = (-0.5, lengths[1] - 0.5, lengths[0] - 0.5, -0.5)
    # The square root separates the many small weights.
    norm = theme.create_sqrt_norm(theme.find_full_color_weight(values, selection.layer.shape[3]))
    ax.imshow(values.numpy(), cmap=create_colormap(), norm=norm, extent=box, interpolation="nearest", aspect="auto")
    labels = record.labels_of(selection.layer)
    for axis, units, labelled in zip((ax.yaxis, ax.xaxis), named, labels, strict=True):
        theme.set_long_axis_ticks(axis, None if units is None else [unit.text for unit in units], labelled.seconds)
    ax.xaxis.tick_top()
    legend = ["attention weight" + ("" if whole else ", mean of a block"), "color by its square root"]
    finish_matrix(ax, ax.images[-1], selection, legend, values)
    return ax


def average_blocks(
    selection: SelectedHead, batch: int, queries: Sequence[TextUnit], keys: Sequence[TextUnit]
) -> tuple[Tensor, list[Sequence[TextUnit] | None], bool]:
    """Return the matrix by units along a short axis and in at most MAX_BLOCKS blocks along a long one.

    Also return the units of each axis (None if it has blocks), and whether each cell is a single weight.
    """
    lengths, finest = selection.layer.shape[2:], selection.layer.max_picture_size
    # Units need every position.
    named = [
        units if len(units) <= MAX_NAMED_UNITS and most == length else None
        for units, length, most in zip((queries, keys), lengths, finest, strict=True)
    ]
    rows, columns = (
        most if units is not None else min(most, MAX_BLOCKS) for units, most in zip(named, finest, strict=True)
    )
    values = read_picture(selection, batch, rows, columns)
    if named[0] is not None:
        values = torch.stack([values[unit.start : unit.stop].mean(0) for unit in named[0]])
    if named[1] is not None:
        values = torch.stack([values[:, unit.start : unit.stop].sum(1) for unit in named[1]], 1)
    return values, named, (rows, columns) == lengths


def write_percentages(ax: Axes, values: Tensor) -> None:
    """Write the percentage into each cell, in a dark or a light color."""
    largest = theme.find_full_color_weight(values, values.shape[1])
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if value >= 0.005:
                letters = tuple(
                    part / 255 for part in contrasting_text_color(interpolate_color(LIGHT_RAMP, value / largest))
                )
                ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=6, color=letters)


def finish_matrix(ax: Axes, image: Any, selection: SelectedHead, legend: list[str], values: Tensor) -> None:
    """Set the title and the axis labels, hide the frame and add a color bar."""
    theme.set_title(ax, selection.name if selection.head is not None else f"{selection.name}, mean of heads")
    ax.set_ylabel("query")
    ax.set_xlabel("key")
    ax.xaxis.set_label_position("bottom")
    ax.spines[:].set_visible(False)
    unknown = [] if values.isfinite().all() else ["grey: NaN"]
    theme.add_colorbar(ax, image, "\n".join(legend + unknown))


@use_figure_style()
def plot_heads(record: Record, ax: Axes | None = None, *, batch: int = 0) -> Axes:
    """Plot every head as a small picture, relative to its largest weight: a row per layer, a column per head."""
    layers = list_layers(record)
    most = max(len(layer.heads) for layer in layers)
    size = min(THUMBNAIL_SIDE, *(side for layer in layers for side in layer.max_picture_size))
    sheet = torch.zeros(len(layers) * (size + 1), most * (size + 1))
    for i, layer in enumerate(layers):
        small = layer.picture(size, size)[batch].detach().float().cpu()
        for j, head in enumerate(small):
            place = slice(i * (size + 1), i * (size + 1) + size), slice(j * (size + 1), j * (size + 1) + size)
            sheet[place] = (head / theme.find_full_color_weight(head, layer.shape[3])).sqrt()
    ax = get_axes(ax, (max(0.8 + 0.5 * most, 3.0), max(0.6 + 0.5 * len(layers), 1.4)))
    ax.imshow(sheet.numpy(), cmap=create_colormap(), vmin=0, vmax=1, interpolation="nearest")
    middle = [(size - 1) / 2 + step * (size + 1) for step in range(max(most, len(layers)))]
    ax.set_xticks(middle[:most], [f"H{j}" for j in range(most)])
    ax.set_yticks(middle[: len(layers)], theme.format_labels(record.name_of(layer) for layer in layers))
    ax.xaxis.tick_top()
    ax.set_xlabel("in each: rows are queries, columns are keys", loc="left")
    ax.spines[:].set_visible(False)
    return ax


@use_figure_style()
def plot_entropy(record: Record, ax: Axes | None = None) -> Axes:
    """Plot the entropy of each head by layer: a dot per head, a line through the means."""
    layers = list_layers(record)
    table = record.scores()["entropy"]
    stacks: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        stacks.setdefault(layer.stack, []).append(i)
    ax = get_axes(ax, (3.6, 2.4))
    for color, (stack, places) in zip(theme.STACK_COLORS, stacks.items(), strict=False):
        numbers = [layers[i].index for i in places]
        some = table[places]
        ax.plot(numbers, some.numpy(), ".", color=color, alpha=0.35, markersize=5, markeredgewidth=0, clip_on=False)
        ax.plot(numbers, some.nanmean(1).numpy(), "-", color=color, linewidth=1.4, label=stack or "mean of heads")
    ax.set_xlabel("layer")
    ax.set_ylabel("entropy in nats")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(theme.create_integer_locator())
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=7)
    return ax


@use_figure_style()
def plot_overlay(
    record: Record, head: str | None = None, ax: Axes | None = None, *, patch: str | int | None = None, batch: int = 0
) -> Axes:
    """Plot an image with the attention weights of one query on its patches.

    Args:
        patch: the query, as "row,column" or as a position; None: the class token, or the middle patch.
    """
    selection = select_head(record, head) if head else select_default_head(record, batch)
    queries, keys = record.labels_of(selection.layer)
    query, name = select_patch(queries, patch)
    grid = reshape_to_grid(read_rows(selection, batch, [query])[0], keys)
    height, width = grid.shape
    ax = get_axes(ax, (3.4, 0.5 + 2.9 * height / width))
    picture = None if keys.images is None else keys.images[batch]
    image = draw_patches(ax, grid, picture, theme.find_full_color_weight(grid, grid.numel()))
    row, column = divmod(query - keys.leading, width)
    if query >= keys.leading:
        frame = (column - 0.5, row - 0.5)
        ax.add_patch(theme.create_cell_frame(frame, ACCENT_COLOR))
    mean = "" if selection.head is not None else ", mean of heads"
    theme.set_title(ax, f"Attention of {name} in {selection.name}{mean}")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    theme.add_colorbar(ax, image, "attention weight")
    return ax


FIGURES: dict[str, Callable[..., Axes]] = {
    "matrix": plot_matrix,
    "heads": plot_heads,
    "alignment": plot_alignment,
    "overlay": plot_overlay,
    "entropy": plot_entropy,
    "words": plot_word_maps,
    "steps": plot_word_steps,
}


def save_figure(
    record: Record, path: str | os.PathLike[str], what: str | None = None, dpi: int = 300, **options: Any
) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of the path; SVG and PDF keep text as text.

    A GIF is the animation of `what="steps"`.

    Args:
        what: "matrix", "heads", "alignment", "overlay", "entropy", "words" (where in an image each word looks) or
            "steps" (a word at denoising steps); None: the overlay of a vision model, the words of a text with images,
            the matrix of the default head or, of an encoder-decoder, the alignment.
        dpi: dots per inch of a PNG.
        options: arguments of the figure's function: head="L5H3", batch=1, ...
    """
    is_animated = Path(path).suffix.lower() == ".gif"
    if what is None:
        what = "steps" if is_animated else select_figure(record)
    if what not in FIGURES:
        raise ValueError(f"what must be one of {', '.join(FIGURES)}, got {what!r}")
    if is_animated:
        if what != "steps":
            raise ValueError(f"what must be 'steps' for a GIF, got {what!r}")
        save_animation(record, path, **options)
        return
    ax = FIGURES[what](record, **options)
    theme.add_notes(ax, record.notes)
    write_figure(ax, path, dpi)


def select_figure(record: Record) -> str:
    """Select the figure that suits a record."""
    labels = [record.labels_of(layer) for layer in record.layers.values()]
    if any(keys.grid for _, keys in labels):
        return "overlay"
    linked = any("image" in each.split_kinds() for both in labels for each in both)
    return "words" if linked else "matrix"


def write_figure(ax: Axes, path: Any, dpi: int = 300, file_format: str | None = None) -> None:
    """Write the figure of some axes and close it; `path` may be a file object if `file_format` is given."""
    # Without a date, equal figures give equal files.
    kind = file_format or Path(path).suffix[1:].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    figure = ax.get_figure(root=True)
    assert figure is not None
    with use_figure_style():
        figure.savefig(path, dpi=dpi, bbox_inches="tight", pad_inches=0.03, metadata=undated, format=kind)
    theme.import_pyplot().close(figure)
