/* Vectors of floats with the vector extensions of GCC and Clang, as wide as the machine supports.

   Intrinsics are used for what the extensions lack: maximum, minimum, and comparisons as bits. */

#pragma once

#include <stdint.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

/* ROWS x 3 vectors of sums, 3 of keys and 1 of a query fill the registers. */
#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 8 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4 };
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 8 };
#else
enum { LANES = 4, ROWS = 4 };
#endif

typedef float floats __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

typedef uint64_t pairs __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef uint32_t half_words __attribute__((vector_size(LANES / 2 * sizeof(float)), may_alias));

static inline floats load(const float *from) { return *(const floats *)from; }
static inline void store(float *to, floats x) { *(floats *)to = x; }
static inline floats broadcast(float x) { return x - (floats){0}; }
static inline ints lane_numbers(void)
{
    ints numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return numbers;
}
static inline floats magnitude(floats x) { return (floats)((ints)x & 0x7fffffff); }

static inline floats maximum(floats a, floats b)
{
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    ints larger = a > b;
    return (floats)(((ints)a & larger) | ((ints)b & ~larger));
#endif
}

/* The second argument if either is NaN: a NaN in b stays NaN. */
static inline floats minimum(floats a, floats b)
{
#if defined(__AVX512F__)
    return (floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    ints smaller = a < b;
    return (floats)(((ints)a & smaller) | ((ints)b & ~smaller));
#endif
}

/* Bit i is set if lane i of x is at least lane i of `least`. */
static inline uint64_t lanes_at_least(floats x, floats least)
{
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_GE_OQ);
#elif defined(__AVX__)
    return (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)least, _CMP_GE_OQ));
#else
    uint64_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint64_t)(x[i] >= least[i]) << i;
    return bits;
#endif
}

/* Bit i is set if lane i of x is above that of `least`. */
static inline uint64_t lanes_above(floats x, floats least)
{
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_GT_OQ);
#elif defined(__AVX__)
    return (uint64_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)least, _CMP_GT_OQ));
#else
    uint64_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint64_t)(x[i] > least[i]) << i;
    return bits;
#endif
}

static inline float largest_lane(floats x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

static inline float sum_lanes(floats x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

/* The sums of the lanes of four vectors. */
static inline void sum_lanes_of_four(const floats *x, float *sums)
{
#if defined(__AVX__)
    __m256 half[4];
    for (int i = 0; i < 4; i++)
#if defined(__AVX512F__)
        half[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)x[i]), _mm512_extractf32x8_ps((__m512)x[i], 1));
#else
        half[i] = (__m256)x[i];
#endif
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    for (int i = 0; i < 4; i++) sums[i] = sum_lanes(x[i]);
#endif
}

/* The sums of LANES / 2 pairs of neighbouring lanes. */
static inline void store_pair_sums(float *to, floats x)
{
    pairs bits = (pairs)x;
    floats sums = x + (floats)(bits >> 32);
    half_words low = __builtin_convertvector((pairs)sums, half_words);
    __builtin_memcpy(to, &low, sizeof(low));
}

/* 2^x = scale (1 + rest): scale is 2 to the nearest integer, a polynomial gives the rest. */
static inline void split_power(floats x, floats *scale, floats *rest)
{
    const float round = 12582912.0f; /* 1.5 x 2^23: adding it rounds to an integer */
    floats shifted = x + round;
    floats f = x - (shifted - round);
    floats p = f * 0x1.41fbbcp-13f + 0x1.5f3e54p-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e43p-1f;
    *scale = (floats)(((words)shifted << 23) + 0x3f800000u);
    *rest = p * f;
}

/* 2^x with a relative error of 1e-7; 0 below the smallest normal number. */
static inline floats exp2_approx(floats x)
{
    floats scale, rest;
    split_power(x, &scale, &rest);
    return (floats)((ints)((rest + 1.0f) * scale) & ~(x < -126.0f));
}

/* tanh(x ln 2 / 2) = (2^x - 1) / (2^x + 1): `rest` keeps the precision of a small 2^x - 1. */
static inline floats tanh_half(floats x)
{
    floats scale, rest, bounded = maximum(broadcast(-60.0f), -maximum(broadcast(-60.0f), -x));
    split_power(bounded, &scale, &rest);
    floats above = rest * scale + (scale - 1.0f);
    return above / (above + 2.0f);
}
