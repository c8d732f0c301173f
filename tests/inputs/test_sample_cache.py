"""A shelf reads once, and stops keeping when it is full."""

from __future__ import annotations

import torch

from foci.inputs.sample_cache import SampleCache


def test_what_fits_is_read_once() -> None:
    asked: list[str] = []

    def read(path: str) -> torch.Tensor:
        asked.append(path)
        return torch.full((4,), float(len(path)))

    shelf = SampleCache(read, limit=32)
    for path in ("a", "bb", "ccc", "a", "bb", "ccc"):
        assert shelf(path).tolist() == [len(path)] * 4
    assert asked == ["a", "bb", "ccc", "ccc"]
    assert shelf.nbytes == 32
