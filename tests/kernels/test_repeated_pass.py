"""Statistics and rows of later calls of a kind: the compiled kernels with new addresses. On a CPU they run in Triton's
interpreter.
"""

from __future__ import annotations

import ctypes
import pickle
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import foci
from foci.gpu.launcher import KernelLaunch, LaunchPlan, pick_addresses
from foci.statistics import cuda
from foci.statistics.cuda import arguments, entries, launches, plan, repeated_pass
from foci.statistics.cuda.repeated_pass import PassOutputs
from foci.statistics.request import Request
from tests.kernels.statistics_cases import DEVICE
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory
from tests.kernels.statistics_cases import nothing_kept as nothing_kept

ALL = Request(True, True, (4, 5, "mean"), 3, True, True)
ONE = Request(entropy=True)
REQUESTS = [ALL, Request(top=2, int32_keys=True), Request(received=True, picture=(4, 4, "max"))]


def tensor_at(address: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose memory starts at an address; the interpreter reads and writes beyond its end."""
    return torch.frombuffer((ctypes.c_char * 16).from_address(address), dtype=dtype)


class AddressLaunch:
    """Stands for the launch of a compiled kernel: takes addresses and runs the interpreter."""

    def __init__(self, launch: KernelLaunch, dtypes: dict[str, torch.dtype]) -> None:
        self.launch, self.dtypes = launch, dtypes
        self.count = 0

    def __call__(self, *given: Any) -> None:
        self.count += 1
        names = self.launch.tensors
        tensors = [
            tensor_at(address, self.dtypes[name]) if isinstance(address, int) else address
            for name, address in zip(names, given, strict=False)
        ]
        self.launch.kernel[self.launch.grid](*tensors, *given[len(names) :], **self.launch.options)


class Compiler:
    """Makes launch plans keep their launches, as on a GPU, and counts those that go through Triton."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.through_triton = 0
        true = LaunchPlan.launch_through_triton

        def launch(plan: LaunchPlan, tensors: dict[str, Any], allocate_late: Any, aligned: bool) -> None:
            self.through_triton += 1
            dtypes: dict[str, torch.dtype] = defaultdict(lambda: torch.float32)
            dtypes |= {name: x.dtype for name, x in tensors.items()}
            dtypes |= plan.workspace.dtypes | plan.last_workspace.dtypes
            late = allocate_late and (lambda: note_dtypes(allocate_late(), dtypes))
            true(plan, tensors, late, aligned)
            plan.compiled_launches = [
                (AddressLaunch(each, dtypes), pick_addresses(each.tensors), each.scalars) for each in plan.launches
            ]

        monkeypatch.setattr(LaunchPlan, "launch_through_triton", launch)


def note_dtypes(tensors: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    dtypes |= {name: x.dtype for name, x in tensors.items()}
    return tensors


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Takes CPU tensors for CUDA tensors."""
    monkeypatch.setattr(launches, "SHORT_KEYS", 64)
    monkeypatch.setattr(repeated_pass, "REPEATED_PASSES", {})
    monkeypatch.setattr(arguments, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(cuda, "refuses", lambda call, request=None, averaged=False: [])
    return Compiler(monkeypatch)


def make_weights(seed: int = 0, dtype: torch.dtype = torch.float32, tokens: int = 40, **options: Any) -> foci.Weights:
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, h, tokens, 16, generator=make).to(DEVICE, dtype) for h in (4, 2, 2))
    options |= {} if DEVICE == "cuda" else {"backend": "reference"}
    _, weights = foci.attention(q, k, v, return_weights=True, **options)
    return weights


def on_full_path(weights: foci.Weights, request: Request) -> dict[str, Tensor]:
    return cuda.compute_statistics(weights.call, weights.tensors.lse, request)


@pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU")
@pytest.mark.parametrize("wanted", REQUESTS, ids=range(len(REQUESTS)))
@pytest.mark.parametrize(("short", "mask"), [(True, None), (False, foci.causal)])
def test_later_calls_equal_the_full_path(
    short: bool, mask: Any, wanted: Request, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "SHORT_KEYS", 64 if short else 0)
    found = []
    for seed in range(3):
        weights = make_weights(seed, torch.float16, mask=mask)
        found.append((weights, weights._compute(wanted)))
    assert compiler.through_triton == 1
    assert [type(results) for _, results in found[1:]] == [PassOutputs] * 2
    # Later calls leave the results of earlier ones alone.
    for weights, results in found[1:]:
        expected = on_full_path(weights, wanted)
        assert {*results} == {*expected}
        assert len(results) == len(expected)
        for name, tensor in expected.items():
            assert torch.equal(results[name], tensor), name
            assert (results[name].dtype, results[name].stride()) == (tensor.dtype, tensor.stride())
            assert results[name] is results[name]


@pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU")
def test_other_layouts_and_other_calls_take_the_full_path(compiler: Compiler) -> None:
    make_weights(mask=foci.causal)._compute(ONE)
    assert len(repeated_pass.REPEATED_PASSES) == 1
    make_weights(mask=foci.causal, tokens=32)._compute(ONE)
    make_weights(mask=foci.causal)._compute(Request(distance=True))
    assert len(repeated_pass.REPEATED_PASSES) == 3
    for options in ({"mask": foci.window(3)}, {"bias": foci.ALiBi()}):
        assert not isinstance(make_weights(**options)._compute(ONE), PassOutputs)
        assert not isinstance(make_weights(**options)._compute(ONE), PassOutputs)
    shifted = make_weights(mask=foci.causal.at(3))
    for _ in range(2):
        assert not isinstance(shifted._compute(ONE), PassOutputs)
    weights = make_weights(mask=foci.causal)
    room = torch.empty(weights.tensors.call.q.numel() + 1)[1:].view(weights.tensors.call.q.shape)
    weights.tensors.call.q = room.copy_(weights.tensors.call.q)
    assert not isinstance(repeated_pass.run_repeated_pass(weights.tensors.call, weights.tensors.lse, ONE), PassOutputs)


@pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU")
def test_a_softcap_is_a_float_for_the_kernels(compiler: Compiler) -> None:
    """They would be compiled again for an int."""
    make_weights(score=foci.Dot(softcap=2))._compute(ONE)
    ((options, *_),) = plan.PASS_CACHE
    assert options[:2] == (0.25, 2.0)
    assert [type(number) for number in options[:2]] == [float, float]


@pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU")
def test_large_passes_free_their_workspace(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_pass, "MAX_BYTES", 100)
    for _ in range(2):
        assert not isinstance(make_weights()._compute(ONE), PassOutputs)
    assert [*repeated_pass.REPEATED_PASSES.values()] == [None]


@pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU")
def test_outputs_that_are_changed_in_place_do_not_affect_each_other(compiler: Compiler) -> None:
    make_weights()._compute(ALL)
    results = make_weights()._compute(ALL)
    factor = torch.ones((), requires_grad=True)
    loss = (results["entropy"] * factor).sum()
    received = results["received"].clone()
    results["distance"].zero_()
    loss.backward()
    assert torch.equal(results["received"], received)
    assert results["entropy"].untyped_storage().data_ptr() == results["received"].untyped_storage().data_ptr()
    # A single output has memory of its own, as operators must return it.
    for _ in range(2):
        alone = make_weights()._compute(ONE)["entropy"]
    assert alone.untyped_storage().nbytes() == 4 * alone.numel()


@pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU")
def test_a_summary_of_a_later_call_equals_that_of_the_first(compiler: Compiler) -> None:
    first = make_weights(mask=foci.causal).summary(top=3)
    later = make_weights(mask=foci.causal).summary(top=3)
    assert compiler.through_triton == 1
    assert repr(first) == repr(later)
    copied = pickle.loads(pickle.dumps(make_weights(mask=foci.causal).summary(top=3)))
    for name in first.__dataclass_fields__:
        for other in (later, copied):
            pairs = zip(getattr(first, name), getattr(other, name), strict=True)
            assert all(torch.equal(one, two) for one, two in pairs), name
    assert not later.sink_mass.any()
    with pytest.raises(AttributeError, match="no attribute 'entropies'"):
        later.entropies  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU")
def test_a_summary_does_not_hold_query_and_key(compiler: Compiler) -> None:
    make_weights().summary()
    weights = make_weights()
    query, summary = weakref.ref(weights.tensors.call.q), weights.summary()
    del weights
    assert query() is None
    assert summary.entropy.shape == (1, 4, 40)


class CompiledRow:
    """Stands for the kernel of rows and its compiled form."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.by_address = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **options: Any) -> Any:
            if isinstance(given[0], int):
                self.by_address += 1
                given = (*(tensor_at(address, torch.float32) for address in given[:9]), *given[9:])
            self.kernel[grid](*given, num_warps=4)
            return self

        return launch


@pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU")
@pytest.mark.parametrize("mask", [None, foci.causal])
def test_later_rows_equal_the_dense_matrix(mask: Any, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    from foci.kernels.statistics.entries import compute_entries

    kernel = CompiledRow(compute_entries)
    monkeypatch.setattr("foci.kernels.statistics.entries.compute_entries", kernel)
    monkeypatch.setattr(entries, "COMPILED_KERNELS", {})
    monkeypatch.setattr(entries, "ROW_LAUNCHES", {})
    monkeypatch.setattr(entries, "address_failure", lambda index: None)
    for seed, index in enumerate([(0, 3, 5), (0, -1, 39), (-1, 0, 0), (0, 2, -40)]):
        weights = make_weights(seed, mask=mask)
        expected = weights._entries(slice(None), slice(None))[index]
        torch.testing.assert_close(weights[index], expected, rtol=2e-5, atol=2e-6)
    assert kernel.by_address == 3
    assert len(entries.ROW_LAUNCHES) == 1
    with pytest.raises(IndexError):
        weights[0, 4, 0]
    weights.tensors.call.q.add_(1)
    with pytest.raises(RuntimeError, match="the query was changed in place"):
        weights[0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 512])
def test_later_calls_on_a_gpu(tokens: int) -> None:
    """Later calls, and those of a captured graph, return what the full path returns."""
    repeated_pass.REPEATED_PASSES.clear()
    kept = []
    for seed in range(4):
        weights = make_weights(seed, torch.bfloat16, tokens, mask=foci.causal)
        kept.append((weights, weights._compute(ALL), weights[0, 3, tokens - 1]))
    assert isinstance(kept[-1][1], PassOutputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = weights._compute(ALL)
    graph.replay()
    kept.append((weights, captured, weights[0, 3, tokens - 1]))
    for each, results, row in kept:
        expected = on_full_path(each, ALL)
        assert all(torch.equal(results[name], expected[name]) for name in expected)
        true = each._entries(slice(None), slice(None))[0, 3, tokens - 1]
        torch.testing.assert_close(row, true, rtol=1e-4, atol=1e-5)
