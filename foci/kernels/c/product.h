/* Matrix product of queries and keys. */

#pragma once

#include "vectors.h"

/* The number of keys of one product; they are packed as (width, PANEL). */
enum { PANEL = 3 * LANES };

/* Pack up to PANEL keys, whose rows are `step` apart, as (width, PANEL); the rest is 0. */
static void pack_panel(const float *keys, int64_t step, int64_t count, int64_t width, float *packed)
{
    for (int64_t j = 0; j < PANEL; j++, keys += step)
        for (int64_t d = 0; d < width; d++) packed[d * PANEL + j] = j < count ? keys[d] : 0;
}

/* ROWS queries, (width, ROWS), times one panel of keys, minus the shift of each row; `step` is the row stride of x. Not
   inlined, because inside another function the sums would leave the registers. */
static __attribute__((noinline)) void multiply(
    const float *queries, const float *keys, int64_t width, const float *shift, float *x, int64_t step)
{
    floats sums[ROWS][3] = {{{0}}};
    for (int64_t d = 0; d < width; d++, queries += ROWS, keys += PANEL) {
        floats k0 = load(keys), k1 = load(keys + LANES), k2 = load(keys + 2 * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            sums[r][0] += queries[r] * k0;
            sums[r][1] += queries[r] * k1;
            sums[r][2] += queries[r] * k2;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int i = 0; i < 3; i++) store(x + r * step + i * LANES, sums[r][i] - shift[r]);
}
