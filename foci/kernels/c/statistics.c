/* Statistics of attention weights in one pass on a CPU, for foci/statistics/cpu_c.py.

   It takes a few rows at a time: their product with some keys, then all requested statistics of these entries while they
   are in the L1 cache. An entry is x = log2 of a weight, or MASKED if the query does not see the key. */

#include <stdlib.h>
#include <string.h>

#include "additive.h"
#include "masks.h"
#include "product.h"
#include "topk.h"

enum {
    CHUNK = 96 * LANES, /* keys whose entries are stored: a multiple of PANEL and STEP that fits the L2 cache */
    BLOCK = 128         /* queries that use a chunk before the next chunk */
};

static const float LN_2 = 0.69314718f;

/* Every member has 8 bytes; StatisticsStruct in statistics/cpu_c.py has the same members in the same order. NULL is absent
   or not requested. */
typedef struct {
    MaskStruct masks;
    const float *queries;         /* (pairs, query_count, width) */
    const float *keys;            /* (batch, key/value heads, padded / PANEL, width, PANEL) */
    const float *shift;           /* (pairs, query_count): the log-sum-exp in base 2 */
    const float *query_positions; /* (batch or 1, query_count) */
    const float *key_positions;   /* (batch or 1, padded) */
    const float *slopes;          /* (heads): of ALiBi, in base 2 */
    const float *weight;          /* (heads, width): of an additive score, where queries and keys are e^2q and e^2k */
    const float *constants;       /* (heads): of an additive score, added to its sums */
    const float *by_distance;     /* (heads, distances): a bias, starting at the last query and the first key */
    float *entropy;               /* (pairs, query_count) */
    float *distance;              /* (pairs, query_count) */
    float *received;              /* (pairs, parts, key_count), zeros */
    float *picture;               /* (pairs, picture_rows, picture_columns), zeros; sums */
    float *largest;               /* (pairs, parts), MASKED; in base 2 */
    float *top_values;            /* (pairs, query_count, top) */
    int64_t *top_keys;            /* (pairs, query_count, top) */
    int64_t pairs, heads, group, query_count, key_count, padded, width, parts, top;
    int64_t picture_rows, picture_columns, distances, query_position_step, key_position_step;
    double scale, softcap; /* of the logits, in base 2; with a softcap, the scale of the argument of tanh_half */
    int64_t next, failed;  /* the next work item; whether an allocation failed */
} StatisticsStruct;

/* The running results of a query. */
typedef struct {
    float entropy, distance;
    TopKeys top;
    int64_t line; /* row of the picture */
} Row;

/* The state of a block of rows during the loop over keys. */
typedef struct {
    const StatisticsStruct *args;
    int64_t pair, batch, head, part, first, last, top;
    int64_t from, to; /* the keys that rows have seen since the last flush */
    float x[ROWS * CHUNK], sums[CHUNK];
    Row rows[BLOCK];
    float queries[]; /* (BLOCK / ROWS, width, ROWS) */
} BlockState;

/* `multiply` for an additive score: the weight is -2 w in base 2, the constant Σ w. */
static __attribute__((noinline)) void compute_additive_logits(
    const float *queries, const float *keys, int64_t width, const float *weight, float constant, const float *shift,
    float *x)
{
    for (int i = 0; i < 3; i++) {
        floats sums[ROWS];
        sum_quotients(queries, keys + i * LANES, PANEL, weight, width, sums);
        for (int r = 0; r < ROWS; r++) store(x + r * CHUNK + i * LANES, sums[r] + (constant - shift[r]));
    }
}

/* One row and the keys of a chunk that it sees. */
static void sweep(BlockState *state, const float *x, int64_t begin, int64_t end, int64_t start, Row *row, float position)
{
    const float *positions = state->args->key_positions + state->batch * state->args->key_position_step + start;
    floats entropy = {0}, distance = {0}, maxima[4] = {broadcast(MASKED), broadcast(MASKED), broadcast(MASKED), broadcast(MASKED)};
    for (int64_t j = begin; j < end; j += STEP)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            int64_t at = j + i * LANES;
            floats entry = load(x + at), weight = exp2_approx(entry);
            entropy += entry * weight;
            distance += magnitude(load(positions + at) - position) * weight;
            store(state->sums + at, load(state->sums + at) + weight);
            maxima[i] = maximum(entry, maxima[i]);
        }
    row->entropy += sum_lanes(entropy);
    row->distance += sum_lanes(distance);
    if (state->top) update_top_keys(x, begin, end, start, maxima, state->top, &row->top);
}

