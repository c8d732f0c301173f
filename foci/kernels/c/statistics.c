/* Statistics of attention weights in one pass on a CPU, for foci/statistics/cpu_c.py.

   It takes a few rows at a time: their product with some keys, then all requested statistics of these entries while they
   are in the L1 cache. An entry is x = log2 of a weight, or MASKED if the query does not see the key. */

#include <stdlib.h>
#include <string.h>

#include "additive.h"
#include "masks.h"
#include "pages.h"
#include "product.h"
#include "topk.h"

enum {
    CHUNK = 96 * LANES, /* keys whose entries are stored: a multiple of PANEL and STEP that fits the L2 cache */
    BLOCK = 128         /* queries that use a chunk before the next chunk */
};

static const float LN_2 = 0.69314718f, LOG2_E = 1.44269504f;

/* Every member has 8 bytes; StatisticsStruct in statistics/cpu_c.py has the same members in the same order. NULL is absent
   or not requested. */
typedef struct {
    MaskStruct masks;
    const float *queries;         /* (batch, heads, query_count, width), with the strides below; a row is contiguous */
    const float *given_keys;      /* (batch, key/value heads, key_count, width), likewise */
    float *keys;                  /* (batch, key/value heads, padded / PANEL, width, PANEL): they are packed here */
    const float *lse;             /* (pairs, query_count) */
    const float *query_positions; /* (batch or 1, query_count); NULL: the last positions of the keys */
    const float *key_positions;   /* (batch or 1, padded to CHUNK); NULL: from 0 */
    const float *slopes;          /* (heads): of ALiBi, in base 2 */
    const float *weight;          /* (heads, width): of an additive score, where queries and keys are e^2q and e^2k */
    const float *constants;       /* (heads): of an additive score, added to its sums */
    const float *by_distance;     /* (heads, distances): a bias, starting at the last query and the first key */
    float *entropy;               /* (pairs, query_count) */
    float *distance;              /* (pairs, query_count) */
    float *received;              /* (pairs, parts, key_count), zeros */
    float *picture;               /* (pairs, picture_rows, picture_columns) */
    float *largest_logit;         /* (pairs, parts), MASKED; in base 2 */
    float *top_values;            /* (pairs, query_count, top) */
    int32_t *top_keys;            /* (pairs, query_count, top) */
    int64_t pairs, heads, group, query_count, key_count, padded, width, parts, top;
    int64_t picture_rows, picture_columns, distances, query_position_step, key_position_step;
    int64_t query_batch, query_head, query_row, key_batch, key_head, key_row;
    double scale, softcap; /* of the logits, in base 2; with a softcap, the scale of the argument of tanh_half */
    int64_t next_packed, next, failed; /* the next head to pack, the next work item; whether an allocation failed */
} StatisticsStruct;

/* The running results of a query. */
typedef struct {
    float entropy, distance, shift; /* the log-sum-exp in base 2 */
    TopKeys top;
    int64_t line; /* row of the picture */
} Row;

/* A column of the picture: the key after its last one, and one divided by the number of its keys. */
typedef struct {
    int64_t end;
    float share;
} Column;

