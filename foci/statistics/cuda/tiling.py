"""How the pass over the tiles is cut: tile sizes, programs, launches that fit a memory budget, cells of a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from foci.statistics.request import Request

# Memory for the candidates of the top keys between the pass over the tiles and the selection.
MAX_CANDIDATE_BYTES = 36 * 2**20
# Most programs of a (sequence, head) pair: each has its own sums for `received`.
MAX_PROGRAMS_PER_PAIR = 32
# Sequences below it are short: a tile of 64 queries has more than 16 of 256 rows of picture cells.
SHORT_LENGTH = 1088
# Most rows or columns of picture cells in a tile of a long sequence.
FEW_CELL_SLOTS = 16
# Keys of a tile that one warp of the kernel for Hopper holds.
KEYS_PER_WARP = 16
# Keys that it fetches at a time: two tiles.
KEYS_PER_FETCH = 128
# Number of classes that share one bound on their third largest logit, as in kernels/statistics/tiles.py.
CLASSES_PER_BOUND = 8


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile sizes and launch options.

    queries, keys: of a tile; warps, stages: as Triton takes them;
    programs_per_sm: programs that share a multiprocessor;
    use_tma: TMA fetches the keys, where it can;
    defer_sums: the sums of a tile for `received` and a picture of means are written during the next product;
    mask_all: mask every tile, not only those at the edge of the visible keys, which takes half the time to compile;
    use_hopper: use the kernel for Hopper, which overlaps the next product with this work: see hopper.py;
    strips, strip_queries: that kernel for any length: the number of strips that divide the queries evenly, and the
    queries of a tile that a strip takes; 0 for lengths and pictures that align with its tiles;
    strip_columns: the columns of a picture whose rows are strips.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    programs_per_sm: int
    use_tma: bool = False
    defer_sums: bool = False
    mask_all: bool = False
    use_hopper: bool = False
    strips: int = 0
    strip_queries: int = 0
    strip_columns: int = 0

    def count_tiles(self, queries: int) -> int:
        """Number of tiles of queries."""
        slots = self.strips * self.strip_queries if self.strips else queries
        return -(-slots // self.queries)

    def first_query(self, tile: int, queries: int) -> int:
        """The first query of a tile; `queries` for the tile after the last, at most."""
        if not self.strips:
            return tile * self.queries
        return min(tile * (self.queries // self.strip_queries), self.strips) * queries // self.strips


# For additive scores: the logits take most of the time.
ADDITIVE_CONFIG = TileConfig(queries=64, keys=64, warps=4, stages=1, programs_per_sm=2, mask_all=True)


def default_config(width: int, dtype: torch.dtype, request: Request, use_tma: bool, short: bool) -> TileConfig:
    """Large tiles for half precision; float32 takes three products per tile and twice the memory.

    Short sequences have small tiles: more programs, and few rows of picture cells in each.
    """
    if dtype == torch.float32 or width > 128:
        return TileConfig(queries=64, keys=64, warps=4, stages=2, programs_per_sm=1)
    if short:
        return TileConfig(queries=64, keys=64, warps=4, stages=3, programs_per_sm=2, mask_all=True)
    # Each of these statistics takes registers for half a tile; with many of them the tile has to be smaller.
    # Where top keys are requested, the largest logit follows from them.
    carried = request.entropy + request.distance + (3 if request.top else request.largest_logit)
    queries = 64 if carried > 3 else 128
    # Devices without TMA, where threads load the keys, have no shared memory for a fourth stage.
    stages = 4 if use_tma and request.top else 3
    return TileConfig(
        queries, 64, warps=4, stages=stages, programs_per_sm=2, use_tma=use_tma, defer_sums=should_defer_sums(request)
    )


def should_defer_sums(request: Request) -> bool:
    """Whether deferring the sums of a tile is faster, as measured: not where registers run out, and not where only
    sums are requested.
    """
    tight = request.distance or (request.largest_logit and not request.top)
    return request.picture is not None and (request.entropy or not request.received) and not tight


def programs_per_pair(heads: int, tiles: int, programs: int) -> int:
    """Programs per (sequence, head) pair that need the fewest rounds of tiles; more programs take more memory.

    The sums of a sequence depend on it, so it depends on the lengths and heads of one sequence, not on the batch.
    """
    most = min(tiles, MAX_PROGRAMS_PER_PAIR, max(1, 4 * programs // heads))
    turns = [(-(-tiles // n) * -(-heads * n // programs), n) for n in range(1, most + 1)]
    return min(turns)[1]


def choose_segments(top: int, places: int) -> int:
    """Number of interleaved key segments (a power of two), so that there are about 8 classes per top key.

    A class is read again when it may hold three of the top keys: for 8 keys in 64 classes this happens by chance for
    one query in 70. Segments are interleaved tile by tile, so that this holds for short rows as well.
    """
    needed = -(-8 * top // places)
    return 1 if needed <= 1 else 1 << (needed - 1).bit_length()


class KeyClasses(NamedTuple):
    """Classes of keys in interleaved segments; the tag of a key within its class takes `tag_bits` bits."""

    number: int
    segments: int
    tags: int
    tag_bits: int

    @property
    def bytes_per_query(self) -> int:
        """Two logits of 32 bits per class, and bounds of 16 bits."""
        return (4 + 4) * self.number + 2 * self.number // CLASSES_PER_BOUND


def choose_key_classes(top: int, keys: int, config: TileConfig, least_tag_bits: int) -> KeyClasses:
    """Two keys of a tile share a class and differ in their tag."""
    segments = choose_segments(top, config.keys // 2)
    tiles = -(-keys // config.keys)
    tags = 2 * -(-tiles // segments)
    return KeyClasses(segments * (config.keys // 2), segments, tags, max(least_tag_bits, (tags - 1).bit_length()))


class LaunchRange(NamedTuple):
    """The (sequence, head) pairs and the tiles of queries that one launch processes."""

    first_pair: int
    pairs: int
    first_tile: int
    tiles: int


def split_launches(
    batch: int, heads: int, tiles: int, bytes_per_tile: int, budget: int = MAX_CANDIDATE_BYTES
) -> Iterator[LaunchRange]:
    """Yields as many whole sequences as fit the budget; of longer ones, ranges of tiles of every head.

    The programs of a launch then do equal work, and the sums of a sequence do not depend on the rest of the batch.
    """
    fitting = batch * heads * tiles if bytes_per_tile == 0 else max(1, budget // bytes_per_tile)
    step = fitting // (heads * tiles)
    if step:
        for first in range(0, batch, step):
            yield LaunchRange(first * heads, min(step, batch - first) * heads, 0, tiles)
        return
    for sequence in range(batch):
        for first in range(0, heads, fitting):
            here = min(fitting, heads - first)
            count = -(-tiles // (fitting // here))
            for part in range(count):
                start, stop = part * tiles // count, (part + 1) * tiles // count
                yield LaunchRange(sequence * heads + first, here, start, stop - start)


class PictureCells(NamedTuple):
    """How the sums of a picture are laid out: (lines, columns * across) per head, merged by merge.py.

    The sum of cell row r over the queries of one tile is in line r * row_step + tile * tile_step. For cells that align
    with tiles: the queries and keys of one sum, and the keys of a column of sums; cell_queries is 0 for others. slots:
    the most rows or columns of such others in a tile. cut: the numbers of a line where columns are cut at any key (two
    for each 16 keys), and the lines of row r are those from r * row_step on, row_step of them.
    """

    lines: int
    across: int
    row_step: int = 1
    tile_step: int = 1
    cell_queries: int = 0
    cell_keys: int = 1
    column_keys: int = 1
    slots: int = 16
    cut: int = 0

    def line_width(self, columns: int) -> int:
        """The numbers of a line."""
        return self.cut or columns * self.across


def lay_out_cells(picture: tuple[int, int, str], queries: int, keys: int, config: TileConfig) -> PictureCells:
    """The cells for a picture of means."""
    rows, tiles = picture[0], config.count_tiles(queries)
    if config.strips:
        lines = tiles * (config.queries // config.strip_queries)
        groups = -(-keys // KEYS_PER_FETCH) * (KEYS_PER_FETCH // KEYS_PER_WARP)
        per_row = config.strips // rows
        return PictureCells(lines, 1, row_step=per_row, tile_step=0, cell_queries=config.strip_queries, cut=2 * groups)
    aligned = fit_aligned_cells(picture, queries, keys, config)
    if aligned is not None:
        return aligned
    few = fits_few_slots(rows, queries, config.queries) and fits_few_slots(picture[1], keys, config.keys)
    return PictureCells(rows + tiles, 1, slots=FEW_CELL_SLOTS if few else max(config.queries, config.keys))


def fit_aligned_cells(
    picture: tuple[int, int, str], queries: int, keys: int, config: TileConfig
) -> PictureCells | None:
    """Cells whose sides are powers of two: tiles consist of whole cells or cells of whole tiles. None for others."""
    rows, columns, _ = picture
    tall, wide = queries // rows, keys // columns
    if queries % rows or keys % columns or tall & (tall - 1) or wide & (wide - 1):
        return None
    steps = (1, 0) if tall <= config.queries else (0, 1)
    cell_queries = min(tall, config.queries)
    cell_keys = min(wide, KEYS_PER_WARP)
    column_keys, across = cell_keys, wide // cell_keys
    if wide > config.keys and config.use_hopper:
        # Each warp writes its own part of every cell.
        column_keys, across = wide * cell_keys // config.keys, config.keys // cell_keys
    elif wide > config.keys:
        cell_keys, column_keys, across = config.keys, wide, 1
    return PictureCells(queries // cell_queries, across, *steps, cell_queries, cell_keys, column_keys)


def fits_few_slots(cells: int, length: int, tile: int) -> bool:
    """Whether every tile has at most FEW_CELL_SLOTS rows or columns of cells."""
    return (tile - 1) * cells <= (FEW_CELL_SLOTS - 1) * length
