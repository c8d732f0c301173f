"""What programs of the pass over the tiles wrote apart, joined: sums of columns, cells of a picture, largest logits.
The heaviest keys get the width of an index here, when the memory of all that came before is free again.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

# Numbers that are asked for before the first is added: a loop would wait for each.
LOADS_AHEAD = tl.constexpr(8)


@triton.jit
def combine(a, b, MAX: tl.constexpr):
    """What is no number stays none."""
    if MAX:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return a + b


@triton.jit
def reduce_strided(total, at, there, count, step, MAX: tl.constexpr):
    """The total and `count` numbers that lie `step` apart, in order."""
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
    """Programs for all of these, in a row.

    columns (pairs, slots, keys) -> received (pairs, keys). cells -> picture: `down` x `across` each; PICTURE is 0 none,
    1 sum, 2 max. chosen (chosen_size,) int32 -> top_keys int64. logits (pairs, logits_each) -> largest (pairs,).
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
    if LARGEST:  # noqa: SIM102 (what is constant is asked by itself)
        if program >= 0:
            at = logits + program.to(tl.int64) * logits_each
            most = tl.full((BN,), -float("inf"), tl.float32)
            lines = tl.cdiv(logits_each, BN)
            for first in range(0, lines, LOADS_AHEAD):
                for line in tl.static_range(LOADS_AHEAD):
                    i = (first + line) * BN + n
                    most = combine(most, tl.load(at + i, mask=i < logits_each, other=-float("inf")), True)
            none = tl.max((most != most).to(tl.int32), 0) > 0
            tl.store(largest + program, tl.where(none, float("nan"), tl.max(most, 0)))
