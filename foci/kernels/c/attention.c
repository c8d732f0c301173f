/* Attention and its gradients on a CPU, without the matrix, for foci/backends/cpu_c.py.

   A block of queries meets a few keys at a time. Logits are stored as (key, query), so that every product reads keys and
   values where they are, and maxima, sums and masks of all queries of a vector are computed at once. */

#include <stdlib.h>
#include <string.h>

#include "masks.h"
#include "vectors.h"

/* KEY_ROWS x 2 vectors of sums, 2 of the right factor and 1 of the left one fill the registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { KEY_ROWS = 12, QUERY_ROWS = 8 };
#else
enum { KEY_ROWS = 6, QUERY_ROWS = 4 };
#endif

enum {
    KEYS = 96,                   /* keys of a tile */
    QUERIES = 128,               /* queries of a block */
    BACKWARD_QUERIES = 64,       /* the same in the backward, which keeps more per block */
    FEW_QUERIES = 3,             /* so many are multiplied one by one: the panel would be nearly empty */
    MAX_RANGES = 2
};

/* A tensor (batch, heads, tokens, width) with its strides in elements; of bfloat16 if `half`, else of float32. */
typedef struct {
    void *data;
    int64_t batch, head, token, half;
} TensorStruct;

/* Every member has 8 bytes; AttentionStruct in backends/cpu_c.py has the same members in the same order. */
typedef struct {
    MaskStruct masks;
    TensorStruct queries, keys, values, out;
    TensorStruct d_out, d_queries, d_keys, d_values; /* of the backward; d_queries is (parts * batch, ...) of float32 */
    float *lse;         /* (batch, heads, query_count), in base 2; -inf for fully masked rows */
    const float *d_lse; /* the same, or NULL */
    int64_t batch, heads, group, query_count, key_count, width, value_width, parts;
    double scale;
    int64_t next, failed; /* the next work item; whether an allocation failed */
} AttentionStruct;

static const float LOG2_E = 1.44269504f;

/* c (rows, vectors) = a (rows, length) b (length, vectors), added to c if `add`. */
static inline __attribute__((always_inline)) void multiply_rows(
    const int rows, const int vectors, const int add, const float *a, int64_t a_row, int64_t a_step, const float *b,
    int64_t b_step, int64_t length, float *c, int64_t c_row)
{
    floats sums[12][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < vectors; i++) sums[r][i] = add ? load(c + r * c_row + i * LANES) : (floats){0};
    for (int64_t t = 0; t < length; t++, a += a_step, b += b_step) {
        floats b0 = load(b), b1 = vectors > 1 ? load(b + LANES) : b0;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sums[r][0] += a[r * a_row] * b0;
            if (vectors > 1) sums[r][1] += a[r * a_row] * b1;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < vectors; i++) store(c + r * c_row + i * LANES, sums[r][i]);
}

/* Not inlined into their callers, where the sums would leave the registers. */
#define DEFINE_PRODUCT(name, rows, vectors, add, a_row, a_step)                                                              \
    static __attribute__((noinline)) void name(                                                                              \
        const float *a, int64_t stride, const float *b, int64_t b_step, int64_t length, float *c, int64_t c_row)            \
    {                                                                                                                        \
        multiply_rows(rows, vectors, add, a, a_row, a_step, b, b_step, length, c, c_row);                                    \
    }

typedef void Product(const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t);

DEFINE_PRODUCT(dot_many, KEY_ROWS, 2, 0, stride, 1)
DEFINE_PRODUCT(dot_4, 4, 2, 0, stride, 1)
DEFINE_PRODUCT(dot_1, 1, 2, 0, stride, 1)
DEFINE_PRODUCT(narrow_dot_many, KEY_ROWS, 1, 0, stride, 1)
DEFINE_PRODUCT(narrow_dot_4, 4, 1, 0, stride, 1)
DEFINE_PRODUCT(narrow_dot_1, 1, 1, 0, stride, 1)
DEFINE_PRODUCT(add_many, KEY_ROWS, 2, 1, stride, 1)
DEFINE_PRODUCT(add_4, 4, 2, 1, stride, 1)
DEFINE_PRODUCT(add_1, 1, 2, 1, stride, 1)
DEFINE_PRODUCT(narrow_add_many, KEY_ROWS, 1, 1, stride, 1)
DEFINE_PRODUCT(narrow_add_4, 4, 1, 1, stride, 1)
DEFINE_PRODUCT(narrow_add_1, 1, 1, 1, stride, 1)
DEFINE_PRODUCT(add_to_queries, QUERY_ROWS, 2, 1, 1, stride)
DEFINE_PRODUCT(narrow_add_to_queries, QUERY_ROWS, 1, 1, 1, stride)
DEFINE_PRODUCT(add_to_query, 1, 2, 1, 1, stride)
DEFINE_PRODUCT(narrow_add_to_query, 1, 1, 1, 1, stride)

