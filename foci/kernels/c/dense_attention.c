/* Attention with its whole weight matrix on a CPU, for foci/weights/dense_attention_c.py.

   It takes a block of queries at a time, head by head: logits of all keys, weights in the same memory, then the rows of
   the matrix and the output, while the weights are in the L2 cache. */

#include <stdlib.h>
#include <string.h>

#include "masks.h"
#include "pages.h"
#include "product.h"

enum {
    VALUE_STEP = 2 * LANES, /* value features per product */
    PREFETCH_KEYS = 24      /* keys whose values are prefetched: when heads alternate, they are not in the cache */
};

/* Every member has 8 bytes; DenseAttentionStruct in weights/dense_attention_c.py has the same members in the same order.
   NULL is absent. */
typedef struct {
    MaskStruct masks;
    const float *queries; /* (pairs, query_count, width) */
    const float *keys;    /* (batch, key/value heads, padded / PANEL, width, PANEL) */
    const float *values;  /* (batch, key/value heads, key_count, value_width); the width is a multiple of VALUE_STEP */
    const float *added;   /* (batch or 1, heads or 1, query_count or 1, key_count or 1): a bias, with the strides below */
    float *out;           /* (batch, query_count, heads, value_width) */
    float *matrix;        /* (pairs, query_count, key_count); (batch, query_count, key_count) if averaged */
    int64_t pairs, heads, group, query_count, key_count, padded, width, value_width, rows, averaged;
    int64_t added_batch, added_head, added_row, added_column;
    double scale;         /* of the logits, in base 2 */
    int64_t next, failed; /* the next work item; whether an allocation failed */
} DenseAttentionStruct;

static const float LOG2_E = 1.44269504f;

/* The state of a block of rows. */
typedef struct {
    const DenseAttentionStruct *args;
    int64_t batch, head, pair, first, count, step;
    int64_t from, to;   /* the keys that some row of the block sees; `from` is a multiple of PANEL */
    float *x, *queries; /* (rows, step), (rows / ROWS, width, ROWS) */
    float share[];      /* (rows): the normalization of each row */
} Block;

static void pack_queries(const Block *block)
{
    const DenseAttentionStruct *args = block->args;
    int64_t width = args->width;
    float scale = (float)args->scale;
    const float *query = args->queries + (block->pair * args->query_count + block->first) * width;
    for (int64_t r = 0; r < block->count; r++, query += width) {
        float *packed = block->queries + r / ROWS * ROWS * width + r % ROWS;
        for (int64_t d = 0; d < width; d++) packed[d * ROWS] = scale * query[d];
    }
}

/* Compute the logits of the block and the keys that it sees. */
static void compute_logits(const Block *block)
{
    const DenseAttentionStruct *args = block->args;
    static const float shift[ROWS];
    int64_t width = args->width;
    const float *keys = args->keys + block->pair / args->group * args->padded * width;
    for (int64_t c = block->from; c < block->to; c += PANEL)
        for (int64_t r = 0; r < block->count; r += ROWS)
            multiply(block->queries + r * width, keys + c * width, width, shift, block->x + r * block->step + c, block->step);
}

static void add_bias(const Block *block, int64_t row, int64_t low, int64_t high, float *x)
{
    const DenseAttentionStruct *args = block->args;
    const float *added = args->added + block->batch * args->added_batch + block->head * args->added_head;
    added += row * args->added_row;
    if (args->added_column == 1)
        for (int64_t j = low; j < high; j++) x[j] += added[j] * LOG2_E;
    else
        for (int64_t j = low; j < high; j++) x[j] += added[j * args->added_column] * LOG2_E;
}

