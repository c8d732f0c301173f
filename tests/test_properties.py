"""What must hold for every attention, whatever the numbers are, and the derivatives by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foci
from foci.masks.base import Mask, as_mask
from foci.masks.kinds import MaskFunction
from foci.masks.tile import CallSizes, Tile

few = settings(max_examples=12, deadline=None, derandomize=True, database=None)
BACKENDS = ["sdpa", "blocked", "reference"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(batch: int, heads: int, queries: int, keys: int, width: int = 4, group: int = 1) -> tuple[Tensor, ...]:
    return (
        randn(batch, heads * group, queries, width, seed=1),
        randn(batch, heads, keys, width, seed=2),
        randn(batch, heads, keys, width + 1, seed=3),
    )


lengths = st.integers(1, 9)
masks = st.sampled_from(
    [
        None,
        foci.causal,
        foci.causal.at(-1),
        foci.window(2),
        foci.window(0, 3),
        foci.prefix(3),
        foci.causal & foci.window(1),
        ~foci.causal,
        foci.mask_function(lambda b, h, q, k: (q * k + b + h) % 3 != 0),
    ]
)
scores = st.sampled_from(
    [
        foci.Dot(),
        foci.Dot(scale=1.0, softcap=3.0),
        foci.Additive(randn(4, seed=5)),
        foci.General(randn(4, 4, seed=6)),
        foci.Cosine(5.0),
    ]
)


@few
@given(queries=lengths, keys=lengths, mask=masks, score=scores, sunk=st.booleans())
def test_rows_sum_to_one_or_zero_or_one_minus_sink_mass(
    queries: int, keys: int, mask: Mask | None, score: foci.Score, sunk: bool
) -> None:
    q, k, v = inputs(2, 3, queries, keys)
    sink = randn(3, seed=7) if sunk else None
    out, weights = foci.attention(q, k, v, mask=mask, score=score, sink=sink, return_weights=True)
    matrix = weights.dense()
    everything = torch.ones(queries, keys, dtype=torch.bool) if mask is None else visible(mask, 2, 3, queries, keys)
    sees = everything.expand(2, 3, queries, keys).any(-1)
    rest = 1.0 - weights.sink_mass() if sunk else sees.double()
    torch.testing.assert_close(matrix.sum(-1), rest)
    assert bool((weights.sink_mass()[~sees] == float(sunk)).all())
    torch.testing.assert_close(matrix @ v, out)
    assert bool((matrix >= 0).all())


def visible(mask: Mask, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """What a mask shows, asked through the call itself: a key is seen where its logit takes part."""
    zeros = torch.zeros(batch, heads, max(queries, keys), 4, dtype=torch.float64)
    _, weights = foci.attention(
        zeros[:, :, :queries], zeros[:, :, :keys], zeros[:, :, :keys], mask=mask, return_weights=True
    )
    return weights.dense() > 0


@few
@given(queries=lengths, keys=lengths, mask=masks, score=scores, backend=st.sampled_from(["blocked", "reference"]))
def test_masked_entries_are_exactly_zero(
    queries: int, keys: int, mask: Mask | None, score: foci.Score, backend: str
) -> None:
    q, k, v = inputs(2, 2, queries, keys)
    hidden = torch.rand(2, 2, queries, keys, generator=torch.Generator().manual_seed(keys)) < 0.5
    joined = ~as_mask(hidden) if mask is None else mask & ~as_mask(hidden)
    _, weights = foci.attention(q, k, v, mask=joined, score=score, backend=backend, return_weights=True)
    assert bool((weights.dense()[hidden] == 0).all())


@few
@given(length=lengths, score=scores, seed=st.integers(0, 99), backend=st.sampled_from(["blocked", "reference"]))
def test_permuted_tokens_permute_the_output(length: int, score: foci.Score, seed: int, backend: str) -> None:
    q, k, v = inputs(2, 2, length, length)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    out = foci.attention(q, k, v, score=score, backend=backend)
    permuted = foci.attention(q[:, :, order], k[:, :, order], v[:, :, order], score=score, backend=backend)
    torch.testing.assert_close(permuted, out[:, :, order])
    # The keys alone may stand in any order.
    torch.testing.assert_close(foci.attention(q, k[:, :, order], v[:, :, order], score=score), out)


@few
@given(length=st.integers(2, 9), data=st.data(), score=scores, backend=st.sampled_from(["blocked", "reference"]))
def test_causal_outputs_do_not_depend_on_later_positions(
    length: int, data: st.DataObject, score: foci.Score, backend: str
) -> None:
    now = data.draw(st.integers(1, length - 1))
    q, k, v = inputs(1, 2, length, length)
    before = foci.attention(q, k, v, mask=foci.causal, score=score, backend=backend)
    later_k, later_v = k.clone(), v.clone()
    later_k[:, :, now:], later_v[:, :, now:] = 1e6, torch.nan
    after = foci.attention(q, later_k, torch.nan_to_num(later_v, 1e6), mask=foci.causal, score=score, backend=backend)
    assert torch.equal(before[:, :, :now], after[:, :, :now])
    assert not torch.equal(before[:, :, now:], after[:, :, now:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_gradients_of_later_positions_are_zero(backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(1, 2, 7, 7))
    foci.attention(q, k, v, mask=foci.causal, backend=backend)[:, :, :4].sum().backward()
    assert all(bool((t.grad[:, :, 4:] == 0).all()) and bool((t.grad[:, :, 1:4] != 0).any()) for t in (q, k, v))


@few
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 3, 5]),
    bias=st.sampled_from([None, foci.ALiBi()]),
)
def test_cached_decoding_equals_the_whole_sequence(
    counts: list[int], window: int | None, bias: foci.Bias | None
) -> None:
    q, k, v = inputs(2, 2, sum(counts), sum(counts), group=2)
    mask = foci.causal if window is None else foci.causal & foci.window(window - 1)
    cache, parts, start = foci.Cache(window=window), [], 0
    for count in counts:
        new = slice(start, start + count)
        keys, values = cache.append(k[:, :, new], v[:, :, new])
        positions = cache.positions(count)
        parts.append(foci.attention(q[:, :, new], keys, values, mask=mask, bias=bias, positions=positions))
        start += count
    torch.testing.assert_close(torch.cat(parts, dim=2), foci.attention(q, k, v, mask=mask, bias=bias))


@few
@given(queries=lengths, keys=lengths, mask=masks, score=scores, group=st.integers(1, 3))
def test_heads_together_are_heads_apart(
    queries: int, keys: int, mask: Mask | None, score: foci.Score, group: int
) -> None:
    # A rule that asks for the head would be another one for a single head.
    mask = None if isinstance(mask, MaskFunction) else mask
    q, k, v = inputs(2, 2, queries, keys, group=group)
    together = foci.attention(q, k, v, mask=mask, score=score)
    for head in range(q.shape[1]):
        apart = foci.attention(q[:, head], k[:, head // group], v[:, head // group], mask=mask, score=score)
        torch.testing.assert_close(together[:, head], apart)


@few
@given(queries=lengths, keys=lengths, batch=st.tuples(st.integers(1, 2), st.integers(1, 3)))
def test_folded_batches_are_batches_apart(queries: int, keys: int, batch: tuple[int, int]) -> None:
    q, k, v = inputs(batch[0] * batch[1], 2, queries, keys)
    folded = foci.attention(*(t.unflatten(0, batch) for t in (q, k, v)), mask=foci.causal)
    torch.testing.assert_close(folded.flatten(0, 1), foci.attention(q, k, v, mask=foci.causal))
    # A key and a value that all share are broadcast.
    shared = foci.attention(q.unflatten(0, batch), k[:1].unflatten(0, (1, 1)), v[:1].unflatten(0, (1, 1)))
    torch.testing.assert_close(shared.flatten(0, 1), foci.attention(q, k[:1].expand_as(k), v[:1].expand_as(v)))


@few
@given(queries=lengths, keys=lengths, mask=masks)
def test_a_dot_of_projections_is_a_general_score(queries: int, keys: int, mask: Mask | None) -> None:
    q, k, v = inputs(2, 2, queries, keys)
    to_query, to_key = randn(4, 6, seed=8), randn(4, 6, seed=9)
    projected = foci.attention(q @ to_query, k @ to_key, v, mask=mask, score=foci.Dot(scale=1.0))
    general = foci.attention(q, k, v, mask=mask, score=foci.General(to_query @ to_key.mT))
    torch.testing.assert_close(projected, general)


@few
@given(keys=st.integers(2, 9), seed=st.integers(0, 99), backend=st.sampled_from(BACKENDS))
def test_a_growing_scale_becomes_a_hash_table(keys: int, seed: int, backend: str) -> None:
    """A soft lookup turns into an exact one: the value of the key that is asked for."""
    k = torch.nn.functional.normalize(randn(1, 1, keys, 8, seed=seed), dim=-1)
    v = randn(1, 1, keys, 3, seed=seed + 1)
    asked = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))
    found = [foci.attention(k[:, :, asked], k, v, score=foci.Dot(scale), backend=backend) for scale in (1.0, 10.0, 1e6)]
    errors = [float((out - v[:, :, asked]).abs().max()) for out in found]
    assert errors[2] <= 1e-12 < errors[0]
    assert errors[1] < errors[0]


@few
@given(cuts=st.lists(st.integers(0, 9), min_size=1, max_size=3), mask=masks, score=scores, sunk=st.booleans())
def test_merged_parts_equal_the_whole(cuts: list[int], mask: Mask | None, score: foci.Score, sunk: bool) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(2, 2, 5, 9))
    edges = [0, *sorted(cuts), 9]
    sink = randn(2, seed=4).requires_grad_()
    joined = as_mask(torch.ones(5, 9, dtype=torch.bool)) if mask is None else mask
    spread = torch.arange(4, 9), torch.arange(9)
    parts = []
    for index, (start, stop) in enumerate(pairwise(edges)):
        some = slice(start, stop)
        shown = joined.fit(call_sizes(5, 9)).visible(everywhere(5, 9))[..., some].expand(2, 2, 5, stop - start)
        out, weights = foci.attention(
            *(q, k[:, :, some], v[:, :, some]),
            mask=shown,
            score=score,
            sink=sink if sunk and index == 0 else None,
            positions=(spread[0], spread[1][some]),
            return_weights=True,
        )
        parts.append((out, weights.lse))
    out, lse = foci.merge(parts)
    whole, weights = foci.attention(q, k, v, mask=joined, score=score, sink=sink if sunk else None, return_weights=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, weights.lse)
    leaves = [q, k, v, *([sink] if sunk else [])]
    torch.testing.assert_close(slopes(out, lse, leaves), slopes(whole, weights.lse, leaves))


def call_sizes(queries: int, keys: int) -> CallSizes:
    return CallSizes((2,), 2, queries, keys, torch.device("cpu"))


def everywhere(queries: int, keys: int) -> Tile:
    index = [
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate((2, 2, queries, keys))
    ]
    batch, head, query, key = index
    return Tile(batch, head, query, key, query + keys - queries, key)


def slopes(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of some mix of both results."""
    mixed = (out * randn(*out.shape, seed=11)).sum() + (
        torch.where(lse.isinf(), 0.0, lse) * randn(*lse.shape, seed=12)
    ).sum()
    return torch.autograd.grad(mixed, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [None, foci.causal], ids=str)
