/* What a query may see: runs of keys, ids that must be equal, and a dense mask; all of them must allow it. */

#pragma once

#include <stdint.h>

/* What is hidden has this logit, so that no weight is left of it. */
static const float HIDDEN = -1e30f;

/* Every member has 8 bytes; MASK_FIELDS in compiled.py has them in the same order. What is NULL is not given. */
typedef struct {
    const int32_t *runs;      /* (batch or 1, run_count, 2, query_count): a run's first key, and the one after it */
    const int64_t *query_ids; /* (batch or 1, query_count) */
    const int64_t *key_ids;   /* (batch or 1, key_count) */
    const uint8_t *seen;      /* (batch or 1, heads or 1, query_count or 1, key_count or 1), by its steps */
    int64_t query_count, key_count;
    int64_t run_count, run_step, query_id_step, key_id_step;
    int64_t seen_batch, seen_head, seen_row, seen_column;
} Masks;

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/* Where, between start and end, the keys lie that a query may see; whether there are any. */
static inline int visible(
    const Masks *masks, int64_t batch, int64_t row, int64_t start, int64_t end, int64_t *low, int64_t *high)
{
    if (!masks->runs) return *low = start, *high = end, 1;
    const int32_t *run = masks->runs + batch * masks->run_step + row;
    *low = end, *high = start;
    for (int64_t i = 0; i < masks->run_count; i++, run += 2 * masks->query_count) {
        int64_t first = greater(run[0], start), last = lesser(run[masks->query_count], end);
        if (first < last) *low = lesser(*low, first), *high = greater(*high, last);
    }
    return *low < *high;
}

/* Hides what lies between the runs of a row, and around them from begin to end; x[0] stands for the key `start`. */
static inline void hide_outside(
    const Masks *masks, int64_t batch, int64_t row, int64_t start, int64_t begin, int64_t end, float *x)
{
    int64_t at = masks->runs ? begin : masks->key_count - start;
    for (int64_t i = 0; masks->runs && i < masks->run_count; i++) {
        const int32_t *run = masks->runs + batch * masks->run_step + 2 * i * masks->query_count + row;
        int64_t first = run[0] - start, last = run[masks->query_count] - start;
        if (first >= last) continue;
        for (; at < lesser(first, end); at++) x[at] = HIDDEN;
        at = greater(at, last);
    }
    for (; at < end; at++) x[at] = HIDDEN;
}

/* Hides, between low and high, what the ids or the dense mask do not let the query see. */
static inline void hide_inside(
    const Masks *masks, int64_t batch, int64_t head, int64_t row, int64_t start, int64_t low, int64_t high, float *x)
{
    if (masks->query_ids) {
        int64_t id = masks->query_ids[batch * masks->query_id_step + row];
        const int64_t *ids = masks->key_ids + batch * masks->key_id_step + start;
        for (int64_t j = low; j < high; j++) x[j] = ids[j] == id ? x[j] : HIDDEN;
    }
    if (masks->seen) {
        const uint8_t *seen = masks->seen + batch * masks->seen_batch + head * masks->seen_head;
        seen += row * masks->seen_row + start * masks->seen_column;
        if (masks->seen_column == 1)
            for (int64_t j = low; j < high; j++) x[j] = seen[j] ? x[j] : HIDDEN;
        else
            for (int64_t j = low; j < high; j++) x[j] = seen[j * masks->seen_column] ? x[j] : HIDDEN;
    }
}
