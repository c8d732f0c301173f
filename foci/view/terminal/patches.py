"""An image's patches in a terminal, lit by where one of them, or the class token, looks."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.record.record import Record
from foci.view.colors import Color
from foci.view.selection import Choice, rows
from foci.view.terminal.styled_text import Sheet

MOST_LINES = 24
GAP = 3


def write(sheet: Sheet, record: Record, choice: Choice, place: str | int | None, batch: int) -> None:
    """The image, where the terminal has colour, and beside it the patches that are looked at."""
    queries, labels = record.labels_of(choice.layer)
    query, name = looking(queries, place)
    shares = rows(choice, batch, [query])[0]
    sheet.heading(f"Where {name} looks in {choice.name}")
    if not shares.isfinite().all():
        sheet.note("That cannot be told: its weights are NaN or infinite.")
        return
    lit = on_grid(shares, labels)
    left = drawn_image(sheet, labels, batch)
    right = drawn_patches(sheet, lit)
    write_beside(sheet, left, right)
    write_legend(sheet, shares, lit, labels)


def looking(labels: Labels, place: str | int | None) -> tuple[int, str]:
    """The position that looks: the class token unless a patch is named, by its row and column ("3,4") or its place."""
    rows_, columns = grid_of(labels) if labels.kind == "patches" else (0, 0)
    if place is None and labels.kind == "patches":
        return (0, "the class token") if labels.leading else (rows_ // 2 * columns + columns // 2, "the middle patch")
    text = str(0 if place is None else place)
    numbers = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(numbers) == 2 and numbers[0] < rows_ and numbers[1] < columns:
        return labels.leading + numbers[0] * columns + numbers[1], f"patch {numbers[0]},{numbers[1]}"
    if len(numbers) == 1 and numbers[0] < len(labels):
        return numbers[0], f"position {numbers[0]}"
    raise ValueError(f"expected a patch as row,column below {rows_},{columns} or a position, received {place!r}")


def grid_of(labels: Labels) -> tuple[int, int]:
    if labels.grid is None:
        raise ValueError("expected patches with a grid of rows and columns, received labels without one")
    return labels.grid


def on_grid(shares: Tensor, labels: Labels) -> Tensor:
    """The shares of the patches in the rows and columns of the image."""
    height, width = grid_of(labels)
    return shares[labels.leading : labels.leading + height * width].view(height, width)


def drawn_patches(sheet: Sheet, lit: Tensor) -> list[str]:
    """The grid, brightened to its heaviest patch: two columns a patch where they fit, half a line otherwise."""
    height, width = lit.shape
    wide = 2 * width <= sheet.room and height <= MOST_LINES
    return sheet.blocks((lit / lit.max().clamp(min=1e-9)).tolist(), 2 if wide else 1)


def drawn_image(sheet: Sheet, labels: Labels, batch: int) -> list[str]:
    """The image in half blocks, as high as the grid beside it; nothing without colour."""
    height, width = grid_of(labels)
    wide = 2 * width <= sheet.room and height <= MOST_LINES
    columns, lines = (2 * width, 2 * height) if wide else (width, height)
    if labels.images is None or not sheet.color or 2 * columns + GAP > sheet.room:
        return []
    image = labels.images[batch].permute(2, 0, 1).float()
    small = torch.nn.functional.interpolate(image[None], (lines, columns), mode="area")[0].round().int()
    pixels = small.permute(1, 2, 0).tolist()
    colors: list[list[Color]] = [[(red, green, blue) for red, green, blue in row] for row in pixels]
    return [sheet.halves(colors[i], colors[i + 1] if i + 1 < lines else None) for i in range(0, lines, 2)]


def write_beside(sheet: Sheet, left: list[str], right: list[str]) -> None:
    for i, line in enumerate(right):
        sheet.line(left[i] + " " * GAP + line if i < len(left) else line)


def write_legend(sheet: Sheet, shares: Tensor, lit: Tensor, labels: Labels) -> None:
    heaviest = int(lit.argmax())
    row, column = divmod(heaviest, lit.shape[1])
    sheet.note(f"brightest: {float(lit.max()):.1%}, patch {row},{column} (row, column)")
    if labels.leading:
        names = "the class token" if labels.leading == 1 else f"the {labels.leading} tokens before the patches"
        sheet.note(f"on {names}: {float(shares[: labels.leading].sum()):.1%}")
