/* Additive scores wᵀ tanh(q + k) of a strip on a CPU, and their gradients, for foci/backends/additive_cpu.py.

   Scores: the vector lanes are keys, so that nothing is summed across lanes. Gradients: the lanes are features, so that
   the sums of a query stay in registers during the loop over keys. */

#include <stdlib.h>
#include <string.h>

#include "additive.h"

enum {
    QUERY_BLOCK = 8 * ROWS, /* queries that use a panel of keys while it is in the L1 cache */
    PANELS_PER_ITEM = 64,   /* panels of LANES keys in one work item */
    QUERY_GROUP = 4,        /* queries whose gradients are summed together: two pairs that share a quotient */
    KEY_TILE = 32           /* keys that stay in the L1 cache, with their gradients, during the loop over queries */
};

/* Every member has 8 bytes; AdditiveStruct in backends/additive_cpu.py has the same members in the same order. */
typedef struct {
    const float *queries; /* (pairs, query_count, width) */
    const float *keys;    /* (key pairs, key_count, width) */
    const float *weight;  /* (heads, width) */
    float *panels;        /* (key pairs, panel_count, width, LANES): e^2k; NULL if there are too few queries to use it */
    int64_t *near;        /* (key pairs, panel_count): whether all e^2k of the panel have full float precision */
    float *scores;        /* (pairs, query_count, key_count) */
    const float *slopes;  /* (pairs, query_count, key_count): the gradient of the scores */
    float *d_queries;     /* (pairs, query_count, width), zeros */
    float *d_keys;        /* (parts, key pairs, key_count, width), zeros */
    float *d_weight;      /* (parts, pairs, width), zeros: the sum of slope / (1 + e^2(q + k)) */
    int64_t pairs, heads, group, query_count, key_count, panel_count, width, parts;
    int64_t exponentials; /* whether queries and keys are e^2q and e^2k; for gradients, whose width is a multiple of LANES */
    int64_t next, failed; /* the next work item; whether an allocation failed */
} AdditiveStruct;

/* QUERY_GROUP queries and KEY_TILE keys. */
typedef struct {
    const float *queries, *keys, *weight, *slopes[QUERY_GROUP];
    float *d_queries, *d_keys, *d_weight;
} GradientTile;

static inline int64_t min_int(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t next_item(AdditiveStruct *args) { return __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED); }

/* Load the first `count` floats of a vector, 0 in the other lanes. */
static inline floats load_first(const float *from, int64_t count)
{
    floats x = {0};
    if (count >= LANES) return load(from);
    memcpy(&x, from, (size_t)count * sizeof(float));
    return x;
}

static inline int is_near(floats a) { return lanes_at_least(broadcast(MAX_INPUT), magnitude(a)) == (1ull << LANES) - 1; }

/* Store e^2a of one vector as a column of (width, step); return whether all values are in range. */
static int store_exponentials(const float *from, int64_t width, float *to, int64_t step)
{
    int near = 1;
    for (int64_t d = 0; d < width; d += LANES) {
        floats a = load_first(from + d, width - d), e = exponential(a);
        near &= is_near(a);
        for (int64_t i = 0; i < min_int(LANES, width - d); i++) to[(d + i) * step] = e[i];
    }
    return near;
}

/* Compute the exponentials of all keys, panel by panel. Every thread runs it. */
void pack_keys(AdditiveStruct *args)
{
    int64_t width = args->width;
    for (int64_t item; (item = next_item(args)) < args->pairs / args->group * args->panel_count;) {
        int64_t pair = item / args->panel_count, first = item % args->panel_count * LANES;
        float *panel = args->panels + item * width * LANES;
        int near = 1;
        for (int64_t i = 0; i < LANES; i++) {
            /* Padding repeats the last key. */
            int64_t key = min_int(first + i, args->key_count - 1);
            near &= store_exponentials(args->keys + (pair * args->key_count + key) * width, width, panel + i, LANES);
        }
        args->near[item] = near;
    }
}

