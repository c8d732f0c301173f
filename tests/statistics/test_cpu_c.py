"""Statistics in C against the dense matrix in float64: odd sizes, ties, masked entries, many chunks, many threads."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import foci
from foci import statistics
from foci.arguments import prepare_call
from foci.runtime import native
from foci.statistics import Request, cpu_c, streaming
from tests import matrices
from tests.allocation import LargestTensor
from tests.matrices import CASES, Arguments, assert_close, in_dtype, lazy, randn, truth

MISSING = native.why_unavailable("statistics")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no compiled library: {MISSING}")


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Entries that the kernel does not write are NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_c, "MIN_QUERIES", 0)
    monkeypatch.setattr(cpu_c, "MIN_ENTRIES", 0)


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def everything(queries: int, keys: int, k: int = 3, rows: int = 5, columns: int = 7) -> Request:
    size = (min(rows, queries), min(columns, keys), "mean")
    return Request(entropy=True, received=True, picture=size, top=min(k, keys), largest_logit=True, distance=True)


def measured(arguments: Arguments, wanted: Request) -> dict[str, Tensor]:
    """The statistics by compiled C, in the shape of the weights."""
    weights = lazy(arguments)
    call = weights.tensors.call
    assert cpu_c.refuses(call, wanted) == []
    found = cpu_c.compute_statistics(call, weights.tensors.lse, wanted)
    return {name: tensor.reshape((*weights.shape[:-2], *tensor.shape[2:])) for name, tensor in found.items()}


def check(arguments: Arguments, wanted: Request, dtype: torch.dtype = torch.float32) -> None:
    """Checks every statistic against its definition."""
    arguments = in_dtype(arguments, dtype)
    found, true = measured(arguments, wanted), truth(arguments)
    assert wanted.picture is not None
    assert_close(found["entropy"], matrices.entropy(true), dtype, 4)
    assert_close(found["received"], true.sum(-2), dtype, 10)
    assert_close(found["distance"], matrices.distance(true, arguments), dtype, 40)
    assert_close(found["picture"], matrices.picture(true, *wanted.picture), dtype)
    check_top(found["top_values"], found["top_keys"], true, wanted.top, dtype)


def check_top(values: Tensor, keys: Tensor, true: Tensor, k: int, dtype: torch.dtype) -> None:
    """Keys whose weights differ by less than rounding may be swapped; each must have the weight that is returned."""
    best, places = matrices.top(true, k)
    assert_close(values, best, dtype)
    assert torch.equal(keys >= 0, places >= 0)
    assert_close(values, true.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0.0), dtype)
    assert all(
        len(set(row)) == len(row) for row in keys.masked_fill(keys < 0, 0).flatten(0, -2).tolist() if min(row) > 0
    )


REFUSED = {
    "mask_function": "not a union of at most two key ranges",
    "positions, empty rows": "not a union of at most two key ranges",
    "relative": "the bias Relative",
    "relative, one table": "the bias Relative",
    "grouped heads, empty rows": "the bias Relative",
    "bias tensor": "the bias DenseBias",
    "bias tensor, empty rows": "the bias DenseBias",
    "sink and bias, empty rows": "the bias DenseBias",
    "deep": "the bias DenseBias",
}


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_kind_of_call_is_computed_or_refused_with_a_reason(case: str, dtype: torch.dtype) -> None:
    arguments = CASES[case]()
    wanted = everything(arguments["query"].shape[-2], arguments["key"].shape[-2])
    if case in REFUSED:
        reasons = cpu_c.refuses(lazy(in_dtype(arguments, dtype)).tensors.call, wanted)
        assert len(reasons) == 1
        assert REFUSED[case] in reasons[0]
    else:
        check(arguments, wanted, dtype)


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("case", sorted(CASES.keys() - REFUSED.keys()))
def test_the_largest_logit(case: str) -> None:
    arguments = in_dtype(CASES[case](), torch.float32)
    found = measured(arguments, Request(largest_logit=True))
    weights = lazy(arguments)
    expected = streaming.compute_statistics(weights.tensors.call, weights.tensors.lse, Request(largest_logit=True))[
        "largest_logit"
    ]
    torch.testing.assert_close(found["largest_logit"].flatten(), expected.flatten(), atol=1e-5, rtol=1e-5)


def sized(queries: int, keys: int, width: int, heads: int = 2, kv_heads: int = 2, sharp: float = 1.0) -> Arguments:
    return {
        "query": randn(1, heads, queries, width, seed=1) * sharp,
        "key": randn(1, kv_heads, keys, width, seed=2),
        "value": randn(1, kv_heads, keys, 1, seed=3),
    }


# Panels have 12 to 48 keys, chunks 384 to 1536, blocks 128 queries: none of these sizes is a multiple of them.
SIZES: dict[str, tuple[Arguments, Arguments, tuple[int, int, int]]] = {
    "three chunks": (sized(19, 3300, 5), {}, (8, 3, 11)),
    "three chunks, causal": (sized(19, 3300, 5), {"mask": foci.causal}, (8, 19, 100)),
    "two blocks of queries": (sized(259, 70, 3), {"mask": foci.causal.at(3)}, (5, 37, 70)),
    "square, causal": (sized(389, 389, 9), {"mask": foci.causal}, (8, 60, 41)),
    "a window across chunks": (sized(150, 1700, 4), {"mask": foci.window(90, 17)}, (17, 10, 10)),
    "the outside of a window": (sized(150, 1700, 4), {"mask": ~foci.window(1400, 3)}, (8, 10, 10)),
    "sinks and a window": (sized(33, 3300, 4), {"mask": foci.prefix(5) | foci.window(40)}, (8, 3, 3)),
    "sharp": (sized(40, 900, 16, sharp=12.0), {"mask": foci.causal}, (8, 7, 7)),
    "64 heaviest": (sized(40, 900, 16), {"mask": foci.causal.at(20)}, (64, 7, 7)),
    "shared keys": (sized(130, 400, 8, 6, 2), {"mask": foci.causal}, (8, 9, 9)),
    "a picture of every entry": (sized(40, 1700, 4), {"mask": foci.causal}, (8, 40, 1700)),
    "a picture of pairs of keys": (sized(40, 1602, 4), {}, (8, 20, 801)),
    "a picture of pairs, causal": (sized(150, 150, 4), {"mask": foci.causal}, (8, 75, 75)),
    "a picture of pairs, a window": (sized(150, 170, 4), {"mask": foci.window(31, 2)}, (8, 50, 85)),
    "wide": (sized(20, 100, 300), {}, (8, 1, 1)),
    "softcap": (sized(30, 200, 8, sharp=20.0), {"score": foci.Dot(softcap=3.0)}, (8, 4, 4)),
    "a large softcap": (sized(30, 200, 8), {"score": foci.Dot(softcap=5000.0)}, (8, 4, 4)),
    "alibi": (sized(140, 400, 8), {"bias": foci.ALiBi(), "mask": foci.causal}, (8, 4, 4)),
    "buckets": (sized(140, 1600, 8), {"bias": foci.Buckets(randn(32, 2, seed=5), False, 128)}, (8, 4, 4)),
    "buckets, fewer keys": (sized(300, 90, 8), {"bias": foci.Buckets(randn(32, 2, seed=5), True, 128)}, (8, 4, 4)),
    "documents": (sized(200, 200, 8), {"mask": foci.causal & foci.documents(torch.arange(200) // 37)}, (8, 9, 9)),
    "documents in turns": (sized(200, 200, 8), {"mask": foci.documents(torch.arange(200) * 5 // 7 % 4)}, (8, 9, 9)),
    "holes": (sized(50, 1600, 8), {"mask": randn(2, 50, 1600, seed=9) > 0.5}, (8, 9, 9)),
    "holes of whole rows": (sized(50, 100, 8), {"mask": randn(50, 1, seed=9) > 0.5}, (8, 9, 9)),
    "a turned mask": (sized(50, 60, 8), {"mask": (randn(60, 50, seed=9) > 0.5).mT}, (8, 9, 9)),
}  # fmt: skip


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_no_multiples_of_panels_chunks_and_blocks(name: str) -> None:
    arguments, options, (k, rows, columns) = SIZES[name]
    queries, keys = arguments["query"].shape[-2], arguments["key"].shape[-2]
    check(arguments | options, everything(queries, keys, k, rows, columns))


@pytest.mark.usefixtures("_any_size", "_threads")
@pytest.mark.parametrize("own", [True, False], ids=["our own threads", "the threads of torch"])
@pytest.mark.parametrize("name", ["square, causal", "two blocks of queries", "shared keys", "documents"])
def test_results_do_not_depend_on_threads(name: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_c, "STATISTICS_ENTRIES_PER_THREAD", 1)
    if own:
        monkeypatch.setattr(native, "find_openmp", lambda: None)
    arguments, options, (k, rows, columns) = SIZES[name]
    arguments = in_dtype(arguments | options, torch.float32)
    queries, keys = arguments["query"].shape[-2], arguments["key"].shape[-2]
    wanted = everything(queries, keys, k, rows, columns)
    threads, parts = cpu_c.choose_threads_and_parts(lazy(arguments).tensors.call, wanted)
    assert threads == 3
    assert parts > 1
    check(arguments, wanted)
    first, second = measured(arguments, wanted), measured(arguments, wanted)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("_any_size")
def test_a_batch_may_be_split_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in ("padding, empty rows", "documents, empty rows", "bool tensor, empty rows", "positions"):
        arguments = in_dtype(CASES[case](), torch.float32)
        wanted = everything(arguments["query"].shape[-2], arguments["key"].shape[-2])
        whole = measured(arguments, wanted)
        monkeypatch.setattr(cpu_c, "MAX_PACKED_NUMBERS", 1)
        parts = measured(arguments, wanted)
        monkeypatch.undo()
        monkeypatch.setattr(cpu_c, "MIN_QUERIES", 0)
        monkeypatch.setattr(cpu_c, "MIN_ENTRIES", 0)
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


def line_of(score: Callable[[Tensor], Tensor], keys: int) -> Arguments:
    """Queries that all give a key the same score, a function of its index."""
    key = torch.zeros(1, 1, keys, 4)
    key[..., 0] = score(torch.arange(keys))
    query = torch.zeros(1, 1, 20, 4)
    query[..., 0] = 1.0
    return {"query": query, "key": key, "value": key, "score": foci.Dot(1.0)}


# Whole numbers: every product and every tie is exact.
LINES: dict[str, Callable[[Tensor], Tensor]] = {
    "all equal": lambda place: place * 0.0,
    "pairs": lambda place: -(place // 2) % 61 + 0.0,
    "ascending": lambda place: place / 64,
    "descending": lambda place: -place / 64,
    "stairs": lambda place: place // 100 + 0.0,
    "every 64th": lambda place: torch.where(place % 64 == 5, 9.0, 0.0),
    "three kinds": lambda place: (place * 7919 % 3) * 20.0,
    "far below": lambda place: torch.where(place == 1777, 0.0, -1000.0),
}


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("k", [1, 8, 20, 64])
@pytest.mark.parametrize("mask", [None, foci.causal, foci.window(30)], ids=str)
def test_ties_go_to_the_lower_key(line: str, k: int, mask: foci.masks.kinds.Mask | None) -> None:
    arguments = line_of(LINES[line], 2000) | {"mask": mask}
    found = measured(arguments, Request(top=k))
    scores = arguments["key"][0, 0, :, 0].expand(20, -1)
    if mask is not None:
        scores = scores.masked_fill(~torch.tensor(drawn(mask, 20, 2000)), -torch.inf)
    values, keys = scores.sort(dim=-1, descending=True, stable=True)
    expected = keys[:, :k].masked_fill(values[:, :k] == -torch.inf, -1)
    assert torch.equal(found["top_keys"][0, 0], expected)
    weights = (values.double() - torch.logsumexp(scores.double(), -1, keepdim=True)).exp()[:, :k]
    torch.testing.assert_close(found["top_values"][0, 0].double(), weights, atol=1e-6, rtol=1e-5)


def drawn(mask: foci.masks.kinds.Mask, queries: int, keys: int) -> list[list[bool]]:
    return [[entry == "■" for entry in row.split(" ")] for row in mask.draw(queries, keys).splitlines()]


@pytest.mark.usefixtures("_any_size")
def test_fully_masked_queries_and_queries_of_few_keys() -> None:
    arguments = in_dtype(sized(40, 10, 4), torch.float32) | {"mask": foci.causal}
    found = measured(arguments, everything(40, 10, 8, 40, 10))
    assert all(torch.equal(found[name][..., :30], torch.zeros(1, 2, 30)) for name in ("entropy", "distance"))
    assert bool((found["top_keys"][:, :, :30] == -1).all())
    assert bool((found["top_values"][:, :, :30] == 0).all())
    assert torch.equal((found["top_keys"] >= 0).sum(-1)[0, 0, 30:], torch.arange(1, 11).clamp(max=8))
    assert bool((found["picture"][:, :, :30] == 0).all())
    masked = measured(arguments | {"mask": foci.causal.at(-50)}, everything(40, 10))
    assert bool((masked["largest_logit"] == -torch.inf).all())
    assert all(bool((masked[name] == 0).all()) for name in ("entropy", "received", "picture", "top_values"))


@pytest.mark.usefixtures("_any_size")
def test_entropy_is_never_negative() -> None:
    arguments = in_dtype(sized(300, 300, 8, sharp=9.0), torch.float32) | {"mask": foci.window(0)}
    entropy = measured(arguments, Request(entropy=True))["entropy"]
    assert bool((entropy >= 0).all())
    torch.testing.assert_close(entropy, torch.zeros(1, 2, 300), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("_any_size")
def test_nan_in_a_query_affects_only_its_row() -> None:
    arguments = in_dtype(sized(40, 50, 4), torch.float32)
    arguments["query"][0, 0, 7, 2] = torch.nan
    weights = lazy(arguments)
    lse = torch.logsumexp(arguments["query"].nan_to_num() @ arguments["key"].mT / 2, -1)
    found = cpu_c.compute_statistics(weights.tensors.call, lse, Request(entropy=True, distance=True, top=4))
    rows = torch.arange(40) == 7
    for name in ("entropy", "distance"):
        assert torch.equal(found[name][0, 0].isnan(), rows)
        assert not bool(found[name][0, 1].isnan().any())
    assert torch.equal(found["top_values"][0, 0].isnan(), rows[:, None].expand(-1, 4))
    assert not bool(found["top_values"][0, 1].isnan().any())


@pytest.mark.usefixtures("_any_size")
def test_distances_between_large_positions() -> None:
    arguments = in_dtype(sized(30, 30, 4), torch.float32)
    near, far = torch.arange(30), torch.arange(30) + 2**40
    expected = measured(arguments | {"positions": (near, near)}, Request(distance=True))
    assert torch.equal(
        measured(arguments | {"positions": (far, far)}, Request(distance=True))["distance"], expected["distance"]
    )


def test_summary_uses_compiled_c(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = in_dtype(sized(300, 300, 8), torch.float32) | {"mask": foci.causal}
    weights = lazy(arguments)
    expected = statistics.streaming.compute_statistics(
        weights.tensors.call, weights.tensors.lse, everything(300, 300, 8, 256, 256)
    )
    monkeypatch.setattr(streaming, "compute_statistics", None)
    summary = weights.summary()
    assert summary.top is not None
    assert summary.picture is not None
    found = {"entropy": summary.entropy, "picture": summary.picture, "top_values": summary.top.values}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-5)


PLACED = {"bias": foci.Buckets(randn(8, 2, seed=5), True, 9), "positions": (torch.arange(300), torch.arange(300) * 2)}
SQUARE = in_dtype(sized(300, 300, 4), torch.float32)
UNSUPPORTED: dict[str, tuple[Arguments, Request, bool, str]] = {
    "float64": (sized(300, 300, 4), Request(), False, "torch.float64"),
    "the mean": (SQUARE, Request(), True, "the mean over heads is not supported"),
    "places": (in_dtype(SQUARE | PLACED, torch.float32), Request(), False, "Buckets with given positions"),
    "65 keys": (SQUARE, Request(top=65), False, "at most 64 top keys are supported"),
    "maxima": (SQUARE, Request(picture=(2, 2, "max")), False, "a picture of maxima"),
    "few queries": (in_dtype(sized(15, 9000, 4), torch.float32), Request(), False, "fewer than 16 queries"),
    "few weights": (in_dtype(sized(20, 20, 4), torch.float32), Request(), False, "or 8,192 weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_refusals_have_one_reason(name: str) -> None:
    arguments, wanted, averaged, reason = UNSUPPORTED[name]
    reasons = cpu_c.refuses(lazy(arguments).tensors.call, wanted, averaged)
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_fake_tensors_are_refused() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 300, 8)
        call = prepare_call(q, q, q, foci.Dot(), None, None, None, None, 0.0, True)
    assert cpu_c.refuses(call) == ["query and key must be plain tensors, got FakeTensor and FakeTensor"]


@pytest.mark.usefixtures("_any_size")
def test_width_zero_gives_uniform_weights() -> None:
    arguments = in_dtype(sized(30, 50, 0), torch.float32)
    found = measured(arguments, Request(entropy=True, top=2))
    torch.testing.assert_close(found["entropy"], torch.full((1, 2, 30), math.log(50)))
    assert found["top_keys"].unique(dim=-2).tolist() == [[[[0, 1]], [[0, 1]]]]


def test_without_a_compiler_statistics_are_computed_strip_by_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = lazy(SQUARE)
    expected = weights.entropy()
    monkeypatch.setattr(native, "open_library", lambda name: "no C compiler was found")
    monkeypatch.setattr(cpu_c, "compute_statistics", None)
    assert cpu_c.refuses(weights.tensors.call, Request(entropy=True)) == ["no C compiler was found"]
    torch.testing.assert_close(weights.entropy(), expected, atol=1e-5, rtol=1e-5)


def test_the_plan_says_how_statistics_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 2, 300, 8)
    plan = str(foci.plan(q, q, q, mask=foci.causal, return_weights=True))
    assert "statistics of the weights: compiled C, in one pass" in plan
    monkeypatch.setattr(native, "open_library", lambda name: "no C compiler was found")
    plan = str(foci.plan(q, q, q, mask=foci.causal, return_weights=True))
    assert "strip by strip (" in plan
    assert "compiled C refuses: no C compiler was found" in plan


def test_memory_is_linear_in_the_length() -> None:
    arguments: dict[str, Any] = in_dtype(sized(2000, 2000, 8), torch.float32) | {"mask": foci.causal}
    weights = lazy(arguments)
    assert cpu_c.refuses(weights.tensors.call) == []
    with LargestTensor() as seen:
        weights.summary(top=4, picture=64)
    assert seen.largest <= 2 * 2000 * 8 * 2


@pytest.mark.usefixtures("_any_size")
def test_an_additive_score_with_large_inputs_is_computed_strip_by_strip() -> None:
    arguments = in_dtype(CASES["additive"](), torch.float32)
    arguments["query"] = arguments["query"] + 50.0
    arguments["key"] = arguments["key"] - 50.0
    weights = lazy(arguments)
    assert cpu_c.refuses(weights.tensors.call) == ["an additive score with inputs beyond ±43 is not supported"]
    assert_close(weights.entropy(), matrices.entropy(truth(arguments)), torch.float32, 4)
