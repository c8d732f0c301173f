"""Random kinds of call at random lengths: output, gradients and statistics against float64.

60 kinds of score, mask, bias, sink, dtype and layout. On a GPU each runs at a few lengths up to 600, as many as
FOCI_FUZZ_CALLS says; in Triton's interpreter at five lengths up to 64 in our kernels (-m slow); one short call of each
runs by default, with the backend that is chosen for it.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from tests.checker import Problem, answers, check, eager_errors, taken_off
from tests.contract.cells import CHOICES, MASKS, Cell, Sizes, problem_with_sizes

KINDS, INTERPRETED_CALLS = 60, 5
# A kind is compiled once, for several seconds; another call takes milliseconds.
GPU_CALLS = int(os.environ.get("FOCI_FUZZ_CALLS", "6"))
LAYOUTS = ("plain", "plain", "transposed", "every_other", "shifted")
WIDTHS = (8, 20, 32, 64, 64, 128)
STATISTICS = ("entropy", "received", "distance", "largest_logit")
# A mask of a function is compiled by FlexAttention for several seconds.
EXCLUDED = {"function"}


def random_kind(seed: int) -> tuple[Cell, str, int]:
    """A cell, a layout and a width. A third of the kinds have another score than a dot product, half have a bias."""
    rng = random.Random(seed)
    choices = {name: [value for value in values if value not in EXCLUDED] for name, values in CHOICES.items()}
    cell = {name: rng.choice(values) for name, values in choices.items()}
    cell["dtype"] = rng.choice(("f16", "bf16", "f32"))
    cell["mask"] = choices["mask"][seed % len(choices["mask"])]
    cell["score"] = "dot" if seed % 3 else choices["score"][seed // 3 % len(choices["score"])]
    cell["bias"] = "none" if seed % 2 else choices["bias"][seed // 2 % len(choices["bias"])]
    return cell, rng.choice(LAYOUTS), rng.choice(WIDTHS)


def name_of_kind(seed: int) -> str:
    cell, layout, width = random_kind(seed)
    return "-".join([str(seed), *(cell[name] for name in CHOICES if name != "shape"), layout, str(width)])


def random_problem(seed: int, call: int, longest: int, bfloat16: bool = True) -> Problem:
    """One call of a kind: batch, heads and lengths are random; short ones are as likely as long ones."""
    cell, layout, width = random_kind(seed)
    if cell["dtype"] == "bf16" and not bfloat16:
        cell["dtype"] = "f16"
    rng = random.Random(1000 * seed + call)
    queries, keys = (round(longest ** rng.random()) for _ in range(2))
    keys = queries if rng.random() < 0.5 else keys
    heads, group = rng.choice(((2, 1), (4, 1), (4, 2), (3, 3)))
    sizes = Sizes((rng.randint(1, 3),), heads, heads // group, queries, keys, width, width, layout)
    return problem_with_sizes(cell, sizes, 1000 * seed + call)


def check_call(problem: Problem, device: str, backend: str | None) -> None:
    """Compares output, log-sum-exp, gradients and statistics with float64 on the same device."""
    true = answers(problem, "reference", torch.float64, device)
    eager = eager_errors(problem, true, device)
    found = answers(problem, backend, device=device)
    check(found, true, eager, problem.dtype, [taken_off(true, problem.dtype)])
    check_statistics(problem, device, backend)


def check_statistics(problem: Problem, device: str, backend: str | None) -> None:
    exact, ours = (
        summarize(problem, dtype, device, name) for dtype, name in ((torch.float64, "reference"), (None, backend))
    )
    # Rounded queries and keys shift logits, and with them all weights of a row.
    limit = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 1e-3}[problem.dtype]
    for name in STATISTICS:
        expected, found = exact[name].double(), ours[name].double()
        size = max(1.0, float(expected[expected.isfinite()].abs().max())) if expected.isfinite().any() else 1.0
        torch.testing.assert_close(
            found, expected, atol=limit * size, rtol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


def summarize(problem: Problem, dtype: torch.dtype | None, device: str, backend: str | None) -> dict[str, Tensor]:
    with torch.no_grad():
        arguments = problem.arguments(problem.leaves(dtype or problem.dtype, device))
        weights: Any = foci.attention(**arguments, backend=backend, return_weights=True)[1]  # type: ignore[call-overload]
        # Not one number of top keys per length: each would be compiled.
        summary = weights.summary(top=8 if weights.shape[-1] >= 8 else 0)
    return {name: getattr(summary, name) for name in STATISTICS}


# The weights of masked entries may overflow before they are set to 0; only the interpreter warns.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same kernels run on the GPU")
@pytest.mark.parametrize("seed", range(KINDS), ids=name_of_kind)
def test_in_the_interpreter_a_kind_at_a_few_lengths(seed: int) -> None:
    pytest.importorskip("triton")
    for call in range(INTERPRETED_CALLS):
        # The interpreter does not support bfloat16.
        problem = random_problem(seed, call, 64, bfloat16=False)
        check_call(problem, "cpu", planned_backend(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(KINDS), ids=name_of_kind)
def test_on_a_gpu_a_kind_at_a_few_lengths(seed: int) -> None:
    failures = []
    for call in range(GPU_CALLS):
        problem = random_problem(seed, call, 600)
        try:
            check_call(problem, "cuda", planned_backend(problem, "cuda"))
        except AssertionError as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in problem.tensors.items()}
            failures.append(f"call {call}, {shapes}: {str(error)[:400]}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("seed", range(KINDS), ids=name_of_kind)
def test_a_short_call_of_each_kind(seed: int) -> None:
    check_call(random_problem(seed, 0, 24), "cpu", None)


def planned_backend(problem: Problem, device: str = "cpu") -> str | None:
    """Our kernels where they support the call, else None for the default."""
    arguments = problem.arguments(problem.leaves(problem.dtype, device))
    return foci.plan(**arguments, backend="triton", return_weights=True).chosen


def test_most_kinds_run_in_our_kernels() -> None:
    pytest.importorskip("triton")
    planned = [planned_backend(random_problem(seed, 0, 8, bfloat16=False)) for seed in range(KINDS)]
    assert planned.count("triton") >= KINDS * 2 // 3


def test_the_kinds_differ_and_cover_the_choices() -> None:
    kinds = [random_kind(seed) for seed in range(KINDS)]
    assert len({(*cell.values(), layout, width) for cell, layout, width in kinds}) == KINDS
    assert {cell["mask"] for cell, _, _ in kinds} == MASKS.keys() - EXCLUDED
    for name in ("bias", "score", "sink"):
        assert {cell[name] for cell, _, _ in kinds} == set(CHOICES[name])
    assert {layout for _, layout, _ in kinds} == set(LAYOUTS)
