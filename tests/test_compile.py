"""The call inside a compiled graph, with fake tensors, exported, and under the transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import foci
from foci.backends import blocked
from tests.cases import mark_most_slow
from tests.tensors import qkv, randn

# PyTorch warns about its own code where it traces an autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")

Build = Callable[..., dict[str, Any]]

# Tensors besides query, key and value, and the arguments that the compiled function builds from them.
CASES: dict[str, tuple[list[Tensor], Build]] = {
    "plain": ([], dict),
    "causal": ([], lambda: {"mask": foci.causal}),
    "window": ([], lambda: {"mask": foci.causal & foci.window(2)}),
    "padding": ([torch.tensor([2, 6])], lambda lengths: {"mask": foci.padding(lengths)}),
    "causal padding": ([torch.tensor([2, 6])], lambda lengths: {"mask": foci.causal & foci.padding(lengths)}),
    "documents": ([torch.tensor([0, 0, 1, 1, 1, 2])], lambda ids: {"mask": foci.causal & foci.documents(ids)}),
    "entries": ([torch.ones(6, 6).tril(1).bool()], lambda seen: {"mask": seen}),
    "function": ([], lambda: {"mask": foci.mask_function(lambda b, h, q, k: (q - k) % 2 == 0)}),
    "softcap": ([], lambda: {"score": foci.Dot(softcap=2.0)}),
    "additive": ([randn(8, seed=4)], lambda weight: {"score": foci.Additive(weight)}),
    "general": ([randn(8, 8, seed=4)], lambda matrix: {"score": foci.General(matrix)}),
    "cosine": ([randn(4, seed=4)], lambda scale: {"score": foci.Cosine(scale)}),
    "alibi": ([], lambda: {"bias": foci.ALiBi(), "mask": foci.causal}),
    "buckets": ([randn(8, 4, seed=4)], lambda table: {"bias": foci.Buckets(table, True, 6)}),
    "relative": (
        [randn(5, 8, seed=4), randn(5, 8, seed=5)],
        lambda keys, values: {"bias": foci.Relative(keys, values)},
    ),
    "bias": ([randn(4, 6, 6, seed=4)], lambda bias: {"bias": bias}),
    "sink": ([randn(4, seed=4)], lambda sink: {"sink": sink, "mask": foci.causal}),
    "positions": ([torch.tensor([5, 0, 3, 1, 4, 2])], lambda p: {"positions": (p, p), "mask": foci.causal}),
}
WITH_WEIGHTS = ["plain", "causal padding", "additive", "relative", "sink"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor


def results(function: Callable[..., tuple[Tensor, ...]], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The results of the function and their gradients."""
    found = function(*leaves)
    slopes = [randn(*tensor.shape, seed=9) for tensor in found]
    return (*found, *torch.autograd.grad(found, [leaf for leaf in leaves if leaf.requires_grad], slopes))


def check_compiled(case: str, weights: bool, backend: str) -> None:
    tensors, build = CASES[case]

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        if not weights:
            return (foci.attention(q, k, v, **build(*rest)),)
        out, matrix = foci.attention(q, k, v, return_weights=True, **build(*rest))
        return out, matrix.lse

    leaves = [leaf(tensor) for tensor in (*qkv(), *tensors)]
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    torch.testing.assert_close(results(compiled, leaves), results(attend, leaves))


@pytest.mark.parametrize("case", mark_most_slow(CASES, 2))
def test_a_call_compiles_as_one_graph(case: str) -> None:
    check_compiled(case, weights=False, backend="aot_eager")


@pytest.mark.parametrize("case", WITH_WEIGHTS)
def test_a_call_with_weights_compiles_as_one_graph(case: str) -> None:
    check_compiled(case, weights=True, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_call_compiles_with_inductor(case: str) -> None:
    check_compiled(case, weights=case in WITH_WEIGHTS, backend="inductor")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_a_call_compiles_as_one_graph(case: str, dtype: torch.dtype) -> None:
    """Other kernels run it there, and the choice reads other device properties."""
    tensors, build = CASES[case]
    given = [tensor.cuda() for tensor in (*qkv(), *tensors)]
    leaves = [leaf(tensor.to(dtype) if tensor.is_floating_point() else tensor) for tensor in given]

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return foci.attention(q, k, v, **build(*rest))

    found, expected = (function(*leaves) for function in (torch.compile(attend, fullgraph=True), attend))
    close = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(found, expected, **close)
    wanted = [tensor for tensor in leaves if tensor.requires_grad]
    gradients = [torch.autograd.grad(out.float().square().sum(), wanted) for out in (found, expected)]
    torch.testing.assert_close(*gradients, **{name: 4 * limit for name, limit in close.items()})


def test_weights_returned_by_a_compiled_graph_are_usable() -> None:
    q, k, v = qkv()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, foci.Weights]:
        return foci.attention(q, k, v, mask=foci.causal, return_weights=True)

    out, weights = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    _, expected = attend(q, k, v)
    torch.testing.assert_close(weights[1, 2, 3], expected[1, 2, 3])
    torch.testing.assert_close(weights.entropy(), expected.entropy())
    torch.testing.assert_close(weights @ v.repeat_interleave(2, dim=1), out)
    assert repr(weights) == repr(expected)


