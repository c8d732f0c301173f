/* The products, the attention and the choice of tokens of a decoding step on a CPU, for foci/decoding/step_c.py.

   A step has few rows, so its time is that of reading the weights and the cache once. Weights are read where the model
   has them, in rows, and a tile of rows of both factors is summed along the width. */

#include "masks.h"
#include "topk.h"
#include "vectors.h"

/* TILE_ROWS x TILE_OUTPUTS vectors of sums, TILE_OUTPUTS of weights and 1 of the inputs fill the registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { TILE_ROWS = 6 };
#else
enum { TILE_ROWS = 2 };
#endif

enum {
    TILE_OUTPUTS = 4,
    AHEAD = 8,          /* outputs whose weights are prefetched: the rows of a tile are too short for the processor to do it */
    BLOCK_OUTPUTS = 32, /* outputs of a work item: their weights stay in a cache for all rows */
    KEYS = 64,          /* keys whose logits are stored */
    MAX_WIDTH = 512,    /* the maximum width of a head */
    CHUNK = 16 * STEP   /* logits that are ranked at a time */
};

static const float LOG2_E = 1.44269504f;

/* out = inputs weightᵀ + bias + added, in float32. Every member has 8 bytes; LinearStruct in decoding/step_c.py has the
   same members in the same order. NULL is absent. */
typedef struct {
    const float *inputs, *weight, *bias, *added; /* (rows, width), (outputs, width), (outputs), (rows, outputs) */
    float *out;                                  /* (rows, outputs) */
    int64_t rows, width, outputs, next;
} LinearStruct;

/* One query per row. The key of slot t is in row key_rows[t * key_row_step + row] of the slot. */
typedef struct {
    const float *queries, *keys, *values; /* with row, slot and head strides below; heads of a row are adjacent */
    float *out;                           /* (rows, heads, width) */
    const int64_t *key_rows, *first, *last; /* (rows): the first key and the last + 1; NULL: 0 and key_count */
    int64_t rows, heads, group, width, key_count;
    int64_t query_row, key_slot, key_row, key_head, key_row_step;
    double scale;
    int64_t next;
} TokenAttentionStruct;

/* The `count` largest logits of each row in descending order, their tokens, and the sum of e^(logit - the largest). */
typedef struct {
    const float *logits; /* (rows, vocabulary) */
    float *values;       /* (rows, count) */
    int64_t *tokens;     /* (rows, count) */
    float *sums;         /* (rows) */
    int64_t rows, vocabulary, count, next;
} RankStruct;

int64_t lanes(void) { return LANES; }
int64_t max_width(void) { return MAX_WIDTH; }
int64_t max_count(void) { return MAX_TOP_KEYS; }

