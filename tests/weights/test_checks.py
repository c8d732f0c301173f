"""Every lazy matrix refuses the same wrong arguments with the same words."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import foci
from foci.record.dense import DenseWeights
from foci.record.step_mean import StepMean
from foci.record.window_weights import WindowWeights
from tests.tensors import qkv


def make_matrices() -> dict[str, Any]:
    """One matrix (2, 4, 4, 4) of each kind."""
    windows = torch.rand(2, 4, 2, 2, 2).softmax(-1)
    dense = DenseWeights(torch.rand(2, 4, 4, 4).softmax(-1))
    return {
        "weights": foci.attention(*qkv(4, 4), return_weights=True)[1],
        "dense": dense,
        "mean": StepMean([dense, dense]),
        "windows": WindowWeights(windows, torch.arange(4).view(2, 2), 4),
    }


@pytest.mark.parametrize("kind", ["weights", "dense", "mean", "windows"])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x.mean("keys"), "over must be 'heads', got 'keys'"),
        (lambda x: x.top(5), "k must be an int from 1 to the 4 keys, got 5"),
        (
            lambda x: x.picture(5, 1, "max"),
            "rows must be from 1 to the 4 queries and columns from 1 to the 4 keys, got 5",
        ),
        (lambda x: x.picture(1, 1, "sum"), "reduce must be 'mean' or 'max', got 'sum'"),
    ],
)
def test_wrong_arguments_are_refused(kind: str, call: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        call(make_matrices()[kind])


@pytest.mark.parametrize("kind", ["weights", "mean", "windows"])
def test_a_dense_matrix_above_the_limit_is_refused(kind: str) -> None:
    matrix = make_matrices()[kind]
    with pytest.raises(ValueError, match=r"takes 512 bytes, above the limit of 511 bytes: use slices"):
        matrix.dense(limit=511)
    with pytest.raises(TypeError, match="limit must be a number of bytes"):
        matrix.dense(limit="1 GiB")
