"""Launch plans: the first call goes through Triton, later calls pass addresses to the compiled kernels."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foci.gpu import arguments, launcher
from foci.gpu.launcher import LaunchPlan, build_kernel_launch


class Kernel:
    """A fake kernel that records its launches through Triton, and those of its compiled form in `again`."""

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


def build_plan(kernel: Kernel, sizes: dict[str, int] | None = None) -> LaunchPlan:
    scalars = {"n": 5, "BLOCK": 16, "unused": 7}
    launches = [build_kernel_launch(kernel, (3, 2), scalars, {"out": "parts"}, num_warps=4)]
    return LaunchPlan({"scratch": 33, "parts": 4} if sizes is None else sizes, torch.device("cpu"), launches)


@pytest.fixture(autouse=True)
def accept_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "address_failure", lambda index: None)


def test_second_launch_passes_addresses() -> None:
    kernel = Kernel("x", "scratch", "out", "n", "BLOCK")
    plan = build_plan(kernel)
    first, second = torch.zeros(8), torch.zeros(8)
    plan({"x": first})
    ((grid, arguments, options),) = kernel.launched
    assert (grid, arguments[3:], options) == ((3, 2), (5, 16), {"num_warps": 4})
    assert arguments[0] is first
    assert [x.numel() for x in arguments[1:3]] == [64, 32]
    plan({"x": second})
    ((grid, arguments),) = kernel.again
    assert (grid, arguments[0], arguments[3:]) == ((3, 2, 1), second.data_ptr(), (5, 16))
    # In one allocation, aligned to 128 bytes.
    assert arguments[2] - arguments[1] == 256
    assert len(kernel.launched) == 1


def test_a_launch_of_one_tensor_gets_its_address() -> None:
    kernel, x = Kernel("x", "n"), torch.zeros(8)
    plan = LaunchPlan({}, torch.device("cpu"), [build_kernel_launch(kernel, (1,), {"n": 5})])
    for _ in range(2):
        plan({"x": x})
    assert kernel.again == [((1, 1, 1), (x.data_ptr(), 5))]


def test_unaligned_addresses_go_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("x", "scratch", "out", "n", "BLOCK")
    plan, apart = build_plan(kernel), torch.zeros(9)[1:]
    compiled: list[object] = []
    monkeypatch.setattr(plan, "compile", compiled.append)
    for x in (apart, apart, torch.zeros(8), apart, torch.zeros(8)):
        plan({"x": x})
    assert len(kernel.launched) == 4
    assert len(kernel.again) == 1
    # Once for each alignment.
    assert len(compiled) == 2


@pytest.mark.parametrize("known_version", [True, False])
def test_interpreter_and_unknown_triton_versions_get_tensors(
    known_version: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("x", "scratch", "out", "n", "BLOCK", compiles=not known_version)
    monkeypatch.setattr(launcher, "address_failure", lambda index: None if known_version else "it failed")
    plan = build_plan(kernel)
    for _ in range(3):
        plan({"x": torch.zeros(8)})
    assert len(kernel.launched) == 3
    assert all(isinstance(x, Tensor) for _, arguments, _ in kernel.launched for x in arguments[:3])


def test_plan_is_replayed_only_if_all_kernels_are_compiled() -> None:
    """A Triton hook may keep one kernel from being compiled: then no kernel is replayed."""
    kernels = Kernel("x", "out", "n"), Kernel("x", "out", "n", compiles=False)
    plan = LaunchPlan(
        {"out": 4}, torch.device("cpu"), [build_kernel_launch(kernel, (1,), {"n": 1}) for kernel in kernels]
    )
    for _ in range(2):
        plan({"x": torch.zeros(8)})
    assert [len(kernel.launched) for kernel in kernels] == [2, 2]


class Watched:
    """A fake kernel that holds only weak references, and reports which of its arrays are still alive."""

    arg_names: ClassVar = ["x", "scratch", "sums", "n"]

    def __init__(self) -> None:
        self.given: dict[str, weakref.ref[Tensor]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, x: Tensor, scratch: Tensor, sums: Tensor, n: int) -> None:
        self.given = {"scratch": weakref.ref(scratch), "sums": weakref.ref(sums)}

    def alive(self) -> list[str]:
        return [name for name, found in self.given.items() if found() is not None]


def test_workspace_is_freed_before_late_allocation() -> None:
    first, last = Watched(), Kernel("sums", "result", "n")
    launches = [build_kernel_launch(first, (1,), {"n": 1}), build_kernel_launch(last, (1,), {"n": 1})]
    plan = LaunchPlan({"scratch": 64}, torch.device("cpu"), launches, last_sizes={"sums": 64})
    result, alive = torch.zeros(4), []

    def allocate_late() -> dict[str, Tensor]:
        alive.extend(first.alive())
        return {"result": result}

    given = {"x": torch.zeros(8)}
    plan(given, allocate_late)
    assert alive == ["sums"]
    assert last.launched[0][1][1] is result
    # The plan keeps nothing alive.
    last.launched.clear()
    assert first.alive() == []
    assert set(given) == {"x", "result"}


def test_late_tensors_are_replayed_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = Kernel("x", "scratch", "sums", "n"), Kernel("sums", "result", "n")
    launches = [build_kernel_launch(first, (1,), {"n": 1}), build_kernel_launch(last, (1,), {"n": 1})]
    plan = LaunchPlan({"scratch": 40}, torch.device("cpu"), launches, last_sizes={"sums": 64})
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

        def allocate_late(result: Tensor = result) -> dict[str, Tensor]:
            alive.extend(whole() is not None for whole in wholes[-2:])
            return {"result": result}

        plan({"x": torch.zeros(8)}, allocate_late)
    assert len(last.again) == 1
    assert last.again[0][1][1] == results[1].data_ptr()
    assert last.again[0][1][0] == first.again[0][1][2]
    assert alive[2:] == [False, True]


def test_missing_scalar_raises_key_error() -> None:
    with pytest.raises(KeyError, match="m"):
        build_kernel_launch(Kernel("x", "n", "m"), (1,), {"n": 1})


def test_plan_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "CACHED_PLANS", {})
    monkeypatch.setattr(launcher, "MAX_CACHED_PLANS", 2)
    kernel = Kernel("x", "scratch", "out", "n", "BLOCK")
    made = [launcher.get_or_build_plan(key, lambda: build_plan(kernel)) for key in (1, 1, 2, 3, 1)]
    assert made[0] is made[1]
    assert made[0] is not made[4]
    assert len(launcher.CACHED_PLANS) == 2


def test_layout_key_depends_on_shape_strides_and_dtype() -> None:
    x = torch.zeros(2, 3)
    assert arguments.layout_key(x) == arguments.layout_key(torch.ones(2, 3))
    others = x.mT, x[:1], x.half(), torch.zeros(2, 4)[:, :3], None
    assert len({arguments.layout_key(y) for y in (x, *others)}) == 6


def test_workspace_arrays_of_other_dtypes_share_the_buffer() -> None:
    kernel = Kernel("x", "flags", "halves", "n")
    plan = LaunchPlan(
        {"flags": 4, "halves": 3},
        torch.device("cpu"),
        [build_kernel_launch(kernel, (1,), {"n": 1})],
        {"flags": torch.int32, "halves": torch.float16},
    )
    plan({"x": torch.zeros(8)})
    _, (_, flags, halves, _), _ = kernel.launched[0]
    assert (flags.dtype, halves.dtype, halves.numel()) == (torch.int32, torch.float16, 64)
    assert halves.data_ptr() - flags.data_ptr() == 128


def test_descriptor_is_made_once_and_rebased() -> None:
    """Like triton.tools.tensor_descriptor: a plain object that is validated in its constructor."""
    kernel, made = Kernel("x_tiles", "x", "n"), []

    class Description:
        def __init__(self, base: Tensor) -> None:
            self.base, self.block = base, [16, base.shape[-1]]
            made.append(base)

    descriptors = {"x_tiles": launcher.DescriptorArgument("x", Description)}
    plan = LaunchPlan({}, torch.device("cpu"), [build_kernel_launch(kernel, (1,), {"n": 1})], descriptors=descriptors)
    tensors = [torch.zeros(4, 8) for _ in range(3)]
    for x in tensors:
        plan({"x": x})
    assert len(made) == len(kernel.launched) == 1
    for x, (_, (form, address, number)) in zip(tensors[1:], kernel.again, strict=True):
        assert type(form) is Description
        assert form.base is x
        assert (form.block, address, number) == ([16, 8], x.data_ptr(), 1)
    # The templates hold no tensor of the first call.
    assert [form.base for _, _, form in plan.descriptor_templates] == [None]


def test_descriptors_are_made_for_each_launch_through_triton() -> None:
    kernel = Kernel("x_tiles", "x", "n", compiles=False)
    descriptors = {"x_tiles": launcher.DescriptorArgument("x", lambda x: ("tiles of", x))}
    plan = LaunchPlan({}, torch.device("cpu"), [build_kernel_launch(kernel, (1,), {"n": 1})], descriptors=descriptors)
    for x in (torch.zeros(8), torch.ones(8)):
        plan({"x": x})
        assert kernel.launched[-1][1][0] == ("tiles of", x)


def test_keyword_launch_equals_its_positional_form() -> None:
    given: list[Any] = []

    class Traced(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **named: given.append((grid, named))

    kernel = Traced("x", "out", "n")
    launch_by_keyword = launcher.KeywordLaunch(kernel, (2,), {"x": "x", "out": "result"}, {"n": 3}, {"num_warps": 4})
    assert launch_by_keyword.to_kernel_launch() == (kernel, (2,), ("x", "result"), (3,), {"num_warps": 4})
    x, result = torch.zeros(1), torch.ones(1)
    launch_by_keyword.launch_traced({"x": x, "result": result, "more": x})
    assert given == [((2,), {"x": x, "out": result, "n": 3, "num_warps": 4})]
