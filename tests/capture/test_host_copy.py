"""Statistics are copied in one buffer and restored with their dtypes and shapes."""

import torch

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
