"""What one process of tests/sharding checks: calls of DTensors against the same calls of plain tensors.

Usage: python -m tests.sharding.worker few|calls|pairs|dies
"""

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import foci
from foci.sharding.balance import head_tail_order
from foci.sharding.weights import ShardedWeights

B, H, G, T, D = 3, 4, 2, 11, 8
BATCH, HEADS, TOKENS = Shard(0), Shard(1), Shard(2)
Options = dict[str, Any]
# On one GPU the processes share it, in float32.
DEVICE = os.environ.get("FOCI_TEST_DEVICE", "cpu")
assert_close = partial(torch.testing.assert_close, **({} if DEVICE == "cpu" else {"rtol": 1e-3, "atol": 1e-3}))


def rand(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x if DEVICE == "cpu" else x.float().to(DEVICE)


def ids() -> Tensor:
    return torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2, [0] * 11], device=DEVICE)


def cases() -> dict[str, Options]:
    """Calls of (B, H, T, D); every tensor with a gradient is a parameter."""
    return {
        "plain": {},
        "causal": {"mask": foci.causal},
        "padding": {"mask": foci.padding([11, 6, 3])},
        "documents": {"mask": foci.causal & foci.documents(ids())},
        "alibi": {"mask": foci.causal, "bias": foci.ALiBi()},
        "additive": {"score": foci.Additive(rand(H, D, seed=7).requires_grad_())},
        "window": {"mask": foci.causal & foci.window(3)},
        "both sides": {"mask": foci.window(2, 3), "bias": foci.ALiBi()},
        "left padding": {"mask": foci.causal & foci.padding([11, 6, 3], side="left")},
        "prefix": {"mask": (foci.causal | foci.prefix(4)) & ~foci.window(1, 0)},
        "offset": {"mask": foci.causal.at(2)},
        "function": {"mask": foci.mask_function(lambda b, h, q, k: (q + k + h + b) % 3 != 0)},
        "bool tensor": {"mask": rand(B, 1, T, T, seed=8) > -0.5},
        "float tensor": {"bias": rand(1, H, T, T, seed=8).requires_grad_()},
        "buckets": {"bias": foci.Buckets(rand(8, H, seed=6).requires_grad_(), bidirectional=True, max_distance=8)},
        "relative": {"bias": foci.Relative(rand(5, D, seed=5).requires_grad_(), rand(5, D, seed=4).requires_grad_())},
        "cosine": {"score": foci.Cosine(rand(H, seed=3).exp().requires_grad_()), "mask": foci.causal},
        "sink": {"sink": rand(H, seed=2).requires_grad_(), "mask": foci.causal},
        "positions": {
            "mask": foci.causal,
            "positions": (torch.arange(T, device=DEVICE) + 3, torch.arange(T, device=DEVICE).flip(0)),
        },
    }


Statistic = Callable[[Any], Any]
STATISTICS: dict[str, Statistic] = {
    "entropy": lambda w: w.entropy(),
    "received": lambda w: w.received(),
    "received by some": lambda w: w.received(queries=[1, 9]),
    "picture": lambda w: w.picture(3, 4),
    "picture of maxima": lambda w: w.picture(3, 4, "max"),
    "grouped": lambda w: w.grouped([(0, 4), (5, 11)], [(4, 9), (0, 3)]),
    "distance": lambda w: w.distance(),
    "largest_logit": lambda w: w.largest_logit(),
    "sink_mass": lambda w: w.sink_mass(),
    "lse": lambda w: w.lse,
    "top values": lambda w: w.top(2).values,
    "top keys": lambda w: w.top(2).keys,
    "row": lambda w: w[0, 1, 3],
    "rows": lambda w: w[..., 2:7, :5],
    "column": lambda w: w[:, 1:3, :, 3],
    "all": lambda w: w.dense(),
    "product": lambda w: w @ rand(B, 1, T, 3, seed=9),
    "product with a vector": lambda w: w @ rand(T, seed=9),
    "transposed product": lambda w: w.T @ rand(T, 3, seed=9),
    "product from the left": lambda w: rand(B, H, 5, T, seed=9) @ w,
    "summary": lambda w: w.summary(top=2, picture=4).picture,
    "mean entropy": lambda w: w.mean("heads").entropy(),
    "mean received": lambda w: w.mean("heads").received(),
    "mean top": lambda w: w.mean("heads").top(2).values,
    "mean picture": lambda w: w.mean("heads").picture(3, 3, "max"),
    "mean row": lambda w: w.mean("heads")[:, 3],
    "mean product": lambda w: w.mean("heads") @ rand(T, 3, seed=9),
    "mean distance": lambda w: w.mean("heads").distance(),
}
DIFFERENTIABLE = ("entropy", "received", "grouped", "distance", "rows", "product", "mean entropy", "mean received")


