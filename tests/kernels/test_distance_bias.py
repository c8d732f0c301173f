"""Distance bias kernels against the reference in float64.

Here they run in Triton's interpreter, at sizes of a few tiles; with -m gpu on the device, in every dtype and width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import foci
from foci.arguments import Call, prepare_call
from foci.gpu import attention, launcher
from foci.gpu.arguments import Tiling
from foci.gpu.attention import launch, row_table
from foci.gpu.launcher import LaunchPlan
from foci.scores import Dot
from tests.checker import Problem, Tensors, answers, check, eager_errors, truth

# Table products use cuBLAS, which warns that its sums depend on the number of streams.
pytestmark = pytest.mark.filterwarnings("ignore:.*CuBLAS:UserWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Make = Callable[[Tensors], Any]


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN, so that entries a kernel does not write are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def some(*shape: int) -> Tensor:
    """Half of the entries, and a fully masked first row."""
    entries = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.5
    entries[..., 0, :] = False
    return entries


# Each with the shapes of its tensors, for 2 heads, 12 features and values of 9.
BIASES: dict[str, tuple[dict[str, tuple[int, ...]], Make]] = {
    "none": ({}, lambda t: None),
    "alibi": ({"slopes": (2,)}, lambda t: foci.ALiBi(t["slopes"])),
    "buckets": ({"table": (8, 2)}, lambda t: foci.Buckets(t["table"], True, 6)),
    "causal_buckets": ({"table": (6, 2)}, lambda t: foci.Buckets(t["table"], False, 5)),
    "relative": ({"near": (7, 12)}, lambda t: foci.Relative(t["near"])),
    "values": ({"near": (5, 12), "far": (5, 9)}, lambda t: foci.Relative(t["near"], t["far"])),
    "headed": ({"near": (2, 3, 12), "far": (2, 3, 9)}, lambda t: foci.Relative(t["near"], t["far"])),
}

# 37 queries and 41 keys are three tiles of 16 each way: near the diagonal, far before it, and past the end.
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": foci.causal},
    "more_queries": {"mask": foci.causal, "queries": 37, "keys": 19},
    "window": {"mask": foci.causal & foci.window(9)},
    "padding": {"mask": foci.padding([33, 0]), "batch": 2, "queries": 20},
    "left_padding": {"mask": foci.padding([5, 33], side="left"), "batch": 2, "queries": 20},
    "documents": {"mask": foci.documents(torch.arange(37) // 13, torch.arange(41) // 15) & foci.causal},
    "scattered": {"mask": foci.documents(torch.arange(37) % 3, torch.arange(41) % 3)},
    "prefix": {"mask": foci.causal | foci.prefix(7)},
    "two_runs": {"mask": ~foci.window(5, 4)},
    "entries": {"mask": some(1, 2, 37, 41)},
    "keys": {"mask": (torch.arange(41) % 4 != 1)},
    "softcap": {"score": Dot(0.4, softcap=1.5), "mask": foci.causal},
    "grouped": {"key_heads": 1, "mask": foci.causal},
    "one_query": {"queries": 1, "mask": foci.causal},
    "sink": {"sink": True, "mask": foci.causal, "queries": 30, "keys": 21},
}
EVERY = [(bias, mask) for bias in BIASES for mask in MASKS]
# Every mask with a bias or two, in turn; the rest with -m slow.
CHOSEN = [(bias, mask) for n, mask in enumerate(MASKS) for m, bias in enumerate(BIASES) if (n + m) % 5 == 0]


def problem_of(bias: str, mask: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Problem:
    case = {"batch": 1, "queries": 37, "keys": 41, "key_heads": 2} | MASKS[mask] | sizes
    bias_shapes, make = BIASES[bias]
    keys = (case["batch"], case["key_heads"], case["keys"])
    shapes = {"query": (case["batch"], 2, case["queries"], 12), "key": (*keys, 12), "value": (*keys, 9)} | bias_shapes
    if "sink" in case:
        shapes["sink"] = (2,)
    generator = torch.Generator().manual_seed(len(bias) + len(mask))
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}

    def arguments(leaves: Tensors) -> dict[str, Any]:
        given = {name: within_nan(leaves[name]) for name in ("query", "key", "value")}
        given |= {"score": case.get("score", Dot()), "sink": leaves.get("sink"), "bias": make(leaves)}
        seen = case.get("mask")
        return given | {"mask": seen.to(leaves["query"].device) if isinstance(seen, Tensor) else seen}

    return Problem(tensors, arguments, dtype)


def within_nan(x: Tensor) -> Tensor:
    """The same values with other strides, surrounded by NaN, so that reads past the end are noticed."""
    around = torch.nn.functional.pad(x.transpose(1, 2), (0, 5, 0, 1, 1, 2), value=torch.nan)
    return around[:, 1 : x.shape[2] + 1, : x.shape[1], : x.shape[3]].transpose(1, 2)


def check_problem(problem: Problem, device: str = DEVICE) -> None:
    true = truth(problem)
    check(answers(problem, "triton", device=device), true, eager_errors(problem, true), problem.dtype)


@pytest.mark.parametrize(("bias", "mask"), CHOSEN)
def test_output_lse_and_every_gradient_equal_the_reference(bias: str, mask: str) -> None:
    check_problem(problem_of(bias, mask))


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "mask"), [pair for pair in EVERY if pair not in CHOSEN])
def test_remaining_masks_and_biases(bias: str, mask: str) -> None:
    check_problem(problem_of(bias, mask))


@pytest.mark.parametrize("bias", ["alibi", "buckets", "headed"])
def test_float16(bias: str) -> None:
    check_problem(problem_of(bias, "causal", torch.float16))


@pytest.mark.parametrize("tiles", [Tiling(32, 16, 4, 1), Tiling(16, 32, 4, 1)], ids=["tall", "wide"])
@pytest.mark.parametrize(("bias", "mask"), [("values", "full"), ("buckets", "window"), ("buckets", "two_runs")])
def test_non_square_tiles(bias: str, mask: str, tiles: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "choose_tiling", lambda name, part: tiles)
    check_problem(problem_of(bias, mask))


@pytest.mark.parametrize(("bias", "mask"), [("buckets", "padding"), ("headed", "grouped"), ("values", "padding")])
def test_split_call_equals_the_whole_call(bias: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for one head at a time."""
    monkeypatch.setattr(row_table, "MAX_ROW_TABLE_BYTES", 1)
    launched = []
    whole = launch.backward_part
    monkeypatch.setattr(launch, "backward_part", lambda part, after: launched.append(part) or whole(part, after))
    problem = problem_of(bias, mask)
    check_problem(problem)
    heads = {"padding": 2 * 2, "grouped": 1}[mask]
    assert len(launched) == heads


