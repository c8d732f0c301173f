"""The lazy matrix holds references: a change behind its back is seen, and the values are not kept alive."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import foci
from foci.backends import BACKEND_NAMES
from foci.weights.parts_file import map_tensors
from tests import matrices
from tests.matrices import lazy

TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "query": ({}, "the query"),
    "key": ({}, "the key"),
    "sink": ({"sink": matrices.sink()}, "the sink"),
    "mask": ({"mask": matrices.holes()}, "a tensor of the mask"),
    "lengths": ({"mask": foci.padding(torch.tensor([9, 4]))}, "a tensor of the mask"),
    "one of two masks": ({"mask": foci.causal & matrices.holes()}, "a tensor of the mask"),
    "bias": ({"bias": matrices.hidden_bias()}, "a tensor of the bias"),
    "slopes": ({"bias": foci.ALiBi(matrices.randn(4))}, "a tensor of the bias"),
    "weight": ({"score": foci.Additive(matrices.randn(6))}, "a tensor of the score"),
    "positions": ({"positions": matrices.scattered()}, "a tensor of the positions"),
}
QUESTIONS: dict[str, Callable[[foci.Weights], Any]] = {
    "a slice": lambda w: w[..., 0, :],
    "a part": lambda w: w[0],
    "dense": lambda w: w.dense(),
    "a product": lambda w: w @ torch.ones(17).double(),
    "the other product": lambda w: w.T @ torch.ones(11).double(),
    "mean": lambda w: w.mean("heads"),
    "top": lambda w: w.top(2),
    "entropy": lambda w: w.entropy(),
    "received": lambda w: w.received(),
    "picture": lambda w: w.picture(2, 2),
    "grouped": lambda w: w.grouped([(0, 2)], [(0, 2)]),
    "distance": lambda w: w.distance(),
    "diagonal": lambda w: w.diagonal(),
    "largest_logit": lambda w: w.largest_logit(),
    "sink_mass": lambda w: w.sink_mass(),
    "summary": lambda w: w.summary(),
    "to": lambda w: w.to("cpu"),
}


def tensor_of(arguments: dict[str, Any], name: str) -> Tensor:
    """The tensor that the caller holds, however deep it is inside a mask or a bias."""
    found: Any = {
        "lengths": lambda: arguments["mask"].lengths,
        "one of two masks": lambda: arguments["mask"].right.entries,
        "slopes": lambda: arguments["bias"].slopes,
        "weight": lambda: arguments["score"].weight,
        "positions": lambda: arguments["positions"][1],
    }.get(name, lambda: arguments[name])()
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", TENSORS)
def test_a_change_in_place_is_detected(name: str) -> None:
    extra, message = TENSORS[name]
    arguments = matrices.qkv() | extra
    weights = lazy(arguments)
    weights.entropy()
    part, mean = weights[1], weights.mean("heads")
    tensor = tensor_of(arguments, name)
    with torch.no_grad():
        tensor.copy_(tensor.clone())
    for stale in (weights, part, mean):
        with pytest.raises(RuntimeError, match=f"{message} was changed in place or moved since the call"):
            stale.entropy()


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_method_computes_from_changed_tensors(question: str) -> None:
    arguments = matrices.qkv()
    weights = lazy(arguments)
    arguments["key"].add_(1.0)
    with pytest.raises(RuntimeError, match="the key was changed"):
        QUESTIONS[question](weights)


def test_a_change_to_a_slice_or_a_view_is_detected() -> None:
    arguments = matrices.headless()
    weights = lazy(arguments)
    arguments["query"][0, 0, 0] = 1.0
    with pytest.raises(RuntimeError, match="the query was changed"):
        weights.entropy()


def test_a_freed_tensor_is_detected() -> None:
    arguments = matrices.qkv()
    weights = lazy(arguments)
    arguments["query"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the query was freed since the call"):
        weights.entropy()


def test_a_moved_tensor_is_detected() -> None:
    arguments = matrices.qkv()
    weights = lazy(arguments)
    arguments["key"].data = arguments["key"].clone()
    with pytest.raises(RuntimeError, match="the key was changed in place or moved"):
        weights.entropy()


def test_changed_strides_are_detected() -> None:
    arguments = matrices.qkv(matrices.D)
    weights = lazy(arguments)
    arguments["query"].data = arguments["query"].data.mT
    with pytest.raises(RuntimeError, match="the query was changed in place or moved"):
        weights.entropy()


def test_a_changed_shape_is_detected() -> None:
    arguments = matrices.qkv(5, 5)
    weights = lazy(arguments)
    arguments["query"].transpose_(0, 1)
    with pytest.raises(RuntimeError, match="the query was changed in place or moved"):
        weights.entropy()


def test_a_changed_log_sum_exp_is_detected() -> None:
    weights = lazy(matrices.qkv())
    weights.lse.zero_()
    with pytest.raises(RuntimeError, match="the log-sum-exp was changed"):
        weights.entropy()


def test_changed_values_do_not_matter() -> None:
    arguments = matrices.qkv()
    weights = lazy(arguments)
    expected = weights.dense()
    arguments["value"].zero_()
    assert torch.equal(weights.dense(), expected)


@pytest.mark.parametrize("name", TENSORS)
def test_inference_tensors_are_copied(name: str) -> None:
    """They have no version, so a change could not be seen."""
    with torch.inference_mode():
        extra, _ = TENSORS[name]
        arguments = matrices.qkv() | {key: map_tensors(part, torch.clone) for key, part in extra.items()}
        weights = lazy(arguments)
        expected = weights.dense()
        tensor_of(arguments, name).zero_()
        assert torch.equal(weights.dense(), expected)
        weights.lse.zero_()
        assert torch.equal(weights.dense(), expected)
    assert torch.equal(weights[1].dense(), expected[1])
    assert weights[1].call.q.data_ptr() == weights.call.q[1].data_ptr()


def test_a_summary_of_inference_tensors_keeps_its_log_sum_exp() -> None:
    """It is read later, when a CUDA graph may have run again and written the same memory."""
    with torch.inference_mode():
        weights = lazy(matrices.qkv())
        summary = weights.summary()
        expected = weights.tensors.lse.clone()
        weights.tensors.lse.zero_()
        assert torch.equal(summary.lse, expected)


def test_a_normal_tensor_changed_in_inference_mode_is_detected() -> None:
    arguments = matrices.qkv()
    with torch.inference_mode():
        weights = lazy(arguments)
        arguments["query"].zero_()
    with pytest.raises(RuntimeError, match="the query was changed"):
        weights.entropy()


EXTRAS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": foci.causal},
    "relative": lambda: {"bias": matrices.relative(4)},
    "sink": lambda: {"sink": matrices.sink()},
    "dropout": lambda: {"dropout": 0.5},
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_values_are_not_kept_alive(extra: str) -> None:
    arguments = matrices.qkv() | EXTRAS[extra]()
    weights = lazy(arguments)
    values = [arguments["value"], arguments["bias"].values] if extra == "relative" else [arguments["value"]]
    watched = [StorageWeakRef(tensor.untyped_storage()) for tensor in values]
    assert not any(storage.expired() for storage in watched)
    del arguments, values
    gc.collect()
    assert all(storage.expired() for storage in watched)
    assert weights.entropy().shape == (2, 4, 11)


def test_queries_and_keys_are_references() -> None:
    arguments = matrices.qkv()
    weights = lazy(arguments)
    assert weights.call.q is arguments["query"]
    assert weights.call.k is arguments["key"]


def test_bytes_are_counted_once() -> None:
    x = torch.randn(2, 4, 9, 8)
    weights = foci.attention(x, x, x, return_weights=True)[1]
    assert weights.nbytes == 4 * (x.numel() + 2 * 4 * 9)
    weights = foci.attention(x[:, :, :3], x, x, return_weights=True)[1]
    assert weights.nbytes == 4 * (x.numel() + 2 * 4 * 3)


def test_repeated_bytes_are_not_counted() -> None:
    x, mask = torch.randn(2, 4, 9, 8), torch.ones(9, dtype=torch.bool).expand(2, 4, 9, 9)
    weights = foci.attention(x, x, x, mask=mask, return_weights=True)[1]
    assert weights.nbytes == 4 * (x.numel() + 2 * 4 * 9) + 9


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_every_backend_returns_working_weights(backend: str) -> None:
    arguments = matrices.in_dtype(matrices.qkv(16, 16), torch.float32)
    plan = foci.plan(arguments["query"], arguments["key"], arguments["value"], return_weights=True, backend=backend)
    if plan.chosen is None:
        pytest.skip("; ".join(plan.refusals[backend]))
    weights = lazy(arguments, backend)
    matrices.assert_close(weights.dense(), matrices.truth(arguments), torch.float32)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_changes_to_copies_are_detected_separately(copied: Callable[[Any], Any]) -> None:
    arguments = matrices.qkv() | {"mask": foci.causal, "sink": matrices.sink()}
    arguments["query"] = (arguments["query"].requires_grad_() * 1)[:, :, ::2]
    weights = lazy(arguments)
    before = weights.dense()
    other = copied(weights)
    assert len(pickle.dumps(other)) < other.nbytes + 10_000
    assert not other.entropy().requires_grad
    arguments["query"].detach().add_(1)
    torch.testing.assert_close(other.dense(), before.detach())
    other.tensors.call.q.add_(1)
    with pytest.raises(RuntimeError, match="the query was changed"):
        other.entropy()
    with pytest.raises(RuntimeError, match="the query was changed"):
        copied(weights)
