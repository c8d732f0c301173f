"""Launch Triton kernels: the first call of a shape goes through Triton, later calls replay the compiled kernels.

Triton inspects every argument of every launch. Our kernels have up to 85 arguments, and for small calls that
inspection takes longer than the kernel. Every argument except the addresses depends only on shapes, strides and
dtypes. A `LaunchPlan` therefore stores the compiled kernels and their scalar arguments after its first call and passes
only new addresses afterwards. `get_or_build_plan` caches one plan per kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, reduce
from itertools import accumulate
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.compilation import (
    LAUNCH_COLLECTOR,
    CollectedLaunch,
    collect_launches,
    compile_in_parallel,
    tensor_layout,
    wait_for_background,
)
from foci.gpu.compilation import DescriptorArgument as DescriptorArgument
from foci.gpu.compilation import KernelLaunch as KernelLaunch
from foci.gpu.compiled_launch import bind_launch
from foci.gpu.self_check import address_failure
from foci.runtime.tensor_cache import get_or_make

# A full cache is cleared, so that lengths that never recur do not stay in it.
MAX_CACHED_PLANS = 1024

# A compiled kernel, a function that picks its addresses from a dict of all addresses, and its remaining arguments.
CompiledLaunch = tuple[Callable[..., None], Callable[..., Any], tuple[Any, ...]]

# Allocates the tensors that only the last launch of a plan needs.
LateAllocator = Callable[[], dict[str, Tensor]]


class KeywordLaunch(NamedTuple):
    """One launch with keyword arguments: the name of the tensor for each tensor argument, scalars and options."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: dict[str, str]
    scalars: dict[str, Any]
    options: dict[str, Any]

    def to_kernel_launch(self) -> KernelLaunch:
        return build_kernel_launch(self.kernel, self.grid, self.scalars, self.tensors, **self.options)

    def launch_traced(self, tensors: dict[str, Tensor]) -> None:
        """Launch with keyword arguments, the form that torch.compile can trace; it has no addresses."""
        arguments = {argument: tensors[name] for argument, name in self.tensors.items()}
        self.kernel[self.grid](**arguments, **self.scalars, **self.options)


def build_kernel_launch(
    kernel: Any,
    grid: tuple[int, ...],
    scalars: dict[str, Any],
    tensor_names: dict[str, str] | None = None,
    **options: Any,
) -> KernelLaunch:
    """Build a launch with positional arguments.

    Every argument before the first scalar is a tensor. Its name is that of the argument unless `tensor_names` maps the
    argument to another one.
    """
    first = next(index for index, name in enumerate(kernel.arg_names) if name in scalars)
    tensors = tuple((tensor_names or {}).get(name, name) for name in kernel.arg_names[:first])
    return KernelLaunch(kernel, grid, tensors, tuple(scalars[name] for name in kernel.arg_names[first:]), options)


