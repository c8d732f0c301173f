"""Launches of compiled kernels pass Triton the same arguments as `compiled[grid]` does, with less host time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from foci.gpu.compiled_launch import ExpandedDescriptors, bind_launch, has_hooks

DEVICE = torch.device("cuda", 1)


class Compiled:
    """A compiled kernel that records its launches: `ran` directly, `through_triton` by `compiled[grid]`."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.through_triton: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.ran.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.through_triton.append((grid, arguments))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: f"stream of {index}", raising=False)


def test_a_launch_passes_grid_stream_and_arguments() -> None:
    compiled = Compiled()
    bind_launch(compiled, (3, 2), DEVICE)(16, 32, 0.5)
    assert compiled.ran == [(3, 2, 1, "stream of 1", "function", "metadata", None, None, None, 16, 32, 0.5)]
    assert not compiled.through_triton


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooked_launches_go_through_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler may start and stop after the kernel was bound."""
    compiled = Compiled()
    launch = bind_launch(compiled, (1,), DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, name, lambda metadata: None)
        launch(16)
    assert compiled.through_triton == [((1, 1, 1), (16,))]
    launch(16)
    assert len(compiled.ran) == 1


def test_a_chain_without_functions_is_no_hook() -> None:
    assert not has_hooks(None)
    assert not has_hooks(SimpleNamespace(calls=[]))
    assert has_hooks(SimpleNamespace(calls=[print]))
    assert has_hooks(print)


@pytest.mark.parametrize("layouts", [["of x", "of y"], None])
def test_descriptors_are_expanded_as_triton_does(layouts: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_tensordesc_arg"):
        pytest.skip("this version of Triton expands descriptors in C")
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda descriptor, layout: [descriptor, layout, 8, 1])
    launched: list[tuple[Any, ...]] = []
    signature = {"a": "*fp16", "x": "tensordesc<fp16>", "n": "i32", "y": "tensordesc<fp16>", "B": "constexpr"}
    run = object.__new__(driver.CudaLauncher)
    scratch = "global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align"
    for name in (*scratch, "num_ctas", "launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature"):
        setattr(run, name, 0)

    def record(*arguments: Any) -> None:
        # Up to Triton 3.6, the arguments of the kernel follow those of the launch; later they are one sequence.
        launched.append(tuple(tuple(each) if isinstance(each, list) else each for each in arguments))

    run.launch = driver.wrap_handle_tensordesc(record, signature, layouts)
    expanded = ExpandedDescriptors.of(run)
    assert expanded is not None
    arguments = (3, 2, 1, "stream", "function", "metadata", None, None, None, 16, "x tiles", 5, "y tiles", 64)
    run(*arguments)
    expanded(*arguments)
    assert launched[0] == launched[1]
    assert "x tiles" in str(launched[0])


def test_kernels_without_descriptors_are_run_as_they_are() -> None:
    assert ExpandedDescriptors.of(SimpleNamespace(launch=print)) is None
    assert ExpandedDescriptors.of(SimpleNamespace(launch=lambda *arguments: None)) is None
    assert ExpandedDescriptors.of(Compiled().run) is None
