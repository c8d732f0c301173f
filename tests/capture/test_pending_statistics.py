"""Plain calls, of which only the tensors are noted: layers made on first read, statistics of layers together."""

import copy
import gc
import pickle
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import foci
from foci.capture import pending_statistics
from foci.masks.kinds import padding
from foci.weights.weights import Weights
from tests.capture.models import FusedAttention, Stack
from tests.tensors import randn

KEEP = foci.Keep(top=3, picture=4, shares=True, largest_logit=True)


def record(model: Any, x: Tensor, keep: Any = "lazy", **options: Any) -> foci.Record:
    with torch.no_grad(), foci.watch(model, keep=keep) as seen:
        model(x, **options)
    return seen


class Padded(FusedAttention):
    """Attention with a mask of foci, and grouped heads."""

    lengths = torch.tensor([5, 9])

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = self.split(x)
        out = foci.attention(q, k[:, ::2], v[:, ::2], mask=padding(self.lengths) & foci.causal)
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Changing(FusedAttention):
    """Attention that changes its queries after the call."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = (part.clone() for part in self.split(x))
        out = F.scaled_dot_product_attention(q, k, v)
        q.zero_()
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class ChangingValues(FusedAttention):
    """Attention that changes its values after the call."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = (part.clone() for part in self.split(x))
        out = F.scaled_dot_product_attention(q, k, v)
        v.zero_()
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class InferenceKeys(FusedAttention):
    """Attention to keys that were computed in inference mode."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        with torch.inference_mode():
            _, k, v = self.split(x)
        out = F.scaled_dot_product_attention(self.split(x)[0], k, v)
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Scaling(FusedAttention):
    """Attention whose queries are changed in place before and after the call."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = (part.clone() for part in self.split(x))
        out = F.scaled_dot_product_attention(q.mul_(2.0), k, v)
        q.zero_()
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [FusedAttention, Padded])
def test_statistics_of_several_layers_are_computed_in_one_pass(kind: type[FusedAttention]) -> None:
    model, x = Stack(3, kind), randn(2, 9, 16)
    joined: list[int] = []
    compute = foci.Keep.compute

    def count(keep: foci.Keep, weights: Weights) -> dict[str, Tensor]:
        joined.append(weights.shape[1])
        return compute(keep, weights)

    with mock.patch.object(foci.Keep, "compute", count):
        together = record(model, x, KEEP)
    assert joined == [12]
    with mock.patch.object(pending_statistics, "MAX_PENDING_BYTES", {}):
        apart = record(model, x, KEEP)
    for name in apart.layers:
        left, right = together[name].kept, apart[name].kept
        assert left is not None
        assert right is not None
        assert list(left) == list(right)
        for statistic in right:
            torch.testing.assert_close(left[statistic], right[statistic], msg=statistic)
        torch.testing.assert_close(together[name].norms(), apart[name].norms())


@pytest.mark.parametrize("name", ["MAX_PENDING_BYTES", "MAX_PENDING_STATISTICS"])
def test_calls_wait_up_to_a_number_of_bytes(name: str) -> None:
    model, x = Stack(5), randn(2, 9, 16)
    joined: list[int] = []
    compute = foci.Keep.compute
    nbytes = 3 * x.nbytes if name == "MAX_PENDING_BYTES" else KEEP.nbytes(2, 4, 9, 9)

    def count(keep: foci.Keep, weights: Weights) -> dict[str, Tensor]:
        joined.append(weights.shape[1])
        return compute(keep, weights)

    limits = {"cpu": 2 * nbytes}
    with (
        mock.patch.object(foci.Keep, "compute", count),
        mock.patch.object(pending_statistics, name, limits),
    ):
        record(model, x, KEEP)
    assert joined == [8, 8, 4]


def test_queries_that_were_changed_before_are_computed_at_once() -> None:
    model, x = Stack(2, Scaling), randn(1, 9, 16)
    assert record(model, x, KEEP).unseen == []


