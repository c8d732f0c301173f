"""What forward and backward do with one tile: load rows, find its visible keys, compute logits, apply masks.

The visible keys of query i, at position i + Tk - Tq, are those that all of these allow:
    left, right, always, stop: keys from position - left to position + right or before `always`, and before `stop`
    lengths (B,): the first keys of a sequence (PADDED 1) or the last ones (PADDED 2)
    document_ranges (Bm, 3, Tq): from the first to the last key of the query's document, and whether all between belong
    to it (IDS); if not, masked tiles compare query_ids and key_ids
    key_ranges (Bm, RANGES, 2, Tq): one or two ranges
    dense (B, H, Tq, Tk): a bool per entry (DENSE)

Logits and log-sum-exps are in base 2. B batch, Bm 1 or the batch size, H heads, Tq queries, Tk keys, D width, Dv value
width.
"""

# Device code carries no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl

from foci.kernels.distance_bias.forward import distance_bias_logits
from foci.kernels.logits import LOG2_E

# A new value of one of these does not trigger a compilation: lengths, counts, distances, and strides that follow from
# lengths.
LENGTHS = [
    "H", "group", "Tq", "Tk", "first_b", "first_h", "out_split", "peaks_split", "peaks_batch", "peaks_head",
    "split_tiles", "lengths_batch", "document_ranges_batch", "key_ranges_batch", "query_ids_batch", "key_ids_batch",
    "dense_batch", "dense_head", "dense_query", "dense_key", "bias_batch", "bias_head", "bias_query", "bias_key",
    "threshold", "query_tiles_batch", "left", "right", "always", "stop", "sequence",
]  # fmt: skip


