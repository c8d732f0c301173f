"""Each bias against its definition: T5's buckets, the slopes of ALiBi, Shaw's vectors."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

import foci
from foci.biases import default_slopes
from tests.tensors import qkv, randn


def logits(bias: foci.Bias | Tensor, q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    """The finished logits of a call, taken apart from its weights and its log-sum-exp."""
    _, weights = foci.attention(q, k, k, bias=bias, score=foci.Dot(scale), return_weights=True, backend="reference")
    return weights.dense().log() + weights.lse.unsqueeze(-1)


def far_bucket(distance: int, exact: int, buckets: int, max_distance: int) -> int:
    """exact + floor(log(distance / exact) / log(max_distance / exact) · (buckets - exact)), in whole numbers."""
    steps = buckets - exact
    ratio, base = Fraction(distance, exact) ** steps, Fraction(max_distance, exact)
    return min(exact + next(j for j in range(steps, -1, -1) if ratio >= base**j), buckets - 1)


def t5_bucket(distance: int, buckets: int, bidirectional: bool, max_distance: int) -> int:
    """T5's definition; distance is the key's position minus the query's."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    return start + (distance if distance < exact else far_bucket(distance, exact, buckets, max_distance))


@pytest.mark.parametrize(
    ("buckets", "bidirectional", "max_distance"),
    [
        (32, True, 128),
        (32, False, 128),
        (8, True, 16),
        (6, False, 9),
        (9, True, 20),
        (64, True, 1024),
        (16, False, 100),
    ],
)
def test_buckets_are_those_of_t5(buckets: int, bidirectional: bool, max_distance: int) -> None:
    distances = range(-2 * max_distance, 2 * max_distance + 1)
    found = foci.Buckets(torch.zeros(buckets, 1), bidirectional, max_distance).bucket(torch.tensor(distances))
    assert found.tolist() == [t5_bucket(distance, buckets, bidirectional, max_distance) for distance in distances]


def test_known_buckets() -> None:
    """Of the published models: 32 buckets, 128 as the largest distance."""
    both = foci.Buckets(torch.zeros(32, 1), bidirectional=True, max_distance=128)
    distances = torch.tensor([0, -1, 1, -7, 7, -8, 8, -11, -12, -16, -23, -32, -64, -90, -91, -128, -1000, 128])
    known = [0, 1, 17, 7, 23, 8, 24, 8, 9, 10, 11, 12, 14, 14, 15, 15, 15, 31]
    assert both.bucket(distances).tolist() == known
    back = foci.Buckets(torch.zeros(32, 1), bidirectional=False, max_distance=128)
    assert back.bucket(torch.tensor([5, 0, -1, -15, -16, -20, -112, -113])).tolist() == [0, 0, 1, 15, 16, 17, 30, 31]


def test_buckets_add_their_entry_for_each_head() -> None:
    q, k, _ = qkv(4, 7, torch.float64)
    bias = foci.Buckets(randn(8, 4, seed=4, dtype=torch.float64), bidirectional=True, max_distance=5)
    added = logits(bias, q, k) - logits(torch.zeros(1, dtype=torch.float64), q, k)
    for h, i, j in torch.cartesian_prod(torch.arange(4), torch.arange(4), torch.arange(7)).tolist():
        # Query i stands at i + 7 - 4.
        expected = bias.table[t5_bucket(j - (i + 3), 8, True, 5), h]
        torch.testing.assert_close(added[:, h, i, j], expected.expand(2))


def test_slopes_of_powers_of_two_and_between() -> None:
    q = torch.zeros(1)
    assert default_slopes(8, q).tolist() == [2.0**-i for i in range(1, 9)]
    assert default_slopes(1, q).tolist() == [2.0**-8]
    between = default_slopes(12, q)
    assert between[:8].tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(between[8:], torch.tensor([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]))
    assert all(default_slopes(heads, q).numel() == heads for heads in range(1, 40))


def test_alibi_subtracts_slope_times_distance() -> None:
    q, k = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 4, 4)
    added = logits(foci.ALiBi(), q, k)
    torch.testing.assert_close(added[0, 0], torch.tensor([[-1.0, -0.5, 0.0, -0.5], [-1.5, -1.0, -0.5, 0.0]]))
    torch.testing.assert_close(added[0, 7], added[0, 0] / 128)
    learned = logits(foci.ALiBi(torch.arange(8.0)), q, k)
    torch.testing.assert_close(learned[0, 5], added[0, 0] * 10)


def test_the_row_in_the_docstring_of_alibi() -> None:
    row = next(line for line in foci.ALiBi.__doc__.splitlines() if line.strip().startswith("-1.5"))
    q = torch.zeros(1, 8, 4, 2)
    torch.testing.assert_close(logits(foci.ALiBi(), q, q)[0, 0, 3], torch.tensor([float(n) for n in row.split()]))


@pytest.mark.parametrize("headed", [False, True])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_relative_vectors_by_brute_force(headed: bool, values: bool, scale: float) -> None:
    q, k, v = qkv(4, 7, torch.float64)
    shape = (4, 5, 8) if headed else (5, 8)
    near, far = randn(*shape, seed=4, dtype=torch.float64), randn(*shape, seed=5, dtype=torch.float64)
    bias = foci.Relative(near, far if values else None)
    out, weights = foci.attention(q, k, v, bias=bias, score=foci.Dot(scale), return_weights=True)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(4)).tolist():
        # clip is 2, and query i stands at i + 3; the key's term joins the dot product before the scale.
        rows = [min(max(j - (i + 3), -2), 2) + 2 for j in range(7)]
        keys, added = (table[h][rows] if headed else table[rows] for table in (near, far))
        row = torch.softmax(scale * ((k[b, h // 2] + keys) @ q[b, h, i]), dim=0)
        torch.testing.assert_close(weights[b, h, i], row)
        torch.testing.assert_close(out[b, h, i], row @ (v[b, h // 2] + added if values else v[b, h // 2]))


def test_a_table_of_one_row_is_the_same_everywhere() -> None:
    q, k, v = qkv(4, 7)
    shifted = foci.attention(q, k, v, bias=foci.Relative(randn(1, 8), torch.ones(1, 8)))
    torch.testing.assert_close(shifted, foci.attention(q, k, v) + 1.0)


@pytest.mark.parametrize(
    "shape", [(7,), (4, 1), (4, 7), (4, 1, 7), (4, 4, 7), (2, 1, 4, 7), (2, 4, 4, 7), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("backend", ["sdpa", "blocked", "reference"])
def test_a_float_tensor_is_broadcast_and_minus_infinity_masks(shape: tuple[int, ...], backend: str) -> None:
    q, k, v = qkv(4, 7)
    entries = randn(*shape, seed=6)
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.3
    whole = foci.attention(q, k, v, bias=entries.expand(2, 4, 4, 7).contiguous(), mask=~hidden, backend="reference")
    found = foci.attention(q, k, v, bias=entries.masked_fill(hidden, -torch.inf), backend=backend)
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_far_distances_are_exact_in_half_precision(dtype: torch.dtype) -> None:
    """A distance of 3001 has no place in bfloat16: biases are taken in float32 whatever the queries are."""
    q, k = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, 3002, 8, dtype=dtype)
    slope = torch.tensor([2.0**-10])
    _, weights = foci.attention(q, k, k, bias=foci.ALiBi(slope.to(dtype)), return_weights=True)
    expected = torch.softmax(-(2.0**-10) * torch.arange(3001, -1, -1), dim=0)
    torch.testing.assert_close(weights[0, 0, 0], expected)