class Workspace:
    """Named arrays in one allocation, each aligned to 128 bytes: one allocation costs less host time than several.

    Args:
        sizes: the size of each array, counted in float32.
        dtypes: the dtypes of the arrays that are not float32.
    """

    def __init__(self, sizes: dict[str, int], dtypes: dict[str, torch.dtype]) -> None:
        self.dtypes = {name: dtype for name, dtype in dtypes.items() if name in sizes}
        self.sizes = [-(-size // 32) * 32 for size in sizes.values()]
        self.total = sum(self.sizes)
        self.offsets = dict(zip(sizes, accumulate([0, *self.sizes]), strict=False))

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self.total, dtype=torch.float32, device=device)

    def addresses(self, buffer: Tensor) -> dict[str, int]:
        first = buffer.data_ptr()
        return {name: first + 4 * offset for name, offset in self.offsets.items()}

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        arrays = dict(zip(self.offsets, buffer.split(self.sizes), strict=True)) if self.offsets else {}
        return arrays | {name: arrays[name].view(dtype) for name, dtype in self.dtypes.items()}


class LaunchPlan:
    """A sequence of launches with a shared workspace, for one kind of call.

    Args:
        sizes: the size of each workspace array, counted in float32.
        device: the device that the kernels run on.
        launches: the launches, in order.
        dtypes: the dtypes of the workspace arrays that are not float32.
        descriptors: the arguments that are tensor descriptors.
        last_sizes: the sizes of the workspace arrays that the last launch reads. They have an allocation of their own,
            so that the other arrays can be freed before the last launch.
        siblings: launches of other lengths of this kind, compiled in the background and not run.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        device: torch.device,
        launches: Sequence[KernelLaunch],
        dtypes: dict[str, torch.dtype] | None = None,
        descriptors: dict[str, DescriptorArgument] | None = None,
        last_sizes: dict[str, int] | None = None,
        siblings: Sequence[KernelLaunch] = (),
    ) -> None:
        self.device, self.launches, self.siblings = device, launches, siblings
        self.descriptors = descriptors or {}
        self.workspace, self.last_workspace = Workspace(sizes, dtypes or {}), Workspace(last_sizes or {}, dtypes or {})
        # Both are filled by the first call that goes through Triton: what `replay` needs.
        self.compiled_launches: list[CompiledLaunch] = []
        self.descriptor_templates: list[tuple[str, str, Any]] = []
        # Whether the kernels are compiled for aligned addresses, and for others.
        self.compiled_alignments: set[bool] = set()

    def __call__(self, tensors: dict[str, Tensor], allocate_late: LateAllocator | None = None) -> None:
        """Run all launches.

        Args:
            tensors: the tensors of the call, by name. The dict is modified and must belong to the caller alone.
            allocate_late: allocates what only the last launch needs, after the workspace arrays that the last launch
                does not read are freed. It may remove entries from `tensors` that the last launch does not need.
        """
        if LAUNCH_COLLECTOR.launches is not None:
            LAUNCH_COLLECTOR.launches += self.collect(tensors, allocate_late)
        elif self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            self.run(tensors, allocate_late)
        else:
            with torch.cuda.device(self.device):
                self.run(tensors, allocate_late)

    def run(self, tensors: dict[str, Tensor], allocate_late: LateAllocator | None) -> None:
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        # The compiled kernels rely on addresses that are multiples of 16, which nearly all are.
        aligned = reduce(or_, addresses.values()) % 16 == 0
        if aligned and self.compiled_launches:
            self.replay(tensors, addresses, allocate_late)
        else:
            self.launch_through_triton(tensors, allocate_late, aligned)

    def collect(self, tensors: dict[str, Tensor], allocate_late: LateAllocator | None) -> list[CollectedLaunch]:
        """The launches with the layouts of their tensors, to be compiled and not run."""
        layouts = {name: tensor_layout(x) for name, x in tensors.items()}
        late = {} if allocate_late is None else {**allocate_late()}
        for workspace in (self.workspace, self.last_workspace):
            late |= workspace.tensors(workspace.allocate(torch.device("meta")))
        layouts |= {name: tensor_layout(x) for name, x in late.items()}
        return [CollectedLaunch(launch, layouts, self.descriptors) for launch in (*self.launches, *self.siblings)]

    def replay(
        self, tensors: dict[str, Tensor], addresses: dict[str, Any], allocate_late: LateAllocator | None
    ) -> None:
        """Run the compiled kernels with new addresses."""
        buffer = self.workspace.allocate(self.device)
        addresses |= self.workspace.addresses(buffer)
        if self.last_workspace.offsets:
            last_buffer = self.last_workspace.allocate(self.device)
            addresses |= self.last_workspace.addresses(last_buffer)
        for name, tensor, template in self.descriptor_templates:
            addresses[name] = rebase_descriptor(template, tensors[tensor])
        for launch, pick, scalars in self.compiled_launches[:-1]:
            launch(*pick(addresses), *scalars)
        if allocate_late is not None:
            # The kernels may still be running, but later work that gets this memory waits in the same stream.
            del buffer
            addresses |= {name: tensor.data_ptr() for name, tensor in allocate_late().items()}
        launch, pick, scalars = self.compiled_launches[-1]
        launch(*pick(addresses), *scalars)

    def compile(self, tensors: dict[str, Any]) -> None:
        """Compile the kernels of the launches at the same time; in the background, those that run later."""
        wait_for_background(self.launches)
        known = [launch for launch in self.launches if tensors.keys() >= {*launch.tensors}]
        compile_in_parallel(
            [(launch, [*(tensors[n] for n in launch.tensors), *launch.scalars]) for launch in known],
            lambda: self.collect_later(tensors),
        )

    def collect_later(self, tensors: dict[str, Any]) -> list[CollectedLaunch]:
        """The launches of the backward and of other lengths, whose tensors are known."""
        layouts = {name: tensor_layout(x) for name, x in tensors.items() if isinstance(x, Tensor)}
        siblings = [launch for launch in self.siblings if layouts.keys() >= {*launch.tensors}]
        run_later, LAUNCH_COLLECTOR.run_later = LAUNCH_COLLECTOR.run_later, None
        launches: list[CollectedLaunch] = []
        # A CUDA graph would contain the operations of the backward.
        is_capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if run_later is not None and not is_capturing:
            with collect_launches() as launches:
                run_later()
        return [*launches, *(CollectedLaunch(launch, layouts, {}) for launch in siblings)]

    def launch_through_triton(
        self, tensors: dict[str, Any], allocate_late: LateAllocator | None, aligned: bool
    ) -> None:
        """Launch as Triton does it, and store the compiled kernels for `replay` where that is possible."""
        compiled_launches: list[CompiledLaunch] = []
        descriptors = {name: argument.make(tensors[argument.tensor]) for name, argument in self.descriptors.items()}
        own = {*descriptors, *self.workspace.offsets, *self.last_workspace.offsets}
        for workspace in (self.workspace, self.last_workspace):
            tensors |= workspace.tensors(workspace.allocate(self.device))
        tensors |= descriptors
        # A plan whose launches cannot be replayed comes here at every call.
        if aligned not in self.compiled_alignments:
            self.compile(tensors)
            self.compiled_alignments.add(aligned)
        for index, (kernel, grid, names, scalars, options) in enumerate(self.launches):
            if allocate_late is not None and index == len(self.launches) - 1:
                for name in self.workspace.offsets:
                    del tensors[name]
                tensors |= allocate_late()
            compiled = kernel[grid](*(tensors[name] for name in names), *scalars, **options)
            # The interpreter compiles nothing, and a Triton hook may skip a launch.
            if compiled is not None and aligned and address_failure(self.device.index or 0) is None:
                launch = bind_launch(compiled, grid, self.device)
                compiled_launches.append((launch, pick_addresses(names), scalars))
        if len(compiled_launches) == len(self.launches):
            self.descriptor_templates = [
                (name, self.descriptors[name].tensor, rebase_descriptor(descriptor, None))
                for name, descriptor in descriptors.items()
            ]
            self.compiled_launches = compiled_launches
        # The caller may keep its own tensors alive, but not these.
        for name in own & tensors.keys():
            del tensors[name]


def pick_addresses(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """The function that picks the addresses of a launch from a dict of all, as a tuple."""
    return itemgetter(*names) if len(names) > 1 else lambda addresses: tuple(addresses[name] for name in names)


def rebase_descriptor(descriptor: Any, base: Tensor | None) -> Any:
    """Copy a tensor descriptor for another tensor of the same layout, without validating it again.

    A launch reads only the address of its base and plain attributes.
    """
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__)
    copy.base = base
    return copy


@cache
def count_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 2 for the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


CACHED_PLANS: dict[Hashable, LaunchPlan] = {}


def get_or_build_plan(key: Hashable, build: Callable[[], LaunchPlan]) -> LaunchPlan:
    """The cached plan for a kind of call, built on first use."""
    return get_or_make(CACHED_PLANS, MAX_CACHED_PLANS, key, build)