def test_a_layer_whose_queries_were_changed_after_the_call_is_unseen() -> None:
    model, x = Stack(2, Changing), randn(1, 9, 16)
    seen = record(model, x, KEEP)
    assert not seen.layers
    assert len(seen.unseen) == 2
    assert "changed in place after the call" in seen.unseen[0]
    with pytest.raises(RuntimeError, match="the query was changed in place"):
        record(model, x)["L0"].entropy()


@pytest.mark.parametrize("passes", [1, 2])
def test_values_that_were_changed_after_the_call_have_no_norms(passes: int) -> None:
    model, x = Stack(2, ChangingValues), randn(1, 9, 16)
    with torch.no_grad(), foci.watch(model) as seen:
        for _ in range(passes):
            model(x)
    assert seen["L0"].entropy().shape == (1, 4, 9)
    with pytest.raises(ValueError, match="changed in place after the call"):
        seen["L0"].norms()
    assert "values were changed in place after the call" in record(model, x, KEEP).unseen[0]
    assert record(model, x, foci.Keep(values=False)).unseen == []


@pytest.mark.parametrize("keep", ["lazy", KEEP])
def test_keys_of_inference_mode(keep: Any) -> None:
    model, plain, x = Stack(1, InferenceKeys), Stack(1), randn(1, 9, 16)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(record(model, x, keep)["L0"].entropy(), record(plain, x, keep)["L0"].entropy())


@pytest.mark.parametrize("keep", ["lazy", KEEP])
def test_layers_are_made_when_they_are_first_read(keep: Any) -> None:
    model, ids = Stack(2), torch.arange(6)[None]
    seen = record(model, ids, keep)
    assert "layers" not in vars(seen)
    assert (seen.calls, seen.unseen) == (2, [])
    entropy = seen["L1"].entropy()
    assert "layers" in vars(seen)
    torch.testing.assert_close(record(model, ids, keep)["L1"].entropy(), entropy)
    assert seen.labels["input"].texts == (("0", "1", "2", "3", "4", "5"),)


def test_labels_are_those_of_the_pass_even_if_the_ids_are_written_again() -> None:
    model, ids = Stack(2), torch.arange(6)[None]
    seen = record(model, ids)
    ids.zero_()
    assert seen.labels["input"].texts == (("0", "1", "2", "3", "4", "5"),)


def test_a_record_that_was_not_read_keeps_neither_the_model_nor_a_cycle() -> None:
    model = Stack(2)
    followed = weakref.ref(model)
    gc.disable()
    try:
        seen = record(model, randn(1, 9, 16))
        del model
        gc.collect()
        assert followed() is None
        query = weakref.ref(next(iter(seen.layers.values())).weights.tensors.call.q)  # type: ignore[union-attr]
        gc.collect()
        again = record(Stack(2), randn(1, 9, 16))
        del seen, again
        assert query() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda seen: pickle.loads(pickle.dumps(seen))])
def test_copies_of_a_record_that_was_not_read_have_its_layers(copied: Any) -> None:
    seen = record(Stack(2), randn(1, 9, 16))
    torch.testing.assert_close(copied(seen)["L1"].entropy(), seen["L1"].entropy())


def test_a_second_pass_and_a_second_call_are_layers_of_their_own() -> None:
    model, x = Stack(2), randn(1, 9, 16)
    with torch.no_grad(), foci.watch(model) as seen:
        model(x)
        model(x[:, :5])
        model.blocks[0](x)
    assert list(seen.layers) == ["blocks.0", "blocks.1", "blocks.0#2", "blocks.1#2", "blocks.0#3"]
    assert seen["blocks.1#2"].shape == (1, 4, 5, 5)


def test_an_attribute_that_a_record_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'heads_of'"):
        record(Stack(1), randn(1, 9, 16)).heads_of  # noqa: B018
