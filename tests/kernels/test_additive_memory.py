"""Additive attention allocates at most as much again as its inputs, outputs and gradients take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

import foci
from foci.gpu.additive import arguments, decode, launch, one_pass_backward, two_pass_backward
from foci.gpu.launcher import LaunchPlan
from tests.kernels.test_additive import NO_OPTIONS

# Batch, heads, queries, keys, width.
SHAPES = [
    (1, 8, 4096, 4096, 64),
    (1, 8, 8192, 8192, 64),
    (4, 8, 1024, 1024, 64),
    (16, 1, 512, 512, 256),
    (64, 1, 128, 128, 256),
]
FEW = [(64, 1, 1, 4096, 256), (8, 8, 1, 32768, 64)]
PROCESSORS = 132


def inputs(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    batch, heads, queries, keys, width = shape
    shapes = [(batch, heads, queries, width), *[(batch, heads, keys, width)] * 2, (width,)]
    return [torch.empty(size, device=device, dtype=dtype) for size in shapes]


def in_bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def in_float32(x: Tensor) -> int:
    return 4 * x.numel()


def arrays_of(plan: LaunchPlan) -> tuple[int, int]:
    """The workspace bytes of a plan, before its last launch and during it."""
    last = 4 * plan.last_workspace.total
    return 4 * plan.workspace.total + last, last


def taken_together(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> int:
    """The bytes of inputs, output and all gradients; the output has the size of the queries."""
    return 2 * (in_bytes(q, k, v, weight) + in_bytes(q))


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        for module in arguments, launch, decode, two_pass_backward:
            monkeypatch.setattr(module, "count_multiprocessors", lambda device: PROCESSORS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_memory_of_the_one_pass_backward(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with FakeTensorMode():
        q, k, v, w = inputs(shape, "cuda:0", dtype)
        tiling = one_pass_backward.choose_one_pass_tiling(q.shape[2], q.device)
        before, last = arrays_of(
            one_pass_backward.plan_one_pass_backward(q, k, v, w, NO_OPTIONS, tiling, PROCESSORS, False)
        )
    gradients = in_bytes(q, k, v, w)
    assert max(before, last + gradients) - gradients <= taken_together(q, k, v, w)


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_of_the_two_pass_backward(shape: tuple[int, ...]) -> None:
    with FakeTensorMode():
        q, k, v, w = inputs(shape, "cuda:0", torch.bfloat16)
        tiling = two_pass_backward.choose_two_pass_tiling(q.shape[2], v.shape[3], q.device)
        programs = two_pass_backward.count_programs(q, k, tiling)
        _, arrays = arrays_of(two_pass_backward.plan_two_pass_backward(q, k, v, w, NO_OPTIONS, tiling, programs))
    arrays += programs[0] * in_float32(w)
    rows, turn = arrays + in_float32(q), arrays + in_float32(q) + in_bytes(q)
    columns, end = arrays + in_bytes(q, v) + in_float32(k), in_bytes(q, k, v) + in_float32(k)
    assert max(rows, turn, columns, end) - in_bytes(q, k, v) <= taken_together(q, k, v, w)


@pytest.mark.parametrize("shape", [*SHAPES, *FEW])
def test_memory_of_the_forward(shape: tuple[int, ...]) -> None:
    with FakeTensorMode():
        q, k, v, w = inputs(shape, "cuda:0", torch.bfloat16)
        make = decode.plan_decode_forward if shape in FEW else launch.plan_tiled_forward
        arrays, _ = arrays_of(make(q, k, v, w, NO_OPTIONS, q, None))
    assert arrays <= taken_together(q, k, v, w)


def test_key_exponentials_follow_query_exponentials() -> None:
    """The last loop iteration of the one-pass backward reads a few floats past E and discards them."""
    q, k, _, weight = inputs(SHAPES[0], "meta", torch.bfloat16)
    tiling = two_pass_backward.choose_two_pass_tiling(4096, 64, torch.device("cpu"))
    sizes = arguments.exponentials_workspace(q, k, weight, tiling)
    assert list(sizes)[:2] == ["E", "F"]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *FEW])
def test_peak_memory_on_a_gpu(shape: tuple[int, ...], deterministic: bool) -> None:
    """Forward and backward: the first call, which compiles, and later ones."""
    leaves = [torch.randn_like(x).requires_grad_() for x in inputs(shape, "cuda", torch.bfloat16)]
    d_out = torch.randn_like(leaves[0])
    results = in_bytes(*leaves, d_out)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = foci.attention(*leaves[:3], score=foci.Additive(leaves[3]), backend="triton")
            gradients = torch.autograd.grad(out, leaves, d_out)
            peak = torch.cuda.max_memory_allocated() - before
            del out, gradients
            assert peak - results <= taken_together(*(x.detach() for x in leaves))
    finally:
        torch.use_deterministic_algorithms(False)
