"""Distance bias kernels on a GPU with many tiles: correct, deterministic, and with little memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import foci
from tests.checker import Problem, Tensors, answers
from tests.kernels.test_distance_bias import Make, check_problem
from tests.kernels.test_distance_bias import _nan_in_fresh_memory as _nan_in_fresh_memory

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*CuBLAS:UserWarning")]

# Each case compiles three kernels, so not all combinations are tested.
GPU_SHAPES = [
    *((kind, width, torch.bfloat16) for kind in ("alibi", "buckets", "values") for width in (64, 128)),
    ("values", (72, 40), torch.bfloat16),
    ("values", 256, torch.bfloat16),
    ("buckets", 16, torch.float16),
    ("buckets", 64, torch.float32),
    ("values", (40, 72), torch.float32),
    ("values", 256, torch.float32),
]


def long_problem(kind: str, width: int, value_width: int, dtype: torch.dtype, queries: int, keys: int) -> Problem:
    """Several tiles of the sizes used on a GPU: far from and near the diagonal, partly and fully visible."""
    shapes = {"query": (2, 4, queries, width), "key": (2, 2, keys, width), "value": (2, 2, keys, value_width)}
    if kind == "buckets":
        shapes["table"] = (32, 4)
    elif kind == "alibi":
        shapes["slopes"] = (4,)
    else:
        shapes |= {"near": (33, width), "far": (33, value_width)}
    generator = torch.Generator().manual_seed(width)
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    makes: dict[str, Make] = {
        "buckets": lambda t: foci.Buckets(t["table"], True, 128),
        "alibi": lambda t: foci.ALiBi(t["slopes"].abs() / 8),
        "values": lambda t: foci.Relative(t["near"], t["far"]),
    }

    def arguments(leaves: Tensors) -> dict[str, Any]:
        given = {name: leaves[name] for name in ("query", "key", "value")}
        return given | {"bias": makes[kind](leaves), "mask": foci.causal if width % 64 else None}

    return Problem(tensors, arguments, dtype)


@pytest.mark.parametrize(("kind", "width", "dtype"), GPU_SHAPES)
def test_many_tiles(kind: str, width: int | tuple[int, int], dtype: torch.dtype) -> None:
    widths = (width, width) if isinstance(width, int) else width
    check_problem(long_problem(kind, *widths, dtype, 517, 645))


@pytest.mark.parametrize("kind", ["alibi", "buckets", "values"])
def test_results_are_deterministic(kind: str) -> None:
    problem = long_problem(kind, 64, 64, torch.bfloat16, 2048, 2048)
    one, two = (answers(problem, "triton", device="cuda") for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["alibi", "buckets", "values"])
def test_memory_is_linear_in_the_length(kind: str) -> None:
    def beyond(length: int) -> int:
        leaves = long_problem(kind, 64, 64, torch.bfloat16, length, length).leaves(torch.bfloat16, "cuda")
        arguments = long_problem(kind, 64, 64, torch.bfloat16, length, length).arguments(leaves)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = foci.attention(**arguments)
        torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    # The first product in a thread allocates a workspace that cuBLAS keeps.
    beyond(128)
    # Quadratic memory would be 16 times as much.
    assert beyond(8192) < 5 * beyond(2048)


@pytest.mark.parametrize("kind", ["alibi", "buckets", "values"])
def test_triton_backend_is_chosen(kind: str) -> None:
    problem = long_problem(kind, 64, 64, torch.bfloat16, 300, 300)
    assert foci.plan(**problem.arguments(problem.leaves(torch.bfloat16, "cuda"))).chosen == "triton"
