"""`foci.warmup`: compile the kernels of a kind of call before its first call, in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from foci.call import attention, plan
from foci.gpu.compilation import CollectedLaunch, collect_launches, compile_collected
from foci.weights.weights import Weights

STATISTICS: dict[str, Callable[[Weights], Any]] = {
    "summary": lambda weights: weights.summary(top=min(8, weights.shape[-1])),
    "entropy": lambda weights: weights.entropy(),
    "received": lambda weights: weights.received(),
    "distance": lambda weights: weights.distance(),
    "largest_logit": lambda weights: weights.largest_logit(),
    "top": lambda weights: weights.top(min(8, weights.shape[-1])),
    "picture": lambda weights: weights.picture(min(256, weights.shape[-2]), min(256, weights.shape[-1])),
}


@dataclass(frozen=True)
class WarmupReport:
    """What was compiled: the backend of the call, the names of our kernels, and the seconds that it took."""

    backend: str
    kernels: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        if not self.kernels:
            return f"{self.backend}: none of our GPU kernels, {self.seconds:.1f} s"
        return f"{self.backend}: {len(self.kernels)} kernels, {self.seconds:.1f} s"


def warmup(
    query: Tensor, key: Tensor, value: Tensor, *, backward: bool = False, statistics: Iterable[str] = (), **same: Any
) -> WarmupReport:
    """Compiles what the same call to `attention` would compile, so that its first call does not wait.

    Kernels are compiled once per kind of call: dtype, width, score, kinds of mask and bias. Lengths, batch size and
    number of heads do not matter. Triton stores what it compiled on disk, where later processes find it.

    >>> import torch, foci
    >>> q = torch.empty(2, 8, 512, 64, device="meta")
    >>> report = foci.warmup(q, q, q, mask=foci.causal, backward=True, statistics=["entropy"])

    Args:
        query, key, value: tensors of the call; meta tensors stand for tensors on the current CUDA device, or on the CPU
            where there is none. Their values are not read.
        backward: also compile the backward.
        statistics: statistics of the weights to compile: summary, entropy, received, distance, largest_logit, top,
            picture.
        same: the other arguments of the call, as for `attention`.
    """
    names = check_statistics(statistics)
    if "return_weights" in same:
        raise TypeError("warmup has no argument return_weights: name the statistics that the weights compute")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = [to_leaf(materialize(tensor, device), backward) for tensor in (query, key, value)]
    options = {name: materialize(option, device) for name, option in same.items()}
    start = time.perf_counter()
    on_gpu = inputs[0].is_cuda
    # The random numbers of dropout must not change those of the caller.
    with torch.random.fork_rng(devices=[inputs[0].device] if on_gpu else []):
        chosen = plan(*inputs, return_weights=bool(names), **options).chosen
        collected = run_or_collect(on_gpu, lambda: run_call(inputs, options, backward, names))
        compile_collected(collected)
    kernels = dict.fromkeys(each.launch.kernel.__name__ for each in collected)
    return WarmupReport(chosen or "none", tuple(kernels), time.perf_counter() - start)


def run_or_collect(on_gpu: bool, run: Callable[[], None]) -> list[CollectedLaunch]:
    """Run the call; on a GPU its launches are returned instead of run."""
    if not on_gpu:
        run()
        return []
    with collect_launches() as collected:
        run()
    return collected


def check_statistics(statistics: Iterable[str]) -> list[str]:
    names = [statistics] if isinstance(statistics, str) else [*statistics]
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise ValueError(f"statistics must be among {', '.join(STATISTICS)}, got {unknown[0]!r}")
    return names


def run_call(inputs: list[Tensor], options: dict[str, Any], backward: bool, statistics: list[str]) -> None:
    """Run the call, its backward and the statistics; while launches are collected, the results have no meaning."""
    with torch.set_grad_enabled(backward):
        call: Callable[..., Any] = attention
        result = call(*inputs, return_weights=bool(statistics), **options)
    out = result[0] if statistics else result
    if backward:
        # Launches are collected in this thread.
        with torch.autograd.set_multithreading_enabled(False):
            learned = [tensor for tensor in find_tensors(tuple(options.values())) if tensor.requires_grad]
            torch.autograd.grad(out, [*inputs, *learned], torch.zeros_like(out), allow_unused=True)
    with torch.no_grad():
        for name in statistics:
            STATISTICS[name](result[1])


def find_tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of an argument: of a mask, score or bias, or of a tuple of these."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from find_tensors(each)
    elif is_dataclass(part) and not isinstance(part, type):
        yield from find_tensors(tuple(getattr(part, field.name) for field in fields(part)))


def to_leaf(tensor: Any, backward: bool) -> Any:
    return tensor.detach().requires_grad_(backward) if isinstance(tensor, Tensor) else tensor


def materialize(part: Any, device: torch.device) -> Any:
    """The tensor, mask, score or bias with zeros for its meta tensors."""
    if isinstance(part, Tensor):
        if part.device.type != "meta":
            return part
        made = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)
        return made.zero_().requires_grad_(part.requires_grad)
    if isinstance(part, tuple):
        return tuple(materialize(each, device) for each in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    # A constructor may check or convert its arguments, which this object has passed already.
    copy: Any = object.__new__(type(part))
    for field in fields(part):
        object.__setattr__(copy, field.name, materialize(getattr(part, field.name), device))
    return copy
