"""The one tolerance: how far an answer of `foci.attention` may be from the truth.

The truth is the reference in float64. Eager code is the reference with every step in the call's own dtype. The error
may be twice that of eager code plus a rounding floor, in the worst element and on average; gradients reach every
tensor that takes part, through the output and through the log-sum-exp. No truth has more bits than float64, so the
error of eager float64 is that of float32, scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import foci
import foci.biases
from foci.arguments import Call

Tensors = dict[str, Tensor]

# The floor, in units of the dtype's eps times the magnitude: what a sum in another order may lose. Sums of half
# precision are taken in float32 and rounded once, the others lose at every step; in float64 so does the truth itself.
FEW = {torch.float16: 4.0, torch.bfloat16: 4.0, torch.float32: 8.0, torch.float64: 16.0}

INPUTS = ("query", "key", "value")

# Below this a truth is made of float64 rounding: the exact answer is 0.
NOTHING = 1e-12


@dataclass(frozen=True)
class Problem:
    """A call to check: its float tensors by name, and how its arguments are made of them (views, scores, masks)."""

    tensors: Tensors
    arguments: Callable[[Tensors], dict[str, Any]]
    dtype: torch.dtype
    fixed: frozenset[str] = frozenset()

    def leaves(self, dtype: torch.dtype, device: str) -> Tensors:
        """The tensors as leaves of a graph, with the same values in every dtype."""
        rounded = {name: tensor.to(narrow(self.dtype)).to(device, dtype) for name, tensor in self.tensors.items()}
        return {name: tensor.requires_grad_(name not in self.fixed) for name, tensor in rounded.items()}


def narrow(dtype: torch.dtype) -> torch.dtype:
    """The dtype that eager code is measured in."""
    return torch.float32 if dtype == torch.float64 else dtype


def truth(problem: Problem, lse: bool = True) -> Tensors:
    return answers(problem, "reference", torch.float64, lse=lse)


def eager_errors(problem: Problem, true: Tensors, device: str = "cpu") -> Tensors:
    """How far eager code in the problem's dtype, on the same device, is from the truth."""
    with no_wider_than_the_inputs():
        plain = answers(problem, "reference", narrow(problem.dtype), device, lse="lse" in true)
    scale = torch.finfo(problem.dtype).eps / torch.finfo(narrow(problem.dtype)).eps
    return {name: (plain[name].double() - tensor) * scale for name, tensor in true.items()}


def answers(
    problem: Problem, backend: str | None, dtype: torch.dtype | None = None, device: str = "cpu", lse: bool = True
) -> Tensors:
    """The output, the log-sum-exp where it is asked for, and the gradient of every tensor of the problem."""
    leaves = problem.leaves(dtype or problem.dtype, device)
    result = foci.attention(**problem.arguments(leaves), backend=backend, return_weights=lse)
    found = {"out": result[0], "lse": result[1].lse} if lse else {"out": result}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    slopes = [slope_like(tensor, problem.dtype) for tensor in found.values()]
    gradients = torch.autograd.grad(list(found.values()), list(wanted.values()), slopes, allow_unused=True)
    given = {f"gradient of {name}": grad for name, grad in zip(wanted, gradients, strict=True) if grad is not None}
    return {name: tensor.detach().cpu() for name, tensor in (found | given).items()}


def slope_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What comes down to a result in the backward: the same values for every dtype and device."""
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator).to(narrow(dtype)).to(tensor.device, tensor.dtype)


def taken_off(true: Tensors, dtype: torch.dtype) -> Tensor:
    """What a backward takes off the gradient of every weight of a row: the output times what comes down to it.

    The less is left, the more of it is rounding: for the only key that a query sees nothing is. Over the keys of a row
    it may add up.
    """
    keys = true["gradient of key"].shape[-2]
    return (true["out"] * slope_like(true["out"], dtype).double()).abs().sum(-1) * keys


@contextmanager
def no_wider_than_the_inputs() -> Iterator[None]:
    """Takes the logits, the softmax and the biases in the dtype of the queries: plain eager code."""
    with (
        mock.patch.object(Call, "softmax_dtype", property(lambda call: call.q.dtype)),
        mock.patch.object(foci.biases, "to_logit_dtype", lambda parameter, q: parameter.to(q.dtype)),
    ):
        yield


def check(found: Tensors, true: Tensors, eager: Tensors, dtype: torch.dtype, cancelled: Sequence[Tensor] = ()) -> None:
    """Fails with every answer that is missing, of a wrong shape or dtype, or further from the truth than it may be.

    Args:
        cancelled: what gradients are known to be the difference of, for the floor of their error.
    """
    assert found.keys() == true.keys(), f"expected {', '.join(true)}, got {', '.join(found)}"
    terms = [true[f"gradient of {name}"] for name in INPUTS if f"gradient of {name}" in true]
    wrong = {}
    for name, tensor in true.items():
        # The gradient of a parameter is a sum over all entries, which cancels; its terms are those of the inputs'.
        # Every row is rounded on its own: the errors of rows add up like the root of the sum of their squares.
        is_gradient = name.startswith("gradient of ")
        shared = is_gradient and name.removeprefix("gradient of ") not in INPUTS
        summed = list(cancelled) if is_gradient else []
        if shared:
            summed = [*terms, *(x.square().sum().sqrt() for x in cancelled)]
        wrong[name] = fault(name, found[name], tensor, eager[name], dtype, summed)
    assert not any(wrong.values()), "; ".join(f"{name}: {what}" for name, what in wrong.items() if what)


def fault(name: str, found: Tensor, true: Tensor, eager: Tensor, dtype: torch.dtype, terms: list[Tensor]) -> str | None:
    """What is wrong with one answer, or None; `terms` are what it was summed from, where that may have cancelled."""
    own = torch.promote_types(dtype, torch.float32) if name == "lse" else dtype
    if (found.shape, found.dtype) != (true.shape, own):
        return f"expected {own} {tuple(true.shape)}, got {found.dtype} {tuple(found.shape)}"
    if not torch.equal(found.isneginf(), true.isneginf()):
        return "-inf does not stand where it should"
    seen = ~true.isneginf()
    error = (found.double() - true)[seen]
    if not bool(error.isfinite().all()):
        return f"{int((~error.isfinite()).sum())} of {error.numel()} elements are not finite"
    for kind, measure in (("in the worst element", worst), ("on average", average)):
        magnitude = max(measure(tensor) for tensor in (true[seen], *terms))
        most = allowed(measure(eager[seen]), magnitude, dtype)
        # Written so that a limit that is not a number fails too.
        if not measure(error) <= most:
            return f"off by {measure(error):.3g} {kind}, where {most:.3g} is allowed"
    return None


def allowed(eager_error: float, magnitude: float, dtype: torch.dtype) -> float:
    """Twice the error of eager code, and a floor; where the exact answer is 0, the inputs' 1 is the magnitude."""
    magnitude = magnitude if magnitude > NOTHING else 1.0
    return 2.0 * eager_error + FEW[dtype] * torch.finfo(dtype).eps * magnitude


def worst(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def average(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
