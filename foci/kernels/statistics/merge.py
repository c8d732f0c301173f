"""Merge the partial results of the programs of the tile pass: received weights, picture cells, largest logits.

Top keys are widened to int64 here, after the memory of the earlier kernels is freed.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

# Loads that are issued before the first value is used: a plain loop would wait for each.
LOADS_AHEAD = tl.constexpr(8)


@triton.jit
def combine(a, b, MAX: tl.constexpr):
    """Maximum or sum of two values; NaN propagates."""
    if MAX:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return a + b


@triton.jit
def reduce_strided(total, at, there, count, step, MAX: tl.constexpr):
    """Combine the total with `count` values of stride `step`, in order."""
    for first in range(0, count, LOADS_AHEAD):
        for n in tl.static_range(LOADS_AHEAD):
            place = tl.cast(first + n, tl.int64)
            part = tl.load(at + place * step, mask=there & (place < count), other=-float("inf") if MAX else 0.0)
            total = combine(total, part, MAX)
    return total


@triton.jit
def merge_statistics(
    columns, received, cells, picture, chosen, top_keys, logits, largest,
    pairs, slots, keys, picture_size, picture_columns, down, across, chosen_size, logits_each,
    RECEIVED: tl.constexpr, PICTURE: tl.constexpr, TOP: tl.constexpr, LARGEST: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Each program takes one block of one of these tasks.

    columns (pairs, slots, keys) -> received (pairs, keys). cells -> picture: a cell of the picture is `down` x `across`
    cells; PICTURE is 0 for none, 1 for the sum, 2 for the maximum. chosen (chosen_size,) int32 -> top_keys int64.
    logits (pairs, logits_each) -> largest (pairs,).
    """
    program = tl.program_id(0)
    n = tl.arange(0, BN)
    if RECEIVED:
        blocks = tl.cdiv(keys, BN)
        if program < pairs * blocks:
            pair = (program // blocks).to(tl.int64)
            j = (program % blocks) * BN + n
            at = columns + pair * slots * keys + j
            sums = reduce_strided(tl.zeros((BN,), tl.float32), at, j < keys, slots, keys, False)
            tl.store(received + pair * keys + j, sums, mask=j < keys)
        program -= pairs * blocks
    if PICTURE > 0:
        blocks = tl.cdiv(picture_size, BN)
        if (program >= 0) & (program < blocks):
            place = program.to(tl.int64) * BN + n
            there = place < picture_size
            row = place // picture_columns
            width = picture_columns * across
            at = cells + row * down * width + (place % picture_columns) * across
            total = tl.full((BN,), -float("inf") if PICTURE == 2 else 0.0, tl.float32)
            for part in range(across):
                total = reduce_strided(total, at + part, there, down, width, PICTURE == 2)
            tl.store(picture + place, total, mask=there)
        program -= blocks
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
                    maximum = combine(maximum, tl.load(at + i, mask=i < logits_each, other=-float("inf")), True)
            has_nan = tl.max((maximum != maximum).to(tl.int32), 0) > 0
            tl.store(largest + program, tl.where(has_nan, float("nan"), tl.max(maximum, 0)))
