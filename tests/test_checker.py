"""The checker is fed wrong answers: each of them has to fail."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import foci
from foci.masks.base import Mask
from tests.checker import (
    INPUTS,
    Problem,
    Tensors,
    allowed,
    answers,
    average,
    check,
    eager_errors,
    no_wider_than_the_inputs,
    truth,
    worst,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SEEN = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.5
SEEN[4] = False


def problem(
    dtype: torch.dtype = torch.float32, mask: Mask | Tensor | None = SEEN, scale: float | None = None
) -> Problem:
    generator = torch.Generator().manual_seed(0)
    shapes = dict.fromkeys(("query", "key", "value"), (2, 2, 9, 8)) | {"sink": (2,), "bias": (2, 9, 9)}
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return Problem(tensors, lambda leaves: leaves | {"mask": mask, "score": foci.Dot(scale)}, dtype)


def verdict(found: Tensors, asked: Problem) -> None:
    true = truth(asked)
    check(found, true, eager_errors(asked, true), asked.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_answers_pass(dtype: torch.dtype) -> None:
    verdict(answers(problem(dtype), "reference"), problem(dtype))
    verdict(answers(problem(dtype), "blocked"), problem(dtype))


def test_the_answers_are_complete() -> None:
    names = {"out", "lse", *(f"gradient of {name}" for name in ("query", "key", "value", "sink", "bias"))}
    assert set(truth(problem())) == names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("measure", "name"),
    [
        *((measure, name) for measure in (worst, average) for name in ("out", "lse", "gradient of key")),
        # The worst of two elements is half of their average.
        (average, "gradient of sink"),
    ],
)
def test_an_error_just_above_the_limit_fails(dtype: torch.dtype, name: str, measure: Callable[[Tensor], float]) -> None:
    asked = problem(dtype, mask=None)
    true = truth(asked)
    eager = eager_errors(asked, true)
    # A sink's gradient is summed from as many terms as the inputs' are made of, and measured by them.
    made_of = [f"gradient of {each}" for each in INPUTS] if name == "gradient of sink" else []
    limit = allowed(measure(eager[name]), max(measure(true[each]) for each in (name, *made_of)), dtype)
    places = true[name].flatten().abs().argmax() if measure is worst else slice(None)

    def off_by(share: float) -> Tensors:
        wrong = true[name].flatten().clone()
        wrong[places] += share * limit
        found = true | {name: wrong.view(true[name].shape)}
        return {key: tensor.to(own_dtype(key, dtype)) for key, tensor in found.items()}

    # The answer is rounded to its dtype, which is at most an eighth of the limit.
    check(off_by(0.87), true, eager, dtype)
    with pytest.raises(AssertionError, match=f"{name}: off by"):
        check(off_by(1.14), true, eager, dtype)


def own_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if name == "lse" else dtype


def test_eager_code_is_taken_in_the_dtype_of_the_call() -> None:
    errors = {}
    for dtype in DTYPES:
        true = truth(problem(dtype))
        errors[dtype] = {name: worst(error) for name, error in eager_errors(problem(dtype), true).items()}
    for name in errors[torch.float32]:
        half, brain, single, double = (errors[dtype][name] for dtype in DTYPES)
        assert brain > half > 100 * single > 1e6 * double > 0


def test_eager_code_restores_its_patches() -> None:
    before = answers(problem(torch.bfloat16), "reference")
    with no_wider_than_the_inputs():
        narrow = answers(problem(torch.bfloat16), "reference")
    after = answers(problem(torch.bfloat16), "reference")
    assert narrow["lse"].dtype == torch.bfloat16
    assert all(torch.equal(before[name], after[name]) for name in before)


def one_wrong(found: Tensors) -> Tensors:
    found["out"].flatten()[-1] += 0.01
    return found


def not_a_number(found: Tensors) -> Tensors:
    found["gradient of value"][0, 0, 0, 0] = torch.nan
    return found


def infinite(found: Tensors) -> Tensors:
    found["out"][0, 0, 0, 0] = torch.inf
    return found


def hidden(found: Tensors) -> Tensors:
    found["lse"][0, 0, 0] = -torch.inf
    return found


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda found: found | {name: change(found[name])}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda found: {key: tensor for key, tensor in found.items() if key != name}


WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "one element": (one_wrong, "out: off by .* in the worst element"),
    "NaN": (not_a_number, "gradient of value: 1 of 288 elements are not finite"),
    "infinity": (infinite, "out: 1 of 288 elements are not finite"),
    "-inf too much": (hidden, "lse: -inf does not stand where it should"),
    "unwritten": (changed("out", lambda x: torch.full_like(x, torch.nan)), "out: 288 of 288 elements are not finite"),
    "zeros": (changed("out", torch.zeros_like), "out: off by"),
    "zero gradient": (changed("gradient of key", torch.zeros_like), "gradient of key: off by"),
    "wider": (changed("out", Tensor.double), r"expected torch.float32 .*, got torch.float64"),
    "narrower": (changed("lse", Tensor.half), r"lse: expected torch.float32 .*, got torch.float16"),
    "turned": (changed("out", lambda x: x.mT), r"expected .* \(2, 2, 9, 8\), got .* \(2, 2, 8, 9\)"),
    "heads swapped": (changed("out", lambda x: x.flip(1)), "out: off by"),
    "no gradient": (without("gradient of bias"), "expected .*gradient of bias"),
    "no lse": (without("lse"), "expected out, lse, .*, got out, gradient"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_fails(case: str) -> None:
    spoil, message = WRONG[case]
    with pytest.raises(AssertionError, match=message):
        verdict(spoil(answers(problem(), "reference")), problem())


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_mask_or_scale_fails(dtype: torch.dtype) -> None:
    for other in (problem(dtype, mask=SEEN.mT), problem(dtype, scale=1 / 3), problem(dtype, mask=foci.causal)):
        with pytest.raises(AssertionError, match="gradient of key: off by"):
            verdict(answers(other, "reference"), problem(dtype))


def test_gradients_that_do_not_pass_through_the_log_sum_exp_fail() -> None:
    found = answers(problem(), "reference")
    without = answers(problem(), "reference", lse=False)
    with pytest.raises(AssertionError, match="gradient of query: off by"):
        verdict(found | without, problem())


def test_one_wrong_element_among_a_million_fails() -> None:
    true = {"out": torch.linspace(-3, 3, 10**6, dtype=torch.float64).view(1000, 1000)}
    eager = {"out": torch.full((1000, 1000), 1e-7, dtype=torch.float64)}
    found = {"out": true["out"].float()}
    check(found, true, eager, torch.float32)
    found["out"][777, 77] += 0.01
    with pytest.raises(AssertionError, match=r"out: off by 0.01 in the worst element"):
        check(found, true, eager, torch.float32)


def test_a_small_error_everywhere_fails() -> None:
    """The worst element alone would let it pass: a single outlier of eager code sets that limit."""
    true = {"out": torch.linspace(-3, 3, 1000, dtype=torch.float64)}
    eager = {"out": torch.zeros(1000, dtype=torch.float64)}
    eager["out"][0] = 1e-3
    with pytest.raises(AssertionError, match="on average"):
        check({"out": (true["out"] + 5e-4).float()}, true, eager, torch.float32)


def test_minus_infinity_must_stay() -> None:
    true = {"lse": torch.tensor([1.0, -math.inf], dtype=torch.float64)}
    eager = {"lse": torch.tensor([0.0, math.nan], dtype=torch.float64)}
    check({"lse": torch.tensor([1.0, -math.inf])}, true, eager, torch.float32)
    for wrong in (0.0, -1e30, math.nan, math.inf):
        with pytest.raises(AssertionError, match="lse: -inf does not stand where it should"):
            check({"lse": torch.tensor([1.0, wrong])}, true, eager, torch.float32)


def test_eager_code_that_fails_excuses_nothing() -> None:
    true = {"out": torch.ones(3, dtype=torch.float64)}
    with pytest.raises(AssertionError, match="where nan is allowed"):
        check({"out": torch.ones(3)}, true, {"out": torch.full((3,), torch.nan)}, torch.float32)


def test_a_gradient_that_is_exactly_zero_may_be_rounded() -> None:
    true = {"out": torch.full((4,), 1e-17, dtype=torch.float64)}
    eager = {"out": torch.zeros(4, dtype=torch.float64)}
    check({"out": torch.full((4,), 1e-7)}, true, eager, torch.float32)
    with pytest.raises(AssertionError, match="off by"):
        check({"out": torch.full((4,), 1e-6)}, true, eager, torch.float32)


def test_what_cancelled_raises_the_floor_of_gradients_alone() -> None:
    true = {"out": torch.ones(3, dtype=torch.float64), "gradient of query": torch.zeros(3, dtype=torch.float64)}
    eager = {name: torch.zeros_like(tensor) for name, tensor in true.items()}
    found = {"out": torch.ones(3), "gradient of query": torch.full((3,), 4e-6)}
    with pytest.raises(AssertionError, match=r"gradient of query: off by 4e-06"):
        check(found, true, eager, torch.float32)
    check(found, true, eager, torch.float32, [torch.full((3,), 5.0)])
    with pytest.raises(AssertionError, match=r"gradient of query: off by 4e-06"):
        check(found, true, eager, torch.float32, [torch.full((3,), 4.0)])
    with pytest.raises(AssertionError, match=r"^out: off by"):
        check(found | {"out": torch.ones(3) + 4e-6}, true, eager, torch.float32, [torch.full((3,), 5.0)])


def test_what_cancelled_in_each_row_adds_up_for_a_parameter() -> None:
    true = {"gradient of query": torch.zeros(9, dtype=torch.float64), "gradient of slopes": torch.zeros(2).double()}
    eager = {name: torch.zeros_like(tensor) for name, tensor in true.items()}
    # Nine rows of 5: three times the floor of one.
    rows, floor = [torch.full((9,), 5.0)], 8 * torch.finfo(torch.float32).eps * 5
    for name in true:
        zeros = {other: torch.zeros_like(tensor, dtype=torch.float32) for other, tensor in true.items()}
        most = 3 * floor if name == "gradient of slopes" else floor
        check(zeros | {name: zeros[name] + 0.95 * most}, true, eager, torch.float32, rows)
        with pytest.raises(AssertionError, match=f"{name}: off by"):
            check(zeros | {name: zeros[name] + 1.05 * most}, true, eager, torch.float32, rows)
