"""The blocked backend: double backward, gradients of one result or one tensor alone, sums over many strips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import foci
from foci.backends import strips
from foci.masks.range_algebra import KeyRanges
from foci.runtime.cuda_graphs import capture_cuda_graph
from foci.runtime.tracing import is_capturing_cuda_graph
from tests.tensors import qkv, randn

DOUBLE = torch.float64

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "dot": lambda: {"mask": foci.causal},
    "additive": lambda: {"score": foci.Additive(randn(4, 8, seed=4, dtype=DOUBLE).requires_grad_())},
    "buckets": lambda: {"bias": foci.Buckets(randn(8, 4, seed=4, dtype=DOUBLE).requires_grad_(), True, 6)},
    "relative": lambda: {"bias": foci.Relative(*randn(2, 5, 8, seed=4, dtype=DOUBLE).requires_grad_())},
    "entries": lambda: {"bias": randn(4, 6, 6, seed=4, dtype=DOUBLE).requires_grad_(), "mask": foci.window(3)},
    "empty rows": lambda: {"mask": foci.padding([4, 0]), "score": foci.Dot(softcap=3.0)},
}


@pytest.fixture(params=[2**19, 12], ids=["one strip", "many strips"], autouse=True)
def _entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "MAX_CPU_STRIP_ENTRIES", request.param)


def results(backend: str, tensors: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    out, weights = foci.attention(*tensors, return_weights=True, backend=backend, **options)
    return out, weights.lse.nan_to_num(neginf=0.0)


def leaves(options: dict[str, Any], dtype: torch.dtype = DOUBLE) -> tuple[list[Tensor], list[Tensor]]:
    tensors = [tensor.requires_grad_() for tensor in qkv(dtype=dtype)]
    things = [options.get("score"), options.get("bias")]
    found = [x for thing in things if hasattr(thing, "tensors") for x in thing.tensors().values()]
    return tensors, [*tensors, *found, *(x for x in things if isinstance(x, Tensor))]


@pytest.mark.parametrize("through", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)], ids=["out", "lse", "both"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_their_gradients_equal_those_of_the_reference(case: str, through: tuple[float, float]) -> None:
    options = CASES[case]()
    tensors, wanted = leaves(options)
    found = []
    for backend in ("blocked", "reference"):
        out, lse = results(backend, tensors, options)
        loss = through[0] * (out**3).sum() + through[1] * (lse**3).sum()
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True, materialize_grads=True)
        total = torch.stack([gradient.square().sum() for gradient in first]).sum()
        found.append((*first, *torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("alone", "through"),
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)],
    ids=["query, out", "key, out", "value, out", "query, lse", "key, lse"],
)
def test_a_gradient_of_one_tensor_alone(alone: int, through: int) -> None:
    found = []
    for backend in ("blocked", "reference"):
        tensors = [x.detach().requires_grad_(place == alone) for place, x in enumerate(qkv(dtype=DOUBLE))]
        result = results(backend, tensors, {"score": foci.Cosine(2.0), "mask": foci.causal})[through]
        found.append(torch.autograd.grad(result.sin().sum(), tensors[alone])[0])
    torch.testing.assert_close(*found, atol=1e-12, rtol=0)


def test_the_backward_drops_the_same_weights() -> None:
    torch.manual_seed(0)
    q, k, _ = qkv()
    eye = torch.eye(6).expand(2, 2, 6, 6).contiguous().requires_grad_()
    dropped = foci.attention(q, k, eye, dropout=0.5, score=foci.Additive(randn(8)))
    # With unit vectors as values, the gradient of a value is the column of the kept weights.
    (gradient,) = torch.autograd.grad(dropped.sum(), eye)
    torch.testing.assert_close(gradient[..., 0], dropped.detach().view(2, 2, 2, 6, 6).sum((2, 3)))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        foci.padding([4, 0]),
        foci.padding([4, 6], side="left") & foci.window(2),
        foci.documents([0, 0, 1, 1, 1, 2]) & foci.causal,
        foci.causal & foci.window(2),
    ],
    ids=["padding", "left", "documents", "window"],
)
def test_no_device_memory_is_read_during_cuda_graph_capture(
    mask: foci.Mask, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured CUDA graph does not run: strips cover all keys, masked, unless the mask has no tensors."""
    monkeypatch.setattr(strips, "is_capturing_cuda_graph", lambda tensor: True)
    tensors = [x.requires_grad_(grad) for x in qkv(dtype=DOUBLE)]
    found = []
    reading = mock.patch.object(KeyRanges, "segments", autospec=True, side_effect=KeyRanges.segments)
    for backend in ("blocked", "reference"):
        with reading as read:
            out, lse = results(backend, tensors, {"mask": mask})
        assert read.called == (mask.is_static and backend == "blocked")
        given = torch.autograd.grad((out**3).sum() + (lse**3).sum(), tensors) if grad else ()
        found.append((out, lse, *given))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.gpu
def test_each_replay_of_a_cuda_graph_uses_the_current_lengths() -> None:
    """Decoding captures a step once and replays it for other batches."""
    (q, k, v), lengths = (x.cuda() for x in qkv()), torch.tensor([4, 6], device="cuda")

    def run() -> Tensor:
        out = foci.attention(q, k, v, mask=foci.padding(lengths), backend="blocked")
        assert isinstance(out, Tensor)
        return out

    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    with torch.no_grad():
        graph, out = capture_cuda_graph(run)
        for some in ([4, 6], [1, 0], [6, 3]):
            lengths.copy_(torch.tensor(some))
            graph.replay()
            torch.testing.assert_close(out, run())


def test_only_cuda_tensors_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not is_capturing_cuda_graph(torch.zeros(1))
    assert is_capturing_cuda_graph(mock.Mock(is_cuda=True))


def test_sums_over_strips_are_rounded_once() -> None:
    q, k, v = (randn(1, 1, 400, 8, seed=seed, dtype=torch.bfloat16).requires_grad_() for seed in range(3))
    score = foci.Cosine(1.0)
    with mock.patch.object(strips, "MAX_CPU_STRIP_ENTRIES", 800):
        found = torch.autograd.grad(foci.attention(q, k, v, score=score, backend="blocked").sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    true = torch.autograd.grad(foci.attention(*wide, score=score, backend="reference").sum(), wide)
    for one, other in zip(found, true, strict=True):
        assert float((one.double() - other).abs().max()) <= 2**-8 * float(other.abs().max())
