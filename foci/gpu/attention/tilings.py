"""Tile sizes and launch options of the attention kernels: fixed tables, nothing is tuned at run time.

They depend on widths, dtype, kinds of mask and bias, and lengths, never on the batch: a sequence gives the same bits in
any batch.
"""

from __future__ import annotations

import torch

from foci.gpu.arguments import INTERPRETER_TILES, Tiling, next_power_of_two
from foci.gpu.attention.arguments import CallPart
from foci.runtime.device import major_capability

# By pass and by the larger of D and Dv, for 16-bit inputs without a row table.
ATTENTION_TILINGS = {
    "forward": {
        64: Tiling(128, 64, 8, 3, 128),
        128: Tiling(64, 64, 4, 3),
        256: Tiling(128, 64, 8, 2),
    },
    "queries": {
        64: Tiling(64, 64, 4, 3),
        128: Tiling(128, 64, 8, 3),
        256: Tiling(64, 32, 4, 2),
    },
    "keys": {
        64: Tiling(64, 64, 4, 3),
        128: Tiling(32, 64, 4, 3),
        256: Tiling(32, 64, 8, 2),
    },
    "bias": {
        64: Tiling(64, 64, 4, 2),
        128: Tiling(64, 64, 4, 2),
        256: Tiling(64, 32, 4, 1),
    },
}
# With documents many tiles are visible in part, and less is wasted of smaller ones: by pass and width.
DOCUMENT_TILINGS = {("forward", 64): Tiling(64, 64, 4, 3), ("queries", 128): Tiling(64, 64, 4, 2)}
# With a dense bias, whose own tiles take shared memory and registers: by pass and width, else two stages at most.
BIAS_TILINGS = {("queries", 128): Tiling(64, 64, 4, 2), ("forward", 256): Tiling(64, 32, 4, 2)}
# On GPUs with 227 KiB of shared memory per program, which are those of these compute capabilities. A step of this pass
# loads four tiles for two products: the larger they are, the less it loads.
LARGE_BIAS_TILINGS = {128: Tiling(128, 64, 8, 2)}
LARGE_MEMORY_CAPABILITIES = (9, 10)
# Like ATTENTION_TILINGS, with a row table. Near the diagonal a program also holds a tile of values from
# the row table: larger tiles than these spill registers there.
ROW_TABLE_TILINGS = {
    "forward": {
        64: Tiling(128, 64, 8, 3, 128),
        128: Tiling(128, 64, 8, 2),
        256: Tiling(128, 64, 8, 2),
    },
    "queries": {
        64: Tiling(64, 64, 4, 2, 168),
        128: Tiling(128, 64, 8, 2),
        256: Tiling(64, 32, 4, 2),
    },
    "keys": {
        64: Tiling(32, 64, 4, 3),
        128: Tiling(32, 128, 8, 2),
        256: Tiling(32, 64, 8, 2),
    },
}
# Products of float32 do not run on tensor cores and read twice the memory.
FLOAT32_TILINGS = {
    "forward": {
        64: Tiling(64, 32, 4, 2),
        128: Tiling(64, 32, 8, 2),
        256: Tiling(32, 16, 8, 1),
    },
    "queries": {
        64: Tiling(64, 32, 4, 2),
        128: Tiling(64, 32, 8, 1),
        256: Tiling(32, 16, 4, 1),
    },
    "keys": {
        64: Tiling(32, 64, 8, 2),
        128: Tiling(32, 64, 8, 1),
        256: Tiling(16, 32, 4, 1),
    },
    "bias": {
        64: Tiling(32, 32, 4, 1),
        128: Tiling(32, 32, 4, 1),
        256: Tiling(16, 16, 8, 1),
    },
}
# By the larger of D and Dv: few queries, whose programs wait for memory. The number of queries is that of the call.
PACKED_TILINGS = {
    64: Tiling(16, 64, 4, 3),
    128: Tiling(16, 64, 4, 3),
    256: Tiling(16, 32, 4, 2),
}
PACKED_FLOAT32_TILING = Tiling(16, 16, 4, 2)
# Float32 inputs have at most FEW_QUERIES rows.
MAX_PACKED_ROWS = 64
# Calls with at most this many queries use tiles of this size: one more kernel per kind of call, not one per length.
FEW_QUERIES = 16
# The keys of few queries are split among at most MAX_KEY_SPLITS programs, of at least MIN_SPLIT_KEYS keys each, and of
# SPLIT_KEYS_PER_ROW for each row of their tile: writing and reading its results takes as long as two keys per row.
MAX_KEY_SPLITS = 64
MIN_SPLIT_KEYS = 512
SPLIT_KEYS_PER_ROW = 16
# At most so many sequences add their gradients of a shared bias one after the other, each rounded to its dtype.
MAX_BIAS_SEQUENCES = 8


