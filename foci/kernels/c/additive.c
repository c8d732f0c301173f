/* The scores wᵀ tanh(q + k) of a strip on a CPU, and their gradients, as foci/backends/additive_cpu.py asks for them.

   Scores: keys lie in the lanes, so that nothing is summed across them. Gradients: features lie in the lanes, so that
   what belongs to a query stays in registers while the keys go by. */

#include <stdlib.h>
#include <string.h>

#include "additive.h"

enum {
    BLOCK = 8 * ROWS, /* queries that a panel of keys meets while it is in the nearest cache */
    RUN = 64,         /* panels of LANES keys that one thread takes at a time */
    BESIDE = 4,       /* queries whose gradients are summed at once: two pairs that share a quotient */
    TILE = 32         /* keys that stay in the nearest cache, with their gradients, while the queries go by */
};

/* Every member has 8 bytes; Work in tanh_compiled.py has them in the same order. */
typedef struct {
    const float *queries; /* (pairs, query_count, width) */
    const float *keys;    /* (key pairs, key_count, width) */
    const float *weight;  /* (heads, width) */
    float *panels;        /* (key pairs, panel_count, width, LANES): e^2k; NULL where there are too few queries for it */
    int64_t *near;        /* (key pairs, panel_count): whether all e^2k of the panel are floats of full precision */
    float *scores;        /* (pairs, query_count, key_count) */
    const float *slopes;  /* (pairs, query_count, key_count): the gradient of the scores */
    float *d_queries;     /* (pairs, query_count, width), zeros */
    float *d_keys;        /* (parts, key pairs, key_count, width), zeros */
    float *d_weight;      /* (parts, pairs, width), zeros: the sum of slope / (1 + e^2(q + k)) */
    int64_t pairs, heads, group, query_count, key_count, panel_count, width, parts;
    int64_t exponentials; /* whether queries and keys are e^2q and e^2k; for gradients, whose width is whole vectors */
    int64_t next, failed; /* the next piece that no thread has taken; whether there was no memory */
} Work;

/* Where BESIDE queries meet TILE keys. */
typedef struct {
    const float *queries, *keys, *weight, *slopes[BESIDE];
    float *d_queries, *d_keys, *d_weight;
} Tile;

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t take(Work *work) { return __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED); }

/* The first few floats of a vector, 0 in the other lanes. */
static inline floats some(const float *from, int64_t count)
{
    floats x = {0};
    if (count >= LANES) return load(from);
    memcpy(&x, from, (size_t)count * sizeof(float));
    return x;
}

static inline int is_near(floats a) { return reaching(all(FAR), magnitude(a)) == (1ull << LANES) - 1; }

/* e^2a of one vector into a column of (width, step); whether none of them is too far. */
static int lay_column(const float *from, int64_t width, float *to, int64_t step)
{
    int near = 1;
    for (int64_t d = 0; d < width; d += LANES) {
        floats a = some(from + d, width - d), e = exponential(a);
        near &= is_near(a);
        for (int64_t i = 0; i < lesser(LANES, width - d); i++) to[(d + i) * step] = e[i];
    }
    return near;
}

/* The exponentials of all keys, panel by panel; every thread runs it. */
void lay_out(Work *work)
{
    int64_t width = work->width;
    for (int64_t taken; (taken = take(work)) < work->pairs / work->group * work->panel_count;) {
        int64_t pair = taken / work->panel_count, first = taken % work->panel_count * LANES;
        float *panel = work->panels + taken * width * LANES;
        int near = 1;
        for (int64_t i = 0; i < LANES; i++) {
            /* Beyond the last key the last one again. */
            int64_t key = lesser(first + i, work->key_count - 1);
            near &= lay_column(work->keys + (pair * work->key_count + key) * width, width, panel + i, LANES);
        }
        work->near[taken] = near;
    }
}

