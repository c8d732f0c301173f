"""Columns of the weights of plain calls by one kernel against float64. Runs in Triton's interpreter on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foci.capture.text_weights import KnownCall
from foci.statistics.cuda import arguments, columns
from foci.weights.slices import compute_columns_of_short_rows
from tests.kernels.statistics_cases import DEVICE, within_nan
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory

# Queries, keys, width, rows and columns.
SHAPES = [
    (33, 77, 20, range(2, 4), range(11)),
    (5, 7, 3, range(4), range(2, 7)),
    (1, 1, 1, range(3, 4), range(1)),
    (16, 40, 100, range(1), range(20, 40)),
    (40, 16, 64, range(4), range(16)),
]


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes CPU tensors for CUDA tensors, and forgets earlier launches."""
    monkeypatch.setattr(columns, "COLUMNS_LAUNCHES", {})
    monkeypatch.setattr(arguments, "is_on_gpu", lambda x: True)


def make_inputs(queries: int, keys: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 3, length, width, generator=make) for length in (queries, keys))
    return within_nan(q.mul(3).to(DEVICE, dtype)), within_nan(k.to(DEVICE, dtype))


def truth_of(q: Tensor, k: Tensor, rows: range, keys: range) -> Tensor:
    logits = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    return logits.softmax(-1)[rows.start : rows.stop, ..., keys.start : keys.stop]


@pytest.mark.parametrize(("queries", "keys", "width", "rows", "chosen"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_columns_equal_the_dense_matrix(
    queries: int, keys: int, width: int, rows: range, chosen: range, dtype: torch.dtype
) -> None:
    q, k = make_inputs(queries, keys, width, dtype)
    for _ in range(2):
        found = columns.compute_columns(q, k, rows, chosen, torch.float32)
        torch.testing.assert_close(found.double(), truth_of(q, k, rows, chosen), rtol=1e-5, atol=1e-6)
    assert len(columns.COLUMNS_LAUNCHES) == 1
    rounded = columns.compute_columns(q, k, rows, chosen, torch.float16)
    torch.testing.assert_close(rounded, found.half(), rtol=1e-3, atol=1e-6)


def test_logits_beyond_the_range_of_the_exponential() -> None:
    q, k = make_inputs(20, 18, 8)
    q, k = q * 100, k * 100
    found = columns.compute_columns(q, k, range(4), range(3, 9), torch.float32)
    torch.testing.assert_close(found.double(), truth_of(q, k, range(4), range(3, 9)), rtol=1e-2, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_rows_stay_nan() -> None:
    q, k = make_inputs(4, 6, 8)
    q = q.clone()
    q[1, 2, 3, 0] = torch.nan
    found = columns.compute_columns(q, k, range(4), range(2), torch.float32)
    assert found[1, 2, 3].isnan().all()
    assert found.isnan().sum() == 2


class FakeKernel:
    """Stands for the kernel and its compiled forms: notes the launches through Triton, and those with addresses."""

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.compiled: list[tuple[Any, ...]] = []
        self.replayed: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            (self.compiled if options else self.replayed).append((grid, *arguments))
            return self

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    from foci.kernels.statistics.columns import compute_columns

    fake = FakeKernel(compute_columns.arg_names)
    monkeypatch.setattr("foci.kernels.statistics.columns.compute_columns", fake)
    monkeypatch.setattr("foci.gpu.launcher.address_failure", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return fake


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernel is a fake one")
def test_a_compiled_kernel_is_launched_with_addresses(kernel: FakeKernel) -> None:
    """With the scalars of its first launch; a tensor of another layout or alignment goes through Triton."""
    memory = torch.randn(2 * 4 * 8 * 16 + 1)
    q, unaligned = (memory[start:][: 2 * 4 * 8 * 16].view(2, 4, 8, 16) for start in (0, 1))
    for _ in range(3):
        out = columns.compute_columns(q, q, range(1, 2), range(3), torch.float32)
    assert (out.shape, len(kernel.compiled), len(kernel.replayed)) == ((1, 4, 8, 3), 1, 2)
    assert kernel.replayed[1][1:] == (q.data_ptr(), q.data_ptr(), out.data_ptr(), *kernel.compiled[0][4:])
    columns.compute_columns(q, unaligned, range(1, 2), range(3), torch.float32)
    columns.compute_columns(q, q, range(2), range(3), torch.float32)
    columns.compute_columns(q.transpose(1, 2), q.transpose(1, 2), range(1, 2), range(3), torch.float32)
    assert (len(kernel.compiled), len(kernel.replayed)) == (4, 2)


@pytest.mark.parametrize("chosen", [slice(1, 4), [0, 2, 5]])
@pytest.mark.parametrize("rows", [None, slice(1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_rows_use_the_kernel_where_it_supports_them(
    chosen: slice | list[int], rows: slice | None, dtype: torch.dtype
) -> None:
    q, k = make_inputs(9, 7, 8, dtype)
    part = slice(None) if rows is None else rows
    expected = (q.double() @ k.double().mT * 8**-0.5).softmax(-1)[part][..., chosen]
    found = compute_columns_of_short_rows(q, k, chosen, rows, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert len(columns.COLUMNS_LAUNCHES) == (isinstance(chosen, slice) and dtype == torch.float32)


def test_long_calls_need_keys_that_the_kernel_takes() -> None:
    """The kernel takes keys that follow each other; whole rows of a long call would not fit into memory."""
    q, k = make_inputs(9, 7, 8)
    log: Any = None
    assert KnownCall(log, slice(1, 4), is_short=False).has_room_for(q, k)
    assert KnownCall(log, [0, 2, 5], is_short=True).has_room_for(q, k)
    assert not KnownCall(log, [0, 2, 5], is_short=False).has_room_for(q, k)


def test_what_the_kernel_does_not_support() -> None:
    q, k = make_inputs(9, 7, 8)
    wide = torch.zeros(4, 3, 7, 257, device=DEVICE)
    for queries, keys in [
        (q, k.half()),
        (q, k[:, :1]),
        (q, k[..., :4]),
        (q, k[:, :, :0]),
        (q.double(), k.double()),
        (q.mT.contiguous().mT, k),
        (wide, wide),
    ]:
        assert columns.compute_columns(queries, keys, range(4), range(2), torch.float32) is None
