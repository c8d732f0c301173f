"""The call itself: dtypes under autocast, empty inputs, strides, plans, threads, copies, memory."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import foci
from foci.backends import BACKEND_NAMES, strips
from foci.masks.base import as_mask
from tests.checker import Problem, Tensors, answers, check, eager_errors, truth
from tests.tensors import qkv, randn

BACKENDS = ["sdpa", "blocked", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_narrows_the_inputs_and_nothing_else(backend: str, half: torch.dtype) -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv()]
    with torch.autocast("cpu", dtype=half):
        out, weights = foci.attention(*leaves, backend=backend, return_weights=True)
        matrix, entropy, product = weights.dense(), weights.entropy(), weights @ torch.eye(6)
    assert (out.dtype, weights.lse.dtype, matrix.dtype, entropy.dtype) == (half, *[torch.float32] * 3)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 4, 6), atol=1e-6, rtol=0)
    torch.testing.assert_close(product.float(), matrix, atol=0.01, rtol=0)
    (out.float().sum() + weights.lse.sum()).backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)

    problem = Problem(dict(zip(("query", "key", "value"), leaves, strict=True)), lambda tensors: tensors, half)
    true = {name: tensor for name, tensor in truth(problem).items() if name in {"out", "lse"}}
    eager = eager_errors(problem, true)
    check({"out": out.detach(), "lse": weights.lse.detach()}, true, eager, half)


def test_autocast_joins_dtypes_and_leaves_float64_alone() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert foci.attention(q, k.half(), v.bfloat16()).dtype == torch.bfloat16
        assert foci.attention(q.double(), k.double(), v.double()).dtype == torch.float64
        for score in (foci.General(randn(8, 8)), foci.Cosine(torch.ones(4)), foci.Additive(randn(8))):
            out, weights = foci.attention(q, k, v, score=score, bias=foci.ALiBi(), return_weights=True)
            assert (out.dtype, weights.lse.dtype) == (torch.bfloat16, torch.float32)
        with pytest.raises(TypeError, match=r"one dtype, got torch.float64, torch.bfloat16, torch.bfloat16"):
            foci.attention(q.double(), k, v)


EMPTY: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "no queries": ((2, 4, 0, 8), (2, 2, 5, 8)),
    "no keys": ((2, 4, 5, 8), (2, 2, 0, 8)),
    "neither": ((2, 4, 0, 8), (2, 4, 0, 8)),
    "no sequences": ((0, 4, 5, 8), (0, 4, 5, 8)),
    "no heads": ((2, 0, 5, 8), (2, 0, 5, 8)),
    "no heads and no keys": ((3, 8), (0, 8)),
}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": foci.causal & foci.window(2)},
    "additive": {"score": foci.Additive(torch.ones(8))},
    "relative": {"bias": foci.Relative(torch.ones(3, 8), torch.ones(3, 8))},
    "dropout": {"dropout": 0.5},
}


@pytest.mark.parametrize("backend", [None, "blocked", "reference"])
@pytest.mark.parametrize("sizes", EMPTY)
@pytest.mark.parametrize("asked", ASKED)
def test_empty_inputs_give_zeros_with_gradients(backend: str | None, sizes: str, asked: str) -> None:
    shape, key_shape = EMPTY[sizes]
    q, k, v = (torch.ones(size, requires_grad=True) for size in (shape, key_shape, key_shape))
    out, weights = foci.attention(q, k, v, backend=backend, return_weights=True, **ASKED[asked])
    assert out.shape == q.shape
    assert bool((out == 0).all())
    assert weights.lse.shape == q.shape[:-1]
    assert bool((weights.lse == -torch.inf).all())
    assert tuple(weights.dense().shape) == weights.shape == (*q.shape[:-1], k.shape[-2])
    out.sum().backward()
    assert all(leaf.grad is not None and bool((leaf.grad == 0).all()) for leaf in (q, k, v))


def test_a_sink_takes_everything_where_there_are_no_keys() -> None:
    sink = torch.tensor([1.0, -2.0], requires_grad=True)
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 0, 4)
    out, weights = foci.attention(q, k, k, sink=sink, return_weights=True)
    assert bool((out == 0).all())
    assert torch.equal(weights.lse, sink.detach().view(1, 2, 1).expand(1, 2, 3))
    assert bool((weights.sink_mass() == 1).all())
    weights.lse.sum().backward()
    assert sink.grad.tolist() == [3, 3]


def shared(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "expanded": (lambda t: t, shared),
    "columns first": (lambda t: t.mT.contiguous(), lambda t: t.mT),
    "part of a larger one": (lambda t: torch.nn.functional.pad(t, (3, 2, 1, 1)), lambda t: t[..., 1:-1, 3:-2]),
    "heads last": (lambda t: t.permute(0, 2, 3, 1).contiguous(), lambda t: t.permute(0, 3, 1, 2)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lse", [False, True])
def test_inputs_may_have_any_strides(backend: str, layout: str, lse: bool) -> None:
    stored, seen = LAYOUTS[layout]
    tensors = {name: stored(t.double()) for name, t in zip(("query", "key", "value"), qkv(), strict=True)}
    problem = Problem(tensors, lambda leaves: {name: seen(leaf) for name, leaf in leaves.items()}, torch.float32)
    true = truth(problem, lse=lse)
    check(answers(problem, backend, lse=lse), true, eager_errors(problem, true), torch.float32)


def test_packed_projections_are_three_views() -> None:
    """What a model hands over: one projection (B, T, 3, H, D), taken apart without a copy."""
    packed = randn(2, 6, 3, 4, 8, dtype=torch.float64).requires_grad_()
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    out = foci.attention(q, k, v, mask=foci.causal)
    torch.testing.assert_close(out, foci.attention(*(t.contiguous() for t in (q, k, v)), mask=foci.causal))
    out.sum().backward()
    assert packed.grad.shape == packed.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_modified(backend: str) -> None:
    tensors = qkv()
    before = [tensor.clone() for tensor in tensors]
    foci.attention(*tensors, mask=torch.ones(6, 6).bool().tril(), backend=backend, return_weights=True)
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("only", ["query", "key", "value", "sink", "matrix"])
def test_a_gradient_may_be_wanted_by_one_tensor_only(backend: str, only: str) -> None:
    q, k, v = (tensor.double() for tensor in qkv())
    tensors = {"query": q, "key": k, "value": v, "sink": torch.zeros(4).double(), "matrix": torch.eye(8).double()}

    def arguments(t: Tensors) -> dict[str, Any]:
        return {name: t[name] for name in ("query", "key", "value", "sink")} | {"score": foci.General(t["matrix"])}

    # The log-sum-exp does not depend on the values.
    lse = only != "value"
    all_of_them = answers(Problem(tensors, arguments, torch.float32), backend, lse=lse)
    one = answers(Problem(tensors, arguments, torch.float32, frozenset(tensors) - {only}), backend, lse=lse)
    assert set(one) - {"lse"} == {"out", f"gradient of {only}"}
    torch.testing.assert_close(one[f"gradient of {only}"], all_of_them[f"gradient of {only}"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_is_kept_where_none_is_wanted(mode: Callable[[], Any]) -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv()]
    with mode():
        for backend in BACKENDS:
            out, weights = foci.attention(*leaves, backend=backend, return_weights=True)
            assert not out.requires_grad
            assert not weights.lse.requires_grad
            torch.testing.assert_close(weights.dense() @ leaves[2].repeat_interleave(2, dim=1), out)


def test_a_plan_prints_as_a_table() -> None:
    q, k, v = qkv()
    plan = foci.plan(q, k, v, mask=foci.window(2), score=foci.Dot(softcap=2.0))
    lines = str(plan).splitlines()[: len(BACKEND_NAMES)]
    assert plan.chosen == "blocked"
    assert [line.split()[0] for line in lines if not line.startswith("->")] == [
        n for n in BACKEND_NAMES if n != "blocked"
    ]
    assert [line.split() for line in lines if line.startswith("->")] == [["->", "blocked", "chosen"]]
    assert "the mask window(2) would have to be built as a dense tensor" in next(
        line for line in lines if " sdpa" in line
    )


def test_the_planned_backend_runs() -> None:
    q, k, v = qkv()
    assert foci.plan(q, k, v).chosen == "sdpa"
    assert foci.plan(q, k, v, mask=foci.causal, return_weights=True).chosen == "sdpa"
    assert foci.plan(q, k, v, dropout=0.1).chosen == "blocked"
    assert foci.plan(q, k, v, score=foci.Additive(torch.ones(8))).chosen == "blocked"
    assert foci.plan(q, k, v, backend="reference").chosen == "reference"
    assert foci.plan(q, k, v, dropout=0.1, backend="sdpa").chosen is None
    assert foci.plan(q, k, v).refusals.get("reference") is None


def test_several_threads_at_once_get_right_answers() -> None:
    q, k, v = qkv(40, 40)
    asked = [
        *({"mask": foci.causal}, {"mask": foci.window(3)}, {"score": foci.Additive(randn(8))}),
        *({"bias": foci.ALiBi()}, {"sink": torch.ones(4)}, {"score": foci.Cosine(4.0)}),
    ] * 4
    alone = [foci.attention(q, k, v, **arguments) for arguments in asked]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda arguments: foci.attention(q, k, v, **arguments), asked))
    torch.testing.assert_close(together, alone)


PARTS = [
    *(foci.causal, foci.causal.at(2), foci.window(1, None), foci.prefix(2), foci.padding([2, 5], side="left")),
    *(foci.documents([0, 0, 1, 1, 1, 1]), ~(foci.causal & foci.window(1)) | torch.eye(6).bool()),
]


@pytest.mark.parametrize("mask", PARTS, ids=repr)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["copy", "pickle"]
)
def test_masks_can_be_copied_and_pickled(mask: foci.Mask, copied: Callable[[Any], Any]) -> None:
    q, k, v = qkv()
    again = copied(mask)
    assert repr(again) == repr(mask)
    assert torch.equal(foci.attention(q, k, v, mask=again), foci.attention(q, k, v, mask=mask))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["copy", "pickle"]
)
def test_scores_and_biases_can_be_copied_and_pickled(copied: Callable[[Any], Any]) -> None:
    q, k, v = qkv()
    scores = [foci.Dot(0.5, 2.0), foci.Additive(randn(8)), foci.General(randn(4, 8, 8)), foci.Cosine(torch.ones(4))]
    biases = [foci.ALiBi(), foci.Buckets(randn(8, 4), True, 6), foci.Relative(randn(3, 8), randn(4, 3, 8)), randn(6, 6)]
    for score, bias in zip(scores, biases, strict=True):
        expected = foci.attention(q, k, v, score=score, bias=bias)
        assert torch.equal(foci.attention(q, k, v, score=copied(score), bias=copied(bias)), expected)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had that was made meanwhile."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


LONG: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": foci.causal & foci.window(100)},
    "padding": {"mask": foci.causal & foci.padding([1500])},
    "function": {"mask": foci.mask_function(lambda b, h, q, k: k <= q)},
    "alibi": {"bias": foci.ALiBi(), "mask": foci.causal},
    "buckets": {"bias": foci.Buckets(torch.zeros(8, 1), True, 64)},
    "relative": {"bias": foci.Relative(torch.zeros(9, 4), torch.zeros(9, 4))},
    "dropout": {"dropout": 0.1},
}


@pytest.mark.parametrize("case", LONG)
def test_no_matrix_is_allocated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "MAX_CPU_STRIP_ENTRIES", 2**16)
    q, k, v = (randn(1, 1, 1500, 4, seed=seed).requires_grad_() for seed in range(3))
    with Largest() as largest:
        out, _ = foci.attention(q, k, v, return_weights=True, **LONG[case])
        out.sum().backward()
    assert 1500 * 4 <= largest.elements <= 1500 * 1500 // 4


def test_the_memory_measurement_detects_a_matrix() -> None:
    q, k, v = (randn(1, 1, 1500, 4, seed=seed) for seed in range(3))
    with Largest() as largest:
        foci.attention(q, k, v, mask=as_mask(torch.ones(1500, 1).bool()), backend="reference")
    assert largest.elements >= 1500 * 1500


def test_a_bias_of_nan_propagates() -> None:
    q = torch.randn(1, 2, 6, 8)
    assert foci.plan(q, q, q, bias=torch.zeros(6, 6)).chosen == "sdpa"
    assert foci.attention(q, q, q, bias=torch.full((6, 6), torch.nan)).isnan().all()


@pytest.mark.parametrize("parts", [[], torch.zeros(2, 3), [(torch.zeros(2, 3),)]])
def test_merge_refuses_parts_that_are_not_pairs(parts: Any) -> None:
    with pytest.raises(ValueError, match=r"a list of one or more \(out, lse\) pairs"):
        foci.merge(parts)
    with pytest.raises(TypeError, match=r"pairs of tensors \(out, lse\), got int and int"):
        foci.merge([(1, 2)])  # type: ignore[list-item]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [3.0, 500.0])
def test_a_bias_keeps_its_digits_beside_half_precision(half: torch.dtype, size: float) -> None:
    """In the dtype of the queries it would lose them, and a large one would be infinite."""
    q, k, v = (tensor.to(half).requires_grad_() for tensor in qkv())
    bias = size * randn(6, 6, seed=9)
    assert foci.plan(q, k, v, bias=bias).chosen == "sdpa"
    out, weights = foci.attention(q, k, v, bias=bias, return_weights=True)
    torch.testing.assert_close(weights.dense().sum(-1), torch.ones(2, 4, 6), atol=1e-5, rtol=0)
    expected = foci.attention(q, k, v, bias=bias, backend="reference")
    tolerance = 4 * torch.finfo(half).eps
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    grads, true = (torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(grads, true, atol=16 * tolerance, rtol=4 * tolerance)
    large = torch.full((6, 6), -1e5)
    torch.testing.assert_close(foci.attention(q, k, v, bias=large), foci.attention(q, k, v), atol=tolerance, rtol=0)


@pytest.mark.parametrize("nothing", [torch.nan, torch.inf])
@pytest.mark.parametrize("mask", [foci.padding([4, 6]), torch.tensor([True] * 4 + [False] * 2).expand(6, 6)])
def test_fully_masked_keys_may_have_any_value(nothing: float, mask: foci.Mask | Tensor) -> None:
    q, k, v = qkv()
    expected, there = foci.attention(q, k, v, mask=mask, return_weights=True)
    dirty = k.clone()
    dirty[0, :, 4:] = nothing
    dirty.requires_grad_()
    assert foci.plan(q, dirty, v, mask=mask).chosen == "sdpa"
    leaves = q.clone().requires_grad_(), dirty, v.clone().requires_grad_()
    with torch.no_grad():
        leaves[2][0, :, 4:] = nothing
    out, weights = foci.attention(*leaves, mask=mask, return_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights.entropy(), there.entropy())
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.sum(), leaves))
    seen = k.clone()
    seen[0, :, 0] = torch.nan
    assert bool(foci.attention(q, seen, v, mask=mask)[0].isnan().all())


def test_meta_tensors_have_the_shapes_of_the_answer() -> None:
    q, k, v = (tensor.to("meta") for tensor in qkv())
    for options in ({}, {"mask": foci.causal & foci.window(2)}, {"bias": foci.ALiBi()}):
        out, weights = foci.attention(q, k, v, **options, return_weights=True)
        assert out.is_meta
        assert out.shape == q.shape
        assert weights.entropy().shape == (2, 4, 6)


def test_plan_refuses_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of sdpa, .*, got 'nope'"):
        foci.plan(*qkv(), backend="nope")


OPTIONS = (
    "the options of attention must be among score, mask, bias, sink, positions, dropout, backend, return_weights, "
)
HABITS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "is_causal": ((), {"is_causal": True}, OPTIONS + "got is_causal: use mask=foci.causal, or foci.causal.at(0) to"),
    "attn_mask": ((), {"attn_mask": None}, OPTIONS + "got attn_mask: use mask= for a bool tensor (True = visible) and"),
    "dropout_p": ((), {"dropout_p": 0.1}, OPTIONS + "got dropout_p: use dropout="),
    "scale": ((), {"scale": 0.5}, OPTIONS + "got scale: use score=foci.Dot(scale=...)"),
    "enable_gqa": ((), {"enable_gqa": True}, OPTIONS + "got enable_gqa: leave it out, because key and value may"),
    "need_weights": ((), {"need_weights": True}, OPTIONS + "got need_weights: use return_weights=True"),
    "misspelt": ((), {"maks": foci.causal}, OPTIONS + "got maks: did you mean mask?"),
    "unknown": ((), {"colour": 1}, OPTIONS + "got colour"),
    "positional mask": (
        (foci.causal,),
        {},
        "the positional arguments must be query, key and value, got 4, the next a Causal: write mask=...",
    ),
    "arguments of PyTorch": (
        (None, 0.0, True),
        {},
        "the positional arguments must be query, key and value, got 6, the next a NoneType: write the others by name",
    ),
    "positional tensor": ((torch.zeros(6, 6),), {}, "the positional arguments must be query, key and value, got 4"),
}


@pytest.mark.parametrize("function", [foci.attention, foci.plan])
@pytest.mark.parametrize("habit", HABITS)
def test_arguments_of_other_libraries_are_translated(habit: str, function: Callable[..., Any]) -> None:
    arguments, options, message = HABITS[habit]
    with pytest.raises(TypeError, match=f"^{re.escape(message.replace('attention', function.__name__))}"):
        function(*qkv(), *arguments, **options)


def test_signatures_show_no_catch_all() -> None:
    for function in (foci.attention, foci.plan, foci.nn.Attention.forward):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_a_misspelt_public_name_is_corrected() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'atention': did you mean attention\?$"):
        foci.atention  # noqa: B018


def test_causal_is_a_mask_and_not_a_function() -> None:
    with pytest.raises(TypeError, match=r"^causal must be used as mask=foci\.causal, which is a mask and not"):
        foci.causal()
    with pytest.raises(TypeError, match=r"^function must be a function of four index tensors, got Causal$"):
        foci.mask_function(foci.causal)  # type: ignore[arg-type]
