"""A Record as figures for a paper: matrix, head grid, alignment, an image's patches, entropy per layer.

Every function draws into the axes it is given, or into a new figure, and gives them back: all of matplotlib is open
from there. `save` picks the figure that suits a record.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foci.record import Record
from foci.view import drawing, patches
from foci.view.colors import ON_WHITE, ink, mixed
from foci.view.drawing import ACCENT, colors, new_axes, style
from foci.view.reading import Choice, choose, mean_of, picture, rows, shares, sides, telling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Up to so many words a matrix has names on its axes; beyond, it is drawn as a picture of blocks.
MOST_NAMES = 64
MOST_NUMBERS = 20
BLOCKS = 256
THUMBNAIL = 48
INCHES = 0.26


def matrix(
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
    choice = choose(record, head) if head else telling(record, batch)
    return draw_matrix(record, choice, ax, batch, by_token, numbers)


def alignment(
    record: Record,
    head: str | None = None,
    ax: Axes | None = None,
    *,
    batch: int = 0,
    by_token: bool = False,
    numbers: bool | None = None,
) -> Axes:
    """Which words of the source each written word looks at: a cross head, or the mean of the clearest layer's heads."""
    choice = choose(record, head) if head else telling(record, batch)
    if choice.layer.queries == choice.layer.keys:
        raise ValueError(f"expected attention between two sequences, such as cross.L0H1, received {choice.name}")
    return draw_matrix(record, choice, ax, batch, by_token, numbers)


@style()
def draw_matrix(
    record: Record, choice: Choice, ax: Axes | None, batch: int, by_token: bool, numbers: bool | None
) -> Axes:
    queries, keys = sides(record, choice.layer, batch, by_token)
    longest = max(len(queries), len(keys))
    if longest > MOST_NAMES:
        return draw_blocks(choice, ax, batch)
    ax = new_axes(ax, (1.9 + INCHES * len(keys), 1.2 + INCHES * len(queries)))
    values = shares(choice, batch, queries, keys)
    image = ax.imshow(values.numpy(), cmap=colors(), vmin=0, vmax=max(float(values.max()), 1e-9))
    drawing.ticks(ax, [unit.text for unit in keys], [unit.text for unit in queries])
    if numbers if numbers is not None else longest <= MOST_NUMBERS:
        write_numbers(ax, values)
    finish(ax, image, choice)
    return ax


def draw_blocks(choice: Choice, ax: Axes | None, batch: int) -> Axes:
    """A long text: no names, but positions, and the matrix averaged in blocks."""
    queries, keys = choice.layer.shape[2:]
    finest = choice.layer.finest
    values = picture(choice, batch, min(finest[0], BLOCKS), min(finest[1], BLOCKS))
    ax = new_axes(ax, (4.6, 0.6 + 4.0 * min(queries / keys, 1.5)))
    box = (0, keys, queries, 0)
    # The root lets the many small shares be seen.
    image = ax.imshow(values.numpy(), cmap=colors(), norm=drawing.rooted(values), extent=box, interpolation="nearest")
    ax.set_aspect("auto")
    ax.xaxis.tick_top()
    finish(ax, image, choice, "share of the attention, mean of a block")
    return ax


def write_numbers(ax: Axes, values: Tensor) -> None:
    """The percentage in each cell, in dark or light ink."""
    largest = max(float(values.max()), 1e-9)
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if value >= 0.005:
                letters = tuple(part / 255 for part in ink(mixed(ON_WHITE, value / largest)))
                ax.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=6, color=letters)


def finish(ax: Axes, image: Any, choice: Choice, legend: str = "share of the attention") -> None:
    """Title, names of the axes, no frame, the legend of the colours."""
    drawing.title(ax, choice.name if choice.head is not None else f"{choice.name}, mean of its heads")
    ax.set_ylabel("looks")
    ax.set_xlabel("is looked at")
    ax.xaxis.set_label_position("bottom")
    ax.spines[:].set_visible(False)
    drawing.bar(ax, image, legend)


