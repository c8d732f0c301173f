"""The k heaviest keys of each query, chosen from what the pass over the tiles has kept (statistics.py).

It kept, per query and class of keys, the two largest logits and where they were, and a number that the third does not
exceed. The k largest of these are chosen, and their weights computed anew, exactly (choose). A key that was not kept
can count only where both of its class were chosen and the third may reach the last one chosen. And the logits that
were kept lack their lowest bits, which say where, so that keys level with the last one chosen are open too. Queries
with such classes, few, are put on a list, and those classes are read again, key by key (refine).
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.logits import NONE, allowed, log_sum_exps, logits, span

# Stands for no key where the lowest key is sought.
LAST = tl.constexpr(2147483647)
# Flags per word.
WORD = tl.constexpr(16)


@triton.jit
def located(klass, tag, segments, BK: tl.constexpr):
    """The key with this tag in its class: its tile among those of the segment, times 2, plus which of the two rows."""
    place = klass % (BK // 2)
    tile = (tag >> 1) * segments + klass // (BK // 2)
    return tile * BK + (place // 8) * 16 + place % 8 + (tag & 1) * 8


@triton.jit
def relabelled(pointers, label, valid, LABEL_BITS: tl.constexpr):
    """Logits with a label of their own in the place of the tag, so that no two of a query are the same number."""
    bits = tl.load(pointers, mask=valid, other=NONE).to(tl.int32, bitcast=True)
    return ((bits & (-(1 << LABEL_BITS))) | label).to(tl.float32, bitcast=True)


@triton.jit
def bare(x, LABEL_BITS: tl.constexpr):
    return (x.to(tl.int32, bitcast=True) & (-(1 << LABEL_BITS))).to(tl.float32, bitcast=True)


@triton.jit
def enlist(listed, counter, row, flagged):
    """Puts the rows that are flagged on the list, in any order: each is read again by itself."""
    count = tl.sum(flagged.to(tl.int32), 0)
    if count > 0:
        base = tl.atomic_add(counter, count)
        tl.store(listed + base + tl.cumsum(flagged.to(tl.int32), 0) - 1, row, mask=flagged)


@triton.jit
def pick(
    best, second, third, keys, flags, listed, counter, local, valid, queries,
    TOP: tl.constexpr, CLASSES: tl.constexpr, LABEL_BITS: tl.constexpr,
):  # fmt: skip
    """The labels of the TOP largest candidates of each query, and a flag for each class that may hide another.

    keys (R,) points at the lines of these queries. best and second are (pairs, CLASSES, queries), third
    (pairs, CLASSES // 8, queries), flags (pairs, queries, CLASSES // WORD).
    """
    klass = tl.arange(0, CLASSES)[:, None]
    pair = tl.program_id(1).to(tl.int64)
    places = (pair * CLASSES + klass) * queries + local[None, :]
    x = relabelled(best + places, 2 * klass, valid[None, :], LABEL_BITS)  # (CLASSES, R)
    y = relabelled(second + places, 2 * klass + 1, valid[None, :], LABEL_BITS)
    bound = tl.full((local.shape[0],), NONE, tl.float32)
    for n in range(TOP):
        bound = tl.max(x, 0)
        tl.store(keys + n, bound.to(tl.int32, bitcast=True), mask=valid)
        # A class whose largest was taken competes with its second largest.
        taken = x == bound[None, :]
        x = tl.where(taken, y, x)
        y = tl.where(taken, NONE, y)
    rest = tl.load(
        third + (pair * (CLASSES // 8) + klass // 8) * queries + local[None, :],
        mask=valid[None, :],
        other=-float("inf"),
    )
    # What was kept lacks its lowest bits: a key that is level with the last one chosen may be the heavier one.
    last = bare(bound, LABEL_BITS)[None, :]
    level = (bare(x, LABEL_BITS) >= last) & (last > NONE / 2)
    hidden = level | ((x < NONE / 2) & (rest.to(tl.float32) >= last))
    bits = tl.where(hidden & valid[None, :], 1 << (klass % WORD), 0)
    words = tl.sum(tl.reshape(bits, (CLASSES // WORD, WORD, local.shape[0])), 1)  # (CLASSES // WORD, R)
    word = tl.arange(0, CLASSES // WORD)[:, None]
    row = tl.program_id(1) * queries + local
    tl.store(flags + row.to(tl.int64)[None, :] * (CLASSES // WORD) + word, words, mask=(local < queries)[None, :])
    enlist(listed, counter, row, tl.max(words, 0) > 0)


@triton.jit
def named(
    best, second, label, real, local, queries, segments, CLASSES: tl.constexpr, BK: tl.constexpr, TAG_BITS: tl.constexpr
):
    """The keys behind labels (R, SLOTS): where a candidate was found is read once more; -1 where there is none."""
    klass = (label >> 1) % CLASSES
    places = (tl.program_id(1).to(tl.int64) * CLASSES + klass) * queries + local[:, None]
    first = tl.load(best + places, mask=real & (label % 2 == 0), other=0.0).to(tl.int32, bitcast=True)
    other = tl.load(second + places, mask=real & (label % 2 == 1), other=0.0).to(tl.int32, bitcast=True)
    return tl.where(real, located(klass, (first | other) & ((1 << TAG_BITS) - 1), segments, BK), -1)


@triton.jit
def choose(
    q, k, lse, slopes, best, second, third, values, keys, flags, listed, counter,
    H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, scale, softcap, first_pair, first_query, queries, segments,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    TOP: tl.constexpr, SLOTS: tl.constexpr, CLASSES: tl.constexpr, BK: tl.constexpr,
    TAG_BITS: tl.constexpr, LABEL_BITS: tl.constexpr,
    R: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """R queries of one pair: the keys of the largest candidates, their exact weights, in order.

    Labels wait in keys until they are read in the layout that rows of keys are read in.
    """
    pair = first_pair + tl.program_id(1)
    b = (pair // H).to(tl.int64)
    h = pair % H
    q += b * q_batch + h.to(tl.int64) * q_head
    k += b * k_batch + (h // group).to(tl.int64) * k_head
    lse += pair.to(tl.int64) * Tq
    values += pair.to(tl.int64) * Tq * TOP
    keys += pair.to(tl.int64) * Tq * TOP
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)
    local = tl.program_id(0) * R + tl.arange(0, R)
    i = first_query + local
    valid = (local < queries) & (i < Tq)
    pick(
        best, second, third, keys + i.to(tl.int64) * TOP, flags, listed, counter, local, valid, queries,
        TOP, CLASSES, LABEL_BITS,
    )  # fmt: skip
    tl.debug_barrier()
    place = (i.to(tl.int64) * TOP)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    there = valid[:, None] & (slot < TOP)
    bits = tl.load(keys + place + slot, mask=there, other=0)
    real = there & (bits.to(tl.float32, bitcast=True) > NONE / 2)
    found = named(best, second, bits & ((1 << LABEL_BITS) - 1), real, local, queries, segments, CLASSES, BK, TAG_BITS)
    x = products(q, k, i, found, valid, found >= 0, D, q_query, k_key, BD, STEP, EVEN)
    x = logits(x, i[:, None], found, Tk - Tq, slope, scale, softcap, SOFTCAP, ALIBI)
    x = tl.where(found >= 0, x - log_sum_exps(lse, i, Tq)[:, None], NONE)
    # The weights and keys are written where the labels were read.
    tl.debug_barrier()
    store_in_order(x, found, values + place, keys + place, valid[:, None], TOP, SLOTS)


@triton.jit
def products(
    q, k, i, j, valid, there, D, q_query, k_key, BD: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The dot product of query i with each key j, where it is valid and there: i (R,), j (R, N) -> (R, N)."""
    shape: tl.constexpr = (j.shape[0], j.shape[1], STEP)
    total = tl.zeros(shape, tl.float32)
    row = q + i.to(tl.int64)[:, None, None] * q_query
    keys = k + j.to(tl.int64)[:, :, None] * k_key
    valid = valid[:, None, None]
    there = there[:, :, None]
    # Not unrolled: all rows of keys at once would take more registers than there are.
    for start in range(0, BD, STEP):
        d = (start + tl.arange(0, STEP))[None, None, :]
        a = tl.load(row + d, mask=valid if EVEN else valid & (d < D), other=0.0)
        b = tl.load(keys + d, mask=there if EVEN else there & (d < D), other=0.0)
        # Added up at the end: a sum across lanes at every step would keep the next keys waiting.
        total += a.to(tl.float32) * b.to(tl.float32)
    return tl.sum(total, 2)


@triton.jit
def insert(x, keys, more, j, SLOTS: tl.constexpr):
    """Puts each of `more` (1, N) that beats the worst of the list (1, SLOTS) in its place."""
    slot = tl.arange(0, SLOTS)[None, :]
    # Most of the keys that are read again beat nobody: no turn is taken for them.
    more = tl.where(more >= tl.min(x, 1)[:, None], more, NONE)
    while tl.max(tl.max(more, 1), 0) > NONE / 2:
        heaviest = tl.max(more, 1)
        key = tl.min(tl.where(more == heaviest[:, None], j, LAST), 1)
        worst = tl.min(x, 1)
        worst_key = tl.max(tl.where(x == worst[:, None], keys, -1), 1)
        better = (heaviest > worst) | ((heaviest == worst) & (key < worst_key))
        is_worst = (x == worst[:, None]) & (keys == worst_key[:, None])
        here = better[:, None] & (slot == tl.min(tl.where(is_worst, slot, SLOTS), 1)[:, None])
        x = tl.where(here, heaviest[:, None], x)
        keys = tl.where(here, key[:, None], keys)
        more = tl.where(better[:, None] & (j != key[:, None]), more, NONE)
    return x, keys


@triton.jit
def store_in_order(x, found, values, keys, valid, TOP: tl.constexpr, SLOTS: tl.constexpr):
    """x, found (R, SLOTS); values, keys (R, 1) pointers. A slot's place is the number of slots before it."""
    slot = tl.arange(0, SLOTS)
    other, other_key = x[:, None, :], found[:, None, :]
    # Empty slots are alike: they keep their order.
    alike = (other_key == found[:, :, None]) & (slot[None, None, :] < slot[None, :, None])
    ahead = (other > x[:, :, None]) | ((other == x[:, :, None]) & ((other_key < found[:, :, None]) | alike))
    place = tl.sum(ahead.to(tl.int32), 2)  # (R, SLOTS)
    real = x > NONE / 2
    there = valid & (place < TOP)
    tl.store(values + place, tl.where(real, tl.exp2(x), 0.0), mask=there)
    tl.store(keys + place, tl.where(real, found, -1), mask=there)


@triton.jit
def refine(
    q, k, lse, spans, query_ids, key_ids, dense, slopes, flags, listed, counter, values, keys,
    H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, spans_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key,
    scale, softcap, first_pair, first_query, queries, segments, tags,
    CAUSAL: tl.constexpr, SPANS: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    TOP: tl.constexpr, SLOTS: tl.constexpr, CLASSES: tl.constexpr, BK: tl.constexpr,
    READ: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The queries on the list, one after the other, shared among the programs. READ keys of a class at a time."""
    words = tl.arange(0, CLASSES // WORD)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    offset = Tk - Tq
    for n in range(tl.program_id(0), tl.load(counter), tl.num_programs(0)):
        at = tl.load(listed + n)
        pair = first_pair + at // queries
        b = (pair // H).to(tl.int64)
        h = pair % H
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + h)
        one = first_query + at % queries + tl.zeros((1,), tl.int32)
        query = q + b * q_batch + h.to(tl.int64) * q_head
        others = k + b * k_batch + (h // group).to(tl.int64) * k_head
        mask = dense + b * dense_batch + h.to(tl.int64) * dense_head
        row = log_sum_exps(lse + pair.to(tl.int64) * Tq, one, Tq)[:, None]
        line = ((pair.to(tl.int64) * Tq + one) * TOP)[:, None]
        flag = tl.load(flags + at.to(tl.int64) * (CLASSES // WORD) + words)  # (1, CLASSES // WORD)
        chosen = tl.load(keys + line + slot, mask=slot < TOP, other=-1)
        y = products(query, others, one, chosen, one < Tq, chosen >= 0, D, q_query, k_key, BD, STEP, EVEN)
        y = logits(y, one[:, None], chosen, offset, slope, scale, softcap, SOFTCAP, ALIBI) - row
        y = tl.where(chosen >= 0, y, NONE)
        while tl.max(tl.max(flag, 1), 0) > 0:
            word = tl.min(tl.min(tl.where(flag > 0, words, CLASSES), 1), 0)
            content = tl.max(tl.max(tl.where(words == word, flag, 0), 1), 0)
            lowest = content & (-content)
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            flag = tl.where(words == word, flag - lowest, flag)
            for start in range(0, tags, READ):
                tag = start + tl.arange(0, READ)[None, :]
                j = located(word * WORD + bit, tag, segments, BK)
                seen = j < 0
                for run in tl.static_range(max(SPANS, 1)):
                    low, high = span(spans + b * spans_batch, run, one, offset, Tq, Tk, CAUSAL, SPANS)
                    seen |= (j >= low[:, None]) & (j < high[:, None])
                # What is in the list already must not come twice.
                twice = tl.max((j[:, :, None] == chosen[:, None, :]).to(tl.int32), 2) > 0
                seen = allowed(
                    seen & (tag < tags) & (j < Tk) & ~twice, one[:, None], j,
                    query_ids + b * query_ids_batch, key_ids + b * key_ids_batch, mask, dense_query, dense_key,
                    Tq, Tk, IDS, DENSE,
                )  # fmt: skip
                if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                    z = products(query, others, one, j, one < Tq, seen, D, q_query, k_key, BD, STEP, EVEN)
                    z = logits(z, one[:, None], j, offset, slope, scale, softcap, SOFTCAP, ALIBI) - row
                    y, chosen = insert(y, chosen, tl.where(seen, z, NONE), j, SLOTS)
        # What is written lies where the chosen were read, by other threads.
        tl.debug_barrier()
        store_in_order(y, chosen, values + line, keys + line, True, TOP, SLOTS)