@pytest.mark.parametrize("bias", ["alibi", "buckets"])
def test_dropout_equals_the_reference(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_table, "MAX_ROW_TABLE_BYTES", 1)
    problem = problem_of(bias, "causal", batch=2, queries=20, keys=20)
    leaves = problem.leaves(torch.float32, DEVICE)

    def found(backend: str) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        out = foci.attention(**problem.arguments(leaves), dropout=0.4, backend=backend)
        return (out, *torch.autograd.grad(out.square().sum(), list(leaves.values())))

    torch.testing.assert_close(found("triton"), found("reference"), rtol=1e-4, atol=1e-4)


def test_fully_masked_rows_give_zeros() -> None:
    found = answers(problem_of("values", "more_queries"), "triton", device=DEVICE)
    empty = found["lse"].isneginf()
    assert empty[..., :18].all()
    assert not empty[..., 18:].any()
    assert bool((found["out"][empty] == 0).all())
    assert bool((found["gradient of query"][empty] == 0).all())
    assert all(bool(tensor.isfinite().all()) for name, tensor in found.items() if name != "lse")


def test_double_backward_is_refused() -> None:
    x = torch.randn(1, 2, 5, 12, device=DEVICE).requires_grad_()
    out = foci.attention(x, x, x, bias=foci.ALiBi(), backend="triton")
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="backend must be 'blocked' or 'reference' for gradients of gradients"):
        torch.autograd.grad(first.square().sum() + x.sum(), x)


SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": lambda x: x[:, 1],
    "one for all": lambda x: x[0, 1].expand(2),
}


