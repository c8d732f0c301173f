/* Attention together with its whole matrix on a CPU, as foci/weights/dense_attention_c.py asks for it.

   A block of queries at a time, head by head: its logits over all keys, its weights in the same memory, then both results
   of them, the output and the rows of the matrix, while they lie in the second cache. */

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "masks.h"
#include "product.h"

enum {
    SIDE = 2 * LANES, /* values that are summed at once */
    AHEAD = 24        /* keys whose values are fetched ahead: where heads take turns, they come from far */
};

/* Every member has 8 bytes; Work in weights/dense_attention_c.py has them in the same order. What is NULL is not given. */
typedef struct {
    Masks masks;
    const float *queries; /* (pairs, query_count, width) */
    const float *keys;    /* (batch, key heads, padded / PANEL, width, PANEL) */
    const float *values;  /* (batch, key heads, key_count, value_width); the width is whole SIDEs */
    const float *added;   /* (batch or 1, heads or 1, query_count or 1, key_count or 1), by its steps */
    float *out;           /* (batch, query_count, heads, value_width) */
    float *matrix;        /* (pairs, query_count, key_count); (batch, query_count, key_count) where averaged */
    int64_t pairs, heads, group, query_count, key_count, padded, width, value_width, rows, averaged;
    int64_t added_batch, added_head, added_row, added_column;
    double scale;         /* of the logits, in base 2 */
    int64_t next, failed; /* the next block that no thread has taken; whether there was no memory */
} Work;

static const float LOG2_E = 1.44269504f;

/* A block of rows on its way over the heads. */
typedef struct {
    const Work *work;
    int64_t batch, head, pair, first, count, step;
    int64_t from, to;   /* the keys that some row of the block sees, `from` at a whole panel */
    float *x, *queries; /* (rows, step), (rows / ROWS, width, ROWS) */
    float share[];      /* (rows): what makes the weights of a row sum to 1 */
} Block;

static void lay_queries(const Block *block)
{
    const Work *work = block->work;
    int64_t width = work->width;
    float scale = (float)work->scale;
    const float *query = work->queries + (block->pair * work->query_count + block->first) * width;
    for (int64_t r = 0; r < block->count; r++, query += width) {
        float *beside = block->queries + r / ROWS * ROWS * width + r % ROWS;
        for (int64_t d = 0; d < width; d++) beside[d * ROWS] = scale * query[d];
    }
}

/* The logits of the block over the keys that it sees. */
static void compare(const Block *block)
{
    const Work *work = block->work;
    static const float shift[ROWS];
    int64_t width = work->width;
    const float *keys = work->keys + block->pair / work->group * work->padded * width;
    for (int64_t c = block->from; c < block->to; c += PANEL)
        for (int64_t r = 0; r < block->count; r += ROWS)
            multiply(block->queries + r * width, keys + c * width, width, shift, block->x + r * block->step + c, block->step);
}

static void add_bias(const Block *block, int64_t row, int64_t low, int64_t high, float *x)
{
    const Work *work = block->work;
    const float *added = work->added + block->batch * work->added_batch + block->head * work->added_head;
    added += row * work->added_row;
    if (work->added_column == 1)
        for (int64_t j = low; j < high; j++) x[j] += added[j] * LOG2_E;
    else
        for (int64_t j = low; j < high; j++) x[j] += added[j * work->added_column] * LOG2_E;
}

