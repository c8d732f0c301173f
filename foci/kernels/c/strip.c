/* The statistics of attention weights in one pass on a CPU, as foci/statistics/cpu_c.py asks for them.

   A few rows at a time: their product with some keys, then everything that is asked of these entries while they lie in
   the nearest cache. An entry is x = log2 of a weight, and HIDDEN where the query does not see the key. */

#include <stdlib.h>
#include <string.h>

#include "additive.h"
#include "masks.h"
#include "product.h"

enum {
    STEP = 4 * LANES,   /* keys that a sweep takes at once */
    CHUNK = 96 * LANES, /* keys whose entries are kept: whole panels and steps; they fit the second cache */
    BLOCK = 128,        /* queries that go over a chunk before the next chunk */
    MOST = 64           /* heaviest keys per query */
};

static const float LN_2 = 0.69314718f;

/* Every member has 8 bytes; Work in compiled.py has them in the same order. What is NULL is not given or not wanted. */
typedef struct {
    Masks masks;
    const float *queries;      /* (pairs, query_count, width) */
    const float *keys;         /* (batch, key heads, padded / PANEL, width, PANEL) */
    const float *shift;        /* (pairs, query_count): log2 of what the row is divided by */
    const float *query_places; /* (batch or 1, query_count) */
    const float *key_places;   /* (batch or 1, padded) */
    const float *slopes;       /* (heads): what each step of distance costs */
    const float *weight;       /* (heads, width): of an additive score; queries and keys are e^2q and e^2k */
    const float *constants;    /* (heads): what its sums are added to */
    const float *by_distance;  /* (heads, distances): what is added, from the last query and the first key on */
    float *entropy;            /* (pairs, query_count) */
    float *distance;           /* (pairs, query_count) */
    float *received;           /* (pairs, parts, key_count), zeros */
    float *picture;            /* (pairs, picture_rows, picture_columns), zeros; sums */
    float *largest;            /* (pairs, parts), HIDDEN; in base 2 */
    float *top_values;         /* (pairs, query_count, top) */
    int64_t *top_keys;         /* (pairs, query_count, top) */
    int64_t pairs, heads, group, query_count, key_count, padded, width, parts, top;
    int64_t picture_rows, picture_columns, distances, query_place_step, key_place_step;
    double scale, softcap; /* of the logits, in base 2; with a softcap, the scale of what tanh_half takes */
    int64_t next, failed;  /* the next part that no thread has taken; whether there was no memory */
} Work;

/* What is known of a query so far; its heaviest entries, heaviest first. */
typedef struct {
    float entropy, distance, values[MOST];
    int32_t keys[MOST];
    int64_t line; /* of the picture */
} Row;

/* A block of rows on its way over the keys. */
typedef struct {
    const Work *work;
    int64_t pair, batch, head, part, first, last, kept;
    int64_t from, to; /* the keys that rows saw since the last flush; their sums by key */
    float x[ROWS * CHUNK], sums[CHUNK];
    Row rows[BLOCK];
    float queries[]; /* (BLOCK / ROWS, width, ROWS) */
} Pass;

/* The same of an additive score: the weight is -2 w in base 2, the constant Σ w. */
static __attribute__((noinline)) void compare(
    const float *queries, const float *keys, int64_t width, const float *weight, float constant, const float *shift,
    float *x)
{
    for (int i = 0; i < 3; i++) {
        floats sums[ROWS];
        sum_quotients(queries, keys + i * LANES, PANEL, weight, width, sums);
        for (int r = 0; r < ROWS; r++) store(x + r * CHUNK + i * LANES, sums[r] + (constant - shift[r]));
    }
}

static inline void insert(Row *row, int64_t kept, float value, int32_t key)
{
    int64_t i = kept - 1;
    for (; i > 0 && row->values[i - 1] < value; i--) {
        row->values[i] = row->values[i - 1];
        row->keys[i] = row->keys[i - 1];
    }
    row->values[i] = value;
    row->keys[i] = key;
}

/* The k-th largest of some maxima: k entries reach it, so that nothing below it is among the k largest. */
static inline float bound(const float *maxima, int count, int64_t k)
{
    int32_t larger[STEP] = {0};
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++) larger[j] += maxima[i] > maxima[j];
    float found = -HIDDEN;
    for (int j = 0; j < count; j++) found = larger[j] < k && maxima[j] < found ? maxima[j] : found;
    return found;
}

/* Inserts what is among the heaviest. Keys come in order and only what is larger is inserted: ties go to the lower key.
   A lane's maximum is that of keys which lie STEP apart: neighbours that are all large, as near the diagonal, lie in
   different lanes, so that the bound is good and few entries reach it. */