def test_large_scores_stay_finite(backend: str, dtype: torch.dtype, mask: Mask | None) -> None:
    q, k, v = ((t * 100).to(dtype).requires_grad_() for t in inputs(1, 2, 5, 5))
    out, weights = foci.attention(q, k, v / 100, mask=mask, score=foci.Dot(1.0), backend=backend, return_weights=True)
    assert bool(weights.lse.max() > 1e4)
    (out.sum() + weights.lse.sum()).backward()
    assert all(bool(t.isfinite().all()) for t in (out, weights.lse, weights.dense(), q.grad, k.grad, v.grad))
    torch.testing.assert_close(weights.dense().sum(-1), torch.ones_like(weights.lse))


def leaf(*shape: int, seed: int) -> Tensor:
    return randn(*shape, seed=seed).requires_grad_()


Build = Callable[..., dict[str, Any]]

# The extra tensors of a call, and how its arguments are made of them.
DERIVED: dict[str, tuple[list[tuple[int, ...]], Build]] = {
    "plain": ([], dict),
    "causal": ([], lambda: {"mask": foci.causal}),
    "window": ([], lambda: {"mask": foci.window(1, 1)}),
    "padding": ([], lambda: {"mask": foci.padding([2, 0])}),
    "sink": ([(2,)], lambda sink: {"sink": sink, "mask": foci.causal}),
    "softcap": ([], lambda: {"score": foci.Dot(softcap=1.5)}),
    "additive": ([(3,)], lambda weight: {"score": foci.Additive(weight)}),
    "additive heads": ([(2, 3)], lambda weight: {"score": foci.Additive(weight), "mask": foci.causal}),
    "general": ([(3, 3)], lambda matrix: {"score": foci.General(matrix)}),
    "general heads": ([(2, 3, 3)], lambda matrix: {"score": foci.General(matrix)}),
    "cosine": ([(2,)], lambda scale: {"score": foci.Cosine(scale)}),
    "alibi": ([(2,)], lambda slopes: {"bias": foci.ALiBi(slopes)}),
    "buckets": ([(4, 2)], lambda table: {"bias": foci.Buckets(table, bidirectional=True, max_distance=3)}),
    "relative": ([(5, 3)], lambda keys: {"bias": foci.Relative(keys)}),
    "relative values": ([(2, 3, 3), (2, 3, 3)], lambda keys, values: {"bias": foci.Relative(keys, values)}),
    "bias": ([(2, 1, 4)], lambda bias: {"bias": bias}),
    "bias rows": ([(2, 1, 3, 1)], lambda bias: {"bias": bias, "mask": foci.causal}),
    "everything": (
        [(2,), (2, 3), (5, 3)],
        lambda sink, weight, keys: {
            "sink": sink,
            "score": foci.Additive(weight),
            "bias": foci.Relative(keys),
            "mask": foci.causal & foci.window(2),
        },
    ),
}
BY_SDPA = {"plain", "padding", "sink", "general", "general heads", "cosine"}


