"""All requested statistics in one pass over the tiles of the weights W = exp2(logit - lse).

A tile is computed transposed, keys x queries. The tensor core layout gives a thread a few keys and many queries, so
sums over queries (received weights, picture rows) stay in a thread. A program owns a block of queries and loops over
the keys, so sums over keys (entropy, distance) are elementwise accumulators that are reduced at the end. The inner loop
reduces across lanes or warps only for the few sums that it writes.

For the top keys, keys are grouped into classes: those at the same index of their tile, where r and r + 8 of 16 rows
share an index, since a thread holds both. Neighbouring keys are in different classes. If a tile has too few classes,
tiles are split into SEGMENTS segments, every SEGMENTS-th tile, with classes of their own. For each query and class, the
pass keeps the two largest logits, each with its position in its lowest bits, and an upper bound of the third largest:
one bound for 8 classes. topk.py selects from these.

B batch, H heads, Tq queries, Tk keys, D width. A pair is one head of one batch element.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.logits import LN_2, MASKED_LOGIT, apply_masks, key_range, load_lse, tile_bounds
from foci.kernels.statistics.additive_logits import load_additive_block, transposed_additive_logits
from foci.kernels.statistics.biased_logits import load_bias_ends, locate_bias, transposed_tile_logits

# Weights are multiplied by it where they are rounded to float16: small ones keep their digits, and the sums of 128
# weights stay below the largest number.
CELL_SCALE = tl.constexpr(256.0)


@triton.jit
def split_row_halves(tile, BK: tl.constexpr, BQ: tl.constexpr):
    """Split rows r and r + 8 of each 16, which the tensor core layout keeps in one thread: two (BK // 16, 8, BQ)."""
    return tl.split(tl.permute(tl.reshape(tile, (BK // 16, 2, 8, BQ)), (0, 2, 3, 1)))


@triton.jit
def add_keys(total, tile, BK: tl.constexpr, BQ: tl.constexpr):
    """Add a tile to an accumulator of half its keys, within a thread: two fused additions."""
    a, b = split_row_halves(tile, BK, BQ)
    return (total + a) + b


@triton.jit
def max_keys(largest, tile, BK: tl.constexpr, BQ: tl.constexpr):
    a, b = split_row_halves(tile, BK, BQ)
    return tl.maximum(tl.maximum(largest, a), b)


@triton.jit
def tag_logits(x, tag, TAG_BITS: tl.constexpr):
    """Replace the lowest bits of x by a tag. Of equal logits, which are negative, the lower tag is the larger value."""
    return ((x.to(tl.int32, bitcast=True) & (-(1 << TAG_BITS))) | tag).to(tl.float32, bitcast=True)


@triton.jit
def round_up_to_half(x, TAG_BITS: tl.constexpr):
    """A float16 upper bound of a tagged logit; -inf if masked."""
    bare = (x.to(tl.int32, bitcast=True) & (-(1 << TAG_BITS))).to(tl.float32, bitcast=True)
    # Rounding to float16 loses at most half of 2**-10 of the value, or of 2**-24 for tiny values.
    above = tl.maximum(bare + tl.abs(bare) * 0.0009765625 + 6e-8, -65504.0)
    return tl.where(x > MASKED_LOGIT / 2, above, -float("inf")).to(tl.float16)


@triton.jit
def segment_tiles(start, stop, s, SEGMENTS: tl.constexpr):
    """The tiles of segment s from start to stop, every SEGMENTS-th: the first one, and their number."""
    first = start + (s + SEGMENTS - start % SEGMENTS) % SEGMENTS
    return first, tl.maximum(tl.cdiv(stop - first, SEGMENTS), 0)


@triton.jit
def fill(into, size, value):
    """Set the first `size` numbers to a value, in the program that adds to them: this saves a pass over memory."""
    for start in range(0, size, 1024):
        n = start + tl.arange(0, 1024)
        tl.store(into + n, tl.zeros((1024,), tl.float32) + value, mask=n < size)


@triton.jit
def floor_divide(n, divisor):
    """n // divisor for an int64 n and a quotient below 2**21: the quotient of floats, corrected.

    A division of integers would take as long as the rest of a tile.
    """
    quotient = (n.to(tl.float32) / tl.cast(divisor, tl.float32)).to(tl.int32)
    rest = n - quotient.to(tl.int64) * divisor
    return quotient + (rest >= divisor).to(tl.int32) - (rest < 0).to(tl.int32)


@triton.jit
def cell_at(index, cells, length):
    """The picture cell of an index: the last one that does not start after it; c starts at floor(c length / cells)."""
    return floor_divide((tl.cast(index, tl.int64) + 1) * cells - 1, length)


@triton.jit
def split_halves(x, BF16: tl.constexpr):
    """x as the sum of two tensors in half precision, which the tensor cores multiply exactly by 0 and 1.

    bfloat16 is the upper half of the bits: conversions would take as long as exponentials. The error is below 2**-15.
    """
    if BF16:
        bits = x.to(tl.int32, bitcast=True)
        rest = (x - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low = (rest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        high = x.to(tl.float16)
        low = (x - high.to(tl.float32)).to(tl.float16)
    return high, low


@triton.jit
def round_weights(p, PTX: tl.constexpr):
    """Weights times CELL_SCALE in float16; NaN becomes 0."""
    x = p * CELL_SCALE
    if PTX:
        # Two weights at a time: a conversion of one takes as long as an exponential.
        ASM: tl.constexpr = "{ .reg .b32 x, z; mov.b32 z, 0; cvt.rn.f16x2.f32 x, $2, $1; max.f16x2 $0, x, z; }"
        half = tl.inline_asm_elementwise(ASM, "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2)
    else:
        half = tl.where(p == p, x, 0.0).to(tl.float16)
    return half


@triton.jit
def sum_row_cells(p, row_cells, EXACT: tl.constexpr, PTX: tl.constexpr):
    """Sum a tile p (BK, BQ) over the queries of each row of picture cells; row_cells is (BQ, CELLS), 0 or 1.

    The sums are CELL_SCALE times those of the weights. NaN counts as 0: it would reach cells of other queries.
    `mark_nan_queries` has written it. EXACT: for float32; else weights are rounded to float16.
    """
    if EXACT:
        # One instruction, but NaN in the interpreter.
        x = tl.maximum(p, 0.0) if PTX else tl.where(p == p, p, 0.0)
        high, low = split_halves(x * CELL_SCALE, PTX)
        sums = tl.dot(low, row_cells, acc=tl.dot(high, row_cells))
    else:
        sums = tl.dot(round_weights(p, PTX), row_cells)
    return sums


@triton.jit
def add_cells(
    t, sums, cells, lines, columns, Tk,
    BK: tl.constexpr, CELLS: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the sums (BK, CELLS) of key tile t over the keys of each column to the cells of the picture.

    A column always has the same slot: the thread that adds to a cell is always the same, so the order of the sums is
    fixed and no thread waits for another.
    """
    SLOTS: tl.constexpr = CELLS if CELLS < BK else BK  # noqa: FURB136 (Triton 3.5 has no min() of constants)
    HALF: tl.constexpr = tl.bfloat16 if EXACT and PTX else tl.float16
    slot = tl.arange(0, SLOTS)
    slot_of_key = cell_at(t * BK + tl.arange(0, BK), columns, Tk) & (SLOTS - 1)
    column_cells = (slot_of_key[None, :] == slot[:, None]).to(HALF)
    if EXACT:
        high, low = split_halves(sums, PTX)
        here = tl.dot(column_cells, low, acc=tl.dot(column_cells, high))  # (SLOTS, CELLS)
    else:
        here = tl.dot(column_cells, sums.to(tl.float16))
    first = cell_at(t * BK, columns, Tk)
    last = tl.minimum(cell_at(t * BK + BK - 1, columns, Tk), columns - 1)
    column = first + ((slot - first) & (SLOTS - 1))
    line = tl.arange(0, CELLS)
    there = (column <= last)[:, None] & (line < lines)[None, :]
    into = cells + (line * columns)[None, :] + column[:, None]
    tl.atomic_add(into, here * (1.0 / CELL_SCALE), mask=there, sem="relaxed")


@triton.jit
def mark_nan_queries(rows, row_of_query, cells, lines, picture_columns):
    """Write NaN to the rows of the picture that contain a query with a NaN log-sum-exp."""
    is_nan = rows != rows
    if tl.max(is_nan.to(tl.int32), 0) > 0:
        for line in range(lines):
            if tl.max((is_nan & (row_of_query == line)).to(tl.int32), 0) > 0:
                fill(cells + tl.cast(line, tl.int64) * picture_columns, picture_columns, float("nan"))


@triton.jit
def write_cells(
    t, cells, picture, picture_row, cells_before, column_before, picture_lines, picture_columns,
    CELL_QUERIES: tl.constexpr, CELL_KEYS: tl.constexpr, COLUMN_KEYS: tl.constexpr,
    ADD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, DEFER: tl.constexpr,
):  # fmt: skip
    """Write aligned cells of key tile t, (BK // CELL_KEYS, BQ // CELL_QUERIES). With DEFER, t = -1 writes nothing."""
    first = (t * BK) // COLUMN_KEYS
    row = picture_row + tl.arange(0, BQ // CELL_QUERIES)[None, :]
    column = first + tl.arange(0, BK // CELL_KEYS)[:, None]
    there = (row < picture_lines) & (column < picture_columns)
    if DEFER:
        first = tl.where(t < 0, -1, first)
        there &= t >= 0
    into = picture + row.to(tl.int64) * picture_columns + column
    if ADD:
        # On entering a cell, read what an earlier loop wrote; then carry the sum and overwrite it.
        entered = first != column_before
        column_before = first
        old = tl.load(into, mask=there & entered, other=0.0)
        old = tl.where(entered, old, cells_before)
        cells = cells + old
        cells_before = cells
    tl.store(into, cells, mask=there)
    return cells_before, column_before


@triton.jit
def strip_sums(p, STRIP: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr):
    """Sum over strips of queries, one partial sum for each of four lanes: (BK, BQ // STRIP, 4)."""
    return tl.sum(tl.sum(tl.reshape(p, (BK, BQ // STRIP, STRIP // 8, 4, 2)), 4), 2)


@triton.jit
def sum_lanes(parts, M: tl.constexpr, N: tl.constexpr):
    """Sum over lanes: (M, N, 4) -> (M, N). All sums take each step together, so that lanes wait less."""
    return tl.sum(tl.sum(tl.reshape(parts, (M, N, 2, 2)), 3), 2)


@triton.jit
def sum_keys(parts, BK: tl.constexpr, N: tl.constexpr):
    """Sum over keys: (BK, N, 4) -> (BK // 16, N, 4). Rows r and r + 8 within a thread, then across lanes."""
    sums = tl.sum(tl.reshape(parts, (BK // 16, 2, 8, N, 4)), 1)
    sums = tl.sum(tl.reshape(sums, (BK // 16, 2, 4, N, 4)), 1)
    sums = tl.sum(tl.reshape(sums, (BK // 16, 2, 2, N, 4)), 1)
    return tl.sum(sums, 1)


@triton.jit
def write_earlier_tile(
    t, sums, columns, picture, picture_row, cells_before, column_before,
    Tk, picture_lines, picture_columns,
    RECEIVED: tl.constexpr, CELL_QUERIES: tl.constexpr, CELL_KEYS: tl.constexpr, COLUMN_KEYS: tl.constexpr,
    ADD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add the strip sums of an earlier tile t to the received weights and to a picture of means."""
    DOWN: tl.constexpr = BQ // CELL_QUERIES
    j = t * BK + tl.arange(0, BK)
    if RECEIVED:
        there = (j < Tk) & (t >= 0)
        before = tl.load(columns + j, mask=there, other=0.0)
        received = sum_lanes(tl.sum(sums, 1, keep_dims=True), BK, 1)
    cells = sum_lanes(sum_keys(sums, BK, DOWN), BK // 16, DOWN)
    if CELL_KEYS > 16:
        cells = tl.sum(tl.reshape(cells, (BK // CELL_KEYS, CELL_KEYS // 16, DOWN)), 1)
    cells_before, column_before = write_cells(
        t, cells, picture, picture_row, cells_before, column_before, picture_lines, picture_columns,
        CELL_QUERIES, CELL_KEYS, COLUMN_KEYS, ADD, BQ, BK, True,
    )  # fmt: skip
    if RECEIVED:
        tl.store(columns + j, before + tl.reshape(received, (BK,)), mask=there)
    return cells_before, column_before


@triton.jit
def process_tile(
    t, tag, queries, i, first_i, lse, low, high, weights, slope, bias, bias_rows, bias_left, bias_right,
    additive, q, q_query, k, k_tiles, batch, key_head,
    columns, picture, picture_row, lines, row_cells,
    query_ids, key_ids, dense, dense_query, dense_key,
    entropy, distance, largest, best, second, third, cells_before, column_before, sums, tile_before,
    offset, Tq, Tk, D, k_key, clip, scale, softcap, picture_lines, picture_columns,
    MASKED: tl.constexpr, RANGES: tl.constexpr, TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    ADDITIVE: tl.constexpr, MT: tl.constexpr, NT: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
    MAX_SHARED: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, LARGEST: tl.constexpr, RECEIVED: tl.constexpr,
    WEIGHTED: tl.constexpr, PICTURE: tl.constexpr, CELL_QUERIES: tl.constexpr, CELL_KEYS: tl.constexpr,
    COLUMN_KEYS: tl.constexpr, ADD: tl.constexpr, CELLS: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr,
    TOP: tl.constexpr, TAG_BITS: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, DEFER: tl.constexpr,
):  # fmt: skip
    """Process one tile: keys from t * BK on, and all queries of the program."""
    j = t * BK + tl.arange(0, BK)
    d = tl.arange(0, BD)
    places = k + tl.cast(t * BK, tl.int64) * k_key + tl.arange(0, BK)[:, None] * k_key + d[None, :]
    if ADDITIVE:
        keys = queries
    elif TMA:
        # The copy engine (TMA) needs no threads, and fills in zeros past the last key.
        keys = tl.reshape(k_tiles.load([batch, key_head, t * BK, 0]), (BK, BD))
    elif MASKED:
        keys = tl.load(places, mask=(j[:, None] < Tk) & (d[None, :] < D), other=0.0)
    elif EVEN:
        keys = tl.load(places)
    else:
        keys = tl.load(places, mask=d[None, :] < D, other=0.0)
    if RECEIVED and not DEFER:
        # Loaded before the product, so that it has arrived when it is needed.
        before = tl.load(columns + j, mask=j < Tk, other=0.0)
    if not ADDITIVE:
        dots = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)  # (BK, BQ)
    if DEFER:
        # This overlaps with the product of this tile.
        cells_before, column_before = write_earlier_tile(
            tile_before, sums, columns, picture, picture_row, cells_before, column_before,
            Tk, picture_lines, picture_columns,
            RECEIVED, CELL_QUERIES, CELL_KEYS, COLUMN_KEYS, ADD, BQ, BK,
        )  # fmt: skip
        tile_before = t
    if ADDITIVE:
        z = transposed_additive_logits(
            additive, t, first_i, q, q_query, Tq, k, k_key, Tk, D, BQ, BK, MT, NT, DP, BD, CHUNK, MAX_SHARED, PTX
        )
    else:
        z = transposed_tile_logits(
            dots, bias, bias_rows, bias_left, bias_right, first_i, t * BK, offset, clip, slope, scale, softcap,
            TABLE, SOFTCAP, ALIBI, PTX, BQ, BK,
        )  # fmt: skip
    x = z - lse[None, :]
    if MASKED:
        seen = j[:, None] < high[None, :]
        if RANGES > 0:
            seen &= j[:, None] >= low[None, :]
        seen = apply_masks(
            seen, i[None, :], j[:, None], query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS, DENSE
        )
        x = tl.where(seen, x, MASKED_LOGIT)
        z = tl.where(seen, z, -float("inf"))
    if LARGEST:
        largest = max_keys(largest, z, BK, BQ)
    if TOP:
        upper, lower = split_row_halves(x, BK, BQ)
        upper = tag_logits(upper, 2 * tag, TAG_BITS)
        lower = tag_logits(lower, 2 * tag + 1, TAG_BITS)
        loser = tl.minimum(upper, lower)
        winner = tl.maximum(upper, lower)
        weaker = tl.minimum(best, winner)
        stronger = tl.maximum(second, loser)
        third = tl.maximum(third, tl.minimum(weaker, stronger))
        second = tl.maximum(weaker, stronger)
        best = tl.maximum(best, winner)
    if ENTROPY or DISTANCE or RECEIVED or PICTURE > 0:
        p = tl.exp2(x)
        if ENTROPY:
            entropy = add_keys(entropy, p * x, BK, BQ)
        if DISTANCE:
            # Convert to float before broadcasting: a conversion per entry would take as long as exp2.
            far = tl.abs((i + offset).to(tl.float32)[None, :] - j.to(tl.float32)[:, None])
            distance = add_keys(distance, p * far, BK, BQ)
        if DEFER:
            sums = strip_sums(p, CELL_QUERIES, BK, BQ)
        elif PICTURE == 1:
            rows = tl.sum(tl.reshape(p, (BK, BQ // CELL_QUERIES, CELL_QUERIES)), 2)  # (BK, cells)
            cells = tl.sum(tl.reshape(rows, (BK // CELL_KEYS, CELL_KEYS, BQ // CELL_QUERIES)), 1)
            cells_before, column_before = write_cells(
                t, cells, picture, picture_row, cells_before, column_before, picture_lines, picture_columns,
                CELL_QUERIES, CELL_KEYS, COLUMN_KEYS, ADD, BQ, BK, False,
            )  # fmt: skip
        elif PICTURE == 2:
            sums_of_cells = sum_row_cells(p, row_cells, EXACT, PTX)  # (BK, CELLS)
            add_cells(t, sums_of_cells, picture, lines, picture_columns, Tk, BK, CELLS, EXACT, PTX)
        if RECEIVED and not DEFER:
            if WEIGHTED:
                received = tl.sum(p * weights[None, :], 1)
            elif PICTURE == 1:
                received = tl.sum(rows, 1)
            else:
                received = tl.sum(p, 1)
            tl.store(columns + j, before + received, mask=j < Tk)
    return entropy, distance, largest, best, second, third, cells_before, column_before, sums, tile_before


# A new value of one of these does not trigger a compilation.
LENGTHS = [
    "H", "group", "Tq", "Tk", "key_ranges_batch", "query_ids_batch", "key_ids_batch", "dense_batch", "dense_head",
    "dense_query", "dense_key", "weights_batch", "weights_head", "slots", "first_pair", "first_tile", "tiles",
    "picture_rows", "picture_columns", "picture_lines", "bias_batch", "bias_head", "bias_query", "clip",
    "weight_head", "headed",
]  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def tile_statistics(
    q, k, k_tiles, lse, key_ranges, query_ids, key_ids, dense, slopes, bias, weight,
    E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude, query_weights,
    entropy, distance, largest, columns, picture, best, second, third, counter,
    H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key, weights_batch, weights_head,
    bias_batch, bias_head, bias_query, clip, weight_head, headed, scale, softcap,
    slots, first_pair, first_tile, tiles,
    picture_rows, picture_columns, picture_lines,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ADDITIVE: tl.constexpr,
    MT: tl.constexpr, NT: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, MAX_SHARED: tl.constexpr,
    ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, LARGEST: tl.constexpr, RECEIVED: tl.constexpr,
    WEIGHTED: tl.constexpr, PICTURE: tl.constexpr, CELL_QUERIES: tl.constexpr, CELL_KEYS: tl.constexpr,
    COLUMN_KEYS: tl.constexpr, ADD: tl.constexpr, CELLS: tl.constexpr, EXACT: tl.constexpr, PTX: tl.constexpr,
    TOP: tl.constexpr, TAG_BITS: tl.constexpr, SEGMENTS: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, DEFER: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Program (pair, slot) takes every `slots`-th tile of queries, in alternating direction, the longest rows first.

    TMA: k_tiles is a tensor descriptor of the keys. columns is (pairs, slots, Tk): each program adds to its own.
    picture holds sums over the cells of a picture, (pairs, picture_lines, picture_columns), which merge.py adds up.
    PICTURE 1: cells align with tiles: CELL_QUERIES x CELL_KEYS; DEFER: the sums of a tile are written during the next
    one. PICTURE 2: any picture_rows x picture_columns; row r has the line r + tile for each tile of queries. A tile has
    at most CELLS rows and columns of cells. EXACT: sums for float32. PTX: on an NVIDIA GPU. best and second are (pairs,
    SEGMENTS, BK // 2, queries), third is (pairs, SEGMENTS, BK // 16, queries). counter: of doubtful queries, set to 0
    for topk.py. MASK_ALL: mask every tile, which halves the code and the time to compile it.
    """
    pair = first_pair + tl.program_id(0) // slots
    slot = tl.program_id(0) % slots
    b = (pair // H).to(tl.int64)
    h = pair % H
    offset = Tk - Tq
    q += b * q_batch + h.to(tl.int64) * q_head
    k += b * k_batch + (h // group).to(tl.int64) * k_head
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h.to(tl.int64) * dense_head
    query_weights += b * weights_batch + h.to(tl.int64) * weights_head
    lse += pair.to(tl.int64) * Tq
    entropy += pair.to(tl.int64) * Tq
    distance += pair.to(tl.int64) * Tq
    columns += (pair.to(tl.int64) * slots + slot) * Tk
    picture += pair.to(tl.int64) * picture_lines * picture_columns
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)
    ALWAYS: tl.constexpr = IDS or DENSE or MASK_ALL
    STRIP: tl.constexpr = CELL_QUERIES if DEFER else BQ
    HALF: tl.constexpr = tl.bfloat16 if EXACT and PTX else tl.float16
    d = tl.arange(0, BD)
    if TOP:  # noqa: SIM102 (a condition on a constant must stand alone)
        if (first_pair == 0) & (first_tile == 0) & (tl.program_id(0) == 0):
            tl.store(counter, 0)
    # Later launches for the same pairs continue the sums.
    if RECEIVED and first_tile == 0:
        fill(columns, Tk, 0.0)
        tl.debug_barrier()
    for iteration in range(tl.cdiv(tiles, slots)):
        place = iteration * slots + tl.where(iteration % 2 == 0, slot, slots - 1 - slot)
        if place < tiles:
            tile = first_tile + tiles - 1 - place
            i = tile * BQ + tl.arange(0, BQ)
            rows = load_lse(lse, i, Tq)
            queries, additive = rows, rows
            if ADDITIVE:
                additive = load_additive_block(
                    E, F, table, sizes, constants, q_max, k_max, q_magnitude, k_magnitude, weight,
                    pair, tile, b, h, H, group, Tq, Tk, headed, weight_head, DP, BD, BQ, BK,
                )  # fmt: skip
            else:
                queries = tl.load(
                    q + (tile * BQ).to(tl.int64) * q_query + tl.arange(0, BQ)[:, None] * q_query + d[None, :],
                    mask=(i[:, None] < Tq) & (d[None, :] < D),
                    other=0.0,
                )
            tile_bias = locate_bias(bias, b, h, tile * BQ, bias_batch, bias_head, bias_query)
            bias_rows, bias_left, bias_right = load_bias_ends(tile_bias, tile * BQ, Tq, clip, bias_query, BQ, TABLE)
            picture_row = (tile * BQ) // CELL_QUERIES
            into_picture = picture
            row_cells = tl.zeros((BQ, CELLS), HALF)
            line_of_query = i
            lines = BQ // CELL_QUERIES
            if PICTURE == 1:
                # Some cells may not be visited.
                lines = tl.minimum(picture_lines - picture_row, lines)
                fill(picture + picture_row.to(tl.int64) * picture_columns, lines * picture_columns, 0.0)
                tl.debug_barrier()
            if PICTURE == 2:
                first_row = cell_at(tile * BQ, picture_rows, Tq)
                line_of_query = cell_at(i, picture_rows, Tq) - first_row
                lines = tl.minimum(cell_at(tile * BQ + BQ - 1, picture_rows, Tq), picture_rows - 1) - first_row + 1
                into_picture = picture + (first_row + tile).to(tl.int64) * picture_columns
                row_cells = (line_of_query[:, None] == tl.arange(0, CELLS)[None, :]).to(HALF)
                fill(into_picture, lines * picture_columns, 0.0)
                tl.debug_barrier()
                mark_nan_queries(rows, line_of_query, into_picture, lines, picture_columns)
                tl.debug_barrier()
            weights = rows
            if WEIGHTED:
                weights = tl.load(query_weights + i, mask=i < Tq, other=0.0).to(tl.float32)
            sum_entropy = tl.zeros((BK // 16, 8, BQ), tl.float32)
            sum_distance = tl.zeros((BK // 16, 8, BQ), tl.float32)
            highest = tl.full((BK // 16, 8, BQ), -float("inf"), tl.float32)
            for s in range(SEGMENTS):
                first_best = tl.full((BK // 16, 8, BQ), MASKED_LOGIT, tl.float32)
                next_best = tl.full((BK // 16, 8, BQ), MASKED_LOGIT, tl.float32)
                third_best = tl.full((BK // 16, 8, BQ), MASKED_LOGIT, tl.float32)
                for run in tl.static_range(RANGES if RANGES > 0 else 1):
                    low, high = key_range(key_ranges, run, i, offset, Tq, Tk, CAUSAL, RANGES)
                    first, last, full, end = tile_bounds(low, high, i < Tq, Tk, BK, ALWAYS)
                    before, count_before = segment_tiles(first, full, s, SEGMENTS)
                    inside, count_inside = segment_tiles(full, end, s, SEGMENTS)
                    behind, count_behind = segment_tiles(end, last, s, SEGMENTS)
                    # First the tiles that need a mask, then those that are fully visible.
                    for kind in tl.static_range(1 if ALWAYS else 2):
                        count = count_before + count_behind if kind == 0 else count_inside
                        cells = tl.zeros((BK // CELL_KEYS, BQ // CELL_QUERIES), tl.float32)
                        column = -1
                        sums = tl.zeros((BK, BQ // STRIP, 4), tl.float32)
                        tile_before = -1
                        if RANGES == 2 or ADD or PICTURE == 2:
                            # Wait for what another loop added to the same columns or cells. Not inside a loop: a
                            # barrier would keep the compiler from loading keys ahead.
                            tl.debug_barrier()
                        # No num_stages for the long loop: with it, the compiler would also load sums ahead that an
                        # earlier iteration has yet to add to. Without it, only the operands of the product are.
                        for n in tl.range(0, count, num_stages=1 if kind == 0 else None):
                            # The index of the tile in its segment, which is the tag.
                            u = inside // SEGMENTS + n
                            if kind == 0:
                                u = tl.where(n < count_before, before, behind - count_before * SEGMENTS) // SEGMENTS + n
                            (
                                sum_entropy, sum_distance, highest, first_best, next_best, third_best,
                                cells, column, sums, tile_before,
                            ) = process_tile(
                                u * SEGMENTS + s, u, queries, i, tile * BQ, rows, low, high, weights, slope,
                                tile_bias, bias_rows, bias_left, bias_right,
                                additive, q, q_query, k, k_tiles, pair // H, h // group,
                                columns, into_picture, picture_row, lines, row_cells,
                                query_ids, key_ids, dense, dense_query, dense_key,
                                sum_entropy, sum_distance, highest, first_best, next_best, third_best,
                                cells, column, sums, tile_before, offset, Tq, Tk, D, k_key, clip, scale, softcap,
                                picture_lines, picture_columns,
                                kind == 0, RANGES, TABLE, SOFTCAP, ALIBI, ADDITIVE, MT, NT, DP, CHUNK, MAX_SHARED,
                                IDS, DENSE,
                                ENTROPY, DISTANCE, LARGEST, RECEIVED, WEIGHTED,
                                PICTURE, CELL_QUERIES, CELL_KEYS, COLUMN_KEYS, ADD, CELLS, EXACT, PTX, TOP, TAG_BITS,
                                BQ, BK, BD, EVEN, PRECISION, TMA, DEFER,
                            )  # fmt: skip
                        if DEFER:
                            # The last tile has no next tile.
                            write_earlier_tile(
                                tile_before, sums, columns, picture, picture_row, cells, column,
                                Tk, picture_lines, picture_columns,
                                RECEIVED, CELL_QUERIES, CELL_KEYS, COLUMN_KEYS, ADD, BQ, BK,
                            )  # fmt: skip
                if TOP:
                    # Queries are contiguous, so that the selection takes one or two threads per query.
                    into = ((pair - first_pair).to(tl.int64) * SEGMENTS + s) * (BK // 16)
                    groups = tl.arange(0, BK // 16)
                    here = (tile - first_tile) * BQ + tl.arange(0, BQ)
                    klass = 8 * (into + groups)[:, None, None] + tl.arange(0, 8)[None, :, None]
                    places = klass * (tiles * BQ) + here[None, None, :]
                    tl.store(best + places, first_best)
                    tl.store(second + places, next_best)
                    places = (into + groups)[:, None] * (tiles * BQ) + here[None, :]
                    tl.store(third + places, round_up_to_half(tl.max(third_best, 1), TAG_BITS))
            if ENTROPY:
                tl.store(entropy + i, 0.0 - tl.sum(tl.sum(sum_entropy, 0), 0) * LN_2, mask=i < Tq)
            if DISTANCE:
                tl.store(distance + i, tl.sum(tl.sum(sum_distance, 0), 0), mask=i < Tq)
            if LARGEST:
                per_query = tl.where(i < Tq, tl.max(tl.max(highest, 0), 0), -float("inf"))
                tl.store(largest + pair.to(tl.int64) * tl.cdiv(Tq, BQ) + tile, tl.max(per_query, 0) * LN_2)
            # The next tile of queries adds to the same columns with other threads.
            tl.debug_barrier()