static void choose(
    const float *x, int64_t begin, int64_t end, int64_t start, const floats *maxima, int64_t kept, Row *row)
{
    floats folded = maximum(maximum(maxima[0], maxima[1]), maximum(maxima[2], maxima[3]));
    float least = row->values[kept - 1], reached = HIDDEN;
    int larger = 0;
    for (int i = 0; i < LANES; i++) larger += folded[i] > least;
    if (!larger) return;
    if (2 * kept <= LANES && larger >= kept) reached = bound((const float *)&folded, LANES, kept);
    if (2 * kept > LANES && 4 * larger >= LANES && kept <= STEP) reached = bound((const float *)maxima, STEP, kept);
    floats bar = all(reached > least ? reached : least);
    for (int64_t j = begin; j < end; j += STEP) {
        uint64_t bits = 0;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) bits |= reaching(load(x + j + i * LANES), bar) << i * LANES;
        for (; bits; bits &= bits - 1) {
            int64_t at = j + __builtin_ctzll(bits);
            if (x[at] > row->values[kept - 1]) insert(row, kept, x[at], (int32_t)(start + at));
        }
    }
}

/* One row over the keys of a chunk that it sees. */
static void sweep(Pass *pass, const float *x, int64_t begin, int64_t end, int64_t start, Row *row, float place)
{
    const float *places = pass->work->key_places + pass->batch * pass->work->key_place_step + start;
    floats entropy = {0}, distance = {0}, maxima[4] = {all(HIDDEN), all(HIDDEN), all(HIDDEN), all(HIDDEN)};
    for (int64_t j = begin; j < end; j += STEP)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            int64_t at = j + i * LANES;
            floats entry = load(x + at), weight = power(entry);
            entropy += entry * weight;
            distance += magnitude(load(places + at) - place) * weight;
            store(pass->sums + at, load(pass->sums + at) + weight);
            maxima[i] = maximum(entry, maxima[i]);
        }
    row->entropy += total(entropy);
    row->distance += total(distance);
    if (pass->kept) choose(x, begin, end, start, maxima, pass->kept, row);
}

static int64_t edge(int64_t block, int64_t blocks, int64_t length) { return block * length / blocks; }
static int64_t block_of(int64_t index, int64_t blocks, int64_t length) { return ((index + 1) * blocks - 1) / length; }

/* Gives the sums by key to what the keys received and to a line of the picture. */
static void flush(Pass *pass, int64_t line, int64_t start)
{
    const Work *work = pass->work;
    float *sums = pass->sums;
    int64_t from = pass->from, to = pass->to;
    if (work->received) {
        float *received = work->received + (pass->pair * work->parts + pass->part) * work->key_count;
        for (int64_t j = from; j < to; j++) received[j] += sums[j - start];
    }
    if (work->picture) {
        int64_t columns = work->picture_columns, keys = work->key_count, c = block_of(from, columns, keys);
        float *cells = work->picture + (pass->pair * work->picture_rows + line) * columns;
        /* Of a short sequence every key has a column of its own: no edges, each of which takes a division. */
        if (columns == keys)
            for (int64_t j = from; j < to; j++) cells[j] += sums[j - start];
        else
            for (int64_t j = from; j < to; c++)
                for (int64_t stop = lesser(edge(c + 1, columns, keys), to); j < stop; j++) cells[c] += sums[j - start];
    }
    memset(sums + (from - start), 0, (size_t)(to - from) * sizeof(float));
    pass->from = work->key_count, pass->to = 0;
}

/* What is done to the logits of a row before they are weighed: the softcap, and what distance adds. */
static void adjust(const Pass *pass, int64_t row, int64_t start, int64_t begin, int64_t end, float place, float *x)
{
    const Work *work = pass->work;
    if (work->softcap > 0) {
        float shift = work->shift[pass->pair * work->query_count + row], cap = (float)work->softcap;
        for (int64_t j = begin; j < end; j += LANES) store(x + j, tanh_half(load(x + j)) * cap - shift);
    }
    if (work->slopes) {
        const float *places = work->key_places + pass->batch * work->key_place_step + start;
        float slope = work->slopes[pass->head];
        for (int64_t j = begin; j < end; j += LANES)
            store(x + j, load(x + j) - slope * magnitude(load(places + j) - place));
    }
    if (work->by_distance) {
        const float *added = work->by_distance + pass->head * work->distances + (work->query_count - 1 - row) + start;
        for (int64_t j = begin; j < end; j += LANES) store(x + j, load(x + j) + load(added + j));
    }
}

