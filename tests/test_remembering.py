"""What follows from plain numbers is made once, and never for a compiler, a transform or a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from foci import remembering
from foci.remembering import once, remembered

Keep = Callable[[object, Tensor, Callable[[], Tensor]], Tensor]
BESIDE = torch.zeros(1)


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "KEPT", {})
    monkeypatch.setattr(remembering, "FOREVER", {})


@pytest.mark.parametrize("keep", [once, remembered])
def test_the_second_time_it_is_the_same(keep: Keep) -> None:
    first = keep("a", BESIDE, lambda: torch.arange(3))
    assert keep("a", BESIDE, lambda: torch.arange(4)) is first
    assert keep("b", BESIDE, lambda: torch.arange(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("keep", [once, remembered])
def test_what_inference_mode_made_serves_a_training_step(keep: Keep) -> None:
    with torch.inference_mode():
        made = keep("a", BESIDE, lambda: torch.ones(3))
    assert not made.is_inference()


@pytest.mark.parametrize("keep", [once, remembered])
def test_transforms_and_fake_tensors_leave_nothing_behind(keep: Keep) -> None:
    with FakeTensorMode():
        keep("a", torch.zeros(1), lambda: torch.ones(3))
    torch.func.grad(lambda x: (x * keep("a", BESIDE, lambda: torch.ones(3))).sum())(torch.ones(3))
    assert not remembering.KEPT
    assert not remembering.FOREVER


@pytest.mark.parametrize("keep", [once, remembered])
def test_a_graph_that_is_captured_makes_its_own(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "is_captured", lambda beside: True)
    assert keep("a", BESIDE, lambda: torch.ones(3)) is not keep("a", BESIDE, lambda: torch.ones(3))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "MOST", 2)
    for key in range(5):
        remembered(key, BESIDE, lambda: torch.ones(3))
    assert len(remembering.KEPT) <= 2
