"""Passes are planned for the first call of a kind and replayed for later ones, with other data, in any order."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from foci.statistics.cuda import hopper, launches
from foci.statistics.cuda import plan as triton_statistics
from foci.statistics.cuda.arguments import KernelTensors
from foci.statistics.cuda.plan import launch_statistics
from foci.statistics.request import Request
from tests.cases import mark_most_slow
from tests.kernels.statistics_cases import DEVICE, FETCHED, SMALL, Case, causal, check_top, close, pooled
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory
from tests.kernels.statistics_cases import nothing_kept as nothing_kept

ALL = Request(True, True, (4, 5, "mean"), 3, True, True)
PICTURE_MAX = Request(picture=(5, 4, "max"), received=True, largest_logit=True)


def check(case: Case, wanted: Request, q: Tensor | None = None, k: Tensor | None = None, **options: Any) -> None:
    """Check against the dense reference; q and k may be the same values at other addresses."""
    weights, lse = case.truth()
    q, k, half = case.q if q is None else q, case.k if k is None else k, case.q.dtype != torch.float32
    options = {"config": SMALL} | case.options | options
    got = launch_statistics(q, k, lse.float(), scale=case.scale, request=wanted, **options)
    tolerance = 5e-5 if half else 1e-5 if DEVICE == "cuda" else 3e-6
    if wanted.entropy:
        close(got["entropy"], torch.special.entr(weights).sum(-1), tolerance)
    if wanted.distance:
        close(got["distance"], (weights * case.apart).sum(-1), tolerance * 10)
    if wanted.received:
        close(got["received"], weights.sum(-2), tolerance * 4)
    if wanted.picture:
        # Cells that do not align with tiles sum weights rounded to float16.
        rounding = 5e-4 if half else 1e-4
        torch.testing.assert_close(got["picture"].double(), pooled(weights, *wanted.picture), rtol=rounding, atol=1e-6)
    if wanted.largest_logit:
        close(got["largest_logit"], case.logits().amax((-1, -2)), 5e-5)
    if wanted.top:
        check_top(got, case, wanted.top, tolerance)
        assert got["top_keys"].dtype == (torch.int32 if wanted.int32_keys else torch.int64)


def shifted(x: Tensor) -> Tensor:
    """The same values with the same strides, at an address that is not a multiple of 16."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return room.copy_(x)


@pytest.mark.parametrize(
    "wanted",
    mark_most_slow(
        [ALL, PICTURE_MAX, replace(ALL, top=0), replace(ALL, int32_keys=True), Request(top=3, int32_keys=True)], 2
    ),
)
@pytest.mark.parametrize("config", [SMALL, FETCHED])
def test_later_calls_of_the_same_kind(wanted: Request, config: Any) -> None:
    dtype = torch.float16 if config.use_tma else torch.float32
    for seed in range(3):
        check(causal(heads=(2, 1), queries=24, keys=40, dtype=dtype, seed=seed), wanted, config=config)
    assert len(triton_statistics.PASS_CACHE) == 1


@pytest.mark.slow
def test_each_kind_of_call_has_its_own_pass() -> None:
    """Dtype, strides, mask, request and slopes each have their own plan, in any order."""
    for _ in range(2):
        one, half = causal(seed=1), causal(seed=2, dtype=torch.float16)
        check(one, ALL)
        check(half, ALL)
        check(one, replace(ALL, top=2))
        check(one, ALL, q=one.q.transpose(1, 2).contiguous().transpose(1, 2))
        check(one, ALL, k=one.k.mT.contiguous().mT)
        check(one, ALL, k=shifted(one.k))
        check(one, ALL, q=shifted(one.q))
        open_to_all = Case(seed=3)
        check(open_to_all, ALL)
        dense = Case(seed=4)
        dense.options["dense"] = torch.rand(1, 1, 24, 40, device=DEVICE) < 0.8
        dense.seen &= dense.options["dense"]
        check(dense, ALL)
        sloped = causal(seed=5)
        sloped.options["slopes"] = torch.tensor([0.1, 0.3], device=DEVICE)
        check(sloped, ALL)
    assert len(triton_statistics.PASS_CACHE) == 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_unaligned_tensors(dtype: torch.dtype) -> None:
    """Neither TMA nor kernels compiled for aligned tensors accept these."""
    config = replace(SMALL, use_tma=True)
    for seed in range(4):
        case = causal(width=32, dtype=dtype, seed=seed)
        if seed % 2:
            check(case, ALL, q=shifted(case.q), k=shifted(case.k), config=config)
        else:
            check(case, ALL, config=config)
    assert len(triton_statistics.PASS_CACHE) == 2


@pytest.mark.parametrize("order", [("q", "k"), ("k", "q")])
def test_unaligned_queries_and_keys_are_different_kinds(order: tuple[str, str]) -> None:
    for seed, off in enumerate(order):
        case = causal(width=32, dtype=torch.float16, seed=seed)
        check(case, ALL, **{off: shifted(getattr(case, off))}, config=replace(SMALL, use_tma=True))
    assert len(triton_statistics.PASS_CACHE) == 2