/* The same for any number of rows, by products of KEY_ROWS, 4 and 1 rows. */
static inline void multiply_keys(
    Product *many, Product *four, Product *one, int64_t rows, const float *a, int64_t stride, const float *b,
    int64_t b_step, int64_t length, float *c, int64_t c_row)
{
    int64_t r = 0;
    for (; r + KEY_ROWS <= rows; r += KEY_ROWS) many(a + r * stride, stride, b, b_step, length, c + r * c_row, c_row);
    for (; r + 4 <= rows; r += 4) four(a + r * stride, stride, b, b_step, length, c + r * c_row, c_row);
    for (; r < rows; r++) one(a + r * stride, stride, b, b_step, length, c + r * c_row, c_row);
}

/* The state of a block of queries; arrays of queries have room for a whole block. */
typedef struct {
    const AttentionStruct *args;
    int64_t batch, head, pair, first, count;
    int64_t panel;              /* queries per vector product: LANES or 2 * LANES */
    int64_t from, to;           /* the keys that some query of the block sees */
    int32_t low[MAX_RANGES][QUERIES], high[MAX_RANGES][QUERIES];
    float peak[QUERIES], sum[QUERIES], lse[QUERIES], delta[QUERIES];
    float *queries, *d_out;     /* (panels, width, panel): transposed; (count, width) of few queries */
    float *out;                 /* (queries, value_width), or (queries, width) for the gradient of the queries */
    float *x, *y;               /* (KEYS, panel), in the backward (KEYS, BACKWARD_QUERIES): logits and their gradients */
    float *key_rows, *value_rows, *query_rows, *d_out_rows; /* rows that were bfloat16 */
    float *d_keys, *d_values;   /* (key_count, width): sums of bfloat16 gradients */
} Block;

typedef uint16_t halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(sizeof(uint16_t)), may_alias));

static inline floats load_bfloat16(const uint16_t *from)
{
    return (floats)(__builtin_convertvector(*(const halves *)from, words) << 16);
}

/* Rounds to the nearest, half to even; NaN stays NaN. */
static inline void store_bfloat16(uint16_t *to, floats x)
{
    words bits = (words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    words is_nan = (words)(x != x);
    *(halves *)to = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), halves);
}

static inline char *row_address(const TensorStruct *x, int64_t batch, int64_t head, int64_t token)
{
    return (char *)x->data + (batch * x->batch + head * x->head + token * x->token) * (x->half ? 2 : 4);
}

/* Rows of a tensor as float32: where they are, or converted into the buffer; `step` is their stride. */
static const float *read_rows(
    const TensorStruct *x, int64_t batch, int64_t head, int64_t first, int64_t count,
    int64_t width, float *buffer, int64_t *step)
{
    const char *rows = row_address(x, batch, head, first);
    if (!x->half) return *step = x->token, (const float *)rows;
    for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; d < width; d += LANES)
            store(buffer + r * width + d, load_bfloat16((const uint16_t *)rows + r * x->token + d));
    return *step = width, buffer;
}

/* Write rows of float32, times a factor each if given, in the dtype of the call. */
static void write_rows(
    const TensorStruct *x, int64_t batch, int64_t head, int64_t first, int64_t count,
    int64_t width, const float *rows, const float *factors)
{
    for (int64_t r = 0; r < count; r++) {
        char *to = row_address(x, batch, head, first + r);
        floats factor = broadcast(factors ? factors[r] : 1.0f);
        for (int64_t d = 0; d < width; d += LANES) {
            floats value = load(rows + r * width + d) * factor;
            if (x->half) store_bfloat16((uint16_t *)to + d, value);
            else store((float *)to + d, value);
        }
    }
}

