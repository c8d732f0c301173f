/* wᵀ tanh(a + b) from exponentials that are computed once per query and key.

   tanh(a + b) = 1 - 2 / (1 + e^2a e^2b): a term takes a product, a sum and a quotient, and two terms share a quotient:
   w0 / D0 + w1 / D1 = (w0 D1 + w1 D0) / (D0 D1). */

#pragma once

#include "vectors.h"

/* Beyond this |a|, e^2a or e^-2a does not have full float precision. */
static const float MAX_INPUT = 43.0f;

/* Denominators are clamped to this, so that the product of two fits a float; the error is far below rounding. */
static const float MAX_DENOMINATOR = 0x1p60f;

static const float TWO_LOG2_E = 2.88539008f;

/* e^2a for |a| up to MAX_INPUT: the integer power of two is split off first, so that large exponents lose no digits. */
static inline floats exponential(floats a)
{
    const float round = 12582912.0f; /* as in split_power */
    floats shifted = a * TWO_LOG2_E + round, whole = shifted - round;
    floats rest = a * 2.0f - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    floats scale = (floats)(((words)shifted << 23) + 0x3f800000u);
    return exp2_approx(rest * 1.44269504f) * scale;
}

/* Add Σ w / (1 + E F) for ROWS queries and LANES keys; E is (width, ROWS), F (width, LANES) with row stride `step`. */
static inline __attribute__((always_inline)) void add_quotients(
    const float *queries, const float *keys, int64_t step, const float *weight, int64_t width, floats *sums)
{
    int64_t d = 0;
    for (; d + 2 <= width; d += 2, queries += 2 * ROWS, keys += 2 * step) {
        floats k0 = load(keys), k1 = load(keys + step);
        float w0 = weight[d], w1 = weight[d + 1];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            floats d0 = minimum(broadcast(MAX_DENOMINATOR), queries[r] * k0 + 1.0f);
            floats d1 = minimum(broadcast(MAX_DENOMINATOR), queries[ROWS + r] * k1 + 1.0f);
            sums[r] += (w0 * d1 + w1 * d0) / (d0 * d1);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        if (d < width) sums[r] += weight[d] / (queries[r] * load(keys) + 1.0f);
}

/* Compute the same sums in chunks of features: one long float sum would lose more precision than several short ones. */
static inline __attribute__((always_inline)) void sum_quotients(
    const float *queries, const float *keys, int64_t step, const float *weight, int64_t width, floats *sums)
{
    enum { CHUNK_WIDTH = 32 };
    for (int r = 0; r < ROWS; r++) sums[r] = broadcast(0);
    for (int64_t d = 0; d < width; d += CHUNK_WIDTH) {
        floats chunk_sums[ROWS] = {{0}};
        add_quotients(queries + d * ROWS, keys + d * step, step, weight + d, width - d < CHUNK_WIDTH ? width - d : CHUNK_WIDTH, chunk_sums);
        for (int r = 0; r < ROWS; r++) sums[r] += chunk_sums[r];
    }
}