/* A tile of outputs: rows from `row` on, and outputs from `first` on. */
static inline __attribute__((always_inline)) void multiply_tile(
    const LinearStruct *args, const int rows, const int outputs, int64_t row, int64_t first)
{
    int64_t width = args->width;
    const float *inputs = args->inputs + row * width, *weight = args->weight + first * width;
    floats sums[TILE_ROWS][TILE_OUTPUTS] = {{{0}}};
    for (int64_t d = 0; d < width; d += LANES, inputs += LANES, weight += LANES) {
        floats w[TILE_OUTPUTS];
#pragma GCC unroll 4
        for (int i = 0; i < outputs; i++) {
            __builtin_prefetch(weight + (i + AHEAD) * width, 0, 3);
            w[i] = load(weight + i * width);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            floats x = load(inputs + r * width);
#pragma GCC unroll 4
            for (int i = 0; i < outputs; i++) sums[r][i] += x * w[i];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        int64_t at = (row + r) * args->outputs + first;
        float totals[TILE_OUTPUTS];
        if (outputs == TILE_OUTPUTS) sum_lanes_of_four(sums[r], totals);
        else totals[0] = sum_lanes(sums[r][0]);
#pragma GCC unroll 4
        for (int i = 0; i < outputs; i++)
            args->out[at + i] = totals[i] + (args->bias ? args->bias[first + i] : 0) + (args->added ? args->added[at + i] : 0);
    }
}

/* Not inlined into their caller, where the sums would leave the registers. */
#define DEFINE_TILE(name, rows, outputs)                                                                                     \
    static __attribute__((noinline)) void name(const LinearStruct *args, int64_t row, int64_t first)                        \
    {                                                                                                                        \
        multiply_tile(args, rows, outputs, row, first);                                                                      \
    }

typedef void Tile(const LinearStruct *, int64_t, int64_t);

DEFINE_TILE(tile_1, 1, TILE_OUTPUTS)
DEFINE_TILE(tile_2, 2, TILE_OUTPUTS)
#if defined(__AVX512F__) || defined(__aarch64__)
DEFINE_TILE(tile_3, 3, TILE_OUTPUTS)
DEFINE_TILE(tile_4, 4, TILE_OUTPUTS)
DEFINE_TILE(tile_5, 5, TILE_OUTPUTS)
DEFINE_TILE(tile_6, 6, TILE_OUTPUTS)
static Tile *const TILES[] = {tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};
#else
static Tile *const TILES[] = {tile_1, tile_2};
#endif
DEFINE_TILE(one_output, 1, 1)

void compute_linear(LinearStruct *args)
{
    int64_t blocks = (args->outputs + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS;
    for (int64_t block; (block = __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED)) < blocks;) {
        int64_t start = block * BLOCK_OUTPUTS, end = min_int(start + BLOCK_OUTPUTS, args->outputs);
        for (int64_t row = 0, rows; row < args->rows; row += rows) {
            rows = min_int(TILE_ROWS, args->rows - row);
            int64_t first = start;
            for (; first + TILE_OUTPUTS <= end; first += TILE_OUTPUTS) TILES[rows - 1](args, row, first);
            for (; first < end; first++)
                for (int64_t r = row; r < row + rows; r++) one_output(args, r, first);
        }
    }
}

/* Attention of one query; online softmax in base 2 over tiles of keys. */
static void attend_head(const TokenAttentionStruct *args, int64_t row, int64_t head)
{
    int64_t width = args->width, at = head / args->group * args->key_head;
    int64_t start = args->first ? args->first[row] : 0, end = args->last ? args->last[row] : args->key_count;
    const float *query = args->queries + row * args->query_row + head * width;
    const int64_t *key_rows = args->key_rows + row;
    float *out = args->out + (row * args->heads + head) * width, peak = MASKED, sum = 0, scale = (float)args->scale * LOG2_E;
    floats sums[MAX_WIDTH / LANES];
    for (int64_t d = 0; d < width; d += LANES) sums[d / LANES] = (floats){0};
    for (int64_t tile = start; tile < end; tile += KEYS) {
        int64_t count = min_int(KEYS, end - tile);
        float logits[KEYS], old = peak;
        for (int64_t t = 0; t < count; t++) {
            const float *key = args->keys + (tile + t) * args->key_slot + key_rows[(tile + t) * args->key_row_step] * args->key_row + at;
            floats products = {0};
            for (int64_t d = 0; d < width; d += LANES) products += load(query + d) * load(key + d);
            logits[t] = scale * sum_lanes(products);
            peak = logits[t] > peak ? logits[t] : peak;
        }
        for (int64_t t = count; t < KEYS; t++) logits[t] = MASKED;
        floats parts = {0}, share = exp2_approx(broadcast(old - peak));
        for (int64_t t = 0; t < KEYS; t += LANES) {
            floats weights = exp2_approx(load(logits + t) - peak);
            store(logits + t, weights);
            parts += weights;
        }
        sum = sum * share[0] + sum_lanes(parts);
        for (int64_t d = 0; d < width; d += LANES) sums[d / LANES] *= share;
        for (int64_t t = 0; t < count; t++) {
            const float *value = args->values + (tile + t) * args->key_slot + key_rows[(tile + t) * args->key_row_step] * args->key_row + at;
            for (int64_t d = 0; d < width; d += LANES) sums[d / LANES] += logits[t] * load(value + d);
        }
    }
    for (int64_t d = 0; d < width; d += LANES) store(out + d, sums[d / LANES] / broadcast(sum));
}

void attend_tokens(TokenAttentionStruct *args)
{
    for (int64_t row; (row = __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED)) < args->rows;)
        for (int64_t head = 0; head < args->heads; head++) attend_head(args, row, head);
}

static void rank_row(const RankStruct *args, int64_t row)
{
    const float *logits = args->logits + row * args->vocabulary;
    TopKeys top = {{0}, {0}, 0};
    for (int64_t i = 0; i < args->count; i++) top.values[i] = -__builtin_inff();
    for (int64_t start = 0; start < args->vocabulary; start += CHUNK) {
        int64_t count = min_int(CHUNK, args->vocabulary - start);
        float last[CHUNK];
        const float *x = logits + start;
        if (count < CHUNK) {
            for (int64_t j = 0; j < CHUNK; j++) last[j] = j < count ? x[j] : -__builtin_inff();
            x = last;
        }
        floats maxima[4];
        for (int i = 0; i < 4; i++) maxima[i] = load(x + i * LANES);
        for (int64_t j = STEP; j < CHUNK; j += STEP)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) maxima[i] = maximum(load(x + j + i * LANES), maxima[i]);
        update_top_keys(x, 0, CHUNK, start, maxima, args->count, &top);
    }
    floats sums = {0};
    int64_t j = 0;
    for (; j + LANES <= args->vocabulary; j += LANES) sums += exp2_approx((load(logits + j) - top.values[0]) * LOG2_E);
    float sum = sum_lanes(sums);
    for (; j < args->vocabulary; j++) sum += exp2_approx(broadcast((logits[j] - top.values[0]) * LOG2_E))[0];
    args->sums[row] = sum;
    for (int64_t i = 0; i < args->count; i++) {
        args->values[row * args->count + i] = top.values[i];
        args->tokens[row * args->count + i] = top.keys[i];
    }
}

void rank_tokens(RankStruct *args)
{
    for (int64_t row; (row = __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED)) < args->rows;) rank_row(args, row);
}
