"""What to measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """The statistics of one pass; `picture` is (rows, columns, "mean" or "max"), `top` the number of keys per query.

    narrow: these keys are int32 and not int64, for whoever moves or stores them.
    """

    entropy: bool = False
    received: bool = False
    picture: tuple[int, int, str] | None = None
    top: int = 0
    largest: bool = False
    distance: bool = False
    narrow: bool = False
