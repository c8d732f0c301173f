"""Every call of PyTorch's attention is recorded, and the model gets the same output."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_early

import foci
from tests.capture.models import EagerAttention, FusedAttention, Stack
from tests.tensors import randn


class Calls(nn.Module):
    """A module that calls a function with its arguments."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)


def eager(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """PyTorch's definition, written out: (output, weights)."""
    if options.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(-1).nan_to_num(0.0)
    return weights @ v, weights


def holes(*shape: int) -> Tensor:
    seen = randn(*shape, seed=9) > -0.5
    seen[..., 0] = True
    return seen


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": holes(6, 9)},
    "bool mask of heads": {"attn_mask": holes(2, 4, 6, 9)},
    "float mask": {"attn_mask": randn(2, 1, 6, 9, seed=8)},
    "float mask with holes": {"attn_mask": torch.where(holes(6, 9), randn(6, 9, seed=8), -torch.inf)},
}


def seen_in(model: nn.Module, *args: Any, keep: Any = "lazy", **options: Any) -> tuple[Any, foci.Record]:
    with foci.watch(model, keep=keep) as seen:
        out = model(*args, **options)
    return out, seen


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, imported_early], ids=["named", "imported"])
def test_every_argument(case: str, function: Any) -> None:
    q, k, v = randn(2, 4, 6, 8), randn(2, 4, 9, 8, seed=1), randn(2, 4, 9, 8, seed=2)
    out, seen = seen_in(Calls(function), q, k, v, **OPTIONS[case])
    _, weights = eager(q, k, v, **OPTIONS[case])
    torch.testing.assert_close(seen["L0"].dense(), weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, **OPTIONS[case]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(seen["L0"].norms(), v.norm(dim=-1))
    assert seen.calls == 1
    assert seen.unseen == []


@pytest.mark.parametrize("case", OPTIONS)
def test_the_output_is_identical_on_a_cpu_where_the_matrix_is_square(case: str) -> None:
    q, k, v = (randn(2, 4, 6, 8, seed=i) for i in range(3))
    options = {name: value[..., :6] if isinstance(value, Tensor) else value for name, value in OPTIONS[case].items()}
    out, _ = seen_in(Calls(F.scaled_dot_product_attention), q, k, v, **options)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, **options))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_the_output_of_a_large_call_on_a_cpu_is_identical(options: dict[str, Any]) -> None:
    """`foci.attention` itself would run another kernel, whose last digits differ."""
    q, k, v = (randn(1, 4, 300, 16, seed=i) for i in range(3))
    out, _ = seen_in(Calls(F.scaled_dot_product_attention), q, k, v, **options)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, **options))


def test_arguments_by_name() -> None:
    q, k, v = (randn(2, 4, 6, 8, seed=i) for i in range(3))
    model = Calls(F.scaled_dot_product_attention)
    out, seen = seen_in(model, query=q, key=k, value=v, is_causal=True)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    torch.testing.assert_close(seen["L0"].dense(), eager(q, k, v, is_causal=True)[1], atol=1e-6, rtol=1e-5)


SHAPES = {
    "grouped heads": ((2, 4, 6, 8), (2, 2, 6, 8), {"enable_gqa": True}),
    "no heads": ((3, 6, 8), (3, 9, 8), {}),
    "no heads, masks of sequences": ((3, 6, 8), (3, 9, 8), {"attn_mask": holes(3, 6, 9)}),
    "neither heads nor batch": ((6, 8), (9, 8), {}),
    "windows": ((2, 5, 4, 6, 8), (2, 5, 4, 6, 8), {"attn_mask": holes(1, 5, 1, 6, 6)}),
    "one batch for all": ((2, 4, 6, 8), (1, 4, 6, 8), {}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_every_shape(case: str) -> None:
    query, key, options = SHAPES[case]
    q, k, v = randn(*query), randn(*key, seed=1), randn(*key, seed=2)
    out, seen = seen_in(Calls(F.scaled_dot_product_attention), q, k, v, **options)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, **options), atol=1e-6, rtol=1e-5)
    _, weights = eager(q, k, v, **options)
    layer = seen["L0"]
    torch.testing.assert_close(layer.dense().reshape(weights.shape), weights, atol=1e-6, rtol=1e-5)
    assert len(layer.shape) == 4
    assert layer.norms().shape == (layer.shape[0], layer.shape[1], layer.shape[3])


