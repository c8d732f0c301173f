"""New memory is filled with NaN, so that results that a backend does not write are noticed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# Imported first: Dynamo keeps references to functions of torch, which must not be the patched ones below.
import torch._dynamo
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fills new memory with NaN; on a CPU by PyTorch's own switch, which on CUDA would change the kernels."""
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
    """tests/kernels checks our kernels in the interpreter, which is too slow for this suite."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*arguments: Any, **options: Any) -> Tensor:
        memory = allocate(*arguments, **options)
        if memory.is_floating_point():
            memory.detach().fill_(torch.nan)
        return memory

    return filled