def test_statistics_compile_as_one_graph() -> None:
    def measured(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        _, weights = foci.attention(q, k, v, mask=foci.causal, return_weights=True)
        return weights.entropy(), weights.received(), weights.dense()

    leaves = [leaf(tensor) for tensor in qkv()[:2]]
    compiled = torch.compile(lambda q, k: measured(q, k, k), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, leaves), results(lambda q, k: measured(q, k, k), leaves))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_two_statistics_of_additive_weights_compile_together() -> None:
    weight = randn(8, seed=4)

    def asked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, weights = foci.attention(q * 1, k, v, score=foci.Additive(weight), return_weights=True)
        return weights.entropy().sin().sum() + weights[0, 1, 2].sum()

    leaves = [[tensor.requires_grad_() for tensor in qkv()] for _ in range(2)]
    torch.compile(asked, backend="aot_eager")(*leaves[0]).backward()
    asked(*leaves[1]).backward()
    for compiled, eager in zip(*(leaf[:2] for leaf in leaves), strict=True):
        torch.testing.assert_close(compiled.grad, eager.grad)


def test_compiled_backward_drops_the_same_weights() -> None:
    q, k, v = (leaf(tensor) for tensor in qkv())
    compiled = torch.compile(lambda q, k, v: foci.attention(q, k, v, dropout=0.5), fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    slope = randn(*out.shape, seed=9)
    (gradient,) = torch.autograd.grad(out, v, slope)
    # The output is linear in the values, so its product with a slope is that of the values with their gradient.
    torch.testing.assert_close((out * slope).sum(), (gradient * v).sum())
    assert not torch.allclose(out, foci.attention(q, k, v))
    assert not torch.allclose(out, compiled(q, k, v))


@pytest.mark.parametrize("mask", [foci.causal, foci.window(2)], ids=["causal", "window"])
def test_other_lengths_recompile(mask: foci.Mask) -> None:
    compiled = torch.compile(lambda q, k, v: foci.attention(q, k, v, mask=mask), fullgraph=True, backend="eager")
    for length in (6, 9, 14):
        tensors = qkv(length, length)
        torch.testing.assert_close(compiled(*tensors), foci.attention(*tensors, mask=mask))


def test_autocast_inside_a_compiled_graph() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, weights = foci.attention(q, k, v, bias=foci.ALiBi(), return_weights=True)
        return out, weights.lse

    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*qkv())
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(found, attend(*qkv()))


@pytest.mark.parametrize("case", ["plain", "causal", "window", "padding", "documents", "additive", "alibi", "sink"])
def test_fake_tensors_have_the_right_shapes(case: str) -> None:
    tensors, build = CASES[case]
    real, _ = foci.attention(*qkv(), return_weights=True, **build(*tensors))
    with FakeTensorMode() as mode:
        q, k, v, *rest = (mode.from_tensor(tensor) for tensor in (*qkv(), *tensors))
        out, weights = foci.attention(q, k, v, return_weights=True, **build(*rest))
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype) == (real.shape, real.dtype)
    assert weights.lse.shape == real.shape[:-1]


@pytest.mark.parametrize("case", ["additive", "alibi", "buckets"])
def test_fake_tensors_have_the_right_shapes_of_our_kernels(case: str) -> None:
    pytest.importorskip("triton")
    tensors, build = CASES[case]
    with FakeTensorMode() as mode:
        q, k, v, *rest = (mode.from_tensor(tensor).requires_grad_() for tensor in (*qkv(), *tensors))
        out = foci.attention(q, k, v, backend="triton", **build(*rest))
        (d_query,) = torch.autograd.grad(out.sum(), q)
    assert (out.shape, d_query.shape) == ((*q.shape[:-1], v.shape[-1]), q.shape)


