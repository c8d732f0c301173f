"""Later calls of a kind skip the checks: what counts as the same kind, and the same results as the full path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import foci
from foci import backends
from foci.backends import repeated_calls
from foci.gpu.launcher import LaunchPlan, pick_addresses
from foci.masks.kernel_inputs import describe_mask

IDS = torch.tensor([0, 0, 1, 1, 1, 2])
LENGTHS = torch.tensor([6, 2])


@pytest.fixture(autouse=True)
def _no_known_calls() -> Iterator[None]:
    repeated_calls.REPEATED_CALLS.clear()
    yield
    repeated_calls.REPEATED_CALLS.clear()


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (foci.window(3), ()),
        (foci.causal & foci.prefix(4), ()),
        (foci.padding(LENGTHS), ("lengths",)),
        (foci.causal & foci.documents(IDS) & foci.padding(LENGTHS), ("query_ids", "key_ids", "lengths")),
        (foci.causal | foci.prefix(3), ()),
        (foci.prefix(3) | foci.causal.at(2), ()),
        (foci.causal & torch.ones(6, 6).bool(), ("dense",)),
    ],
    ids=repr,
)
def test_a_mask_is_described_by_its_numbers_and_tensors(mask: foci.Mask, names: tuple[str, ...]) -> None:
    tensors: dict[str, Tensor] = {}
    assert describe_mask(mask, tensors) is not None
    assert tensors.keys() == {*names}


@pytest.mark.parametrize(
    "mask",
    [
        foci.window(1) | foci.prefix(3),
        ~foci.window(2),
        foci.padding(LENGTHS) & foci.padding(LENGTHS, side="left"),
        (foci.causal & torch.ones(6, 6).bool()) & torch.ones(6, 6).bool(),
        foci.mask_function(lambda b, h, i, j: i >= j),
    ],
    ids=repr,
)
def test_other_masks_take_the_full_path(mask: foci.Mask) -> None:
    assert describe_mask(mask, {}) is None


def test_masks_of_other_numbers_are_other_kinds() -> None:
    masks = [foci.window(3), foci.window(4), foci.window(3, 1), foci.causal, foci.causal.at(2), foci.prefix(3)]
    masks += [foci.causal | foci.prefix(3), foci.causal | foci.prefix(4), foci.causal.at(2) | foci.prefix(3)]
    masks += [foci.padding(LENGTHS), foci.padding(LENGTHS, side="left"), foci.window(3) & foci.causal]
    assert len({describe_mask(mask, {}) for mask in masks}) == len(masks)
    assert describe_mask(foci.window(3), {}) == describe_mask(foci.window(3), {})


class FakeLaunches:
    """Stands for compiled kernels: remembers the addresses of each launch by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[dict[str, int]] = []
        monkeypatch.setattr(LaunchPlan, "__call__", lambda plan, tensors: self.compile_plan(plan, tensors))
        monkeypatch.setattr(repeated_calls, "is_eager_inference", lambda q, k, v: not q.requires_grad)
        monkeypatch.setattr("foci.backends.choose_backend", lambda call, name: repeated_calls.triton)

    def compile_plan(self, plan: LaunchPlan, tensors: dict[str, Tensor]) -> None:
        for launch in plan.launches:
            names = launch.tensors

            def compiled(*arguments: Any, names: tuple[str, ...] = names) -> None:
                self.launched.append(dict(zip(names, arguments, strict=False)))

            plan.compiled_launches.append((compiled, pick_addresses(names), launch.scalars))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> FakeLaunches:
    return FakeLaunches(monkeypatch)


def test_a_later_call_passes_its_own_addresses(launches: FakeLaunches) -> None:
    for lengths in (torch.tensor([20, 3]), torch.tensor([7, 9])):
        q, k, v = (torch.randn(2, 4, 20, 16) for _ in range(3))
        out = foci.attention(q, k, v, mask=foci.causal & foci.padding(lengths))
    assert len(repeated_calls.REPEATED_CALLS) == 1
    check, launch = launches.launched
    assert check == {"lengths": lengths.data_ptr()}
    given = {"q": q, "k": k, "v": v, "lengths": lengths, "out": out}
    assert {name: launch[name] for name in given} == {name: x.data_ptr() for name, x in given.items()}
    assert launch["log_sums"] - launch["peaks"] >= 2 * 4 * 20 * 4


def test_documents_have_a_launch_of_their_own_and_share_its_workspace(launches: FakeLaunches) -> None:
    q = torch.randn(1, 2, 6, 16)
    for _ in range(2):
        foci.attention(q, q, q, mask=foci.documents(IDS))
    ranges, forward = launches.launched
    assert ranges["document_ranges"] == forward["document_ranges"] not in {forward["peaks"], forward["log_sums"]}
    assert ranges["query_ids"] == ranges["key_ids"] == IDS.data_ptr()


