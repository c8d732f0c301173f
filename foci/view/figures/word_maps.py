"""Figures of words on images: one map per word, one per denoising step as a row of frames or an animation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foci.record.record import Record
from foci.record.words import list_words
from foci.runtime.printable import make_printable
from foci.view.colors import LIGHT_RAMP
from foci.view.figures import theme
from foci.view.figures.theme import create_colormap, use_figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The brightness of black in an image, and the opacity of the largest weight.
MIN_IMAGE_BRIGHTNESS, MAX_OVERLAY_ALPHA = 0.15, 0.7
PANEL_SIDE, ANIMATION_SIDE = 1.5, 3.0
MAX_WORDS, MAX_FRAMES = 24, 8
MAX_ANIMATED_FRAMES = 100


def draw_patches(ax: Axes, grid: Tensor, picture: Tensor | None, most: float) -> Any:
    """Draw the weights on patches over the picture, if there is one, and return the drawn image."""
    height, width = grid.shape
    box = (-0.5, width - 0.5, height - 0.5, -0.5)
    alpha = None
    if picture is not None:
        # The image is grey, so every color is attention; small weights are transparent.
        grey = MIN_IMAGE_BRIGHTNESS + (1 - MIN_IMAGE_BRIGHTNESS) * picture.float().mean(-1) / 255
        ax.imshow(grey.numpy(), cmap="gray", vmin=0, vmax=1, extent=box, aspect="auto")
        alpha = (MAX_OVERLAY_ALPHA * (grid.nan_to_num(0.0, 0.0, 0.0) / most).clamp(0, 1).sqrt()).numpy()
        # A patch has the proportions that it has in the picture.
        ax.set_box_aspect(picture.shape[0] / picture.shape[1])
    # The last colors of the ramp are too dark to be seen over a dark image.
    colors = create_colormap(LIGHT_RAMP[:5])
    return ax.imshow(
        grid.numpy(), cmap=colors, vmin=0, vmax=most, alpha=alpha, aspect="auto" if alpha is not None else None
    )


@use_figure_style()
def plot_word_maps(
    record: Record,
    words: Sequence[str | int] | None = None,
    *,
    image: int = 0,
    layer: int | str | None = None,
    head: int | None = None,
    step: int | None = None,
    frame: int = 0,
    batch: int = 0,
    columns: int = 6,
    relative: bool = True,
) -> Axes:
    """Plot where in an image each word looks, one map per word; the weights are those of `Record.image_map`.

    Args:
        words: the words or positions; None: those of the text, at most 24.
        image, layer, head, step, batch: as in `Record.image_map`; `frame` of a video.
        columns: the maps in a row.
        relative: each map has its own scale; False: one scale for all.
    """
    chosen = list_text_words(record, batch)[:MAX_WORDS] if words is None else check_words(words)
    options: dict[str, Any] = {"image": image, "layer": layer, "head": head, "step": step, "batch": batch}
    maps = [select_frame(record.image_map(word, **options), frame) for word in chosen]
    picture = find_picture(record, image, frame, batch)
    titles = [word if isinstance(word, str) else f"position {word}" for word in chosen]
    return draw_panels(maps, titles, picture, columns, relative)


@use_figure_style()
def plot_word_steps(
    record: Record,
    word: str | int | None = None,
    *,
    frames: int = MAX_FRAMES,
    image: int = 0,
    layer: int | str | None = None,
    head: int | None = None,
    frame: int = 0,
    batch: int = 0,
    columns: int | None = None,
) -> Axes:
    """Plot the map of a word at denoising steps of a diffusion model, evenly spaced, on one scale.

    Args:
        word: a word or a position of the prompt.
        frames: the number of steps that are drawn.
        image, layer, head, batch: as in `Record.image_map`; `frame` of a video.
    """
    steps = space_steps(record, frames)
    options: dict[str, Any] = {"image": image, "layer": layer, "head": head, "batch": batch}
    maps = [select_frame(record.image_map(check_word(word), **options, step=step), frame) for step in steps]
    titles = [f"step {step + 1}" for step in steps]
    return draw_panels(maps, titles, find_picture(record, image, frame, batch), columns or len(maps), False)


@use_figure_style()
def save_animation(
    record: Record,
    path: str | os.PathLike[str],
    word: str | int | None = None,
    *,
    seconds: float = 4.0,
    image: int = 0,
    layer: int | str | None = None,
    head: int | None = None,
    frame: int = 0,
    batch: int = 0,
    dpi: int = 100,
) -> None:
    """Write the maps of a word at all denoising steps as an animated GIF.

    Args:
        seconds: the duration of the animation.
        image, layer, head, batch: as in `Record.image_map`; `frame` of a video.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError("animations need Pillow, which is not installed: pip install pillow") from error
    from matplotlib.animation import FuncAnimation, PillowWriter

    steps = space_steps(record, MAX_ANIMATED_FRAMES)
    options: dict[str, Any] = {"image": image, "layer": layer, "head": head, "batch": batch}
    maps = [select_frame(record.image_map(check_word(word), **options, step=step), frame) for step in steps]
    most = max(theme.find_full_color_weight(each, each.numel()) for each in maps)
    picture = find_picture(record, image, frame, batch)
    size = (ANIMATION_SIDE, ANIMATION_SIDE * measure_ratio(maps[0], picture) + 0.3)
    figure, ax = theme.import_pyplot().subplots(figsize=size, layout="constrained")

    def draw(number: int) -> list[Any]:
        ax.clear()
        drawn = draw_patches(ax, maps[number], picture, most)
        finish_panel(ax, f"{word}, step {steps[number] + 1} of {record.steps}")
        return [drawn]

    animation = FuncAnimation(figure, draw, frames=len(maps))
    animation.save(os.fspath(path), writer=PillowWriter(fps=max(1, round(len(maps) / seconds))), dpi=dpi)
    theme.import_pyplot().close(figure)


