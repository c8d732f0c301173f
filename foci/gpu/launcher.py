"""Kernels that are launched again and again: what is found out for the first call of some shapes holds for the next.

Triton looks at each argument of each launch, and a kernel here has up to 85 of them: for small calls the GPU would wait
for that. All but the addresses follow from shapes, strides and dtypes, so a later call hands only those to what was
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, reduce
from itertools import accumulate
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.runtime.tensor_cache import get_or_make

# Kinds of calls that are remembered. Lengths that never come again push all of them out now and then.
MAX_CACHED_PLANS = 1024

# Where a compiled kernel is known to take addresses, and every argument in order.
ADDRESS_TRITON_VERSIONS = ((3, 5), (3, 6), (3, 7))


# What was compiled, the choice of its tensors from all of them, and the arguments after those.
CompiledLaunch = tuple[Callable[..., None], Callable[..., Any], tuple[Any, ...]]

# Makes tensors that only the last launch knows.
LateAllocator = Callable[[], dict[str, Tensor]]


class KernelLaunch(NamedTuple):
    """One launch: the names of its tensors, which are the kernel's first arguments, and the arguments after them."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[str, ...]
    numbers: tuple[Any, ...]
    options: dict[str, Any]


class KeywordLaunch(NamedTuple):
    """One launch by names: which tensor is which argument, the other arguments, and the options."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: dict[str, str]
    numbers: dict[str, Any]
    options: dict[str, Any]

    def step(self) -> KernelLaunch:
        return build_kernel_launch(self.kernel, self.grid, self.numbers, self.tensors, **self.options)

    def traced(self, tensors: dict[str, Tensor]) -> None:
        """As a compiler sees it, who knows neither addresses nor the order of arguments."""
        given = {argument: tensors[name] for argument, name in self.tensors.items()}
        self.kernel[self.grid](**given, **self.numbers, **self.options)


class DescriptorArgument(NamedTuple):
    """A tensor that a kernel is given as the copy engine takes it: its name, and how it is described."""

    tensor: str
    make: Callable[[Tensor], Any]


def build_kernel_launch(
    kernel: Any, grid: tuple[int, ...], numbers: dict[str, Any], renamed: dict[str, str] | None = None, **options: Any
) -> KernelLaunch:
    """The launch of a kernel: what is no number is a tensor, of the same name unless it is renamed."""
    first = next(place for place, name in enumerate(kernel.arg_names) if name in numbers)
    tensors = tuple((renamed or {}).get(name, name) for name in kernel.arg_names[:first])
    return KernelLaunch(kernel, grid, tensors, tuple(numbers[name] for name in kernel.arg_names[first:]), options)


class Workspace:
    """Arrays of floats in one allocation, each from a multiple of 128 bytes on: allocating is the host's time."""

    def __init__(self, sizes: dict[str, int], dtypes: dict[str, torch.dtype]) -> None:
        self.dtypes = {name: dtype for name, dtype in dtypes.items() if name in sizes}
        self.sizes = [-(-size // 32) * 32 for size in sizes.values()]
        self.total = sum(self.sizes)
        self.starts = dict(zip(sizes, accumulate([0, *self.sizes]), strict=False))

    def allocated(self, device: torch.device) -> Tensor:
        return torch.empty(self.total, dtype=torch.float32, device=device)

    def addresses(self, whole: Tensor) -> dict[str, int]:
        first = whole.data_ptr()
        return {name: first + 4 * start for name, start in self.starts.items()}

    def tensors(self, whole: Tensor) -> dict[str, Tensor]:
        found = dict(zip(self.starts, whole.split(self.sizes), strict=True)) if self.starts else {}
        return found | {name: found[name].view(dtype) for name, dtype in self.dtypes.items()}


class LaunchPlan:
    """Launches in a row, with the arrays of floats that they share, for one kind of call.

    Args:
        sizes: how many floats each array has.
        device: where it all happens.
        steps: the launches, in order.
        dtypes: of arrays that hold other numbers; their sizes are in floats all the same.
        described: arguments that are descriptions of tensors.
        lasting: sizes of the arrays that the last launch needs, where the others are given back before it.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        device: torch.device,
        steps: Sequence[KernelLaunch],
        dtypes: dict[str, torch.dtype] | None = None,
        described: dict[str, DescriptorArgument] | None = None,
        lasting: dict[str, int] | None = None,
    ) -> None:
        self.device, self.steps = device, steps
        self.described = described or {}
        self.forms: list[tuple[str, str, Any]] = []
        self.arrays, self.lasting = Workspace(sizes, dtypes or {}), Workspace(lasting or {}, dtypes or {})
        self.again: list[CompiledLaunch] = []

    def __call__(self, tensors: dict[str, Tensor], late: LateAllocator | None = None) -> None:
        """Launches them all.

        Args:
            tensors: what the launches know, by name.
            late: makes what only the last launch knows, when the arrays that it does not need are given back; it may
                take out of `tensors` what that launch does not need either, so these are the caller's own.
        """
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            self.launch(tensors, late)
        else:
            with torch.cuda.device(self.device):
                self.launch(tensors, late)

    def launch(self, tensors: dict[str, Tensor], late: LateAllocator | None) -> None:
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        # What is compiled relies on addresses that are multiples of 16, as they nearly always are.
        aligned = reduce(or_, addresses.values()) % 16 == 0
        if aligned and self.again:
            self.launch_again(tensors, addresses, late)
        else:
            self.launch_by_triton(tensors, late, aligned)

    def launch_again(self, tensors: dict[str, Tensor], addresses: dict[str, Any], late: LateAllocator | None) -> None:
        whole = self.arrays.allocated(self.device)
        addresses |= self.arrays.addresses(whole)
        if self.lasting.starts:
            rest = self.lasting.allocated(self.device)
            addresses |= self.lasting.addresses(rest)
        for name, tensor, form in self.forms:
            addresses[name] = rebase_descriptor(form, tensors[tensor])
        for compiled, chosen, numbers in self.again[:-1]:
            compiled(*chosen(addresses), *numbers)
        if late is not None:
            # The GPU may not have come so far, but whatever gets this memory now has to wait in the same queue.
            del whole
            addresses |= {name: tensor.data_ptr() for name, tensor in late().items()}
        compiled, chosen, numbers = self.again[-1]
        compiled(*chosen(addresses), *numbers)

    def launch_by_triton(self, tensors: dict[str, Any], late: LateAllocator | None, aligned: bool) -> None:
        found: list[CompiledLaunch] = []
        forms = {name: described.make(tensors[described.tensor]) for name, described in self.described.items()}
        own = {*forms, *self.arrays.starts, *self.lasting.starts}
        for arrays in (self.arrays, self.lasting):
            tensors |= arrays.tensors(arrays.allocated(self.device))
        tensors |= forms
        for place, (kernel, grid, names, numbers, options) in enumerate(self.steps):
            if late is not None and place == len(self.steps) - 1:
                for name in self.arrays.starts:
                    del tensors[name]
                tensors |= late()
            compiled = kernel[grid](*(tensors[name] for name in names), *numbers, **options)
            # The interpreter compiles nothing, and a hook of Triton's may leave out a launch.
            if compiled is not None and aligned and accepts_addresses():
                found.append((compiled[(*grid, 1, 1)[:3]], itemgetter(*names), numbers))
        if len(found) == len(self.steps):
            self.forms = [
                (name, self.described[name].tensor, rebase_descriptor(form, None)) for name, form in forms.items()
            ]
            self.again = found
        # Whoever called may keep its tensors, but not these.
        for name in own & tensors.keys():
            del tensors[name]


def rebase_descriptor(form: Any, base: Tensor | None) -> Any:
    """The description of a tensor as that of another one with the same layout, without checking it again.

    All that a launch reads of it is the address of its base, and plain attributes.
    """
    found = object.__new__(type(form))
    found.__dict__.update(form.__dict__)
    found.base = base
    return found


@cache
def accepts_addresses() -> bool:
    """Other versions of Triton are given tensors, and look at them each time."""
    return torch.version.hip is None and triton_version() in ADDRESS_TRITON_VERSIONS


def triton_version() -> tuple[int, ...]:
    """Its first two numbers."""
    from triton import __version__

    return tuple(map(int, __version__.split(".")[:2]))


@cache
def count_multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; for the interpreter two."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


CACHED_PLANS: dict[Hashable, LaunchPlan] = {}


def get_or_build_plan(key: Hashable, make: Callable[[], LaunchPlan]) -> LaunchPlan:
    """What was made for this kind of call, or is now."""
    return get_or_make(CACHED_PLANS, MAX_CACHED_PLANS, key, make)


def layout_key(x: Tensor | None) -> Hashable:
    """What a kernel's arguments follow from."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


def batch_stride(x: Tensor | None) -> int:
    """The first stride, as a kernel takes it: 0 where all of a batch share one, or nothing is given."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)