def test_invalid_calls_are_refused_every_time() -> None:
    case = causal()
    for _ in range(2):
        with pytest.raises(ValueError, match="top must be from 0 to 64, got 65"):
            check(case, Request(top=65))
    assert not triton_statistics.PASS_CACHE


def test_small_memory_budget_plans_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_statistics, "MAX_CANDIDATE_BYTES", 1)
    for seed in range(2):
        check(causal(heads=(2, 1), queries=38, keys=40, seed=seed), replace(ALL, picture=(19, 8, "mean")))
    (one,) = triton_statistics.PASS_CACHE.values()
    assert [launching.kernel.__name__ for launching in one.plan.launches].count("choose_topk") == 6


def test_passes_hold_no_tensors() -> None:
    case = causal(dtype=torch.float16, width=32)
    tensors = case.q.clone(), case.k.clone(), case.truth()[1].float()
    gone = [weakref.ref(x) for x in tensors]
    found = launch_statistics(*tensors, scale=case.scale, request=ALL, config=FETCHED, **case.options)
    gone += [weakref.ref(x) for x in found.values()]
    del tensors, found
    gc.collect()
    assert len(triton_statistics.PASS_CACHE) == 1
    assert [x() for x in gone] == [None] * len(gone)


def test_traced_calls_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces keyword launches, without addresses."""
    seen: list[str] = []
    monkeypatch.setattr(
        "foci.gpu.launcher.KeywordLaunch.launch_traced", lambda self, tensors: seen.append(self.kernel.__name__)
    )
    with FakeTensorMode():
        q, k, lse = torch.zeros(1, 2, 24, 16), torch.zeros(1, 2, 40, 16), torch.zeros(1, 2, 24)
        got = launch_statistics(q, k, lse, scale=1.0, causal=True, request=ALL, config=SMALL)
    assert {name: tuple(x.shape) for name, x in got.items()} == {
        "entropy": (1, 2, 24), "distance": (1, 2, 24), "top_values": (1, 2, 24, 3), "top_keys": (1, 2, 24, 3),
        "largest_logit": (1, 2), "received": (1, 2, 40), "picture": (1, 2, 4, 5),
    }  # fmt: skip
    assert seen == ["tile_statistics", "choose_topk", "refine_topk", "merge_statistics"]
    assert not triton_statistics.PASS_CACHE


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [ALL, PICTURE_MAX, replace(ALL, distance=False, picture=(8, 16, "mean"), top=8)])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 48)])
def test_later_calls_pass_addresses_on_a_gpu(wanted: Request, dtype: torch.dtype, width: int) -> None:
    """With unaligned tensors in between, and memory that is reused meanwhile."""
    kept = []
    for seed in range(5):
        case = causal(heads=(4, 2), queries=256, keys=256, width=width, dtype=dtype, seed=seed)
        kept.append(case)
        if seed == 3:
            check(case, wanted, q=shifted(case.q), k=shifted(case.k), config=None)
        else:
            check(case, wanted, config=None)
    passes = list(triton_statistics.PASS_CACHE.values())
    assert len(passes) == 2
    assert passes[0].launch_plan is not None
    assert len(passes[0].launch_plan.compiled_launches) == len(passes[0].plan.launches)
    assert passes[1].launch_plan is not None
    assert not passes[1].launch_plan.compiled_launches


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_gpu_than_the_current_one() -> None:
    case = causal(queries=64, keys=64)
    _, lse = case.truth()
    expected = launch_statistics(case.q, case.k, lse.float(), scale=case.scale, request=ALL, **case.options)
    for _ in range(2):
        q, k, rows = (x.to("cuda:1") for x in (case.q, case.k, lse.float()))
        got = launch_statistics(q, k, rows, scale=case.scale, request=ALL, **case.options)
        for name in expected:
            torch.testing.assert_close(got[name].cpu(), expected[name].cpu())


@pytest.mark.parametrize(
    ("wanted", "most"),
    [
        (Request(True, True, (256, 256, "mean")), 22),
        (Request(True, True, (256, 256, "mean"), 8), 61),
        (Request(True, True, (256, 256, "mean"), 8, True, True), 62),
        (Request(True, True, (256, 256, "mean"), 8, True, True, int32_keys=True), 62),
    ],
)
def test_memory_of_a_pass_over_8192_tokens(wanted: Request, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with 132 multiprocessors, 16 heads of 128. The merge reuses the memory of the candidates."""
    for module in (triton_statistics, launches):
        monkeypatch.setattr(module, "count_multiprocessors", lambda device: 132)
    with FakeTensorMode():
        q = torch.empty(1, 16, 8192, 128, dtype=torch.bfloat16, device="cuda:0")
        given = KernelTensors(q, q, torch.empty(1, 16, 8192, device="cuda:0"), *[None] * 8)
        found = triton_statistics.plan_pass(given, 0.1, None, True, 0, wanted, hopper.hopper_config(wanted, q.shape[2]))
        launch_plan = found.build_launch_plan()
        early, late = (
            sum(x.numel() * x.element_size() for x in found.allocate_outputs(late=late).values())
            for late in (False, True)
        )
    lasting = early + 4 * launch_plan.last_workspace.total
    assert max(lasting + 4 * launch_plan.workspace.total, lasting + late) <= most * 2**20
