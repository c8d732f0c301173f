"""The Hopper kernel: when it is used, and on such a GPU that its results equal those of the plain Triton kernel."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton.experimental.gluon")

import foci
from foci.arguments import prepare_call
from foci.gpu import self_check
from foci.gpu.launcher import KeywordLaunch
from foci.runtime.device import major_capability
from foci.scores import Dot
from foci.statistics import cuda, describe_statistics_backend
from foci.statistics.cuda import hopper, launches
from foci.statistics.cuda import plan as triton_statistics
from foci.statistics.cuda.arguments import common_arguments
from foci.statistics.cuda.plan import launch_statistics
from foci.statistics.cuda.tiling import TileConfig
from foci.statistics.request import Request
from tests.kernels.statistics_cases import DEVICE, Case, causal, check_top, close, pooled, within_nan
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory
from tests.kernels.statistics_cases import nothing_kept as nothing_kept

BF16, F16 = torch.bfloat16, torch.float16
MEANS = (8, 8, "mean")
ERP = Request(entropy=True, received=True, picture=MEANS)


@pytest.fixture
def hopper_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "hopper_device_refusals", lambda device: [])
    monkeypatch.setattr("foci.statistics.cuda.arguments.has_tma", lambda device: True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[TileConfig]:
    """Receives an entry for each planned launch of the kernel."""
    found: list[TileConfig] = []
    true = hopper.build_hopper_launch

    def counted(numbers: Any, tensors: Any, launch: Any, config: TileConfig) -> KeywordLaunch:
        found.append(config)
        return true(numbers, tensors, launch, config)

    monkeypatch.setattr(hopper, "build_hopper_launch", counted)
    return found


def arguments_of(tokens: int = 256, keys: int | None = None, width: int = 64, dtype: torch.dtype = F16, **changes: Any):
    q, k = (torch.zeros(1, 2, n, width, dtype=dtype, device=DEVICE) for n in (tokens, keys or tokens))
    given = (
        dict.fromkeys(("softcap", "slopes", "key_ranges", "query_ids", "key_ids", "dense")) | {"causal": True} | changes
    )
    return common_arguments(q, k, torch.zeros(1, 2, tokens, device=DEVICE), 0.1, **given)


@pytest.mark.usefixtures("hopper_here")
@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (ERP, True),
        (replace(ERP, top=8), True),
        (Request(entropy=True), True),
        (Request(received=True), True),
        (Request(picture=MEANS), True),
        (Request(entropy=True, top=5), True),
        (replace(ERP, picture=(2, 16, "mean")), True),
        (replace(ERP, picture=(7, 9, "mean")), False),
        # A picture of maxima has its own pass, the rest does not.
        (replace(ERP, picture=(7, 9, "max")), True),
        (replace(ERP, picture=(16, 8, "mean")), False),
        (replace(ERP, picture=(8, 32, "mean")), False),
        (replace(ERP, picture=(8, 2, "mean")), True),
        (replace(ERP, picture=(8, 8, "max")), True),
        (replace(ERP, top=4), False),
        (replace(ERP, top=9), False),
        (Request(top=8), False),
        (replace(ERP, distance=True), True),
        (Request(distance=True), True),
        (replace(ERP, largest_logit=True), True),
        (replace(ERP, largest_logit=True, top=8, distance=True), True),
        (Request(largest_logit=True), False),
        (Request(largest_logit=True, top=8), False),
    ],
)
def test_supported_requests(wanted: Request, taken: bool) -> None:
    assert (hopper.refuses(arguments_of(), False, wanted) == []) is taken
    assert triton_statistics.choose_config(arguments_of(), False, wanted).use_hopper is taken


RANGES = torch.zeros(1, 1, 2, 256, dtype=torch.int32, device=DEVICE)
IDS = torch.zeros(1, 256, dtype=torch.int32, device=DEVICE)


@pytest.mark.usefixtures("hopper_here")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"causal": False}, None),
        ({"width": 128, "dtype": BF16, "tokens": 128}, None),
        ({"tokens": 264}, "got 264 and 264"),
        ({"tokens": 128, "keys": 256}, "got 128 and 256"),
        ({"width": 32}, "the width must be 64 or 128, got 32"),
        ({"dtype": torch.float32}, "TMA does not support"),
        ({"softcap": 2.0}, "softcap is not supported"),
        ({"slopes": torch.ones(2, device=DEVICE)}, "ALiBi"),
        ({"causal": False, "key_ranges": RANGES}, "a mask of key ranges"),
        ({"query_ids": IDS, "key_ids": IDS}, "a documents mask"),
        ({"dense": torch.ones(1, 1, 256, 256, dtype=torch.bool, device=DEVICE)}, "a dense mask"),
    ],
)
def test_supported_calls(changes: dict[str, Any], reason: str | None) -> None:
    found = hopper.refuses(arguments_of(**changes), False, Request(entropy=True))
    assert found == [] if reason is None else (len(found) == 1 and reason in found[0])


# Tokens, picture, strips of queries, slots of a strip; None: the plain kernel.
RAGGED = [
    (8192, (256, 256), (0, 0)),
    (8192, None, (0, 0)),
    (8000, (256, 256), (256, 32)),
    (8064, (256, 256), (256, 32)),
    (16000, (256, 256), (512, 32)),
    (8000, None, (63, 128)),
    (513, None, (5, 128)),
    # Strips that are half empty, columns of fewer than 16 keys, a picture that takes too much memory.
    (4500, (256, 256), None),
    (2000, (256, 256), None),
    (32000, (256, 256), None),
]


@pytest.mark.usefixtures("hopper_here")
@pytest.mark.parametrize(("tokens", "picture", "strips"), RAGGED)
def test_lengths_that_do_not_align_with_tiles(tokens: int, picture: Any, strips: tuple[int, int] | None) -> None:
    wanted = replace(ERP, picture=picture and (*picture, "mean"))
    config = triton_statistics.choose_config(arguments_of(tokens), False, wanted)
    assert ((config.strips, config.strip_queries) if config.use_hopper else None) == strips
    if strips and config.strips:
        tiles = config.count_tiles(tokens)
        starts = [config.first_query(tile, tokens) for tile in range(tiles + 1)]
        assert (starts[0], starts[-1]) == (0, tokens)
        assert all(0 < stop - start <= config.queries for start, stop in itertools.pairwise(starts))


@pytest.mark.usefixtures("hopper_here")
def test_largest_logit_with_negative_scale_is_refused() -> None:
    arguments = arguments_of() | {"scale": -0.5}
    wanted = replace(ERP, largest_logit=True)
    assert hopper.refuses(arguments, False, wanted) == ["the largest logit needs a positive scale, got -0.5"]
    assert hopper.refuses(arguments, False, replace(wanted, top=8)) == []


@pytest.mark.usefixtures("hopper_here")
def test_query_weights_and_non_contiguous_queries_are_refused() -> None:
    arguments = arguments_of()
    assert hopper.refuses(arguments, True, Request(received=True)) == ["query weights are not supported"]
    arguments["q"] = torch.zeros(1, 2, 256, 68, dtype=F16, device=DEVICE)[..., :64]
    assert "TMA does not support" in hopper.refuses(arguments, False, ERP)[0]


@pytest.mark.parametrize(
    ("kind", "capability", "hip", "triton", "reason"),
    [
        ("cuda", 9, None, "3.6.0", None),
        ("cuda", 9, None, "3.9.0", "the kernel failed its self-check with this version of Triton (it is wrong)"),
        ("cuda", 8, None, "3.6.0", "the GPU has compute capability 8, not 9"),
        ("cuda", 10, None, "3.6.0", "the GPU has compute capability 10, not 9"),
        ("cuda", 9, "6.4", "3.6.0", "the queries are on ROCm, not on CUDA"),
        ("cpu", 9, None, "3.6.0", "the queries are on cpu, not on CUDA"),
    ],
)
def test_supported_devices(
    kind: str, capability: int, hip: str | None, triton: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "major_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("triton.__version__", triton)
    monkeypatch.setattr(hopper, "run_in_process", lambda *check: "it is wrong")
    monkeypatch.setattr(self_check, "result_path", lambda name, index: None)
    hopper.gluon_failure.cache_clear()
    assert hopper.hopper_device_refusals(torch.device(kind, 0)) == ([] if reason is None else [reason])
    hopper.gluon_failure.cache_clear()


@pytest.mark.usefixtures("hopper_here")
def test_plan_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "refuses", lambda *call: [])
    q = torch.zeros(1, 2, 128, 64, dtype=F16, device=DEVICE)
    plan = str(foci.plan(q, q, q, mask=foci.causal, return_weights=True))
    assert "statistics of the weights: gluon or triton, depending on the statistic, in one pass" in plan
    assert "triton, in one pass" in str(foci.plan(q, q, q, mask=foci.window(9), return_weights=True))
    call = foci.attention(q, q, q, mask=foci.causal, return_weights=True)[1].call
    assert cuda.describe_kernel(call, replace(ERP, picture=(4, 4, "mean"))) == "gluon, in one pass"
    assert cuda.describe_kernel(call, Request(largest_logit=True)) == "triton, in one pass"


@pytest.mark.usefixtures("hopper_here")
@pytest.mark.parametrize("shape", [(1, 0, 4, 8), (1, 2, 0, 8), (0, 2, 4, 8)])
def test_plan_of_an_empty_call(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "refuses", lambda *call: [])
    q = torch.zeros(shape, device=DEVICE)
    assert "nothing to compute: empty input" in str(foci.plan(q, q, q, return_weights=True))


@pytest.mark.usefixtures("hopper_here")
def test_kernels_of_other_scores() -> None:
    """Additive scores and all biases but a float tensor have their statistics in one pass, as foci.plan says."""
    with FakeTensorMode():
        shapes = ((1, 2, 4, 64), (2, 9, 64), (2, 1, 64), (8, 2), (2,), (4, 4), (64,))
        q, table, short_table, by_bucket, slopes, dense, weight = (
            torch.zeros(shape, device="cuda") for shape in shapes
        )
        buckets = foci.Buckets(by_bucket, bidirectional=True, max_distance=12)
        for bias in (foci.Relative(table, table), foci.Relative(table), buckets, foci.ALiBi(slopes)):
            call = prepare_call(q, q, q, Dot(softcap=2.0), foci.causal, bias, None, None, 0.0, True)
            assert describe_statistics_backend(call) == "triton, in one pass"
        additive = prepare_call(q, q, q, foci.Additive(weight), foci.causal, None, None, None, 0.0, True)
        assert describe_statistics_backend(additive) == "triton, in one pass"
        for bias, reason in ((dense, "a float tensor as a bias"), (foci.Relative(short_table), "a clip of 1 to")):
            call = prepare_call(q, q, q, Dot(), None, bias, None, None, 0.0, True)
            assert reason in " ".join(cuda.refuses(call))


@pytest.mark.parametrize("width", [0, 1, 256, 257])
def test_unsupported_widths(width: int) -> None:
    with FakeTensorMode():
        q = torch.zeros(1, 2, 4, width, device="cuda")
        reasons = cuda.refuses(prepare_call(q, q, q, Dot(), None, None, None, None, 0.0, True))
    assert reasons == ([] if 0 < width <= 256 else ["widths from 1 to 256 are supported"])


def test_kernel_can_be_imported() -> None:
    from foci.kernels.statistics.tiles_hopper import BK, tile_statistics_hopper

    assert 2 * BK.value == hopper.KEYS_PER_FETCH
    names = {"CAUSAL", "ENTROPY", "DISTANCE", "LARGEST", "RECEIVED", "PICTURE", "TOP", "STRIP", "WIDE"}
    assert names <= set(tile_statistics_hopper.arg_names)


@pytest.mark.usefixtures("hopper_here")
@pytest.mark.skipif(DEVICE == "cuda", reason="for Triton's interpreter")
@pytest.mark.parametrize("top", [0, 5])
def test_plain_kernel_with_the_hopper_tiling(top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernel with the buffers and classes of the Hopper kernel."""
    seen = []

    true = launches.build_tile_launch

    def twin(numbers: Any, common: Any, tensors: Any, launch: Any, config: TileConfig, q: Tensor) -> KeywordLaunch:
        seen.append(config)
        return true(numbers, common, tensors | {"k_tiles": "lse"}, launch, replace(config, use_hopper=False), q)

    monkeypatch.setattr(launches, "build_tile_launch", twin)
    monkeypatch.setattr(hopper, "hopper_descriptors", lambda config: {})
    case = causal(heads=(1, 1), queries=384, keys=384, width=64, dtype=F16)
    check(case, replace(ERP, picture=None, top=top))
    assert [config.queries for config in seen] == [64 if top else 128]


