"""The attention kernels without a row table: masks, softcap and ALiBi against the reference in float64.

The problems are those of test_distance_bias. In the interpreter tiles have 16 queries and 16 keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import foci
from foci.backends import triton
from foci.gpu.arguments import Tiling
from foci.gpu.attention import launch, tilings
from foci.gpu.launcher import CACHED_PLANS
from tests.checker import Problem, Tensors, answers, check, eager_errors, truth
from tests.kernels.test_distance_bias import DEVICE, MASKS, check_problem, problem_of, within_nan
from tests.kernels.test_distance_bias import _nan_in_fresh_memory as _nan_in_fresh_memory


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_equals_the_reference(mask: str) -> None:
    check_problem(problem_of("none", mask))


@pytest.mark.parametrize("mask", ["causal", "padding", "entries"])
def test_half_precision_equals_the_reference(mask: str) -> None:
    check_problem(problem_of("none", mask, torch.float16))


@pytest.mark.parametrize("tiles", [Tiling(32, 16, 4, 1), Tiling(16, 32, 4, 1)], ids=["tall", "wide"])
@pytest.mark.parametrize("mask", ["full", "window", "two_runs", "left_padding"])
def test_tiles_of_any_shape_equal_the_reference(mask: str, tiles: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "choose_tiling", lambda name, part: tiles)
    check_problem(problem_of("none", mask))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 17), (16, 16), (32, 16), (33, 48)])
def test_lengths_at_and_beside_a_tile_edge(lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    check_problem(problem_of("none", "causal", queries=queries, keys=keys))


@pytest.mark.parametrize("prefix", [16, 17, 32, 40])
@pytest.mark.parametrize("sizes", [(37, 41), (41, 20)], ids=str)
def test_a_prefix_ends_at_and_beside_a_tile_edge(prefix: int, sizes: tuple[int, int]) -> None:
    problem = problem_of("none", "causal", queries=sizes[0], keys=sizes[1])
    arguments = problem.arguments
    mask = foci.causal | foci.prefix(prefix)
    check_problem(Problem(problem.tensors, lambda leaves: arguments(leaves) | {"mask": mask}, problem.dtype))


@pytest.mark.parametrize("mask", ["causal", "padding", "documents", "grouped", "two_runs", "entries"])
def test_the_kernels_add_sinks_and_their_gradients(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without apply_sink, which adds the sink of other backends."""
    problem, whole = problem_of("none", mask, sink=True), foci.call.apply_sink
    true = truth(problem)
    eager = eager_errors(problem, true)
    monkeypatch.setattr(foci.call, "apply_sink", None)
    found = answers(problem, "triton", device=DEVICE)
    monkeypatch.setattr(foci.call, "apply_sink", whole)
    check(found, true, eager, problem.dtype)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize(("mask", "queries"), [("causal", 37), ("window", 37), ("causal", 1)])
def test_half_precision_takes_any_scale(scale: float, mask: str, queries: int) -> None:
    problem = problem_of("none", mask, torch.float16, queries=queries)
    score, arguments = foci.Dot(scale=scale), problem.arguments
    check_problem(Problem(problem.tensors, lambda leaves: arguments(leaves) | {"score": score}, problem.dtype))


def far_apart(x: Tensor) -> Tensor:
    """The same values, with the heads 2**30 entries apart: from the third head on, offsets exceed int32.

    The memory between them is never touched, and so not taken from the system.
    """
    *_, heads, rows, columns = x.shape
    storage = torch.UntypedStorage(((heads - 1) * 2**30 + rows * columns) * x.element_size(), device=x.device)
    strides = (heads * 2**30, 2**30, columns, 1)
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, strides).copy_(x)


