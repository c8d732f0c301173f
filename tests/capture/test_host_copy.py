"""Statistics are copied in one buffer and restored with their dtypes and shapes."""

from types import SimpleNamespace

import pytest
import torch

from foci.capture import host_copy
from foci.capture.host_copy import HostCopier, flatten_tensors, group_by_itemsize, unflatten_tensors

SOME = {
    "entropy": torch.randn(2, 3, 5),
    "keys": torch.arange(-30, 30, dtype=torch.int32).view(2, 3, 5, 2),
    "largest": torch.tensor([[torch.nan, -torch.inf, 0.0], [1.0, 2.0, 3.0]]),
    "strided": torch.randn(2, 5, 3).transpose(1, 2),
    "nothing": torch.empty(2, 0, 4),
    "wide": torch.randn(2, 3, dtype=torch.float64),
    "long": torch.arange(4),
    "half": torch.randn(3, 3).bfloat16(),
    "truth": torch.tensor([True, False]),
    "bytes": torch.tensor([1, 2, 255], dtype=torch.uint8),
}


def test_flattened_tensors_are_restored() -> None:
    groups = group_by_itemsize(SOME)
    assert [set(group) for group in groups] == [
        {"entropy", "keys", "largest", "strided", "nothing"},
        {"wide", "long"},
        {"half"},
        {"truth"},
        {"bytes"},
    ]
    for group in groups:
        row = flatten_tensors(group.values())
        assert row.dim() == 1
        found = unflatten_tensors(group, row.clone())
        assert list(found) == list(group)
        for name, tensor in group.items():
            assert found[name].dtype == tensor.dtype
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_restored_tensors_share_one_buffer() -> None:
    (group,) = group_by_itemsize({name: SOME[name] for name in ("entropy", "keys", "largest")})
    found = unflatten_tensors(group, flatten_tensors(group.values()))
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_cpu_tensors_are_not_copied() -> None:
    found = HostCopier().copy(SOME)
    assert all(found[name] is tensor for name, tensor in SOME.items())
    assert HostCopier().copy({}) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("pinned_bytes", [0, 2**12, 2**28])
def test_copies_from_a_gpu(pinned_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few copies stay in pinned memory; later ones are moved to ordinary memory by a thread."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setattr(host_copy, "MAX_PINNED_BYTES", pinned_bytes)
    copier, batches = HostCopier(batch_bytes=2**11), []
    for number in range(50):
        tensors = {name: (tensor + number if tensor.dtype != torch.bool else tensor) for name, tensor in SOME.items()}
        batches.append((tensors, copier.copy({name: tensor.cuda() for name, tensor in tensors.items()})))
    copier.wait()
    for tensors, copies in batches:
        for name, tensor in tensors.items():
            assert copies[name].device.type == "cpu"
            torch.testing.assert_close(copies[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert batches[-1][1]["entropy"].is_pinned() == (pinned_bytes == 2**28)


def test_copies_are_moved_after_their_event() -> None:
    order: list[str] = []

    class Event:
        def synchronize(self) -> None:
            order.append("done")

    sources, targets = [torch.rand(3), torch.arange(2.0)], [torch.zeros(3), torch.zeros(2)]
    expected, copier = [tensor.clone() for tensor in sources], HostCopier()
    found = copier._move_when_done(sources, Event())
    copier.wait()
    assert order == ["done"]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    host_copy.move_tensors(Event(), sources, targets)
    assert not sources


def test_batches_stay_below_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of one size in pinned memory can be used again."""
    batches: list[int] = []
    copier = HostCopier(batch_bytes=10)

    def start() -> None:
        if copier._collected_bytes:
            batches.append(copier._collected_bytes)
        copier._collected_bytes = 0

    monkeypatch.setattr(copier, "start", start)
    for nbytes in (4, 4, 4, 6, 1, 25, 10, 3):
        copier.copy({"x": SimpleNamespace(device=torch.device("cuda"), nbytes=nbytes)})  # type: ignore[dict-item]
    assert batches == [8, 10, 1, 25, 10]


def test_few_copies_wait_to_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(host_copy, "MAX_MOVES", 2)
    copier, moved = HostCopier(), []
    for number in range(6):
        moved += copier._move_when_done([torch.full((3,), float(number))], Event())
        assert len(copier._moves) <= 2
    copier.wait()
    assert [int(each[0]) for each in moved] == [*range(6)]
