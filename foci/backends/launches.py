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

from foci.remembering import found_or_made

# Kinds of calls that are remembered. Lengths that never come again push all of them out now and then.
MOST = 1024

# Where a compiled kernel is known to take addresses, and every argument in order.
KNOWN = ((3, 5), (3, 6), (3, 7))


# What was compiled, the choice of its tensors from all of them, and the arguments after those.
Again = tuple[Callable[..., None], Callable[..., Any], tuple[Any, ...]]

# Makes tensors that only the last launch knows.
Late = Callable[[], dict[str, Tensor]]


class Step(NamedTuple):
    """One launch: the names of its tensors, which are the kernel's first arguments, and the arguments after them."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[str, ...]
    numbers: tuple[Any, ...]
    options: dict[str, Any]


def step(
    kernel: Any, grid: tuple[int, ...], numbers: dict[str, Any], renamed: dict[str, str] | None = None, **options: Any
) -> Step:
    """The launch of a kernel: what is no number is a tensor, of the same name unless it is renamed."""
    first = next(place for place, name in enumerate(kernel.arg_names) if name in numbers)
    tensors = tuple((renamed or {}).get(name, name) for name in kernel.arg_names[:first])
    return Step(kernel, grid, tensors, tuple(numbers[name] for name in kernel.arg_names[first:]), options)


class Arrays:
    """Arrays of floats in one allocation, each from a multiple of 128 bytes on: allocating is the host's time."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = [-(-size // 32) * 32 for size in sizes.values()]
        self.total = sum(self.sizes)
        self.starts = dict(zip(sizes, accumulate([0, *self.sizes]), strict=False))

    def allocated(self, device: torch.device) -> Tensor:
        return torch.empty(self.total, dtype=torch.float32, device=device)

    def addresses(self, whole: Tensor) -> dict[str, int]:
        first = whole.data_ptr()
        return {name: first + 4 * start for name, start in self.starts.items()}

    def tensors(self, whole: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.starts, whole.split(self.sizes), strict=True)) if self.starts else {}


class Launches:
    """Launches in a row, with the arrays of floats that they share, for one kind of call.

    Args:
        sizes: how many floats each array has.
        device: where it all happens.
        steps: the launches, in order.
        lasting: the same for the arrays that the last launch needs, where some are given back before it.
    """

    def __init__(
        self, sizes: dict[str, int], device: torch.device, steps: Sequence[Step], lasting: dict[str, int] | None = None
    ) -> None:
        self.device, self.steps = device, steps
        self.arrays, self.lasting = Arrays(sizes), Arrays(lasting or {})
        self.again: list[Again] = []

    def __call__(self, tensors: dict[str, Tensor], late: Late | None = None) -> None:
        """Launches them all.

        Args:
            tensors: what the launches know, by name.
            late: makes what only the last launch knows, when the arrays that it does not need are given back.
        """
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            self.launch(tensors, late)
        else:
            with torch.cuda.device(self.device):
                self.launch(tensors, late)

    def launch(self, tensors: dict[str, Tensor], late: Late | None) -> None:
        whole = self.arrays.allocated(self.device)
        rest = self.lasting.allocated(self.device) if self.lasting.total else None
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        # What is compiled relies on addresses that are multiples of 16, as they nearly always are.
        aligned = reduce(or_, addresses.values()) % 16 == 0
        if not (aligned and self.again):
            tensors |= self.arrays.tensors(whole)
            tensors |= {} if rest is None else self.lasting.tensors(rest)
            del whole
            self.launch_by_triton(tensors, late, aligned)
            return
        addresses |= self.arrays.addresses(whole)
        addresses |= {} if rest is None else self.lasting.addresses(rest)
        for compiled, chosen, numbers in self.again[:-1]:
            compiled(*chosen(addresses), *numbers)
        if late is not None:
            # The GPU may not have come so far, but whatever gets this memory now has to wait in the same queue.
            del whole
            addresses |= {name: tensor.data_ptr() for name, tensor in late().items()}
        compiled, chosen, numbers = self.again[-1]
        compiled(*chosen(addresses), *numbers)

    def launch_by_triton(self, tensors: dict[str, Tensor], late: Late | None, aligned: bool) -> None:
        found: list[Again] = []
        for place, (kernel, grid, names, numbers, options) in enumerate(self.steps):
            if late is not None and place == len(self.steps) - 1:
                for name in self.arrays.starts:
                    del tensors[name]
                tensors |= late()
            compiled = kernel[grid](*(tensors[name] for name in names), *numbers, **options)
            # The interpreter compiles nothing, and a hook of Triton's may leave out a launch.
            if compiled is not None and aligned and takes_addresses():
                found.append((compiled[(*grid, 1, 1)[:3]], itemgetter(*names), numbers))
        if len(found) == len(self.steps):
            self.again = found


@cache
def takes_addresses() -> bool:
    """Other versions of Triton are given tensors, and look at them each time."""
    return torch.version.hip is None and triton_version() in KNOWN


def triton_version() -> tuple[int, ...]:
    """Its first two numbers."""
    from triton import __version__

    return tuple(map(int, __version__.split(".")[:2]))


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; for the interpreter two."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


KEPT: dict[Hashable, Launches] = {}


def kept(key: Hashable, make: Callable[[], Launches]) -> Launches:
    """What was made for this kind of call, or is now."""
    return found_or_made(KEPT, MOST, key, make)


def layout(x: Tensor | None) -> Hashable:
    """What a kernel's arguments follow from."""
    return None if x is None else (x.shape, x.stride(), x.dtype)
