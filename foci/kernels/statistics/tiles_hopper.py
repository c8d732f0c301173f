"""The pass of tiles.py for Hopper: the product of the next tile runs while a tile is reduced.

Plain Triton waits for each product. This kernel is written in Gluon, where products and copies are started and awaited
explicitly. It covers the common case: half precision, dot products, causal or no mask, as many queries as keys; at
lengths that are not a multiple of 128 with a few more instructions (RAGGED). Its sums are those of tiles.py, which
covers everything and is what it is tested against.

An iteration takes a pair of tiles: the even one is segment 0 of the candidates for the top keys, the odd one segment 1.
One copy loads the keys of both. The sums of a tile are written during the next tile, by the threads that hold them
(sums_hopper.py).

Two constraints of the compiler: no product may be in flight at the back edge of the loop, or it waits after every
tensor core instruction. And arithmetic must be pinned (`force_computed`), or it is delayed until the product that it
should overlap with is done.

B batch, H heads, T queries and keys, D width. A pair is also one head of one batch element.
"""

# Device code carries no Python types.
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from foci.kernels.logits import LN_2, LOG2_E, MASKED_LOGIT
from foci.kernels.statistics.sums_hopper import BK, split_row_halves, strip_sums, sum_per_thread, write_earlier_tile

# Renamed after Triton 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Renamed after Triton 3.8.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def tag_logits(x, tag, TAG_BITS: gl.constexpr):
    """As in tiles.py: replace the lowest bits of x by a tag."""
    return ((x.to(gl.int32, bitcast=True) & (-(1 << TAG_BITS))) | tag).to(gl.float32, bitcast=True)


@gluon.jit
def round_up_to_half(x, TAG_BITS: gl.constexpr):
    """As in tiles.py: a float16 upper bound of a tagged logit."""
    bare = (x.to(gl.int32, bitcast=True) & (-(1 << TAG_BITS))).to(gl.float32, bitcast=True)
    above = gl.maximum(bare + gl.abs(bare) * 0.0009765625 + 6e-8, -65504.0)
    return gl.where(x > MASKED_LOGIT / 2, above, -float("inf")).to(gl.float16)


@gluon.jit
def force_computed(x):
    """Force the computation of x, and of everything that it is a sum of, at this point.

    The assembler would delay it past a later wait, where nothing is left to overlap with. It moves nothing past a sleep
    that depends on x > 1e30, which never holds for our sums. With a branch or a trap instead, it would wait for each
    product.
    """
    ASM: gl.constexpr = "{ .reg .pred p; setp.gt.f32 p, $1, 0f7149F2CA; @p nanosleep.u32 1; mov.b32 $0, $1; }"
    return gl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def update_candidates(x, tag, best, second, third, TAG_BITS: gl.constexpr):
    """As in tiles.py: update the two largest logits of each class, and the third."""
    upper, lower = split_row_halves(x)
    upper = tag_logits(upper, 2 * tag, TAG_BITS)
    lower = tag_logits(lower, 2 * tag + 1, TAG_BITS)
    loser = gl.minimum(upper, lower)
    winner = gl.maximum(upper, lower)
    weaker = gl.minimum(best, winner)
    stronger = gl.maximum(second, loser)
    third = gl.maximum(third, gl.minimum(weaker, stronger))
    return gl.maximum(best, winner), gl.maximum(weaker, stronger), third