@style()
def heads(record: Record, ax: Axes | None = None, *, batch: int = 0) -> Axes:
    """Every head as a small picture: a row per layer, a column per head, each to its own largest share."""
    layers = list(record.layers.values())
    most = max(len(layer.heads) for layer in layers)
    size = min(THUMBNAIL, *(side for layer in layers for side in layer.finest))
    sheet = torch.full((len(layers) * (size + 1), most * (size + 1)), math.nan)
    for i, layer in enumerate(layers):
        small = layer.picture(size, size)[batch].detach().float().cpu()
        for j, head in enumerate(small):
            place = slice(i * (size + 1), i * (size + 1) + size), slice(j * (size + 1), j * (size + 1) + size)
            sheet[place] = (head / head.max().clamp(min=1e-9)).sqrt()
    ax = new_axes(ax, (max(0.8 + 0.5 * most, 3.0), max(0.6 + 0.5 * len(layers), 1.4)))
    ax.imshow(sheet.numpy(), cmap=colors(), vmin=0, vmax=1, interpolation="nearest")
    middle = [(size - 1) / 2 + step * (size + 1) for step in range(max(most, len(layers)))]
    ax.set_xticks(middle[:most], [f"H{j}" for j in range(most)])
    ax.set_yticks(middle[: len(layers)], drawing.texts(record.name_of(layer) for layer in layers))
    ax.xaxis.tick_top()
    ax.set_xlabel("in each, a row looks, a column is looked at", loc="left")
    ax.spines[:].set_visible(False)
    return ax


@style()
def entropy(record: Record, ax: Axes | None = None) -> Axes:
    """How spread the attention of each head is, layer by layer: a dot per head, a line through their means."""
    table = record.scores()["entropy"]
    stacks: dict[str, list[int]] = {}
    for i, layer in enumerate(record.layers.values()):
        stacks.setdefault(layer.stack, []).append(i)
    ax = new_axes(ax, (3.6, 2.4))
    for color, (stack, places) in zip(drawing.APART, stacks.items(), strict=False):
        numbers = [list(record.layers.values())[i].index for i in places]
        some = table[places]
        ax.plot(numbers, some.numpy(), ".", color=color, alpha=0.35, markersize=5, markeredgewidth=0, clip_on=False)
        ax.plot(numbers, some.nanmean(1).numpy(), "-", color=color, linewidth=1.4, label=stack or "mean of its heads")
    ax.set_xlabel("layer")
    ax.set_ylabel("entropy, nats")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(drawing.whole_numbers())
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=7)
    return ax


@style()
def overlay(
    record: Record, head: str | None = None, ax: Axes | None = None, *, patch: str | int | None = None, batch: int = 0
) -> Axes:
    """An image, its patches lit by where one of them looks: the class token, or `patch` as "row,column" or a number."""
    choice = choose(record, head) if head else mean_of(record, list(record.layers.values())[-1])
    queries, keys = record.labels_of(choice.layer)
    query, name = patches.looking(queries, patch)
    lit = patches.on_grid(rows(choice, batch, [query])[0], keys)
    height, width = lit.shape
    ax = new_axes(ax, (3.4, 0.5 + 2.9 * height / width))
    box = (-0.5, width - 0.5, height - 0.5, -0.5)
    if keys.images is not None:
        # In grey and pale, so that every colour is attention.
        grey = keys.images[batch].float().mean(-1) / 255
        ax.imshow((0.35 + 0.65 * grey).numpy(), cmap="gray", vmin=0, vmax=1, extent=box)
    share = lit / lit.max().clamp(min=1e-9)
    alpha = (0.85 * share.sqrt()).numpy() if keys.images is not None else None
    image = ax.imshow(lit.numpy(), cmap=colors(), vmin=0, alpha=alpha)
    row, column = divmod(query - keys.leading, width)
    if query >= keys.leading:
        frame = (column - 0.5, row - 0.5)
        ax.add_patch(drawing.rectangle(frame, ACCENT))
    drawing.title(ax, f"{name} looks, {choice.name}")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    drawing.bar(ax, image, "share of the attention")
    return ax


FIGURES: dict[str, Callable[..., Axes]] = {
    "matrix": matrix,
    "heads": heads,
    "alignment": alignment,
    "overlay": overlay,
    "entropy": entropy,
}


def save(record: Record, path: str | os.PathLike[str], what: str | None = None, dpi: int = 300, **options: Any) -> None:
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
    with style():
        figure.savefig(path, dpi=dpi, bbox_inches="tight", pad_inches=0.03, metadata=undated)
    drawing.pyplot().close(figure)
