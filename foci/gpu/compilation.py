"""Compile kernels at the same time, before a launch or ahead of one: `collect_launches` records what a call would run.

Triton compiles a kernel for the dtypes and alignment of its tensors and for some of its numbers. A collected launch
holds just these, so it can be compiled after its tensors are gone, and on a machine without a GPU.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.runtime.device import is_triton_interpreted
from foci.runtime.tracing import is_traced


class KernelLaunch(NamedTuple):
    """One launch with positional arguments: first the tensors, by name, then the scalars."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[str, ...]
    scalars: tuple[Any, ...]
    options: dict[str, Any]


class DescriptorArgument(NamedTuple):
    """A kernel argument that is a tensor descriptor for the copy engine (TMA): the tensor's name and how to make it."""

    tensor: str
    make: Callable[[Tensor], Any]


class TensorLayout(NamedTuple):
    """What a compiled kernel depends on of a tensor; shape and strides matter for descriptors only."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_aligned: bool  # whether it starts at a multiple of 16 bytes

    def stand_in(self) -> Any:
        """An argument without memory that Triton compiles the same kernel for."""
        if not self.is_aligned:
            return UnalignedTensor(self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class UnalignedTensor:
    """Stands for a tensor that does not start at a multiple of 16 bytes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 1


class CollectedLaunch(NamedTuple):
    """A launch that was collected instead of run, with the layouts of all tensors of its plan."""

    launch: KernelLaunch
    layouts: dict[str, TensorLayout]
    descriptors: dict[str, DescriptorArgument]

    def arguments(self) -> tuple[Any, ...]:
        return (*map(self.stand_in, self.launch.tensors), *self.launch.scalars)

    def stand_in(self, name: str) -> Any:
        if name not in self.descriptors:
            return self.layouts[name].stand_in()
        described = self.descriptors[name]
        return described.make(self.layouts[described.tensor].stand_in())


class LaunchCollector(threading.local):
    """The launches that this thread collects; None where it runs them."""

    launches: list[CollectedLaunch] | None = None


LAUNCH_COLLECTOR = LaunchCollector()
FAILED = object()


@contextmanager
def collect_launches() -> Iterator[list[CollectedLaunch]]:
    """Collect the launches of this thread instead of running them: the results stay uninitialized."""
    launches: list[CollectedLaunch] = []
    LAUNCH_COLLECTOR.launches = launches
    try:
        yield launches
    finally:
        LAUNCH_COLLECTOR.launches = None


def compile_collected(collected: Sequence[CollectedLaunch]) -> None:
    """Compile the kernels of collected launches at the same time, and load them."""
    compile_in_parallel([(each.launch, each.arguments()) for each in collected])


def tensor_layout(x: Tensor) -> TensorLayout:
    has_no_memory = x.device.type == "meta" or is_traced(x)
    return TensorLayout(tuple(x.shape), x.stride(), x.dtype, has_no_memory or x.data_ptr() % 16 == 0)


def compile_in_parallel(launches: Sequence[tuple[KernelLaunch, Sequence[Any]]]) -> None:
    """Compile the kernels of several launches, each with its arguments, in threads: they take as long as the slowest.

    Kernels that are compiled already cost a look-up. The interpreter compiles nothing.
    """
    if not launches or is_triton_interpreted():
        return
    from triton import AsyncCompileMode

    with ThreadPoolExecutor(min(len(launches), 2 * (os.cpu_count() or 1))) as executor:
        with AsyncCompileMode(ForgivingExecutor(executor)):
            compiled = [try_compiling(*each) for each in launches]
        kernels = [finish_compiling(kernel, *each) for kernel, each in zip(compiled, launches, strict=True)]
        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            # Waits for all, and raises the first error.
            deque(executor.map(lambda kernel: load_on_device(kernel, device), kernels), maxlen=0)


class ForgivingExecutor:
    """Runs functions in threads and returns None for those that raise: an error would leave Triton's mode on."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.executor = executor

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            try:
                return function()
            except Exception:  # noqa: BLE001 - whatever it is, compiling the kernel alone raises it again
                return None

        return self.executor.submit(run)


def start_compiling(launch: KernelLaunch, arguments: Sequence[Any]) -> Any:
    return launch.kernel.warmup(*arguments, grid=launch.grid, **launch.options)


def try_compiling(launch: KernelLaunch, arguments: Sequence[Any]) -> Any:
    """Start to compile; FAILED if that raises, as Python's parser can while other threads parse."""
    try:
        return start_compiling(launch, arguments)
    except Exception:  # noqa: BLE001 - whatever it is, compiling the kernel alone raises it again
        return FAILED


def finish_compiling(kernel: Any, launch: KernelLaunch, arguments: Sequence[Any]) -> Any:
    """The compiled kernel; compiled again, alone, if it failed while others were compiled."""
    from triton import FutureKernel

    if kernel is FAILED:
        return start_compiling(launch, arguments)
    if not isinstance(kernel, FutureKernel):
        return kernel
    # Not `result()`: in Triton 3.9 it can be called once only, and the mode has called it.
    return kernel.kernel or start_compiling(launch, arguments)


def load_on_device(kernel: Any, device: int) -> None:
    """Load a compiled kernel: up to Triton 3.7, this compiles its launcher with a C compiler."""
    torch.cuda.set_device(device)
    # None: a hook of Triton skipped the kernel.
    if kernel is not None:
        kernel.run  # noqa: B018 - reading it loads the kernel