/* Replace x by 2^(x - max), 0 for masked entries; return the inverse of their sum, or 0 for a fully masked row. */
static float exponentiate_row(float *x, int64_t begin, int64_t end)
{
    floats peaks = broadcast(MASKED), sums = {0};
    for (int64_t j = begin; j < end; j += LANES) peaks = maximum(peaks, load(x + j));
    float peak = MASKED / 2;
    for (int i = 0; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
    /* In a fully masked row every power is 0; a NaN entry makes the sum NaN. */
    peak = peak > MASKED / 2 ? peak : 0;
    for (int64_t j = begin; j < end; j += LANES) {
        floats weight = exp2_approx(load(x + j) - peak);
        sums += weight;
        store(x + j, weight);
    }
    float sum = sum_lanes(sums);
    return sum == 0 ? 0 : 1 / sum;
}

/* Compute the unnormalized weights of one row; 0 for the other keys of the block. Returns the normalization. */
static float compute_row_weights(const Block *block, int64_t row, float *x)
{
    const MaskStruct *masks = &block->args->masks;
    int64_t low, high, end = (block->to + LANES - 1) / LANES * LANES;
    if (!visible_bounds(masks, block->batch, row, 0, masks->key_count, &low, &high)) {
        memset(x + block->from, 0, (size_t)(end - block->from) * sizeof(float));
        return 0;
    }
    int64_t begin = low / LANES * LANES, stop = (high + LANES - 1) / LANES * LANES;
    if (block->args->added) add_bias(block, row, low, high, x);
    mask_outside_ranges(masks, block->batch, row, 0, begin, stop, x);
    mask_by_ids_and_dense(masks, block->batch, block->head, row, 0, low, high, x);
    memset(x + block->from, 0, (size_t)(begin - block->from) * sizeof(float));
    memset(x + stop, 0, (size_t)(end - stop) * sizeof(float));
    return exponentiate_row(x, begin, stop);
}

/* Write a row of the matrix, or add a head's share to an averaged row. */
static void write_row(const Block *block, int64_t row, const float *x, float share)
{
    const DenseAttentionStruct *args = block->args;
    int64_t owner = args->averaged ? block->batch : block->pair;
    float *matrix = args->matrix + (owner * args->query_count + row) * args->key_count;
    float part = args->averaged ? share / (float)args->heads : share;
    int64_t j = block->from;
    if (args->averaged && block->head > 0) {
        for (; j + LANES <= block->to; j += LANES) store(matrix + j, load(matrix + j) + part * load(x + j));
        for (; j < block->to; j++) matrix[j] += part * x[j];
        return;
    }
    memset(matrix, 0, (size_t)block->from * sizeof(float));
    for (; j + LANES <= block->to; j += LANES) store(matrix + j, part * load(x + j));
    for (; j < block->to; j++) matrix[j] = part * x[j];
    memset(matrix + block->to, 0, (size_t)(args->key_count - block->to) * sizeof(float));
}

static void compute_weights(Block *block)
{
    for (int64_t r = 0; r < block->count; r++) {
        float *x = block->x + r * block->step;
        block->share[r] = compute_row_weights(block, block->first + r, x);
        write_row(block, block->first + r, x, block->share[r]);
    }
}

/* Up to ROWS rows of weights, with row stride `step`, times VALUE_STEP columns of `count` values, normalized; `next` is
   the row stride of out. Not inlined, as `multiply`. The keys are not split: the L2 cache delivers the values fast
   enough, and the sums stay in registers. */
static __attribute__((noinline)) void multiply_values(
    const float *x, int64_t step, const float *values, int64_t width, int64_t count, const float *share, int64_t rows,
    float *out, int64_t next)
{
    floats sums[ROWS][2] = {{{0}}};
    for (int64_t j = 0; j < count; j++, values += width) {
        floats v0 = load(values), v1 = load(values + LANES);
        __builtin_prefetch(values + PREFETCH_KEYS * width), __builtin_prefetch(values + PREFETCH_KEYS * width + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            sums[r][0] += x[r * step + j] * v0;
            sums[r][1] += x[r * step + j] * v1;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        if (r < rows) {
            store(out + r * next, share[r] * sums[r][0]);
            store(out + r * next + LANES, share[r] * sums[r][1]);
        }
}

/* Compute the output of the block. */
static void compute_output(const Block *block)
{
    const DenseAttentionStruct *args = block->args;
    int64_t width = args->value_width, next = args->heads * width;
    const float *values = args->values + (block->pair / args->group * args->key_count + block->from) * width;
    float *out = args->out + (block->batch * args->query_count + block->first) * next + block->head * width;
    for (int64_t d = 0; d < width; d += VALUE_STEP)
        for (int64_t r = 0; r < block->count; r += ROWS)
            multiply_values(block->x + r * block->step + block->from, block->step, values + d, width, block->to - block->from,
                block->share + r, block->count - r, out + r * next + d, next);
}

/* Find the keys that some row of the block sees; the first is rounded down to a multiple of PANEL. */
static void find_keys(Block *block)
{
    const DenseAttentionStruct *args = block->args;
    block->from = args->key_count, block->to = 0;
    for (int64_t r = 0; r < block->count; r++) {
        int64_t low, high;
        if (!visible_bounds(&args->masks, block->batch, block->first + r, 0, args->key_count, &low, &high)) continue;
        block->from = min_int(block->from, low), block->to = max_int(block->to, high);
    }
    block->from = block->to ? block->from / PANEL * PANEL : 0;
}

static void process_block(Block *block, int64_t pair, int64_t first, int64_t count)
{
    block->pair = pair, block->batch = pair / block->args->heads, block->head = pair % block->args->heads;
    block->first = first, block->count = count;
    find_keys(block);
    pack_queries(block);
    compute_logits(block);
    compute_weights(block);
    compute_output(block);
}

/* Take blocks until none is left. Every thread runs it; the assignment of blocks to threads does not change the result.

   If the matrix is averaged, a args item is a block of all heads, whose rows are summed while they are in the cache.
   Otherwise heads follow each other: their keys and values stay in the cache, and the matrix is written in order. */
static void process_blocks(DenseAttentionStruct *args, Block *block)
{
    int64_t heads_per_item = args->averaged ? args->heads : 1, blocks = (args->query_count + args->rows - 1) / args->rows;
    int64_t count = args->pairs / heads_per_item * blocks;
    for (int64_t item; (item = __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED)) < count;) {
        int64_t pair = item / blocks * heads_per_item, first = item % blocks * args->rows;
        int64_t rows = min_int(args->rows, args->query_count - first);
        for (int64_t i = 0; i < heads_per_item; i++) process_block(block, pair + i, first, rows);
    }
}

void compute_dense_attention(DenseAttentionStruct *args)
{
    /* A row stride that is a power of two would map all rows to the same cache lines. */
    int64_t step = (args->padded + LANES) / (2 * LANES) * (2 * LANES) + LANES, rows = args->rows;
    size_t floats_needed = (size_t)(rows * (step + args->width + 1));
    Block *block = calloc(1, sizeof(Block) + floats_needed * sizeof(float) + 64);
    if (!block) {
        __atomic_store_n(&args->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    block->args = args, block->step = step;
    block->x = (float *)(((uintptr_t)(block->share + rows) + 63) / 64 * 64), block->queries = block->x + rows * step;
    process_blocks(args, block);
    free(block);
}

/* The layout of the tensors that weights/dense_attention_c.py allocates. */
int64_t panel_keys(void) { return PANEL; }
int64_t value_step(void) { return VALUE_STEP; }
int64_t rows_per_product(void) { return ROWS; }