def test_a_bool_tensor_is_passed_by_its_address(launches: FakeLaunches) -> None:
    q = torch.randn(2, 4, 20, 16)
    for _ in range(2):
        entries = torch.ones(20, 20).bool().tril()
        foci.attention(q, q, q, mask=entries)
    (launch,) = launches.launched
    assert launch["dense"] == entries.data_ptr()


def test_masks_that_are_converted_to_key_ranges_take_the_full_path(launches: FakeLaunches) -> None:
    q = torch.randn(2, 4, 20, 16)
    for _ in range(2):
        foci.attention(q, q, q, mask=(foci.causal | foci.prefix(5)) & foci.window(3, 2))
    assert list(repeated_calls.REPEATED_CALLS.values()) == [None]
    assert not launches.launched


def test_other_layouts_are_other_kinds(launches: FakeLaunches) -> None:
    q = torch.randn(2, 4, 20, 16)
    for x in (q, q.transpose(1, 2).contiguous().transpose(1, 2), q.half(), q[:1], q[:, :, :10]):
        foci.attention(x, x, x, mask=foci.window(3))
        foci.attention(x, x, x, mask=foci.window(3))
    assert len(repeated_calls.REPEATED_CALLS) == len(launches.launched) == 5


def part_of_projection(value_width: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (2, 4, 20, 16 or the width) as parts of one projection: no dense tensors."""
    parts = torch.randn(2, 20, 4, 32 + value_width, **options).transpose(1, 2).split([16, 16, value_width], -1)
    return parts[0], parts[1], parts[2]


@pytest.mark.parametrize("value_width", [16, 32])
def test_later_outputs_have_the_layout_of_the_first(launches: FakeLaunches, value_width: int) -> None:
    first, second = (foci.attention(*part_of_projection(value_width), mask=foci.window(3)) for _ in range(2))
    assert launches.launched
    assert (second.shape, second.stride()) == (first.shape, first.stride())


def test_an_address_that_is_not_aligned_takes_the_full_path(launches: FakeLaunches) -> None:
    room = torch.randn(2 * 4 * 20 * 16 + 1)
    q, shifted = room[:-1].view(2, 4, 20, 16), room[1:].view(2, 4, 20, 16)
    for x in (q, q, shifted):
        repeated = backends.run_repeated_call(x, x, x, foci.Dot(), foci.window(3))
    assert repeated is None
    assert len(launches.launched) == 1


def test_gradients_and_other_scores_take_the_full_path(launches: FakeLaunches) -> None:
    q = torch.randn(2, 4, 20, 16)
    assert backends.run_repeated_call(q, q, q, foci.Cosine(10.0), None) is None
    learned = q.clone().requires_grad_()
    assert backends.run_repeated_call(learned, learned, learned, foci.Dot(), foci.window(3)) is None
    assert not repeated_calls.REPEATED_CALLS


def test_tensors_on_a_cpu_take_the_full_path() -> None:
    q = torch.randn(2, 4, 20, 16)
    assert backends.run_repeated_call(q, q, q, foci.Dot(), foci.window(3)) is None
    assert not repeated_calls.REPEATED_CALLS


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["window", "padding", "documents", "joined", "softcap", "prefix", "dense"])
def test_later_calls_equal_the_reference_on_a_gpu(kind: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, 4, 70, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        lengths = torch.randint(1, 71, (2,), device="cuda")
        ids = torch.randint(0, 3, (2, 70), device="cuda").sort(-1).values
        mask, score = {
            "window": (foci.window(9), foci.Dot()),
            "padding": (foci.padding(lengths), foci.Dot()),
            "documents": (foci.documents(ids), foci.Dot()),
            "joined": (foci.causal & foci.documents(ids) & foci.padding(lengths), foci.Dot()),
            "softcap": (None, foci.Dot(softcap=5.0)),
            "prefix": (foci.causal | foci.prefix(9), foci.Dot()),
            "dense": (torch.rand(70, 70, device="cuda") < 0.5, foci.Dot()),
        }[kind]
        found = foci.attention(q, k, v, mask=mask, score=score)
        true = foci.attention(*(x.double() for x in (q, k, v)), mask=mask, score=score, backend="reference")
        torch.testing.assert_close(found.double(), true, atol=2e-2, rtol=2e-2)
    (known,) = repeated_calls.REPEATED_CALLS.values()
    assert known is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value_width", [16, 32])
def test_later_calls_with_parts_of_a_projection_equal_the_reference_on_a_gpu(
    value_width: int, dtype: torch.dtype
) -> None:
    for _ in range(3):
        q, k, v = part_of_projection(value_width, device="cuda", dtype=dtype)
        found = foci.attention(q, k, v, mask=foci.window(3))
        true = foci.attention(*(x.double() for x in (q, k, v)), mask=foci.window(3), backend="reference")
        torch.testing.assert_close(found.double(), true, atol=2e-2, rtol=2e-2)
    (known,) = repeated_calls.REPEATED_CALLS.values()
    assert known is not None
