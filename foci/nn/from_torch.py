"""Converts Transformers of `torch.nn` to models of foci with the same weights and the same outputs.

A conversion builds a foci config and maps every tensor of the source to a tensor of the foci model.
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

ModuleType = TypeVar("ModuleType", bound=nn.Module)


class TensorMapping:
    """Maps the tensors of a state dict to the names of another model; `load_into` checks that none is left."""

    def __init__(self, state: dict[str, Tensor], prefix: str = "") -> None:
        self.state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        self.mapped: dict[str, Tensor] = {}
        self.unmapped = set(self.state)

    def map_part(self, new: str, *old: str, transpose: bool = False) -> None:
        """Map the weight and, if present, the bias of one or several modules, concatenated, to one module."""
        for kind in ("weight", "bias"):
            names = [f"{name}.{kind}" for name in old]
            if all(name in self.state for name in names):
                parts = [self.state[name].mT if transpose and kind == "weight" else self.state[name] for name in names]
                self.mapped[f"{new}.{kind}"] = parts[0] if len(parts) == 1 else torch.cat(parts)
                self.unmapped -= set(names)

    def map_tensor(self, new: str, old: str) -> None:
        """Map a single tensor."""
        self.mapped[new] = self.state[old]
        self.unmapped.discard(old)

    def ignore(self, *prefixes: str) -> None:
        """Drop tensors that are not needed: copies of shared tensors, and heads that the foci model does not have."""
        self.unmapped = {each for each in self.unmapped if not each.startswith(prefixes)}

    def load_into(self, model: ModuleType) -> ModuleType:
        """Load the mapped tensors into a model; biases that the source does not have become zeros."""
        if self.unmapped:
            unmapped = sorted(self.unmapped)[:6]
            raise ValueError(f"every tensor must have a counterpart in {type(model).__name__}, got {unmapped}")
        for name, tensor in iter_unique_tensors(model):
            if name.endswith(".bias") and name not in self.mapped:
                self.mapped[name] = torch.zeros_like(tensor)
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in self.mapped.items()}
        load_tensors(model, copies)
        return model


@overload
def load_torch_transformer(source: nn.Transformer) -> EncoderDecoder: ...
@overload
def load_torch_transformer(source: nn.TransformerEncoder) -> Encoder: ...
def load_torch_transformer(source: nn.Module) -> EncoderDecoder | Encoder:
    """Convert a `torch.nn.Transformer` or `torch.nn.TransformerEncoder` to a foci model with the same outputs.

    >>> source = torch.nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    >>> model = foci.nn.load_torch_transformer(source)
    >>> x, y = torch.randn(2, 5, 32), torch.randn(2, 3, 32)
    >>> causal = torch.nn.Transformer.generate_square_subsequent_mask(3)
    >>> torch.allclose(model(x, y).states, source(x, y, tgt_mask=causal), atol=1e-5)
    True

    The result takes vectors (B, T, width), whatever `batch_first` was, and its decoder is always causal.
    """
    if isinstance(source, nn.TransformerEncoder):
        mapping = TensorMapping(source.state_dict())
        map_torch_stack(mapping, source, "", "")
        return mapping.load_into(Encoder(build_stack_config(source))).train(source.training)
    if not isinstance(source, nn.Transformer) or not isinstance(source.decoder, nn.TransformerDecoder):
        kinds = "torch.nn.Transformer or torch.nn.TransformerEncoder"
        raise TypeError(f"source must be a {kinds}, got {type(source).__name__}")
    model = EncoderDecoder(EncoderDecoderConfig(build_stack_config(source.encoder), build_stack_config(source.decoder)))
    mapping = TensorMapping(source.state_dict())
    map_torch_stack(mapping, source.encoder, "encoder.", "encoder.")
    map_torch_stack(mapping, source.decoder, "decoder.", "decoder.")
    return mapping.load_into(model).train(source.training)


def load_torch_layer(source: nn.Module) -> Block:
    """Convert a `torch.nn.TransformerEncoderLayer` or `torch.nn.TransformerDecoderLayer` to a `Block`.

    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    >>> block, x = foci.nn.load_torch_layer(layer), torch.randn(2, 5, 32)
    >>> torch.allclose(block(x), layer(x), atol=1e-5)
    True

    The block takes vectors (B, T, width), whatever `batch_first` was.
    """
    if not isinstance(source, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        kinds = "torch.nn.TransformerEncoderLayer or torch.nn.TransformerDecoderLayer"
        raise TypeError(f"source must be a {kinds}, got {type(source).__name__}")
    block = Block(BlockConfig(**read_layer_fields(source)), cross=isinstance(source, nn.TransformerDecoderLayer))
    mapping = TensorMapping(source.state_dict())
    map_torch_layer(mapping, source, "", "")
    return mapping.load_into(block).train(source.training)


def read_layer_fields(layer: Any) -> dict[str, Any]:
    """Read the options of a PyTorch layer as fields of a config."""
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
    raise ValueError(f"activation must be relu, gelu or silu, got {function!r}")


def build_stack_config(stack: Any) -> TransformerConfig:
    fields = read_layer_fields(stack.layers[0])
    return TransformerConfig(**fields, layers=len(stack.layers), positions=None, final_norm=stack.norm is not None)


def map_torch_stack(mapping: TensorMapping, stack: Any, old_prefix: str, new_prefix: str) -> None:
    for i, layer in enumerate(stack.layers):
        map_torch_layer(mapping, layer, f"{old_prefix}layers.{i}.", f"{new_prefix}blocks.{i}.")
    mapping.map_part(f"{new_prefix}norm", f"{old_prefix}norm")


def map_torch_layer(mapping: TensorMapping, layer: Any, old_prefix: str, new_prefix: str) -> None:
    norms = ["attention_norm", "feed_forward_norm"]
    attentions = {"self_attn": "attention"}
    if isinstance(layer, nn.TransformerDecoderLayer):
        norms.insert(1, "cross_norm")
        attentions["multihead_attn"] = "cross"
    for source, target in attentions.items():
        mapping.map_part(f"{new_prefix}{target}.output", f"{old_prefix}{source}.out_proj")
        for kind in ("weight", "bias"):
            if f"{old_prefix}{source}.in_proj_{kind}" in mapping.state:
                mapping.map_tensor(f"{new_prefix}{target}.project.{kind}", f"{old_prefix}{source}.in_proj_{kind}")
    for number, norm in enumerate(norms, start=1):
        mapping.map_part(f"{new_prefix}{norm}", f"{old_prefix}norm{number}")
    mapping.map_part(f"{new_prefix}feed_forward.inner", f"{old_prefix}linear1")
    mapping.map_part(f"{new_prefix}feed_forward.outer", f"{old_prefix}linear2")
