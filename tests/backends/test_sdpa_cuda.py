"""The log-sum-exp of PyTorch's CUDA kernels in one form; the kernels themselves run in the contract suite."""

import pytest
import torch
from torch import Tensor

import foci
from foci.backends.sdpa.cuda import normalize_lse
from tests.tensors import randn


def queries(count: int) -> Tensor:
    return torch.empty(1, 2, count, 8)


def test_an_lse_without_masked_rows_is_returned_unchanged() -> None:
    flash, cudnn = randn(1, 2, 5), randn(1, 2, 5, 1)
    assert normalize_lse(flash, queries(5), may_mask_rows=False) is flash
    assert torch.equal(normalize_lse(cudnn, queries(5), may_mask_rows=False), cudnn[..., 0])


def test_fully_masked_rows_and_padding_rows_of_the_lse_are_corrected() -> None:
    marked = torch.tensor([1.0, torch.inf, 2.0, torch.inf]).view(1, 1, 4)
    assert normalize_lse(marked, queries(4), may_mask_rows=True).flatten().tolist() == [
        1.0,
        -torch.inf,
        2.0,
        -torch.inf,
    ]
    found = normalize_lse(marked, queries(3), may_mask_rows=False)
    assert found.flatten().tolist() == [1.0, -torch.inf, 2.0]
    assert found.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("q_length", "k_length"), [(64, 64), (50, 50), (64, 48), (33, 80)])
@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exps_on_a_gpu(dtype: torch.dtype, q_length: int, k_length: int, causal: bool) -> None:
    q, k = randn(1, 2, q_length, 16).to("cuda", dtype), randn(1, 2, k_length, 16).to("cuda", dtype)
    mask = foci.causal if causal else None
    with torch.no_grad():
        _, weights = foci.attention(q, k, k, mask=mask, return_weights=True)
        _, truth = foci.attention(q.cpu().double(), k.cpu().double(), k.cpu().double(), mask=mask, return_weights=True)
    torch.testing.assert_close(weights.lse.cpu().double(), truth.lse, atol=1e-2, rtol=1e-2)
