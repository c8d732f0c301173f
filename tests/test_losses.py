"""Losses on attention weights against the same formulas on dense matrices, values and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.backends import strips
from foci.weights.divergence import divergence_operator
from foci.weights.encoding import encode_call
from tests.tensors import randn

# PyTorch warns about its own code where it traces an autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")

MASKS: dict[str, Any] = {
    "none": None,
    "causal": foci.causal,
    "window": foci.causal & foci.window(2),
    # The second sequence has fully masked rows only.
    "padding": foci.padding([3, 0]),
    "documents": foci.documents([0, 0, 0, 1, 1, 2, 2]),
}
KEYS = torch.tensor([[0, -1], [1, 0], [2, 2], [0, 3], [-1, -1], [5, 6], [1, 6]])


def layer(seed: int = 0, heads: int = 4, kv_heads: int = 2, width: int = 8) -> list[Tensor]:
    """Queries and keys of 2 sequences of 7 tokens, which need gradients."""
    shapes = (2, heads, 7, width), (2, kv_heads, 7, width)
    return [randn(*shape, seed=seed + i, dtype=torch.float64).requires_grad_() for i, shape in enumerate(shapes)]


def attend(q: Tensor, k: Tensor, **arguments: Any) -> foci.Weights:
    return foci.attention(q, k, k, return_weights=True, **arguments)[1]


def dense(weights: foci.Weights) -> Tensor:
    """The matrix as (B, H, Tq, Tk), H = 1 for the mean over heads."""
    return weights.dense().unsqueeze(1) if weights.is_averaged else weights.dense()


def normalize(matrix: Tensor) -> Tensor:
    total = matrix.sum(-1, keepdim=True)
    return matrix / torch.where(total > 0, total, 1.0)


def dense_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    teacher, student = torch.broadcast_tensors(normalize(teacher), normalize(student))
    both = (teacher > 0) & (student > 0)
    ratio = torch.where(both, teacher, 1.0).log() - torch.where(both, student, 1.0).log()
    return (teacher * ratio).sum(-1)[both.any(-1)].mean()


def assert_same(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    options = {"allow_unused": True, "materialize_grads": True}
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves, **options) for loss in (found, expected)))


@pytest.mark.parametrize("small", [False, True], ids=["one strip", "strips of one row"])
@pytest.mark.parametrize("mask", MASKS)
def test_divergence(mask: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every head, of the mean of all, and of an indexer of one head, with a sink on the larger side."""
    if small:
        monkeypatch.setattr(strips, "strip_budget", lambda call: (1, 1))
    sink = randn(4, seed=9, dtype=torch.float64).requires_grad_()
    sides, leaves = [layer(0), layer(2), layer(4, heads=1, kv_heads=1, width=5)], []
    leaves = [sink, *(leaf for side in sides for leaf in side)]
    many, other = attend(*sides[0], mask=MASKS[mask], sink=sink), attend(*sides[1], mask=MASKS[mask])
    one = attend(*sides[2], mask=MASKS[mask])
    for teacher, student in (
        (many, other),
        (many.mean("heads"), one),
        (one, many),
        (many, one),
        (other, many.mean("heads")),
    ):
        expected = dense_divergence(dense(teacher), dense(student))
        assert_same(foci.losses.divergence(teacher, student), expected, leaves)


@pytest.mark.parametrize("averaged", [False, True])
def test_divergence_over_given_keys(averaged: bool) -> None:
    """Keys that only the teacher sees are left out, and so are rows of which no key is left."""
    sides = [layer(0), layer(2, heads=1, kv_heads=1)]
    teacher, student = attend(*sides[0]), attend(*sides[1], mask=foci.causal)
    teacher = teacher.mean("heads") if averaged else teacher
    chosen = torch.zeros(7, 8, dtype=torch.bool).scatter(1, KEYS.where(KEYS >= 0, 7), True)[:, :7].tril()
    expected = dense_divergence(dense(teacher) * chosen, dense(student) * chosen)
    assert_same(foci.losses.divergence(teacher, student, keys=KEYS), expected, sides[0] + sides[1])
    batched = torch.stack([KEYS, KEYS])
    torch.testing.assert_close(foci.losses.divergence(teacher, student, keys=batched), expected)


