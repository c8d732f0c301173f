"""The top k keys of each query, selected from the candidates of the tile pass (tiles.py).

The tile pass keeps, per query and class of keys, the two largest logits with their positions, and an upper bound of the
third. `choose_topk` selects the k largest of these. A key that was not kept can be among them only if both candidates
of its class were selected and the bound reaches the last selected logit. The lowest bits of a candidate hold its
position, so its logit is truncated: keys equal to the last selected one up to truncation are ambiguous. Queries with
such classes are few; they are put on a list, and `refine_topk` reads the keys of those classes again.

For half-precision inputs, the weights are those of the candidates' logits: their missing bits are far below the
precision of the inputs. For float32 the logits are computed again.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.logits import LN_2, MASKED_LOGIT, apply_masks, key_range, load_lse
from foci.kernels.statistics.additive_logits import additive_terms
from foci.kernels.statistics.biased_logits import entry_logits, locate_bias
from foci.kernels.statistics.sort import has_ties, merge_larger_halves, reverse_list, select_largest, sort_lists

# Larger than any key, for minima over keys.
NO_KEY = tl.constexpr(2147483647)
# Class flags that are stored in one int32.
FLAGS_PER_WORD = tl.constexpr(16)
# A new value of one of these does not trigger a compilation.
LENGTHS = [
    "H", "group", "Tq", "Tk", "key_ranges_batch", "query_ids_batch", "key_ids_batch", "dense_batch", "dense_head",
    "dense_query", "dense_key", "first_pair", "first_query", "queries", "segments", "tags",
    "bias_batch", "bias_head", "bias_query", "clip", "weight_head",
]  # fmt: skip


@triton.jit
def locate_key(klass, tag, segments, BK: tl.constexpr):
    """The key of a class and tag. A tag is the tile index in its segment times 2, plus the row half."""
    index = klass % (BK // 2)
    tile = (tag >> 1) * segments + klass // (BK // 2)
    return tile * BK + (index // 8) * 16 + index % 8 + (tag & 1) * 8


@triton.jit
def load_with_label(pointers, label, there, LABEL_BITS: tl.constexpr):
    """Load logits and replace their tags by unique labels, so that no two logits of a query are equal."""
    bits = tl.load(pointers, mask=there, other=MASKED_LOGIT).to(tl.int32, bitcast=True)
    return ((bits & (-(1 << LABEL_BITS))) | label).to(tl.float32, bitcast=True)


@triton.jit
def clear_label(x, LABEL_BITS: tl.constexpr):
    return (x.to(tl.int32, bitcast=True) & (-(1 << LABEL_BITS))).to(tl.float32, bitcast=True)


@triton.jit
def append_rows(listed, counter, row, flagged):
    """Append the flagged rows to the list, in any order; they are processed independently."""
    base = tl.atomic_add(counter, tl.sum(flagged.to(tl.int32), 0))
    tl.store(listed + base + tl.cumsum(flagged.to(tl.int32), 0) - 1, row, mask=flagged)


@triton.jit
def find_tied_classes(best, second, last, klass, column, valid, queries, LABEL_BITS: tl.constexpr):
    """Which classes (1, N) have an unselected candidate that ties with the last selected one: (R, N)."""
    x = load_with_label(best + klass * queries + column, 2 * klass, valid, LABEL_BITS)
    y = load_with_label(second + klass * queries + column, 2 * klass + 1, valid, LABEL_BITS)
    left = tl.where(x < last, x, tl.where(y < last, y, MASKED_LOGIT))
    return (clear_label(left, LABEL_BITS) >= clear_label(last, LABEL_BITS)) & (last > MASKED_LOGIT / 2) & valid


@triton.jit
def flag_doubtful_rows(
    x, left, best, second, third, flags, listed, counter, column, valid, row, queries,
    TOP: tl.constexpr, CLASSES: tl.constexpr, LABEL_BITS: tl.constexpr,
):  # fmt: skip
    """Put queries whose last selected key is undecided on the list, and flag each class that may hold a better key."""
    slot = tl.arange(0, x.shape[1])[None, :]
    last = tl.min(tl.where(slot < TOP, x, float("inf")), 1)
    if x.shape[1] > TOP:
        left = tl.maximum(left, clear_label(tl.max(tl.where(slot < TOP, MASKED_LOGIT, x), 1), LABEL_BITS))
    # Logits are truncated: a key that ties with the last selected one may have the larger logit.
    tied = (left >= clear_label(last, LABEL_BITS)) & (last > MASKED_LOGIT / 2) & valid
    label = x.to(tl.int32, bitcast=True) & ((1 << LABEL_BITS) - 1)
    klass = (label >> 1) % CLASSES
    both = (label % 2 == 1) & (x > MASKED_LOGIT / 2) & (slot < TOP) & valid[:, None]
    rest = tl.load(third + (klass // 8) * queries + column[:, None], mask=both, other=-float("inf"))
    hidden = both & (rest.to(tl.float32) >= clear_label(last, LABEL_BITS)[:, None])
    doubtful = tied | (tl.max(hidden.to(tl.int32), 1) > 0)
    if tl.max(doubtful.to(tl.int32), 0) > 0:
        some_tied = tl.max(tied.to(tl.int32), 0) > 0
        within = tl.arange(0, FLAGS_PER_WORD)[None, :]
        for word in range(CLASSES // FLAGS_PER_WORD):
            bits = tl.sum(tl.where(hidden & (klass // FLAGS_PER_WORD == word), 1 << (klass % FLAGS_PER_WORD), 0), 1)
            if some_tied:
                more = find_tied_classes(
                    best, second, last[:, None], word * FLAGS_PER_WORD + within, column[:, None], valid[:, None],
                    queries, LABEL_BITS,
                )  # fmt: skip
                bits |= tl.sum(tl.where(more, 1 << within, 0), 1)
            tl.store(flags + row.to(tl.int64) * (CLASSES // FLAGS_PER_WORD) + word, bits, mask=doubtful)
        append_rows(listed, counter, row, doubtful)


@triton.jit
def pick_candidates(
    best, second, column, valid, queries,
    CLASSES: tl.constexpr, LABEL_BITS: tl.constexpr, LOG_N: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """The 2 ** LOG largest candidates of each query in order, labelled, (R, 2 ** LOG); and the maximum of the rest.

    best and second (CLASSES, queries). An iteration takes 2 ** LOG_N classes.
    """
    klass = tl.arange(0, 1 << LOG_N)[None, :]
    there = valid[:, None] & (klass < CLASSES)
    x = load_with_label(best + klass * queries + column[:, None], 2 * klass, there, LABEL_BITS)
    x, left = select_largest(x, LOG_N, LOG)
    for start in range(1 << LOG_N, CLASSES, 1 << LOG_N):
        at = best + (start + klass) * queries + column[:, None]
        more, rest = select_largest(load_with_label(at, 2 * (start + klass), valid[:, None], LABEL_BITS), LOG_N, LOG)
        left = tl.maximum(left, rest)
        x, rest = merge_larger_halves(x, reverse_list(more, LOG), LOG)
        left = tl.maximum(left, rest)
    # The second candidate of a class counts only if the first one was selected.
    label = x.to(tl.int32, bitcast=True) & ((1 << LABEL_BITS) - 1)
    there = valid[:, None] & ((label >> 1) < CLASSES)
    y = load_with_label(second + (label >> 1) * queries + column[:, None], label | 1, there, LABEL_BITS)
    x, rest = merge_larger_halves(x, reverse_list(sort_lists(y, LOG), LOG), LOG)
    return x, clear_label(tl.maximum(left, rest), LABEL_BITS)


@triton.jit
def reload_candidates(best, second, x, column, queries, CLASSES: tl.constexpr, LABEL_BITS: tl.constexpr):
    """Load the candidates of the labels (R, 2 ** LOG) again, with their tags."""
    label = x.to(tl.int32, bitcast=True) & ((1 << LABEL_BITS) - 1)
    places = ((label >> 1) % CLASSES) * queries + column[:, None]
    real = x > MASKED_LOGIT / 2
    return tl.load(tl.where(label % 2 == 0, best, second) + places, mask=real, other=0.0).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=LENGTHS)
def choose_topk(
    q, k, lse, slopes, bias, weight, best, second, third, values, keys, largest_logits, flags, listed, counter,
    H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, bias_batch, bias_head, bias_query, clip,
    weight_head, scale, softcap, first_pair, first_query, queries, segments,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ADDITIVE: tl.constexpr, PTX: tl.constexpr,
    EXACT: tl.constexpr, LARGEST: tl.constexpr,
    TOP: tl.constexpr, CLASSES: tl.constexpr, LOG_N: tl.constexpr, LOG: tl.constexpr, BK: tl.constexpr,
    TAG_BITS: tl.constexpr, LABEL_BITS: tl.constexpr,
    R: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Select the top keys of R queries of one pair, and their weights, in order.

    A thread takes one query and holds all of its candidates; neighbouring threads read neighbouring addresses. best and
    second are (pairs, CLASSES, queries), third (pairs, CLASSES // 8, queries), flags (rows, CLASSES // FLAGS_PER_WORD),
    where a row is one query of any pair. EXACT computes the logits again instead of using those of the candidates.
    """
    local = tl.program_id(1).to(tl.int64)
    best += local * CLASSES * queries
    second += local * CLASSES * queries
    third += local * (CLASSES // 8) * queries
    pair = first_pair + tl.program_id(1)
    # Hide the alignment: with it, a thread would read four queries at a time, and hold only a part of their keys.
    column = tl.multiple_of(tl.program_id(0) * R + tl.arange(0, R), [1])
    i = first_query + column
    valid = (column < queries) & (i < Tq)
    row = pair * Tq + i
    x, left = pick_candidates(best, second, column, valid, queries, CLASSES, LABEL_BITS, LOG_N, LOG)
    flag_doubtful_rows(
        x, left, best, second, third, flags, listed, counter, column, valid, row, queries, TOP, CLASSES, LABEL_BITS
    )
    bits = reload_candidates(best, second, x, column, queries, CLASSES, LABEL_BITS)
    slot = tl.arange(0, 1 << LOG)[None, :]
    # Only selected keys are sorted: `flag_doubtful_rows` flagged the classes of all others that tie with them.
    real = (x > MASKED_LOGIT / 2) & (slot < TOP)
    klass = ((x.to(tl.int32, bitcast=True) & ((1 << LABEL_BITS) - 1)) >> 1) % CLASSES
    found = tl.where(real, locate_key(klass, bits & ((1 << TAG_BITS) - 1), segments, BK), -1)  # (R, slots)
    into = row.to(tl.int64)[:, None] * TOP
    rows = load_lse(lse + pair.to(tl.int64) * Tq, i, Tq)
    # A query whose log-sum-exp is NaN has NaN for its weights, unlike a fully masked one, and no keys.
    is_nan = rows != rows
    empty = tl.where(is_nan, float("nan"), 0.0)[:, None]
    real &= ~is_nan[:, None]
    if EXACT:
        b = (pair // H).to(tl.int64)
        h = pair % H
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + h)
        q += b * q_batch + h.to(tl.int64) * q_head
        k += b * k_batch + (h // group).to(tl.int64) * k_head
        own_weight = weight + h.to(tl.int64) * weight_head
        # Products go through the memory of the weights, because threads that read a key together share a query.
        for n in range(TOP):
            one = value_at_slot(found, n)[:, None]
            dots = key_products(
                q, k, own_weight, i, one, valid, one >= 0, D, q_query, k_key, ADDITIVE, PTX, BD, STEP, EVEN
            )
            tl.store(values + into + n, dots, mask=valid[:, None])
        tl.debug_barrier()
        y = tl.load(values + into + slot, mask=found >= 0, other=0.0)
        tl.debug_barrier()
        y = entry_logits(
            y, locate_bias(bias, b, h, 0, bias_batch, bias_head, bias_query), i[:, None], found, Tk - Tq, Tq, clip,
            bias_query, slope, scale, softcap, TABLE, SOFTCAP, ALIBI,
        )  # fmt: skip
        y = tl.where(real, y - rows[:, None], MASKED_LOGIT)
        store_topk(y, found, rank_slots(y, found), values + into, keys + into, valid[:, None], empty, TOP)
    else:
        # Replace the lost bits by their middle value.
        y = ((bits & (-(1 << TAG_BITS))) | (1 << (TAG_BITS - 1))).to(tl.float32, bitcast=True)
        y = tl.where(real, y, MASKED_LOGIT)
        if tl.max(has_ties(tl.where(real, clear_label(x, LABEL_BITS), x)).to(tl.int32), 0) > 0:
            store_topk(y, found, rank_slots(y, found), values + into, keys + into, valid[:, None], empty, TOP)
        else:
            store_topk(y, found, slot, values + into, keys + into, valid[:, None], empty, TOP)
    if LARGEST:
        top_value = tl.max(y, 1)
        largest = tl.where(top_value > MASKED_LOGIT / 2, (top_value + rows) * LN_2, -float("inf"))
        tl.store(largest_logits + row, tl.where(is_nan, rows, largest), mask=valid)


@triton.jit
def key_products(
    q, k, weight, i, j, valid, there, D, q_query, k_key,
    ADDITIVE: tl.constexpr, PTX: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The score of query i and each key j before the scale, if both exist: i (R,), j (R, N) -> (R, N)."""
    shape: tl.constexpr = (j.shape[0], j.shape[1], STEP)
    total = tl.zeros(shape, tl.float32)
    row = q + i.to(tl.int64)[:, None, None] * q_query
    keys = k + j.to(tl.int64)[:, :, None] * k_key
    valid = valid[:, None, None]
    there = there[:, :, None]
    # Not unrolled: all rows of keys at once would not fit the registers.
    for start in range(0, BD, STEP):
        d = (start + tl.arange(0, STEP))[None, None, :]
        a = tl.load(row + d, mask=valid if EVEN else valid & (d < D), other=0.0)
        b = tl.load(keys + d, mask=there if EVEN else there & (d < D), other=0.0)
        # Reduced at the end: a sum across lanes in every iteration would delay the next keys.
        if ADDITIVE:
            w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
            total += additive_terms(a.to(tl.float32), b.to(tl.float32), w, PTX)
        else:
            total += a.to(tl.float32) * b.to(tl.float32)
    return tl.sum(total, 2)


@triton.jit
def insert_sorted(x, keys, more, j, SLOTS: tl.constexpr):
    """Insert each of `more` (1, N) that beats the worst of the list (1, SLOTS) in its place."""
    slot = tl.arange(0, SLOTS)[None, :]
    # Most keys that are read again beat none of the list: the loop skips them.
    more = tl.where(more >= tl.min(x, 1)[:, None], more, MASKED_LOGIT)
    while tl.max(tl.max(more, 1), 0) > MASKED_LOGIT / 2:
        top_value = tl.max(more, 1)
        key = tl.min(tl.where(more == top_value[:, None], j, NO_KEY), 1)
        worst = tl.min(x, 1)
        worst_key = tl.max(tl.where(x == worst[:, None], keys, -1), 1)
        better = (top_value > worst) | ((top_value == worst) & (key < worst_key))
        is_worst = (x == worst[:, None]) & (keys == worst_key[:, None])
        here = better[:, None] & (slot == tl.min(tl.where(is_worst, slot, SLOTS), 1)[:, None])
        x = tl.where(here, top_value[:, None], x)
        keys = tl.where(here, key[:, None], keys)
        more = tl.where(better[:, None] & (j != key[:, None]), more, MASKED_LOGIT)
    return x, keys


@triton.jit
def value_at_slot(x, n):
    """The value of slot n: x (R, slots), integers of at least -1 -> (R,)."""
    return tl.max(tl.where(tl.arange(0, x.shape[1])[None, :] == n, x, -1), 1)


@triton.jit
def rank_slots(x, found):
    """The rank of each slot: the number of slots before it, by weight, then by key. Empty slots keep their order."""
    slot = tl.arange(0, x.shape[1])[None, :]
    rank = tl.zeros(x.shape, tl.int32)
    for n in range(x.shape[1]):
        key = value_at_slot(found, n)[:, None]
        other = tl.max(tl.where(slot == n, x, -float("inf")), 1)[:, None]
        first = (key < found) | ((key == found) & (n < slot))
        rank += ((other > x) | ((other == x) & first)).to(tl.int32)
    return rank


@triton.jit
def rank_slots_at_once(x, found):
    """As `rank_slots`, for one query that all threads share; in a loop they would wait for each other."""
    slot = tl.arange(0, x.shape[1])
    other, key = x[:, None, :], found[:, None, :]
    alike = (key == found[:, :, None]) & (slot[None, None, :] < slot[None, :, None])
    ahead = (other > x[:, :, None]) | ((other == x[:, :, None]) & ((key < found[:, :, None]) | alike))
    return tl.sum(ahead.to(tl.int32), 2)


@triton.jit
def store_topk(x, found, rank, values, keys, valid, empty, TOP: tl.constexpr):
    """Store weights and keys by rank: x, found, rank (R, slots); values, keys (R, 1) pointers. empty: without a key."""
    real = x > MASKED_LOGIT / 2
    there = valid & (rank < TOP)
    tl.store(values + rank, tl.where(real, tl.exp2(x), empty), mask=there)
    tl.store(keys + rank, tl.where(real, found, -1), mask=there)


@triton.jit(do_not_specialize=LENGTHS)
def refine_topk(
    q, k, lse, key_ranges, query_ids, key_ids, dense, slopes, bias, weight,
    flags, listed, counter, values, keys, largest_logits,
    H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, key_ranges_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key,
    bias_batch, bias_head, bias_query, clip, weight_head, scale, softcap, segments, tags,
    CAUSAL: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    TABLE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ADDITIVE: tl.constexpr, PTX: tl.constexpr,
    LARGEST: tl.constexpr,
    TOP: tl.constexpr, SLOTS: tl.constexpr, CLASSES: tl.constexpr, BK: tl.constexpr,
    READ: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Programs share the queries of the list. An iteration reads READ keys of a class."""
    words = tl.arange(0, CLASSES // FLAGS_PER_WORD)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    offset = Tk - Tq
    for n in range(tl.program_id(0), tl.load(counter), tl.num_programs(0)):
        at = tl.load(listed + n)
        pair = at // Tq
        b = (pair // H).to(tl.int64)
        h = pair % H
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + h)
        one = at % Tq + tl.zeros((1,), tl.int32)
        query = q + b * q_batch + h.to(tl.int64) * q_head
        others = k + b * k_batch + (h // group).to(tl.int64) * k_head
        mask = dense + b * dense_batch + h.to(tl.int64) * dense_head
        own_weight = weight + h.to(tl.int64) * weight_head
        own_bias = locate_bias(bias, b, h, 0, bias_batch, bias_head, bias_query)
        row = load_lse(lse + pair.to(tl.int64) * Tq, one, Tq)[:, None]
        line = at.to(tl.int64) * TOP + tl.zeros((1, 1), tl.int64)
        flag = tl.load(flags + at.to(tl.int64) * (CLASSES // FLAGS_PER_WORD) + words)  # (1, CLASSES // WORD)
        chosen = tl.load(keys + line + slot, mask=slot < TOP, other=-1)
        y = key_products(
            query, others, own_weight, one, chosen, one < Tq, chosen >= 0, D, q_query, k_key,
            ADDITIVE, PTX, BD, STEP, EVEN,
        )  # fmt: skip
        y = entry_logits(
            y, own_bias, one[:, None], chosen, offset, Tq, clip, bias_query, slope, scale, softcap,
            TABLE, SOFTCAP, ALIBI,
        ) - row  # fmt: skip
        y = tl.where(chosen >= 0, y, MASKED_LOGIT)
        while tl.max(tl.max(flag, 1), 0) > 0:
            word = tl.min(tl.min(tl.where(flag > 0, words, CLASSES), 1), 0)
            content = tl.max(tl.max(tl.where(words == word, flag, 0), 1), 0)
            lowest = content & (-content)
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            flag = tl.where(words == word, flag - lowest, flag)
            for start in range(0, tags, READ):
                tag = start + tl.arange(0, READ)[None, :]
                j = locate_key(word * FLAGS_PER_WORD + bit, tag, segments, BK)
                seen = j < 0
                for run in tl.static_range(RANGES if RANGES > 0 else 1):
                    low, high = key_range(key_ranges + b * key_ranges_batch, run, one, offset, Tq, Tk, CAUSAL, RANGES)
                    seen |= (j >= low[:, None]) & (j < high[:, None])
                # Keys that were already selected must not be inserted twice.
                twice = tl.max((j[:, :, None] == chosen[:, None, :]).to(tl.int32), 2) > 0
                seen = apply_masks(
                    seen & (tag < tags) & (j < Tk) & ~twice, one[:, None], j,
                    query_ids + b * query_ids_batch, key_ids + b * key_ids_batch, mask, dense_query, dense_key,
                    Tq, Tk, IDS, DENSE,
                )  # fmt: skip
                if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                    z = key_products(
                        query, others, own_weight, one, j, one < Tq, seen, D, q_query, k_key,
                        ADDITIVE, PTX, BD, STEP, EVEN,
                    )  # fmt: skip
                    z = entry_logits(
                        z, own_bias, one[:, None], j, offset, Tq, clip, bias_query, slope, scale, softcap,
                        TABLE, SOFTCAP, ALIBI,
                    ) - row  # fmt: skip
                    y, chosen = insert_sorted(y, chosen, tl.where(seen, z, MASKED_LOGIT), j, SLOTS)
        # The results overwrite the selected keys, which other threads read.
        tl.debug_barrier()
        store_topk(y, chosen, rank_slots_at_once(y, chosen), values + line, keys + line, True, 0.0, TOP)
        if LARGEST:
            tl.store(largest_logits + at + tl.zeros((1,), tl.int32), tl.max(y + row, 1) * LN_2)
