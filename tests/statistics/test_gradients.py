"""Gradients of statistics equal those of their definitions and need no memory of the size of the matrix."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import foci
from foci.weights.parts_file import map_tensors
from foci.weights.tensors import find_tensors
from tests import matrices
from tests.allocation import LargestTensor
from tests.matrices import CASES, Arguments, lazy, small_strips

Question = Callable[[foci.Weights], Tensor]

QUESTIONS: dict[str, Question] = {
    "a row": lambda w: w[..., w.shape[-2] // 2, :],
    "a column": lambda w: w[..., -1],
    "some entries": lambda w: w[..., ::2, 1:],
    "dense": lambda w: w.dense(),
    "W @ x": lambda w: w @ matrices.randn(w.shape[-1], 2).to(w.dtype),
    "x @ W": lambda w: matrices.randn(2, w.shape[-2]).to(w.dtype) @ w,
    "entropy": lambda w: w.entropy(),
    "received": lambda w: w.received(),
    "received by some": lambda w: w.received(queries=slice(0, 3)),
    "grouped": lambda w: w.grouped(matrices.halves(w.shape[-2]), matrices.halves(w.shape[-1])),
    "distance": lambda w: w.distance(),
}


def leaves_of(arguments: Arguments) -> list[Tensor]:
    """The float tensors from which the matrix is computed; without -inf, which has no numerical derivative."""
    made_of = {name: part for name, part in arguments.items() if name != "value"}
    if isinstance(made_of.get("bias"), foci.Relative):
        made_of["bias"] = foci.Relative(made_of["bias"].keys)
    return [tensor for tensor in find_tensors(made_of) if tensor.is_floating_point() and bool(tensor.isfinite().all())]


def with_leaves(arguments: Arguments, leaves: Iterator[Tensor]) -> Arguments:
    old = {id(tensor) for tensor in leaves_of(arguments)}
    return map_tensors(arguments, lambda tensor: next(leaves) if id(tensor) in old else tensor)


def checked(case: str, question: Question) -> None:
    arguments = CASES[case]()
    leaves = [leaf.clone().requires_grad_() for leaf in leaves_of(arguments)]
    assert len(leaves) >= 2

    def asked(*new: Tensor) -> Tensor:
        return question(lazy(with_leaves(arguments, iter(new))))

    assert torch.autograd.gradcheck(asked, leaves, fast_mode=True, atol=1e-6, check_undefined_grad=False)


def everything(weights: foci.Weights) -> Tensor:
    """All statistics concatenated, to be checked at once."""
    return torch.cat([question(weights).flatten() for question in QUESTIONS.values()])


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    checked(case, everything)


@pytest.mark.parametrize("question", QUESTIONS)
def test_gradients_strip_by_strip(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_strips(monkeypatch, 300)
    checked("grouped heads, empty rows", QUESTIONS[question])
    checked("joined, empty rows", QUESTIONS[question])


@pytest.mark.parametrize("case", ["sink, empty rows", "grouped heads", "relative", "positions"])
def test_gradients_of_the_mean_over_heads(case: str) -> None:
    checked(case, lambda weights: everything(weights.mean("heads")))


@pytest.mark.parametrize("case", ["sink", "causal", "additive", "relative", "bias tensor"])
def test_gradients_of_a_part_and_of_the_log_sum_exp(case: str) -> None:
    checked(case, lambda weights: weights[0, 1:3].entropy())
    checked(case, lambda weights: weights.lse)
    checked(case, lambda weights: weights.sink_mass() * 1.0 if "sink" in case else weights[..., 1, 2])


def test_every_entry_of_every_gradient_once() -> None:
    """gradcheck without fast_mode, on a matrix of a few entries."""
    q, k = (matrices.randn(1, 2, n, 2, seed=n).requires_grad_() for n in (2, 3))
    sink, slopes = matrices.randn(2, seed=9).requires_grad_(), matrices.randn(2, seed=8).abs().requires_grad_()

    def asked(q: Tensor, k: Tensor, sink: Tensor, slopes: Tensor) -> Tensor:
        extra = {"mask": foci.causal, "bias": foci.ALiBi(slopes), "sink": sink}
        return everything(lazy({"query": q, "key": k, "value": k} | extra))

    assert torch.autograd.gradcheck(asked, [q, k, sink, slopes], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [name for name in CASES if name.endswith("empty rows")])
def test_gradients_of_fully_masked_rows_are_finite(case: str, dtype: torch.dtype) -> None:
    arguments = matrices.in_dtype(CASES[case](), dtype)
    leaves = [leaf.requires_grad_() for leaf in leaves_of(arguments)]
    grads = torch.autograd.grad(everything(lazy(arguments)).square().sum(), leaves)
    assert all(bool(grad.isfinite().all()) for grad in grads)


def test_no_grad_records_no_graph() -> None:
    arguments = matrices.qkv()
    arguments["query"].requires_grad_()
    weights = lazy(arguments)
    with torch.no_grad():
        assert not any(question(weights).requires_grad for question in QUESTIONS.values())
    assert all(question(weights).requires_grad for question in QUESTIONS.values())
    assert not weights.summary().entropy.requires_grad
    assert not weights.top(2).values.requires_grad


LINEAR = [name for name in QUESTIONS if name not in {"dense", "some entries"}]


@pytest.mark.parametrize("question", LINEAR)
def test_memory_is_linear_forward_and_backward(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_strips(monkeypatch, 2**15)
    n = 1024
    x, sink, table = torch.randn(1, 2, n, 4), torch.zeros(2), torch.zeros(8, 2)
    leaves = [tensor.requires_grad_() for tensor in (x, sink, table)]
    options = {"mask": foci.causal, "bias": foci.Buckets(table, True, 64), "sink": sink}
    weights = lazy({"query": x, "key": x, "value": x} | options)
    with LargestTensor() as seen:
        grads = torch.autograd.grad(QUESTIONS[question](weights).square().sum(), leaves)
    assert all(bool(grad.any()) for grad in grads)
    matrix = 2 * n * n
    assert seen.largest <= matrix // 4
    # If strips were kept for the backward, they would take several matrices of four bytes an entry.
    assert seen.peak <= 4 * matrix


def test_memory_of_an_additive_score_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    small_strips(monkeypatch, 2**12)
    n = 256
    x, weight = torch.randn(1, 2, n, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    weights = lazy({"query": x, "key": x, "value": x, "score": foci.Additive(weight)})
    with LargestTensor() as seen:
        weights.entropy().sum().backward()
    # One row of q + k is n d entries; the matrix of them would be n² d.
    assert seen.largest <= 2 * n * n * 4 // 8


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("only", ["query", "key"])
def test_a_fully_masked_matrix_has_zero_gradients(question: str, only: str) -> None:
    """For example a batch of padding only: a loss on its entropy must not break training."""
    arguments = matrices.qkv() | {"mask": foci.padding([0, 0])}
    leaf = arguments[only].requires_grad_()
    asked = QUESTIONS[question](lazy(arguments))
    assert not asked.any()
    assert not torch.autograd.grad(asked.sum(), leaf)[0].any()