def full(**kinds: Any) -> Case:
    return Case(**kinds)


def check(case: Case, wanted: Request, tolerance: float = 5e-5) -> dict[str, Tensor]:
    """Check against the dense reference, in memory surrounded by NaN."""
    weights, lse = case.truth()
    q, k = within_nan(case.q, 8), within_nan(case.k, 8)
    got = launch_statistics(q, k, lse.float(), scale=case.scale, request=wanted, **case.options)
    if wanted.entropy:
        close(got["entropy"], torch.special.entr(weights).sum(-1), tolerance)
    if wanted.received:
        close(got["received"], weights.sum(-2), tolerance)
    if wanted.picture:
        close(got["picture"], pooled(weights, *wanted.picture), tolerance / 10)
    if wanted.distance:
        places = torch.arange(weights.shape[-1], device=weights.device)
        away = (weights * (places[:, None] - places).abs()).sum(-1)
        close(got["distance"] / weights.shape[-1], away / weights.shape[-1], tolerance / 10)
    if wanted.largest_logit:
        close(got["largest_logit"], case.logits().amax((-1, -2)), tolerance)
    if wanted.top:
        check_top(got, case, wanted.top, tolerance)
    return got


def on_hopper() -> bool:
    return DEVICE == "cuda" and major_capability(0) == 9