/* The formula as it is written, for vectors that are too far for exponentials, and for a few queries. */
static float plain_score(const float *query, const float *key, const float *weight, int64_t width)
{
    floats sum = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        floats a = some(query + d, width - d), b = some(key + d, width - d);
        sum += some(weight + d, width - d) * tanh_half((a + b) * TWO_LOG2_E);
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* A few queries over a panel of keys, as the formula is written. */
static void plain_scores(const Work *work, int64_t pair, int64_t row, int64_t rows, int64_t first, int64_t count)
{
    int64_t width = work->width;
    const float *weight = work->weight + pair % work->heads * width;
    for (int64_t r = row; r < row + rows; r++) {
        const float *query = work->queries + (pair * work->query_count + r) * width;
        float *scores = work->scores + (pair * work->query_count + r) * work->key_count;
        for (int64_t j = first; j < first + count; j++) {
            const float *key = work->keys + (pair / work->group * work->key_count + j) * width;
            scores[j] = plain_score(query, key, weight, width);
        }
    }
}

/* ROWS queries over a panel of keys. On its own, so that the sums stay in the registers. */
static __attribute__((noinline)) void quick_scores(
    const float *queries, const float *panel, const float *weight, int64_t width, float constant, floats *found)
{
    floats sums[ROWS];
    sum_quotients(queries, panel, LANES, weight, width, sums);
    for (int r = 0; r < ROWS; r++) found[r] = constant - 2.0f * sums[r];
}

/* A block of queries over a run of panels; `beside` is (BLOCK / ROWS, width, ROWS). */
static void score_block(const Work *work, int64_t pair, int64_t row, int64_t start, int64_t stop, float *beside)
{
    int64_t width = work->width, rows = lesser(BLOCK, work->query_count - row), near[BLOCK / ROWS];
    const float *weight = work->weight + pair % work->heads * width;
    float constant = 0;
    for (int64_t d = 0; d < width; d++) constant += weight[d];
    for (int64_t r = 0; work->panels && r < rows; r++) {
        const float *query = work->queries + (pair * work->query_count + row + r) * width;
        int near_row = lay_column(query, width, beside + r / ROWS * ROWS * width + r % ROWS, ROWS);
        near[r / ROWS] = near_row & (r % ROWS ? near[r / ROWS] : 1);
    }
    for (int64_t p = start; p < stop; p++) {
        int64_t at = pair / work->group * work->panel_count + p, count = lesser(LANES, work->key_count - p * LANES);
        for (int64_t r = 0; r < rows; r += ROWS) {
            int64_t beyond = lesser(ROWS, rows - r);
            if (!work->panels || !work->near[at] || !near[r / ROWS]) {
                plain_scores(work, pair, row + r, beyond, p * LANES, count);
                continue;
            }
            floats found[ROWS];
            quick_scores(beside + r * width, work->panels + at * width * LANES, weight, width, constant, found);
            float *scores = work->scores + (pair * work->query_count + row + r) * work->key_count + p * LANES;
            for (int64_t i = 0; i < beyond; i++, scores += work->key_count) {
                if (count == LANES) store(scores, found[i]);
                else memcpy(scores, found + i, (size_t)count * sizeof(float));
            }
        }
    }
}

/* All scores; every thread runs it. */
void score(Work *work)
{
    int64_t blocks = (work->query_count + BLOCK - 1) / BLOCK, runs = (work->panel_count + RUN - 1) / RUN;
    /* Queries that are not there are compared too, and forgotten: they must be numbers. */
    float *beside = calloc((size_t)(BLOCK * work->width), sizeof(float));
    if (!beside) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t taken; (taken = take(work)) < work->pairs * blocks * runs;) {
        int64_t run = taken % runs, block = taken / runs % blocks;
        score_block(work, taken / runs / blocks, block * BLOCK, run * RUN, lesser(run * RUN + RUN, work->panel_count), beside);
    }
    free(beside);
}

/* What stands below: 1 + e^2(a + b), from the exponentials, or from a and b. */
static inline floats denominator(floats a, floats b, int64_t exponentials)
{
    if (exponentials) return minimum(all(MOST_DENOMINATOR), a * b + 1.0f);
    floats scale, rest, x = maximum(all(-60.0f), -maximum(all(-60.0f), (a + b) * -TWO_LOG2_E));
    split_power(x, &scale, &rest);
    return rest * scale + (scale + 1.0f);
}

/* The gradients that one vector of features gets from BESIDE queries and some keys: with s = 1 / (1 + e^2(q + k)), those
   of queries and keys are sums of slope 4 w (s - s²), that of the weight one of slope s. Rows are `width` apart. */
