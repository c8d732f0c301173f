"""What follows from plain numbers is made once, and never for a compiler, a transform or a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foci
from foci.runtime import tensor_cache
from foci.runtime.tensor_cache import cache_per_stream, cache_permanently

Keep = Callable[[object, Tensor, Callable[[], Tensor]], Tensor]
BESIDE = torch.zeros(1)


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "STREAM_CACHE", {})
    monkeypatch.setattr(tensor_cache, "PERMANENT_CACHE", {})


@pytest.mark.parametrize("keep", [cache_permanently, cache_per_stream])
def test_the_second_request_returns_the_cached_tensor(keep: Keep) -> None:
    first = keep("a", BESIDE, lambda: torch.arange(3))
    assert keep("a", BESIDE, lambda: torch.arange(4)) is first
    assert keep("b", BESIDE, lambda: torch.arange(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("keep", [cache_permanently, cache_per_stream])
def test_tensors_made_in_inference_mode_can_be_used_in_training(keep: Keep) -> None:
    with torch.inference_mode():
        made = keep("a", BESIDE, lambda: torch.ones(3))
    assert not made.is_inference()


@pytest.mark.parametrize("keep", [cache_permanently, cache_per_stream])
def test_transforms_and_fake_tensors_are_not_cached(keep: Keep) -> None:
    with FakeTensorMode():
        keep("a", torch.zeros(1), lambda: torch.ones(3))
    torch.func.grad(lambda x: (x * keep("a", BESIDE, lambda: torch.ones(3))).sum())(torch.ones(3))
    assert not tensor_cache.STREAM_CACHE
    assert not tensor_cache.PERMANENT_CACHE


@pytest.mark.parametrize("keep", [cache_permanently, cache_per_stream])
def test_dispatch_modes_are_not_cached(keep: Keep) -> None:
    with FunctionalTensorMode():
        keep("a", BESIDE, lambda: torch.ones(3))
    assert type(keep("a", BESIDE, lambda: torch.ones(3))) is Tensor


def test_traced_calls_are_not_cached() -> None:
    def attend(q: Tensor) -> Tensor:
        return foci.attention(q, q, q, bias=foci.ALiBi(), mask=foci.causal & foci.window(2))

    q = torch.randn(1, 2, 5, 4)
    torch.testing.assert_close(aot_function(attend, nop)(q), attend(q))


@pytest.mark.parametrize("keep", [cache_permanently, cache_per_stream])
def test_a_forward_that_is_checkpointed_runs_again_with_the_same_operations(keep: Keep) -> None:
    """Selective checkpointing hands out what operations gave before, in the order in which they were asked."""

    def forward(x: Tensor) -> Tensor:
        return x.square() * keep("a", BESIDE, lambda: torch.full((), 2.0)) * torch.full((), 3.0)

    def save_constants(context: object, operation: object, *inputs: object, **options: object) -> CheckpointPolicy:
        saved = operation is torch.ops.aten.full.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.ones(1, requires_grad=True)
    context = partial(create_selective_checkpoint_contexts, save_constants)
    checkpoint(forward, x, use_reentrant=False, context_fn=context).backward()
    assert x.grad is not None
    assert x.grad.item() == 12.0


@pytest.mark.parametrize("keep", [cache_permanently, cache_per_stream])
def test_a_captured_graph_makes_its_own_tensors(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "is_capturing_cuda_graph", lambda beside: True)
    assert keep("a", BESIDE, lambda: torch.ones(3)) is not keep("a", BESIDE, lambda: torch.ones(3))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cache, "MAX_CACHED_TENSORS", 2)
    for key in range(5):
        cache_per_stream(key, BESIDE, lambda: torch.ones(3))
    assert len(tensor_cache.STREAM_CACHE) <= 2
