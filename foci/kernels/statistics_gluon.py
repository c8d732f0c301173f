"""The pass of statistics.py for Hopper: the next product runs while the weights of the last one are summed up.

Warps are specialised. One fetches tiles of keys (and of queries) into shared memory; one or two groups of four warps
take each tile, 64 keys, against the group's own queries. A tile of keys is so fetched once for all groups.
A group either has one product at a time, and what overlaps are the groups (PLAN 0; or PLAN 2: only one of them at a
time), or two by turns, of the first and of the second half of its queries (PLAN 1).

The tile is transposed, sums are kept and keys put in classes as in statistics.py, and all that is written is the same.
Served are dot products of width 64 or 128 in half precision, causal, full or with one run of keys per query.

B batch, H heads, Tq queries, Tk keys, D width. A pair is one head of one batch element.
"""

# Device code carries no Python types.
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

# As in logits.py.
NONE = gl.constexpr(-1e30)
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Keys per product: what four warps take.
BK = gl.constexpr(64)


@gluon.jit
def halves(tile):
    """Rows r and r + 8 of each 16, which one thread holds: two (4, 8, N)."""
    return tile.reshape((BK // 16, 2, 8, tile.shape[1])).permute((0, 2, 3, 1)).split()


@gluon.jit
def marked(x, tag, TAG_BITS: gl.constexpr):
    return ((x.to(gl.int32, bitcast=True) & (-(1 << TAG_BITS))) | tag).to(gl.float32, bitcast=True)


@gluon.jit
def max_packed(packed, x):
    """The larger of 16-bit numbers, two neighbouring queries in a word, and of x (4, 8, N), rounded to such ones."""
    left, right = x.reshape((x.shape[0], x.shape[1], x.shape[2] // 2, 2)).split()
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.f16x2.f32 t, $3, $2; max.f16x2 $0, $1, t; }", "=r,r,r,r", [packed, left, right],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def no_less(packed, TAG_BITS: gl.constexpr):
    """Words of 16-bit numbers that are no less than the marked logits that were rounded to these, and hardly more.

    A tag and rounding twice move a number by less than 2**-9 of itself, or with long tags 2**-7. (What is below -65504
    was rounded to -inf: such keys have no weight.)
    """
    gl.static_assert(TAG_BITS <= 15)
    FACTOR: gl.constexpr = "0x3bfc3bfc" if TAG_BITS <= 12 else "0x3bf03bf0"
    ASM: gl.constexpr = (
        "{ .reg .b32 a, b; mov.b32 a, " + FACTOR + "; mov.b32 b, 0x04000400; fma.rn.f16x2 $0, $1, a, b; }"
    )
    return gl.inline_asm_elementwise(ASM, "=r,r", [packed], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def masked(x, t, row, spans, Tq, Tk, SEEN: gl.constexpr):
    """NONE where a query, from row on, does not see a key of tile t.

    Written so that nothing but t and row has to wait in registers from tile to tile. Queries past the end have no
    weight anyhow.
    """
    MMA: gl.constexpr = x.type.layout
    key = gl.arange(0, BK, gl.SliceLayout(1, MMA))
    query = gl.arange(0, x.shape[1], gl.SliceLayout(0, MMA))
    if SEEN == 2:
        i = row + query
        low = gl.load(spans + i, mask=i < Tq, other=0) - t * BK
        high = gl.minimum(gl.load(spans + Tq + i, mask=i < Tq, other=0), Tk) - t * BK
        return gl.where((key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]), x, NONE)
    if SEEN == 1:
        return gl.where(key[:, None] < (query + (row + (Tk - Tq) + 1 - t * BK))[None, :], x, NONE)
    return gl.where((key < Tk - t * BK)[:, None], x, NONE)


@gluon.jit
def bounds(edges, start, Tq, Tk, SEEN: gl.constexpr, WIDTH: gl.constexpr):
    """Tiles of keys from first to last are seen by some of the queries from start on, those from full to end entirely
    by all. edges (tiles of WIDTH queries, 4) says it where runs were given.
    """
    if SEEN == 2:
        at = edges + start // WIDTH * 4
        return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    stop = gl.minimum(start + WIDTH, Tq)
    most = Tk
    least = Tk
    if SEEN == 1:
        most = gl.minimum(gl.maximum(stop + (Tk - Tq), 0), Tk)
        least = gl.minimum(gl.maximum(start + (Tk - Tq) + 1, 0), Tk)
    last = gl.where(start < Tq, gl.cdiv(most, BK), 0)
    return 0, last, 0, gl.minimum(least // BK, last)


@gluon.jit
def place_of(turn, slot, slots):
    return turn * slots + gl.where(turn % 2 == 0, slot, slots - 1 - slot)


@gluon.jit
def reach(edges, tile, Tq, Tk, SEEN: gl.constexpr, WIDTH: gl.constexpr, GROUPS: gl.constexpr):
    """Tiles of keys that any group needs."""
    first, last, _, _ = bounds(edges, tile * (WIDTH * GROUPS), Tq, Tk, SEEN, WIDTH)
    for g in gl.static_range(1, GROUPS):
        start = (tile * GROUPS + g) * WIDTH
        if start < Tq:
            other, other_last, _, _ = bounds(edges, start, Tq, Tk, SEEN, WIDTH)
            nothing = last <= first
            first = gl.where(other_last > other, gl.where(nothing, other, gl.minimum(first, other)), first)
            last = gl.where(other_last > other, gl.where(nothing, other_last, gl.maximum(last, other_last)), last)
    return first, last


@gluon.jit
def produce(fetched, SEEN: gl.constexpr, WIDTH: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr):
    """One warp: queries and keys into shared memory, as long as there is room."""
    q, k, buffers, barriers, edges, b, h, group, slot, slots, first_tile, tiles, Tq, Tk = fetched
    q_buffers, k_buffers, _ = buffers
    q_full, q_empty, k_full, k_empty, _ = barriers
    STAGES: gl.constexpr = k_buffers.shape[0]
    ROUNDS: gl.constexpr = q_buffers.shape[0] // (GROUPS * PARTS)
    ROWS: gl.constexpr = WIDTH // PARTS
    stage = 0
    phase = 0
    done = 0
    for turn in range(gl.cdiv(tiles, slots)):
        place = place_of(turn, slot, slots)
        if place < tiles:
            tile = first_tile + tiles - 1 - place
            for g in gl.static_range(GROUPS):
                at = (done % ROUNDS) * GROUPS + g
                mbarrier.wait(q_empty.index(at), ((done // ROUNDS) & 1) ^ 1)
                mbarrier.expect(q_full.index(at), q.block_type.nbytes * PARTS)
                for part in gl.static_range(PARTS):
                    row = (tile * GROUPS + g) * WIDTH + part * ROWS
                    tma.async_copy_global_to_shared(
                        q, [b, h, row, 0], q_full.index(at), q_buffers.index(at * PARTS + part)
                    )
            first, last = reach(edges, tile, Tq, Tk, SEEN, WIDTH, GROUPS)
            for t in range(first, last):
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k, [b, h // group, t * BK, 0], k_full.index(stage), k_buffers.index(stage)
                )
                stage, phase = after(stage, phase, STAGES)
            done += 1


@gluon.jit
def product(k_buffers, stage, queries, acc):
    """keys x queries, on its way."""
    keys = k_buffers.index(stage).reshape((BK, k_buffers.shape[4]))
    return warpgroup_mma(keys, queries, acc, use_acc=False, is_async=True)


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """The next place in the ring of tiles of keys."""
    around = stage == STAGES - 1
    return gl.where(around, 0, stage + 1), gl.where(around, phase ^ 1, phase)


@gluon.jit
def release(barrier):
    """All four warps have read it."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def tally(
    dots, t, tag, edge, row, rows, weights, spans, picture, picture_row,
    entropy, distance, largest, best, second, third, cells_before, column_before,
    scale, Tq, Tk, picture_scale, picture_rows, picture_columns,
    SEEN: gl.constexpr, ASKED: gl.constexpr,
):  # fmt: skip
    """One product: keys t * BK and on, queries row and on. edge: not everybody sees all of it."""
    ENTROPY: gl.constexpr = ASKED[0]
    DISTANCE: gl.constexpr = ASKED[1]
    LARGEST: gl.constexpr = ASKED[2]
    RECEIVED: gl.constexpr = ASKED[3]
    WEIGHTED: gl.constexpr = ASKED[4]
    PICTURE: gl.constexpr = ASKED[5]
    CELL_QUERIES: gl.constexpr = ASKED[6]
    CELL_KEYS: gl.constexpr = ASKED[7]
    COLUMN_KEYS: gl.constexpr = ASKED[8]
    ADD: gl.constexpr = ASKED[9]
    TOP: gl.constexpr = ASKED[10]
    TAG_BITS: gl.constexpr = ASKED[11]
    MMA: gl.constexpr = dots.type.layout
    N: gl.constexpr = dots.shape[1]
    x = dots * scale - rows.load(gl.SliceLayout(0, MMA))[None, :]
    if edge:
        x = masked(x, t, row, spans, Tq, Tk, SEEN)
    if LARGEST:
        upper, lower = halves(x)
        largest = gl.maximum(gl.maximum(largest, upper), lower)
    if TOP:
        upper, lower = halves(x)
        upper = marked(upper, 2 * tag, TAG_BITS)
        lower = marked(lower, 2 * tag + 1, TAG_BITS)
        loser = gl.minimum(upper, lower)
        winner = gl.maximum(upper, lower)
        weaker = gl.minimum(best, winner)
        stronger = gl.maximum(second, loser)
        third = max_packed(third, gl.minimum(weaker, stronger))
        second = gl.maximum(weaker, stronger)
        best = gl.maximum(best, winner)
    p = gl.exp2(x)
    if ENTROPY:
        upper, lower = halves(p * x)
        entropy = (entropy + upper) + lower
    if DISTANCE:
        j = gl.arange(0, BK, gl.SliceLayout(1, MMA)).to(gl.float32)
        i = (row + (Tk - Tq) - t * BK + gl.arange(0, N, gl.SliceLayout(0, MMA))).to(gl.float32)
        upper, lower = halves(p * gl.abs(i[None, :] - j[:, None]))
        distance = (distance + upper) + lower
    if PICTURE > 0:
        parts = p.reshape((BK, N // CELL_QUERIES, CELL_QUERIES))
        if PICTURE == 1:
            lines = gl.sum(parts, 2)
            cells = gl.sum(lines.reshape((BK // CELL_KEYS, CELL_KEYS, N // CELL_QUERIES)), 1) * picture_scale
        else:
            lines = gl.max(parts, 2)
            cells = gl.max(lines.reshape((BK // CELL_KEYS, CELL_KEYS, N // CELL_QUERIES)), 1)
        L: gl.constexpr = cells.type.layout
        line = picture_row + gl.arange(0, N // CELL_QUERIES, gl.SliceLayout(0, L))[None, :]
        column = (t * BK) // COLUMN_KEYS + gl.arange(0, BK // CELL_KEYS, gl.SliceLayout(1, L))[:, None]
        if ADD:
            # Tiles come in order: the sum of a cell is carried and written over until the next cell begins.
            same = (t * BK) // COLUMN_KEYS == column_before
            column_before = (t * BK) // COLUMN_KEYS
            old = gl.where(same, cells_before, gl.zeros_like(cells_before))
            cells = cells + old if PICTURE == 1 else gl.maximum(cells, old)
            cells_before = cells
        there = (line < picture_rows) & (column < picture_columns)
        gl.store(picture + line.to(gl.int64) * picture_columns + column, cells, mask=there)
    received = gl.zeros((BK,), gl.float32, gl.SliceLayout(1, MMA))
    if RECEIVED:
        if WEIGHTED:
            received = gl.sum(p * weights.load(gl.SliceLayout(0, MMA))[None, :], 1)
        elif PICTURE == 1:
            received = gl.convert_layout(gl.sum(lines, 1), gl.SliceLayout(1, MMA))
        else:
            received = gl.sum(p, 1)
    return entropy, distance, largest, best, second, third, cells_before, column_before, received


@gluon.jit
def add_columns(columns, t, received, Tk):
    """Nobody else adds to these columns, so the order is always the same."""
    j = t * BK + gl.arange(0, BK, received.type.layout)
    gl.atomic_add(columns + j, received, mask=j < Tk, sem="relaxed")


@gluon.jit
def keep(best, second, third, kept, into, queries, column, TAG_BITS: gl.constexpr):
    """Writes the candidates of one segment for one part of the queries. Thirds go two to a word."""
    to_best, to_second, to_third = kept
    places = into + places_of(best, queries) + column
    gl.store(to_best + places, best)
    gl.store(to_second + places, second)
    gl.store(to_third + (into + column) // 2 + places_of(third, queries // 2), no_less(third, TAG_BITS))


@gluon.jit
def places_of(like, queries):
    """Classes x queries."""
    L: gl.constexpr = like.type.layout
    a = gl.arange(0, BK // 16, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    c = gl.arange(0, like.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return (8 * a + r) * queries + c


@gluon.jit
def put_rows(into, into_weights, lse, query_weights, row, Tq, MMA: gl.constexpr, WEIGHTED: gl.constexpr):
    """The log-sum-exps of the queries from row on, base 2, and their weights, into shared memory."""
    i = row + gl.arange(0, into.shape[0], gl.SliceLayout(0, MMA))
    rows = gl.load(lse + i, mask=i < Tq, other=-float("inf"))
    # Rows without weight (lse -inf, or past the end) get exactly 0.
    into.store(gl.where(rows == -float("inf"), -NONE, rows * LOG2_E))
    if WEIGHTED:
        into_weights.store(gl.load(query_weights + i, mask=i < Tq, other=0.0).to(gl.float32))


@gluon.jit
def transposed(q_buffers, at):
    return q_buffers.index(at).reshape((q_buffers.shape[3], q_buffers.shape[4])).permute((1, 0))


@gluon.jit
def blank(MMA: gl.constexpr, N: gl.constexpr, CELL_QUERIES: gl.constexpr, CELL_KEYS: gl.constexpr):
    """Sums of nothing, for one part of the queries; and candidates where nothing was seen."""
    zeros, _ = halves(gl.zeros((BK, N), gl.float32, MMA))
    none = gl.full_like(zeros, NONE)
    left, _ = zeros.reshape((BK // 16, 8, N // 2, 2)).split()
    # Twice -inf.
    none_packed = gl.full_like(left, -67044352, dtype=gl.int32)
    lines = gl.sum(gl.zeros((BK, N), gl.float32, MMA).reshape((BK, N // CELL_QUERIES, CELL_QUERIES)), 2)
    cells = gl.sum(lines.reshape((BK // CELL_KEYS, CELL_KEYS, N // CELL_QUERIES)), 1)
    return zeros, none, none_packed, cells


@gluon.jit
def write(pointers, row, lse, sum_entropy, sum_distance, most, Tq,
          ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, LARGEST: gl.constexpr):  # fmt: skip
    """What one part of the queries has summed up; gives the largest logit."""
    entropy, distance = pointers
    largest = -float("inf")
    L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, sum_entropy.type.layout))
    i = row + gl.arange(0, sum_entropy.shape[2], L)
    if ENTROPY:
        gl.store(entropy + i, 0.0 - gl.sum(gl.sum(sum_entropy, 0), 0) * LN_2, mask=i < Tq)
    if DISTANCE:
        gl.store(distance + i, gl.sum(gl.sum(sum_distance, 0), 0), mask=i < Tq)
    if LARGEST:
        rows = gl.load(lse + i, mask=i < Tq, other=-float("inf"))
        x = gl.max(gl.max(most, 0), 0)
        largest = gl.max(gl.where(x > NONE / 2, x * LN_2 + rows, -float("inf")), 0)
    return largest


@gluon.jit
def consume(
    work, g: gl.constexpr, PLAN: gl.constexpr, WIDTH: gl.constexpr, GROUPS: gl.constexpr, SEEN: gl.constexpr,
    ASKED: gl.constexpr,
):  # fmt: skip
    """Four warps: their queries against every tile of keys."""
    (
        buffers, barriers, inputs, outputs, kept, edges, slot, slots, first_tile, tiles, segment, segments,
        scale, Tq, Tk, picture_scale, picture_rows, picture_columns,
    ) = work  # fmt: skip
    q_buffers, k_buffers, rows = buffers
    q_full, q_empty, k_full, k_empty, turns = barriers
    lse, spans, query_weights = inputs
    entropy, distance, largest, columns, picture = outputs
    columns += g * Tk
    ENTROPY: gl.constexpr = ASKED[0]
    DISTANCE: gl.constexpr = ASKED[1]
    LARGEST: gl.constexpr = ASKED[2]
    RECEIVED: gl.constexpr = ASKED[3]
    WEIGHTED: gl.constexpr = ASKED[4]
    CELL_QUERIES: gl.constexpr = ASKED[6]
    TOP: gl.constexpr = ASKED[10]
    PARTS: gl.constexpr = 2 if PLAN == 1 else 1
    N: gl.constexpr = WIDTH // PARTS
    STAGES: gl.constexpr = k_buffers.shape[0]
    ROUNDS: gl.constexpr = q_buffers.shape[0] // (GROUPS * PARTS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    queries = tiles * (GROUPS * WIDTH)
    stage = 0
    phase = 0
    # The first group need not wait for its first turn.
    turn_phase = 1 if g == 0 else 0
    done = 0
    for turn in range(gl.cdiv(tiles, slots)):
        place = place_of(turn, slot, slots)
        if place < tiles:
            tile = first_tile + tiles - 1 - place
            start = (tile * GROUPS + g) * WIDTH
            first, last = reach(edges, tile, Tq, Tk, SEEN, WIDTH, GROUPS)
            begin, finish, full, end = bounds(edges, start, Tq, Tk, SEEN, WIDTH)
            some = finish > begin
            begin = gl.where(some, begin, last)
            finish = gl.where(some, finish, last)
            at = (done % ROUNDS) * GROUPS + g
            zeros, none, packed, cells = blank(MMA, N, CELL_QUERIES, ASKED[7])
            entropy0, distance0, most0, best0, second0, third0 = zeros, zeros, none, none, none, packed
            entropy1, distance1, most1, best1, second1, third1 = zeros, zeros, none, none, none, packed
            cells0, column0, cells1, column1 = cells, -1, cells, -1
            rows0, weights0 = rows.index(2 * g * PARTS), rows.index(2 * g * PARTS + 1)
            rows1, weights1 = rows.index(2 * (g * PARTS + PARTS - 1)), rows.index(2 * (g * PARTS + PARTS - 1) + 1)
            put_rows(rows0, weights0, lse, query_weights, start, Tq, MMA, WEIGHTED)
            if PLAN == 1:
                put_rows(rows1, weights1, lse, query_weights, start + N, Tq, MMA, WEIGHTED)
            queries0 = transposed(q_buffers, at * PARTS)
            queries1 = transposed(q_buffers, at * PARTS + PARTS - 1)
            column = (tile - first_tile) * (GROUPS * WIDTH) + g * WIDTH
            mbarrier.wait(q_full.index(at), (done // ROUNDS) & 1)
            for _ in range(first, begin):
                mbarrier.wait(k_full.index(stage), phase)
                if PLAN == 2:
                    mbarrier.wait(turns.index(g), turn_phase)
                    turn_phase ^= 1
                release(k_empty.index(stage))
                if PLAN == 2:
                    mbarrier.arrive(turns.index((g + 1) % GROUPS), count=1)
                stage, phase = after(stage, phase, STAGES)
            picture_row = start // CELL_QUERIES
            nothing = gl.zeros((BK, N), gl.float32, MMA)
            if PLAN == 1:
                # A product is started before the one before it is summed up; the very last one is for nothing.
                mbarrier.wait(k_full.index(stage), phase, pred=some)
                acc0 = product(k_buffers, stage, queries0, nothing)
            for s in range(segments):
                low = gl.maximum(begin, s * segment)
                high = gl.minimum(finish, (s + 1) * segment)
                for t in range(low, high):
                    edge = (t < full) | (t >= end)
                    tag = t - s * segment
                    if PLAN != 1:
                        mbarrier.wait(k_full.index(stage), phase)
                        if PLAN == 2:
                            mbarrier.wait(turns.index(g), turn_phase)
                            turn_phase ^= 1
                        acc0 = product(k_buffers, stage, queries0, nothing)
                    dots0 = warpgroup_mma_wait(0, [acc0])
                    if PLAN != 1:
                        release(k_empty.index(stage))
                        if PLAN == 2:
                            mbarrier.arrive(turns.index((g + 1) % GROUPS), count=1)
                        stage, phase = after(stage, phase, STAGES)
                    else:
                        acc1 = product(k_buffers, stage, queries1, nothing)
                    entropy0, distance0, most0, best0, second0, third0, cells0, column0, received = tally(
                        dots0, t, tag, edge, start, rows0, weights0, spans, picture, picture_row,
                        entropy0, distance0, most0, best0, second0, third0, cells0, column0,
                        scale, Tq, Tk, picture_scale, picture_rows, picture_columns, SEEN, ASKED,
                    )  # fmt: skip
                    if PLAN == 1:
                        more = t + 1 < finish
                        used = stage
                        stage, phase = after(stage, phase, STAGES)
                        mbarrier.wait(k_full.index(stage), phase, pred=more)
                        dots1 = warpgroup_mma_wait(0, [acc1])
                        acc0 = product(k_buffers, stage, queries0, nothing)
                        release(k_empty.index(used))
                        entropy1, distance1, most1, best1, second1, third1, cells1, column1, other = tally(
                            dots1, t, tag, edge, start + N, rows1, weights1, spans, picture,
                            picture_row + N // CELL_QUERIES,
                            entropy1, distance1, most1, best1, second1, third1, cells1, column1,
                            scale, Tq, Tk, picture_scale, picture_rows, picture_columns, SEEN, ASKED,
                        )  # fmt: skip
                        received += other
                    if RECEIVED:
                        add_columns(columns, t, received, Tk)
                if TOP:
                    into = s.to(gl.int64) * (BK // 2) * queries
                    keep(best0, second0, third0, kept, into, queries, column, ASKED[11])
                    best0, second0, third0 = none, none, packed
                    if PLAN == 1:
                        keep(best1, second1, third1, kept, into, queries, column + N, ASKED[11])
                        best1, second1, third1 = none, none, packed
            if PLAN == 1:
                warpgroup_mma_wait(0, [acc0])
            for _ in range(finish, last):
                mbarrier.wait(k_full.index(stage), phase)
                if PLAN == 2:
                    mbarrier.wait(turns.index(g), turn_phase)
                    turn_phase ^= 1
                release(k_empty.index(stage))
                if PLAN == 2:
                    mbarrier.arrive(turns.index((g + 1) % GROUPS), count=1)
                stage, phase = after(stage, phase, STAGES)
            release(q_empty.index(at))
            most = write((entropy, distance), start, lse, entropy0, distance0, most0, Tq, ENTROPY, DISTANCE, LARGEST)
            if PLAN == 1:
                most1 = write(
                    (entropy, distance), start + N, lse, entropy1, distance1, most1, Tq, ENTROPY, DISTANCE, LARGEST
                )
                if LARGEST:
                    most = gl.maximum(most, most1)
            if LARGEST:
                gl.store(largest + tile * GROUPS + g, most)
            done += 1


@gluon.jit
def statistics(
    q, k, lse, spans, edges, query_weights, entropy, distance, largest, columns, picture, best, second, third,
    H, group, Tq, Tk, spans_batch, edges_batch, weights_batch, weights_head, scale,
    slots, first_pair, first_tile, tiles, segment, segments, picture_rows, picture_columns, picture_scale,
    SEEN: gl.constexpr,
    ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, LARGEST: gl.constexpr, RECEIVED: gl.constexpr,
    WEIGHTED: gl.constexpr, PICTURE: gl.constexpr, CELL_QUERIES: gl.constexpr, CELL_KEYS: gl.constexpr,
    COLUMN_KEYS: gl.constexpr, ADD: gl.constexpr, TOP: gl.constexpr, TAG_BITS: gl.constexpr,
    WIDTH: gl.constexpr, GROUPS: gl.constexpr, PLAN: gl.constexpr, STAGES: gl.constexpr, ROUNDS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program (pair, slot) serves every `slots`-th tile of GROUPS * WIDTH queries, back and forth.

    q and k are descriptors of (B, H, Tq, D) and (B, G, Tk, D). columns is (pairs, slots, GROUPS, Tk), zeros.
    edges (1 or B, tiles of WIDTH queries, 4): what bounds() gives. The rest is as in statistics.py.
    """
    pair = first_pair + gl.program_id(0) // slots
    slot = gl.program_id(0) % slots
    b = pair // H
    h = pair % H
    wide = pair.to(gl.int64)
    PARTS: gl.constexpr = 2 if PLAN == 1 else 1
    HELD: gl.constexpr = ROUNDS * GROUPS
    D: gl.constexpr = q.block_type.shape[3]
    q_buffers = gl.allocate_shared_memory(q.dtype, [HELD * PARTS, 1, 1, WIDTH // PARTS, D], q.layout)
    k_buffers = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BK, D], k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(GROUPS):
        mbarrier.init(turns.index(n), count=1)
    for n in gl.static_range(HELD):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_empty.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=GROUPS)
    rows = gl.allocate_shared_memory(
        gl.float32, [2 * GROUPS * PARTS, WIDTH // PARTS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    buffers = (q_buffers, k_buffers, rows)
    barriers = (q_full, q_empty, k_full, k_empty, turns)
    spans += b.to(gl.int64) * spans_batch
    edges += b.to(gl.int64) * edges_batch
    query_weights += b.to(gl.int64) * weights_batch + h.to(gl.int64) * weights_head
    inputs = (lse + wide * Tq, spans, query_weights)
    across = gl.cdiv(Tq, GROUPS * WIDTH) * GROUPS
    cells = picture + wide * picture_rows * picture_columns
    sums = columns + (wide * slots + slot) * GROUPS * Tk
    outputs = (entropy + wide * Tq, distance + wide * Tq, largest + wide * across, sums, cells)
    into = (wide - first_pair) * segments * (BK // 2) * (tiles * (GROUPS * WIDTH))
    kept = (best + into, second + into, third + into // 2)
    ASKED: gl.constexpr = (
        ENTROPY, DISTANCE, LARGEST, RECEIVED, WEIGHTED, PICTURE, CELL_QUERIES, CELL_KEYS, COLUMN_KEYS, ADD,
        TOP, TAG_BITS,
    )  # fmt: skip
    work = (
        buffers, barriers, inputs, outputs, kept, edges, slot, slots, first_tile, tiles, segment, segments,
        scale * LOG2_E, Tq, Tk, picture_scale, picture_rows, picture_columns,
    )  # fmt: skip
    fetched = (q, k, buffers, barriers, edges, b, h, group, slot, slots, first_tile, tiles, Tq, Tk)
    if GROUPS == 1:
        gl.warp_specialize([
            (consume, (work, 0, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (produce, (fetched, SEEN, WIDTH, GROUPS, PARTS)),
        ], [1], [24])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (consume, (work, 0, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (consume, (work, 1, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (produce, (fetched, SEEN, WIDTH, GROUPS, PARTS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize([
            (consume, (work, 0, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (consume, (work, 1, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (consume, (work, 2, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (produce, (fetched, SEEN, WIDTH, GROUPS, PARTS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (work, 0, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (consume, (work, 1, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (consume, (work, 2, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (consume, (work, 3, PLAN, WIDTH, GROUPS, SEEN, ASKED)),
            (produce, (fetched, SEEN, WIDTH, GROUPS, PARTS)),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip
