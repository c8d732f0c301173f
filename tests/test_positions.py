"""The sinusoidal table and the rotation against formulas written another way, and what they promise."""

import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import foci
import foci.positions
from foci.positions import rotary, sinusoidal


def turned_as_complex(x: torch.Tensor, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Interleaved rotary by complex numbers, in float64: a pair is a number, a rotation a product."""
    width = x.shape[-1]
    speed = torch.tensor([base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    angles = positions.double()[..., None] * speed
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """The columns of the half layout in the order of the interleaved one."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def test_the_examples_in_the_docstrings_run() -> None:
    result = doctest.testmod(foci.positions, extraglobs={"foci": foci, "torch": torch})
    assert (result.failed, result.attempted > 5) == (0, True)


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_sinusoidal_is_the_formula(width: int) -> None:
    table = sinusoidal(11, width, base=100.0, dtype=torch.float64)
    assert table.shape == (11, width)
    for position in range(11):
        for column in range(width):
            angle = position / 100.0 ** (2 * (column // 2) / width)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[position, column].item() == pytest.approx(expected, abs=1e-15)


def test_sinusoidal_is_exact_far_out() -> None:
    table = sinusoidal(100_001, 6)
    assert table.dtype == torch.float32
    assert table[100_000, 0].item() == pytest.approx(math.sin(100_000.0), abs=1e-7)
    assert table[100_000, 2].item() == pytest.approx(math.sin(100_000.0 / 10000.0 ** (2 / 6)), abs=1e-7)


def test_sinusoidal_follows_dtype_and_device() -> None:
    assert sinusoidal(3, 4, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert sinusoidal(3, 4, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert sinusoidal(3, 4).device.type == "meta"
    assert sinusoidal(0, 4).shape == (0, 4)


def test_sinusoidal_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="width >= 1, got length 3 and width 0"):
        sinusoidal(3, 0)
    with pytest.raises(TypeError, match=r"floating point dtype, got torch.int64"):
        sinusoidal(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="base must be > 0, got 0"):
        sinusoidal(3, 4, base=0)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (3, 2, 5, 8), (3, 2, 4, 5, 8)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_product_of_complex_numbers(shape: tuple[int, ...], interleaved: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    got = rotary(x, base=50.0, interleaved=interleaved)
    if not interleaved:
        x, got = interleave(x), interleave(got)
    torch.testing.assert_close(got, turned_as_complex(x, torch.arange(5), base=50.0))


def test_positions_per_row_line_up_with_the_batch() -> None:
    x, positions = torch.randn(3, 2, 4, 5, 8), torch.randint(0, 1000, (3, 5))
    got = rotary(x, positions)
    for row in range(3):
        torch.testing.assert_close(got[row], rotary(x[row], positions[row]), rtol=0, atol=0)
    torch.testing.assert_close(rotary(x, positions[:1]), rotary(x, positions[0]), rtol=0, atol=0)
    torch.testing.assert_close(rotary(x[:, 0, 0], positions), got[:, 0, 0], rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 100_000), st.booleans())
def test_scores_depend_on_the_distance_alone(m: int, n: int, shift: int, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(m + n)
    q, k = torch.randn(2, 1, 16, dtype=torch.float64, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            rotary(x, torch.tensor([p]), interleaved=interleaved) for x, p in ((q, query_position), (k, key_position))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(m, n) == pytest.approx(score(m + shift, n + shift), abs=1e-8)
    assert rotary(q, torch.tensor([m])).norm().item() == pytest.approx(q.norm().item())


def test_the_score_does_change_with_the_distance() -> None:
    x = torch.randn(1, 16, dtype=torch.float64)
    near, far = (rotary(x, torch.tensor([p])) for p in (1, 2))
    assert abs((x * near).sum() - (x * far).sum()) > 1e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_leaves_the_other_columns(interleaved: bool) -> None:
    x = torch.randn(2, 5, 10)
    got = rotary(x, width=4, interleaved=interleaved)
    torch.testing.assert_close(got[..., 4:], x[..., 4:], rtol=0, atol=0)
    torch.testing.assert_close(got[..., :4], rotary(x[..., :4], interleaved=interleaved), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(2, 64, 32).to(dtype)
    got, truth = rotary(x, interleaved=True), turned_as_complex(x, torch.arange(64))
    assert got.dtype == dtype
    # Half a unit in the last place, and what a float32 angle below 64 is off by.
    limit = torch.finfo(dtype).eps / 2 * truth.abs() + 1e-5 * x.double().abs().max()
    assert bool(((got.double() - truth).abs() <= limit).all())


def test_gradients() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 5, 9, 2], [1, 1, 7, 3]])
    assert torch.autograd.gradcheck(lambda x: rotary(x, positions, width=4), (x,))
    assert torch.autograd.gradcheck(lambda x: rotary(x, interleaved=True), (x,))


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"width": 4}])
@pytest.mark.parametrize("rows", [None, 1, 2])
def test_compiles_as_one_graph(options: dict[str, int], rows: int | None) -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    positions = None if rows is None else torch.arange(5 * rows).reshape(rows, 5)
    torch.compiler.reset()
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    got, expected = compiled(x, positions, **options), rotary(x, positions, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0], rtol=0, atol=0
    )


def test_nothing_is_read_from_the_device() -> None:
    # A meta tensor has no values: reading one would raise.
    x, positions = torch.empty(2, 3, 5, 8, device="meta"), torch.empty(2, 5, dtype=torch.int32, device="meta")
    assert rotary(x, positions).shape == x.shape


def test_rotary_refuses_wrong_arguments() -> None:
    x = torch.randn(2, 3, 5, 8)
    with pytest.raises(ValueError, match="width must be even and from 2 to D = 7, got 7"):
        rotary(x[..., :7])
    with pytest.raises(ValueError, match="width must be even and from 2 to D = 8, got 10"):
        rotary(x, width=10)
    with pytest.raises(ValueError, match=r"shape \(5,\) or \(2, 5\) for x \(2, 3, 5, 8\), got \(4,\)"):
        rotary(x, torch.arange(4))
    with pytest.raises(ValueError, match=r"shape \(5,\) for x \(5, 8\), got \(1, 5\)"):
        rotary(x[0, 0], torch.arange(5)[None])
    with pytest.raises(TypeError, match=r"int tensor, got torch.float32"):
        rotary(x, torch.arange(5.0))
    with pytest.raises(ValueError, match="positions must be on cpu like x, got meta"):
        rotary(x, torch.arange(5, device="meta"))
    with pytest.raises(ValueError, match=r"x must be a floating point tensor \(..., T, D\), got \(5, 8\)"):
        rotary(torch.ones(5, 8, dtype=torch.int64))