def space_steps(record: Record, count: int) -> list[int]:
    """List at most `count` denoising steps, from the first to the last."""
    if record.steps < 2:
        raise ValueError("record must be that of a diffusion model with denoising steps, got one without steps")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"frames must be an int of at least 1, got {count!r}")
    shown = min(count, record.steps)
    return [step * (record.steps - 1) // max(1, shown - 1) for step in range(shown)]


def list_text_words(record: Record, batch: int) -> list[str | int]:
    """List the words of the text that looks at the image, or that the image looks at; of a vision model its tokens."""
    axes = [record.labels_of(layer) for layer in record.layers.values()]
    for labels in (labels for both in axes for labels in both if labels.kind == "tokens"):
        names = [text for text, _ in list_words(labels, batch)]
        return [word for word in dict.fromkeys(names) if any(map(str.isalnum, word))]
    # The tower of a vision-language model comes first and has a class token as well.
    for _, keys in axes:
        if keys.grid is not None and keys.leading:
            return list(keys.texts[batch][: keys.leading])
    raise ValueError("words must be given for a record without text, got None: words=['2,3'] names a patch")


def check_word(word: Any) -> str | int:
    if not isinstance(word, str | int):
        raise ValueError(f"word must be a word or a position of the prompt, got {word!r}")
    return word


def check_words(words: Any) -> list[str | int]:
    if isinstance(words, str | int):
        return [words]
    chosen = list(words)
    if not 1 <= len(chosen) <= MAX_WORDS:
        raise ValueError(f"words must be 1 to {MAX_WORDS} words, got {len(chosen)}")
    return chosen


def select_frame(found: Tensor, frame: int) -> Tensor:
    """Select the frame of a video; an image has none."""
    if found.dim() == 2:
        return found
    if not isinstance(frame, int) or not 0 <= frame < found.shape[0]:
        raise ValueError(f"frame must be from 0 to {found.shape[0] - 1}, got {frame!r}")
    return found[frame]


def find_picture(record: Record, image: int, frame: int, batch: int) -> Tensor | None:
    """Find the picture of an image in the labels of the first layer that has it."""
    for layer in record.layers.values():
        for labels in record.labels_of(layer):
            if image < len(labels.grids(batch)):
                return labels.picture(batch, image, frame)
    return None


def draw_panels(
    maps: Sequence[Tensor], titles: Sequence[str], picture: Tensor | None, columns: int, relative: bool
) -> Axes:
    """Draw maps in rows, each with its title, and return the first axes."""
    across = min(max(1, columns), len(maps))
    down = -(-len(maps) // across)
    size = PANEL_SIDE * across, (PANEL_SIDE * measure_ratio(maps[0], picture) + 0.25) * down + 0.1
    figure, axes = theme.import_pyplot().subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    common = max(theme.find_full_color_weight(each, each.numel()) for each in maps)
    drawn = None
    for n, ax in enumerate(axes.flat):
        if n >= len(maps):
            ax.set_axis_off()
            continue
        most = theme.find_full_color_weight(maps[n], maps[n].numel()) if relative else common
        drawn = draw_patches(ax, maps[n], picture, most)
        finish_panel(ax, titles[n])
    if not relative:
        bar = figure.colorbar(drawn, ax=axes, format=lambda weight, _: f"{100 * weight:.3g}%", fraction=0.03, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("attention weight")
    first: Axes = axes[0, 0]
    return first


def measure_ratio(grid: Tensor, picture: Tensor | None) -> float:
    """Measure the height of a panel for a width of 1."""
    height, width = grid.shape if picture is None else picture.shape[:2]
    return min(max(height / width, 0.3), 3.0)


def finish_panel(ax: Axes, title: str) -> None:
    theme.set_title(ax, make_printable(title))
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
