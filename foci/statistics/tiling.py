"""How the pass over the tiles is cut: tile sizes, programs, and launches that fit a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from foci.statistics.wanted import Wanted

# What the candidates for the heaviest keys may take while they wait to be chosen from.
BUDGET = 44 * 2**20


@dataclass(frozen=True, slots=True)
class Config:
    """One way to cut.

    per_processor: programs that share a multiprocessor; registers: at most so many per thread, that they may;
    fine: keys per sum of a picture; refining: how the heaviest keys are weighed again.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    per_processor: int
    fine: int = 16
    refining_rows: int = 16
    refining_warps: int = 1
    registers: int | None = None


def default(width: int, dtype: torch.dtype, wanted: Wanted) -> Config:
    """Wide tiles for half precision; float32 takes three products per tile and twice the room."""
    if dtype == torch.float32 or width > 128:
        return Config(queries=64, keys=64, warps=4, stages=2, per_processor=1)
    # Each of these is kept in registers for half a tile; with many of them a tile has to be smaller.
    carried = wanted.entropy + wanted.distance + wanted.largest + 3 * (wanted.top > 0)
    if carried > 3:
        return Config(queries=64, keys=64, warps=4, stages=3, per_processor=2)
    return Config(queries=128, keys=64, warps=4, stages=3, per_processor=2)


def slots(pairs: int, tiles: int, programs: int) -> int:
    """Programs per pair, so that the turns that follow each other are few. More slots take more memory."""
    most = min(tiles, max(1, 4 * programs // pairs))
    turns = [(-(-tiles // n) * -(-pairs * n // programs), n) for n in range(1, most + 1)]
    return min(turns)[1]


def segments_for(top: int, tiles: int, places: int) -> int:
    """Parts of the keys that keep candidates of their own: a power of two, for 8 classes per key that is wanted.

    A class is read again when it may hold three keys that count: for 8 keys in 64 classes one query in 70 has one by
    chance, and one in 28 was read again on an H200, since the bound on the third is rough.
    """
    wanted = -(-8 * top // places)
    segments = 1
    while segments < wanted and 2 * segments <= tiles:
        segments *= 2
    return segments


class Launch(NamedTuple):
    """The pairs and tiles of queries that one launch serves."""

    first_pair: int
    pairs: int
    first_tile: int
    tiles: int


def launches(pairs: int, tiles: int, bytes_per_tile: int, budget: int = BUDGET) -> Iterator[Launch]:
    """A run of tiles of every pair at a time, as many as fit the budget: the programs of a launch then do alike."""
    fitting = tiles * pairs if bytes_per_tile == 0 else max(1, budget // bytes_per_tile)
    step = max(1, min(pairs, fitting))
    for first in range(0, pairs, step):
        here = min(step, pairs - first)
        count = -(-tiles // max(1, fitting // here))
        for part in range(count):
            start, stop = part * tiles // count, (part + 1) * tiles // count
            yield Launch(first, here, start, stop - start)


class Cells(NamedTuple):
    """How the kernel writes a picture: its own rows and columns, and how many of them make one cell."""

    rows: int
    columns: int
    cell_queries: int
    cell_keys: int
    keys_per_column: int


def cells(picture: tuple[int, int, str], queries: int, keys: int, config: Config) -> Cells | None:
    """None where the cells do not fit the tiles."""
    rows, columns, _ = picture
    if queries % rows or keys % columns:
        return None
    tall, wide = queries // rows, keys // columns
    if tall & (tall - 1) or wide & (wide - 1):
        return None
    cell_queries = min(tall, config.queries)
    cell_keys = min(wide, config.keys, config.fine) if wide <= config.keys else config.keys
    keys_per_column = cell_keys if wide <= config.keys else wide
    return Cells(queries // cell_queries, keys // keys_per_column, cell_queries, cell_keys, keys_per_column)