def test_errors_are_those_of_pytorch() -> None:
    q = randn(1, 4, 6, 8)
    model = Calls(F.scaled_dot_product_attention)
    for wrong in (q[:, :3], q[..., :5], q.double()):
        with pytest.raises(RuntimeError) as expected:
            model(q, wrong, wrong)
        with pytest.raises(RuntimeError) as found, foci.watch(model):
            model(q, wrong, wrong)
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_shapes_that_cannot_be_recorded_run_as_without_the_block(scale: float | None) -> None:
    model, q = Calls(F.scaled_dot_product_attention), randn(1, 2, 3, 4)
    out, seen = seen_in(model, q, q[0, 0], q, scale=scale)
    assert torch.equal(out, model(q, q[0, 0], q, scale=scale))
    assert "query, key and value must have 2 or more dimensions" in seen.unseen[0]
    for wrong in (q[0, 0, 0], q[0, 0, 0, 0]):
        with pytest.raises(RuntimeError, match="at least 2 dimensional"), foci.watch(model):
            model(wrong, wrong, wrong, scale=scale)
    empty = randn(1, 2, 3, 0)
    assert seen_in(model, empty, empty, empty, scale=scale)[0].shape == empty.shape


def test_errors_of_foci_attention_are_the_same_inside_a_block() -> None:
    q, model = randn(1, 2, 3, 4), Calls(foci.attention)
    for wrong in (q.tolist(), q.numpy(), None):
        with pytest.raises(TypeError, match="must be a tensor") as expected:
            model(q, wrong, wrong)
        with pytest.raises(TypeError) as found, foci.watch(model):
            model(q, wrong, wrong)
        assert str(found.value) == str(expected.value)


def test_unsupported_calls_run_and_are_listed_as_unseen() -> None:
    nested = torch.nested.nested_tensor([torch.rand(2, 3, 4), torch.rand(2, 5, 4)], layout=torch.jagged).transpose(1, 2)
    model = Calls(F.scaled_dot_product_attention)
    try:
        expected = model(nested, nested, nested)
    except RuntimeError as error:
        pytest.skip(f"this PyTorch does not attend to nested tensors here: {error}")
    out, seen = seen_in(model, nested, nested, nested)
    assert out.shape == expected.shape
    assert seen.layers == {}
    assert "got NestedTensor: pad them" in seen.unseen[0]


def test_dropout_draws_the_same_numbers() -> None:
    model, x = FusedAttention(), randn(2, 6, 16)
    torch.manual_seed(3)
    expected = model(x, dropout_p=0.4)
    torch.manual_seed(3)
    out, seen = seen_in(model, x, dropout_p=0.4)
    assert torch.equal(out, expected)
    q, k, v = model.split(x)
    torch.testing.assert_close(seen["L0"].dense(), eager(q, k, v)[1], atol=1e-6, rtol=1e-5)


def test_gradients_are_the_same_and_reach_recorded_weights() -> None:
    model, x = Stack(2), randn(2, 6, 16)
    model(x, is_causal=True).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    out, seen = seen_in(model, x, is_causal=True)
    out.square().sum().backward(retain_graph=True)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    model.zero_grad()
    seen["L1"].entropy().sum().backward()
    assert model.blocks[0].project.weight.grad.abs().sum() > 0


