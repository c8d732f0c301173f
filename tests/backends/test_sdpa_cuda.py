"""The log-sum-exp of PyTorch's CUDA kernels in one form; the kernels themselves run in the contract suite."""

import pytest
import torch
from torch import Tensor

import foci
from foci.backends import sdpa
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


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, foci.causal], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_common_calls_with_weights_equal_the_full_path(mask: foci.Mask | None, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 65, 64, device="cuda", dtype=dtype) for _ in range(3))
    out, weights = foci.attention(q, k, v, mask=mask, return_weights=True)
    expected, others = foci.attention(q, k, v, mask=mask, return_weights=True, backend="sdpa")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights.lse, others.lse)
    assert weights.lse.shape == (2, 3, 65)


def test_common_calls_with_weights_run_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a gradient, on tensors that are taken for CUDA tensors."""
    calls = []
    monkeypatch.setattr(sdpa.cuda, "is_default_kernel_fastest", lambda q, k, v, causal: True)
    monkeypatch.setattr(sdpa.cuda, "run_cudnn", lambda q, k, v, causal: calls.append(causal) or (q, q[..., 0]))
    monkeypatch.setattr(sdpa, "is_plain_call", lambda q, k, v, mask: True)
    x, y = CudaLike(), CudaLike(requires_grad=True)
    assert sdpa.run_plain_call_with_lse(x, x, x, foci.causal) is not None
    assert sdpa.run_plain_call_with_lse(x, x, x, None) is not None
    assert sdpa.run_plain_call_with_lse(x, y, x, None) is None
    assert calls == [True, False]


class CudaLike:
    """What the choice of the kernel reads of a tensor."""

    is_cuda, is_cpu = True, False

    def __init__(self, requires_grad: bool = False) -> None:
        self.requires_grad = requires_grad

    def __getitem__(self, index: object) -> "CudaLike":
        return self