/* Prefetch rows of the next tile: their order in the products hides it from the processor. */
static inline void prefetch_rows(const TensorStruct *x, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t width)
{
    int64_t size = width * (x->half ? 2 : 4);
    for (int64_t r = 0; r < count; r++)
        for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(row_address(x, batch, head, first + r) + at, 0, 2);
}

/* Transpose rows into panels of queries, 0 beyond the last row; few rows stay rows. */
static void pack_panels(const Block *block, const float *rows, int64_t step, int64_t width, float factor, float *packed)
{
    int64_t count = block->count, panel = block->panel;
    if (count <= FEW_QUERIES) {
        for (int64_t q = 0; q < count; q++)
            for (int64_t d = 0; d < width; d++) packed[q * width + d] = factor * rows[q * step + d];
        return;
    }
    for (int64_t p = 0; p < count; p += panel, packed += panel * width)
        for (int64_t q = 0; q < panel; q++)
            for (int64_t d = 0; d < width; d++) packed[d * panel + q] = p + q < count ? factor * rows[(p + q) * step + d] : 0;
}

/* Read the key ranges of a block and the keys that any of its queries sees, from start to end; returns whether there are
   any. */
static int read_ranges(Block *block, int64_t start, int64_t end)
{
    const MaskStruct *masks = &block->args->masks;
    int64_t ranges = masks->key_ranges ? masks->range_count : 1;
    block->from = end, block->to = start;
    for (int64_t i = 0; i < MAX_RANGES; i++)
        for (int64_t q = 0; q < QUERIES; q++) {
            int64_t low = start, high = q < block->count && i < ranges ? end : start;
            if (masks->key_ranges && low < high) {
                const int32_t *range = masks->key_ranges + block->batch * masks->range_step + 2 * i * masks->query_count + block->first + q;
                low = max_int(low, range[0]), high = min_int(high, range[masks->query_count]);
            }
            if (low < high) block->from = min_int(block->from, low), block->to = max_int(block->to, high);
            block->low[i][q] = (int32_t)low, block->high[i][q] = (int32_t)max_int(low, high);
        }
    return block->from < block->to;
}

/* The keys between start and end that some query of a panel sees, and whether every query sees all of them. */
static int panel_range(const Block *block, int64_t panel, int64_t start, int64_t end, int64_t *from, int64_t *to)
{
    int64_t last = min_int(panel + block->panel, block->count);
    int full = 0;
    *from = end, *to = start;
    for (int i = 0; i < MAX_RANGES; i++) {
        int64_t inner = start, outer = end;
        for (int64_t q = panel; q < last; q++) {
            int64_t low = block->low[i][q], high = block->high[i][q];
            inner = max_int(inner, low), outer = min_int(outer, high);
            if (low < high && low < end && high > start) *from = min_int(*from, max_int(low, start)), *to = max_int(*to, min_int(high, end));
        }
        full |= inner == start && outer == end;
    }
    return full && !block->args->masks.query_ids && !block->args->masks.dense;
}

/* Mask the logits of a panel and one key that the query does not see. */
static inline void mask_key(const Block *block, int64_t panel, int64_t key, float *x)
{
    const MaskStruct *masks = &block->args->masks;
    ints j = (int32_t)key - (ints){0};
    for (int64_t q = panel; q < panel + block->panel; q += LANES) {
        ints seen = {0};
        for (int i = 0; i < MAX_RANGES; i++)
            seen |= (j >= *(const ints *)(block->low[i] + q)) & (j < *(const ints *)(block->high[i] + q));
        float *entries = x + (q - panel);
        store(entries, (floats)(((ints)load(entries) & seen) | ((ints)broadcast(MASKED) & ~seen)));
    }
    int64_t last = min_int(panel + block->panel, block->count);
    if (masks->query_ids) {
        const int64_t *ids = masks->query_ids + block->batch * masks->query_id_step + block->first;
        int64_t id = masks->key_ids[block->batch * masks->key_id_step + key];
        for (int64_t q = panel; q < last; q++) x[q - panel] = ids[q] == id ? x[q - panel] : MASKED;
    }
    if (masks->dense) {
        const uint8_t *dense = masks->dense + block->batch * masks->dense_batch + block->head * masks->dense_head;
        dense += block->first * masks->dense_row + key * masks->dense_column;
        for (int64_t q = panel; q < last; q++) x[q - panel] = dense[q * masks->dense_row] ? x[q - panel] : MASKED;
    }
}

