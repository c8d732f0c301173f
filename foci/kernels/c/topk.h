/* The largest entries of a row while its keys are read in ascending order. */

#pragma once

#include "masks.h"
#include "vectors.h"

enum {
    STEP = 4 * LANES, /* keys per iteration over a row */
    MAX_TOP_KEYS = 64 /* the maximum number of top keys per query */
};

/* The largest entries so far and their keys, in descending order of the entries. */
typedef struct {
    float values[MAX_TOP_KEYS];
    int32_t keys[MAX_TOP_KEYS];
} TopKeys;

/* Insert an entry that is larger than the last of the `count` largest. */
static inline void insert_top_key(TopKeys *top, int64_t count, float value, int32_t key)
{
    int64_t i = count - 1;
    for (; i > 0 && top->values[i - 1] < value; i--) {
        top->values[i] = top->values[i - 1];
        top->keys[i] = top->keys[i - 1];
    }
    top->values[i] = value;
    top->keys[i] = key;
}

/* The k-th largest of some maxima: at least k entries reach it, so smaller entries are not among the k largest. */
static inline float kth_largest(const float *maxima, int count, int64_t k)
{
    int32_t larger[STEP] = {0};
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++) larger[j] += maxima[i] > maxima[j];
    float smallest = -MASKED;
    for (int j = 0; j < count; j++) smallest = larger[j] < k && maxima[j] < smallest ? maxima[j] : smallest;
    return smallest;
}

/* Insert the entries of a row, from x[begin] to x[end], that are among its `count` largest; x[0] is the entry of key
   `start`. `maxima` are those of the lanes. Keys come in ascending order and only strictly larger entries are
   inserted, so ties go to the lower key. The maximum of a lane is that of keys which are STEP apart: neighbours that are
   all large, as near the diagonal, are in different lanes, so the bound is tight and few entries reach it. */
static void update_top_keys(
    const float *x, int64_t begin, int64_t end, int64_t start, const floats *maxima, int64_t count, TopKeys *top)
{
    floats folded = maximum(maximum(maxima[0], maxima[1]), maximum(maxima[2], maxima[3]));
    float least = top->values[count - 1], reached = MASKED;
    int larger = 0;
    for (int i = 0; i < LANES; i++) larger += folded[i] > least;
    if (!larger) return;
    if (2 * count <= LANES && larger >= count) reached = kth_largest((const float *)&folded, LANES, count);
    if (2 * count > LANES && 4 * larger >= LANES && count <= STEP) reached = kth_largest((const float *)maxima, STEP, count);
    floats bar = broadcast(reached > least ? reached : least);
    for (int64_t j = begin; j < end; j += STEP) {
        uint64_t bits = 0;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) bits |= lanes_at_least(load(x + j + i * LANES), bar) << i * LANES;
        for (; bits; bits &= bits - 1) {
            int64_t at = j + __builtin_ctzll(bits);
            if (x[at] > top->values[count - 1]) insert_top_key(top, count, x[at], (int32_t)(start + at));
        }
    }
}