/* Up to ROWS rows over one chunk. */
static void tile(Pass *pass, int64_t r, int64_t start, int64_t end, int64_t *line)
{
    const Work *work = pass->work;
    int64_t low[ROWS], high[ROWS], from = end, to = start, count = lesser(pass->last - r, ROWS), width = work->width;
    float shift[ROWS] = {0};
    for (int64_t i = 0; i < count; i++) {
        if (visible(&work->masks, pass->batch, r + i, start, end, low + i, high + i))
            from = lesser(from, low[i]), to = greater(to, high[i]);
        if (!(work->softcap > 0)) shift[i] = work->shift[pass->pair * work->query_count + r + i];
    }
    const float *queries = pass->queries + (r - pass->first) * width;
    const float *keys = work->keys + (pass->pair / work->group) * work->padded * width;
    for (int64_t c = start + (from - start) / PANEL * PANEL; c < to; c += PANEL) {
        float *x = pass->x + (c - start);
        if (!work->weight) multiply(queries, keys + c * width, width, shift, x, CHUNK);
        else compare(queries, keys + c * width, width, work->weight + pass->head * width, work->constants[pass->head], shift, x);
    }
    for (int64_t i = 0; i < count; i++) {
        if (low[i] >= high[i]) continue;
        Row *row = pass->rows + (r + i - pass->first);
        if (*line >= 0 && *line != row->line) flush(pass, *line, start);
        *line = row->line;
        pass->from = lesser(pass->from, low[i]), pass->to = greater(pass->to, high[i]);
        float *x = pass->x + i * CHUNK, place = work->query_places[pass->batch * work->query_place_step + r + i];
        int64_t begin = (low[i] - start) / STEP * STEP, stop = (high[i] - start + STEP - 1) / STEP * STEP;
        adjust(pass, r + i, start, begin, stop, place, x);
        hide_outside(&work->masks, pass->batch, r + i, start, begin, stop, x);
        hide_inside(&work->masks, pass->batch, pass->head, r + i, start, low[i] - start, high[i] - start, x);
        sweep(pass, x, begin, stop, start, row, place);
    }
}

/* Queries of a block side by side, as `multiply` reads them; rows that know nothing yet. */
static void prepare(Pass *pass)
{
    const Work *work = pass->work;
    float scale = (float)work->scale;
    for (int64_t r = 0; r < pass->last - pass->first; r++) {
        const float *query = work->queries + (pass->pair * work->query_count + pass->first + r) * work->width;
        float *beside = pass->queries + r / ROWS * ROWS * work->width + r % ROWS;
        Row *row = pass->rows + r;
        row->entropy = row->distance = 0;
        row->line = work->picture ? block_of(pass->first + r, work->picture_rows, work->query_count) : 0;
        for (int64_t i = 0; i < pass->kept; i++) row->values[i] = HIDDEN / 2, row->keys[i] = -1;
        for (int64_t d = 0; d < work->width; d++) beside[d * ROWS] = scale * query[d];
    }
}

static void finish(const Pass *pass)
{
    const Work *work = pass->work;
    for (int64_t r = pass->first; r < pass->last; r++) {
        const Row *row = pass->rows + (r - pass->first);
        int64_t at = pass->pair * work->query_count + r;
        /* Where one key has all the weight, rounding may leave a little less than 0. */
        if (work->entropy) work->entropy[at] = row->entropy > 0 ? 0 : 0 - LN_2 * row->entropy;
        if (work->distance) work->distance[at] = row->distance;
        if (work->largest && row->keys[0] >= 0) {
            float *largest = work->largest + pass->pair * work->parts + pass->part;
            float found = row->values[0] + work->shift[at];
            *largest = found > *largest ? found : *largest;
        }
        for (int64_t i = 0; i < work->top; i++) {
            work->top_values[at * work->top + i] = row->keys[i] < 0 ? 0 : power(all(row->values[i]))[0];
            work->top_keys[at * work->top + i] = row->keys[i];
        }
    }
}

static void block(Pass *pass)
{
    prepare(pass);
    for (int64_t start = 0; start < pass->work->key_count; start += CHUNK) {
        int64_t end = lesser(start + CHUNK, pass->work->key_count), line = -1;
        for (int64_t r = pass->first; r < pass->last; r += ROWS) tile(pass, r, start, end, &line);
        if (line >= 0) flush(pass, line, start);
    }
    finish(pass);
}

/* Part p of a pair has the rows from edge to edge; where there is a picture, no two parts write to one line of it. */
static int64_t part_edge(const Work *work, int64_t part)
{
    int64_t lines = work->picture ? work->picture_rows : work->query_count;
    return edge(edge(part, work->parts, lines), lines, work->query_count);
}

/* Takes one part after the other until none is left; every thread runs it, and who takes which part changes nothing. */
void measure(Work *work)
{
    size_t rows = BLOCK * (size_t)work->width * sizeof(float);
    Pass *pass = aligned_alloc(64, (sizeof(Pass) + rows + 63) / 64 * 64);
    if (!pass) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    memset(pass, 0, sizeof(Pass) + rows);
    pass->work = work, pass->from = work->key_count;
    pass->kept = greater(work->top, work->largest ? 1 : 0);
    for (int64_t taken; (taken = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->pairs * work->parts;) {
        pass->pair = taken / work->parts, pass->part = taken % work->parts;
        pass->batch = pass->pair / work->heads, pass->head = pass->pair % work->heads;
        int64_t last = part_edge(work, pass->part + 1);
        for (pass->first = part_edge(work, pass->part); pass->first < last; pass->first += BLOCK) {
            pass->last = lesser(pass->first + BLOCK, last);
            block(pass);
        }
    }
    free(pass);
}

/* What compiled.py lays the keys out by. */
int64_t panel_keys(void) { return PANEL; }
int64_t chunk_keys(void) { return CHUNK; }
int64_t most_top(void) { return MOST; }