static int64_t edge(int64_t block, int64_t blocks, int64_t length) { return block * length / blocks; }
static int64_t cell_of(int64_t index, int64_t blocks, int64_t length) { return ((index + 1) * blocks - 1) / length; }

/* Add the sums by key to `received` and to a row of the picture. */
static void flush_sums(BlockState *state, int64_t line, int64_t start)
{
    const StatisticsStruct *args = state->args;
    float *sums = state->sums;
    int64_t from = state->from, to = state->to;
    if (args->received) {
        float *received = args->received + (state->pair * args->parts + state->part) * args->key_count;
        for (int64_t j = from; j < to; j++) received[j] += sums[j - start];
    }
    if (args->picture) {
        int64_t columns = args->picture_columns, keys = args->key_count, c = cell_of(from, columns, keys);
        float *cells = args->picture + (state->pair * args->picture_rows + line) * columns;
        /* In a short sequence every key has its own column; computing edges would take a division each. */
        if (columns == keys)
            for (int64_t j = from; j < to; j++) cells[j] += sums[j - start];
        else
            for (int64_t j = from; j < to; c++)
                for (int64_t stop = min_int(edge(c + 1, columns, keys), to); j < stop; j++) cells[c] += sums[j - start];
    }
    memset(sums + (from - start), 0, (size_t)(to - from) * sizeof(float));
    state->from = args->key_count, state->to = 0;
}

/* Apply softcap and distance biases to the logits of a row. */
static void apply_softcap_and_bias(const BlockState *state, int64_t row, int64_t start, int64_t begin, int64_t end, float position, float *x)
{
    const StatisticsStruct *args = state->args;
    if (args->softcap > 0) {
        float shift = args->shift[state->pair * args->query_count + row], cap = (float)args->softcap;
        for (int64_t j = begin; j < end; j += LANES) store(x + j, tanh_half(load(x + j)) * cap - shift);
    }
    if (args->slopes) {
        const float *positions = args->key_positions + state->batch * args->key_position_step + start;
        float slope = args->slopes[state->head];
        for (int64_t j = begin; j < end; j += LANES)
            store(x + j, load(x + j) - slope * magnitude(load(positions + j) - position));
    }
    if (args->by_distance) {
        const float *added = args->by_distance + state->head * args->distances + (args->query_count - 1 - row) + start;
        for (int64_t j = begin; j < end; j += LANES) store(x + j, load(x + j) + load(added + j));
    }
}

/* Up to ROWS rows and one chunk of keys. */
static void process_rows(BlockState *state, int64_t r, int64_t start, int64_t end, int64_t *line)
{
    const StatisticsStruct *args = state->args;
    int64_t low[ROWS], high[ROWS], from = end, to = start, count = min_int(state->last - r, ROWS), width = args->width;
    float shift[ROWS] = {0};
    for (int64_t i = 0; i < count; i++) {
        if (visible_bounds(&args->masks, state->batch, r + i, start, end, low + i, high + i))
            from = min_int(from, low[i]), to = max_int(to, high[i]);
        if (!(args->softcap > 0)) shift[i] = args->shift[state->pair * args->query_count + r + i];
    }
    const float *queries = state->queries + (r - state->first) * width;
    const float *keys = args->keys + (state->pair / args->group) * args->padded * width;
    for (int64_t c = start + (from - start) / PANEL * PANEL; c < to; c += PANEL) {
        float *x = state->x + (c - start);
        if (!args->weight) multiply(queries, keys + c * width, width, shift, x, CHUNK);
        else compute_additive_logits(queries, keys + c * width, width, args->weight + state->head * width, args->constants[state->head], shift, x);
    }
    for (int64_t i = 0; i < count; i++) {
        if (low[i] >= high[i]) continue;
        Row *row = state->rows + (r + i - state->first);
        if (*line >= 0 && *line != row->line) flush_sums(state, *line, start);
        *line = row->line;
        state->from = min_int(state->from, low[i]), state->to = max_int(state->to, high[i]);
        float *x = state->x + i * CHUNK, position = args->query_positions[state->batch * args->query_position_step + r + i];
        int64_t begin = (low[i] - start) / STEP * STEP, stop = (high[i] - start + STEP - 1) / STEP * STEP;
        apply_softcap_and_bias(state, r + i, start, begin, stop, position, x);
        mask_outside_ranges(&args->masks, state->batch, r + i, start, begin, stop, x);
        mask_by_ids_and_dense(&args->masks, state->batch, state->head, r + i, start, low[i] - start, high[i] - start, x);
        sweep(state, x, begin, stop, start, row, position);
    }
}

