"""Launch a compiled kernel with less host time than `compiled[grid]`, which looks up the same things every time."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch


def bind_launch(compiled: Any, grid: tuple[int, ...], device: torch.device) -> Callable[..., None]:
    """The launch of a compiled kernel, which is loaded on the device; the device must be the current one.

    While a profiler hooks launches, they go through `compiled[grid]`.
    """
    sizes = (*grid, 1, 1)[:3]
    through_triton: Callable[..., None] = compiled[sizes]
    if not hasattr(compiled, "packed_metadata"):
        return through_triton
    from triton import knobs

    run, function, metadata, hooks = compiled.run, compiled.function, compiled.packed_metadata, knobs.runtime
    run = ExpandedDescriptors.of(run) or run
    current_stream, index = torch._C._cuda_getCurrentRawStream, device.index

    def launch(*arguments: Any) -> None:
        if has_hooks(hooks.launch_enter_hook) or has_hooks(hooks.launch_exit_hook):
            through_triton(*arguments)
        else:
            run(*sizes, current_stream(index), function, metadata, None, None, None, *arguments)

    return launch


def has_hooks(hook: Any) -> bool:
    """Whether Triton has to call a hook: a chain of functions, which may be empty, one function, or None."""
    return hook is not None and bool(getattr(hook, "calls", True))


class ExpandedDescriptors:
    """Runs a kernel with tensor descriptors: Triton copies all arguments one by one to expand the descriptors.

    Args:
        run: Triton's launcher of the compiled kernel, without its own expansion.
        places: the places of the descriptors among the arguments, in ascending order.
        layouts: what Triton knows of each descriptor.
        expand: Triton's function that expands a descriptor.
    """

    # Arguments of `run` before those of the kernel: grid, stream, function, metadata and hooks.
    FIRST = 9

    def __init__(self, run: Any, places: list[int], layouts: list[Any], expand: Callable[..., list[Any]]) -> None:
        self.run, self.expand = run, expand
        self.descriptors = [(self.FIRST + place, layout) for place, layout in zip(places, layouts, strict=True)]

    @classmethod
    def of(cls, run: Any) -> ExpandedDescriptors | None:
        """None for kernels without descriptors, and where Triton expands them in another way."""
        inner: Any = getattr(run, "launch", None)
        names = getattr(getattr(inner, "__code__", None), "co_freevars", ())
        if not {"launcher", "tensordesc_indices", "tensordesc_meta"} <= {*names}:
            return None
        try:
            from triton.backends.nvidia.driver import make_tensordesc_arg
        except ImportError:
            return None
        values = {name: cell.cell_contents for name, cell in zip(names, inner.__closure__, strict=True)}
        direct = copy(run)
        direct.launch = values["launcher"]
        return cls(direct, sorted(values["tensordesc_indices"]), values["tensordesc_meta"], make_tensordesc_arg)

    def __call__(self, *arguments: Any) -> None:
        expanded: list[Any] = []
        start = 0
        for place, layout in self.descriptors:
            expanded += arguments[start:place]
            expanded += self.expand(arguments[place], layout)
            start = place + 1
        self.run(*expanded, *arguments[start:])