@gluon.jit
def group_by_thread(x):
    """Group (BK // 16, 8, BQ) by thread in the tensor core layout: (BK // 16, 8, BQ // 8, 4, 2)."""
    return x.reshape((BK // 16, 8, x.shape[2] // 8, 4, 2))


@gluon.jit
def add_distances(distance, p, t, row, places, CAUSAL: gl.constexpr, STRIP: gl.constexpr, RAGGED: gl.constexpr):
    """Add p (BK, BQ) times the distance of each key from each query to `distance`, shaped as by `group_by_thread`.

    A thread computes one difference of positions. All others differ from it by a few constants.
    """
    upper, lower = split_row_halves(p)
    upper, lower = group_by_thread(upper), group_by_thread(lower)
    OURS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, upper.type.layout))
    warp = gl.arange(0, BK // 16, gl.SliceLayout(1, gl.SliceLayout(2, OURS)))[:, None, None]
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, OURS)))[None, :, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, OURS)))[None, None, :]
    if RAGGED:
        row = 0
    ours = (row - t * BK + 2 * lane - (16 * warp + r)).to(gl.float32)[:, :, None, :, None]
    REST: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, upper.type.layout)))
    eights = gl.arange(0, upper.shape[2], gl.SliceLayout(1, REST))[:, None]
    ones = gl.arange(0, 2, gl.SliceLayout(0, REST))[None, :]
    constants = (8 * eights + ones).to(gl.float32)[None, None, :, None, :]
    if RAGGED:
        starts = (eights * 0 + ones * 0).to(gl.float32)
        for strip in gl.static_range(p.shape[1] // STRIP):
            starts = gl.where(eights // (STRIP // 8) == strip, (places[strip] - strip * STRIP).to(gl.float32), starts)
        ours = ours + starts[None, None, :, None, :]
    near = ours + constants
    far = ours + (constants - 8)
    if not CAUSAL:
        near, far = gl.abs(near), gl.abs(far)
    return (distance + upper * near) + lower * far


@gluon.jit
def max_per_thread(x):
    """The maximum of the values of each thread: (BK, BQ) -> (BK // 16, 8, 4)."""
    upper, lower = split_row_halves(x)
    return gl.max(gl.max(group_by_thread(gl.maximum(upper, lower)), 4), 2)


@gluon.jit
def process_tile(
    dots, t, tag, row, places, rows, entropy, distance, highest, best, second, third, sums, scale, T,
    CAUSAL: gl.constexpr, MASK: gl.constexpr, ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, LARGEST: gl.constexpr,
    SUMS: gl.constexpr, TOP: gl.constexpr, TAG_BITS: gl.constexpr, STRIP: gl.constexpr, RAGGED: gl.constexpr,
    BY_KEY: gl.constexpr,
):  # fmt: skip
    """Process key tile t and the queries from `row` on, or of the strips at `places`; rows are their log-sum-exps."""
    MMA: gl.constexpr = dots.type.layout
    if TOP:
        rows = rows.load(gl.SliceLayout(0, MMA))
    x = dots * scale - rows[None, :]
    if MASK:
        if RAGGED:
            j = gl.arange(0, BK, gl.SliceLayout(1, MMA)) + t * BK
            i, _ = slot_queries(places, STRIP, dots.shape[1], gl.SliceLayout(0, MMA))
            seen = j[:, None] <= (i[None, :] if CAUSAL else i[None, :] * 0 + (T - 1))
        else:
            j = gl.arange(0, BK, gl.SliceLayout(1, MMA)) + (t * BK - row)
            i = gl.arange(0, dots.shape[1], gl.SliceLayout(0, MMA))
            seen = j[:, None] <= i[None, :]
        x = gl.where(seen, x, MASKED_LOGIT)
        dots = gl.where(seen, dots, -float("inf"))
    if LARGEST:
        highest = gl.maximum(highest, max_per_thread(dots))
    if TOP:
        best, second, third = update_candidates(x, tag, best, second, third, TAG_BITS)
    if ENTROPY or DISTANCE or SUMS:
        p = gl.exp2(x)
    if ENTROPY:
        upper, lower = split_row_halves(p * x)
        entropy = (entropy + upper) + lower
    if DISTANCE:
        distance = add_distances(distance, p, t, row, places, CAUSAL, STRIP, RAGGED)
    if SUMS:
        sums = strip_sums(p, STRIP, BY_KEY)
        force_computed(sums[1] + sums[2])
    elif ENTROPY:
        force_computed(sum_per_thread(entropy))
    else:
        force_computed(gl.sum(gl.sum(distance, 4), 2))
    return entropy, distance, highest, best, second, third, sums


@gluon.jit
def start_product(k_buffers, at, queries, acc, WHICH: gl.constexpr):
    """Start the product of the first or the second tile of a pair."""
    keys = k_buffers.index(at).reshape((2 * BK, k_buffers.shape[4])).slice(WHICH * BK, BK, 0)
    return warpgroup_mma(keys, queries, acc, use_acc=False, is_async=True)


@gluon.jit
def pair_index(n, pairs, RAGGED: gl.constexpr):
    """The pair on the diagonal comes first, then the others in order. RAGGED: the diagonal may cross the last two."""
    if RAGGED:
        index = gl.where(n < 2, pairs - 1 - n, n - 2)
    else:
        index = gl.where(n == 0, pairs, n) - 1
    return index


@gluon.jit
def fetch_key_pair(k, k_buffers, k_full, b, g, n, counted, pairs, RAGGED: gl.constexpr):
    """Load the n-th pair of key tiles into its buffer, if there is one."""
    there = n < pairs
    at = (counted + n) & 1
    mbarrier.expect(k_full.index(at), k.block_type.nbytes, pred=there)
    # All threads have read the buffer. Triton 3.6 and 3.7 insert a barrier here anyway, so it costs nothing.
    barrier()
    async_load(k, [b, g, pair_index(n, pairs, RAGGED) * (2 * BK), 0], k_full.index(at), k_buffers.index(at), pred=there)


@gluon.jit
def start_first_product(k_buffers, k_full, queries, acc, n, counted, pairs):
    """Start the first product of the n-th pair; if there is none, the result is not used."""
    at = (counted + n) & 1
    mbarrier.wait(k_full.index(at), ((counted + n) >> 1) & 1, pred=n < pairs)
    return start_product(k_buffers, at, queries, acc, 0)


@gluon.jit
def tile_index(iteration, slot, slots, first_tile, tiles):
    """The query tile of an iteration, in alternating direction, the longest rows first; -1 if there is none."""
    place = iteration * slots + gl.where(iteration % 2 == 0, slot, slots - 1 - slot)
    return gl.where(place < tiles, first_tile + tiles - 1 - place, -1)


@gluon.jit
def fetch_first_tiles(
    q, q_buffer, q_full, k, k_buffers, k_full, b, h, g, tile, stop, counted, T,
    CAUSAL: gl.constexpr, BQ: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Load the queries of a tile and its first keys; return the number of pairs of key tiles.

    RAGGED: only the keys; `stop` is the end of the tile's queries.
    """
    there = tile >= 0
    if RAGGED:
        pairs = gl.cdiv(stop if CAUSAL else T, 2 * BK)
    else:
        pairs = T // (2 * BK)
        if CAUSAL:
            pairs = tile * BQ // (2 * BK) + 1
        pairs = gl.where(there, pairs, 0)
        mbarrier.expect(q_full, q.block_type.nbytes, pred=there)
        barrier()
        async_load(q, [b, h, tile * BQ, 0], q_full, q_buffer, pred=there)
    fetch_key_pair(k, k_buffers, k_full, b, g, 0, counted, pairs, RAGGED)
    fetch_key_pair(k, k_buffers, k_full, b, g, 1, counted, pairs, RAGGED)
    return pairs


@gluon.jit
def strip_start(strip, T, strips):
    """The first query of a strip: `strips` strips divide the queries evenly; those after them are empty."""
    return gl.minimum(strip, strips) * T // strips


@gluon.jit
def strip_starts(strip, T, strips, DOWN: gl.constexpr):
    """The first queries of DOWN strips, and the end of the last."""
    a, b = strip_start(strip, T, strips), strip_start(strip + 1, T, strips)
    if DOWN == 1:
        places = (a, b)
    elif DOWN == 2:
        places = (a, b, strip_start(strip + 2, T, strips))
    else:
        c, d, e = (
            strip_start(strip + 2, T, strips),
            strip_start(strip + 3, T, strips),
            strip_start(strip + 4, T, strips),
        )
        places = (a, b, c, d, e)
    return places


@gluon.jit
def slot_queries(places, STRIP: gl.constexpr, BQ: gl.constexpr, LAYOUT: gl.constexpr):
    """The query in each slot of a tile, and whether it is one: a strip of fewer queries repeats its last one."""
    slot = gl.arange(0, BQ, LAYOUT)
    query = slot
    there = slot < 0
    for strip in gl.static_range(BQ // STRIP):
        here = slot // STRIP == strip
        own = places[strip] + (slot - strip * STRIP)
        query = gl.where(here, gl.maximum(gl.minimum(own, places[strip + 1] - 1), 0), query)
        there = there | (here & (own < places[strip + 1]))
    return query, there


@gluon.jit
def load_queries(memory, row_stride, q_buffer, places, STRIP: gl.constexpr, BQ: gl.constexpr, D: gl.constexpr):
    """Load the queries of strips into shared memory: strips start anywhere."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    query, _ = slot_queries(places, STRIP, BQ, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    q_buffer.reshape((BQ, D)).store(gl.load(memory + query[:, None].to(gl.int64) * row_stride + d[None, :]))
    fence_async_shared()
    barrier()


@gluon.jit
def zero_sums(into, first, size):
    """Set sums in memory to zero, from `first` on."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    for start_at in range(first, size, 512):
        at = start_at + gl.arange(0, 512, LINE)
        gl.store(into + at, gl.zeros((512,), gl.float32, LINE), mask=at < size)


@gluon.jit
def write_candidates(
    best, second, third, candidates, into, queries, places, first_query,
    TAG_BITS: gl.constexpr, STRIP: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Write the candidates of a segment, as tiles.py does."""
    to_best, to_second, to_third = candidates
    L: gl.constexpr = best.type.layout
    a = gl.arange(0, BK // 16, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    if RAGGED:
        c, there = slot_queries(places, STRIP, best.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, L)))
        at = (8 * (into + a) + r) * queries + (c - first_query)[None, None, :]
        there = there[None, None, :] & (a >= 0) & (r >= 0)
        gl.store(to_best + at, best, mask=there)
        gl.store(to_second + at, second, mask=there)
    else:
        c = gl.arange(0, best.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
        at = (8 * (into + a) + r) * queries + c
        gl.store(to_best + at, best)
        gl.store(to_second + at, second)
    bound = round_up_to_half(gl.max(third, 1), TAG_BITS)
    M: gl.constexpr = bound.type.layout
    a = gl.arange(0, BK // 16, gl.SliceLayout(1, M))[:, None]
    if RAGGED:
        c, there = slot_queries(places, STRIP, best.shape[2], gl.SliceLayout(0, M))
        at = (into + a) * queries + (c - first_query)[None, :]
        gl.store(to_third + at, bound, mask=there[None, :] & (a >= 0))
    else:
        c = gl.arange(0, best.shape[2], gl.SliceLayout(0, M))[None, :]
        gl.store(to_third + (into + a) * queries + c, bound)


@gluon.jit
def write_query_sums(into, total, row, places, STRIP: gl.constexpr, BQ: gl.constexpr, RAGGED: gl.constexpr):
    """Write one number per query."""
    if RAGGED:
        L: gl.constexpr = total.type.layout
        i, there = slot_queries(places, STRIP, BQ, L)
        gl.store(into + i, total, mask=there)
    else:
        i = row + gl.arange(0, BQ, total.type.layout)
        gl.store(into + i, total)


# A new value of one of these does not trigger a compilation.
LENGTHS = ["H", "group", "key_pairs", "slots", "first_pair", "first_tile", "tiles", "tokens", "strips", "columns_cut"]


@gluon.jit(do_not_specialize=LENGTHS)
def tile_statistics_hopper(
    q, k, lse, entropy, distance, largest, columns, picture, best, second, third, counter, q_memory,
    H, group, key_pairs, slots, first_pair, first_tile, tiles, scale, picture_lines, picture_columns,
    tokens, strips, columns_cut, q_batch, q_head, q_query,
    CAUSAL: gl.constexpr, ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, LARGEST: gl.constexpr,
    RECEIVED: gl.constexpr, PICTURE: gl.constexpr, TOP: gl.constexpr, TAG_BITS: gl.constexpr,
    BQ: gl.constexpr, STRIP: gl.constexpr, WIDE: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Program (pair, slot) takes every `slots`-th tile of queries; its results are those of tiles.py.

    q and k are tensor descriptors (B, H, T, D) with blocks of BQ and 2 * BK rows; T is 2 * BK * key_pairs.
    picture is (pairs, picture_lines, picture_columns). STRIP: queries of a cell in a tile. WIDE: the width of a cell in
    tiles, at least 1. LARGEST requires a positive scale, and is not combined with TOP, which finds it, too. With TOP
    registers are scarce: log-sum-exps stay in shared memory, and the next queries are loaded only after all results
    are written.

    RAGGED: for any number of `tokens`. `strips` strips of at most STRIP queries divide them evenly; a strip takes STRIP
    slots of a tile, those without a query have log-sum-exp inf and so no weight, which costs nothing. Only tiles on the
    diagonal or with the last keys are masked. Strips are the rows of a picture, or parts of one; its columns_cut
    columns may start anywhere (`write_cut_cells`). The queries are read from q_memory.
    """
    # The compiler must know that it is a multiple of 128, or it loads and stores one number at a time.
    T = tokens if RAGGED else key_pairs * (2 * BK)
    AHEAD: gl.constexpr = not (TOP or RAGGED)
    BY_KEY: gl.constexpr = RAGGED and PICTURE
    PHASES: gl.constexpr = 3 if RAGGED and CAUSAL else 2
    # One bound for both segments: a doubtful query reads more keys again, but queries are not doubtful more often.
    SHARED: gl.constexpr = TOP and DISTANCE
    SUMS: gl.constexpr = RECEIVED or PICTURE
    DOWN: gl.constexpr = BQ // STRIP
    D: gl.constexpr = q.block_type.shape[3]
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BQ, 16])
    pair = first_pair + gl.program_id(0) // slots
    slot = gl.program_id(0) % slots
    b = pair // H
    h = pair % H
    wide = pair.to(gl.int64)
    lse += wide * T
    entropy += wide * T
    distance += wide * T
    largest += wide * (gl.cdiv(strips * STRIP, BQ) if RAGGED else T // BQ)
    columns += (wide * slots + slot) * T
    picture += wide * picture_lines * picture_columns
    scale = scale * LOG2_E
    cut = (T, columns_cut, 1.0 / T, 1.0 / columns_cut)
    first_query = 0
    candidate_queries = tiles * BQ
    if RAGGED:
        q_memory += b.to(gl.int64) * q_batch + h.to(gl.int64) * q_head
        first_query = strip_start(first_tile * DOWN, T, strips)
        candidate_queries = strip_start((first_tile + tiles) * DOWN, T, strips) - first_query
    q_buffer = gl.allocate_shared_memory(q.dtype, [1, 1, BQ, D], q.layout)
    k_buffers = gl.allocate_shared_memory(k.dtype, [2, 1, 1, 2 * BK, D], k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for m in gl.static_range(2):
        mbarrier.init(k_full.index(m), count=1)
    rows_buffer = gl.allocate_shared_memory(gl.float32, [BQ], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = q_buffer.reshape((BQ, D)).permute((1, 0))
    # Later launches for the same pairs continue the sums.
    if RECEIVED and first_tile == 0:
        zero_sums(columns, 0, T)
    if TOP:  # noqa: SIM102 (a condition on a constant must stand alone)
        if (first_pair == 0) & (first_tile == 0) & (gl.program_id(0) == 0):
            gl.store(counter, 0)
    barrier()
    counted = 0
    done = 0
    zero_tile = gl.zeros((BK, BQ), gl.float32, MMA)
    zeros, _ = split_row_halves(zero_tile)
    masked = gl.full_like(zeros, MASKED_LOGIT)
    lowest = gl.full_like(sum_per_thread(zeros), -float("inf"))
    no_sums = strip_sums(zero_tile, STRIP, BY_KEY)
    tile = tile_index(0, slot, slots, first_tile, tiles)
    pairs = 0
    if AHEAD:
        pairs = fetch_first_tiles(
            q, q_buffer, q_full, k, k_buffers, k_full, b, h, h // group, tile, T, counted, T, CAUSAL, BQ, RAGGED
        )
    for iteration in range(gl.cdiv(tiles, slots)):
        if not AHEAD:
            tile = tile_index(iteration, slot, slots, first_tile, tiles)
        if tile >= 0:
            if RAGGED:
                places = strip_starts(tile * DOWN, T, strips, DOWN)
                stop = places[DOWN]
            else:
                places = (0, 0)
                stop = T
            if not AHEAD:
                pairs = fetch_first_tiles(
                    q, q_buffer, q_full, k, k_buffers, k_full, b, h, h // group, tile, stop, counted, T,
                    CAUSAL, BQ, RAGGED,
                )  # fmt: skip
            row = tile * BQ
            if RAGGED:
                load_queries(q_memory, q_query, q_buffer, places, STRIP, BQ, D)
                i, there = slot_queries(places, STRIP, BQ, gl.SliceLayout(0, MMA))
                rows = gl.load(lse + i, mask=there, other=-float("inf"))
            else:
                rows = gl.load(lse + row + gl.arange(0, BQ, gl.SliceLayout(0, MMA)))
            rows = gl.where(rows == -float("inf"), -MASKED_LOGIT, rows * LOG2_E)
            if TOP:
                rows_buffer.store(rows)
                rows = rows_buffer
            cells_at = picture + (row // STRIP).to(gl.int64) * picture_columns
            if PICTURE:
                # Cells that no tile visits, or that several tiles add to.
                for line in gl.static_range(DOWN):
                    visited = pairs * ((2 if RAGGED else 1) * 2 * BK // 16) if WIDE == 1 else 0
                    zero_sums(cells_at + line * picture_columns, visited, picture_columns)
                if WIDE > 1:
                    barrier()
            if not RAGGED:
                mbarrier.wait(q_full, done & 1)
            even = start_first_product(k_buffers, k_full, queries, zero_tile, 0, counted, pairs)
            sums, before = no_sums, -1
            sum_entropy, sum_distance, highest = zeros, group_by_thread(zeros), lowest
            best0, second0, third0 = masked, masked, masked
            best1, second1, third1 = masked, masked, masked
            dots = warpgroup_mma_wait(0, [even])
            for edge in gl.static_range(PHASES):
                for n in range(edge, pairs if edge == PHASES - 1 else (1 if edge == 0 else gl.minimum(2, pairs))):
                    # One product is in flight at any time, none at the end of an iteration.
                    u = pair_index(n, pairs, RAGGED)
                    odd = start_product(k_buffers, (counted + n) & 1, queries, zero_tile, 1)
                    if edge > 0:
                        write_earlier_tile(
                            before, sums, columns, cells_at, picture_columns, cut,
                            RECEIVED, PICTURE, DOWN, WIDE, RAGGED,
                        )  # fmt: skip
                    sum_entropy, sum_distance, highest, best0, second0, third0, sums = process_tile(
                        dots, 2 * u, u, row, places, rows, sum_entropy, sum_distance, highest, best0, second0, third0,
                        sums, scale, T, CAUSAL, (CAUSAL or RAGGED) and edge < PHASES - 1,
                        ENTROPY, DISTANCE, LARGEST, SUMS, TOP, TAG_BITS, STRIP, RAGGED, BY_KEY,
                    )  # fmt: skip
                    other, sum_entropy = warpgroup_mma_wait(0, [odd, sum_entropy])
                    even = start_first_product(k_buffers, k_full, queries, zero_tile, n + 1, counted, pairs)
                    fetch_key_pair(k, k_buffers, k_full, b, h // group, n + 2, counted, pairs, RAGGED)
                    write_earlier_tile(
                        2 * u, sums, columns, cells_at, picture_columns, cut, RECEIVED, PICTURE, DOWN, WIDE, RAGGED
                    )
                    if SHARED:
                        third1 = third0
                    sum_entropy, sum_distance, highest, best1, second1, third1, sums = process_tile(
                        other, 2 * u + 1, u, row, places, rows, sum_entropy, sum_distance, highest, best1, second1,
                        third1, sums, scale, T, CAUSAL, (CAUSAL or RAGGED) and edge < PHASES - 1,
                        ENTROPY, DISTANCE, LARGEST, SUMS, TOP, TAG_BITS, STRIP, RAGGED, BY_KEY,
                    )  # fmt: skip
                    if SHARED:
                        third0 = third1
                    dots, sum_entropy = warpgroup_mma_wait(0, [even, sum_entropy])
                    before = 2 * u + 1
            counted += pairs
            done += 1
            if AHEAD:
                # Load the next queries and keys while the rest is written.
                tile = tile_index(iteration + 1, slot, slots, first_tile, tiles)
                pairs = fetch_first_tiles(
                    q, q_buffer, q_full, k, k_buffers, k_full, b, h, h // group, tile, stop, counted, T,
                    CAUSAL, BQ, RAGGED,
                )  # fmt: skip
            write_earlier_tile(
                before, sums, columns, cells_at, picture_columns, cut, RECEIVED, PICTURE, DOWN, WIDE, RAGGED
            )
            if TOP:
                into = (wide - first_pair) * 2 * (BK // 16)
                at = 0 if RAGGED else row - first_tile * BQ
                candidates = (best + at, second + at, third + at)
                if SHARED:
                    third1 = third0
                write_candidates(
                    best0, second0, third0, candidates, into, candidate_queries, places, first_query,
                    TAG_BITS, STRIP, RAGGED,
                )  # fmt: skip
                write_candidates(
                    best1, second1, third1, candidates, into + BK // 16, candidate_queries, places, first_query,
                    TAG_BITS, STRIP, RAGGED,
                )  # fmt: skip
            if ENTROPY:
                total = 0.0 - gl.sum(gl.sum(sum_entropy, 1), 0) * LN_2
                write_query_sums(entropy, total, row, places, STRIP, BQ, RAGGED)
            if DISTANCE:
                total = gl.sum(gl.sum(sum_distance, 1), 0).reshape((BQ,))
                write_query_sums(distance, total, row, places, STRIP, BQ, RAGGED)
            if LARGEST:
                gl.store(largest + row // BQ, gl.max(gl.max(gl.max(highest, 2), 1), 0) * (scale * LN_2))
            if not AHEAD:
                # All threads have read the queries.
                barrier()
