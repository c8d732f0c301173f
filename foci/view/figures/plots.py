"""A Record as figures for a paper: matrix, head grid, alignment, an image's patches, entropy per layer.

Every function draws into the axes it is given, or into a new figure, and gives them back: all of matplotlib is open
from there. `save` picks the figure that suits a record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foci.record.record import Record
from foci.view.colors import LIGHT_RAMP, contrasting_text_color, interpolate_color
from foci.view.figures import theme
from foci.view.figures.theme import ACCENT_COLOR, create_colormap, get_axes, use_figure_style
from foci.view.selection import (
    HeadSelection,
    compute_unit_weights,
    read_picture,
    read_rows,
    select_default_head,
    select_head,
)
from foci.view.terminal import patches
from foci.view.units import TextUnit, list_layer_units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Up to so many words an axis has names; beyond, it counts positions, and what stands there is drawn in blocks.
MAX_NAMED_UNITS = 64
MAX_NUMBERED_UNITS = 20
MAX_BLOCKS = 256
THUMBNAIL_SIDE = 48
# Of an image: its black under the attention, how much of it the heaviest patch covers, and from how many times an even
# share on a patch has the last colour.
MIN_IMAGE_BRIGHTNESS, MAX_OVERLAY_ALPHA, FULL_COLOR_FACTOR = 0.15, 0.7, 3


def plot_matrix(
    record: Record,
    head: str | None = None,
    ax: Axes | None = None,
    *,
    batch: int = 0,
    by_token: bool = False,
    numbers: bool | None = None,
) -> Axes:
    """One head's matrix, "L0H1", or the mean of a layer's heads, "L0"; with its percentages where it is small.

    >>> from foci.view import plot
    >>> record = foci.Record.from_tensors([torch.eye(3).view(1, 1, 3, 3)], tokens=["a", "b", "c"])
    >>> plot.matrix(record, "L0H0").get_title(loc="left")
    'L0H0'

    Args:
        head: its name; None: one that looks far and clearly, of an encoder-decoder its alignment.
        batch: which sequence.
        by_token: tokens one by one instead of whole words.
        numbers: whether each cell says its percentage; None: where there are at most 20 words.
    """
    choice = select_head(record, head) if head else select_default_head(record, batch)
    return draw_matrix(record, choice, ax, batch, by_token, numbers)


def plot_alignment(
    record: Record,
    head: str | None = None,
    ax: Axes | None = None,
    *,
    batch: int = 0,
    by_token: bool = False,
    numbers: bool | None = None,
) -> Axes:
    """Which words of the source each written word looks at: a cross head, or the mean of the clearest layer's heads."""
    choice = select_head(record, head) if head else select_default_head(record, batch)
    if choice.layer.queries == choice.layer.keys:
        raise ValueError(f"expected attention between two sequences, such as cross.L0H1, received {choice.name}")
    return draw_matrix(record, choice, ax, batch, by_token, numbers)


@use_figure_style()
def draw_matrix(
    record: Record, choice: HeadSelection, ax: Axes | None, batch: int, by_token: bool, numbers: bool | None
) -> Axes:
    queries, keys = list_layer_units(record, choice.layer, batch, by_token)
    if max(len(queries), len(keys)) > MAX_NAMED_UNITS:
        return draw_blocks(record, choice, ax, batch, queries, keys)
    numbers = max(len(queries), len(keys)) <= MAX_NUMBERED_UNITS if numbers is None else numbers
    cell = theme.NUMBERED_CELL_SIDE if numbers else theme.PLAIN_CELL_SIDE
    size = theme.fit_axes_size(cell * len(keys), cell * len(queries))
    ax = get_axes(ax, (1.9 + size[0], 1.2 + size[1]))
    values = compute_unit_weights(choice, batch, queries, keys)
    image = ax.imshow(values.numpy(), cmap=create_colormap(), vmin=0, vmax=theme.find_largest_finite(values))
    # Square cells where that leaves both sides room enough; a matrix of two rows would be a line.
    ax.set_aspect("equal" if size == (cell * len(keys), cell * len(queries)) else "auto")
    theme.set_word_ticks(ax, [unit.text for unit in keys], [unit.text for unit in queries])
    if numbers:
        write_percentages(ax, values)
    finish_matrix(ax, image, choice, ["share of the attention"], values)
    return ax


def draw_blocks(
    record: Record,
    choice: HeadSelection,
    ax: Axes | None,
    batch: int,
    queries: Sequence[TextUnit],
    keys: Sequence[TextUnit],
) -> Axes:
    """A long text: positions instead of names along what is long, and the matrix averaged in blocks there."""
    values, named, whole = average_blocks(choice, batch, queries, keys)
    across, down = (
        theme.LONG_AXIS_SIDE if units is None else theme.PLAIN_CELL_SIDE * len(units) for units in reversed(named)
    )
    size = theme.fit_axes_size(across, down)
    ax = get_axes(ax, (1.9 + size[0], 1.0 + size[1]))
    lengths = [most if units is None else len(units) for most, units in zip(choice.layer.shape[2:], named, strict=True)]
    # A tick is at the middle of its cell, as between names.
    box = (-0.5, lengths[1] - 0.5, lengths[0] - 0.5, -0.5)
    # The root lets the many small shares be seen.
    norm = theme.create_sqrt_norm(theme.find_largest_finite(values))
    ax.imshow(values.numpy(), cmap=create_colormap(), norm=norm, extent=box, interpolation="nearest", aspect="auto")
    labels = record.labels_of(choice.layer)
    for axis, units, labelled in zip((ax.yaxis, ax.xaxis), named, labels, strict=True):
        theme.set_long_axis_ticks(axis, None if units is None else [unit.text for unit in units], labelled.seconds)
    ax.xaxis.tick_top()
    said = ["share of the attention" + ("" if whole else ", mean of a block"), "colours by its square root"]
    finish_matrix(ax, ax.images[-1], choice, said, values)
    return ax


def average_blocks(
    choice: HeadSelection, batch: int, queries: Sequence[TextUnit], keys: Sequence[TextUnit]
) -> tuple[Tensor, list[Sequence[TextUnit] | None], bool]:
    """The matrix, in words along a side that has few and in at most `BLOCKS` blocks along one that has many.

    With it the words of each side, or None; and whether each cell is what one position or word gives another.
    """
    lengths, finest = choice.layer.shape[2:], choice.layer.max_picture_size
    # Words are put together from whole positions.
    named = [
        units if len(units) <= MAX_NAMED_UNITS and most == length else None
        for units, length, most in zip((queries, keys), lengths, finest, strict=True)
    ]
    rows, columns = (
        most if units is not None else min(most, MAX_BLOCKS) for units, most in zip(named, finest, strict=True)
    )
    values = read_picture(choice, batch, rows, columns)
    if named[0] is not None:
        values = torch.stack([values[unit.start : unit.stop].mean(0) for unit in named[0]])
    if named[1] is not None:
        values = torch.stack([values[:, unit.start : unit.stop].sum(1) for unit in named[1]], 1)
    return values, named, (rows, columns) == lengths


def write_percentages(ax: Axes, values: Tensor) -> None:
    """The percentage in each cell, in dark or light ink."""
    largest = theme.find_largest_finite(values)
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if value >= 0.005:
                letters = tuple(
                    part / 255 for part in contrasting_text_color(interpolate_color(LIGHT_RAMP, value / largest))
                )
                ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=6, color=letters)


def finish_matrix(ax: Axes, image: Any, choice: HeadSelection, legend: list[str], values: Tensor) -> None:
    """Title, names of the axes, no frame, the legend of the colours."""
    theme.set_title(ax, choice.name if choice.head is not None else f"{choice.name}, mean of its heads")
    ax.set_ylabel("looks")
    ax.set_xlabel("is looked at")
    ax.xaxis.set_label_position("bottom")
    ax.spines[:].set_visible(False)
    unknown = [] if values.isfinite().all() else ["grey: no number (NaN)"]
    theme.add_colorbar(ax, image, "\n".join(legend + unknown))


@use_figure_style()
def plot_heads(record: Record, ax: Axes | None = None, *, batch: int = 0) -> Axes:
    """Every head as a small picture: a row per layer, a column per head, each to its own largest share."""
    layers = list(record.layers.values())
    most = max(len(layer.heads) for layer in layers)
    size = min(THUMBNAIL_SIDE, *(side for layer in layers for side in layer.max_picture_size))
    sheet = torch.zeros(len(layers) * (size + 1), most * (size + 1))
    for i, layer in enumerate(layers):
        small = layer.picture(size, size)[batch].detach().float().cpu()
        for j, head in enumerate(small):
            place = slice(i * (size + 1), i * (size + 1) + size), slice(j * (size + 1), j * (size + 1) + size)
            sheet[place] = (head / theme.find_largest_finite(head)).sqrt()
    ax = get_axes(ax, (max(0.8 + 0.5 * most, 3.0), max(0.6 + 0.5 * len(layers), 1.4)))
    ax.imshow(sheet.numpy(), cmap=create_colormap(), vmin=0, vmax=1, interpolation="nearest")
    middle = [(size - 1) / 2 + step * (size + 1) for step in range(max(most, len(layers)))]
    ax.set_xticks(middle[:most], [f"H{j}" for j in range(most)])
    ax.set_yticks(middle[: len(layers)], theme.format_labels(record.name_of(layer) for layer in layers))
    ax.xaxis.tick_top()
    ax.set_xlabel("in each, a row looks, a column is looked at", loc="left")
    ax.spines[:].set_visible(False)
    return ax


@use_figure_style()
def plot_entropy(record: Record, ax: Axes | None = None) -> Axes:
    """How spread the attention of each head is, layer by layer: a dot per head, a line through their means."""
    table = record.scores()["entropy"]
    stacks: dict[str, list[int]] = {}
    for i, layer in enumerate(record.layers.values()):
        stacks.setdefault(layer.stack, []).append(i)
    ax = get_axes(ax, (3.6, 2.4))
    for color, (stack, places) in zip(theme.STACK_COLORS, stacks.items(), strict=False):
        numbers = [list(record.layers.values())[i].index for i in places]
        some = table[places]
        ax.plot(numbers, some.numpy(), ".", color=color, alpha=0.35, markersize=5, markeredgewidth=0, clip_on=False)
        ax.plot(numbers, some.nanmean(1).numpy(), "-", color=color, linewidth=1.4, label=stack or "mean of its heads")
    ax.set_xlabel("layer")
    ax.set_ylabel("entropy, nats")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(theme.create_integer_locator())
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=7)
    return ax


@use_figure_style()
def plot_overlay(
    record: Record, head: str | None = None, ax: Axes | None = None, *, patch: str | int | None = None, batch: int = 0
) -> Axes:
    """An image, its patches lit by where one of them looks: the class token, or `patch` as "row,column" or a number."""
    choice = select_head(record, head) if head else select_default_head(record, batch)
    queries, keys = record.labels_of(choice.layer)
    query, name = patches.select_patch(queries, patch)
    lit = patches.reshape_to_grid(read_rows(choice, batch, [query])[0], keys)
    height, width = lit.shape
    ax = get_axes(ax, (3.4, 0.5 + 2.9 * height / width))
    box = (-0.5, width - 0.5, height - 0.5, -0.5)
    # An even look at everything stays pale: it says little.
    most = max(theme.find_largest_finite(lit), FULL_COLOR_FACTOR / lit.numel())
    alpha = None
    if keys.images is not None:
        # In grey, so that every colour is attention, which lies over it as thin as it is small.
        grey = keys.images[batch].float().mean(-1) / 255
        ax.imshow(
            (MIN_IMAGE_BRIGHTNESS + (1 - MIN_IMAGE_BRIGHTNESS) * grey).numpy(), cmap="gray", vmin=0, vmax=1, extent=box
        )
        alpha = (MAX_OVERLAY_ALPHA * (lit.nan_to_num(0.0, 0.0, 0.0) / most).sqrt()).numpy()
    # The last colours of the ramp are dark, and would not be seen over what is dark itself.
    image = ax.imshow(lit.numpy(), cmap=create_colormap(LIGHT_RAMP[:5]), vmin=0, vmax=most, alpha=alpha)
    row, column = divmod(query - keys.leading, width)
    if query >= keys.leading:
        frame = (column - 0.5, row - 0.5)
        ax.add_patch(theme.create_cell_frame(frame, ACCENT_COLOR))
    mean = "" if choice.head is not None else ", mean of its heads"
    theme.set_title(ax, f"Where {name} looks in {choice.name}{mean}")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    theme.add_colorbar(ax, image, "share of the attention")
    return ax


FIGURES: dict[str, Callable[..., Axes]] = {
    "matrix": plot_matrix,
    "heads": plot_heads,
    "alignment": plot_alignment,
    "overlay": plot_overlay,
    "entropy": plot_entropy,
}


def save_figure(
    record: Record, path: str | os.PathLike[str], what: str | None = None, dpi: int = 300, **options: Any
) -> None:
    """Writes a figure; the ending of the path says how: PNG, or with text and lines as such SVG and PDF.

    Args:
        what: "matrix", "heads", "alignment", "overlay" or "entropy"; None: the overlay of an image, otherwise the
            matrix of a telling head or, of an encoder-decoder, the alignment.
        dpi: dots per inch of a PNG.
        options: those of the figure's function: head="L5H3", batch=1, ...
    """
    if what is None:
        what = "overlay" if any(record.labels_of(layer)[1].grid for layer in record.layers.values()) else "matrix"
    if what not in FIGURES:
        raise ValueError(f"expected what= as one of {', '.join(FIGURES)}, received {what!r}")
    ax = FIGURES[what](record, **options)
    # Without a date the same record gives the same file.
    ending = os.fspath(path).rpartition(".")[2].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)
    figure = ax.get_figure(root=True)
    assert figure is not None
    with use_figure_style():
        figure.savefig(path, dpi=dpi, bbox_inches="tight", pad_inches=0.03, metadata=undated)
    theme.import_pyplot().close(figure)