def test_the_divergence_of_a_matrix_from_itself_is_zero() -> None:
    weights = attend(*layer(), mask=foci.causal)
    assert foci.losses.divergence(weights, weights).abs() < 1e-15


def test_a_weight_that_is_rounded_to_zero_has_an_exact_logarithm() -> None:
    """In float32 exp(-200) is 0, its logarithm is not."""
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [-200.0]]]])
    teacher, student = attend(q, k * 0), attend(q, k, score=foci.Dot(1.0))
    torch.testing.assert_close(foci.losses.divergence(teacher, student), torch.tensor(100.0) - torch.tensor(2.0).log())


def test_a_teacher_that_sees_more_than_the_student_is_refused() -> None:
    teacher, student = attend(*layer()), attend(*layer(), mask=foci.causal)
    with pytest.raises(ValueError, match=re.escape("got other keys for 48 of 56 queries: use the same mask, or keys=")):
        foci.losses.divergence(teacher, student)
    foci.losses.divergence(student, teacher)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_alignment(mask: str, averaged: bool) -> None:
    leaves = [*layer(), randn(4, seed=9, dtype=torch.float64).requires_grad_()]
    weights = attend(*leaves[:2], mask=MASKS[mask], sink=leaves[2])
    weights = weights.mean("heads") if averaged else weights
    matrix = dense(weights)
    mass = torch.stack([matrix[:, :, 1, 0], matrix[:, :, 3, :2].sum(-1), matrix[:, :, 6, [0, 1, 2]].sum(-1)], dim=-1)
    expected = -mass[mass > 0].log().mean()
    given: list[Any] = [None, 0, [], slice(0, 2), None, None, [0, -6, 2]]
    assert_same(foci.losses.alignment(weights, given), expected, leaves)
    some = foci.losses.alignment(weights, [[0], [0, 1], [0, 1, 2, 2]], queries=[1, 3, -1])
    torch.testing.assert_close(some, expected)
    tensor = torch.tensor([[[0, -1, -1], [0, 1, -1], [2, 1, 0]]]).expand(2, -1, -1)
    torch.testing.assert_close(foci.losses.alignment(weights, tensor, queries=[1, 3, 6]), expected)


def test_alignment_with_masked_keys_only_is_refused() -> None:
    weights = attend(*layer(), mask=foci.causal)
    with pytest.raises(ValueError, match="a key that its query can see"):
        foci.losses.alignment(weights, [[5]], queries=[2])


@pytest.mark.parametrize("mask", ["none", "padding"])
def test_entropy(mask: str) -> None:
    leaves = layer()
    for weights in (attend(*leaves, mask=MASKS[mask]), attend(*leaves, mask=MASKS[mask]).mean("heads")):
        matrix = weights.dense()
        entropy = -(matrix * torch.where(matrix > 0, matrix, 1.0).log()).sum(-1)
        expected = (1.9 - entropy).clamp(min=0)[matrix.sum(-1) > 0].mean()
        assert expected > 0
        assert_same(foci.losses.entropy(weights, at_least=1.9), expected, leaves)


def test_nothing_to_count_is_zero() -> None:
    leaves = layer()
    weights = attend(*leaves, mask=foci.padding([0, 0]))
    losses = foci.losses.divergence(weights, weights), foci.losses.entropy(weights)
    assert [float(loss.detach()) for loss in (*losses, foci.losses.alignment(weights, [None] * 7))] == [0, 0, 0]
    assert all(not gradient.any() for gradient in torch.autograd.grad(sum(losses, torch.zeros(())), leaves))


PARTS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "additive": lambda x: {"score": foci.Additive(x[:8])},
    "general": lambda x: {"score": foci.General(x[:64].view(8, 8))},
    "alibi": lambda x: {"bias": foci.ALiBi(x[:4]), "mask": foci.causal},
    "relative": lambda x: {"bias": foci.Relative(x[:24].view(3, 8))},
    "bias": lambda x: {"bias": x[:49].view(7, 7)},
}