@triton.jit
def load_tile(base, row_stride, first, r, count, c, width, EVEN: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows first + r of a matrix (count, width); zeros outside. Without BOUNDED all rows must lie inside."""
    pointers = base + first.to(tl.int64) * row_stride + (r[:, None] * row_stride + c[None, :])
    if BOUNDED and EVEN:
        tile = tl.load(pointers, mask=first + r[:, None] < count, other=0.0)
    elif BOUNDED:
        tile = tl.load(pointers, mask=(first + r[:, None] < count) & (c[None, :] < width), other=0.0)
    elif EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=c[None, :] < width, other=0.0)
    return tile


@triton.jit
def load_rows(base, offsets, c, width, EVEN: tl.constexpr):
    """Rows of `width` features that start at offsets from base."""
    pointers = base + (offsets[:, None] + c[None, :])
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=c[None, :] < width, other=0.0)
    return tile


@triton.jit
def locate_packed_rows(pair, r, H, group, Tq):
    """The queries of all heads that share a key head, one head after the other: sequence, key head, the query head and
    query of each row, and whether the row is one of them. Rows past the end repeat the last one.
    """
    G = H // group
    b, g = (pair // G).to(tl.int64), (pair % G).to(tl.int64)
    row = tl.minimum(r, Tq * group - 1)
    return b, g, g * group + row // Tq, row % Tq, r < Tq * group


@triton.jit
def locate_tile(tiles, heads, BIAS: tl.constexpr):
    """The sequence, head and tile of a program, one program per tile of each head.

    Sequence and head are int64: their products with strides may exceed int32. With a dense bias the sequences of a
    batch come next to each other: they share most biases, which stay in the L2.
    """
    program = tl.program_id(0)
    if BIAS > 0:
        batch = tl.num_programs(0) // (tiles * heads)
        b, h, tile = program % batch, program // batch // tiles, program // batch % tiles
    else:
        b, h, tile = program // tiles // heads, program // tiles % heads, program % tiles
    return b.to(tl.int64), h.to(tl.int64), tile


@triton.jit
def sequence_range(lengths, lengths_batch, b, stop, Tk, PADDED: tl.constexpr):
    """The keys of sequence b that some query may see, from first to last + 1."""
    start, end = Tk * 0, tl.minimum(stop, Tk)
    if PADDED > 0:
        length = tl.load(lengths + b * lengths_batch).to(tl.int32)
        if PADDED == 1:
            end = tl.minimum(end, length)
        else:
            start = tl.maximum(Tk - length, 0)
    return start, end


@triton.jit
def check_length(lengths, lengths_batch, b, Tk):
    """Assert that the length of sequence b is valid; not in a kernel that uses tensor cores.

    In a kernel with a call, which the assertion is, every product waits for the one before.
    """
    length = tl.load(lengths + b * lengths_batch)
    tl.device_assert((length >= 0) & (length <= Tk), "lengths must be from 0 to the number of keys")


@triton.jit(do_not_specialize=["lengths_batch", "Tk"])
def check_lengths(lengths, lengths_batch, Tk):
    """Check the length of a sequence per program."""
    check_length(lengths, lengths_batch, tl.program_id(0).to(tl.int64), Tk)


@triton.jit
def visible_range(
    key_ranges, document_ranges, s: tl.constexpr, rows, start, end, left, right, always, offset, Tq,
    RANGES: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """The keys that a query sees in range s, from low to high; none for queries past the end."""
    inside = rows < Tq
    low = tl.maximum(rows + (offset - left), start)
    high = tl.minimum(tl.maximum(rows + (offset + right + 1), always), end)
    if RANGES > 0:
        low = tl.maximum(low, tl.load(key_ranges + 2 * s * Tq + rows, mask=inside, other=0))
        high = tl.minimum(high, tl.load(key_ranges + (2 * s + 1) * Tq + rows, mask=inside, other=0))
    if IDS:
        low = tl.maximum(low, tl.load(document_ranges + rows, mask=inside, other=0))
        high = tl.minimum(high, tl.load(document_ranges + Tq + rows, mask=inside, other=0))
    return low, tl.where(inside, tl.maximum(high, 0), 0)


@triton.jit
def find_full_tiles(low, high, document_ranges, rows, Tq, Tk, BN: tl.constexpr, IDS: tl.constexpr, DENSE: tl.constexpr):
    """Key tiles first to last that some query sees, full to end of these that every query sees completely, and whether
    the documents of the queries are contiguous.
    """
    inside, some = rows < Tq, high > low
    first = tl.min(tl.where(some, low, Tk), 0) // BN
    last = tl.maximum(tl.cdiv(tl.max(tl.where(some, high, 0), 0), BN), first)
    full = tl.minimum(tl.maximum(tl.cdiv(tl.max(low, 0), BN), first), last)
    end = tl.minimum(tl.maximum(tl.min(tl.where(inside, high, Tk), 0) // BN, full), last)
    contiguous = Tk * 0
    if IDS:
        contiguous = tl.min(tl.load(document_ranges + 2 * Tq + rows, mask=inside, other=1), 0)
        end = tl.where(contiguous > 0, end, full)
    if DENSE:
        end = full
    return first, last, full, end, contiguous


@triton.jit
def locate_bias(bias, b, h, bias_batch, bias_head, BIAS: tl.constexpr):
    """The dense bias of one head. Strides of aligned rows are counted in groups of 8 entries: see `bias_strides`."""
    return bias + (b * bias_batch + h * bias_head) * (8 if BIAS == 1 else 1)


@triton.jit
def load_bias(bias, bias_query, bias_key, i, j, Tq, Tk, MASKED: tl.constexpr, BIAS: tl.constexpr):
    """The entries (i, j) of the dense bias of one head."""
    rows = tl.minimum(i, Tq - 1).to(tl.int64)
    if BIAS == 1:
        # Rows of whole groups of 8 entries: the loads take 16 bytes at a time, and groups are in the row or not.
        pointers = bias + (rows * (bias_query * 8) + j)
        if MASKED:
            entries = tl.load(pointers, mask=j // 8 < Tk // 8, other=0.0)
        else:
            entries = tl.load(pointers)
    else:
        columns = tl.minimum(j, Tk - 1) if MASKED else j
        entries = tl.load(bias + (rows * bias_query + columns.to(tl.int64) * bias_key))
    return entries


@triton.jit
def tile_logits(
    dots, bias, bias_query, bias_key, i, j, offset, Tq, Tk, slope, scale, softcap,
    MASKED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, EXACT: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """softcap(scale * dots) + bias, and the tanh of the softcap."""
    z, tanh_softcap = distance_bias_logits(
        dots, dots, i, j, offset, slope, scale, softcap, 0, SOFTCAP, ALIBI, EXACT, DIRECT
    )
    if BIAS > 0:
        z += load_bias(bias, bias_query, bias_key, i, j, Tq, Tk, MASKED, BIAS).to(tl.float32) * LOG2_E
    return z, tanh_softcap


@triton.jit
def visible_keys(low, high, i, j, dense, dense_query, dense_key, DENSE: tl.constexpr):
    """Entries (i, j) from low to high that are set in the dense mask. Documents: see `hide_other_documents`."""
    seen = (j >= low) & (j < high)
    if DENSE:
        offsets = i.to(tl.int64) * dense_query + j.to(tl.int64) * dense_key
        seen &= tl.load(dense + offsets, mask=seen, other=0) != 0
    return seen


@triton.jit
def hide_other_documents(x, hidden: tl.constexpr, contiguous, i, j, query_ids, key_ids, Tq, Tk):
    """x, and `hidden` where query and key are of different documents.

    Contiguous documents are ranges, which `visible_range` found: comparing ids takes longer than the rest of a tile.
    """
    if contiguous == 0:
        same = tl.load(query_ids + i, mask=i < Tq, other=0) == tl.load(key_ids + j, mask=j < Tk, other=0)
        x = tl.where(same, x, hidden)
    return x


@triton.jit(do_not_specialize=["query_ids_batch", "key_ids_batch", "Tq", "Tk"])
def find_document_ranges(
    query_ids, key_ids, document_ranges, query_ids_batch, key_ids_batch, Tq, Tk, BM: tl.constexpr, BN: tl.constexpr
):
    """document_ranges (Bm, 3, Tq) for the sequence and BM queries of a program: first and last + 1 of the keys with the
    query's id, and whether all keys between them have it.
    """
    b = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    inside, c = rows < Tq, tl.arange(0, BN)
    # Queries past the end repeat the last one.
    ids = tl.load(query_ids + b * query_ids_batch + tl.minimum(rows, Tq - 1))
    key_ids += b * key_ids_batch
    smallest, largest = tl.min(ids, 0), tl.max(ids, 0)
    # Per place of a block; reduced once, after the loops.
    highs, counts = tl.zeros((BM, BN), tl.int32), tl.zeros((BM, BN), tl.int32)
    lows = highs + Tk
    # Most keys belong to other documents: 8 BN of them are skipped at a time.
    for block in range(0, Tk, 8 * BN):
        some = tl.load(key_ids + tl.minimum(block + tl.arange(0, 8 * BN), Tk - 1))
        if (tl.min(some, 0) <= largest) & (tl.max(some, 0) >= smallest):
            for first in range(block, tl.minimum(block + 8 * BN, Tk), BN):
                j = first + c
                keys = tl.load(key_ids + tl.minimum(j, Tk - 1))
                same = (keys[None, :] == ids[:, None]) & (j < Tk)[None, :]
                lows = tl.minimum(lows, tl.where(same, j[None, :], Tk))
                highs = tl.where(same, j[None, :] + 1, highs)
                counts += same.to(tl.int32)
    low, high, count = tl.min(lows, 1), tl.max(highs, 1), tl.sum(counts, 1)
    document_ranges = document_ranges.to(tl.pointer_type(tl.int32)) + b * 3 * Tq + rows
    tl.store(document_ranges, tl.minimum(low, high), mask=inside)
    tl.store(document_ranges + Tq, high, mask=inside)
    tl.store(document_ranges + 2 * Tq, (count == high - low).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def find_key_bounds(
    lengths, document_ranges, key_ranges, key_bounds, common_keys,
    Tq, Tk, left, right, always, stop, lengths_batch, document_ranges_batch, key_ranges_batch,
    PADDED: tl.constexpr, RANGES: tl.constexpr, IDS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """For each tile of queries, the keys that some query sees and the keys that all queries see.

    key_bounds (B, tiles, ranges, 2): first visible key, and last + 1. common_keys (B, tiles, 2): the range that all
    queries see in their first range.
    """
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tile * BM + tl.arange(0, BM)
    index = b * tl.num_programs(1) + tile
    key_ranges += b * key_ranges_batch
    document_ranges = document_ranges.to(tl.pointer_type(tl.int32)) + b * document_ranges_batch
    key_bounds = key_bounds.to(tl.pointer_type(tl.int32))
    common_keys = common_keys.to(tl.pointer_type(tl.int32)) + 2 * index
    start, end = sequence_range(lengths, lengths_batch, b, stop, Tk, PADDED)
    for s in tl.static_range(RANGES if RANGES > 0 else 1):
        low, high = visible_range(
            key_ranges, document_ranges, s, rows, start, end, left, right, always, Tk - Tq, Tq, RANGES, IDS
        )
        bounds = key_bounds + (index * (RANGES if RANGES > 0 else 1) + s) * 2
        tl.store(bounds, tl.min(tl.where(low < high, low, Tk), 0))
        tl.store(bounds + 1, tl.max(tl.where(low < high, high, 0), 0))
        if s == 0:
            shared = tl.min(tl.where(rows < Tq, high, Tk), 0)
            if IDS:
                exact = tl.min(tl.load(document_ranges + 2 * Tq + rows, mask=rows < Tq, other=1), 0)
                shared = tl.where(exact > 0, shared, 0)
            tl.store(common_keys, tl.max(low, 0))
            tl.store(common_keys + 1, shared)
