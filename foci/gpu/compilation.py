"""Compile kernels at the same time, before a launch or ahead of one: `collect_launches` records what a call would run.

Triton compiles a kernel for the dtypes and alignment of its tensors and for some of its numbers. A collected launch
holds just these, so it can be compiled after its tensors are gone, and on a machine without a GPU.

A first forward waits for its own kernels only: those of the backward and of other lengths are compiled in the
background meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.triton_hash import prepare_triton_hash
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
    """The launches that this thread collects; None where it runs them.

    `run_later` runs what follows the call of this thread, its backward. If the call has to compile, the launches of
    `run_later` are collected and compiled in the background.
    """

    launches: list[CollectedLaunch] | None = None
    run_later: Callable[[], Any] | None = None


class BackgroundCompilation(NamedTuple):
    """A thread that compiles, and the functions that it compiles."""

    thread: threading.Thread
    kernels: tuple[Any, ...]


LAUNCH_COLLECTOR = LaunchCollector()
BACKGROUND_COMPILATIONS: list[BackgroundCompilation] = []
# Held while one is started and added: other threads must not miss it, nor join it before it is started.
BACKGROUND_LOCK = threading.Lock()
# The threads of `prepare_compiler`.
PREPARING: list[threading.Thread] = []
COMPILE_FAILED = object()


def prepare_compiler() -> None:
    """Start what the first launch of a process needs, in threads: meanwhile the launch is planned.

    Triton needs the hash of its own files before it looks up a compiled kernel, and compiles a C file for its driver.
    """
    start_preparing()


# See runtime/device.py.
prepare_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def start_preparing() -> None:
    if is_triton_interpreted():
        return
    from triton.runtime import driver

    for prepare in (prepare_triton_hash, lambda: driver.active.utils):
        thread = threading.Thread(target=run_quietly, args=(prepare,), name="foci-prepare")
        # Where no thread can be started, Triton does it when it compiles.
        with suppress(RuntimeError):
            thread.start()
            PREPARING.append(thread)


def run_quietly(function: Callable[[], Any]) -> None:
    """Run something ahead of time; if it fails, it fails again where it is needed."""
    with suppress(Exception):
        function()


def finish_preparing() -> None:
    for thread in PREPARING:
        thread.join()


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


def compile_in_parallel(
    launches: Sequence[tuple[KernelLaunch, Sequence[Any]]],
    later: Callable[[], Sequence[CollectedLaunch]] | None = None,
    loads: bool = True,
) -> None:
    """Compile and load the kernels of several launches, each with its arguments, in threads.

    It takes as long as the slowest one. Kernels that are compiled already cost a look-up. The interpreter compiles
    nothing.

    Args:
        later: returns launches of this kind that run later. If anything is compiled now, they are compiled, too, in the
            background.
        loads: whether to load the kernels on the current device, which is not possible while a CUDA graph is captured.
    """
    if not launches or is_triton_interpreted():
        return
    finish_preparing()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    threads = min(len(launches), 2 * (os.cpu_count() or 1))
    with ThreadPoolExecutor(threads) as executor:
        forgiving = ForgivingExecutor(executor, device, loads)
        # In a context of its own: Ctrl-C leaves Triton's mode on, and every later launch would fail.
        compiled, is_new = copy_context().run(compile_in_mode, launches, forgiving, later)
    kernels = [finish_compiling(kernel, *each) for kernel, each in zip(compiled, launches, strict=True)]
    if loads and is_new and device is not None:
        for kernel in kernels:
            # Raises the error of a kernel that was not loaded above.
            load_on_device(kernel, device)


def compile_in_mode(
    launches: Sequence[tuple[KernelLaunch, Sequence[Any]]],
    executor: ForgivingExecutor,
    later: Callable[[], Sequence[CollectedLaunch]] | None,
) -> tuple[list[Any], bool]:
    """The kernels of the launches, after they are compiled, and whether one of them is new."""
    from triton import AsyncCompileMode, FutureKernel

    with AsyncCompileMode(executor):
        compiled = [try_compiling(*each) for each in launches]
        is_new = any(kernel is COMPILE_FAILED or isinstance(kernel, FutureKernel) for kernel in compiled)
        if later is not None and is_new:
            compile_in_background(later, executor.device)
    return compiled, is_new


def compile_in_background(list_launches: Callable[[], Sequence[CollectedLaunch]], device: int | None) -> None:
    """Start to compile the kernels of launches that run later; `wait_for_background` waits for them.

    They are not loaded: by then, the caller may capture a CUDA graph.
    """
    # What a later call does wrong is not an error of this one.
    with suppress(Exception):
        collected = list_launches()
        if not collected:
            return
        compile_all = partial(compile_on, collected, device)
        thread = threading.Thread(target=run_quietly, args=(compile_all,), name="foci-compile")
        kernels = tuple(each.launch.kernel for each in collected)
        with BACKGROUND_LOCK:
            # Started first: where that fails, there is nothing to wait for.
            thread.start()
            BACKGROUND_COMPILATIONS.append(BackgroundCompilation(thread, kernels))


def compile_on(collected: Sequence[CollectedLaunch], device: int | None) -> None:
    """Compile collected launches in a new thread, whose current device is the first."""
    if device is not None:
        torch.cuda.set_device(device)
    compile_in_parallel([(each.launch, each.arguments()) for each in collected], loads=False)


def wait_for_background(launches: Sequence[KernelLaunch]) -> None:
    """Wait until the kernels of these launches are no longer compiled in the background."""
    kernels = {id(launch.kernel) for launch in launches}
    with BACKGROUND_LOCK:
        compilations = [*BACKGROUND_COMPILATIONS]
    for compilation in compilations:
        if kernels & set(map(id, compilation.kernels)):
            compilation.thread.join()
            # Another thread may have removed it.
            with suppress(ValueError):
                BACKGROUND_COMPILATIONS.remove(compilation)


class ForgivingExecutor:
    """Compiles kernels in threads, with their launchers, and loads them unless that is left to the first launch.

    It returns None for those that fail: an error would leave Triton's mode on.
    """

    def __init__(self, executor: ThreadPoolExecutor, device: int | None = None, loads: bool = True) -> None:
        self.executor, self.device, self.loads = executor, device, loads

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            try:
                kernel = function()
                if self.device is not None and self.loads:
                    load_on_device(kernel, self.device)
                elif self.device is not None:
                    run_quietly(partial(compile_launcher, kernel))
            except Exception:  # noqa: BLE001 - whatever it is, compiling the kernel alone raises it again
                return None
            return kernel

        return self.executor.submit(run)


def compile_launcher(kernel: Any) -> None:
    """Compile the launcher of a kernel with a C compiler, as Triton does up to 3.7 when it loads the kernel."""
    from triton.runtime import driver

    driver.active.launcher_cls(kernel.src, kernel.metadata)


def start_compiling(launch: KernelLaunch, arguments: Sequence[Any]) -> Any:
    return launch.kernel.warmup(*arguments, grid=launch.grid, **launch.options)


def try_compiling(launch: KernelLaunch, arguments: Sequence[Any]) -> Any:
    """Start to compile; COMPILE_FAILED if that raises, as Python's parser can while other threads parse."""
    try:
        return start_compiling(launch, arguments)
    except Exception:  # noqa: BLE001 - whatever it is, compiling the kernel alone raises it again
        return COMPILE_FAILED


def finish_compiling(kernel: Any, launch: KernelLaunch, arguments: Sequence[Any]) -> Any:
    """The compiled kernel; compiled again, alone, if it failed while others were compiled."""
    from triton import FutureKernel

    if kernel is COMPILE_FAILED:
        return start_compiling(launch, arguments)
    if not isinstance(kernel, FutureKernel):
        return kernel
    # Not `result()`: in Triton 3.9 it can be called once only, and the mode has called it.
    return kernel.kernel or start_compiling(launch, arguments)


def load_on_device(kernel: Any, device: int) -> None:
    """Load a compiled kernel."""
    torch.cuda.set_device(device)
    # None: a hook of Triton skipped the kernel.
    if kernel is not None:
        kernel.run  # noqa: B018 - reading it loads the kernel