def is_packed(part: CallPart) -> bool:
    """Whether one tile holds the queries of all heads that share keys, so that these are read once."""
    queries = part.q.shape[2]
    rows = FEW_QUERIES if part.q.dtype == torch.float32 else MAX_PACKED_ROWS
    return not part.options.table_kind and queries <= FEW_QUERIES and queries * part.group <= rows


def choose_tiling(name: str, part: CallPart) -> Tiling:
    """Choose the tiles of a pass: "forward", "queries", "keys" or "bias". Few queries get small tiles."""
    q, v, options = part.q, part.v, part.options
    if q.device.type == "cpu":
        rows = next_power_of_two(q.shape[2] * part.group) if is_packed(part) else INTERPRETER_TILES.queries
        return INTERPRETER_TILES._replace(queries=rows)
    width = max(next_power_of_two(q.shape[-1]), next_power_of_two(v.shape[-1]), 64)
    half_precision = ROW_TABLE_TILINGS if options.table_kind else ATTENTION_TILINGS
    tiling = (FLOAT32_TILINGS if q.dtype == torch.float32 else half_precision)[name][width]
    if is_packed(part):
        packed = PACKED_FLOAT32_TILING if q.dtype == torch.float32 else PACKED_TILINGS[width]
        return packed._replace(queries=next_power_of_two(q.shape[2] * part.group))
    if q.shape[2] <= FEW_QUERIES:
        return tiling._replace(queries=FEW_QUERIES, warps=4, registers=None)
    # Under a mask the ends of the rows need registers, too. With three stages some spilled in every tile; with two none
    # do, and as many programs share a multiprocessor.
    if name == "forward" and options.table_kind == 2 and (options.causal or options.key_ranges is not None):
        tiling = tiling._replace(stages=min(tiling.stages, 2))
    is_half = q.dtype != torch.float32
    if is_half and options.query_ids is not None and not options.table_kind:
        tiling = DOCUMENT_TILINGS.get((name, width), tiling)
    if options.bias is not None:
        fewer_stages = tiling._replace(stages=min(tiling.stages, 2))
        tiling = BIAS_TILINGS.get((name, width), fewer_stages) if is_half else fewer_stages
        if is_half and name == "bias" and has_large_memory(q.device):
            tiling = LARGE_BIAS_TILINGS.get(width, tiling)
    # Relative values, dense masks and biases hold one more tile in registers.
    needs_registers = options.values is not None or options.dense is not None or options.bias is not None
    return tiling._replace(registers=None) if needs_registers else tiling


def has_large_memory(device: torch.device) -> bool:
    return torch.version.hip is None and major_capability(device.index or 0) in LARGE_MEMORY_CAPABILITIES


def count_key_splits(part: CallPart) -> int:
    """The number of programs that share the keys of one tile of queries; it does not depend on the batch."""
    queries, keys = part.q.shape[2], part.k.shape[2]
    if queries > FEW_QUERIES:
        return 1
    rows = queries * part.group if is_packed(part) else queries
    return max(1, min(keys // max(MIN_SPLIT_KEYS, SPLIT_KEYS_PER_ROW * rows), MAX_KEY_SPLITS))


def count_query_programs(part: CallPart, tiling: Tiling) -> int:
    """The number of tiles of queries."""
    if is_packed(part):
        return part.k.shape[0] * part.k.shape[1]
    return ceil_divide(part.q.shape[2], tiling.queries) * part.pairs


def ceil_divide(length: int, size: int) -> int:
    return -(-length // size)
