"""Memory that is handed out holds NaN, so that an answer that nobody wrote shows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# A compiler keeps what it finds in torch when it is first imported, and that must not be what is put there below.
import torch._dynamo
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU PyTorch fills memory itself; its switch also changes which CUDA kernels run, so there only ours is."""
    for holder, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(holder, name, filling(getattr(holder, name)))
    if "cuda" in request.node.name:
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU our kernels are held to the reference in tests/kernels, one by one: the interpreter is slow."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*arguments: Any, **options: Any) -> Tensor:
        memory = allocate(*arguments, **options)
        if memory.is_floating_point():
            memory.detach().fill_(torch.nan)
        return memory

    return filled
