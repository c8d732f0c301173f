"""Merge the partial results of the programs of the tile pass: received weights, picture cells, largest logits.

Top keys are widened to int64 here, after the memory of the earlier kernels is freed.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.statistics.tiles import floor_divide

# Loads that are issued before the first value is used: a plain loop would wait for each.
LOADS_AHEAD = tl.constexpr(8)
# A new value of one of these does not trigger a compilation.
LENGTHS = [
    "pairs", "slots", "queries", "keys", "picture_rows", "picture_columns", "picture_lines", "tile_queries",
    "row_step", "tile_step", "across", "cut", "chosen_size", "logits_each",
]  # fmt: skip


@triton.jit
def sum_strided(total, at, there, count, step):
    """Add `count` values of stride `step` to the total, in order."""
    for first in range(0, count, LOADS_AHEAD):
        for n in tl.static_range(LOADS_AHEAD):
            place = tl.cast(first + n, tl.int64)
            total += tl.load(at + place * step, mask=there & (place < count), other=0.0)
    return total


@triton.jit
def merge_cells(
    cells, picture, line, queries, keys, rows, columns, lines, tile_queries, row_step, tile_step, across,
    BN: tl.constexpr,
):  # fmt: skip
    """The means of one row of one picture: sums of the tiles of queries that it spans, `across` of them per column."""
    row = line % rows
    top = floor_divide(row.to(tl.int64) * queries, rows)
    bottom = floor_divide((row.to(tl.int64) + 1) * queries, rows)
    first = top // tile_queries
    count = (bottom - 1) // tile_queries - first + 1
    width = columns * across
    cells += ((line // rows).to(tl.int64) * lines + row * row_step + first * tile_step) * width
    # Most pictures have 256 columns.
    for start in range(0, columns, BN // 2):
        c = start + tl.arange(0, BN // 2)
        total = tl.zeros((BN // 2,), tl.float32)
        for part in range(across):
            total = sum_strided(total, cells + c * across + part, c < columns, count, width)
        left = floor_divide(c.to(tl.int64) * keys, columns)
        wide = floor_divide((c.to(tl.int64) + 1) * keys, columns) - left
        area = (bottom - top).to(tl.float32) * wide.to(tl.float32)
        tl.store(picture + line.to(tl.int64) * columns + c, total / area, mask=c < columns)


@triton.jit
def merge_cut_cells(cells, picture, line, queries, keys, rows, columns, lines, row_step, width, BN: tl.constexpr):
    """The means of one row of one picture whose columns start at any key: `row_step` lines of `width` sums.

    Each 16 keys have two sums: of the keys before the next column, and of the others (sums_hopper.py).
    """
    row = line % rows
    top = floor_divide(row.to(tl.int64) * queries, rows)
    bottom = floor_divide((row.to(tl.int64) + 1) * queries, rows)
    cells += ((line // rows).to(tl.int64) * lines + row * row_step) * width
    # The most groups of 16 keys that a column touches.
    most = (tl.cdiv(keys, columns) + 14) // 16 + 1
    for start in range(0, columns, BN // 2):
        c = start + tl.arange(0, BN // 2)
        left = floor_divide(c.to(tl.int64) * keys, columns)
        right = floor_divide((c.to(tl.int64) + 1) * keys, columns)
        total = tl.zeros((BN // 2,), tl.float32)
        for group in range(most):
            at = left // 16 + group
            other = (group == 0) & (left % 16 != 0)
            there = (c < columns) & (at * 16 < right)
            total = sum_strided(total, cells + 2 * at + other.to(tl.int32), there, row_step, width)
        area = (bottom - top).to(tl.float32) * (right - left).to(tl.float32)
        tl.store(picture + line.to(tl.int64) * columns + c, total / area, mask=c < columns)


@triton.jit(do_not_specialize=LENGTHS)
def merge_statistics(
    columns, received, cells, picture, chosen, top_keys, logits, largest_logit,
    pairs, slots, queries, keys, picture_rows, picture_columns, picture_lines, tile_queries, row_step, tile_step,
    across, cut, chosen_size, logits_each,
    RECEIVED: tl.constexpr, PICTURE: tl.constexpr, CUT: tl.constexpr, TOP: tl.constexpr, LARGEST: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Each program takes one block of one of these tasks.

    columns (pairs, slots, keys) -> received (pairs, keys). cells (pairs, picture_lines, picture_columns * across) ->
    picture (pairs, picture_rows, picture_columns), as tiles.py lays them out. chosen (chosen_size,) int32 -> top_keys
    int64. logits (pairs, logits_each) -> largest_logit (pairs,).
    """
    program = tl.program_id(0)
    n = tl.arange(0, BN)
    if RECEIVED:
        blocks = tl.cdiv(keys, BN)
        if program < pairs * blocks:
            pair = (program // blocks).to(tl.int64)
            j = (program % blocks) * BN + n
            at = columns + pair * slots * keys + j
            sums = sum_strided(tl.zeros((BN,), tl.float32), at, j < keys, slots, keys)
            tl.store(received + pair * keys + j, sums, mask=j < keys)
        program -= pairs * blocks
    if PICTURE:
        if (program >= 0) & (program < pairs * picture_rows):
            if CUT:
                merge_cut_cells(
                    cells, picture, program, queries, keys, picture_rows, picture_columns, picture_lines, row_step,
                    cut, BN,
                )  # fmt: skip
            else:
                merge_cells(
                    cells, picture, program, queries, keys, picture_rows, picture_columns, picture_lines,
                    tile_queries, row_step, tile_step, across, BN,
                )  # fmt: skip
        program -= pairs * picture_rows
    if TOP:
        blocks = tl.cdiv(chosen_size, BN)
        if (program >= 0) & (program < blocks):
            place = program.to(tl.int64) * BN + n
            there = place < chosen_size
            tl.store(top_keys + place, tl.load(chosen + place, mask=there, other=0).to(tl.int64), mask=there)
        program -= blocks
    if LARGEST:  # noqa: SIM102 (a condition on a constant must stand alone)
        if program >= 0:
            at = logits + program.to(tl.int64) * logits_each
            maximum = tl.full((BN,), -float("inf"), tl.float32)
            lines = tl.cdiv(logits_each, BN)
            for first in range(0, lines, LOADS_AHEAD):
                for line in tl.static_range(LOADS_AHEAD):
                    i = (first + line) * BN + n
                    part = tl.load(at + i, mask=i < logits_each, other=-float("inf"))
                    maximum = tl.maximum(maximum, part, propagate_nan=tl.PropagateNan.ALL)
            has_nan = tl.max((maximum != maximum).to(tl.int32), 0) > 0
            tl.store(largest_logit + program, tl.where(has_nan, float("nan"), tl.max(maximum, 0)))
