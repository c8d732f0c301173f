"""Keeps tensors decoded from files in memory for the next epoch, up to a size limit."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class SampleCache:
    """A function from a path to a tensor that reads each file once, until the cache is full.

    >>> import torch
    >>> cache = SampleCache(lambda path: torch.zeros(len(path)), limit=16)
    >>> cache("abc").shape, cache.nbytes
    (torch.Size([3]), 12)

    Args:
        read: reads one file.
        limit: bytes kept; once they are used up, other files are read every time.
    """

    def __init__(self, read: Callable[[str], Tensor], limit: int = 2**31) -> None:
        self.read, self.limit, self.nbytes = read, limit, 0
        self._cached: dict[str, Tensor] = {}

    def __call__(self, path: str) -> Tensor:
        if path in self._cached:
            return self._cached[path]
        tensor = self.read(path)
        if self.nbytes + tensor.nbytes <= self.limit:
            self._cached[path] = tensor
            self.nbytes += tensor.nbytes
        return tensor