/* Pack the queries of a block as `multiply` reads them, and reset its rows. */
static void start_block(BlockState *state)
{
    const StatisticsStruct *args = state->args;
    float scale = (float)args->scale;
    for (int64_t r = 0; r < state->last - state->first; r++) {
        const float *query = args->queries + (state->pair * args->query_count + state->first + r) * args->width;
        float *packed = state->queries + r / ROWS * ROWS * args->width + r % ROWS;
        Row *row = state->rows + r;
        row->entropy = row->distance = 0;
        row->line = args->picture ? cell_of(state->first + r, args->picture_rows, args->query_count) : 0;
        for (int64_t i = 0; i < state->top; i++) row->top.values[i] = MASKED / 2, row->top.keys[i] = -1;
        for (int64_t d = 0; d < args->width; d++) packed[d * ROWS] = scale * query[d];
    }
}

static void write_results(const BlockState *state)
{
    const StatisticsStruct *args = state->args;
    for (int64_t r = state->first; r < state->last; r++) {
        const Row *row = state->rows + (r - state->first);
        int64_t at = state->pair * args->query_count + r;
        /* If one key has all the weight, rounding may give slightly less than 0. */
        if (args->entropy) args->entropy[at] = row->entropy > 0 ? 0 : 0 - LN_2 * row->entropy;
        if (args->distance) args->distance[at] = row->distance;
        if (args->largest && row->top.keys[0] >= 0) {
            float *largest = args->largest + state->pair * args->parts + state->part;
            float found = row->top.values[0] + args->shift[at];
            *largest = found > *largest ? found : *largest;
        }
        for (int64_t i = 0; i < args->top; i++) {
            args->top_values[at * args->top + i] = row->top.keys[i] < 0 ? 0 : exp2_approx(broadcast(row->top.values[i]))[0];
            args->top_keys[at * args->top + i] = row->top.keys[i];
        }
    }
}

static void process_block(BlockState *state)
{
    start_block(state);
    for (int64_t start = 0; start < state->args->key_count; start += CHUNK) {
        int64_t end = min_int(start + CHUNK, state->args->key_count), line = -1;
        for (int64_t r = state->first; r < state->last; r += ROWS) process_rows(state, r, start, end, &line);
        if (line >= 0) flush_sums(state, line, start);
    }
    write_results(state);
}

/* The first row of a part of a pair; parts end at picture rows, so that no two parts write to the same one. */
static int64_t part_edge(const StatisticsStruct *args, int64_t part)
{
    int64_t lines = args->picture ? args->picture_rows : args->query_count;
    return edge(edge(part, args->parts, lines), lines, args->query_count);
}

/* Take parts until none is left. Every thread runs it; the assignment of parts to threads does not change the result. */
void compute_statistics(StatisticsStruct *args)
{
    size_t rows = BLOCK * (size_t)args->width * sizeof(float);
    BlockState *state = aligned_alloc(64, (sizeof(BlockState) + rows + 63) / 64 * 64);
    if (!state) {
        __atomic_store_n(&args->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    memset(state, 0, sizeof(BlockState) + rows);
    state->args = args, state->from = args->key_count;
    state->top = max_int(args->top, args->largest ? 1 : 0);
    for (int64_t item; (item = __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED)) < args->pairs * args->parts;) {
        state->pair = item / args->parts, state->part = item % args->parts;
        state->batch = state->pair / args->heads, state->head = state->pair % args->heads;
        int64_t last = part_edge(args, state->part + 1);
        for (state->first = part_edge(args, state->part); state->first < last; state->first += BLOCK) {
            state->last = min_int(state->first + BLOCK, last);
            process_block(state);
        }
    }
    free(state);
}

/* The layout of the keys that statistics/cpu_c.py packs. */
int64_t panel_keys(void) { return PANEL; }
int64_t chunk_keys(void) { return CHUNK; }
int64_t max_top_keys(void) { return MAX_TOP_KEYS; }
