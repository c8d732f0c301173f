/* The largest entries of a row while its keys are read in ascending order. */

#pragma once

#include "masks.h"
#include "vectors.h"

enum {
    STEP = 4 * LANES,  /* keys per iteration over a row */
    MAX_TOP_KEYS = 64, /* the maximum number of top keys per query */
    CANDIDATES = MAX_TOP_KEYS + 2 * STEP
};

/* The largest entries so far and their keys, in descending order of the entries. values[count - 1] is a lower bound of the
   entries to find until there are `count` of them. One more place takes what is not among them. */
typedef struct {
    float values[MAX_TOP_KEYS + LANES];
    int32_t keys[MAX_TOP_KEYS + LANES];
    int32_t found;
} TopKeys;

/* Entries that may be among the largest, in ascending order of their keys. */
typedef struct {
    float values[CANDIDATES + LANES];
    int32_t keys[CANDIDATES];
    int64_t size;
} Candidates;

/* For each of LANES entries from `at`, how many of `size` entries come before it: larger ones, and equal ones of a lower
   index. */
static inline __attribute__((always_inline)) ints rank_entries(const float *values, int64_t size, int64_t at)
{
    floats own = load(values + at);
    ints larger = {0};
    for (int64_t i = 0; i < min_int(at, size); i++) larger -= (ints)(broadcast(values[i]) >= own);
    for (int64_t i = at; i < min_int(at + LANES, size); i++) {
        ints lane = lane_numbers() + (int32_t)at;
        larger -= (ints)(broadcast(values[i]) > own) | ((ints)(broadcast(values[i]) == own) & (lane > (int32_t)i));
    }
    for (int64_t i = at + LANES; i < size; i++) larger -= (ints)(broadcast(values[i]) > own);
    return larger;
}

/* The k-th largest of `count` maxima, a multiple of LANES: at least k entries reach it, so smaller entries are not among
   the k largest. */
static inline float kth_largest(const float *maxima, int count, int64_t k)
{
    float largest = MASKED;
    for (int at = 0; at < count; at += LANES) {
        /* Of equal maxima only one has rank k - 1. */
        ints rank = rank_entries(maxima, count, at);
        floats chosen = (floats)(((ints)load(maxima + at) & (rank == (int32_t)k - 1)) | ((ints)broadcast(MASKED) & (rank != (int32_t)k - 1)));
        float found = largest_lane(chosen);
        largest = found > largest ? found : largest;
    }
    return largest;
}

/* Sort the candidates into the `count` largest; no branch depends on an entry. */
static inline void sort_candidates(Candidates *candidates, int64_t count, TopKeys *top)
{
    int64_t size = candidates->size;
    store(candidates->values + size, broadcast(MASKED));
    for (int64_t at = 0; at < size; at += LANES) {
        int32_t ranks[LANES];
        ints rank = rank_entries(candidates->values, size, at);
        __builtin_memcpy(ranks, &rank, sizeof(ranks));
        for (int64_t i = at; i < min_int(at + LANES, size); i++) {
            int64_t place = min_int(ranks[i - at], count);
            top->values[place] = candidates->values[i];
            top->keys[place] = candidates->keys[i];
        }
    }
    top->found = (int32_t)min_int(size, count);
}

/* Begin with the largest entries so far, whose keys are lower. */
static inline void start_candidates(Candidates *candidates, const TopKeys *top)
{
    for (int64_t i = 0; i < top->found; i++) candidates->values[i] = top->values[i], candidates->keys[i] = top->keys[i];
    candidates->size = top->found;
}

/* Find the entries of a row, from x[begin] to x[end], that are among its `count` largest; x[0] is the entry of key
   `start`. `maxima` are those of the lanes. Keys come in ascending order and ties go to the lower key. The maximum of a
   lane is that of keys which are STEP apart: neighbours that are all large, as near the diagonal, are in different lanes,
   so the bound is tight and few entries reach it. */
static void update_top_keys(
    const float *x, int64_t begin, int64_t end, int64_t start, const floats *maxima, int64_t count, TopKeys *top)
{
    floats folded = maximum(maximum(maxima[0], maxima[1]), maximum(maxima[2], maxima[3]));
    float least = top->values[count - 1], reached = MASKED;
    int larger = __builtin_popcountll(lanes_above(folded, broadcast(least)));
    if (!larger) return;
    if (2 * count <= LANES && larger >= count) reached = kth_largest((const float *)&folded, LANES, count);
    if (2 * count > LANES && 4 * larger >= LANES && count <= STEP) reached = kth_largest((const float *)maxima, STEP, count);
    floats bar = broadcast(reached > least ? reached : least);
    Candidates candidates;
    start_candidates(&candidates, top);
    for (int64_t j = begin; j < end; j += STEP) {
        uint64_t bits = 0;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) bits |= lanes_at_least(load(x + j + i * LANES), bar) << i * LANES;
        for (; bits; bits &= bits - 1) {
            int64_t at = j + __builtin_ctzll(bits);
            candidates.values[candidates.size] = x[at];
            candidates.keys[candidates.size++] = (int32_t)(start + at);
        }
        if (candidates.size > CANDIDATES - STEP) {
            sort_candidates(&candidates, count, top);
            start_candidates(&candidates, top);
            float last = top->values[count - 1];
            bar = maximum(bar, broadcast(last));
        }
    }
    sort_candidates(&candidates, count, top);
}
