"""The k heaviest keys of each query, chosen from what the pass over the tiles has kept (statistics.py).

It kept, per query and class of keys, the two largest logits and where they were, and a number that the third does not
exceed. The k largest of these are chosen (pick). A key that was not kept can count only where both of its class were
chosen and the third may reach the last one chosen. And the logits that were kept lack their lowest bits, which say
where, so that keys level with the last one chosen are open too. Those classes, few, are read again, key by key
(refine); elsewhere the choice is final, and only its weights are computed anew, exactly (weigh, order).
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
def located(klass, tag, segment, BK: tl.constexpr):
    """The key with this tag in its class: its tile within the segment, times 2, plus which of the two rows."""
    place = klass % (BK // 2)
    first = (klass // (BK // 2)) * (segment * BK) + (place // 8) * 16 + place % 8
    return first + (tag & -2) * (BK // 2) + (tag & 1) * 8


@triton.jit
def kept(pointers, klass, valid, segment, BK: tl.constexpr, TAG_BITS: tl.constexpr):
    """Logits without their tags, and their keys. Where there is none, about NONE, and a key that means nothing."""
    bits = tl.load(pointers, mask=valid, other=NONE).to(tl.int32, bitcast=True)
    x = (bits & (-(1 << TAG_BITS))).to(tl.float32, bitcast=True)
    return x, located(klass, bits & ((1 << TAG_BITS) - 1), segment, BK)


@triton.jit
def pick(
    best, second, third, keys, flags, Tq, first_pair, first_query, queries, segment,
    TOP: tl.constexpr, CLASSES: tl.constexpr, BK: tl.constexpr, TAG_BITS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R queries of one pair: the keys of the TOP best classes, and a flag for each class that may hide another.

    best, second and third are (pairs, CLASSES, queries), flags (pairs, queries, CLASSES // WORD).
    """
    pair = first_pair + tl.program_id(1)
    local = tl.program_id(0) * R + tl.arange(0, R)
    i = first_query + local
    valid = (local < queries) & (i < Tq)
    klass = tl.arange(0, CLASSES)[:, None]
    places = (tl.program_id(1).to(tl.int64) * CLASSES + klass) * queries + local[None, :]
    x, key = kept(best + places, klass, valid[None, :], segment, BK, TAG_BITS)  # (CLASSES, R)
    y, next_key = kept(second + places, klass, valid[None, :], segment, BK, TAG_BITS)
    into = keys + (pair.to(tl.int64) * Tq + i) * TOP
    used = tl.zeros((CLASSES, R), tl.int32)
    bound = tl.full((R,), NONE, tl.float32)
    for n in range(TOP):
        bound = tl.max(x, 0)
        bound_key = tl.min(tl.where(x == bound[None, :], key, LAST), 0)
        real = bound > NONE / 2
        tl.store(into + n, tl.where(real, bound_key, -1), mask=valid)
        # A class whose largest was taken competes with its second largest.
        taken = (key == bound_key[None, :]) & real[None, :]
        used += taken.to(tl.int32)
        x = tl.where(taken, y, x)
        key = tl.where(taken, next_key, key)
        y = tl.where(taken, NONE, y)
    rest = tl.load(third + places, mask=valid[None, :], other=-float("inf")).to(tl.float32)
    # What was kept lacks its lowest bits: a key that is level with the last one chosen may be the heavier one.
    hidden = ((used >= 2) & (rest >= bound[None, :])) | ((x >= bound[None, :]) & (bound > NONE / 2)[None, :])
    bits = tl.where(hidden, 1 << (klass % WORD), 0)
    words = tl.sum(tl.reshape(bits, (CLASSES // WORD, WORD, R)), 1)  # (CLASSES // WORD, R)
    word = tl.arange(0, CLASSES // WORD)[:, None]
    row = (tl.program_id(1).to(tl.int64) * queries + local)[None, :]
    tl.store(flags + row * (CLASSES // WORD) + word, words, mask=(local < queries)[None, :])


@triton.jit
def products(q, k, i, j, there, Tq, D, q_query, k_key, BD: tl.constexpr, STEP: tl.constexpr):
    """The dot product of query i with each key j, where `there`: i (R,), j (R, N) -> (R, N)."""
    total = tl.zeros(j.shape, tl.float32)
    row = q + i.to(tl.int64)[:, None] * q_query
    keys = k + j.to(tl.int64)[:, :, None] * k_key
    for start in tl.static_range(0, BD, STEP):
        d = start + tl.arange(0, STEP)
        a = tl.load(row + d[None, :], mask=(i < Tq)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        b = tl.load(keys + d[None, None, :], mask=there[:, :, None] & (d < D)[None, None, :], other=0.0)
        total += tl.sum(a[:, None, :] * b.to(tl.float32), 2)
    return total


@triton.jit
def insert(x, keys, more, j, SLOTS: tl.constexpr):
    """Puts each of `more` (1, N) that beats the worst of the list (1, SLOTS) in its place."""
    slot = tl.arange(0, SLOTS)[None, :]
    going = True
    while going:
        heaviest = tl.max(more, 1)
        key = tl.min(tl.where(more == heaviest[:, None], j, LAST), 1)
        worst = tl.min(x, 1)
        worst_key = tl.max(tl.where(x == worst[:, None], keys, -1), 1)
        better = (heaviest > worst) | ((heaviest == worst) & (key < worst_key) & (heaviest > NONE / 2))
        is_worst = (x == worst[:, None]) & (keys == worst_key[:, None])
        here = better[:, None] & (slot == tl.min(tl.where(is_worst, slot, SLOTS), 1)[:, None])
        x = tl.where(here, heaviest[:, None], x)
        keys = tl.where(here, key[:, None], keys)
        more = tl.where(better[:, None] & (j != key[:, None]), more, NONE)
        going = tl.max(tl.max(more, 1), 0) > NONE / 2
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
def weigh(
    q, k, lse, slopes, values, keys, H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, scale, softcap, first_pair, first_query, queries,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    TOP: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """R queries of one pair: the exact logits of the keys picked, less the log-sum-exp, into values."""
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
    place = (i.to(tl.int64) * TOP)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    found = tl.load(keys + place + slot, mask=valid[:, None] & (slot < TOP), other=-1)  # (R, SLOTS)
    d = tl.arange(0, BD)[None, None, :]
    inside = valid[:, None, None] if EVEN else valid[:, None, None] & (d < D)
    row = tl.load(q + i.to(tl.int64)[:, None, None] * q_query + d, mask=inside, other=0.0)
    there = (found >= 0)[:, :, None] if EVEN else (found >= 0)[:, :, None] & (d < D)
    key = tl.load(k + found.to(tl.int64)[:, :, None] * k_key + d, mask=there, other=0.0)
    dots = tl.sum(row.to(tl.float32) * key.to(tl.float32), 2)
    x = logits(dots, i[:, None], found, Tk - Tq, slope, scale, softcap, SOFTCAP, ALIBI)
    x = tl.where(found >= 0, x - log_sum_exps(lse, i, Tq)[:, None], NONE)
    tl.store(values + place + slot, x, mask=valid[:, None] & (slot < TOP))


@triton.jit
def order(values, keys, Tq, first_pair, first_query, queries, TOP: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr):
    """R queries of one pair: their weights and keys in order. Apart from weigh, whose threads are laid out for rows."""
    pair = first_pair + tl.program_id(1)
    local = tl.program_id(0) * R + tl.arange(0, R)
    i = first_query + local
    valid = ((local < queries) & (i < Tq))[:, None]
    place = ((pair.to(tl.int64) * Tq + i) * TOP)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    x = tl.load(values + place + slot, mask=valid & (slot < TOP), other=NONE)
    found = tl.load(keys + place + slot, mask=valid & (slot < TOP), other=-1)
    # They are written where they were read.
    tl.debug_barrier()
    store_in_order(x, found, values + place, keys + place, valid, TOP, SLOTS)


@triton.jit
def refine(
    q, k, lse, spans, query_ids, key_ids, dense, slopes, flags, values, keys,
    H, group, Tq, Tk, D,
    q_batch, q_head, q_query, k_batch, k_head, k_key, spans_batch, query_ids_batch, key_ids_batch,
    dense_batch, dense_head, dense_query, dense_key,
    scale, softcap, first_pair, first_query, queries, segment,
    CAUSAL: tl.constexpr, SPANS: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    TOP: tl.constexpr, SLOTS: tl.constexpr, CLASSES: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, READ: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """R queries of one pair: those with flags, one by one. Each flagged class is read again, key by key."""
    pair = first_pair + tl.program_id(1)
    local = tl.program_id(0) * R + tl.arange(0, R)
    i = first_query + local
    valid = (local < queries) & (i < Tq)
    b = (pair // H).to(tl.int64)
    h = pair % H
    offset = Tk - Tq
    q += b * q_batch + h.to(tl.int64) * q_head
    k += b * k_batch + (h // group).to(tl.int64) * k_head
    spans += b * spans_batch
    query_ids += b * query_ids_batch
    key_ids += b * key_ids_batch
    dense += b * dense_batch + h.to(tl.int64) * dense_head
    lse += pair.to(tl.int64) * Tq
    values += pair.to(tl.int64) * Tq * TOP
    keys += pair.to(tl.int64) * Tq * TOP
    flags += (tl.program_id(1).to(tl.int64) * queries + tl.program_id(0) * R) * (CLASSES // WORD)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + h)
    slot = tl.arange(0, SLOTS)[None, :]
    words = tl.arange(0, CLASSES // WORD)[None, :]
    flagged = tl.load(flags + tl.arange(0, R)[:, None] * (CLASSES // WORD) + words, mask=valid[:, None], other=0)
    if tl.max(tl.max(flagged, 1), 0) > 0:
        for r in range(R):
            flag = tl.load(flags + r * (CLASSES // WORD) + words)  # (1, CLASSES // WORD)
            one = first_query + tl.program_id(0) * R + r + tl.zeros((1,), tl.int32)
            if (tl.max(tl.max(flag, 1), 0) > 0) & (tl.max(one, 0) < Tq):
                line = (one.to(tl.int64) * TOP)[:, None]
                row = log_sum_exps(lse, one, Tq)[:, None]
                chosen = tl.load(keys + line + slot, mask=slot < TOP, other=-1)
                y = products(q, k, one, chosen, chosen >= 0, Tq, D, q_query, k_key, BD, STEP)
                y = logits(y, one[:, None], chosen, offset, slope, scale, softcap, SOFTCAP, ALIBI) - row
                y = tl.where(chosen >= 0, y, NONE)
                while tl.max(tl.max(flag, 1), 0) > 0:
                    word = tl.min(tl.min(tl.where(flag > 0, words, CLASSES), 1), 0)
                    content = tl.max(tl.max(tl.where(words == word, flag, 0), 1), 0)
                    lowest = content & (-content)
                    bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
                    flag = tl.where(words == word, flag - lowest, flag)
                    for start in range(0, 2 * segment, READ):
                        tag = start + tl.arange(0, READ)[None, :]
                        j = located(word * WORD + bit, tag, segment, BK)
                        seen = j < 0
                        for run in tl.static_range(max(SPANS, 1)):
                            low, high = span(spans, run, one, offset, Tq, Tk, CAUSAL, SPANS)
                            seen |= (j >= low[:, None]) & (j < high[:, None])
                        seen &= (tag < 2 * segment) & (j < Tk)
                        # What is in the list already must not come twice.
                        twice = tl.max((j[:, :, None] == chosen[:, None, :]).to(tl.int32), 2) > 0
                        seen = allowed(
                            seen & ~twice, one[:, None], j, query_ids, key_ids, dense, dense_query, dense_key,
                            Tq, Tk, IDS, DENSE,
                        )  # fmt: skip
                        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                            z = products(q, k, one, j, seen, Tq, D, q_query, k_key, BD, STEP)
                            z = logits(z, one[:, None], j, offset, slope, scale, softcap, SOFTCAP, ALIBI) - row
                            y, chosen = insert(y, chosen, tl.where(seen, z, NONE), j, SLOTS)
                store_in_order(y, chosen, values + line, keys + line, True, TOP, SLOTS)