ONLY_HOPPER = pytest.mark.skipif(not on_hopper(), reason="no GPU of compute capability 9")
EVERY = replace(ERP, top=8, distance=True, largest_logit=True)
EP, RP = replace(ERP, received=False), replace(ERP, entropy=False)
# Query heads, key/value heads, tokens, width, dtype, mask, request, picture.
CASES = [
    ((4, 4), 1024, 128, BF16, causal, ERP, (32, 32)),
    ((2, 2), 128, 128, BF16, causal, ERP, (4, 4)),
    ((4, 1), 384, 64, F16, full, ERP, (12, 24)),
    ((2, 1), 256, 128, BF16, causal, ERP, (4, 4)),
    ((2, 2), 256, 128, BF16, causal, ERP, (2, 16)),
    ((2, 2), 384, 128, BF16, full, replace(ERP, picture=None), None),
    ((2, 2), 512, 128, BF16, causal, EP, (16, 8)),
    ((2, 2), 512, 64, BF16, causal, RP, (16, 8)),
    ((3, 3), 512, 128, BF16, causal, Request(entropy=True), None),
    ((3, 3), 512, 128, F16, full, Request(received=True), None),
    ((3, 3), 512, 128, F16, causal, Request(picture=MEANS), (16, 16)),
    ((4, 2), 1024, 128, BF16, causal, replace(ERP, top=8), (32, 32)),
    ((3, 3), 640, 64, F16, full, replace(ERP, top=8), (20, 20)),
    ((2, 2), 256, 128, F16, causal, replace(ERP, top=5), (4, 4)),
    ((2, 2), 384, 128, BF16, causal, Request(entropy=True, top=6), None),
    ((3, 3), 512, 128, BF16, causal, Request(distance=True), None),
    ((4, 2), 1024, 128, BF16, causal, replace(ERP, distance=True), (32, 32)),
    ((2, 2), 640, 64, F16, full, EVERY, (20, 20)),
    ((2, 2), 256, 128, F16, full, replace(EVERY, top=0), (8, 8)),
    ((2, 2), 1024, 128, BF16, causal, EVERY, (16, 16)),
    ((2, 2), 384, 128, BF16, causal, replace(EVERY, top=0), (12, 12)),
    ((2, 1), 384, 64, F16, full, replace(ERP, largest_logit=True), (12, 12)),
    # Cells that span several tiles in both directions.
    ((2, 2), 1024, 128, BF16, causal, ERP, (8, 8)),
    ((2, 2), 1024, 128, BF16, causal, ERP, (2, 2)),
    ((2, 2), 1024, 128, BF16, full, Request(picture=MEANS), (4, 1)),
    ((2, 2), 1024, 128, BF16, causal, EVERY, (4, 4)),
    # Lengths that are not a multiple of 128, and cells that do not align with tiles.
    ((4, 4), 1000, 128, BF16, causal, ERP, (32, 32)),
    ((2, 1), 520, 64, F16, full, ERP, (17, 20)),
    ((2, 2), 1024, 128, BF16, causal, ERP, (33, 33)),
    ((2, 2), 1500, 128, BF16, causal, replace(EVERY, top=0), (24, 30)),
    ((4, 2), 1000, 128, BF16, causal, EVERY, (32, 32)),
    ((2, 2), 650, 64, F16, full, EVERY, (21, 20)),
    ((2, 2), 1111, 128, BF16, causal, replace(ERP, top=8), (40, 60)),
    ((3, 3), 777, 128, BF16, causal, Request(entropy=True), None),
    ((3, 1), 999, 64, F16, full, Request(received=True), None),
    ((2, 2), 1111, 128, BF16, causal, Request(entropy=True, top=6), None),
    ((2, 2), 513, 64, BF16, causal, Request(distance=True), None),
    ((2, 2), 769, 128, F16, full, replace(EVERY, picture=None), None),
]


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize(("heads", "tokens", "width", "dtype", "make", "wanted", "picture"), CASES)
def test_results_equal_the_plain_kernel_and_the_reference(
    heads, tokens: int, width: int, dtype: torch.dtype, make, wanted: Request, picture, launched: list[TileConfig]
) -> None:
    wanted = replace(wanted, picture=(*picture, "mean") if picture else None)
    case = make(heads=heads, queries=tokens, keys=tokens, width=width, dtype=dtype, batch=2)
    got = check(case, wanted)
    count = len(launched)
    assert launched == [hopper.hopper_config(wanted, tokens)] * max(count, 1)
    config = replace(hopper.base_config(wanted), use_hopper=False, stages=3)
    twin = launch_statistics(
        case.q, case.k, case.truth()[1].float(), scale=case.scale, request=wanted, config=config, **case.options
    )
    assert len(launched) == count
    for name in set(got) - {"top_keys"}:
        # Logits without their lowest bits may be rounded to different values. The plain kernel sums cells that do not
        # align with tiles in float16; `check` compared ours with the exact ones.
        rounded = name == "top_values" or (name == "picture" and launched[0].strips > 0)
        torch.testing.assert_close(got[name], twin[name], rtol=3e-4 if rounded else 2e-5, atol=2e-6)