def parameters(options: Options) -> list[Tensor]:
    parts = [options.get("score"), options.get("bias"), options.get("sink")]
    tensors: list[Tensor] = []
    for part in parts:
        values = [part] if isinstance(part, Tensor) else [] if part is None else part.tensors().values()
        tensors += [each for each in values if each.requires_grad]
    return tensors


def distribute(options: Options, mesh: DeviceMesh) -> Options:
    """The same options with their parameters as replicated DTensors, whose gradients are summed over the processes."""
    from foci.weights.parts_file import map_tensors

    def replicate(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        return distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim).requires_grad_()

    return {name: map_tensors(part, replicate) for name, part in options.items()}


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_call(name: str, mesh: DeviceMesh, placements: list[Placement], options: Options, kv_heads: int = G) -> None:
    """Output, gradients and statistics of a call of DTensors equal those of plain tensors."""
    inputs = [rand(B, H, T, D), rand(B, kv_heads, T, D, seed=1), rand(B, kv_heads, T, D, seed=2)]
    plain = [each.clone().requires_grad_() for each in inputs]
    sharded = [distribute_tensor(each, mesh, placements).requires_grad_() for each in inputs]
    spread = distribute(options, mesh)
    out, weights = foci.attention(*plain, **options, return_weights=True)
    found, lazy = foci.attention(*sharded, **spread, return_weights=True)
    assert isinstance(lazy, ShardedWeights)
    assert lazy.shape == weights.shape
    assert found.placements == tuple(placements), (name, found.placements)
    assert_close(found.full_tensor(), out, msg=lambda text: f"{name}: {text}")
    for statistic, compute in STATISTICS.items():
        expected, got = compute(weights), compute(lazy)
        assert_close(got.full_tensor(), expected, msg=lambda text, at=statistic: f"{name}, {at}: {text}")
    shared = rand(B, kv_heads, T, 3, seed=9)
    assert_close((lazy @ shared).full_tensor(), weights @ shared)
    assert lazy.entropy().placements == tuple(placements)
    for axis, received in zip(placements, lazy.received().placements, strict=True):
        assert received.is_partial() if axis == TOKENS else received == axis
    assert_close(lazy.full().dense(), weights.dense())
    losses = [(found.full_tensor() * rand(B, H, T, D, seed=5)).sum(), (out * rand(B, H, T, D, seed=5)).sum()]
    for statistic in DIFFERENTIABLE:
        for index, values in enumerate((STATISTICS[statistic](lazy).full_tensor(), STATISTICS[statistic](weights))):
            losses[index] = losses[index] + (values * rand(*values.shape, seed=6)).sum()
    for loss in losses:
        loss.backward()
    pairs = zip([*plain, *parameters(options)], [*sharded, *parameters(spread)], strict=True)
    for index, (expected, got) in enumerate(pairs):
        assert_close(whole(got.grad), expected.grad, msg=lambda text, at=index: f"{name}, {at}: {text}")
        expected.grad = None