@pytest.mark.parametrize("part", SLOPES)
def test_non_contiguous_slopes_and_ids(part: str) -> None:
    """The results equal those of contiguous copies bit for bit."""
    drawn = torch.Generator().manual_seed(0)
    x, table = torch.randn(1, 2, 21, 12, generator=drawn), torch.rand(2, 3, generator=drawn)
    ids = torch.stack([torch.arange(21) // 8, torch.full((21,), 9)], dim=1).to(DEVICE)[:, 0]
    found = []
    for laid in (Tensor.contiguous, lambda given: given):
        q, slopes = (given.to(DEVICE).requires_grad_() for given in (x, table))
        bias, mask = foci.ALiBi(laid(SLOPES[part](slopes))), foci.documents(laid(ids))
        out = foci.attention(q, q, q, bias=bias, mask=mask, backend="triton")
        found.append([out, *torch.autograd.grad(out.sin().sum(), [q, slopes])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_table_entries_of_minus_infinity_mask() -> None:
    q = torch.randn(1, 2, 20, 8, device=DEVICE)
    table = torch.zeros(6, 2, device=DEVICE)
    table[3:] = -torch.inf
    bias = foci.Buckets(table, False, 5)
    near = foci.window(2, None)
    expected = foci.attention(q, q, q, mask=near, backend="reference")
    torch.testing.assert_close(foci.attention(q, q, q, bias=bias, backend="triton"), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_without_graph_breaks() -> None:
    problem = problem_of("buckets", "window", queries=18, keys=20)
    leaves = problem.leaves(torch.float32, DEVICE)

    def attend(leaves: Tensors) -> Tensor:
        return foci.attention(**problem.arguments(leaves), backend="triton")

    results = [attend(leaves), torch.compile(attend, fullgraph=True, backend="aot_eager")(leaves)]
    slopes = [torch.autograd.grad(out.square().sum(), list(leaves.values())) for out in results]
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(slopes[1], slopes[0])


def test_operators_pass_opcheck() -> None:
    problem = problem_of("headed", "padding", queries=17)
    call = call_of(**problem.arguments(problem.leaves(torch.float32, DEVICE)))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attention.kernel_attention.overload, attention.operator_inputs(call), test_utils=tests)


def call_of(dropout: float = 0.0, positions: Any = None, **arguments: Any) -> Call:
    names = ("query", "key", "value", "score", "mask", "bias", "sink")
    given = {"score": Dot(), "mask": None, "bias": None, "sink": None} | arguments
    return prepare_call(*(given[name] for name in names), positions, dropout, needs_lse=False)


def inputs(width: int = 8, dtype: torch.dtype = torch.float32, length: int = 5) -> dict[str, Tensor]:
    return {name: torch.randn(1, 2, length, width, dtype=dtype) for name in ("query", "key", "value")}


REFUSED: dict[str, tuple[Callable[[], Call], str]] = {
    "tensor": (lambda: call_of(**inputs(), bias=torch.zeros(5, 5).double()), "a bias of float64 is not supported"),
    "float64": (lambda: call_of(**inputs(dtype=torch.float64), bias=foci.ALiBi()), "float64"),
    "width": (lambda: call_of(**inputs(257), bias=foci.ALiBi()), "widths up to 256, got 257"),
    "empty": (lambda: call_of(**inputs(length=0), bias=foci.ALiBi()), "query, key or value is empty"),
    "clip": (lambda: call_of(**inputs(), bias=foci.Relative(torch.zeros(1027, 8))), "a clip of 1 to 512, got 513"),
    "one_vector": (lambda: call_of(**inputs(), bias=foci.Relative(torch.zeros(1, 8))), "a clip of 1 to 512, got 0"),
    "buckets": (
        lambda: call_of(**inputs(), bias=foci.Buckets(torch.zeros(8, 2), True, 1025)),
        "a distance of 1024, got 1025",
    ),
    "positions": (
        lambda: call_of(**inputs(), bias=foci.ALiBi(), positions=(torch.arange(5), None)),
        "given positions with a distance bias are not supported",
    ),
    "function": (
        lambda: call_of(**inputs(), bias=foci.ALiBi(), mask=foci.mask_function(lambda b, h, q, k: q > k)),
        "not a union of at most two key ranges",
    ),
    "dropped_values": (
        lambda: call_of(**inputs(), bias=foci.Relative(torch.zeros(3, 8), torch.zeros(3, 8)), dropout=0.1),
        "dropout together with Relative values",
    ),
    "other_score": (
        lambda: call_of(**inputs(), bias=foci.Relative(torch.zeros(3, 8)), score=foci.Cosine(2.0)),
        "the score Cosine",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_calls_are_refused(name: str) -> None:
    make, reason = REFUSED[name]
    assert any(reason in found for found in attention.refuses(make()))


def test_query_tiles_and_common_keys() -> None:
    key_ranges = torch.tensor([[[[0, 0, 5, 9], [4, 4, 8, 9]]], [[[2, 2, 2, 2], [9, 10, 9, 9]]]], dtype=torch.int32)
    found = reached(key_ranges, 10, 2, 4)
    assert found["query_tiles"].tolist() == [
        [[0, 1, 0, 1, 1], [1, 2, 2, 2, 1], [2, 0, 2, 2, 1]],
        [[0, 2, 2, 2, 1], [0, 2, 0, 2, 1], [0, 2, 2, 2, 1]],
    ]
    assert found["common_keys"].tolist() == [[[0, 4], [9, 8]], [[2, 9], [2, 9]]]


def test_common_keys_of_two_key_ranges_are_those_of_the_first() -> None:
    """Four queries in two tiles; the second key range of the first two is empty."""
    key_ranges = torch.tensor([[[[0, 1, 2, 3], [2, 3, 4, 4]], [[6, 6, 6, 7], [6, 6, 9, 9]]]], dtype=torch.int32)
    found = reached(key_ranges, 10, 2, 5)
    assert found["query_tiles"].tolist() == [[[0, 2, 2, 2, 1], [1, 2, 2, 2, 1]]]
    assert found["common_keys"].tolist() == [[[1, 2], [3, 4]]]


def test_large_batches_are_in_the_first_grid_dimension() -> None:
    steps, _ = row_table.tile_range_launches(
        torch.empty(1, 1, 2, 7, dtype=torch.int32).expand(70_000, 1, 2, 7), 9, 4, 4
    )
    assert {step.grid for step in steps} == {(70_000, 2), (70_000, 3)}


def reached(key_ranges: Tensor, Tk: int, queries: int, keys: int) -> dict[str, Tensor]:
    """The results of tile_range_launches: (Bm, tiles, 5) and (Bm, tiles, 2)."""
    steps, sizes = row_table.tile_range_launches(key_ranges, Tk, queries, keys)
    workspace = {name: torch.empty(size, device=DEVICE) for name, size in sizes.items()}
    given = {"key_ranges": key_ranges.to(DEVICE)}
    LaunchPlan({}, given["key_ranges"].device, steps)(given | workspace)
    columns = {"query_tiles": 5}
    return {
        name: x.view(torch.int32).view(key_ranges.shape[0], -1, columns.get(name, 2)).cpu()
        for name, x in workspace.items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize(("bias", "mask"), CHOSEN)
def test_all_masks_on_a_gpu(bias: str, mask: str) -> None:
    check_problem(problem_of(bias, mask, torch.bfloat16))


@pytest.mark.parametrize("bias", ["values", "buckets"])
def test_backward_under_autocast_is_unchanged(bias: str) -> None:
    problem = problem_of(bias, "causal")
    leaves = problem.leaves(torch.float32, DEVICE)
    found = []
    for enabled in (False, True):
        out = foci.attention(**problem.arguments(leaves), backend="triton")
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(out.sin().sum(), list(leaves.values())))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_overlapping_rows() -> None:
    """Windows of a series: an output of the same layout would have non-contiguous features."""
    series = torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for laid in (Tensor.contiguous, lambda given: given):
        x = laid(series.unfold(-1, 8, 1)).requires_grad_()
        out = foci.attention(x, x, x, bias=foci.ALiBi(), backend="triton")
        found.append([out, *torch.autograd.grad(out.sin().sum(), [x])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("bias", "mask"), [("buckets", "causal"), ("alibi", "window"), ("headed", "padding")])
def test_replayed_calls_equal_the_reference(bias: str, mask: str) -> None:
    """The first call of a shape goes through Triton, later ones pass addresses."""
    for scale in (1.0, 0.5, 2.0):
        problem = problem_of(bias, mask, torch.bfloat16)
        for x in problem.tensors.values():
            x.mul_(scale)
        check_problem(problem)


@pytest.mark.parametrize("count", [1, 2])
def test_equal_calls_share_launch_plans(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal calls share the plans of forward and backward; another mask has its own."""
    monkeypatch.setattr(launcher, "CACHED_PLANS", {})
    for mask in [foci.causal, foci.causal, None][: count + 1]:
        x, table = torch.randn(1, 2, 18, 12, device=DEVICE).requires_grad_(), torch.randn(6, 2, device=DEVICE)
        out = foci.attention(x, x, x, bias=foci.Buckets(table, False, 5), mask=mask, backend="triton")
        torch.autograd.grad(out.sum(), x)
    assert len(launcher.CACHED_PLANS) == 2 * count
