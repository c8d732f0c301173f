"""Forward of attention with a bias that depends on the distance of query and key.

The bias is a row table: for every query, one value per distance from -clip to clip; larger distances share the ends.
T5's buckets are a table that all queries share (its row stride is 0). Shaw's relative keys give each query its own row,
q · keys[distance]. A tile near the diagonal reads one value per entry, a tile far from it only one value per row.

Shaw's relative values need the weights by distance, the `band`. Inside the clip a distance belongs to one key, so its
logit is stored; beyond the clip the weights are summed.

B batch, H heads, Tq queries, Tk keys, D width, Dv value width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.dropout import dropout_keeps
from foci.kernels.logits import LOG2_E, apply_masks, key_range, tanh

# A new value of one of these does not trigger a compilation: lengths, counts, and strides that follow from lengths.
DISTANCE_BIAS_LENGTHS = [
    "H", "group", "Tq", "Tk", "first_b", "first_h", "peaks_batch", "peaks_head", "key_ranges_batch", "query_ids_batch",
    "key_ids_batch", "dense_batch", "dense_head", "dense_query", "dense_key", "threshold", "query_tiles_batch",
    "common_keys_batch",
]  # fmt: skip


@triton.jit
def load_rows(base, stride, first, r, count, c, width, EVEN: tl.constexpr):
    """Load the rows first + r of a matrix (count, width); zeros outside. Only the first row needs a 64-bit offset."""
    pointers = base + first.to(tl.int64) * stride + (r[:, None] * stride + c[None, :])
    there = first + r[:, None] < count
    if not EVEN:
        there = there & (c[None, :] < width)
    return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def clip_side(first_i, first_j, offset, clip, BM: tl.constexpr, BN: tl.constexpr):
    """-1 if all keys of the tile are at least `clip` before its queries, 1 if at least `clip` after them, else 0."""
    before = (first_j + (BN - 1) - first_i - offset <= -clip).to(tl.int32)
    behind = (first_j - (first_i + (BM - 1)) - offset >= clip).to(tl.int32)
    return behind - before


@triton.jit
def gather_floats(table, offsets, DIRECT: tl.constexpr):
    """Load single floats of a row table; every offset must be valid.

    Triton would load rows and convert their layout through shared memory, together with half of the softmax. DIRECT
    lets each thread load the floats that it needs.
    """
    if DIRECT:
        floats = tl.inline_asm_elementwise(
            "{ .reg .b64 at; mad.wide.s32 at, $2, 4, $1; ld.global.nc.f32 $0, [at]; }",
            "=f,l,r", [table.to(tl.int64), offsets], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        floats = tl.load(table + offsets)
    return floats


@triton.jit
def scatter_floats(table, offsets, floats, wanted, DIRECT: tl.constexpr):
    """Store single floats from the threads that hold them, where wanted."""
    if DIRECT:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 at; setp.ne.s32 p, $4, 0; mad.wide.s32 at, $2, 4, $1;"
            " @p st.global.f32 [at], $3; mov.b32 $0, 0; }",
            "=r,l,r,f,r", [table.to(tl.int64), offsets, floats, wanted.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(table + offsets, floats, mask=wanted)


@triton.jit
def apply_tile_masks(
    seen, i, j, first_i, first_j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk,
    IDS: tl.constexpr, DENSE: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Apply document ids and the dense mask to the visibility of a tile; DIRECT loads bytes as in `gather_floats`."""
    seen = apply_masks(seen, i, j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk, IDS, DENSE and not DIRECT)
    if DENSE and DIRECT:
        dense += first_i.to(tl.int64) * dense_query + first_j.to(tl.int64) * dense_key
        # Rows and columns past the end read the last valid ones.
        offsets = (tl.minimum(i, Tq - 1) - first_i) * dense_query + (tl.minimum(j, Tk - 1) - first_j) * dense_key
        bytes_loaded = tl.inline_asm_elementwise(
            "{ .reg .b64 at; .reg .b16 byte; cvt.s64.s32 at, $2; add.s64 at, at, $1; ld.global.nc.u8 byte, [at];"
            " cvt.u32.u16 $0, byte; }",
            "=r,l,r", [dense.to(tl.int64), offsets], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        seen = seen & (bytes_loaded != 0)
    return seen


@triton.jit
def distance_index(i, j, offset, clip):
    """The column of a distance in a row table."""
    return tl.minimum(tl.maximum(j - i - offset, -clip), clip) + clip


@triton.jit
def locate_table_rows(table, h, rows, width, TABLE: tl.constexpr):
    """The start of a tile's rows in the table, and their stride: TABLE 2 has one row per head."""
    if TABLE == 2:
        start, step = table + h * width, 0
    else:
        start, step = table + rows, width
    return start, step


@triton.jit
def load_table_ends(table, rows, inside, clip, TABLE: tl.constexpr):
    """Load the bias of all distances beyond the clip, on both sides: scalars for TABLE 2, else columns."""
    if TABLE == 2:
        left, right = tl.load(table), tl.load(table + 2 * clip)
    else:
        left = tl.load(table + rows, mask=inside, other=0.0)[:, None]
        right = tl.load(table + rows + 2 * clip, mask=inside, other=0.0)[:, None]
    return left, right


@triton.jit
def multiply_rounded(a, b, DIRECT: tl.constexpr):
    """a * b, rounded before any later addition.

    The compiler would fuse it with a sum in one kernel and not in another, and the logits of forward and backward would
    differ in the last bit.
    """
    if DIRECT:
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        product = a * b
    return product


@triton.jit
def distance_bias_logits(
    dots, table_bias, i, j, offset, slope, scale, softcap,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Logits in base 2, softcap(scale * dots) + bias, and the tanh of the softcap.

    table_bias is the bias of the row table. TABLE is 0 for none, 1 if it is added before scaling, 2 if after. ALiBi may
    be large, and rounding its slope once more would cost float32 a digit: EXACT converts to base 2 last, and rounds
    each step.
    """
    tanh_softcap = dots
    base = 1.0 if EXACT else LOG2_E
    if TABLE == 1:
        dots += table_bias
    if SOFTCAP:
        tanh_softcap = tanh(dots * (scale / softcap))
        z = multiply_rounded(tanh_softcap, softcap * base, EXACT and DIRECT)
    else:
        z = multiply_rounded(dots, scale * base, EXACT and DIRECT)
    if TABLE == 2:
        z += table_bias * base
    if ALIBI:
        distance = (i + offset).to(tl.float32) - j.to(tl.float32)
        z -= multiply_rounded(tl.abs(distance), slope * base, EXACT and DIRECT)
    if EXACT:
        z = multiply_rounded(z, LOG2_E, DIRECT)
    return z, tanh_softcap


@triton.jit(do_not_specialize=DISTANCE_BIAS_LENGTHS)
def distance_bias_forward(
    q, k, v, out, peaks, log_sums, table, band, key_ranges, query_ids, key_ids, dense, slopes, seed,
    H, group, Tq, Tk, D, Dv, clip, first_b, first_h,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, peaks_batch, peaks_head,
    key_ranges_batch, query_ids_batch, key_ids_batch, dense_batch, dense_head, dense_query, dense_key,
    scale, softcap, threshold, keep_scale,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, TABLE: tl.constexpr, BAND: tl.constexpr, DROPOUT: tl.constexpr,
    EXACT: tl.constexpr, EVEN: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program per tile of queries of one head; it loops over the keys with an online softmax.

    out (B, H, Tq, Dv); peaks and log_sums (B, H, Tq): the largest logit of a row and the rest of its log-sum-exp, in
    base 2, stored separately to keep more digits; band (B, H, Tq, 2 clip + 1): logits inside the clip, in base 2, and
    sums of weights at its two ends.
    """
    tiles = tl.cdiv(Tq, BM)
    pair = tl.program_id(0) // tiles
    # The last queries first: under a causal mask they take longest, and the short programs fill the gaps at the end.
    first_i = (tiles - 1 - tl.program_id(0) % tiles) * BM
    b, h = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    g = h // group
    offset = Tk - Tq
    r, c, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    rows = first_i + r
    i, inside = rows[:, None], rows < Tq
    queries = load_rows(q + b * q_batch + h * q_head, q_row, first_i, r, Tq, d, D, EVEN)
    k += b * k_batch + g * k_head
    v += b * v_batch + g * v_head
    width = 2 * clip + 1
    own_band = (pair.to(tl.int64) * Tq + first_i) * width
    band += own_band
    table, row = locate_table_rows(table, h, own_band, width, TABLE)
    # Rows past the end read the same values as the last one.
    table_rows = (tl.minimum(r, Tq - 1 - first_i) * row)[:, None]
    key_ranges += b * key_ranges_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h * dense_head
    slope = tl.load(slopes + h) if ALIBI else 0.0
    random_seed = tl.load(seed) if DROPOUT else 0
    if TABLE > 0:
        left_end, right_end = load_table_ends(table, r * row, inside, clip, TABLE)
    peak = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    left = tl.zeros((BM,), tl.float32)
    right = tl.zeros((BM,), tl.float32)
    mean = tl.zeros((BM, BV), tl.float32)
    for s in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = key_range(key_ranges, s, rows, offset, Tq, Tk, CAUSAL, RANGES)
        some = high > low
        first = tl.min(tl.where(some, low, Tk), 0) // BN
        last = tl.cdiv(tl.max(tl.where(some, high, 0), 0), BN)
        # From tile `full` to tile `end`, every query sees every key.
        full = tl.cdiv(tl.max(low, 0), BN)
        end = tl.min(tl.where(inside, high, Tk), 0) // BN
        for t in range(first, last):
            first_j = t * BN
            j = first_j + c[None, :]
            keys = load_rows(k, k_row, first_j, c, Tk, d, D, EVEN)
            dots = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            far = clip_side(first_i, first_j, offset, clip, BM, BN)
            plain = (t >= full) & (t < end)
            if TABLE > 0:
                plain = plain & (far != 0)
            if IDS or DENSE:
                plain = plain & False
            # Triton does not pipeline a loop whose branches repeat the whole body: only what differs is in a branch.
            table_bias = dots
            if TABLE > 0:
                if plain:
                    table_bias = tl.broadcast_to(tl.where(far < 0, left_end, right_end), (BM, BN))
                else:
                    table_bias = gather_floats(table, table_rows + distance_index(i, j, offset, clip), DIRECT)
            z, _ = distance_bias_logits(
                dots, table_bias, i, j, offset, slope, scale, softcap, TABLE, SOFTCAP, ALIBI, EXACT, DIRECT
            )
            if not plain:
                seen = (j >= low[:, None]) & (j < high[:, None])
                seen = apply_tile_masks(
                    seen, i, j, first_i, first_j, query_ids, key_ids, dense, dense_query, dense_key, Tq, Tk,
                    IDS, DENSE, DIRECT,
                )  # fmt: skip
                z = tl.where(seen, z, -float("inf"))
                if BAND:
                    column = distance_index(i, j, offset, clip)
                    near = seen & (column > 0) & (column < 2 * clip)
                    scatter_floats(band, r[:, None] * width + column, z, near, DIRECT)
            higher = tl.maximum(peak, tl.max(z, 1))
            # A row without a visible key so far has the peak -inf: -inf - 0 is not NaN.
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            alpha = tl.exp2(peak - safe)
            p = tl.exp2(z - safe[:, None])
            peak = higher
            mass = tl.sum(p, 1)
            total = total * alpha + mass
            if BAND:
                if plain:
                    to_left = tl.where(far < 0, mass, 0.0)
                    to_right = tl.where(far < 0, 0.0, mass)
                else:
                    column = distance_index(i, j, offset, clip)
                    to_left = tl.sum(tl.where(column == 0, p, 0.0), 1)
                    to_right = tl.sum(tl.where(column == 2 * clip, p, 0.0), 1)
                left = left * alpha + to_left
                right = right * alpha + to_right
            if DROPOUT:
                p = tl.where(dropout_keeps(random_seed, b + first_b, h + first_h, i, j, threshold), p * keep_scale, 0.0)
            values = load_rows(v, v_row, first_j, c, Tk, e, Dv, EVEN)
            mean = mean * alpha[:, None]
            mean += tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
    empty = total == 0.0
    share = 1.0 / tl.where(empty, 1.0, total)
    mean = mean * share[:, None]
    out += b * out_batch + h * out_head + first_i.to(tl.int64) * out_row
    there = inside[:, None] & (e[None, :] < Dv)
    tl.store(out + (r[:, None] * out_row + e[None, :]), mean.to(out.dtype.element_ty), mask=there)
    at = b * peaks_batch + h * peaks_head + rows
    tl.store(peaks + at, peak, mask=inside)
    tl.store(log_sums + at, tl.log2(tl.where(empty, 1.0, total)), mask=inside)
    if BAND:
        tl.store(band + r * width, left * share, mask=inside)
        tl.store(band + r * width + 2 * clip, right * share, mask=inside)