@pytest.mark.parametrize(("added", "queries"), [("mask", 17), ("mask", 5), ("bias", 17), ("relative", 17)])
def test_offsets_of_heads_may_exceed_32_bits(added: str, queries: int) -> None:
    shapes = {"query": (1, 3, queries, 8), "key": (1, 3, 9, 8), "value": (1, 3, 9, 8), "entries": (1, 3, queries, 9)}
    tensors = {name: torch.randn(shape, device=DEVICE).half() for name, shape in shapes.items()}
    if added != "bias":
        tensors["entries"] = tensors["entries"] > 0
    relative = foci.Relative(torch.randn(9, 8, device=DEVICE)) if added == "relative" else None

    def run(given: Tensors, backend: str) -> list[Tensor]:
        inputs = [given[name].requires_grad_() for name in ("query", "key", "value")]
        options = {"bias": given["entries"]} if added == "bias" else {"mask": given["entries"], "bias": relative}
        out = foci.attention(*inputs, **options, backend=backend)
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    found = run({name: far_apart(x) for name, x in tensors.items()}, "triton")
    for one, other in zip(found, run(tensors, "reference"), strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


def test_no_row_table_is_planned_without_one() -> None:
    CACHED_PLANS.clear()
    q = torch.randn(1, 2, 20, 16, device=DEVICE)
    foci.attention(q, q, q, mask=foci.window(3), backend="triton")
    (plan,) = CACHED_PLANS.values()
    assert [launched.kernel.__name__ for launched in plan.launches] == ["attention_forward_kernel"]


def test_a_sequence_gives_the_same_bits_in_any_batch() -> None:
    q, k, v = (torch.randn(3, 2, 37, 16, device=DEVICE) for _ in range(3))
    lengths = torch.tensor([37, 20, 5], device=DEVICE)
    together = foci.attention(q, k, v, mask=foci.padding(lengths), backend="triton")
    for b in range(3):
        part = slice(b, b + 1)
        alone = foci.attention(q[part], k[part], v[part], mask=foci.padding(lengths[part]), backend="triton")
        assert torch.equal(alone[0], together[b])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [foci.window(64), foci.causal | foci.prefix(9), foci.padding([50])], ids=repr)
@pytest.mark.parametrize("length", [128, 8192])
def test_masks_run_in_our_kernels_on_a_gpu(mask: foci.Mask, length: int) -> None:
    q = torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16)
    assert foci.plan(q, q, q, mask=mask).chosen == triton.NAME


@pytest.mark.gpu
def test_a_new_length_compiles_nothing() -> None:
    from foci.kernels.attention.forward import attention_forward_kernel

    def count_kernels() -> int:
        return sum(len(cache[0]) for cache in attention_forward_kernel.device_caches.values())

    for length in (257, 1000, 1024, 16, 1, 333):
        q = torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16)
        foci.attention(q, q, q, mask=foci.causal & foci.window(100), backend="triton")
        if length == 1000:
            compiled = count_kernels()
    # Few queries have smaller tiles, which are a kernel of their own per power of two below 64.
    assert count_kernels() <= compiled + 1


@pytest.mark.parametrize("mask", ["causal", "padding", "left_padding", "prefix", "entries", "keys", "softcap", "sink"])
def test_split_keys_equal_the_reference(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilings, "MIN_SPLIT_KEYS", 10)
    monkeypatch.setattr(tilings, "SPLIT_KEYS_PER_ROW", 0)
    case = {"entries": {}}.get(mask, {"queries": 5})
    monkeypatch.setattr(tilings, "FEW_QUERIES", 64)
    planned = []
    whole = launch.plan_split_forward
    monkeypatch.setattr(launch, "plan_split_forward", lambda *given: planned.append(given[-1]) or whole(*given))
    CACHED_PLANS.clear()
    check_problem(problem_of("none", mask, **case))
    CACHED_PLANS.clear()
    assert planned
    assert min(planned) > 1


# Each with its shape for 2 sequences, 2 heads, 37 queries and 41 keys.
BIAS_SHAPES = {
    "whole": (2, 2, 37, 41),
    "heads": (1, 2, 37, 41),
    "sequences": (2, 1, 37, 41),
    "one": (1, 1, 37, 41),
    "keys": (2, 1, 1, 41),
    "queries": (1, 2, 37, 1),
}


def bias_problem(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> Problem:
    """A learned dense bias with another row stride than its width."""
    shapes = {"query": (2, 2, 37, 12), "key": (2, 2, 41, 12), "value": (2, 2, 41, 9), "entries": shape}
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(sizes, generator=generator, dtype=torch.float64) for name, sizes in shapes.items()}

    def arguments(leaves: Tensors) -> dict[str, Any]:
        given = {name: within_nan(leaves[name]) for name in ("query", "key", "value")}
        entries = leaves["entries"]
        if shape[-1] > 1:
            entries = torch.nn.functional.pad(entries, (0, 7), value=torch.nan)[..., : shape[-1]]
        mask = options.get("mask")
        if isinstance(mask, Tensor):
            options["mask"] = mask.to(leaves["query"].device)
        return given | {"bias": entries} | options

    return Problem(tensors, arguments, dtype)


@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_a_dense_bias_and_its_gradient_equal_the_reference(shape: str) -> None:
    check_problem(bias_problem(BIAS_SHAPES[shape]))