@pytest.mark.parametrize("case", ["window", "additive", "alibi"])
def test_aot_function_traces_the_call(case: str) -> None:
    tensors, build = CASES[case]

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return foci.attention(q, k, v, **build(*rest))

    inputs = [*qkv(), *tensors]
    torch.testing.assert_close(aot_function(attend, nop)(*inputs), attend(*inputs))


class Layer(torch.nn.Module):
    """A call as a module, which is what export takes."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return foci.attention(q, k, v, **self.arguments)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"mask": foci.causal}, {"mask": foci.window(2)}, {"bias": foci.ALiBi()}],
    ids=["plain", "causal", "window", "alibi"],
)
def test_a_call_can_be_exported(arguments: dict[str, Any]) -> None:
    layer = Layer(**arguments)
    exported = torch.export.export(layer, qkv())
    torch.testing.assert_close(exported.module()(*qkv()), layer(*qkv()))


def test_a_causal_call_can_be_exported_for_every_length() -> None:
    length = torch.export.Dim("length", min=2, max=512)
    layer = Layer(mask=foci.causal)
    exported = torch.export.export(layer, qkv(), dynamic_shapes=({2: length},) * 3)
    torch.testing.assert_close(exported.module()(*qkv(33, 33)), layer(*qkv(33, 33)))


@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, 0, 0), (None, None, 0)], ids=str)
@pytest.mark.parametrize("weights", [False, True])
def test_vmap_is_refused_with_the_way_out(mapped: tuple[int | None, ...], weights: bool) -> None:
    tensors = [
        tensor if place is None else torch.stack([tensor] * 3) for place, tensor in zip(mapped, qkv(), strict=True)
    ]

    def attend(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
        return foci.attention(q, k, v, return_weights=weights, backend=backend)[0]

    with pytest.raises(ValueError, match=r"torch.func.vmap is not supported: pass the batch dimension to the call"):
        torch.func.vmap(attend, in_dims=mapped)(*tensors)
    found = torch.func.vmap(lambda *t: attend(*t, backend="reference"), in_dims=mapped)(*tensors)
    torch.testing.assert_close(found[2], attend(*qkv()))


def test_a_tracer_of_real_tensors_takes_a_masked_call() -> None:
    q, k, v = qkv()
    mask = torch.ones(6, 6).tril(1).bool()
    traced = make_fx(lambda q: foci.attention(q, k, v, mask=mask))(q)
    torch.testing.assert_close(traced(q + 1), foci.attention(q + 1, k, v, mask=mask))


@pytest.mark.parametrize("case", ["plain", "window", "sink"])
def test_gradients_of_torch_func(case: str) -> None:
    tensors, build = CASES[case]
    q, k, v = qkv(dtype=torch.float64)
    rest = [tensor.double() for tensor in tensors]

    def total(q: Tensor) -> Tensor:
        out, weights = foci.attention(q, k, v, return_weights=True, **build(*rest))
        return out.square().sum() + weights.lse.sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(q), expected)
    torch.testing.assert_close(torch.func.jacrev(total)(q), expected)


# PyTorch's own formulas of forward mode are scripts.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("case", ["plain", "window", "sink"])
def test_forward_mode_differentiation(case: str) -> None:
    tensors, build = CASES[case]
    q, k, v = qkv(dtype=torch.float64)
    rest = [tensor.double() for tensor in tensors]
    tangent = torch.randn_like(q)

    def attend(q: Tensor, backend: str | None = None) -> Tensor:
        return foci.attention(q, k, v, backend=backend, **build(*rest))

    leaf = q.clone().requires_grad_()
    jacobian = torch.autograd.functional.jacobian(lambda q: attend(q, "reference"), leaf)
    expected = torch.einsum("...bhtd,bhtd->...", jacobian, tangent)
    torch.testing.assert_close(torch.func.jvp(attend, (q,), (tangent,))[1], expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(attend(dual)).tangent, expected)


def test_a_large_matrix_kept_by_torch_func_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func does not recompute in the backward; a small matrix is kept without a warning."""
    q, k, v = qkv()
    gradient = torch.func.grad(lambda x: foci.attention(x, k, v, bias=foci.ALiBi()).sum())
    gradient(q)
    monkeypatch.setattr(blocked, "MIN_WARNED_MATRIX_BYTES", 2 * 4 * 6 * 6 * 4)
    with pytest.warns(UserWarning, match="the backward of this call keeps its attention matrix") as warned:
        gradient(q)
    assert warned[0].filename == __file__
