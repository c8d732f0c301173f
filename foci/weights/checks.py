"""Checks the arguments that all lazy matrices take: `Weights` and those of foci.record and foci.sharding."""

from __future__ import annotations

import math
from typing import Any

import torch

from foci.runtime.checks import is_positive_int
from foci.runtime.printable import format_bytes


def check_over(over: Any) -> None:
    """Refuses another mean than that over the heads."""
    if over != "heads":
        raise ValueError(f"over must be 'heads', got {over!r}")


def check_k(k: Any, keys: int) -> None:
    """Refuses a number of heaviest keys that the matrix does not have."""
    if not is_positive_int(k) or k > keys:
        raise ValueError(f"k must be an int from 1 to the {keys} keys, got {k!r}")


def check_picture_size(rows: Any, columns: Any, reduce: Any, queries: int, keys: int) -> None:
    """Refuses a picture with more blocks than queries or keys, and an unknown reduction."""
    if reduce not in {"mean", "max"}:
        raise ValueError(f"reduce must be 'mean' or 'max', got {reduce!r}")
    if not (is_positive_int(rows) and is_positive_int(columns) and rows <= queries and columns <= keys):
        raise ValueError(
            f"rows must be from 1 to the {queries} queries and columns from 1 to the {keys} keys,"
            f" got {rows!r} x {columns!r}"
        )


def check_dense_limit(shape: tuple[int, ...], dtype: torch.dtype, limit: int) -> None:
    """Refuses to build a matrix of more than `limit` bytes."""
    size = math.prod(shape) * dtype.itemsize
    if not isinstance(limit, int | float):
        raise TypeError(f"limit must be a number of bytes such as 2**30, got {limit!r}")
    if size > limit:
        raise ValueError(
            f"the dense matrix {shape} takes {format_bytes(size)}, above the limit of {format_bytes(limit)}:"
            " use slices or statistics, or pass a larger limit="
        )
