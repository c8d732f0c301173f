"""What was read from files, kept for the next epoch as far as memory is set aside for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Shelf:
    """A function from a path to a tensor that reads each file once, until the shelf is full.

    >>> import torch
    >>> shelf = Shelf(lambda path: torch.zeros(len(path)), limit=16)
    >>> shelf("abc").shape, shelf.nbytes
    (torch.Size([3]), 12)

    Args:
        read: reads one file.
        limit: how many bytes are kept; what is read after that is read anew each time.
    """

    def __init__(self, read: Callable[[str], Tensor], limit: int = 2**31) -> None:
        self.read, self.limit, self.nbytes = read, limit, 0
        self._kept: dict[str, Tensor] = {}

    def __call__(self, path: str) -> Tensor:
        if path in self._kept:
            return self._kept[path]
        found = self.read(path)
        if self.nbytes + found.nbytes <= self.limit:
            self._kept[path] = found
            self.nbytes += found.nbytes
        return found
