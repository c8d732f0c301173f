"""The figures of a Comparison: the matrices of a head in both records, or the maps of a word, and their difference."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from foci.record.compare import Comparison
from foci.runtime.printable import make_printable
from foci.view.colors import Color
from foci.view.figures import theme
from foci.view.figures.plots import MAX_NAMED_UNITS, write_figure
from foci.view.figures.theme import create_colormap, use_figure_style
from foci.view.figures.word_maps import draw_patches, find_picture, finish_panel, measure_ratio, select_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

# Less and more weight in the second record.
DIFFERENCE_RAMP: tuple[Color, ...] = ((34, 48, 107), (85, 179, 189), (255, 255, 255), (240, 106, 92), (62, 15, 115))
SIDE = 2.6


@use_figure_style()
def plot_comparison(comparison: Comparison, head: str | None = None) -> Axes:
    """Plot the weights of a head in both records, and their difference; returns the axes of the difference.

    Args:
        head: "L5H3", or "L5" for the mean of its heads; None: the head that changed most.
    """
    chosen = head or next(iter(comparison.changes()))
    first, second = comparison.matrices(chosen)
    rows, columns = first.shape
    cell = theme.PLAIN_CELL_SIDE
    size = [min(max(SIDE, cell * count), 2 * SIDE) for count in (columns, rows)]
    figure, axes = theme.import_pyplot().subplots(
        1, 3, figsize=(3 * size[0] + 2.4, size[1] + 1.2), layout="constrained", sharey=True
    )
    most = max(theme.find_full_color_weight(each, columns) for each in (first, second))
    texts = comparison.texts(chosen)
    largest = max(float((second - first).abs().nan_to_num().max()), 1e-6)
    panels = (
        (comparison.names[0], first, create_colormap(), 0.0, most),
        (comparison.names[1], second, create_colormap(), 0.0, most),
        (
            f"{comparison.names[1]} − {comparison.names[0]}",
            second - first,
            create_colormap(DIFFERENCE_RAMP),
            -largest,
            largest,
        ),
    )
    for ax, (title, values, colors, low, high) in zip(axes, panels, strict=True):
        image = ax.imshow(values.numpy(), cmap=colors, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        name_positions(ax, texts, values)
        theme.set_title(ax, f"{make_printable(title)}")
        ax.spines[:].set_visible(False)
        ax.set_xlabel("key")
        ax.xaxis.set_label_position("bottom")
        if ax is not axes[0]:
            add_weight_bar(figure, image, ax, "attention weight" if ax is axes[1] else "difference")
    axes[0].set_ylabel(f"query of {make_printable(chosen)}")
    difference: Axes = axes[2]
    return difference


@use_figure_style()
def plot_compared_maps(
    comparison: Comparison, word: str | int, head: str | None = None, image: int = 0, frame: int | None = None
) -> Axes:
    """Plot where in the image of each record a word looks, and their difference; returns the first axes.

    Args:
        word: a word of both texts, or its position.
        head: "L5H3", or "L5" for the mean of its heads; None: the head that changed most.
        image: which image or video of the sequence.
        frame: of a video; None: the sum of its frames, on the first one.
    """
    first, second = read_maps(comparison, word, head or next(iter(comparison.changes())), image, frame)
    records = (comparison.first, comparison.second)
    pictures = [find_picture(record, image, frame or 0, comparison.batch) for record in records]
    panels = 3 if first.shape == second.shape else 2
    size = (SIDE * panels + 1.2, SIDE * measure_ratio(first, pictures[0]) + 0.4)
    figure, axes = theme.import_pyplot().subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    most = max(theme.find_full_color_weight(each, each.numel()) for each in (first, second))
    for ax, grid, picture, name in zip(axes[0], (first, second), pictures, comparison.names, strict=False):
        drawn = draw_patches(ax, grid, picture, most)
        finish_panel(ax, f"{make_printable(name)}: {make_printable(str(word))}")
    add_weight_bar(figure, drawn, axes[0, 1], "attention weight")
    if panels == 3:
        largest = max(float((second - first).abs().nan_to_num().max()), 1e-6)
        colors = create_colormap(DIFFERENCE_RAMP)
        drawn = axes[0, 2].imshow(
            (second - first).numpy(), cmap=colors, vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest"
        )
        axes[0, 2].set_box_aspect(measure_ratio(first, pictures[0]))
        finish_panel(axes[0, 2], make_printable(f"{comparison.names[1]} − {comparison.names[0]}"))
        add_weight_bar(figure, drawn, axes[0, 2], "difference")
    result: Axes = axes[0, 0]
    return result


def read_maps(
    comparison: Comparison, word: str | int, head: str, image: int, frame: int | None = None
) -> tuple[Tensor, Tensor]:
    """Read the map of a word in each record, of one head or the mean of a layer's heads."""
    pair, index = comparison.pair(head)
    maps = []
    for record, layer in ((comparison.first, pair.first), (comparison.second, pair.second)):
        number = None if index is None else layer.heads[index]
        name = record.name_of(layer)
        found = record.image_map(word, image=image, layer=name, head=number, batch=comparison.batch)
        maps.append(found.sum(0) if frame is None and found.dim() == 3 else select_frame(found, frame or 0))
    return maps[0], maps[1]


def add_weight_bar(figure: Figure, drawn: Any, ax: Axes, label: str) -> None:
    """Add a bar that says which color is which weight."""
    bar = figure.colorbar(drawn, ax=ax, format=lambda weight, _: f"{100 * weight:.3g}%", fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(label)


def name_positions(ax: Axes, texts: tuple[list[str], list[str]], values: Tensor) -> None:
    """Write the tokens of a short text along the axes; a long one has positions."""
    for axis, names, length in ((ax.yaxis, texts[0], values.shape[0]), (ax.xaxis, texts[1], values.shape[1])):
        if length <= MAX_NAMED_UNITS:
            theme.set_axis_words(axis, [make_printable(name.strip()) or "␣" for name in names])
        else:
            axis.set_major_locator(theme.create_integer_locator())
    ax.xaxis.tick_top()


def save_comparison(
    comparison: Comparison,
    path: str | os.PathLike[str],
    head: str | None = None,
    word: str | int | None = None,
    image: int = 0,
    frame: int | None = None,
    dpi: int = 300,
    **options: Any,
) -> None:
    """Write the matrices of a head, or with a word its maps, as PNG, SVG or PDF by the suffix of the path."""
    if options:
        raise TypeError(f"options of a figure must be head, word, image, frame and dpi, got {', '.join(options)}")
    ax = plot_comparison(comparison, head) if word is None else plot_compared_maps(comparison, word, head, image, frame)
    write_figure(ax, path, dpi)