/* The state of a block of rows during the loop over keys. */
typedef struct {
    const StatisticsStruct *args;
    int64_t pair, batch, head, part, first, last, top;
    int64_t from, to;  /* the keys that rows have seen since the last flush */
    int64_t is_matrix; /* whether every entry has a cell of the picture of its own */
    /* A vector across two cache lines takes twice as long to load. */
    _Alignas(64) float x[ROWS * CHUNK];
    float sums[CHUNK], weights[CHUNK], positions[CHUNK];
    Row rows[BLOCK];
    Column *columns; /* of the picture */
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

/* The positions of the keys of a chunk, and that of a query, counted from the same key. */
static const float *find_positions(const BlockState *state, int64_t row, int64_t start, float *position)
{
    const StatisticsStruct *args = state->args;
    if (!args->key_positions) return *position = (float)(row + args->key_count - args->query_count - start), state->positions;
    *position = args->query_positions[state->batch * args->query_position_step + row];
    return args->key_positions + state->batch * args->key_position_step + start;
}

/* One row and the keys of a chunk that it sees; `weights` gets the weights unless it is NULL. */
static inline __attribute__((always_inline)) void sweep(
    BlockState *state, const float *x, int64_t begin, int64_t end, int64_t start, Row *row, const float *positions,
    float position, float *weights)
{
    floats entropy = {0}, distance = {0}, maxima[4] = {broadcast(MASKED), broadcast(MASKED), broadcast(MASKED), broadcast(MASKED)};
    for (int64_t j = begin; j < end; j += STEP)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            int64_t at = j + i * LANES;
            floats entry = load(x + at), weight = exp2_approx(entry);
            entropy += entry * weight;
            distance += magnitude(load(positions + at) - position) * weight;
            store(state->sums + at, load(state->sums + at) + weight);
            if (weights) store(weights + at, weight);
            maxima[i] = maximum(entry, maxima[i]);
        }
    row->entropy += sum_lanes(entropy);
    row->distance += sum_lanes(distance);
    if (state->top) update_top_keys(x, begin, end, start, maxima, state->top, &row->top);
}

static int64_t edge(int64_t block, int64_t blocks, int64_t length) { return block * length / blocks; }
static int64_t cell_of(int64_t index, int64_t blocks, int64_t length) { return ((index + 1) * blocks - 1) / length; }

/* Add the sums by key to `received`, and their means to a row of the picture. */
static void flush_sums(BlockState *state, int64_t line, int64_t start)
{
    const StatisticsStruct *args = state->args;
    const float *sums = state->sums - start;
    int64_t from = state->from, to = state->to;
    if (args->received) {
        float *received = args->received + (state->pair * args->parts + state->part) * args->key_count;
        for (int64_t j = from; j < to; j++) received[j] += sums[j];
    }
    if (args->picture && !state->is_matrix) {
        int64_t columns = args->picture_columns, c = cell_of(from, columns, args->key_count), j = from;
        float *cells = args->picture + (state->pair * args->picture_rows + line) * columns;
        float share = 1.0f / (float)(edge(line + 1, args->picture_rows, args->query_count) - edge(line, args->picture_rows, args->query_count));
        if (2 * columns == args->key_count && from % 2 == 0)
            for (; j + LANES <= to; j += LANES, c += LANES / 2) {
                float pair_sums[LANES / 2];
                store_pair_sums(pair_sums, load(sums + j));
                for (int i = 0; i < LANES / 2; i++) cells[c + i] += 0.5f * share * pair_sums[i];
            }
        for (; j < to; c++) {
            float sum = 0;
            for (int64_t stop = min_int(state->columns[c].end, to); j < stop; j++) sum += sums[j];
            cells[c] += sum * share * state->columns[c].share;
        }
    }
    memset(state->sums + (from - start), 0, (size_t)(to - from) * sizeof(float));
    state->from = args->key_count, state->to = 0;
}

/* Write the weights of a row on the keys from start to end; those outside of [low, high) are 0. */
static void write_matrix_row(BlockState *state, int64_t row, int64_t start, int64_t end, int64_t low, int64_t high)
{
    float *cells = state->args->picture + (state->pair * state->args->query_count + row) * state->args->key_count;
    if (low >= high) low = high = start;
    memset(cells + start, 0, (size_t)(low - start) * sizeof(float));
    memcpy(cells + low, state->weights + (low - start), (size_t)(high - low) * sizeof(float));
    memset(cells + high, 0, (size_t)(end - high) * sizeof(float));
}

