"""`foci.nn.MultiheadAttention` equals PyTorch's: every option and error, outputs and gradients."""

from __future__ import annotations

import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import foci.nn
from tests.nn.same import assert_same, gradients

BATCH, QUERIES, KEYS, WIDTH, HEADS = 2, 4, 5, 8, 2

MADE = [
    {"bias": bias, "add_bias_kv": bias_kv, "add_zero_attn": zero, "kdim": kdim, "vdim": vdim, "batch_first": first}
    for bias, bias_kv, zero, (kdim, vdim), first in itertools.product(
        (True, False), (False, True), (False, True), ((None, None), (6, 3)), (False, True)
    )
]
ATTN_MASKS = ("none", "bool 2-D", "float 2-D", "bool 3-D", "float 3-D")
PADDINGS = ("none", "bool", "float")
RETURNED = ({"need_weights": False}, {}, {"average_attn_weights": False})


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(**options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """foci's module and PyTorch's with the same weights, which all differ from 0."""
    ours, theirs = foci.nn.MultiheadAttention(WIDTH, HEADS, **options), nn.MultiheadAttention(WIDTH, HEADS, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(theirs.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) * 0.5)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(options: dict[str, Any], batched: bool) -> list[Tensor]:
    widths = (WIDTH, options["kdim"] or WIDTH, options["vdim"] or WIDTH)
    made = [randn(BATCH, n, w, seed=w) for n, w in zip((QUERIES, KEYS, KEYS), widths, strict=True)]
    if not batched:
        return [x[0].clone().requires_grad_() for x in made]
    return [(x if options["batch_first"] else x.transpose(0, 1).contiguous()).requires_grad_() for x in made]


def attn_mask(kind: str, batched: bool) -> Tensor | None:
    """No row is fully masked: there PyTorch gives NaN."""
    if kind == "none":
        return None
    lead = () if kind.endswith("2-D") else (BATCH * HEADS if batched else HEADS,)
    hidden = randn(*lead, QUERIES, KEYS, seed=9) > 0.3
    hidden[..., 0] = False
    return hidden if kind.startswith("bool") else randn(*hidden.shape, seed=3).masked_fill(hidden, -torch.inf)


def key_padding(kind: str, batched: bool) -> Tensor | None:
    if kind == "none":
        return None
    hidden = torch.tensor([[False, False, True, False, True], [False] * 4 + [True]])[: BATCH if batched else 1]
    hidden = hidden if batched else hidden[0]
    return hidden if kind == "bool" else randn(*hidden.shape, seed=4).masked_fill(hidden, -torch.inf)


def call_both(ours: nn.Module, theirs: nn.Module, given: list[Tensor], options: dict[str, Any]) -> None:
    """Assert equal outputs and weights, and equal gradients of inputs and parameters through both."""
    found, weights = ours(*given, **options)
    expected, expected_weights = theirs(*given, **options)
    assert_same(found, expected)
    assert_same(weights, expected_weights, "weights")
    if expected_weights is not None:
        found, expected = found.sum() + weights.square().sum(), expected.sum() + expected_weights.square().sum()
    names = [name for name, _ in theirs.named_parameters()]
    own = gradients(found, [*given, *ours.parameters()])
    other = gradients(expected, [*given, *theirs.parameters()])
    for name, a, b in zip(["query", "key", "value", *names], own, other, strict=True):
        assert_same(a, b, f"gradient of {name}", slack=128)


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("made", MADE, ids=lambda made: ",".join(f"{k}={v}" for k, v in made.items()))
def test_every_combination_of_options_equals_pytorch(made: dict[str, Any], batched: bool) -> None:
    ours, theirs = pair(**made)
    given = inputs(made, batched)
    for mask, padding, returned in itertools.product(ATTN_MASKS, PADDINGS, RETURNED):
        options = {"attn_mask": attn_mask(mask, batched), "key_padding_mask": key_padding(padding, batched)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Support for mismatched")
            call_both(ours, theirs, given, options | returned)


@pytest.mark.parametrize("made", MADE, ids=lambda made: ",".join(f"{k}={v}" for k, v in made.items()))
def test_the_causal_hint_is_followed_where_pytorch_follows_it(made: dict[str, Any]) -> None:
    ours, theirs = pair(**made)
    given = inputs(made, batched=True)
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
    for padding, returned in itertools.product(PADDINGS, RETURNED):
        options = {"attn_mask": mask, "is_causal": True, "key_padding_mask": key_padding(padding, batched=True)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Support for mismatched")
            call_both(ours, theirs, given, options | returned)


@pytest.mark.parametrize("same", ["all", "key and value", "none"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_same_tensor_as_query_key_and_value(same: str, mode: str) -> None:
    ours, theirs = pair(batch_first=True)
    ours.train(mode == "train")
    theirs.train(mode == "train")
    x, y = randn(BATCH, KEYS, WIDTH, seed=1), randn(BATCH, KEYS, WIDTH, seed=2)
    given = {"all": (x, x, x), "key and value": (x, y, y), "none": (x, y, x)}[same]
    with torch.no_grad():
        for found, expected in zip(ours(*given), theirs(*given), strict=True):
            assert_same(found, expected)


def test_self_attention_is_projected_by_one_matrix_product() -> None:
    ours, _ = pair(batch_first=True)
    x = randn(BATCH, KEYS, WIDTH)
    with mock.patch("torch.nn.functional.linear", wraps=torch.nn.functional.linear) as linear:
        ours(x, x, x, need_weights=False)
    assert [tuple(call.args[1].shape) for call in linear.call_args_list] == [(3 * WIDTH, WIDTH), (WIDTH, WIDTH)]


def test_pytorchs_own_forward_is_never_called() -> None:
    ours, _ = pair()
    x = randn(QUERIES, BATCH, WIDTH)
    with (
        mock.patch("torch.nn.functional.multi_head_attention_forward", side_effect=AssertionError),
        mock.patch("torch._native_multi_head_attention", side_effect=AssertionError),
        torch.no_grad(),
    ):
        for returned in RETURNED:
            ours(x, x, x, **returned)
            ours.eval()(x, x, x, **returned)


def test_state_dicts_are_compatible() -> None:
    for made in MADE:
        ours = foci.nn.MultiheadAttention(WIDTH, HEADS, **made)
        theirs = nn.MultiheadAttention(WIDTH, HEADS, **made)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())


WRONG: dict[str, tuple[dict[str, Any], list[tuple[int, ...]], dict[str, Any]]] = {
    "four dimensions": ({}, [(1, 4, 2, 8)] * 3, {}),
    "batched query, unbatched key": ({}, [(4, 2, 8), (5, 8), (5, 8)], {}),
    "unbatched query, batched value": ({}, [(4, 8), (5, 8), (5, 2, 8)], {}),
    "wrong width": ({}, [(4, 2, 6)] * 3, {}),
    "key and value differ": ({}, [(4, 2, 8), (5, 2, 8), (6, 2, 8)], {}),
    "key and value differ, batch first": ({"batch_first": True}, [(2, 4, 8), (2, 5, 8), (2, 6, 8)], {}),
    "lengths differ, other widths": ({"kdim": 6, "vdim": 3}, [(4, 2, 8), (5, 2, 6), (6, 2, 3)], {}),
    "2-D mask": ({}, [(4, 2, 8), (5, 2, 8), (5, 2, 8)], {"attn_mask": torch.zeros(4, 4)}),
    "3-D mask": ({}, [(4, 2, 8), (5, 2, 8), (5, 2, 8)], {"attn_mask": torch.zeros(2, 4, 5)}),
    "4-D mask": ({}, [(4, 2, 8), (5, 2, 8), (5, 2, 8)], {"attn_mask": torch.zeros(1, 2, 4, 5)}),
    "3-D mask, unbatched": ({}, [(4, 8), (5, 8), (5, 8)], {"attn_mask": torch.zeros(4, 4, 5)}),
    "4-D mask, unbatched": ({}, [(4, 8), (5, 8), (5, 8)], {"attn_mask": torch.zeros(1, 1, 4, 5)}),
    "1-D padding, batched": ({}, [(4, 2, 8)] * 3, {"key_padding_mask": torch.zeros(4)}),
    "2-D padding, unbatched": ({}, [(4, 8)] * 3, {"key_padding_mask": torch.zeros(2, 4)}),
    "padding of another batch": ({}, [(4, 2, 8)] * 3, {"key_padding_mask": torch.zeros(3, 4)}),
    "padding of another length": ({}, [(4, 2, 8)] * 3, {"key_padding_mask": torch.zeros(2, 5)}),
    "padding, one more key": ({"add_bias_kv": True}, [(4, 2, 8)] * 3, {"key_padding_mask": torch.zeros(2, 5)}),
    "an integer mask": ({}, [(4, 2, 8)] * 3, {"attn_mask": torch.zeros(4, 4, dtype=torch.int64)}),
    "integer padding": ({}, [(4, 2, 8)] * 3, {"key_padding_mask": torch.zeros(2, 4, dtype=torch.int64)}),
    "a hint without a mask": ({}, [(4, 2, 8)] * 3, {"is_causal": True}),
}


def refusal(module: nn.Module, given: list[Tensor], options: dict[str, Any]) -> tuple[type, str]:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        module(*given, **options)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_are_refused_with_pytorchs_messages(case: str) -> None:
    made, shapes, options = WRONG[case]
    ours, theirs = pair(**made)
    given = [torch.zeros(shape) for shape in shapes]
    assert refusal(ours, given, options) == refusal(theirs, given, options)


def test_other_refusals() -> None:
    with pytest.raises(AssertionError, match="embed_dim must be divisible by num_heads"):
        foci.nn.MultiheadAttention(10, 3)
    ours, _ = pair()
    with pytest.raises(RuntimeError, match="query's batch size 2, but got 1"):
        ours(torch.zeros(4, 2, 8), torch.zeros(4, 1, 8), torch.zeros(4, 1, 8))
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(2, 8)], layout=torch.jagged)
    with pytest.raises(AssertionError, match="does not support NestedTensor"):
        ours(nested, nested, nested)
    x = torch.zeros(4, 2, 8)
    with pytest.warns(UserWarning, match="Support for mismatched key_padding_mask and attn_mask is deprecated"):
        ours(x, x, x, attn_mask=torch.zeros(4, 4), key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_fully_masked_rows_give_zeros_and_finite_gradients(kind: str) -> None:
    ours, _ = pair(bias=False, batch_first=True)
    x = randn(BATCH, KEYS, WIDTH).requires_grad_()
    hidden = torch.zeros(KEYS, KEYS, dtype=torch.bool)
    hidden[2] = True
    mask = hidden if kind == "bool" else torch.zeros(KEYS, KEYS).masked_fill(hidden, -torch.inf)
    for options in RETURNED:
        out, weights = ours(x, x, x, attn_mask=mask, **options)
        assert torch.equal(out[:, 2], torch.zeros(BATCH, WIDTH))
        if weights is not None:
            assert torch.equal(weights[..., 2, :], torch.zeros_like(weights[..., 2, :]))
        for grad in gradients(out, [x, *ours.parameters()]):
            assert grad is not None
            assert bool(grad.isfinite().all())


def test_pytorchs_layers_run_with_foci_attention_inside() -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    x, memory = randn(BATCH, QUERIES, WIDTH), randn(BATCH, KEYS, WIDTH, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(QUERIES)
    expected = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
    for name in ("self_attn", "multihead_attn"):
        ours = foci.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        ours.load_state_dict(getattr(layer, name).state_dict())
        setattr(layer, name, ours)
    assert_same(layer(x, memory, tgt_mask=mask, tgt_is_causal=True), expected)


# PyTorch itself causes this warning when it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("options", RETURNED, ids=["no weights", "averaged", "per head"])
def test_compiles_as_one_graph(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    ours, _ = pair(batch_first=True)
    x = randn(BATCH, KEYS, WIDTH)
    hidden = key_padding("bool", batched=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    out, weights = compiled(x, x, x, key_padding_mask=hidden, **options)
    expected, expected_weights = ours(x, x, x, key_padding_mask=hidden, **options)
    assert_same(out, expected)
    assert_same(weights, expected_weights)
    out.sum().backward()
    assert ours.in_proj_weight.grad is not None


@pytest.mark.parametrize("options", RETURNED, ids=["no weights", "averaged", "per head"])
def test_trains_in_bfloat16_and_under_autocast(options: dict[str, Any]) -> None:
    ours, theirs = pair(batch_first=True)
    x = randn(BATCH, KEYS, WIDTH)
    exact = theirs(x, x, x, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours(x, x, x, **options)
        like = theirs(x, x, x, **options)
    ours.bfloat16()
    for results in (found, ours(x.bfloat16(), x.bfloat16(), x.bfloat16(), **options)):
        for result, truth, other in zip(results, exact, like, strict=True):
            if truth is not None:
                assert result.dtype == other.dtype
                torch.testing.assert_close(result.float(), truth, atol=0.03, rtol=0.03)
        results[0].float().sum().backward()


def test_dropout_keeps_the_mean_and_does_not_change_the_weights() -> None:
    torch.manual_seed(0)
    ours, theirs = pair(batch_first=True, dropout=0.5)
    x = randn(1, KEYS, WIDTH).expand(4096, -1, -1)
    out, weights = ours(x, x, x)
    exact, exact_weights = theirs.eval()(x[:1], x[:1], x[:1])
    assert_same(weights[:1], exact_weights)
    assert not torch.equal(out[0], out[1])
    torch.testing.assert_close(out.mean(0, keepdim=True), exact, atol=0.1, rtol=0.0)
    assert_same(ours.eval()(x[:1], x[:1], x[:1])[0], exact)