/* 2^(x - the largest) in the place of x, 0 for what is hidden; the inverse of their sum, or 0 where nothing is seen. */
static float weigh(float *x, int64_t begin, int64_t end)
{
    floats peaks = all(HIDDEN), sums = {0};
    for (int64_t j = begin; j < end; j += LANES) peaks = maximum(peaks, load(x + j));
    float peak = HIDDEN / 2;
    for (int i = 0; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;
    /* Where nothing is seen, every power is 0; and where something is not a number, their sum is none. */
    peak = peak > HIDDEN / 2 ? peak : 0;
    for (int64_t j = begin; j < end; j += LANES) {
        floats weight = power(load(x + j) - peak);
        sums += weight;
        store(x + j, weight);
    }
    float sum = total(sums);
    return sum == 0 ? 0 : 1 / sum;
}

/* The weights of one row, before they are shared out; 0 everywhere else between the block's first and last key. */
static float weigh_row(const Block *block, int64_t row, float *x)
{
    const Masks *masks = &block->work->masks;
    int64_t low, high, end = (block->to + LANES - 1) / LANES * LANES;
    if (!visible(masks, block->batch, row, 0, masks->key_count, &low, &high)) {
        memset(x + block->from, 0, (size_t)(end - block->from) * sizeof(float));
        return 0;
    }
    int64_t begin = low / LANES * LANES, stop = (high + LANES - 1) / LANES * LANES;
    if (block->work->added) add_bias(block, row, low, high, x);
    hide_outside(masks, block->batch, row, 0, begin, stop, x);
    hide_inside(masks, block->batch, block->head, row, 0, low, high, x);
    memset(x + block->from, 0, (size_t)(begin - block->from) * sizeof(float));
    memset(x + stop, 0, (size_t)(end - stop) * sizeof(float));
    return weigh(x, begin, stop);
}

/* A row of the matrix, or a head's share of it. */
static void write_row(const Block *block, int64_t row, const float *x, float share)
{
    const Work *work = block->work;
    int64_t owner = work->averaged ? block->batch : block->pair;
    float *matrix = work->matrix + (owner * work->query_count + row) * work->key_count;
    float part = work->averaged ? share / (float)work->heads : share;
    int64_t j = block->from;
    if (work->averaged && block->head > 0) {
        for (; j + LANES <= block->to; j += LANES) store(matrix + j, load(matrix + j) + part * load(x + j));
        for (; j < block->to; j++) matrix[j] += part * x[j];
        return;
    }
    memset(matrix, 0, (size_t)block->from * sizeof(float));
    for (; j + LANES <= block->to; j += LANES) store(matrix + j, part * load(x + j));
    for (; j < block->to; j++) matrix[j] = part * x[j];
    memset(matrix + block->to, 0, (size_t)(work->key_count - block->to) * sizeof(float));
}

static void weigh_rows(Block *block)
{
    for (int64_t r = 0; r < block->count; r++) {
        float *x = block->x + r * block->step;
        block->share[r] = weigh_row(block, block->first + r, x);
        write_row(block, block->first + r, x, block->share[r]);
    }
}

/* Up to ROWS rows of weights, `step` apart, times SIDE columns of `count` values, shared out; rows of out are `next`
   apart. On its own, as `multiply`. The keys are not split up: the values come fast enough from the second cache, and the
   sums stay in the registers. */
static __attribute__((noinline)) void mix(
    const float *x, int64_t step, const float *values, int64_t width, int64_t count, const float *share, int64_t rows,
    float *out, int64_t next)
{
    floats sums[ROWS][2] = {{{0}}};
    for (int64_t j = 0; j < count; j++, values += width) {
        floats v0 = load(values), v1 = load(values + LANES);
        __builtin_prefetch(values + AHEAD * width), __builtin_prefetch(values + AHEAD * width + LANES);
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

/* The output of the block. */
static void mix_values(const Block *block)
{
    const Work *work = block->work;
    int64_t width = work->value_width, next = work->heads * width;
    const float *values = work->values + (block->pair / work->group * work->key_count + block->from) * width;
    float *out = work->out + (block->batch * work->query_count + block->first) * next + block->head * width;
    for (int64_t d = 0; d < width; d += SIDE)
        for (int64_t r = 0; r < block->count; r += ROWS)
            mix(block->x + r * block->step + block->from, block->step, values + d, width, block->to - block->from,
                block->share + r, block->count - r, out + r * next + d, next);
}

/* The keys that some row of the block sees, from a whole panel on. */
static void find_keys(Block *block)
{
    const Work *work = block->work;
    block->from = work->key_count, block->to = 0;
    for (int64_t r = 0; r < block->count; r++) {
        int64_t low, high;
        if (!visible(&work->masks, block->batch, block->first + r, 0, work->key_count, &low, &high)) continue;
        block->from = lesser(block->from, low), block->to = greater(block->to, high);
    }
    block->from = block->to ? block->from / PANEL * PANEL : 0;
}

static void attend(Block *block, int64_t pair, int64_t first, int64_t count)
{
    block->pair = pair, block->batch = pair / block->work->heads, block->head = pair % block->work->heads;
    block->first = first, block->count = count;
    find_keys(block);
    lay_queries(block);
    compare(block);
    weigh_rows(block);
    mix_values(block);
}

/* Takes one block after the other until none is left; every thread runs it, and who takes which changes nothing.

   A block of an average goes over all heads, whose rows are summed while they are near. Otherwise one head comes after
   the other: its keys and values stay near, and the matrix is written from its beginning to its end. */
static void take_blocks(Work *work, Block *block)
{
    int64_t together = work->averaged ? work->heads : 1, blocks = (work->query_count + work->rows - 1) / work->rows;
    int64_t count = work->pairs / together * blocks;
    for (int64_t taken; (taken = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < count;) {
        int64_t pair = taken / blocks * together, first = taken % blocks * work->rows;
        int64_t rows = lesser(work->rows, work->query_count - first);
        for (int64_t i = 0; i < together; i++) attend(block, pair + i, first, rows);
    }
}

void attend_all(Work *work)
{
    /* Rows that lie whole powers of two apart would fight for the same lines of the cache. */
    int64_t step = (work->padded + LANES) / (2 * LANES) * (2 * LANES) + LANES, rows = work->rows;
    size_t floats_needed = (size_t)(rows * (step + work->width + 1));
    Block *block = calloc(1, sizeof(Block) + floats_needed * sizeof(float) + 64);
    if (!block) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    block->work = work, block->step = step;
    block->x = (float *)(((uintptr_t)(block->share + rows) + 63) / 64 * 64), block->queries = block->x + rows * step;
    take_blocks(work, block);
    free(block);
}

/* Asks for large pages where fresh memory will be written: to be given 2 MiB at once is far cheaper than 512 small pages.
   Only a hint; nothing else changes where it is not followed. */
void expect_writing(char *memory, int64_t size)
{
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21;
    uintptr_t first = ((uintptr_t)memory + page - 1) / page * page, last = ((uintptr_t)memory + (uintptr_t)size) / page * page;
    if (first < last) madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)size;
#endif
}

/* What weights/dense_attention_c.py lays the tensors out by. */
int64_t panel_keys(void) { return PANEL; }
int64_t side_values(void) { return SIDE; }
int64_t rows_at_once(void) { return ROWS; }
