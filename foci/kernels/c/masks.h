/* The visible keys of a query: those that its key ranges, its id and the dense mask all allow. */

#pragma once

#include <stdint.h>

/* The logit of a masked entry, whose weight is 0. */
static const float MASKED = -1e30f;

/* Every member has 8 bytes; MaskStruct in backends/mask_struct.py has the same members in the same order. NULL is absent. */
typedef struct {
    const int32_t *key_ranges; /* (batch or 1, range_count, 2, query_count): first key of a key range, and last + 1 */
    const int64_t *query_ids;  /* (batch or 1, query_count) */
    const int64_t *key_ids;    /* (batch or 1, key_count) */
    const uint8_t *dense;      /* (batch or 1, heads or 1, query_count or 1, key_count or 1): the dense mask, with the strides below */
    int64_t query_count, key_count;
    int64_t range_count, range_step, query_id_step, key_id_step;
    int64_t dense_batch, dense_head, dense_row, dense_column;
} MaskStruct;

static inline int64_t min_int(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_int(int64_t a, int64_t b) { return a > b ? a : b; }

/* The bounds of the visible keys of a query between start and end; returns whether there are any. */
static inline int visible_bounds(
    const MaskStruct *masks, int64_t batch, int64_t row, int64_t start, int64_t end, int64_t *low, int64_t *high)
{
    if (!masks->key_ranges) return *low = start, *high = end, 1;
    const int32_t *range = masks->key_ranges + batch * masks->range_step + row;
    *low = end, *high = start;
    for (int64_t i = 0; i < masks->range_count; i++, range += 2 * masks->query_count) {
        int64_t first = max_int(range[0], start), last = min_int(range[masks->query_count], end);
        if (first < last) *low = min_int(*low, first), *high = max_int(*high, last);
    }
    return *low < *high;
}

/* Mask the entries outside of the key ranges of a row, from begin to end; x[0] is the entry of key `start`. */
static inline void mask_outside_ranges(
    const MaskStruct *masks, int64_t batch, int64_t row, int64_t start, int64_t begin, int64_t end, float *x)
{
    int64_t at = masks->key_ranges ? begin : masks->key_count - start;
    for (int64_t i = 0; masks->key_ranges && i < masks->range_count; i++) {
        const int32_t *range = masks->key_ranges + batch * masks->range_step + 2 * i * masks->query_count + row;
        int64_t first = range[0] - start, last = range[masks->query_count] - start;
        if (first >= last) continue;
        for (; at < min_int(first, end); at++) x[at] = MASKED;
        at = max_int(at, last);
    }
    for (; at < end; at++) x[at] = MASKED;
}

/* Mask the entries between low and high that the ids or the dense mask do not allow. */
static inline void mask_by_ids_and_dense(
    const MaskStruct *masks, int64_t batch, int64_t head, int64_t row, int64_t start, int64_t low, int64_t high, float *x)
{
    if (masks->query_ids) {
        int64_t id = masks->query_ids[batch * masks->query_id_step + row];
        const int64_t *ids = masks->key_ids + batch * masks->key_id_step + start;
        for (int64_t j = low; j < high; j++) x[j] = ids[j] == id ? x[j] : MASKED;
    }
    if (masks->dense) {
        const uint8_t *dense = masks->dense + batch * masks->dense_batch + head * masks->dense_head;
        dense += row * masks->dense_row + start * masks->dense_column;
        if (masks->dense_column == 1)
            for (int64_t j = low; j < high; j++) x[j] = dense[j] ? x[j] : MASKED;
        else
            for (int64_t j = low; j < high; j++) x[j] = dense[j * masks->dense_column] ? x[j] : MASKED;
    }
}
