"""A pass of statistics on a GPU, planned by names, and run for one call after another.

The plan follows from shapes alone. What runs it allocates what the call is given, and hands addresses to the launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foci.gpu.launcher import DescriptorArgument, KeywordLaunch, LaunchPlan
from foci.statistics.cuda.arguments import KernelTensors


class OutputSpec(NamedTuple):
    """A tensor that a pass gives, or needs as zeros and gives not; late: only the last launch knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    zeros: bool = False
    given: bool = True
    late: bool = False


class PassPlan(NamedTuple):
    """A pass by names: the tensors that it gives, the arrays that its launches share, and these, in order.

    Arrays are (numbers, dtype). Those that are lasting are read by the last launch; the others are given back before
    it, and late results take their memory.
    """

    results: list[OutputSpec]
    arrays: dict[str, tuple[int, torch.dtype]]
    lasting: dict[str, tuple[int, torch.dtype]]
    launchings: list[KeywordLaunch]
    described: dict[str, DescriptorArgument]


class StatisticsPass:
    """A pass that was planned for one kind of call."""

    def __init__(self, plan: PassPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.launches: LaunchPlan | None = None

    def __call__(self, given: KernelTensors) -> dict[str, Tensor]:
        found = self.results(late=False)
        if self.launches is None:
            self.launches = self.kept()

        def late() -> dict[str, Tensor]:
            made = self.results(late=True)
            found.update(made)
            return made

        self.launches(given.by_name() | found, late if self.plan.lasting else None)
        return self.select_returned(results)

    def kept(self) -> LaunchPlan:
        arrays = self.plan.arrays | self.plan.lasting
        sizes = {name: -(-size * dtype.itemsize // 4) for name, (size, dtype) in arrays.items()}
        dtypes = {name: dtype for name, (_, dtype) in arrays.items() if dtype != torch.float32}
        steps = [launching.to_kernel_launch() for launching in self.plan.launchings]
        lasting = {name: sizes.pop(name) for name in self.plan.lasting}
        return LaunchPlan(sizes, self.device, steps, dtypes, self.plan.described, lasting)

    def traced(self, given: KernelTensors) -> dict[str, Tensor]:
        """For a compiler, or tensors without memory."""
        found = self.results(late=False) | self.results(late=True)
        needed = self.plan.arrays | self.plan.lasting
        arrays = {name: torch.empty(size, dtype=dtype, device=self.device) for name, (size, dtype) in needed.items()}
        for launching in self.plan.launchings:
            launching.launch_traced(given.by_name() | found | arrays)
        return self.select_returned(results)

    def results(self, late: bool) -> dict[str, Tensor]:
        device = self.device
        return {
            name: (torch.zeros if zeros else torch.empty)(shape, dtype=dtype, device=device)
            for name, shape, dtype, zeros, _, is_late in self.plan.results
            if is_late == late
        }

    def select_returned(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        for result in self.plan.results:
            if not result.given:
                del found[result.name]
        return found