/* Apply softcap and distance biases to the logits of a row. */
static void apply_softcap_and_bias(
    const BlockState *state, int64_t row, int64_t start, int64_t begin, int64_t end, const float *positions, float position,
    float *x)
{
    const StatisticsStruct *args = state->args;
    if (args->softcap > 0) {
        float shift = state->rows[row - state->first].shift, cap = (float)args->softcap;
        for (int64_t j = begin; j < end; j += LANES) store(x + j, tanh_half(load(x + j)) * cap - shift);
    }
    if (args->slopes) {
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
        if (!(args->softcap > 0)) shift[i] = state->rows[r + i - state->first].shift;
    }
    const float *queries = state->queries + (r - state->first) * width;
    const float *keys = args->keys + (state->pair / args->group) * args->padded * width;
    for (int64_t c = start + (from - start) / PANEL * PANEL; c < to; c += PANEL) {
        float *x = state->x + (c - start);
        if (!args->weight) multiply(queries, keys + c * width, width, shift, x, CHUNK);
        else compute_additive_logits(queries, keys + c * width, width, args->weight + state->head * width, args->constants[state->head], shift, x);
    }
    for (int64_t i = 0; i < count; i++) {
        Row *row = state->rows + (r + i - state->first);
        if (low[i] < high[i]) {
            if (*line >= 0 && *line != row->line) flush_sums(state, *line, start);
            *line = row->line;
            state->from = min_int(state->from, low[i]), state->to = max_int(state->to, high[i]);
            float *x = state->x + i * CHUNK, position;
            const float *positions = find_positions(state, r + i, start, &position);
            int64_t begin = (low[i] - start) / STEP * STEP, stop = (high[i] - start + STEP - 1) / STEP * STEP;
            apply_softcap_and_bias(state, r + i, start, begin, stop, positions, position, x);
            mask_outside_ranges(&args->masks, state->batch, r + i, start, begin, stop, x);
            mask_by_ids_and_dense(&args->masks, state->batch, state->head, r + i, start, low[i] - start, high[i] - start, x);
            if (state->is_matrix) sweep(state, x, begin, stop, start, row, positions, position, state->weights);
            else sweep(state, x, begin, stop, start, row, positions, position, NULL);
        }
        if (state->is_matrix) write_matrix_row(state, r + i, start, end, low[i], high[i]);
    }
}

/* Pack the queries of a block as `multiply` reads them, and reset its rows. */
static void start_block(BlockState *state)
{
    const StatisticsStruct *args = state->args;
    float scale = (float)args->scale;
    const float *query = args->queries + state->batch * args->query_batch + state->head * args->query_head + state->first * args->query_row;
    for (int64_t r = 0; r < state->last - state->first; r++, query += args->query_row) {
        float *packed = state->queries + r / ROWS * ROWS * args->width + r % ROWS;
        float lse = args->lse[state->pair * args->query_count + state->first + r];
        Row *row = state->rows + r;
        row->entropy = row->distance = 0;
        row->shift = lse == -__builtin_inff() ? 0 : lse * LOG2_E;
        row->line = args->picture && !state->is_matrix ? cell_of(state->first + r, args->picture_rows, args->query_count) : 0;
        row->top.found = 0;
        if (state->top) row->top.values[state->top - 1] = MASKED / 2;
        for (int64_t d = 0; d < args->width; d++) packed[d * ROWS] = scale * query[d];
    }
}