def test_autocast_chooses_the_dtype() -> None:
    model, x = FusedAttention(), randn(2, 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        out, seen = seen_in(model, x)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    assert seen["L0"].weights is not None
    assert seen["L0"].weights.call.q.dtype == torch.bfloat16


MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"key_padding_mask": torch.tensor([[False] * 9, [False] * 5 + [True] * 4])},
    "mask": {"attn_mask": ~holes(6, 9)},
    "float mask of heads": {"attn_mask": randn(8, 6, 9, seed=3)},
    "both": {"attn_mask": ~holes(6, 9), "key_padding_mask": torch.tensor([[False] * 9, [False] * 5 + [True] * 4])},
}
KINDS: dict[str, dict[str, Any]] = {
    "usual": {"batch_first": True},
    "sequence first": {},
    "one more key": {"batch_first": True, "add_bias_kv": True},
    "a zero": {"batch_first": True, "add_zero_attn": True},
    "other widths": {"batch_first": True, "kdim": 5, "vdim": 7},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("module", [nn.MultiheadAttention, foci.nn.MultiheadAttention])
@pytest.mark.parametrize("gradients", [True, False])
def test_multihead_attention(kind: str, case: str, module: type[nn.MultiheadAttention], gradients: bool) -> None:
    torch.manual_seed(0)
    model = module(16, 4, **KINDS[kind]).eval()
    inputs = [randn(2, 6, 16), randn(2, 9, model.kdim, seed=1), randn(2, 9, model.vdim, seed=2)]
    inputs = inputs if model.batch_first else [x.transpose(0, 1) for x in inputs]
    with torch.set_grad_enabled(gradients):
        expected, weights = model(*inputs, average_attn_weights=False, **MASKS[case])
        for needed, average in itertools.product((True, False), repeat=2):
            with foci.watch(model) as seen:
                out, given = model(*inputs, need_weights=needed, average_attn_weights=average, **MASKS[case])
            torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(seen["L0"].dense(), weights, atol=1e-6, rtol=1e-5)
            assert (given is not None) == needed
            assert seen.calls == 1
            assert list(seen.layers) == ["MultiheadAttention"]
            if needed:
                assert torch.equal(out, expected), "the model's own call gave the output"
                torch.testing.assert_close(given, weights.mean(1) if average else weights)


def test_multihead_attention_without_a_batch() -> None:
    model = nn.MultiheadAttention(16, 4)
    x = randn(6, 16)
    expected, weights = model(x, x, x, average_attn_weights=False)
    for needed in (True, False):
        (out, _), seen = seen_in(model, x, x, x, need_weights=needed)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(seen["L0"].dense()[0], weights, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
def test_the_inference_fast_path_of_nn_transformer_is_off(training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).train(training)
    x, padded = randn(2, 6, 16), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.set_grad_enabled(training):
        expected = model(x, src_key_padding_mask=padded)
        out, seen = seen_in(model, x, src_key_padding_mask=padded)
    torch.testing.assert_close(out[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[1, :4], expected[1, :4], atol=1e-5, rtol=1e-5)
    assert seen.heads == [f"L{i}H{h}" for i in range(2) for h in range(4)]
    _, weights = model.layers[0].self_attn(x, x, x, key_padding_mask=padded, average_attn_weights=False)
    torch.testing.assert_close(seen["L0"].dense(), weights, atol=1e-6, rtol=1e-5)


def test_pytorchs_encoder_decoder() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 2, 32, batch_first=True).eval()
    source, target = randn(2, 7, 16), randn(2, 5, 16, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        expected = model(source, target, tgt_mask=mask, tgt_is_causal=True)
        out, seen = seen_in(model, source, target, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert seen.calls == 6
    assert seen.unseen == []
    assert [seen.name_of(layer) for layer in seen.layers.values()] == [
        *("encoder.L0", "encoder.L1", "decoder.L0", "cross.L0", "decoder.L1", "cross.L1")
    ]
    assert seen["cross.L1"].shape == (2, 4, 5, 7)
    assert bool((seen["decoder.L0"].dense().triu(1) == 0).all())


def test_eager_attention_is_listed_as_unseen() -> None:
    model = nn.Sequential(FusedAttention(), EagerAttention(), FusedAttention())
    _, seen = seen_in(model, randn(1, 4, 16))
    assert list(seen.layers) == ["0", "2"]
    assert seen.heads[-1] == "L2H3"
    assert seen.unseen == ["1: it computes its own softmax (eager attention), so no call has its queries and keys"]
    model[1].forward = lambda x: x  # type: ignore[method-assign]
    _, seen = seen_in(model, randn(1, 4, 16))
    assert seen.unseen == ["1: it ran without an attention call that foci recognizes"]


@pytest.mark.filterwarnings("ignore")
def test_scripted_attention_is_listed_as_unseen() -> None:
    model = nn.Sequential(FusedAttention(), torch.jit.trace(EagerAttention(), torch.rand(1, 2, 16)))
    _, seen = seen_in(model, randn(1, 4, 16))
    assert list(seen.layers) == ["0"]
    assert seen.unseen == ["1: it is a scripted module and runs outside Python"]


def test_calls_of_foci_attention_are_recorded() -> None:
    q, k, v = randn(2, 4, 6, 8), randn(2, 2, 6, 8, seed=1), randn(2, 2, 6, 8, seed=2)
    options = {
        "mask": foci.causal & foci.window(3),
        "bias": foci.ALiBi(),
        "sink": torch.ones(4),
        "score": foci.Dot(softcap=5.0),
    }
    model = Calls(foci.attention)
    expected, weights = foci.attention(q, k, v, **options, return_weights=True)
    out, seen = seen_in(model, q, k, v, **options)
    assert torch.equal(out, expected)
    assert torch.equal(seen["L0"].dense(), weights.dense())
    assert torch.equal(seen["L0"].sink_mass(), weights.sink_mass())
    (out, given), seen = seen_in(model, q, k, v, **options, return_weights=True)
    assert isinstance(given, foci.Weights)
    assert torch.equal(given.dense(), weights.dense())
    for plain in (q[0, 0], q[0]):
        assert torch.equal(seen_in(model, plain, plain, plain)[0], foci.attention(plain, plain, plain))
    torch.manual_seed(0)
    expected = foci.attention(q, k, v, dropout=0.5)
    torch.manual_seed(0)
    assert torch.equal(seen_in(model, q, k, v, dropout=0.5)[0], expected)


def test_checkpointing_is_counted_once() -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    model, x = Checkpointed(2), randn(1, 4, 16).requires_grad_()
    with foci.watch(model, ablate=["L0H1"]) as seen:
        model(x).sum().backward()
    assert seen.calls == 2
    assert list(seen.layers) == ["blocks.0", "blocks.1"]
    with foci.watch(model, ablate=["L0H1"]):
        y = x.detach().clone().requires_grad_()
        plain = model.blocks[1](model.blocks[0](y))
        plain.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_transforms_run_and_are_listed_as_unseen() -> None:
    model, x = FusedAttention(), randn(3, 2, 4, 16)
    with foci.watch(model) as seen:
        out = torch.func.vmap(model)(x)
    torch.testing.assert_close(out, torch.stack([model(each) for each in x]))
    assert seen.layers == {}
    assert "torch.func" in seen.unseen[0]


@pytest.mark.parametrize("size", [3.0, 300.0])
def test_autocast_narrows_an_additive_mask_as_pytorch_does(size: float) -> None:
    q, k, v = randn(2, 4, 6, 8), randn(2, 4, 9, 8, seed=1), randn(2, 4, 9, 8, seed=2)
    model, mask = Calls(F.scaled_dot_product_attention), size * randn(6, 9, seed=8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(q, k, v, attn_mask=mask)
        out, seen = seen_in(model, q, k, v, attn_mask=mask)
    assert torch.equal(out, expected)
    torch.testing.assert_close(seen["L0H1"].dense().sum(-1), torch.ones(2, 6), atol=1e-4, rtol=0)
