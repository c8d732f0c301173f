/* wᵀ tanh(a + b) from exponentials that are taken once per query and once per key.

   tanh(a + b) = 1 - 2 / (1 + e^2a e^2b): a term is a product, a sum and a quotient, and two terms share a quotient:
   w0 / D0 + w1 / D1 = (w0 D1 + w1 D0) / (D0 D1). */

#pragma once

#include "vectors.h"

/* Beyond this e^2a or e^-2a is no float of full precision. */
static const float FAR = 43.0f;

/* Where a denominator ends, so that two of them fit a float: what it hides is far below rounding. */
static const float MOST_DENOMINATOR = 0x1p60f;

static const float TWO_LOG2_E = 2.88539008f;

/* e^2a for |a| up to FAR: whole powers of two first, so that a large exponent costs no digits. */
static inline floats exponential(floats a)
{
    const float round = 12582912.0f; /* as in split_power */
    floats shifted = a * TWO_LOG2_E + round, whole = shifted - round;
    floats rest = a * 2.0f - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    floats scale = (floats)(((words)shifted << 23) + 0x3f800000u);
    return power(rest * 1.44269504f) * scale;
}

/* Adds Σ w / (1 + E F) for ROWS queries and LANES keys; E is (width, ROWS), F (width, LANES) with rows `step` apart. */
static inline __attribute__((always_inline)) void add_quotients(
    const float *queries, const float *keys, int64_t step, const float *weight, int64_t width, floats *sums)
{
    int64_t d = 0;
    for (; d + 2 <= width; d += 2, queries += 2 * ROWS, keys += 2 * step) {
        floats k0 = load(keys), k1 = load(keys + step);
        float w0 = weight[d], w1 = weight[d + 1];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            floats d0 = minimum(all(MOST_DENOMINATOR), queries[r] * k0 + 1.0f);
            floats d1 = minimum(all(MOST_DENOMINATOR), queries[ROWS + r] * k1 + 1.0f);
            sums[r] += (w0 * d1 + w1 * d0) / (d0 * d1);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        if (d < width) sums[r] += weight[d] / (queries[r] * load(keys) + 1.0f);
}

/* The same from 0, some features at a time: a long sum of floats loses more than a sum of short ones. */
static inline __attribute__((always_inline)) void sum_quotients(
    const float *queries, const float *keys, int64_t step, const float *weight, int64_t width, floats *sums)
{
    enum { SOME = 32 };
    for (int r = 0; r < ROWS; r++) sums[r] = all(0);
    for (int64_t d = 0; d < width; d += SOME) {
        floats few[ROWS] = {{0}};
        add_quotients(queries + d * ROWS, keys + d * step, step, weight + d, width - d < SOME ? width - d : SOME, few);
        for (int r = 0; r < ROWS; r++) sums[r] += few[r];
    }
}