/* The rest is `missing`: 0, or NaN in a row of NaN, in which no key is found. */
static void write_top_keys(const TopKeys *top, int64_t count, float missing, float *values, int32_t *keys)
{
    for (int64_t i = 0; i < count; i += LANES) {
        float weights[LANES];
        store(weights, exp2_approx(load(top->values + i)));
        for (int64_t j = i; j < min_int(i + LANES, count); j++) {
            values[j] = j < top->found ? weights[j - i] : missing;
            keys[j] = j < top->found ? top->keys[j] : -1;
        }
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
        if (args->largest_logit && row->top.found) {
            float *largest = args->largest_logit + state->pair * args->parts + state->part;
            float found = row->top.values[0] + row->shift;
            *largest = found > *largest ? found : *largest;
        }
        float missing = row->entropy != row->entropy ? row->entropy : 0;
        if (args->top) write_top_keys(&row->top, args->top, missing, args->top_values + at * args->top, args->top_keys + at * args->top);
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

/* Set the rows of the picture of a part to 0. */
static void clear_picture(const BlockState *state, int64_t first, int64_t last)
{
    const StatisticsStruct *args = state->args;
    if (!args->picture || state->is_matrix || first >= last) return;
    int64_t top = cell_of(first, args->picture_rows, args->query_count), end = cell_of(last - 1, args->picture_rows, args->query_count) + 1;
    float *cells = args->picture + (state->pair * args->picture_rows + top) * args->picture_columns;
    memset(cells, 0, (size_t)((end - top) * args->picture_columns) * sizeof(float));
}

/* Memory for a block; NULL if there is none. */
static BlockState *allocate_state(const StatisticsStruct *args)
{
    size_t rows = BLOCK * (size_t)args->width * sizeof(float), columns = (size_t)args->picture_columns * sizeof(Column);
    BlockState *state = aligned_alloc(64, (sizeof(BlockState) + rows + 63) / 64 * 64);
    Column *edges = malloc(columns + sizeof(Column));
    if (!state || !edges) return free(state), free(edges), NULL;
    state->args = args, state->from = args->key_count, state->to = 0, state->columns = edges;
    state->top = max_int(args->top, args->largest_logit ? 1 : 0);
    state->is_matrix = args->picture && args->picture_rows == args->query_count && args->picture_columns == args->key_count;
    memset(state->sums, 0, sizeof(state->sums));
    memset(state->queries, 0, rows);
    for (int64_t j = 0; j < CHUNK; j++) state->positions[j] = (float)j;
    for (int64_t c = 0; c < args->picture_columns && !state->is_matrix; c++) {
        int64_t end = edge(c + 1, args->picture_columns, args->key_count);
        edges[c] = (Column){end, 1.0f / (float)(end - edge(c, args->picture_columns, args->key_count))};
    }
    return state;
}

/* Pack the keys of all key/value heads. Every thread runs it. */
void pack_keys(StatisticsStruct *args)
{
    int64_t key_heads = args->heads / args->group, size = args->padded * args->width;
    for (int64_t item; (item = __atomic_fetch_add(&args->next_packed, 1, __ATOMIC_RELAXED)) < args->pairs / args->group;) {
        const float *keys = args->given_keys + item / key_heads * args->key_batch + item % key_heads * args->key_head;
        for (int64_t j = 0; j < args->key_count; j += PANEL)
            pack_panel(keys + j * args->key_row, args->key_row, args->key_count - j, args->width, args->keys + item * size + j * args->width);
    }
}

/* Take parts until none is left. Every thread runs it; the assignment of parts to threads does not change the result. */
void compute_statistics(StatisticsStruct *args)
{
    BlockState *state = allocate_state(args);
    if (!state) {
        __atomic_store_n(&args->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t item; (item = __atomic_fetch_add(&args->next, 1, __ATOMIC_RELAXED)) < args->pairs * args->parts;) {
        state->pair = item / args->parts, state->part = item % args->parts;
        state->batch = state->pair / args->heads, state->head = state->pair % args->heads;
        int64_t last = part_edge(args, state->part + 1);
        state->first = part_edge(args, state->part);
        clear_picture(state, state->first, last);
        for (; state->first < last; state->first += BLOCK) {
            state->last = min_int(state->first + BLOCK, last);
            process_block(state);
        }
    }
    free(state->columns);
    free(state);
}

/* The layout of the keys and positions that statistics/cpu_c.py allocates. */
int64_t panel_keys(void) { return PANEL; }
int64_t chunk_keys(void) { return CHUNK; }
