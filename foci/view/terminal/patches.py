"""Draws the patches of an image in a terminal, tinted by the attention weights of one query or word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foci.record.labels import Labels, Segment
from foci.record.record import Record
from foci.runtime.printable import make_printable
from foci.view.colors import Color
from foci.view.selection import SelectedHead, read_rows, require_grid, reshape_to_grid, select_patch
from foci.view.terminal.styled_text import TerminalPage

MAX_PATCH_ROWS = 24
IMAGE_GAP = 3
# The images of a sequence on which a word is drawn.
MAX_IMAGES = 4


def write_patches(
    page: TerminalPage, record: Record, selection: SelectedHead, patch: str | int | None, batch: int
) -> None:
    """Write the image, if the terminal has color, and beside it the weights on its patches."""
    queries, labels = record.labels_of(selection.layer)
    query, name = select_patch(queries, patch)
    weights = read_rows(selection, batch, [query])[0]
    page.heading(f"Attention of {name} in {selection.name}")
    if not weights.isfinite().all():
        page.note("Its weights are NaN or infinite.")
        return
    grid = reshape_to_grid(weights, labels)
    picture = None if labels.images is None else labels.images[batch]
    write_side_by_side(page, render_image(page, picture, require_grid(labels)), render_patches(page, grid))
    write_patch_legend(page, weights, grid, labels)


def write_word_maps(
    page: TerminalPage, record: Record, selection: SelectedHead | None, labels: Labels, word: str, batch: int
) -> None:
    """Write where a word lies on the images of its sequence: their pictures, and beside them the weights.

    Args:
        selection: a head, or the mean of a layer; None: the mean of all layers.
        labels: those of the sequence with the images.
    """
    images = labels.grids(batch)
    place = "the mean of all layers" if selection is None else selection.name
    page.heading(f"“{make_printable(word)}” on the image in {place}")
    for number, segments in enumerate(images[:MAX_IMAGES]):
        if selection is None:
            grid = record.image_map(word, image=number, batch=batch)
        else:
            name = record.name_of(selection.layer)
            grid = record.image_map(word, image=number, batch=batch, layer=name, head=selection.head)
        if len(images) > 1:
            page.prose(f"image {number + 1}")
        write_word_map(page, grid, get_picture(labels, segments, batch))
    if len(images) > MAX_IMAGES:
        page.note(f"{len(images) - MAX_IMAGES} more images")


def write_word_map(page: TerminalPage, grid: Tensor, picture: Tensor | None) -> None:
    """Write the weights on an image, (rows, columns), or on a video as the sum of its frames, beside the picture."""
    frames = grid.shape[0] if grid.dim() == 3 else 1
    grid = grid.reshape(frames, *grid.shape[-2:]).sum(0)
    if not grid.isfinite().all():
        page.note("Its weights are NaN or infinite.")
        return
    small = shrink_grid(page, grid)
    rows, columns = small.shape
    write_side_by_side(page, render_image(page, picture, (rows, columns)), render_patches(page, small))
    row, column = divmod(int(grid.argmax()), grid.shape[1])
    summed = f", in the sum of {frames} frames" if frames > 1 else ""
    page.note(f"brightest: {float(grid.max()):.1%}, patch {row},{column} (row, column){summed}")


def get_picture(labels: Labels, segments: Sequence[Segment], batch: int) -> Tensor | None:
    """The picture of an image, uint8 (height, width, 3); None if it was not kept."""
    if labels.images is not None:
        return labels.images[batch]
    number = next((each.picture for each in segments if each.picture is not None), None)
    return None if number is None else labels.pictures[number]


def shrink_grid(page: TerminalPage, grid: Tensor) -> Tensor:
    """Add up neighboring patches of a grid that is wider than the terminal or very high."""
    rows, columns = grid.shape
    factor = max(-(-columns // page.room), -(-rows // (2 * MAX_PATCH_ROWS)))
    return torch.nn.functional.avg_pool2d(grid[None], factor, ceil_mode=True, divisor_override=1)[0]


def fits_wide_patches(page: TerminalPage, height: int, width: int) -> bool:
    """Whether each patch can be two columns wide and one line high; otherwise it is one column and half a line."""
    return 2 * width <= page.room and height <= MAX_PATCH_ROWS


def render_patches(page: TerminalPage, grid: Tensor) -> list[str]:
    """Render the weights on the patches, relative to the largest."""
    columns = 2 if fits_wide_patches(page, *grid.shape) else 1
    return page.render_blocks((grid / grid.max().clamp(min=1e-9)).tolist(), columns)


def render_image(page: TerminalPage, picture: Tensor | None, grid: tuple[int, int]) -> list[str]:
    """Render the image in half blocks, as high as the grid beside it; no lines without color or room."""
    height, width = grid
    columns, lines = (2 * width, 2 * height) if fits_wide_patches(page, height, width) else (width, height)
    if picture is None or not page.color or 2 * columns + IMAGE_GAP > page.room:
        return []
    image = picture.permute(2, 0, 1).float()
    small = torch.nn.functional.interpolate(image[None], (lines, columns), mode="area")[0].round().int()
    pixels = small.permute(1, 2, 0).tolist()
    colors: list[list[Color]] = [[(red, green, blue) for red, green, blue in row] for row in pixels]
    return [page.render_half_blocks(colors[i], colors[i + 1] if i + 1 < lines else None) for i in range(0, lines, 2)]


def write_side_by_side(page: TerminalPage, left: list[str], right: list[str]) -> None:
    for i, line in enumerate(right):
        page.line(left[i] + " " * IMAGE_GAP + line if i < len(left) else line)


def write_patch_legend(page: TerminalPage, weights: Tensor, grid: Tensor, labels: Labels) -> None:
    row, column = divmod(int(grid.argmax()), grid.shape[1])
    page.note(f"brightest: {float(grid.max()):.1%}, patch {row},{column} (row, column)")
    if labels.leading:
        names = "the class token" if labels.leading == 1 else f"the {labels.leading} tokens before the patches"
        page.note(f"on {names}: {float(weights[: labels.leading].sum()):.1%}")
