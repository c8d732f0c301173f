"""Rows of the weights by one kernel against the dense matrix in float64. Runs in Triton's interpreter on a CPU."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import foci
from foci.arguments import Call
from foci.statistics import cuda
from foci.statistics.cuda import arguments, entries
from foci.weights.indexing import to_range
from tests.kernels.statistics_cases import DEVICE
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory

LENGTHS = torch.tensor([40, 17], device=DEVICE)
IDS = (torch.arange(40, device=DEVICE) // 13).expand(2, 40)
DENSE = torch.rand(2, 1, 40, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.4
ARGUMENTS = {
    "full": {},
    "causal": {"mask": foci.causal},
    "window": {"mask": foci.causal & foci.window(5)},
    "outside a window": {"mask": ~foci.window(5)},
    "padding": {"mask": foci.padding(LENGTHS)},
    "documents": {"mask": foci.causal & foci.documents(IDS)},
    "dense": {"mask": DENSE},
    "alibi": {"mask": foci.causal, "bias": foci.ALiBi()},
    "softcap": {"score": foci.Dot(softcap=2.0)},
    "sink": {"mask": foci.padding(torch.tensor([40, 0], device=DEVICE)), "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}
INDICES = [(0, 3, 5), (1, slice(1, 3), slice(3, 30, 7)), (..., -1, slice(None, None, 3)), (1, 2, -1, 4)]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[range, ...]]:
    """Takes CPU tensors for CUDA tensors, and receives the ranges of each launch."""
    seen: list[tuple[range, ...]] = []
    true = entries.compute_rows

    def recorded(call: Call, lse: torch.Tensor, *ranges: range, **options: object) -> torch.Tensor:
        seen.append(ranges[:4])
        return true(call, lse, *ranges, **options)

    monkeypatch.setattr(entries, "compute_rows", recorded)
    if DEVICE == "cpu":
        monkeypatch.setattr(arguments, "is_on_gpu", lambda x: True)
        monkeypatch.setattr(cuda, "refuses", lambda call: [])
    return seen


def make_weights(name: str, dtype: torch.dtype = torch.float32, width: int = 24) -> foci.Weights:
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 40, width, generator=make).to(DEVICE, dtype) for h in (4, 2, 2))
    arguments = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in ARGUMENTS[name].items()}
    backend = {} if DEVICE == "cuda" else {"backend": "reference"}
    return foci.attention(q, k, v, return_weights=True, **arguments, **backend)[1]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_rows_equal_the_dense_matrix(name: str, on_gpu: list[tuple[range, ...]]) -> None:
    weights = make_weights(name)
    true = weights._entries(slice(None), slice(None)).double()
    for count, index in enumerate(INDICES, 1):
        found = weights[index]
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found.double(), true[index], rtol=2e-5, atol=2e-6)
        assert len(on_gpu) == count
    part = weights[1, 1:3]
    torch.testing.assert_close(part[1, 7].double(), true[1, 2, 7], rtol=2e-5, atol=2e-6)
    assert len(on_gpu) == count + 1


@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 64), (torch.float16, 100), (torch.float32, 3)])
def test_widths_and_half_precision(dtype: torch.dtype, width: int, on_gpu: list[tuple[range, ...]]) -> None:
    weights = make_weights("causal", dtype, width)
    true = weights._entries(slice(None), slice(None))
    torch.testing.assert_close(weights[0, 1, 2:4], true[0, 1, 2:4], rtol=1e-4, atol=1e-5)
    assert len(on_gpu) == 1


def test_what_the_kernel_does_not_compute(on_gpu: list[tuple[range, ...]]) -> None:
    weights = make_weights("causal")
    assert weights[0, 1, 3, 5:5].shape == (0,)
    on_gpu.clear()
    for index in [(0, 1, [3, 4]), (..., slice(None), 0), (slice(None, None, 2), 0, 3)]:
        weights[index]
    weights.mean("heads")[0, 3]
    with pytest.raises(IndexError, match="query indices must be from -40 to 39, got 40"):
        weights[0, 0, 40]
    assert on_gpu == []


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_queries_have_nan_rows(on_gpu: list[tuple[range, ...]]) -> None:
    q = torch.randn(1, 1, 4, 8, device=DEVICE)
    q[0, 0, 2] = torch.nan
    backend = "reference" if DEVICE == "cpu" else None
    weights = foci.attention(q, torch.ones_like(q), q, mask=foci.causal, backend=backend, return_weights=True)[1]
    assert weights[0, 0, 2].isnan().all()
    torch.testing.assert_close(weights[0, 0, 1], torch.tensor([0.5, 0.5, 0.0, 0.0], device=DEVICE))
    assert len(on_gpu) == 2


class FakeKernel:
    """Stands for the kernel and for its compiled forms: counts how often it is compiled, and takes any launch."""

    def __init__(self) -> None:
        self.compiled: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launch(*arguments: object, **options: object) -> object:
            self.compiled += [arguments] if options else []
            return self

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr("foci.kernels.statistics.entries.compute_entries", fake)
    monkeypatch.setattr(entries, "COMPILED_KERNELS", {})
    monkeypatch.setattr(entries, "address_failure", lambda index: None)
    return fake


def test_a_compiled_kernel_is_reused_for_the_same_dtypes_only(kernel: FakeKernel) -> None:
    numbers, kind, float_tensors = (1,), ("kind",), torch.empty(6, 64)
    for dtypes in [(torch.int64, torch.int64), (torch.int64, torch.int32), (torch.int32, torch.int32)]:
        ids = [torch.zeros(4, dtype=dtype) for dtype in dtypes]
        for _ in range(2):
            tensors = [*float_tensors[:4], *ids, *float_tensors[:2], float_tensors[5]]
            entries.launch((1, 1, 1), tensors, numbers, kind)
    assert len(kernel.compiled) == 3


def test_a_softcap_that_is_an_integer_is_passed_as_a_float(kernel: FakeKernel, on_gpu: list[tuple[range, ...]]) -> None:
    """Triton would compile an integer in, and the compiled kernel runs any softcap."""
    q = torch.randn(1, 1, 4, 8, device=DEVICE)
    backend = "reference" if DEVICE == "cpu" else None
    foci.attention(q, q, q, score=foci.Dot(softcap=1), backend=backend, return_weights=True)[1][0, 0, 1]
    (arguments,) = kernel.compiled
    assert 1.0 in [x for x in arguments if isinstance(x, float)]


def test_changed_tensors_are_noticed(on_gpu: list[tuple[range, ...]]) -> None:
    weights = make_weights("full")
    weights.tensors.call.q.add_(1)
    with pytest.raises(RuntimeError, match="the query was changed in place"):
        weights[0, 0, 3]


@pytest.mark.parametrize("item", [10, -11, True, 2.0, None, slice(None, None, -1)])
def test_other_indices_are_not_ranges(item: object) -> None:
    assert to_range(item, 10) is None