def check_shapes(mesh: DeviceMesh, placement: Callable[[Tensor], Placement]) -> None:
    """Inputs without heads, with several batch dimensions, of unequal lengths, and fewer tokens than processes."""
    for shape in ((T, D), (B, T, D), (2, B, H, T, D), (1, 1, 1, D), (1, 2, 0, D)):
        x = rand(*shape)
        on = [placement(x)] * mesh.ndim
        out = foci.attention(*(distribute_tensor(x, mesh, on) for _ in range(3)), mask=foci.causal)
        assert_close(out.full_tensor(), foci.attention(x, x, x, mask=foci.causal))
    for queries, keys in ((3, T), (T, 3), (T, 0)):
        q, k = rand(B, H, queries, D), rand(B, H, keys, D, seed=1)
        dq, dk = (distribute_tensor(each, mesh, [placement(each)] * mesh.ndim) for each in (q, k))
        for mask in (foci.causal, foci.window(2, 1), foci.causal & foci.padding([keys, keys // 2, 0])):
            out, weights = foci.attention(dq, dk, dk, mask=mask, return_weights=True)
            expected, matrix = foci.attention(q, k, k, mask=mask, return_weights=True)
            assert_close(out.full_tensor(), expected)
            assert_close(weights.entropy().full_tensor(), matrix.entropy())
            assert_close(weights.distance().full_tensor(), matrix.distance())


def check_balanced(mesh: DeviceMesh) -> None:
    """In head-tail order, with the order as positions, causal attention gives the same rows in another order."""
    length = 4 * mesh.size()
    x, order = rand(1, 2, length, D), head_tail_order(length, mesh.size(), DEVICE)
    expected, matrix = foci.attention(x, x, x, mask=foci.causal, return_weights=True)
    y = distribute_tensor(x[:, :, order], mesh, [TOKENS])
    out, weights = foci.attention(y, y, y, mask=foci.causal, positions=(order, order), return_weights=True)
    assert_close(out.full_tensor()[:, :, order.argsort()], expected)
    assert_close(weights.distance().full_tensor(), matrix.distance()[:, :, order])


def check_refusals(mesh: DeviceMesh) -> None:
    x = rand(B, H, T, D)
    y = distribute_tensor(x, mesh, [TOKENS])
    _, weights = foci.attention(y, y, y, return_weights=True)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "must all be DTensors", lambda: foci.attention(y, x, x)),
        (TypeError, "must all be DTensors", lambda: foci.attention(x, y, y)),
        (ValueError, "lengths must", lambda: foci.attention(y, y, y, mask=foci.padding([1, 2]))),
        (ValueError, "slopes must", lambda: foci.attention(y, y, y, bias=foci.ALiBi(torch.ones(2)))),
        (IndexError, "must name queries or keys", lambda: weights[0]),
        (ValueError, "rows must be", lambda: weights.picture(T + 1, 2)),
        (ValueError, "over must be", lambda: weights.mean("queries")),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()


def check_watching(mesh: DeviceMesh) -> None:
    """foci.watch records the whole matrix on every process, and foci.Monitor merges the statistics of all."""

    class Attending(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = foci.attention(x, x, x, mask=foci.causal)
            return out

    model, x = Attending(), rand(B, H, T, D)
    for placement in (HEADS, TOKENS):
        y = distribute_tensor(x, mesh, [placement])
        _, expected = foci.attention(x, x, x, mask=foci.causal, return_weights=True)
        with foci.watch(model) as record:
            model(y)
        assert_close(record["L0"].weights.dense(), expected.dense())
        with foci.watch(model, keep=foci.Keep()) as record:
            model(y)
        with foci.watch(model, keep=foci.Keep()) as alone:
            model(x)
        assert_close(record["L0"].entropy(), alone["L0"].entropy())
        monitors = [foci.Monitor(model, every=1) for _ in range(2)]
        for monitor, inputs in zip(monitors, (y, x), strict=True):
            with monitor:
                model(inputs)
            monitor.log()
        for statistic, values in monitors[1].latest.layers["L0"].items():
            assert_close(monitors[0].latest.layers["L0"][statistic], values, equal_nan=True)


def pairs() -> Iterator[tuple[list[Placement], int]]:
    """Pairs of placements on a 2 x 2 mesh, with the number of key/value heads."""
    for placements in ([BATCH, TOKENS], [HEADS, TOKENS], [BATCH, HEADS], [TOKENS, TOKENS], [Replicate(), TOKENS]):
        yield placements, G
    # A key/value head whose query heads are on two processes.
    yield [HEADS, TOKENS], 1


def main(check: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world = dist.get_world_size()
    line = init_device_mesh(DEVICE, (world,), mesh_dim_names=("line",))
    if check == "few":
        check_watching(line)
        for name, options in list(cases().items())[:6]:
            check_call(name, line, [TOKENS], options)
        check_call("heads", line, [HEADS], {"mask": foci.causal, "bias": foci.ALiBi()})
        check_call("batch", line, [BATCH], {"mask": foci.causal & foci.documents(ids())})
        check_balanced(line)
        check_refusals(line)
    elif check == "calls":
        for placement in (TOKENS, HEADS, BATCH):
            for name, options in cases().items():
                check_call(name, line, [placement], options)
        check_call("shared heads", line, [HEADS], {"mask": foci.causal}, kv_heads=1)
        check_shapes(line, lambda x: Shard(x.dim() - 2))
        check_shapes(line, lambda x: Shard(0))
        check_balanced(line)
    elif check == "pairs":
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("rows", "columns"))
        for placements, kv_heads in pairs():
            for name, options in cases().items():
                check_call(name, mesh, placements, options, kv_heads)
    elif check == "dies":
        if dist.get_rank() == world - 1:
            os._exit(3)
        y = distribute_tensor(rand(B, H, T, D), line, [TOKENS], src_data_rank=None)
        foci.attention(y, y, y)
    print("passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
