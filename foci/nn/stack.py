"""A stack of blocks with its two ends: what Encoder and Decoder share.

B batch, T tokens, S tokens of the memory.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foci.masks.base import Mask
from foci.nn.attention import Attention
from foci.nn.block import Block, build_norm
from foci.nn.config import TransformerConfig
from foci.nn.embedding import Embedding, Head
from foci.nn.layer_caches import Caches
from foci.nn.layout import Layout
from foci.nn.model import Model
from foci.nn.positions import BucketTable
from foci.weights.weights import Weights

Item = TypeVar("Named")


class Output(NamedTuple):
    """What a model gives; with return_weights, `weights` has every layer's by name: L0, encoder.L0, cross.L0."""

    states: Tensor  # (B, T, width), after the last norm
    logits: Tensor | None  # (B, T, vocabulary), where the model has a head; T is 1 where only the last was asked for
    weights: dict[str, Weights]


class Memory(NamedTuple):
    """What a decoder looks at: states (B, S, width), which of them are real, and how they were made."""

    states: Tensor
    layout: Layout
    weights: dict[str, Weights]

    def at(self, index: Tensor) -> Memory:
        """The memory of some rows of the batch, as `Caches.reorder` takes them."""
        padding = None if self.layout.padding is None else self.layout.padding[index]
        return Memory(self.states[index], Layout(padding, self.layout.documents), self.weights)


class Stack(Model):
    """Embedding, blocks, a last norm and a head: what Encoder and Decoder share."""

    config_type = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        shared = BucketTable(config.heads, bidirectional=not causal) if config.bias == "buckets" else None
        rates = torch.linspace(0.0, config.depth_dropout, max(config.layers, 1), device="cpu").tolist()
        self.blocks = nn.ModuleList(
            Block(config, cross=cross, bias=shared, depth_dropout=rates[i]) for i in range(config.layers)
        )
        self.norm = build_norm(config) if config.final_norm else None
        self.head = Head(config) if config.head is not None and config.vocabulary is not None else None
        initialize_stack(self)

    def attentions(self) -> dict[str, Attention]:
        """Every attention module by the name that its weights have."""
        found: dict[str, Attention] = {}
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            found[f"L{i}"] = block.attention
            if block.cross is not None:
                found[f"cross.L{i}"] = block.cross
        return found

    def _finished(
        self,
        x: Tensor,
        memory: Tensor | None,
        masks: tuple[Mask | None, Mask | None],
        positions: Tensor | None,
        caches: Caches | None,
        return_weights: bool,
        only_last: bool = False,
    ) -> Output:
        """Through all blocks, the last norm and the head, which may be asked about the last token alone."""
        weights: dict[str, Weights] = {}
        # Weights hold the tensors that checkpointing would free, so whoever asks for them pays with memory.
        again = self.config.checkpoint and torch.is_grad_enabled() and not return_weights
        for i, block in enumerate(self.blocks):
            run = partial(
                block,
                mask=masks[0],
                memory_mask=masks[1],
                positions=positions,
                caches=(None, None) if caches is None else caches.layers[i],
                return_weights=return_weights,
            )
            found = checkpoint(run, x, memory, use_reentrant=False) if again else run(x, memory)
            x, of_block = found if return_weights else (found, {})
            weights |= {f"L{i}" if kind == "own" else f"cross.L{i}": each for kind, each in of_block.items()}
        if self.norm is not None:
            x = self.norm(x)
        return Output(x, self._logits(x[:, -1:] if only_last else x), weights)

    def _logits(self, states: Tensor) -> Tensor | None:
        if self.head is None or self.embedding.tokens is None:
            return None
        return self.head(states, self.embedding.tokens.weight)  # type: ignore[no-any-return]


def prefix_layer_names(named: dict[str, Item], kind: str) -> dict[str, Item]:
    """L0 becomes encoder.L0 or decoder.L0; cross.L0 stays."""
    return {name if name.startswith("cross.") else f"{kind}.{name}": each for name, each in named.items()}


@torch.no_grad()
def initialize_stack(stack: Stack) -> None:
    """Small weights, and smaller ones where a part is added to the residual: the deeper, the smaller."""
    config, std = stack.config, (2 / (5 * stack.config.width)) ** 0.5
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.width**-0.5 if config.scale_embedding else 0.02)
    for block in stack.blocks:
        assert isinstance(block, Block)
        added = [
            block.attention.output,
            block.feed_forward.outer,
            *([] if block.cross is None else [block.cross.output]),
        ]
        for part in added:
            part.weight.mul_((len(added) * config.layers) ** -0.5)
    if stack.head is not None and stack.head.kind == "linear":
        nn.init.normal_(stack.head.weight, std=std)