/* The products of a panel of queries with some keys: (keys, panel), with a row stride. */
static void compute_products(const Block *block, const float *packed, const float *rows, int64_t row_step, int64_t count, int64_t width, float *x, int64_t step)
{
    int64_t panel = block->panel;
    if (block->count <= FEW_QUERIES) {
        for (int64_t r = 0; r < count; r++, rows += row_step, x += step) {
            store(x, (floats){0});
            for (int64_t q = 0; q < block->count; q++) {
                floats sums = {0};
                for (int64_t d = 0; d < width; d += LANES) sums += load(rows + d) * load(packed + q * width + d);
                x[q] = sum_lanes(sums);
            }
        }
    } else if (panel > LANES) multiply_keys(dot_many, dot_4, dot_1, count, rows, row_step, packed, panel, width, x, step);
    else multiply_keys(narrow_dot_many, narrow_dot_4, narrow_dot_1, count, rows, row_step, packed, panel, width, x, step);
}

/* Replace the logits of a panel by 2^(x - max), and update the sums and the output for the new maxima. */
static void update_softmax(Block *block, int64_t panel, int64_t count)
{
    int64_t width = block->args->value_width, step = block->panel;
    for (int64_t q = 0; q < step; q += LANES) {
        float *x = block->x + q;
        floats old = load(block->peak + panel + q), peak = old, sums = {0};
        for (int64_t r = 0; r < count; r++) peak = maximum(load(x + r * step), peak);
        floats share = exp2_approx(old - peak);
        for (int64_t r = 0; r < count; r++) {
            floats weight = exp2_approx(load(x + r * step) - peak);
            sums += weight;
            store(x + r * step, weight);
        }
        store(block->sum + panel + q, load(block->sum + panel + q) * share + sums);
        store(block->peak + panel + q, peak);
        for (int i = 0; i < LANES; i++) {
            if (share[i] == 1.0f) continue;
            float *out = block->out + (panel + q + i) * width;
            for (int64_t d = 0; d < width; d += LANES) store(out + d, load(out + d) * share[i]);
        }
    }
}

/* out (queries of a panel, width) += x (keys, panel) transposed times rows (keys, width) */
static void add_products_to_queries(const Block *block, const float *x, int64_t step, const float *rows, int64_t row_step, int64_t count, int64_t width, float *out)
{
    for (int64_t d = 0; d < width; d += 2 * LANES)
        if (block->count <= FEW_QUERIES)
            for (int64_t q = 0; q < block->count; q++)
                (d + LANES < width ? add_to_query : narrow_add_to_query)(x + q, step, rows + d, row_step, count, out + q * width + d, width);
        else
            for (int64_t q = 0; q < block->panel; q += QUERY_ROWS)
                (d + LANES < width ? add_to_queries : narrow_add_to_queries)(x + q, step, rows + d, row_step, count, out + q * width + d, width);
}

/* out (keys, width) += x (keys, queries) times rows (queries, width) */
static void add_products_to_keys(const float *x, int64_t step, int64_t keys, const float *rows, int64_t row_step, int64_t count, int64_t width, float *out, int64_t out_step)
{
    for (int64_t d = 0; d < width; d += 2 * LANES)
        if (d + LANES < width) multiply_keys(add_many, add_4, add_1, keys, x, step, rows + d, row_step, count, out + d, out_step);
        else multiply_keys(narrow_add_many, narrow_add_4, narrow_add_1, keys, x, step, rows + d, row_step, count, out + d, out_step);
}

