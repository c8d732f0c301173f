"""Repeat a pass for plain calls of the same layout: only new addresses, no checks, few allocations.

Plain calls are dot products without a mask other than `causal`. At a few hundred tokens the host takes longer than the
GPU, so small outputs share an allocation, and all arrays of the workspace do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from foci.arguments import Call
from foci.gpu.compilation import LAUNCH_COLLECTOR, prepare_compiler
from foci.gpu.launcher import MAX_CACHED_PLANS, Workspace, rebase_descriptor
from foci.statistics import cuda
from foci.statistics.cuda.arguments import TENSOR_NAMES, KernelTensors, describe_plain_call
from foci.statistics.cuda.passes import OutputSpec, StatisticsPass
from foci.statistics.cuda.plan import find_pass
from foci.statistics.request import Request

# Larger passes free parts of the workspace before they allocate the last outputs.
MAX_BYTES = 40 * 2**20
# Outputs that share an allocation: one that is kept keeps all of them alive.
MAX_SHARED_BYTES = 2**22


class OutputView(NamedTuple):
    """Where an output is in the shared allocation; the offset is counted in its own dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def make(self, buffer: Tensor) -> Tensor:
        typed = buffer if self.dtype == torch.float32 else buffer.view(self.dtype)
        # `data`: a change of one output in place must not count as a change of the others.
        return typed.as_strided(self.shape, self.strides, self.offset).data


class PassOutputs(Mapping[str, Tensor]):
    """The outputs of a pass by name; those in the shared allocation become tensors when they are read."""

    def __init__(self, tensors: dict[str, Tensor], views: dict[str, OutputView], buffer: Tensor | None) -> None:
        self.tensors, self.views, self.buffer = tensors, views, buffer

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            view = self.views[name]
            assert self.buffer is not None
            tensor = self.tensors[name] = view.make(self.buffer)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter({**self.tensors, **self.views})

    def __len__(self) -> int:
        return len({*self.tensors, *self.views})


class RepeatedPass:
    """The compiled launches of a pass, for any tensors of the layout of its first call."""

    def __init__(self, statistics_pass: StatisticsPass) -> None:
        plan, launch_plan = statistics_pass.plan, statistics_pass.launch_plan
        assert launch_plan is not None
        self.device, self.launches = statistics_pass.device, launch_plan.compiled_launches
        self.descriptors = launch_plan.descriptor_templates
        shared = choose_shared(plan.outputs)
        self.separate = [spec for spec in plan.outputs if spec not in shared]
        outputs = Workspace({spec.name: count_words(spec) for spec in shared}, {})
        self.shared_size, self.offsets = outputs.total, {name: 4 * offset for name, offset in outputs.offsets.items()}
        self.views = {spec.name: view_output(spec, outputs.offsets[spec.name]) for spec in shared}
        first, last = launch_plan.workspace, launch_plan.last_workspace
        self.workspace_size = first.total + last.total
        self.workspace_offsets = {name: 4 * offset for name, offset in first.offsets.items()}
        self.workspace_offsets |= {name: 4 * (first.total + offset) for name, offset in last.offsets.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations of a call."""
        return 4 * (self.shared_size + self.workspace_size + sum(map(count_words, self.separate)))

    def run(self, q: Tensor, k: Tensor, lse: Tensor) -> PassOutputs | None:
        """The outputs; None if an address is not aligned as the compiled kernels expect, or on another device."""
        at_q, at_k, at_lse = q.data_ptr(), k.data_ptr(), lse.data_ptr()
        device = self.device
        if (at_q | at_k | at_lse) % 16 or (device.type == "cuda" and torch.cuda.current_device() != device.index):
            return None
        # The log-sum-exp stands for tensors that the call lacks: they are never read.
        addresses: dict[str, object] = dict.fromkeys(TENSOR_NAMES, at_lse)
        addresses["q"], addresses["k"] = at_q, at_k
        tensors, buffer = {}, None
        if self.shared_size:
            buffer = torch.empty(self.shared_size, dtype=torch.float32, device=device)
            start = buffer.data_ptr()
            for name, offset in self.offsets.items():
                addresses[name] = start + offset
        for spec in self.separate:
            tensors[spec.name] = output = spec.allocate(device)
            addresses[spec.name] = output.data_ptr()
        if self.workspace_size:
            workspace = torch.empty(self.workspace_size, dtype=torch.float32, device=device)
            start = workspace.data_ptr()
            for name, offset in self.workspace_offsets.items():
                addresses[name] = start + offset
        for name, described, template in self.descriptors:
            addresses[name] = rebase_descriptor(template, q if described == "q" else k)
        for launch, pick, scalars in self.launches:
            launch(*pick(addresses), *scalars)
        return PassOutputs(tensors, self.views, buffer)


def choose_shared(outputs: list[OutputSpec]) -> list[OutputSpec]:
    """The outputs that share an allocation: the smallest ones; none if that would be a single one."""
    shared, total = [], 0
    for spec in sorted(outputs, key=count_words):
        total += 4 * count_words(spec)
        if total <= MAX_SHARED_BYTES and not spec.zeros:
            shared.append(spec)
    return shared if len(shared) > 1 else []


def count_words(spec: OutputSpec) -> int:
    """The size of an output, counted in float32."""
    return prod(spec.shape) * spec.dtype.itemsize // 4


def view_output(spec: OutputSpec, offset: int) -> OutputView:
    strides = tuple(prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape)))
    return OutputView(spec.shape, strides, 4 * offset // spec.dtype.itemsize, spec.dtype)


# By layout and request; None for kinds that take the full path.
REPEATED_PASSES: dict[Hashable, RepeatedPass | None] = {}


def run_repeated_pass(call: Call, lse: Tensor, request: Request) -> Mapping[str, Tensor] | None:
    """The requested statistics of a plain call after a few comparisons; None leaves it to the full path."""
    layout = describe_plain_call(call, lse)
    if layout is None or LAUNCH_COLLECTOR.launches is not None:
        return None
    key = layout, request
    try:
        known = REPEATED_PASSES[key]
    except KeyError:
        return run_first_pass(key, call, lse, request)
    return None if known is None else known.run(call.q, call.k, lse)


def run_first_pass(key: Hashable, call: Call, lse: Tensor, request: Request) -> Mapping[str, Tensor] | None:
    """Runs the first call of a kind as any other, and remembers how; None for a kind that the kernels refuse."""
    if len(REPEATED_PASSES) >= MAX_CACHED_PLANS:
        REPEATED_PASSES.clear()
    if 0 in call.q.shape or 0 in call.k.shape or cuda.refuses(call, request):
        REPEATED_PASSES[key] = None
        return None
    prepare_compiler()
    given = cuda.statistics_arguments(call)
    absent = ("key_ranges", "query_ids", "key_ids", "dense", "slopes")
    tensors = KernelTensors(given["q"], given["k"], lse.detach(), **{name: given[name] for name in absent})
    if lse.dtype != torch.float32 or not tensors.is_plain or tensors.to_kernel_layout() is not tensors:
        REPEATED_PASSES[key] = None
        return None
    softcap = None if given["softcap"] is None else float(given["softcap"])
    statistics_pass = find_pass(tensors, given["scale"], softcap, given["causal"], 0, request, None)
    results = statistics_pass(tensors)
    assert statistics_pass.launch_plan is not None
    # None where Triton must inspect every argument: in its interpreter, and for unaligned tensors.
    if statistics_pass.launch_plan.compiled_launches:
        repeated = RepeatedPass(statistics_pass)
        REPEATED_PASSES[key] = repeated if repeated.nbytes <= MAX_BYTES else None
    return results