@pytest.mark.parametrize("part", PARTS)
def test_gradients_reach_scores_and_biases(part: str) -> None:
    q, k = (x[:1, :, :].detach().requires_grad_() for x in layer())
    parameter = randn(64, seed=7, dtype=torch.float64).requires_grad_()
    other = attend(*layer(2))[:1]
    assert isinstance(other, foci.Weights)

    def total(q: Tensor, k: Tensor, parameter: Tensor) -> Tensor:
        weights = attend(q, k, **PARTS[part](parameter))
        aligned = foci.losses.alignment(weights, list(range(7)))
        return foci.losses.divergence(weights, other) + aligned + foci.losses.entropy(weights, at_least=1.5)

    assert torch.autograd.gradcheck(total, (q, k, parameter), nondet_tol=1e-9, fast_mode=True)


def all_losses(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor) -> Tensor:
    teacher, student = attend(q, k, mask=foci.causal), attend(index_q, index_k, mask=foci.causal)
    distance = foci.losses.divergence(teacher.mean("heads"), student) + foci.losses.divergence(
        teacher, student, keys=KEYS
    )
    return distance + foci.losses.alignment(teacher, list(range(7))) + foci.losses.entropy(teacher, at_least=1.0)


def test_losses_compile_as_one_graph() -> None:
    leaves = layer() + layer(4, heads=1, kv_heads=1, width=5)
    torch._dynamo.reset()
    compiled = torch.compile(all_losses, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*leaves), all_losses(*leaves), leaves)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
def test_the_divergence_operator_passes_opcheck(permuted: bool) -> None:
    sides = [layer(), layer(4, heads=1, kv_heads=1)]
    if permuted:
        sides = [[x.detach().transpose(1, 2).clone().transpose(1, 2).requires_grad_() for x in side] for side in sides]
    slopes = randn(4, seed=9, dtype=torch.float64).requires_grad_()
    calls = attend(*sides[0], mask=foci.causal, bias=foci.ALiBi(slopes)).call, attend(*sides[1], mask=foci.causal).call
    keys = [KEYS.unsqueeze(0)] if permuted else []
    inputs = (keys, *encode_call(calls[0]), permuted, *encode_call(calls[1]), False)
    torch.library.opcheck(divergence_operator.overload, inputs)


def test_memory_does_not_grow_with_the_square() -> None:
    """The tensors that autograd keeps are those of the inputs and of the rows."""
    sizes = []
    for length in (64, 128):
        q, k = (randn(1, 2, length, 8, seed=i).requires_grad_() for i in (0, 1))
        teacher, student = attend(q, k, mask=foci.causal), attend(q * 2, k, mask=foci.causal)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            foci.losses.divergence(teacher, student)
        sizes.append(max(kept))
    assert sizes[1] <= 2 * sizes[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: foci.losses.divergence(w, w.dense()), "student must be Weights, as foci.attention"),
        (lambda w: foci.losses.divergence(w, w[:1]), "teacher and student must have the same batch"),
        (lambda w: foci.losses.divergence(w, w[:, :2]), "and heads that broadcast, got (2, 4, 7, 7) and (2, 2, 7, 7)"),
        (
            lambda w: foci.losses.divergence(w, w, keys=torch.zeros(3, 2, dtype=torch.int64)),
            "keys must have shape (7, K)",
        ),
        (lambda w: foci.losses.divergence(w, w, keys=torch.zeros(7, 2)), "keys must be integers, got torch.float32"),
        (lambda w: foci.losses.divergence(w, w, keys=KEYS + 1), "keys must be from -1 to 6, got"),
        (lambda w: foci.losses.alignment(w, 3), "keys must be a list with the keys of each query"),
        (lambda w: foci.losses.alignment(w, [[7]], queries=[0]), "keys must be numbers from -7 to 6, got 7"),
        (lambda w: foci.losses.alignment(w, [[0]], queries=[9]), "query indices must be from -7 to 6"),
        (lambda w: foci.losses.entropy(w, at_least=-1), "at_least must be a number of nats >= 0, got -1"),
    ],
)
def test_errors_name_the_argument(call: Callable[[foci.Weights], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, IndexError), match=re.escape(message)):
        call(attend(*layer()))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_on_a_gpu_losses_are_those_of_the_cpu() -> None:
    leaves = layer() + layer(4, heads=1, kv_heads=1, width=5)
    expected = torch.autograd.grad(all_losses(*leaves), leaves)
    moved = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    for function in (all_losses, torch.compile(all_losses, fullgraph=True)):
        found = torch.autograd.grad(function(*moved), moved)
        torch.testing.assert_close([x.cpu() for x in found], list(expected))