@pytest.mark.parametrize(
    ("mask", "shape"),
    [("causal", "whole"), ("two_runs", "whole"), ("documents", "heads"), ("prefix", "heads"), ("entries", "heads")],
)
def test_a_dense_bias_under_a_mask_equals_the_reference(mask: str, shape: str) -> None:
    check_problem(bias_problem(BIAS_SHAPES[shape], mask=MASKS[mask]["mask"]))


SHARED_BIAS_MASKS = {
    "full": None,
    "padding": foci.padding([5, 48, 0]),
    "documents": foci.documents(torch.arange(37) // 13, torch.stack([torch.arange(48) // n % 3 for n in (16, 1, 20)])),
    "two_runs": ~foci.window(5, 4),
}


@pytest.mark.parametrize("mask", SHARED_BIAS_MASKS)
def test_sequences_add_their_gradients_of_an_aligned_bias(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a launch each: what a sequence does not see keeps the sum of the others."""
    monkeypatch.setattr(launch, "count_multiprocessors", lambda device: 1)
    shapes = {"query": (3, 2, 37, 12), "key": (3, 1, 48, 12), "value": (3, 1, 48, 9), "entries": (1, 2, 37, 48)}
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(sizes, generator=generator, dtype=torch.float64) for name, sizes in shapes.items()}

    def arguments(leaves: Tensors) -> dict[str, Any]:
        given = {name: within_nan(leaves[name]) for name in ("query", "key", "value")}
        return given | {"bias": leaves["entries"], "mask": SHARED_BIAS_MASKS[mask]}

    CACHED_PLANS.clear()
    check_problem(Problem(tensors, arguments, torch.float32))
    names = [launched.kernel.__name__ for plan in CACHED_PLANS.values() for launched in plan.launches]
    assert names.count("attention_query_gradients") == 3
    assert "attention_bias_gradients" not in names


@pytest.mark.parametrize("width", [41, 48])
def test_a_bias_may_hide_keys_and_whole_rows(width: int) -> None:
    """Rows of 48 entries are aligned, rows of 41 are not."""
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(1, 2, 37, width, generator=generator)[..., :41].masked_fill(
        torch.rand(1, 2, 37, 41, generator=generator) < 0.7, -torch.inf
    )
    bias = torch.nn.functional.pad(bias, (0, width - 41))[..., :41].to(DEVICE)
    bias[:, :, 3] = -torch.inf
    q, k, v = (torch.randn(2, 2, n, 16, device=DEVICE) for n in (37, 41, 41))
    found, weights = foci.attention(q, k, v, bias=bias, backend="triton", return_weights=True)
    true = foci.attention(q.double(), k.double(), v.double(), bias=bias.double(), backend="reference")
    torch.testing.assert_close(found.double(), true, atol=1e-5, rtol=1e-5)
    assert bool((found[:, :, 3] == 0).all())
    assert bool(weights.lse[:, :, 3].isneginf().all())


@pytest.mark.parametrize("masked", [False, True])
def test_scattered_and_contiguous_documents_find_their_ranges(masked: bool) -> None:
    """Document 7 has a gap, document 9 no key."""
    ids = torch.tensor([3, 3, 7, 7, 1, 1, 7, 2] + [4] * 20 + [9] * 3, device=DEVICE)
    keys = torch.cat([ids[:28], torch.full((9,), 5, device=DEVICE)])
    q, k, v = torch.randn(1, 2, 31, 16), torch.randn(1, 2, 37, 16), torch.randn(1, 2, 37, 16)
    mask = foci.documents(ids, keys)
    mask = mask & foci.causal if masked else mask
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    found = foci.attention(q, k, v, mask=mask, backend="triton")
    true = foci.attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    torch.testing.assert_close(found.double(), true, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys_per_split", [512, 16], ids=["whole", "split"])
@pytest.mark.parametrize("mask", ["causal", "left_padding", "prefix", "softcap", "sink", "keys"])
def test_few_queries_of_heads_that_share_keys(mask: str, keys_per_split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads of a group are rows of one tile, forward and backward."""
    monkeypatch.setattr(tilings, "MIN_SPLIT_KEYS", keys_per_split)
    monkeypatch.setattr(tilings, "SPLIT_KEYS_PER_ROW", 0)
    CACHED_PLANS.clear()
    check_problem(problem_of("none", mask, key_heads=1, queries=5, keys=41))
    kernels = {launched.kernel.__name__ for plan in CACHED_PLANS.values() for launched in plan.launches}
    assert "few_query_gradients" in kernels
    assert ("merge_attention_splits" in kernels) == (keys_per_split == 16)
    CACHED_PLANS.clear()