static void attend_tile(Block *block, int64_t start, int64_t end)
{
    const AttentionStruct *args = block->args;
    int64_t key_head = block->head / args->group, key_step, value_step, next = min_int(end + KEYS, block->to);
    const float *keys = read_rows(&args->keys, block->batch, key_head, start, end - start, args->width, block->key_rows, &key_step);
    const float *values = read_rows(&args->values, block->batch, key_head, start, end - start, args->value_width, block->value_rows, &value_step);
    for (int64_t p = 0; p < block->count; p += block->panel) {
        int64_t from, to;
        int full = panel_range(block, p, start, end, &from, &to);
        if (p == 0 && end < next) prefetch_rows(&args->keys, block->batch, key_head, end, next - end, args->width);
        if (from >= to) continue;
        compute_products(block, block->queries + p * args->width, keys + (from - start) * key_step, key_step, to - from, args->width, block->x, block->panel);
        if (p == 0 && end < next) prefetch_rows(&args->values, block->batch, key_head, end, next - end, args->value_width);
        if (!full)
            for (int64_t j = from; j < to; j++) mask_key(block, p, j, block->x + (j - from) * block->panel);
        update_softmax(block, p, to - from);
        add_products_to_queries(block, block->x, block->panel, values + (from - start) * value_step, value_step, to - from, args->value_width, block->out + p * args->value_width);
    }
}

static void start_block(Block *block, int64_t first, int64_t size)
{
    const AttentionStruct *args = block->args;
    block->first = first, block->count = min_int(size, args->query_count - first);
    block->panel = block->count > LANES ? 2 * LANES : LANES;
}

static void pack_queries(Block *block)
{
    const AttentionStruct *args = block->args;
    int64_t step;
    const float *rows = read_rows(&args->queries, block->batch, block->head, block->first, block->count, args->width, block->query_rows, &step);
    pack_panels(block, rows, step, args->width, (float)args->scale * LOG2_E, block->queries);
}

/* log2 of a positive float, exact to 1e-7 of its value or to 1e-7. */
static float log2_approx(float x)
{
    union { float number; uint32_t bits; } parts = {x};
    int32_t power = (int32_t)((parts.bits - 0x3f3504f3u) >> 23 << 23) >> 23;
    parts.bits -= (uint32_t)power << 23;
    /* 2 atanh(s) = ln((1 + s) / (1 - s)) */
    double s = ((double)parts.number - 1.0) / ((double)parts.number + 1.0), t = s * s;
    return (float)(power + 2.8853900817779268 * s * (1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * (1.0 / 9 + t / 11))))));
}

static void write_block(Block *block)
{
    const AttentionStruct *args = block->args;
    float *lse = args->lse + (block->pair * args->query_count) + block->first, factors[QUERIES];
    for (int64_t q = 0; q < block->count; q++) {
        float sum = block->sum[q];
        factors[q] = sum == 0 ? 0 : 1 / sum;
        lse[q] = sum == 0 ? -__builtin_inff() : sum != sum ? sum : block->peak[q] + log2_approx(sum);
    }
    write_rows(&args->out, block->batch, block->head, block->first, block->count, args->value_width, block->out, factors);
}

static void attend_block(Block *block, int64_t pair, int64_t first)
{
    const AttentionStruct *args = block->args;
    block->pair = pair, block->batch = pair / args->heads, block->head = pair % args->heads;
    start_block(block, first, QUERIES);
    memset(block->out, 0, (size_t)(QUERIES * args->value_width) * sizeof(float));
    for (int64_t q = 0; q < QUERIES; q++) block->peak[q] = MASKED / 2, block->sum[q] = 0;
    if (read_ranges(block, 0, args->key_count)) {
        pack_queries(block);
        for (int64_t start = block->from; start < block->to; start += KEYS) attend_tile(block, start, min_int(start + KEYS, block->to));
    }
    write_block(block);
}

