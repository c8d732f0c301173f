"""Layers and models of torch.nn converted to foci: equal outputs and gradients, within float32 rounding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci
import foci.nn
from foci.nn.block import ACTIVATION_FUNCTIONS
from foci.nn.from_torch import TensorMapping, map_torch_layer, map_torch_stack
from tests.nn.same import assert_same, assert_same_gradients
from tests.tensors import randn

# PyTorch warns for every Transformer that does not take its nested fast path.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")

WIDTH, HEADS, HIDDEN = 16, 4, 24
LENGTHS = torch.tensor([6, 4])
HIDDEN_KEYS = torch.arange(6) >= LENGTHS[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)

LAYERS = [
    {"norm_first": first, "activation": activation, "bias": bias}
    for first, activation, bias in itertools.product((False, True), ("relu", F.gelu), (True, False))
]


def randomize(module: nn.Module) -> Any:
    """Set all weights, including the norms, to values other than 0 and 1."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) * 0.4 + (0.5 if parameter.dim() == 1 else 0.0))
    return module


def map_gradients(layer: nn.Module) -> Any:
    def rename(grads: dict[str, Tensor]) -> dict[str, Tensor]:
        mapping = TensorMapping(grads)
        if isinstance(layer, nn.Transformer):
            map_torch_stack(mapping, layer.encoder, "encoder.", "encoder.")
            map_torch_stack(mapping, layer.decoder, "decoder.", "decoder.")
        else:
            map_torch_layer(mapping, layer, "", "")
        assert not mapping.unmapped
        return mapping.mapped

    return rename


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_an_encoder_layer(options: dict[str, Any], padded: bool) -> None:
    theirs = randomize(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True, **options))
    ours = foci.nn.load_torch_layer(theirs)
    x = randn(2, 6, WIDTH)
    expected = theirs(x, src_key_padding_mask=HIDDEN_KEYS if padded else None)
    found = ours(x, mask=foci.padding(LENGTHS) if padded else None)
    assert_same(found, expected, slack=64)
    assert_same_gradients(found, expected, ours, theirs, map_gradients(theirs), slack=64)


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_decoder_layer(options: dict[str, Any], padded: bool) -> None:
    theirs = randomize(nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True, **options))
    ours = foci.nn.load_torch_layer(theirs)
    x, memory = randn(2, 5, WIDTH), randn(2, 6, WIDTH, seed=1)
    hidden = {"memory_key_padding_mask": HIDDEN_KEYS} if padded else {}
    expected = theirs(x, memory, tgt_mask=CAUSAL, tgt_is_causal=True, **hidden)
    found = ours(x, memory, mask=foci.causal, memory_mask=foci.padding(LENGTHS) if padded else None)
    assert_same(found, expected, slack=64)
    assert_same_gradients(found, expected, ours, theirs, map_gradients(theirs), slack=64)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_a_transformer(options: dict[str, Any], batch_first: bool) -> None:
    theirs = randomize(nn.Transformer(WIDTH, HEADS, 2, 3, HIDDEN, 0.0, batch_first=batch_first, **options))
    ours = foci.nn.load_torch_transformer(theirs)
    source, target = randn(2, 6, WIDTH), randn(2, 5, WIDTH, seed=1)
    given = (source, target) if batch_first else (source.transpose(0, 1), target.transpose(0, 1))
    expected = theirs(
        *given,
        tgt_mask=CAUSAL,
        tgt_is_causal=True,
        src_key_padding_mask=HIDDEN_KEYS,
        memory_key_padding_mask=HIDDEN_KEYS,
    )
    expected = expected if batch_first else expected.transpose(0, 1)
    found = ours(source, target, source_padding=LENGTHS).states
    assert_same(found, expected, slack=64)
    assert_same_gradients(found, expected, ours, theirs, map_gradients(theirs), slack=64)


def test_an_encoder_without_a_last_norm() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True)
    theirs = randomize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    ours = foci.nn.load_torch_transformer(theirs)
    assert ours.norm is None
    assert not ours.training
    x = randn(2, 6, WIDTH)
    assert_same(ours(x).states, theirs(x), slack=64)


def test_options_dtype_and_weights_are_copied() -> None:
    theirs = nn.Transformer(WIDTH, HEADS, 1, 1, HIDDEN, dropout=0.25, layer_norm_eps=1e-3, dtype=torch.float64)
    ours = foci.nn.load_torch_transformer(theirs)
    stack = ours.config.decoder
    assert (stack.dropout, stack.attention_dropout, stack.eps, stack.hidden) == (0.25, 0.25, 1e-3, HIDDEN)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float64}
    before = ours(randn(1, 3, WIDTH).double(), randn(1, 2, WIDTH).double()).states.detach()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert before.abs().max() > 0
    assert all(bool(parameter.any()) for name, parameter in ours.named_parameters() if name.endswith("project.weight"))


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.ReLU(), "relu"), (F.silu, "silu"), (nn.SiLU(), "silu")],
)
def test_activations(module: Any, name: str) -> None:
    theirs = randomize(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, activation=module, batch_first=True))
    ours = foci.nn.load_torch_layer(theirs)
    x = randn(2, 6, WIDTH)
    assert_same(ours(x), theirs(x), slack=64)
    assert ours.feed_forward.activation is ACTIVATION_FUNCTIONS[name]


def test_unsupported_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="activation must be relu, gelu or silu, got"):
        foci.nn.load_torch_layer(nn.TransformerEncoderLayer(WIDTH, HEADS, activation=torch.tanh))
    with pytest.raises(TypeError, match=r"source must be a torch\.nn\.Transformer or .*, got Linear"):
        foci.nn.load_torch_transformer(nn.Linear(2, 2))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="TransformerDecoderLayer, got Linear"):
        foci.nn.load_torch_layer(nn.Linear(2, 2))
    mapping = TensorMapping({"a.weight": torch.zeros(2, 2), "rest": torch.zeros(1)})
    mapping.map_part("weight", "a")
    with pytest.raises(ValueError, match=r"every tensor must have a counterpart in Linear, got \['rest'\]"):
        mapping.load_into(nn.Linear(2, 2))