/* The plain formula, for vectors out of the range of exponentials, and for a few queries. */
static float score_directly(const float *query, const float *key, const float *weight, int64_t width)
{
    floats sum = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        floats a = load_first(query + d, width - d), b = load_first(key + d, width - d);
        sum += load_first(weight + d, width - d) * tanh_half((a + b) * TWO_LOG2_E);
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

/* The plain formula for a few queries and a panel of keys. */
static void score_panel_directly(const AdditiveStruct *args, int64_t pair, int64_t row, int64_t rows, int64_t first, int64_t count)
{
    int64_t width = args->width;
    const float *weight = args->weight + pair % args->heads * width;
    for (int64_t r = row; r < row + rows; r++) {
        const float *query = args->queries + (pair * args->query_count + r) * width;
        float *scores = args->scores + (pair * args->query_count + r) * args->key_count;
        for (int64_t j = first; j < first + count; j++) {
            const float *key = args->keys + (pair / args->group * args->key_count + j) * width;
            scores[j] = score_directly(query, key, weight, width);
        }
    }
}

/* ROWS queries and a panel of keys. Not inlined, so that the sums stay in registers. */
static __attribute__((noinline)) void score_panel(
    const float *queries, const float *panel, const float *weight, int64_t width, float constant, floats *panel_scores)
{
    floats sums[ROWS];
    sum_quotients(queries, panel, LANES, weight, width, sums);
    for (int r = 0; r < ROWS; r++) panel_scores[r] = constant - 2.0f * sums[r];
}

/* A block of queries and a range of panels; `packed` is (QUERY_BLOCK / ROWS, width, ROWS). */
static void score_block(const AdditiveStruct *args, int64_t pair, int64_t row, int64_t start, int64_t stop, float *packed)
{
    int64_t width = args->width, rows = min_int(QUERY_BLOCK, args->query_count - row), near[QUERY_BLOCK / ROWS];
    const float *weight = args->weight + pair % args->heads * width;
    float constant = 0;
    for (int64_t d = 0; d < width; d++) constant += weight[d];
    for (int64_t r = 0; args->panels && r < rows; r++) {
        const float *query = args->queries + (pair * args->query_count + row + r) * width;
        int near_row = store_exponentials(query, width, packed + r / ROWS * ROWS * width + r % ROWS, ROWS);
        near[r / ROWS] = near_row & (r % ROWS ? near[r / ROWS] : 1);
    }
    for (int64_t p = start; p < stop; p++) {
        int64_t at = pair / args->group * args->panel_count + p, count = min_int(LANES, args->key_count - p * LANES);
        for (int64_t r = 0; r < rows; r += ROWS) {
            int64_t beyond = min_int(ROWS, rows - r);
            if (!args->panels || !args->near[at] || !near[r / ROWS]) {
                score_panel_directly(args, pair, row + r, beyond, p * LANES, count);
                continue;
            }
            floats panel_scores[ROWS];
            score_panel(packed + r * width, args->panels + at * width * LANES, weight, width, constant, panel_scores);
            float *scores = args->scores + (pair * args->query_count + row + r) * args->key_count + p * LANES;
            for (int64_t i = 0; i < beyond; i++, scores += args->key_count) {
                if (count == LANES) store(scores, panel_scores[i]);
                else memcpy(scores, panel_scores + i, (size_t)count * sizeof(float));
            }
        }
    }
}

/* Compute all scores. Every thread runs it. */
void compute_scores(AdditiveStruct *args)
{
    int64_t blocks = (args->query_count + QUERY_BLOCK - 1) / QUERY_BLOCK, runs = (args->panel_count + PANELS_PER_ITEM - 1) / PANELS_PER_ITEM;
    /* Scores of padding queries are computed and discarded, so they must be finite: zeros. */
    float *packed = calloc((size_t)(QUERY_BLOCK * args->width), sizeof(float));
    if (!packed) {
        __atomic_store_n(&args->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t item; (item = next_item(args)) < args->pairs * blocks * runs;) {
        int64_t run = item % runs, block = item / runs % blocks;
        score_block(args, item / runs / blocks, block * QUERY_BLOCK, run * PANELS_PER_ITEM, min_int(run * PANELS_PER_ITEM + PANELS_PER_ITEM, args->panel_count), packed);
    }
    free(packed);
}

/* 1 + e^2(a + b), from the exponentials, or from a and b. */
static inline floats denominator(floats a, floats b, int64_t exponentials)
{
    if (exponentials) return minimum(broadcast(MAX_DENOMINATOR), a * b + 1.0f);
    floats scale, rest, x = maximum(broadcast(-60.0f), -maximum(broadcast(-60.0f), (a + b) * -TWO_LOG2_E));
    split_power(x, &scale, &rest);
    return rest * scale + (scale + 1.0f);
}

/* Add the gradients of one vector of features from QUERY_GROUP queries and some keys. With s = 1 / (1 + e^2(q + k)), the
   gradients of queries and keys are sums of slope 4 w (s - s²), that of the weight is a sum of slope s. `width` is the
   row stride. */
static inline __attribute__((always_inline)) void add_tile_gradients(
    const GradientTile *tile, int64_t d, int64_t width, int64_t count, int64_t exponentials)
{
    const float *keys = tile->keys + d, *slopes[QUERY_GROUP];
    float *d_keys = tile->d_keys + d;
    floats q[QUERY_GROUP], dq[QUERY_GROUP] = {{0}}, dw = {0}, factor = load(tile->weight + d) * 4.0f;
    for (int r = 0; r < QUERY_GROUP; r++) q[r] = load(tile->queries + r * width + d), slopes[r] = tile->slopes[r];
    for (int64_t j = 0; j < count; j++, keys += width, d_keys += width) {
        floats k = load(keys), dk = load(d_keys);
#pragma GCC unroll 2
        for (int r = 0; r < QUERY_GROUP; r += 2) {
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
    for (int r = 0; r < QUERY_GROUP; r++) {
        float *to = tile->d_queries + r * width + d;
        store(to, load(to) + factor * dq[r]);
    }
    store(tile->d_weight + d, load(tile->d_weight + d) + dw);
}

static __attribute__((noinline)) void add_tile_gradients_from_exponentials(const GradientTile *tile, int64_t d, int64_t width, int64_t count)
{
    add_tile_gradients(tile, d, width, count, 1);
}

static __attribute__((noinline)) void add_tile_gradients_from_vectors(const GradientTile *tile, int64_t d, int64_t width, int64_t count)
{
    add_tile_gradients(tile, d, width, count, 0);
}

/* The queries of a pair from `first` to `last`, and some keys; `scratch` is (2 QUERY_GROUP, width) and KEY_TILE zeros. */
static void add_row_gradients(
    const AdditiveStruct *args, int64_t part, int64_t pair, int64_t first, int64_t last, int64_t start, int64_t stop, float *scratch)
{
    int64_t width = args->width, key_pair = pair / args->group, key_pairs = args->pairs / args->group;
    size_t row_size = (size_t)width * sizeof(float);
    GradientTile tile = {.keys = args->keys + (key_pair * args->key_count + start) * width,
                 .weight = args->weight + pair % args->heads * width,
                 .d_keys = args->d_keys + ((part * key_pairs + key_pair) * args->key_count + start) * width,
                 .d_weight = args->d_weight + (part * args->pairs + pair) * width};
    for (int64_t row = first; row < last; row += QUERY_GROUP) {
        int64_t at = pair * args->query_count + row, count = min_int(QUERY_GROUP, last - row);
        for (int64_t r = 0; r < QUERY_GROUP; r++)
            tile.slopes[r] = r < count ? args->slopes + (at + r) * args->key_count + start : scratch + 2 * QUERY_GROUP * width;
        tile.queries = args->queries + at * width, tile.d_queries = args->d_queries + at * width;
        if (count < QUERY_GROUP) {
            /* Missing queries have slopes of 0. */
            memset(scratch, 0, 2 * QUERY_GROUP * row_size);
            memcpy(scratch, tile.queries, (size_t)count * row_size);
            memcpy(scratch + QUERY_GROUP * width, tile.d_queries, (size_t)count * row_size);
            tile.queries = scratch, tile.d_queries = scratch + QUERY_GROUP * width;
        }
        for (int64_t d = 0; d < width; d += LANES)
            (args->exponentials ? add_tile_gradients_from_exponentials : add_tile_gradients_from_vectors)(&tile, d, width, stop - start);
        if (count < QUERY_GROUP) memcpy(args->d_queries + at * width, tile.d_queries, (size_t)count * row_size);
    }
}

/* Compute all gradients. Every thread runs it. A work item is a part of the rows of all heads that share keys. */
void compute_gradients(AdditiveStruct *args)
{
    float *scratch = calloc((size_t)(2 * QUERY_GROUP * args->width + KEY_TILE), sizeof(float));
    if (!scratch) {
        __atomic_store_n(&args->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t item; (item = next_item(args)) < args->pairs / args->group * args->parts;) {
        int64_t key_pair = item / args->parts, part = item % args->parts;
        int64_t first = part * args->query_count / args->parts, last = (part + 1) * args->query_count / args->parts;
        for (int64_t start = 0; start < args->key_count; start += KEY_TILE)
            for (int64_t pair = key_pair * args->group; pair < (key_pair + 1) * args->group; pair++)
                add_row_gradients(args, part, pair, first, last, start, min_int(start + KEY_TILE, args->key_count), scratch);
    }
    free(scratch);
}

/* The layout of the tensors that backends/additive_cpu.py allocates. */
int64_t lanes(void) { return LANES; }