@pytest.mark.gpu
@ONLY_HOPPER
def test_several_launches_continue_the_sums(launched: list[TileConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_statistics, "MAX_CANDIDATE_BYTES", 200_000)
    check(causal(heads=(4, 2), queries=1024, keys=1024, width=128, dtype=BF16), replace(ERP, picture=None, top=8))
    assert len(launched) > 4


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize(("wanted", "cells"), [(ERP, 32), (ERP, 4), (EVERY, 32), (EVERY, 4)])
def test_results_are_deterministic(wanted: Request, cells: int) -> None:
    case = causal(heads=(4, 4), queries=1024, keys=1024, width=128, dtype=BF16)
    first, again = (check(case, replace(wanted, picture=(cells, cells, "mean"))) for _ in range(2))
    assert {name: torch.equal(first[name], again[name]) for name in first} == dict.fromkeys(first, True)


@pytest.mark.gpu
@ONLY_HOPPER
@pytest.mark.parametrize(("make", "mask"), [(causal, foci.causal), (full, None)])
def test_weights_of_a_call_use_the_hopper_kernel(make, mask, launched: list[TileConfig]) -> None:
    case = make(heads=(4, 2), queries=512, keys=512, width=128, dtype=BF16)
    assert "gluon" in str(foci.plan(case.q, case.k, case.k, mask=mask, return_weights=True))
    _, weights = foci.attention(case.q, case.k, case.k, mask=mask, return_weights=True)
    truth, _ = case.truth()
    close(weights.entropy(), torch.special.entr(truth).sum(-1), 1e-3)
    close(weights.received(), truth.sum(-2), 1e-3)
    close(weights.picture(16, 16), pooled(truth, 16, 16, "mean"), 1e-4)
    assert len(launched) == 3
