"""How the pass over the tiles is cut: tile sizes, programs, launches that fit a memory budget, cells of a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from foci.statistics.request import Request

# Memory for the candidates of the top keys between the pass over the tiles and the selection.
MAX_CANDIDATE_BYTES = 36 * 2**20
# Number of classes that share one bound on their third largest logit, as in kernels/statistics/tiles.py.
CLASSES_PER_BOUND = 8


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile sizes and launch options.

    queries, keys: of a tile; warps, stages: as Triton takes them;
    programs_per_sm: programs that share a multiprocessor;
    keys_per_sum: keys per sum of a picture;
    use_tma: TMA fetches the keys, where it can;
    defer_sums: the sums of a tile for `received` and a picture of means are written during the next product;
    use_hopper: use the kernel for Hopper, which overlaps the next product with this work: see hopper.py.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    programs_per_sm: int
    keys_per_sum: int = 16
    use_tma: bool = False
    defer_sums: bool = False
    use_hopper: bool = False


def default_config(width: int, dtype: torch.dtype, request: Request, use_tma: bool) -> TileConfig:
    """Large tiles for half precision; float32 takes three products per tile and twice the memory."""
    if dtype == torch.float32 or width > 128:
        return TileConfig(queries=64, keys=64, warps=4, stages=2, programs_per_sm=1)
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
    means = request.picture is not None and request.picture[2] == "mean"
    tight = request.distance or (request.largest_logit and not request.top)
    return means and (request.entropy or not request.received) and not tight


def programs_per_pair(pairs: int, tiles: int, programs: int) -> int:
    """Programs per (sequence, head) pair that need the fewest rounds of tiles; more programs take more memory."""
    most = min(tiles, max(1, 4 * programs // pairs))
    turns = [(-(-tiles // n) * -(-pairs * n // programs), n) for n in range(1, most + 1)]
    return min(turns)[1]


def choose_segments(top: int, tiles: int, places: int) -> int:
    """Number of interleaved key segments (a power of two), so that there are about 8 classes per top key.

    A class is read again when it may hold three of the top keys: for 8 keys in 64 classes this happens by chance for
    one query in 70. Segments are interleaved tile by tile, so that this holds for short rows as well.
    """
    needed = -(-8 * top // places)
    segments = 1
    while segments < needed and 2 * segments <= tiles:
        segments *= 2
    return segments


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
    tiles = -(-keys // config.keys)
    segments = choose_segments(top, tiles, config.keys // 2)
    tags = 2 * -(-tiles // segments)
    return KeyClasses(segments * (config.keys // 2), segments, tags, max(least_tag_bits, (tags - 1).bit_length()))


class LaunchRange(NamedTuple):
    """The (sequence, head) pairs and the tiles of queries that one launch processes."""

    first_pair: int
    pairs: int
    first_tile: int
    tiles: int


def split_launches(
    pairs: int, tiles: int, bytes_per_tile: int, budget: int = MAX_CANDIDATE_BYTES
) -> Iterator[LaunchRange]:
    """Yields ranges of tiles of every pair, as many as fit the budget: the programs of a launch then do equal work."""
    fitting = tiles * pairs if bytes_per_tile == 0 else max(1, budget // bytes_per_tile)
    step = max(1, min(pairs, fitting))
    for first in range(0, pairs, step):
        here = min(step, pairs - first)
        count = -(-tiles // max(1, fitting // here))
        for part in range(count):
            start, stop = part * tiles // count, (part + 1) * tiles // count
            yield LaunchRange(first, here, start, stop - start)


class PictureCells(NamedTuple):
    """The grid of cells in which the kernel writes a picture; several cells may make one block of the picture."""

    rows: int
    columns: int
    cell_queries: int
    cell_keys: int
    keys_per_column: int


def fit_picture_cells(
    picture: tuple[int, int, str], queries: int, keys: int, config: TileConfig
) -> PictureCells | None:
    """The cells for a picture; None where they do not fit the tiles."""
    rows, columns, _ = picture
    if queries % rows or keys % columns:
        return None
    tall, wide = queries // rows, keys // columns
    if tall & (tall - 1) or wide & (wide - 1):
        return None
    cell_queries = min(tall, config.queries)
    if config.use_hopper and wide > config.keys:
        # Each warp writes its own part of every cell.
        parts = config.keys // config.keys_per_sum
        return PictureCells(queries // cell_queries, columns * parts, cell_queries, config.keys_per_sum, wide // parts)
    cell_keys = min(wide, config.keys, config.keys_per_sum) if wide <= config.keys else config.keys
    keys_per_column = cell_keys if wide <= config.keys else wide
    return PictureCells(queries // cell_queries, keys // keys_per_column, cell_queries, cell_keys, keys_per_column)
