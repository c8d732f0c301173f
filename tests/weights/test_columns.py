"""The columns of plain calls, computed in a few operations, against entries of the same matrix."""

import pytest
import torch

import foci
from foci.record.kept import Keep, TextPositions
from foci.weights.slices import compute_columns, has_plain_columns
from tests.tensors import randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("sink", [False, True])
def test_columns_equal_entries(dtype: torch.dtype, sink: bool) -> None:
    q, k = randn(2, 6, 9, 8).to(dtype), randn(2, 3, 7, 8, seed=1).to(dtype)
    sinks = {"sink": torch.linspace(-1, 1, 6)} if sink else {}
    _, weights = foci.attention(q, k, k, return_weights=True, **sinks)
    assert has_plain_columns(weights.call, 3)
    found = compute_columns(weights.call, weights.tensors.lse, slice(2, 5))
    entries = weights[..., 2:5]
    assert isinstance(entries, torch.Tensor)
    torch.testing.assert_close(found, entries)
    kept = Keep(keys="text").compute_text(weights, TextPositions((), (2, 3, 4)))["key_weights"]
    torch.testing.assert_close(kept, entries.to(kept.dtype))


def test_other_calls_are_computed_entry_by_entry() -> None:
    q = randn(1, 2, 9, 8)
    for arguments in ({"mask": foci.causal}, {"bias": foci.ALiBi()}, {"score": foci.Dot(softcap=2.0)}):
        _, weights = foci.attention(q, q, q, return_weights=True, **arguments)  # type: ignore[arg-type]
        assert not has_plain_columns(weights.call, 2)
        kept = Keep(keys="text").compute_text(weights, TextPositions((), (1, 2)))["key_weights"]
        torch.testing.assert_close(kept, weights.dense()[..., 1:3])
