"""A planned pass of statistics on a GPU, run for one call after another.

A `PassPlan` names outputs, workspace arrays and launches. A `StatisticsPass` allocates the outputs of a call and runs
the launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foci.gpu.launcher import DescriptorArgument, KeywordLaunch, LaunchPlan
from foci.statistics.cuda.arguments import KernelTensors


class OutputSpec(NamedTuple):
    """An output of a pass.

    zeros: it starts as zeros; late: only the last launch writes it, so it is allocated just before that.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    zeros: bool = False
    late: bool = False

    def allocate(self, device: torch.device) -> Tensor:
        return (torch.zeros if self.zeros else torch.empty)(self.shape, dtype=self.dtype, device=device)


class PassPlan(NamedTuple):
    """The outputs, workspace arrays, launches and descriptors of a pass, by name.

    An array is (size, dtype). The last launch reads `partials`; the other arrays are freed before it, and late outputs
    reuse their memory.
    """

    outputs: list[OutputSpec]
    arrays: dict[str, tuple[int, torch.dtype]]
    partials: dict[str, tuple[int, torch.dtype]]
    launches: list[KeywordLaunch]
    descriptors: dict[str, DescriptorArgument]


class StatisticsPass:
    """Runs a pass that was planned for one kind of call."""

    def __init__(self, plan: PassPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.launch_plan: LaunchPlan | None = None

    def __call__(self, tensors: KernelTensors) -> dict[str, Tensor]:
        outputs = self.allocate_outputs(late=False)
        if self.launch_plan is None:
            self.launch_plan = self.build_launch_plan()

        def allocate_late() -> dict[str, Tensor]:
            late = self.allocate_outputs(late=True)
            outputs.update(late)
            return late

        self.launch_plan(tensors.by_name() | outputs, allocate_late if self.plan.partials else None)
        return outputs

    def build_launch_plan(self) -> LaunchPlan:
        arrays = self.plan.arrays | self.plan.partials
        sizes = {name: -(-size * dtype.itemsize // 4) for name, (size, dtype) in arrays.items()}
        dtypes = {name: dtype for name, (_, dtype) in arrays.items() if dtype != torch.float32}
        launches = [launch.to_kernel_launch() for launch in self.plan.launches]
        last_sizes = {name: sizes.pop(name) for name in self.plan.partials}
        return LaunchPlan(sizes, self.device, launches, dtypes, self.plan.descriptors, last_sizes)

    def run_traced(self, tensors: KernelTensors) -> dict[str, Tensor]:
        """Runs the launches in the form that torch.compile and fake tensors can trace."""
        outputs = self.allocate_outputs(late=False) | self.allocate_outputs(late=True)
        specs = self.plan.arrays | self.plan.partials
        arrays = {name: torch.empty(size, dtype=dtype, device=self.device) for name, (size, dtype) in specs.items()}
        for launch in self.plan.launches:
            launch.launch_traced(tensors.by_name() | outputs | arrays)
        return outputs

    def allocate_outputs(self, late: bool) -> dict[str, Tensor]:
        return {spec.name: spec.allocate(self.device) for spec in self.plan.outputs if spec.late == late}
