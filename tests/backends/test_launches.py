"""Kernels that are launched again: the first launch is Triton's own, later ones hand addresses to what was compiled."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foci.backends import launches
from foci.backends.launches import Launches, step


class Kernel:
    """Stands for a kernel, and for what is compiled of it: keeps how each was launched."""

    def __init__(self, *names: str, compiles: bool = True) -> None:
        self.arg_names = list(names)
        self.compiles = compiles
        self.launched: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.launched.append((grid, arguments, options))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.again.append((grid, arguments))


def row_of(kernel: Kernel, sizes: dict[str, int] | None = None) -> Launches:
    numbers = {"n": 5, "BLOCK": 16, "unused": 7}
    steps = [step(kernel, (3, 2), numbers, {"out": "parts"}, num_warps=4)]
    return Launches({"scratch": 33, "parts": 4} if sizes is None else sizes, torch.device("cpu"), steps)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "takes_addresses", lambda: True)


def test_the_second_launch_is_given_addresses() -> None:
    kernel = Kernel("x", "scratch", "out", "n", "BLOCK")
    row = row_of(kernel)
    first, second = torch.zeros(8), torch.zeros(8)
    row({"x": first})
    ((grid, arguments, options),) = kernel.launched
    assert (grid, arguments[3:], options) == ((3, 2), (5, 16), {"num_warps": 4})
    assert arguments[0] is first
    assert [x.numel() for x in arguments[1:3]] == [64, 32]
    row({"x": second})
    ((grid, arguments),) = kernel.again
    assert (grid, arguments[0], arguments[3:]) == ((3, 2, 1), second.data_ptr(), (5, 16))
    # In one allocation, each from a multiple of 128 bytes on.
    assert arguments[2] - arguments[1] == 256
    assert len(kernel.launched) == 1


def test_addresses_that_are_no_multiples_of_16_are_looked_at_by_triton() -> None:
    kernel = Kernel("x", "scratch", "out", "n", "BLOCK")
    row, apart = row_of(kernel), torch.zeros(9)[1:]
    for x in (apart, apart, torch.zeros(8), apart, torch.zeros(8)):
        row({"x": x})
    assert len(kernel.launched) == 4
    assert len(kernel.again) == 1


@pytest.mark.parametrize("version_known", [True, False])
def test_an_interpreter_or_a_triton_that_is_not_known_is_given_tensors(
    version_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("x", "scratch", "out", "n", "BLOCK", compiles=not version_known)
    monkeypatch.setattr(launches, "takes_addresses", lambda: version_known)
    row = row_of(kernel)
    for _ in range(3):
        row({"x": torch.zeros(8)})
    assert len(kernel.launched) == 3
    assert all(isinstance(x, Tensor) for _, arguments, _ in kernel.launched for x in arguments[:3])


def test_launches_are_handed_addresses_all_together_or_not_at_all() -> None:
    """A hook of Triton's may keep one kernel from being compiled: the others do not go on without it."""
    kernels = Kernel("x", "out", "n"), Kernel("x", "out", "n", compiles=False)
    row = Launches({"out": 4}, torch.device("cpu"), [step(kernel, (1,), {"n": 1}) for kernel in kernels])
    for _ in range(2):
        row({"x": torch.zeros(8)})
    assert [len(kernel.launched) for kernel in kernels] == [2, 2]


class Watched:
    """Stands for a kernel that keeps nothing, and tells which of the arrays it was given are still there."""

    arg_names: ClassVar = ["x", "scratch", "sums", "n"]

    def __init__(self) -> None:
        self.given: dict[str, weakref.ref[Tensor]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, x: Tensor, scratch: Tensor, sums: Tensor, n: int) -> None:
        self.given = {"scratch": weakref.ref(scratch), "sums": weakref.ref(sums)}

    def alive(self) -> list[str]:
        return [name for name, found in self.given.items() if found() is not None]


def test_what_comes_late_finds_the_memory_of_all_but_what_lasts() -> None:
    first, last = Watched(), Kernel("sums", "result", "n")
    steps = [step(first, (1,), {"n": 1}), step(last, (1,), {"n": 1})]
    row = Launches({"scratch": 64}, torch.device("cpu"), steps, {"sums": 64})
    result, alive = torch.zeros(4), []

    def late() -> dict[str, Tensor]:
        alive.extend(first.alive())
        return {"result": result}

    row({"x": torch.zeros(8)}, late)
    assert alive == ["sums"]
    assert last.launched[0][1][1] is result


def test_what_comes_late_is_given_by_its_address_too(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = Kernel("x", "scratch", "sums", "n"), Kernel("sums", "result", "n")
    steps = [step(first, (1,), {"n": 1}), step(last, (1,), {"n": 1})]
    row = Launches({"scratch": 40}, torch.device("cpu"), steps, {"sums": 64})
    results = [torch.zeros(4) for _ in range(2)]
    wholes: list[weakref.ref[Tensor]] = []
    true = torch.empty

    def counted(*sizes: Any, **options: Any) -> Tensor:
        whole = true(*sizes, **options)
        wholes.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(torch, "empty", counted)
    alive: list[bool] = []
    for result in results:

        def late(result: Tensor = result) -> dict[str, Tensor]:
            alive.extend(whole() is not None for whole in wholes[-2:])
            return {"result": result}

        row({"x": torch.zeros(8)}, late)
    assert len(last.again) == 1
    assert last.again[0][1][1] == results[1].data_ptr()
    assert last.again[0][1][0] == first.again[0][1][2]
    assert alive[2:] == [False, True]


def test_a_number_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError, match="m"):
        step(Kernel("x", "n", "m"), (1,), {"n": 1})


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "KEPT", {})
    monkeypatch.setattr(launches, "MOST", 2)
    kernel = Kernel("x", "scratch", "out", "n", "BLOCK")
    made = [launches.kept(key, lambda: row_of(kernel)) for key in (1, 1, 2, 3, 1)]
    assert made[0] is made[1]
    assert made[0] is not made[4]
    assert len(launches.KEPT) == 2


def test_layouts_tell_apart_what_kernels_are_compiled_for() -> None:
    x = torch.zeros(2, 3)
    assert launches.layout(x) == launches.layout(torch.ones(2, 3))
    others = x.mT, x[:1], x.half(), torch.zeros(2, 4)[:, :3], None
    assert len({launches.layout(y) for y in (x, *others)}) == 6