static inline __attribute__((always_inline)) void slope_tile(
    const Tile *tile, int64_t d, int64_t width, int64_t count, int64_t exponentials)
{
    const float *keys = tile->keys + d, *slopes[BESIDE];
    float *d_keys = tile->d_keys + d;
    floats q[BESIDE], dq[BESIDE] = {{0}}, dw = {0}, factor = load(tile->weight + d) * 4.0f;
    for (int r = 0; r < BESIDE; r++) q[r] = load(tile->queries + r * width + d), slopes[r] = tile->slopes[r];
    for (int64_t j = 0; j < count; j++, keys += width, d_keys += width) {
        floats k = load(keys), dk = load(d_keys);
#pragma GCC unroll 2
        for (int r = 0; r < BESIDE; r += 2) {
            floats d0 = denominator(q[r], k, exponentials), d1 = denominator(q[r + 1], k, exponentials);
            floats both = 1.0f / (d0 * d1), s0 = both * d1, s1 = both * d0;
            floats g0 = slopes[r][j] * s0, g1 = slopes[r + 1][j] * s1;
            floats p0 = g0 - g0 * s0, p1 = g1 - g1 * s1;
            dq[r] += p0, dq[r + 1] += p1;
            dk += factor * (p0 + p1);
            dw += g0 + g1;
        }
        store(d_keys, dk);
    }
    for (int r = 0; r < BESIDE; r++) {
        float *to = tile->d_queries + r * width + d;
        store(to, load(to) + factor * dq[r]);
    }
    store(tile->d_weight + d, load(tile->d_weight + d) + dw);
}

static __attribute__((noinline)) void slope_near(const Tile *tile, int64_t d, int64_t width, int64_t count)
{
    slope_tile(tile, d, width, count, 1);
}

static __attribute__((noinline)) void slope_far(const Tile *tile, int64_t d, int64_t width, int64_t count)
{
    slope_tile(tile, d, width, count, 0);
}

/* The queries of a pair from `first` to `last` over some keys; `room` is (2 BESIDE, width) and TILE zeros. */
static void slope_rows(
    const Work *work, int64_t part, int64_t pair, int64_t first, int64_t last, int64_t start, int64_t stop, float *room)
{
    int64_t width = work->width, key_pair = pair / work->group, key_pairs = work->pairs / work->group;
    size_t row_size = (size_t)width * sizeof(float);
    Tile tile = {.keys = work->keys + (key_pair * work->key_count + start) * width,
                 .weight = work->weight + pair % work->heads * width,
                 .d_keys = work->d_keys + ((part * key_pairs + key_pair) * work->key_count + start) * width,
                 .d_weight = work->d_weight + (part * work->pairs + pair) * width};
    for (int64_t row = first; row < last; row += BESIDE) {
        int64_t at = pair * work->query_count + row, count = lesser(BESIDE, last - row);
        for (int64_t r = 0; r < BESIDE; r++)
            tile.slopes[r] = r < count ? work->slopes + (at + r) * work->key_count + start : room + 2 * BESIDE * width;
        tile.queries = work->queries + at * width, tile.d_queries = work->d_queries + at * width;
        if (count < BESIDE) {
            /* What is missing are queries without slopes. */
            memset(room, 0, 2 * BESIDE * row_size);
            memcpy(room, tile.queries, (size_t)count * row_size);
            memcpy(room + BESIDE * width, tile.d_queries, (size_t)count * row_size);
            tile.queries = room, tile.d_queries = room + BESIDE * width;
        }
        for (int64_t d = 0; d < width; d += LANES)
            (work->exponentials ? slope_near : slope_far)(&tile, d, width, stop - start);
        if (count < BESIDE) memcpy(work->d_queries + at * width, tile.d_queries, (size_t)count * row_size);
    }
}

/* All gradients; every thread runs it. A piece is a part of the rows of all heads that share keys. */
void slope(Work *work)
{
    float *room = calloc((size_t)(2 * BESIDE * work->width + TILE), sizeof(float));
    if (!room) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t taken; (taken = take(work)) < work->pairs / work->group * work->parts;) {
        int64_t key_pair = taken / work->parts, part = taken % work->parts;
        int64_t first = part * work->query_count / work->parts, last = (part + 1) * work->query_count / work->parts;
        for (int64_t start = 0; start < work->key_count; start += TILE)
            for (int64_t pair = key_pair * work->group; pair < (key_pair + 1) * work->group; pair++)
                slope_rows(work, part, pair, first, last, start, lesser(start + TILE, work->key_count), room);
    }
    free(room);
}

/* What tanh_compiled.py lays the tensors out by. */
int64_t lanes(void) { return LANES; }
