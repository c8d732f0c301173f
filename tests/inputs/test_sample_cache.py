"""A SampleCache reads each file once, and stops caching when it is full."""

from __future__ import annotations

import torch

from foci.inputs.sample_cache import SampleCache


def test_cached_files_are_read_once() -> None:
    asked: list[str] = []

    def read(path: str) -> torch.Tensor:
        asked.append(path)
        return torch.full((4,), float(len(path)))

    cache = SampleCache(read, limit=32)
    for path in ("a", "bb", "ccc", "a", "bb", "ccc"):
        assert cache(path).tolist() == [len(path)] * 4
    assert asked == ["a", "bb", "ccc", "ccc"]
    assert cache.nbytes == 32
