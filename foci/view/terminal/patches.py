"""Draws the patches of an image in a terminal, tinted by the attention weights of one query."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.record.record import Record
from foci.view.colors import Color
from foci.view.selection import HeadSelection, read_rows, require_grid, reshape_to_grid, select_patch
from foci.view.terminal.styled_text import TerminalPage

MAX_PATCH_ROWS = 24
IMAGE_GAP = 3


def write_patches(
    page: TerminalPage, record: Record, selection: HeadSelection, patch: str | int | None, batch: int
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
    write_side_by_side(page, render_image(page, labels, batch), render_patches(page, grid))
    write_patch_legend(page, weights, grid, labels)


def fits_wide_patches(page: TerminalPage, height: int, width: int) -> bool:
    """Whether each patch can be two columns wide and one line high; otherwise it is one column and half a line."""
    return 2 * width <= page.room and height <= MAX_PATCH_ROWS


def render_patches(page: TerminalPage, grid: Tensor) -> list[str]:
    """Render the weights on the patches, relative to the largest."""
    columns = 2 if fits_wide_patches(page, *grid.shape) else 1
    return page.render_blocks((grid / grid.max().clamp(min=1e-9)).tolist(), columns)


def render_image(page: TerminalPage, labels: Labels, batch: int) -> list[str]:
    """Render the image in half blocks, as high as the grid beside it; no lines without color or room."""
    height, width = require_grid(labels)
    columns, lines = (2 * width, 2 * height) if fits_wide_patches(page, height, width) else (width, height)
    if labels.images is None or not page.color or 2 * columns + IMAGE_GAP > page.room:
        return []
    image = labels.images[batch].permute(2, 0, 1).float()
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
