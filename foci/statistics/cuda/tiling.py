"""How the pass over the tiles is cut: tile sizes, programs, and launches that fit a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from foci.statistics.request import Request

# What the candidates for the heaviest keys may take while they wait to be chosen from.
MAX_CANDIDATE_BYTES = 36 * 2**20
# As in kernels/statistics/tiles.py: the third of so many classes is bounded by one number.
CLASSES_PER_BOUND = 8


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One way to cut.

    per_processor: programs that share a multiprocessor;
    fine: keys per sum of a picture;
    fetched: the copy engine fetches the keys, where it can;
    late: what a tile adds to its keys and to a picture of means is written beside the next product;
    in_flight: the kernel for Hopper, in which the next product is on its way meanwhile: see hopper.py.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    per_processor: int
    fine: int = 16
    fetched: bool = False
    late: bool = False
    in_flight: bool = False


def default_config(width: int, dtype: torch.dtype, wanted: Request, fetched: bool) -> TileConfig:
    """Wide tiles for half precision; float32 takes three products per tile and twice the room."""
    if dtype == torch.float32 or width > 128:
        return TileConfig(queries=64, keys=64, warps=4, stages=2, per_processor=1)
    # Each of these is kept in registers for half a tile; with many of them a tile has to be smaller.
    # The largest logit is that of the heaviest keys, where these are wanted.
    carried = wanted.entropy + wanted.distance + (3 if wanted.top else wanted.largest)
    queries = 64 if carried > 3 else 128
    # Older devices, where threads load the keys, have no room for a fourth.
    stages = 4 if fetched and wanted.top else 3
    return TileConfig(
        queries, 64, warps=4, stages=stages, per_processor=2, fetched=fetched, late=should_defer_sums(wanted)
    )


def should_defer_sums(wanted: Request) -> bool:
    """Whether sums of a tile had better wait for the next one, as measured: not where registers run out, and not
    where nothing but sums is wanted.
    """
    means = wanted.picture is not None and wanted.picture[2] == "mean"
    tight = wanted.distance or (wanted.largest and not wanted.top)
    return means and (wanted.entropy or not wanted.received) and not tight


def programs_per_pair(pairs: int, tiles: int, programs: int) -> int:
    """Programs per pair, so that the turns that follow each other are few. More slots take more memory."""
    most = min(tiles, max(1, 4 * programs // pairs))
    turns = [(-(-tiles // n) * -(-pairs * n // programs), n) for n in range(1, most + 1)]
    return min(turns)[1]


def choose_segments(top: int, tiles: int, places: int) -> int:
    """Parts of the keys that keep candidates of their own: a power of two, for 8 classes per key that is wanted.

    A class is read again when it may hold three keys that count: for 8 keys in 64 classes one query in 70 has one by
    chance. The parts are interleaved, tile by tile, so that this holds for short rows as well.
    """
    wanted = -(-8 * top // places)
    segments = 1
    while segments < wanted and 2 * segments <= tiles:
        segments *= 2
    return segments


class KeyClasses(NamedTuple):
    """Classes of keys, in interleaved segments; each has so many tags for its keys, which take so many bits."""

    number: int
    segments: int
    tags: int
    tag_bits: int

    @property
    def bytes_per_query(self) -> int:
        """Two logits of 32 bits for each class, and bounds of 16 bits."""
        return (4 + 4) * self.number + 2 * self.number // CLASSES_PER_BOUND


def choose_key_classes(top: int, keys: int, config: TileConfig, least_tag_bits: int) -> KeyClasses:
    """Two keys of a tile share a class and have tags of their own."""
    tiles = -(-keys // config.keys)
    segments = choose_segments(top, tiles, config.keys // 2)
    tags = 2 * -(-tiles // segments)
    return KeyClasses(segments * (config.keys // 2), segments, tags, max(least_tag_bits, (tags - 1).bit_length()))


class LaunchRange(NamedTuple):
    """The pairs and tiles of queries that one launch serves."""

    first_pair: int
    pairs: int
    first_tile: int
    tiles: int


def split_launches(
    pairs: int, tiles: int, bytes_per_tile: int, budget: int = MAX_CANDIDATE_BYTES
) -> Iterator[LaunchRange]:
    """A run of tiles of every pair at a time, as many as fit the budget: the programs of a launch then do alike."""
    fitting = tiles * pairs if bytes_per_tile == 0 else max(1, budget // bytes_per_tile)
    step = max(1, min(pairs, fitting))
    for first in range(0, pairs, step):
        here = min(step, pairs - first)
        count = -(-tiles // max(1, fitting // here))
        for part in range(count):
            start, stop = part * tiles // count, (part + 1) * tiles // count
            yield LaunchRange(first, here, start, stop - start)


class PictureCells(NamedTuple):
    """How the kernel writes a picture: its own rows and columns, and how many of them make one cell."""

    rows: int
    columns: int
    cell_queries: int
    cell_keys: int
    keys_per_column: int


def fit_picture_cells(
    picture: tuple[int, int, str], queries: int, keys: int, config: TileConfig
) -> PictureCells | None:
    """None where the cells do not fit the tiles."""
    rows, columns, _ = picture
    if queries % rows or keys % columns:
        return None
    tall, wide = queries // rows, keys // columns
    if tall & (tall - 1) or wide & (wide - 1):
        return None
    cell_queries = min(tall, config.queries)
    if config.in_flight and wide > config.keys:
        # Each warp has a part of every cell to itself.
        parts = config.keys // config.fine
        return PictureCells(queries // cell_queries, columns * parts, cell_queries, config.fine, wide // parts)
    cell_keys = min(wide, config.keys, config.fine) if wide <= config.keys else config.keys
    keys_per_column = cell_keys if wide <= config.keys else wide
    return PictureCells(queries // cell_queries, keys // keys_per_column, cell_queries, cell_keys, keys_per_column)
