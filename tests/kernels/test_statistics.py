"""The tile pass against statistics of the dense matrix in float64. Runs in Triton's interpreter on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

import triton
import triton.language as tl

from foci.kernels.statistics.tiles import cell_at
from foci.statistics.cuda import launches, tiling
from foci.statistics.cuda import plan as triton_statistics
from foci.statistics.cuda.arguments import (
    AFTER_SCALE,
    BEFORE_SCALE,
    common_arguments,
    describe_key_tiles,
    has_tma,
    key_descriptors,
)
from foci.statistics.cuda.plan import launch_statistics
from foci.statistics.cuda.tiling import (
    TileConfig,
    choose_key_classes,
    choose_segments,
    lay_out_cells,
    programs_per_pair,
    split_launches,
)
from foci.statistics.request import Request
from tests.cases import mark_most_slow
from tests.kernels.statistics_cases import (
    DEVICE,
    FETCHED,
    KEPT,
    SMALL,
    Case,
    causal,
    check_top,
    close,
    no_mask,
    pooled,
    within_nan,
)
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory
from tests.kernels.statistics_cases import nothing_kept as nothing_kept

# Exponentials of additive scores overflow on purpose; only the interpreter warns.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def span_case(runs: list[list[tuple[int, int]]], **kinds) -> Case:
    """runs[query] is the list of its one or two key ranges."""
    case = Case(queries=len(runs), **kinds)
    key_ranges = torch.tensor(runs, dtype=torch.int32, device=DEVICE).permute(1, 2, 0)[None].contiguous()
    j = torch.arange(case.seen.shape[-1], device=DEVICE)
    inside = (j >= key_ranges[:, :, 0, :, None]) & (j < key_ranges[:, :, 1, :, None])
    case.seen &= inside.any(1)[:, None]
    case.options["key_ranges"] = key_ranges
    return case


def window() -> Case:
    return span_case([[(max(0, i - 9), min(70, i + 40))] for i in range(40)], keys=70)


def two_runs() -> Case:
    return span_case([[(0, 6), (max(6, i + 8), i + 27)] if i % 5 else [(3, 3), (i, i + 9)] for i in range(35)], keys=70)


def some_see_nothing() -> Case:
    return span_case([[(0, 40)] if i % 3 else [(7, 7)] for i in range(20)], keys=40, batch=2)


def sees_nothing_at_the_start() -> Case:
    return causal(queries=40, keys=20)


def documents() -> Case:
    case = Case(queries=40, keys=40, batch=2)
    ids = torch.tensor([[0] * 13 + [1] * 20 + [2] * 7, [0] * 30 + [5] * 10], device=DEVICE)
    case.seen &= (ids[:, :, None] == ids[:, None, :])[:, None]
    case.options |= {"query_ids": ids, "key_ids": ids}
    return case


def dense_mask() -> Case:
    case = Case(batch=2)
    mask = torch.rand(2, 1, 24, 40, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.3
    case.seen &= mask
    case.options["dense"] = mask
    return case


def dense_of_keys() -> Case:
    case = causal(heads=(4, 2))
    mask = torch.arange(40, device=DEVICE)[None, None, None] % 3 > 0
    case.seen &= mask
    case.options["dense"] = mask
    return case


def capped_with_slopes() -> Case:
    case = causal(heads=(4, 2), sharp=6.0)
    case.options |= {"softcap": 3.0, "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)}
    return case


def relative() -> Case:
    case = causal(heads=(2, 1), queries=20, keys=35, width=16, batch=2)
    table = torch.randn(2, 2, 20, 13, generator=torch.Generator().manual_seed(4)).mul(3).to(DEVICE)
    # Rows with other strides than those of their own size, in memory filled with NaN.
    case.options |= {"bias": within_nan(table, 0), "bias_kind": BEFORE_SCALE, "softcap": 4.0}
    return case


def relative_two_runs() -> Case:
    case = two_runs()
    table = torch.randn(1, 2, 35, 5, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    case.options |= {"bias": table, "bias_kind": BEFORE_SCALE}
    return case


def buckets() -> Case:
    case = causal(heads=(2, 1), queries=70, keys=40)
    table = torch.randn(1, 2, 1, 9, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    case.options |= {"bias": table, "bias_kind": AFTER_SCALE, "softcap": 2.0}
    return case


def buckets_one_query() -> Case:
    case = one_query()
    table = torch.randn(1, 2, 1, 9, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    case.options |= {"bias": table, "bias_kind": AFTER_SCALE}
    return case


def additive() -> Case:
    case = causal(heads=(2, 1), queries=20, keys=35, width=12, batch=2)
    case.options["weight"] = torch.randn(2, 12, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    case.scale = 1.0
    return case


def additive_two_runs() -> Case:
    case = two_runs()
    case.options["weight"] = torch.randn(24, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    # Two and one terms share a reciprocal where exponentials would overflow.
    case.q[:, :, 5:9] *= 12
    case.k[:, :, 50:] *= 40
    case.scale = 1.0
    return case


def additive_masked_rows() -> Case:
    case = sees_nothing_at_the_start()
    case.options["weight"] = torch.randn(24, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    case.scale = 1.0
    return case


def with_a_sink() -> Case:
    case = sees_nothing_at_the_start()
    case.sink = torch.tensor([1.0, -2.0], device=DEVICE)
    return case


def grouped_heads() -> Case:
    return causal(heads=(4, 2), width=20, queries=17, keys=49)


def one_query() -> Case:
    return causal(queries=1, keys=45)


CASES = [
    no_mask, causal, window, two_runs, some_see_nothing, sees_nothing_at_the_start, documents, dense_mask,
    dense_of_keys, capped_with_slopes, with_a_sink, grouped_heads, one_query,
    relative, relative_two_runs, buckets, buckets_one_query, additive, additive_two_runs,
    additive_masked_rows,
]  # fmt: skip
ALL = Request(entropy=True, received=True, top=3, largest_logit=True, distance=True)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_every_statistic_under_every_mask(make) -> None:
    case = make()
    weights, _ = case.truth()
    got = case.run(ALL)
    close(got["entropy"], torch.special.entr(weights).sum(-1))
    close(got["received"], weights.sum(-2), 1e-5)
    close(got["distance"], (weights * case.apart).sum(-1), 3e-5)
    close(got["largest_logit"], case.logits().amax((-1, -2)), 1e-5)
    check_top(got, case, 3)


@pytest.mark.parametrize("dtypes", [(torch.int16, torch.int16), (torch.uint8, torch.int32)])
def test_document_ids_of_any_integer_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    case = documents()
    expected = case.run(Request(entropy=True))["entropy"]
    case.options |= {
        name: case.options[name].to(dtype) for name, dtype in zip(("query_ids", "key_ids"), dtypes, strict=True)
    }
    assert torch.equal(case.run(Request(entropy=True))["entropy"], expected)


@pytest.mark.parametrize("make", [causal, two_runs, grouped_heads])
def test_masking_every_tile_gives_the_same_result(make) -> None:
    case, wanted = make(), replace(ALL, picture=(5, 7, "mean"))
    every, some = case.run(wanted, replace(SMALL, mask_all=True)), case.run(wanted)
    for name in some:
        torch.testing.assert_close(every[name], some[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_short_sequences_take_one_launch(make, reduce: str) -> None:
    case = make()
    weights, _ = case.truth()
    wanted = replace(ALL, picture=(*weights.shape[-2:], reduce), int32_keys=reduce == "max")
    got = case.run(wanted, None)
    (planned,) = triton_statistics.PASS_CACHE.values()
    assert [launch.kernel.__name__ for launch in planned.plan.launches] == ["short_statistics"]
    close(got["entropy"], torch.special.entr(weights).sum(-1))
    close(got["received"], weights.sum(-2), 1e-5)
    close(got["picture"], weights)
    close(got["distance"], (weights * case.apart).sum(-1), 3e-5)
    close(got["largest_logit"], case.logits().amax((-1, -2)), 1e-5)
    check_top(got, case, 3)
    assert got["top_keys"].dtype == (torch.int32 if reduce == "max" else torch.int64)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_queries_and_ties_of_short_sequences() -> None:
    case = causal(queries=20, keys=20)
    case.q[0, 0] = 0
    case.q[0, 1, 7] = torch.nan
    got = case.run(Request(entropy=True, received=True, top=4), None)
    assert got["top_keys"][0, 0, -1].tolist() == [0, 1, 2, 3]
    assert got["top_keys"][0, 0, 1].tolist() == [0, 1, -1, -1]
    assert got["top_values"].isnan().nonzero().tolist() == [[0, 1, 7, n] for n in range(4)]
    assert got["top_keys"][0, 1, 7].tolist() == [-1] * 4
    assert got["entropy"].isnan().nonzero().tolist() == [[0, 1, 7]]
    assert got["received"].isnan().nonzero().tolist() == [[0, 1, key] for key in range(8)]


@pytest.mark.parametrize(
    ("wanted", "queries", "keys", "width", "weighted", "short"),
    [
        (ALL, 200, 256, 128, False, True),
        (ALL, 200, 257, 128, False, False),
        (ALL, 1025, 100, 128, False, False),
        (ALL, 20, 20, 129, False, False),
        (ALL, 20, 20, 20, True, False),
        (Request(top=17), 20, 20, 20, False, False),
        (Request(picture=(20, 20, "mean")), 20, 20, 20, False, True),
        (Request(picture=(10, 20, "mean")), 20, 20, 20, False, False),
    ],
)
def test_which_sequences_are_short(
    wanted: Request, queries: int, keys: int, width: int, weighted: bool, short: bool
) -> None:
    scalars = {"Tq": queries, "Tk": keys, "BD": triton.next_power_of_2(width)}
    assert launches.can_run_short(scalars, weighted, wanted, torch.empty(1, dtype=torch.float16)) is short


@pytest.mark.parametrize("make", mark_most_slow(CASES, 2), ids=lambda make: make.__name__)
def test_pictures_under_every_mask(make) -> None:
    case = make()
    reduce = "max" if CASES.index(make) % 2 else "mean"
    weights, _ = case.truth()
    rows, columns = min(5, weights.shape[-2]), 7
    got = case.run(Request(received=True, picture=(rows, columns, reduce)))
    close(got["picture"], pooled(weights, rows, columns, reduce))
    close(got["received"], weights.sum(-2), 1e-5)


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize(
    ("queries", "keys", "rows", "columns"),
    [(64, 128, 8, 8), (64, 128, 2, 1), (16, 32, 16, 32), (17, 23, 17, 23), (37, 90, 1, 2), (33, 70, 9, 5)],
)
def test_pictures_of_every_size(queries: int, keys: int, rows: int, columns: int, reduce: str) -> None:
    case = causal(heads=(2, 1), queries=queries, keys=keys)
    weights, _ = case.truth()
    got = case.run(Request(entropy=True, picture=(rows, columns, reduce)))
    close(got["picture"], pooled(weights, rows, columns, reduce))


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_cells_shared_by_two_key_ranges(reduce: str) -> None:
    case = span_case([[(0, 9), (20, 33 + i)] for i in range(32)], keys=64)
    weights, _ = case.truth()
    close(case.run(Request(picture=(2, 2, reduce)))["picture"], pooled(weights, 2, 2, reduce))


BF16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bits of bfloat16")


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=BF16)])
def test_half_precision_inputs(dtype: torch.dtype) -> None:
    case = causal(dtype=dtype, width=32)
    weights, _ = case.truth()
    got = case.run(Request(entropy=True, received=True, picture=(3, 5, "mean"), top=4))
    close(got["entropy"], torch.special.entr(weights).sum(-1))
    close(got["received"], weights.sum(-2), 1e-5)
    # Weights are rounded to float16 before they are summed.
    torch.testing.assert_close(got["picture"].double(), pooled(weights, 3, 5, "mean"), rtol=5e-4, atol=1e-7)
    check_top(got, case, 4, KEPT)


@pytest.mark.parametrize("width", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_additive_scores_in_half_precision(width: int) -> None:
    case = Case(heads=(2, 1), queries=17, keys=33, width=width, dtype=torch.float16, sharp=0.3)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(4)).div(width**0.5).to(DEVICE, torch.float16)
    case.options["weight"], case.scale = weight, 1.0
    weights, _ = case.truth()
    got = case.run(Request(entropy=True, received=True, picture=(3, 5, "mean"), top=4))
    close(got["entropy"], torch.special.entr(weights).sum(-1))
    close(got["received"], weights.sum(-2), 1e-5)
    torch.testing.assert_close(got["picture"].double(), pooled(weights, 3, 5, "mean"), rtol=5e-4, atol=1e-7)
    check_top(got, case, 4, KEPT)


def fetched_one_head() -> Case:
    return causal(heads=(1, 1), queries=33, keys=33, width=32, dtype=torch.float16)


def fetched_odd_and_grouped() -> Case:
    return causal(heads=(4, 2), queries=17, keys=49, width=24, dtype=torch.float16, batch=2)


def fetched_two_runs() -> Case:
    return span_case([[(0, 5), (i + 30, i + 45)] for i in range(20)], keys=70, width=8, dtype=torch.float16)


def fetched_documents() -> Case:
    case = Case(queries=35, keys=35, width=40, dtype=torch.float16)
    ids = torch.arange(35, device=DEVICE)[None] // 12
    case.seen &= ids[:, :, None] == ids[:, None, :]
    case.options |= {"query_ids": ids, "key_ids": ids}
    return case


@pytest.mark.skipif(DEVICE == "cuda" and not has_tma(torch.device("cuda", 0)), reason="a GPU before Hopper")
@pytest.mark.parametrize("beyond", [0, 8])
@pytest.mark.parametrize("make", [fetched_one_head, fetched_odd_and_grouped, fetched_two_runs, fetched_documents])
def test_keys_loaded_by_tma(make, beyond: int) -> None:
    case = make()
    weights, lse = case.truth()
    q, k = within_nan(case.q), within_nan(case.k, beyond)
    assert key_descriptors(k, 32, FETCHED)
    picture = (min(4, q.shape[2]), 5, "mean")
    wanted = Request(entropy=True, received=True, largest_logit=True, picture=picture, top=3)
    got = launch_statistics(q, k, lse.float(), scale=case.scale, request=wanted, config=FETCHED, **case.options)
    close(got["entropy"], torch.special.entr(weights).sum(-1))
    close(got["received"], weights.sum(-2), 1e-5)
    close(got["largest_logit"], case.logits().amax((-1, -2)), 5e-5)
    torch.testing.assert_close(got["picture"].double(), pooled(weights, *picture), rtol=5e-4, atol=1e-7)
    check_top(got, case, 3, KEPT)


def test_tensors_without_tma_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foci.statistics.cuda.arguments.has_tma", lambda device: True)
    k = torch.zeros(2, 3, 40, 32, dtype=torch.float16)
    for whole in (k, k.transpose(1, 2), k[:, :, 1:], k[..., 8:24], k[:, :, ::2]):
        assert key_descriptors(whole, 32, FETCHED)
        assert describe_key_tiles(whole, FETCHED.keys, 32).base is whole
    odd = torch.zeros(2, 3, 40, 36, dtype=torch.float16)
    no_steps = k[:1].expand(2, 3, 40, 32)
    for refused in (k.float(), k[..., 4:20], odd[..., :32], no_steps, k[..., ::2]):
        assert not key_descriptors(refused, 32, FETCHED)
    assert not key_descriptors(k, 32, SMALL)
    with FakeTensorMode() as mode:
        assert not key_descriptors(mode.from_tensor(k), 32, FETCHED)


@pytest.mark.parametrize(("hip", "hopper", "has"), [(None, True, True), (None, False, False), ("6.4", True, False)])
def test_devices_with_tma(hip: str | None, hopper: bool, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foci.statistics.cuda.arguments.is_hopper_or_later", lambda index: hopper)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_tma(torch.device("cuda", 0)) is has


def late_spans() -> Case:
    """Some tiles are visited twice, and some queries are fully masked."""
    runs = [[(0, 9), (20, 33 + i)] if i % 7 else [(3, 3), (64, 64)] for i in range(32)]
    return span_case(runs, keys=64)


def late_documents() -> Case:
    case = Case(queries=32, keys=32)
    ids = torch.arange(32, device=DEVICE)[None] // 12
    case.seen &= ids[:, :, None] == ids[:, None, :]
    case.options |= {"query_ids": ids, "key_ids": ids}
    return case


@pytest.mark.parametrize(
    ("make", "picture", "aligned"),
    [
        (lambda: causal(heads=(2, 1), queries=32, keys=96), (4, 6, "mean"), True),
        (lambda: causal(heads=(2, 1), queries=32, keys=128), (2, 1, "mean"), True),
        (lambda: causal(queries=32, keys=16), (2, 1, "mean"), True),
        (late_documents, (4, 2, "mean"), True),
        (late_spans, (2, 2, "mean"), True),
        (late_spans, (4, 1, "mean"), True),
        (lambda: causal(heads=(2, 1), queries=61, keys=67), (37, 41, "mean"), False),
        (lambda: causal(heads=(2, 1), queries=61, keys=67), (3, 2, "mean"), False),
        (late_documents, (5, 3, "mean"), False),
        (late_spans, (31, 63, "mean"), False),
    ],
)
@pytest.mark.parametrize("defer", [False, True])
def test_received_and_means_from_the_same_sums(make, picture, aligned: bool, defer: bool) -> None:
    case = make()
    weights, _ = case.truth()
    assert (lay_out_cells(picture, *weights.shape[-2:], SMALL).cell_queries > 0) is aligned
    got = case.run(Request(entropy=True, received=True, picture=picture, top=2), replace(SMALL, defer_sums=defer))
    close(got["entropy"], torch.special.entr(weights).sum(-1))
    close(got["received"], weights.sum(-2), 1e-5)
    close(got["picture"], pooled(weights, *picture))
    check_top(got, case, 2)


@pytest.mark.parametrize(
    ("wanted", "weighted"),
    [
        (Request(received=True, picture=(4, 4, "max")), False),
        (Request(received=True, picture=(4, 4, "mean")), True),
        (Request(received=True, picture=(16, 4, "mean")), False),
        (Request(received=True), False),
        (Request(entropy=True), False),
    ],
)
def test_sums_that_cannot_be_deferred(wanted: Request, weighted: bool) -> None:
    case = causal(queries=32, keys=64)
    if weighted:
        case.options["query_weights"] = torch.rand(32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    late, at_once = case.run(wanted, replace(SMALL, defer_sums=True)), case.run(wanted)
    assert {name: torch.equal(late[name], at_once[name]) for name in at_once} == dict.fromkeys(at_once, True)


MEANS = (4, 4, "mean")


@pytest.mark.parametrize(
    ("wanted", "late"),
    [
        (Request(entropy=True, received=True, picture=MEANS), True),
        (Request(entropy=True, received=True, picture=MEANS, top=8), True),
        (Request(picture=MEANS), True),
        (Request(received=True, picture=MEANS), False),
        (Request(entropy=True, received=True), False),
        (Request(entropy=True, received=True, picture=MEANS, top=8, distance=True, largest_logit=True), False),
    ],
)
def test_sums_are_deferred_where_that_is_faster(wanted: Request, late: bool) -> None:
    assert tiling.default_config(128, torch.bfloat16, wanted, use_tma=True, short=False).defer_sums is late


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_in_a_query_stays_in_its_row_of_the_picture() -> None:
    case = causal(queries=40, keys=40)
    case.q[0, 1, 21] = torch.nan
    got = case.run(Request(entropy=True, received=True, picture=(9, 9, "mean")))
    assert got["entropy"].isnan().nonzero().tolist() == [[0, 1, 21]]
    assert got["picture"].isnan().nonzero().tolist() == [[0, 1, 4, column] for column in range(9)]
    assert got["received"].isnan().nonzero().tolist() == [[0, 1, key] for key in range(22)]


def test_cells_of_any_length_without_integer_division() -> None:
    for cells, length in ((256, 8000), (256, 257), (1, 300), (300, 300), (7, 4096), (1000, 131072)):
        index = torch.arange(length, device=DEVICE)
        found = torch.empty(length, dtype=torch.int32, device=DEVICE)
        cells_of_indices[(1,)](found, cells, length, triton.next_power_of_2(length))
        edges = torch.arange(1, cells, device=DEVICE) * length // cells
        assert torch.equal(found.long(), torch.bucketize(index, edges, right=True))


@triton.jit
def cells_of_indices(found, cells, length, BN: tl.constexpr):
    index = tl.arange(0, BN)
    tl.store(found + index, cell_at(index, cells, length), mask=index < length)


@pytest.mark.parametrize(("fetched", "top", "stages"), [(True, 8, 4), (True, 0, 3), (False, 8, 3), (False, 0, 3)])
def test_stages_with_and_without_tma(fetched: bool, top: int, stages: int) -> None:
    config = tiling.default_config(128, torch.bfloat16, Request(entropy=True, top=top), fetched, short=False)
    assert (config.use_tma, config.stages) == (fetched, stages)
    assert not tiling.default_config(128, torch.bfloat16, Request(entropy=True, top=top), fetched, short=True).use_tma


def test_tma_is_used_where_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foci.statistics.cuda.arguments.has_tma", lambda device: True)
    for dtype, fetched in ((torch.float16, True), (torch.float32, False)):
        case = causal(dtype=dtype, width=32)
        arguments = common_arguments(
            case.q, case.k, case.truth()[1].float(), 1.0, None, None, True, None, None, None, None
        )
        arguments |= {"Tq": 2000, "Tk": 2000}
        assert triton_statistics.choose_config(arguments, False, Request(distance=True)).use_tma is fetched


@pytest.mark.parametrize("shape", [(24,), (1, 2, 24)])
def test_query_weights(shape: tuple[int, ...]) -> None:
    case = causal()
    weights, _ = case.truth()
    counts = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    case.options["query_weights"] = counts
    got = case.run(Request(received=True))
    close(got["received"], (weights * counts.double().unsqueeze(-1)).sum(-2), 1e-5)


def test_several_launches_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = causal(queries=38, keys=38, heads=(3, 3))
    wanted = Request(entropy=True, received=True, top=5, picture=(19, 19, "mean"), largest_logit=True)
    whole = case.run(wanted)
    monkeypatch.setattr("foci.statistics.cuda.plan.MAX_CANDIDATE_BYTES", 2 * 16 * 8 * 96)
    parts = case.run(wanted)
    assert {name: torch.allclose(parts[name], whole[name]) for name in whole} == dict.fromkeys(whole, True)


def test_empty_request_returns_nothing() -> None:
    assert Case().run(Request()) == {}


def test_default_config_with_small_inputs() -> None:
    case = causal()
    weights, _ = case.truth()
    _, lse = case.truth()
    got = launch_statistics(case.q, case.k, lse.float(), scale=case.scale, causal=True, request=Request(entropy=True))
    close(got["entropy"], torch.special.entr(weights).sum(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lse": torch.zeros(1, 2, 23)}, r"lse must have shape \(1, 2, 24\), got \(1, 2, 23\)"),
        ({"lse": torch.zeros(1, 2, 24, dtype=torch.float64)}, "lse must be torch.float32, got torch.float64"),
        (
            {"key_ranges": torch.zeros(1, 3, 2, 24, dtype=torch.int32)},
            r"key_ranges must have shape \(1, 1 or 2, 2, 24\)",
        ),
        (
            {"causal": True, "key_ranges": torch.zeros(1, 1, 2, 24, dtype=torch.int32)},
            "causal and key_ranges must not be given together",
        ),
        ({"query_ids": torch.zeros(1, 24, dtype=torch.int32)}, "query_ids and key_ids must be given together"),
        ({"request": Request(top=65)}, "top must be from 0 to 64, got 65"),
        ({"request": Request(picture=(25, 3, "mean"))}, "at most 24 x 40 cells, got 25 x 3"),
        ({"request": Request(picture=(2, 3, "sum"))}, "'mean' or 'max', got 'sum'"),
        ({"k": torch.zeros(1, 3, 40, 24)}, "G a divisor of 2"),
        ({"k": torch.zeros(1, 2, 40, 24, dtype=torch.float16)}, "q and k must be both float16, bfloat16 or float32"),
        ({"bias": torch.zeros(1, 2, 1, 4), "bias_kind": 1}, r"bias must have shape .*got \(1, 2, 1, 4\)"),
        ({"bias": torch.zeros(1, 2, 1, 5)}, "bias_kind must be 1 or 2 with a bias, else 0, got 0"),
        ({"weight": torch.zeros(23)}, r"weight must have shape \(24\), got \(23,\)"),
        ({"dense": torch.zeros(24, 40, dtype=torch.bool)}, r"dense must have shape .*got \(24, 40\)"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {"q": torch.zeros(1, 2, 24, 24), "k": torch.zeros(1, 2, 40, 24), "lse": torch.zeros(1, 2, 24)}
    arguments |= {"scale": 1.0, "request": Request(entropy=True)} | change
    with pytest.raises((ValueError, TypeError), match=message):
        launch_statistics(**arguments)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 3), (40, 1), (5, 8)])
@pytest.mark.parametrize("tiles", [1, 7, 64])
@pytest.mark.parametrize("budget", [1, 1000, 10**9])
def test_launches_cover_every_tile_once(batch: int, heads: int, tiles: int, budget: int) -> None:
    found = list(split_launches(batch, heads, tiles, 100, budget))
    served = [
        (pair, tile)
        for launch in found
        for pair in range(launch.first_pair, launch.first_pair + launch.pairs)
        for tile in range(launch.first_tile, launch.first_tile + launch.tiles)
    ]
    assert sorted(served) == [(pair, tile) for pair in range(batch * heads) for tile in range(tiles)]
    assert max(launch.pairs * launch.tiles for launch in found) * 100 <= max(budget, 100)
    alone = [(launch.first_tile, launch.tiles) for launch in split_launches(1, heads, tiles, 100, budget)]
    first = [(launch.first_tile, launch.tiles) for launch in found if launch.first_pair < heads]
    assert first == alone


def test_slots_fill_the_multiprocessors() -> None:
    assert programs_per_pair(heads=16, tiles=64, programs=264) == 16
    assert programs_per_pair(heads=1, tiles=64, programs=264) == 32
    assert programs_per_pair(heads=512, tiles=4, programs=264) == 1


def test_segments_are_a_power_of_two() -> None:
    assert [choose_segments(top, 32) for top in (0, 1, 8, 9, 64)] == [1, 1, 2, 4, 16]


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(ALL, marks=pytest.mark.slow),
        Request(entropy=True, received=True, top=4, picture=(5, 7, "mean")),
    ],
)
@pytest.mark.parametrize("budget", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (20_000, 10**9))])
def test_a_sequence_has_the_same_statistics_in_every_batch(wanted: Request, budget: int, monkeypatch) -> None:
    monkeypatch.setattr("foci.statistics.cuda.plan.MAX_CANDIDATE_BYTES", budget)
    case = causal(heads=(2, 1), queries=70, keys=70, batch=3)
    lse = case.truth()[1].float()
    together = launch_statistics(case.q, case.k, lse, scale=case.scale, request=wanted, config=SMALL, causal=True)
    for b in range(3):
        alone = launch_statistics(
            case.q[b : b + 1], case.k[b : b + 1], lse[b : b + 1], scale=case.scale, request=wanted, config=SMALL,
            causal=True,
        )  # fmt: skip
        assert {name: torch.equal(x, together[name][b : b + 1]) for name, x in alone.items()} == dict.fromkeys(
            alone, True
        )


@pytest.mark.parametrize("make", [additive, relative])
def test_other_scores_have_the_same_statistics_in_every_batch(make) -> None:
    case = make()
    together, rows = case.run(ALL), case.truth()[1].float()
    for b in range(2):
        part = slice(b, b + 1)
        options = case.options | ({"bias": case.options["bias"][part]} if make is relative else {})
        alone = launch_statistics(
            case.q[part], case.k[part], rows[part], scale=case.scale, request=ALL, config=SMALL, **options
        )
        assert {name: torch.equal(x, together[name][part]) for name, x in alone.items()} == dict.fromkeys(alone, True)


def test_candidates_of_long_sequences_take_little_memory() -> None:
    config = TileConfig(queries=64, keys=64, warps=4, stages=3, programs_per_sm=2)
    classes = choose_key_classes(8, 8192, config, 7)
    assert (classes.number, classes.segments, classes.tags, classes.tag_bits) == (64, 2, 128, 7)
    parts = list(split_launches(1, 16, 128, classes.bytes_per_query * 64))
    assert len(parts) == 2
    assert parts[0].pairs * parts[0].tiles * 64 * classes.bytes_per_query == 33 * 2**20


def test_lines_of_cells_that_span_tiles() -> None:
    """Cells of several tiles, tiles of several cells, and cells that do not align with tiles."""
    assert lay_out_cells((256, 256, "mean"), 8192, 8192, SMALL)[:4] == (512, 2, 0, 1)
    assert lay_out_cells((8, 8, "mean"), 64, 64, SMALL)[:4] == (8, 1, 1, 0)
    assert lay_out_cells((256, 256, "mean"), 8000, 8192, SMALL)[:4] == (256 + 500, 1, 1, 1)
    assert lay_out_cells((20, 7, "mean"), 23, 30, SMALL).slots == 16
    assert lay_out_cells((900, 7, "mean"), 1000, 30, replace(SMALL, queries=64)).slots == 64


def test_unaligned_cells_take_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = common_arguments(
        torch.empty(1, 2, 8, 64, dtype=torch.float16), torch.empty(1, 2, 8, 64, dtype=torch.float16),
        torch.empty(1, 2, 8), 1.0, None, None, True, None, None, None, None,
    )  # fmt: skip
    three = Request(entropy=True, received=True, picture=(256, 256, "mean"))
    for length, queries in ((8192, 128), (8000, 128), (2048, 128), (2000, 64), (1000, 64)):
        arguments |= {"Tq": length, "Tk": length}
        assert triton_statistics.choose_config(arguments, False, three).queries == queries