/* Allocate a block with its buffers, each on its own cache lines; NULL if the allocation fails. */
static Block *allocate_block(AttentionStruct *args, int64_t queries, int64_t x_size, int backward)
{
    int64_t width = max_int(args->width, args->value_width), half = args->queries.half != 0, staged = half * width;
    int64_t sums = half * backward * args->key_count * width;
    int64_t sizes[] = {queries * width, backward * queries * width, queries * width, x_size, backward * x_size, KEYS * staged,
        KEYS * staged, queries * staged, backward * queries * staged, sums, sums};
    enum { COUNT = sizeof(sizes) / sizeof(sizes[0]) };
    size_t total = (sizeof(Block) + 63) / 64 * 64;
    for (int i = 0; i < COUNT; i++) total += (size_t)(sizes[i] + 15) / 16 * 64;
    Block *block = aligned_alloc(64, total);
    if (!block) {
        __atomic_store_n(&args->failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    float **buffers[] = {&block->queries, &block->d_out, &block->out, &block->x, &block->y, &block->key_rows,
        &block->value_rows, &block->query_rows, &block->d_out_rows, &block->d_keys, &block->d_values};
    char *at = (char *)block + (sizeof(Block) + 63) / 64 * 64;
    for (int i = 0; i < COUNT; at += (size_t)(sizes[i] + 15) / 16 * 64, i++) *buffers[i] = (float *)at;
    block->args = args;
    return block;
}

/* Take blocks until none is left. Every thread runs it; the assignment of blocks to threads does not change the result. */
void compute_attention(AttentionStruct *args)
{
    Block *block = allocate_block(args, QUERIES, KEYS * 2 * LANES, 0);
    if (!block) return;
    int64_t blocks = (args->query_count + QUERIES - 1) / QUERIES;
    for (int64_t item; (item = __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED)) < args->batch * args->heads * blocks;)
        attend_block(block, item / blocks, item % blocks * QUERIES);
    free(block);
}

/* From logits x and products y of values and d_out of one key: the weights and the gradients of the logits. */
static inline void compute_key_gradients(const Block *block, int64_t panel, float *x, float *y)
{
    float scale = (float)block->args->scale;
    for (int64_t q = 0; q < block->panel; q += LANES) {
        floats weight = exp2_approx(load(x + q) - load(block->lse + panel + q));
        store(x + q, weight);
        store(y + q, weight * (load(y + q) - load(block->delta + panel + q)) * scale);
    }
}

/* The gradients of one tile; `d_keys` and `d_values` point to its first key. */
static void backward_tile(Block *block, int64_t start, int64_t end, const float *queries, int64_t query_step, const float *d_out,
    int64_t d_out_step, float *d_keys, int64_t d_key_step, float *d_values, int64_t d_value_step)
{
    const AttentionStruct *args = block->args;
    int64_t key_head = block->head / args->group, key_step, value_step, step = BACKWARD_QUERIES, rows = end - start, panel = block->panel;
    const float *keys = read_rows(&args->keys, block->batch, key_head, start, rows, args->width, block->key_rows, &key_step);
    const float *values = read_rows(&args->values, block->batch, key_head, start, rows, args->value_width, block->value_rows, &value_step);
    for (int64_t p = 0; p < block->count; p += panel) {
        int64_t from, to;
        int full = panel_range(block, p, start, end, &from, &to);
        for (int64_t j = start; j < end; j++) {
            if (j == from && from < to) j = to;
            if (j >= end) break;
            memset(block->x + (j - start) * step + p, 0, (size_t)panel * sizeof(float));
            memset(block->y + (j - start) * step + p, 0, (size_t)panel * sizeof(float));
        }
        if (from >= to) continue;
        float *x = block->x + (from - start) * step + p, *y = block->y + (from - start) * step + p;
        compute_products(block, block->queries + p * args->width, keys + (from - start) * key_step, key_step, to - from, args->width, x, step);
        compute_products(block, block->d_out + p * args->value_width, values + (from - start) * value_step, value_step, to - from, args->value_width, y, step);
        for (int64_t j = 0; j < to - from; j++) {
            if (!full) mask_key(block, p, from + j, x + j * step);
            compute_key_gradients(block, p, x + j * step, y + j * step);
        }
        add_products_to_queries(block, y, step, keys + (from - start) * key_step, key_step, to - from, args->width, block->out + p * args->width);
    }
    add_products_to_keys(block->x, step, rows, d_out, d_out_step, block->count, args->value_width, d_values, d_value_step);
    add_products_to_keys(block->y, step, rows, queries, query_step, block->count, args->width, d_keys, d_key_step);
}

/* delta = Σ d_out · out - d_lse, which the softmax backward subtracts, and the log-sum-exp. */
static void read_rows_of_backward(Block *block, const float *d_out, int64_t d_out_step, float *out_rows)
{
    const AttentionStruct *args = block->args;
    int64_t out_step, at = block->pair * args->query_count + block->first;
    const float *out = read_rows(&args->out, block->batch, block->head, block->first, block->count, args->value_width, out_rows, &out_step);
    for (int64_t q = 0; q < BACKWARD_QUERIES; q++) {
        block->delta[q] = block->lse[q] = 0;
        if (q >= block->count) continue;
        floats sums = {0};
        for (int64_t d = 0; d < args->value_width; d += LANES) sums += load(out + q * out_step + d) * load(d_out + q * d_out_step + d);
        block->delta[q] = sum_lanes(sums) - (args->d_lse ? args->d_lse[at + q] : 0);
        /* In a fully masked row every logit is MASKED, and any finite number makes the weights 0. */
        block->lse[q] = args->lse[at + q] == -__builtin_inff() ? 0 : args->lse[at + q];
    }
}

static void backward_block(Block *block, int64_t start, int64_t end, int64_t part, float *d_keys, int64_t d_key_step, float *d_values, int64_t d_value_step)
{
    const AttentionStruct *args = block->args;
    int64_t width = args->width, query_step, d_out_step;
    memset(block->out, 0, (size_t)(BACKWARD_QUERIES * width) * sizeof(float));
    if (read_ranges(block, start, end)) {
        const float *d_out = read_rows(&args->d_out, block->batch, block->head, block->first, block->count, args->value_width, block->d_out_rows, &d_out_step);
        read_rows_of_backward(block, d_out, d_out_step, block->query_rows);
        const float *queries = read_rows(&args->queries, block->batch, block->head, block->first, block->count, width, block->query_rows, &query_step);
        pack_panels(block, queries, query_step, width, (float)args->scale * LOG2_E, block->queries);
        pack_panels(block, d_out, d_out_step, args->value_width, 1.0f, block->d_out);
        for (int64_t at = block->from; at < block->to; at += KEYS)
            backward_tile(block, at, min_int(at + KEYS, block->to), queries, query_step, d_out, d_out_step,
                d_keys + at * d_key_step, d_key_step, d_values + at * d_value_step, d_value_step);
    }
    write_rows(&args->d_queries, part * args->batch + block->batch, block->head, block->first, block->count, width, block->out, NULL);
}

static void clear_rows(float *rows, int64_t step, int64_t first, int64_t last, int64_t width)
{
    for (int64_t r = first; r < last; r++) memset(rows + r * step, 0, (size_t)width * sizeof(float));
}

/* One key head, or a part of its keys, with all queries that read it. */
static void backward_keys(Block *block, int64_t key_pair, int64_t part)
{
    const AttentionStruct *args = block->args;
    int64_t key_heads = args->heads / args->group, batch = key_pair / key_heads, key_head = key_pair % key_heads;
    int64_t start = part * args->key_count / args->parts, end = (part + 1) * args->key_count / args->parts;
    int half = args->d_keys.half != 0;
    int64_t d_key_step = half ? args->width : args->d_keys.token, d_value_step = half ? args->value_width : args->d_values.token;
    float *d_keys = half ? block->d_keys : (float *)row_address(&args->d_keys, batch, key_head, 0);
    float *d_values = half ? block->d_values : (float *)row_address(&args->d_values, batch, key_head, 0);
    clear_rows(d_keys, d_key_step, start, end, args->width);
    clear_rows(d_values, d_value_step, start, end, args->value_width);
    block->batch = batch;
    for (int64_t head = key_head * args->group; head < (key_head + 1) * args->group; head++)
        for (int64_t first = 0; first < args->query_count; first += BACKWARD_QUERIES) {
            block->head = head, block->pair = batch * args->heads + head;
            start_block(block, first, BACKWARD_QUERIES);
            backward_block(block, start, end, part, d_keys, d_key_step, d_values, d_value_step);
        }
    if (!half) return;
    write_rows(&args->d_keys, batch, key_head, start, end - start, args->width, d_keys + start * d_key_step, NULL);
    write_rows(&args->d_values, batch, key_head, start, end - start, args->value_width, d_values + start * d_value_step, NULL);
}

/* Take parts until none is left, like compute_attention. */
void compute_gradients(AttentionStruct *args)
{
    Block *block = allocate_block(args, BACKWARD_QUERIES, KEYS * BACKWARD_QUERIES, 1);
    if (!block) return;
    int64_t items = args->batch * (args->heads / args->group) * args->parts;
    for (int64_t item; (item = __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED)) < items;)
        backward_keys(block, item / args->parts, item % args->parts);
    free(block);
}

/* backends/cpu_c.py pads widths to a multiple of it. */
int64_t lanes(void) { return LANES; }