@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, "blocked") for case in DERIVED] + [(case, "sdpa") for case in DERIVED if case in BY_SDPA],
)
def test_derivatives_equal_finite_differences(case: str, backend: str) -> None:
    shapes, build = DERIVED[case]
    queries = 4 if backend == "sdpa" else 3
    base = [leaf(2, 2, queries, 3, seed=1), leaf(2, 1, 4, 3, seed=2), leaf(2, 1, 4, 3, seed=3)]
    extra = [leaf(*shape, seed=4 + i) for i, shape in enumerate(shapes)]

    def both(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *rest = leaves
        out, weights = foci.attention(q, k, v, **build(*rest), backend=backend, return_weights=True)
        return out, torch.where(weights.lse.isinf(), 0.0, weights.lse)

    assert torch.autograd.gradcheck(both, [*base, *extra], fast_mode=False)


def test_a_hidden_entry_of_a_learned_bias_has_no_gradient() -> None:
    q, k, v = inputs(1, 1, 3, 4)
    bias = torch.zeros(3, 4, dtype=torch.float64)
    bias[0], bias[1, 2] = -math.inf, -math.inf
    bias.requires_grad_()
    out = foci.attention(q, k, v, bias=bias)
    out.square().sum().backward()
    assert bool((out[0, 0, 0] == 0).all())
    assert bool(bias.grad.isfinite().all())
    assert bool((bias.grad[0] == 0).all())
    assert float(bias.grad[1, 2]) == 0
    assert bool((bias.grad[1, :2] != 0).all())
