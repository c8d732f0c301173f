"""Models of PyTorch as models of foci: the same weights, the same outputs.

A model is a config, and where each of its tensors goes. Every tensor must find its place.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.nn.block import Block
from foci.nn.config import Activation, BlockConfig, EncoderDecoderConfig, TransformerConfig
from foci.nn.model import iter_unique_tensors, load_tensors
from foci.nn.transformer import Encoder, EncoderDecoder

ModuleType = TypeVar("Made", bound=nn.Module)


class TensorMapping:
    """Tensors on their way from one model to another: `take` says where each goes, `into` that all have arrived."""

    def __init__(self, state: dict[str, Tensor], prefix: str = "") -> None:
        self.state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        self.found: dict[str, Tensor] = {}
        self.left = set(self.state)

    def take(self, new: str, *old: str, turned: bool = False) -> None:
        """The weights, and biases where there are, of one part; several are joined, `turned` ones transposed."""
        for kind in ("weight", "bias"):
            names = [f"{name}.{kind}" for name in old]
            if all(name in self.state for name in names):
                parts = [self.state[name].mT if turned and kind == "weight" else self.state[name] for name in names]
                self.found[f"{new}.{kind}"] = parts[0] if len(parts) == 1 else torch.cat(parts)
                self.left -= set(names)

    def take_one(self, new: str, old: str) -> None:
        """A single tensor."""
        self.found[new] = self.state[old]
        self.left.discard(old)

    def leave(self, *names: str) -> None:
        """What is known not to be needed: copies of shared tensors, and heads that foci's model does not have."""
        self.left = {each for each in self.left if not each.startswith(names)}

    def into(self, model: ModuleType) -> ModuleType:
        """The model, filled; biases that the source does not have are zeros."""
        if self.left:
            raise ValueError(f"these tensors have no place in {type(model).__name__}: {sorted(self.left)[:6]}")
        for name, tensor in iter_unique_tensors(model):
            if name.endswith(".bias") and name not in self.found:
                self.found[name] = torch.zeros_like(tensor)
        load_tensors(model, self.found)
        return model


@overload
def load_torch_transformer(source: nn.Transformer) -> EncoderDecoder: ...
@overload
def load_torch_transformer(source: nn.TransformerEncoder) -> Encoder: ...
def load_torch_transformer(source: nn.Module) -> EncoderDecoder | Encoder:
    """`torch.nn.Transformer` or `torch.nn.TransformerEncoder` as a model of foci with the same outputs.

    >>> theirs = torch.nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    >>> ours = foci.nn.load_torch_transformer(theirs)
    >>> source, target = torch.randn(2, 5, 32), torch.randn(2, 3, 32)
    >>> causal = torch.nn.Transformer.generate_square_subsequent_mask(3)
    >>> torch.allclose(ours(source, target).states, theirs(source, target, tgt_mask=causal), atol=1e-5)
    True

    It takes vectors (B, T, width), whatever `batch_first` was, and its decoder always looks back only.
    """
    if isinstance(source, nn.TransformerEncoder):
        moving = TensorMapping(source.state_dict())
        map_torch_stack(moving, source, "", "")
        return moving.into(Encoder(build_stack_config(source))).train(source.training)
    if not isinstance(source, nn.Transformer) or not isinstance(source.decoder, nn.TransformerDecoder):
        kinds = "torch.nn.Transformer or torch.nn.TransformerEncoder"
        raise TypeError(f"load_torch_transformer takes {kinds}, but got {type(source).__name__}")
    model = EncoderDecoder(EncoderDecoderConfig(build_stack_config(source.encoder), build_stack_config(source.decoder)))
    moving = TensorMapping(source.state_dict())
    map_torch_stack(moving, source.encoder, "encoder.", "encoder.")
    map_torch_stack(moving, source.decoder, "decoder.", "decoder.")
    return moving.into(model).train(source.training)


def load_torch_layer(source: nn.Module) -> Block:
    """`torch.nn.TransformerEncoderLayer` or `torch.nn.TransformerDecoderLayer` as a block; it takes (B, T, width)."""
    if not isinstance(source, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        kinds = "torch.nn.TransformerEncoderLayer or torch.nn.TransformerDecoderLayer"
        raise TypeError(f"load_torch_layer takes {kinds}, but got {type(source).__name__}")
    block = Block(BlockConfig(**read_layer_fields(source)), cross=isinstance(source, nn.TransformerDecoderLayer))
    moving = TensorMapping(source.state_dict())
    map_torch_layer(moving, source, "", "")
    return moving.into(block).train(source.training)


def read_layer_fields(layer: Any) -> dict[str, Any]:
    """What a layer of PyTorch's says of itself, as fields of a config."""
    return {
        "width": layer.linear1.in_features,
        "heads": layer.self_attn.num_heads,
        "hidden": layer.linear1.out_features,
        "activation": name_activation(layer.activation),
        "norm_first": layer.norm_first,
        "eps": layer.norm1.eps,
        "biases": layer.linear1.bias is not None,
        "dropout": layer.dropout.p,
        "attention_dropout": layer.self_attn.dropout,
    }


def name_activation(function: Any) -> Activation:
    if isinstance(function, nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    known: dict[Any, Activation] = {F.relu: "relu", nn.ReLU: "relu", F.gelu: "gelu", F.silu: "silu", nn.SiLU: "silu"}
    for each in (function, type(function)):
        if each in known:
            return known[each]
    raise ValueError(f"the activation must be relu, gelu or silu, but got {function!r}")


def build_stack_config(stack: Any) -> TransformerConfig:
    fields = read_layer_fields(stack.layers[0])
    return TransformerConfig(**fields, layers=len(stack.layers), positions=None, final_norm=stack.norm is not None)


def map_torch_stack(moving: TensorMapping, stack: Any, old: str, new: str) -> None:
    for i, layer in enumerate(stack.layers):
        map_torch_layer(moving, layer, f"{old}layers.{i}.", f"{new}blocks.{i}.")
    moving.take(f"{new}norm", f"{old}norm")


def map_torch_layer(moving: TensorMapping, layer: Any, old: str, new: str) -> None:
    norms = ["attention_norm", "feed_forward_norm"]
    attentions = {"self_attn": "attention"}
    if isinstance(layer, nn.TransformerDecoderLayer):
        norms.insert(1, "cross_norm")
        attentions["multihead_attn"] = "cross"
    for theirs, ours in attentions.items():
        moving.take(f"{new}{ours}.output", f"{old}{theirs}.out_proj")
        for kind in ("weight", "bias"):
            if f"{old}{theirs}.in_proj_{kind}" in moving.state:
                moving.take_one(f"{new}{ours}.project.{kind}", f"{old}{theirs}.in_proj_{kind}")
    for place, norm in enumerate(norms, start=1):
        moving.take(f"{new}{norm}", f"{old}norm{place}")
    moving.take(f"{new}feed_forward.inner", f"{old}linear1")
    moving.take(f"{new}feed_forward.outer", f"{old}linear2")
