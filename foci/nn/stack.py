"""The stack of blocks with embedding and head that Encoder and Decoder share, and their outputs.

B batch, T tokens, S tokens of the memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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

if TYPE_CHECKING:
    from foci.sharding.modules import ModuleShards

Item = TypeVar("Item")


class Output(NamedTuple):
    """The output of a model; with return_weights, `weights` holds every layer's by name: L0, encoder.L0, cross.L0.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=20)
    >>> model(torch.tensor([[1, 2, 3]]), return_weights=True).weights["L0"].shape[-2:]
    (3, 3)
    """

    states: Tensor  # (B, T, width), after the last norm
    logits: Tensor | None  # (B, T, vocabulary), if the model has a head; T is 1 with only_last
    weights: dict[str, Weights]  # empty without return_weights


class Memory(NamedTuple):
    """The encoded source, which a decoder attends to.

    >>> model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=20)
    >>> model.encode(torch.tensor([[1, 2, 3]])).states.shape[1]
    3
    """

    states: Tensor  # (B, S, width)
    layout: Layout  # which states are real
    weights: dict[str, Weights]  # of the encoder; empty without return_weights

    def select_rows(self, index: Tensor) -> Memory:
        """The memory of the rows `index` of the batch, as in `Caches.reorder`."""
        padding = None if self.layout.padding is None else self.layout.padding[index]
        return Memory(self.states[index], Layout(padding, self.layout.documents), self.weights)


class Stack(Model):
    """Embedding, blocks, final norm and head: the base class of Encoder and Decoder."""

    config_type = TransformerConfig
    config: TransformerConfig
    # Set where this process has only a part of the tokens: see foci.training.parallel.
    shards: ModuleShards | None = None

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
        """Every attention module, under the name of its weights."""
        attentions: dict[str, Attention] = {}
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            attentions[f"L{i}"] = block.attention
            if block.cross is not None:
                attentions[f"cross.L{i}"] = block.cross
        return attentions

    def _run_blocks(
        self,
        x: Tensor,
        memory: Tensor | None,
        masks: tuple[Mask | None, Mask | None],
        positions: Tensor | None,
        caches: Caches | None,
        return_weights: bool,
        only_last: bool = False,
    ) -> Output:
        """Run all blocks, the final norm and the head; with only_last, the head of the last token only."""
        weights: dict[str, Weights] = {}
        # How many tokens all processes have, if they are sharded; not while generating, which attends to a cache.
        shards = None if self.shards is None or self.shards.cp == 1 or caches is not None else self.shards
        counts = None if shards is None else (x.shape[1], 0 if memory is None else memory.shape[1])
        if shards is not None:
            positions = shards.take_positions(positions, x.shape[1], x.device)
            x, memory = shards.take_tokens(x), None if memory is None else shards.take_tokens(memory)
        # Weights hold the tensors that checkpointing would free, so return_weights turns checkpointing off.
        recompute = self.config.checkpoint and torch.is_grad_enabled() and not return_weights
        for i, block in enumerate(self.blocks):
            run = partial(
                block,
                mask=masks[0],
                memory_mask=masks[1],
                positions=positions,
                caches=(None, None) if caches is None else caches.layers[i],
                counts=counts,
                return_weights=return_weights,
            )
            result = checkpoint(run, x, memory, use_reentrant=False) if recompute else run(x, memory)
            x, block_weights = result if return_weights else (result, {})
            weights |= {f"L{i}" if kind == "own" else f"cross.L{i}": each for kind, each in block_weights.items()}
        if self.norm is not None:
            x = self.norm(x)
        if shards is not None and counts is not None:
            x = shards.gather_tokens(x, counts[0])
        return Output(x, self._compute_logits(x[:, -1:] if only_last else x), weights)

    def _compute_logits(self, states: Tensor) -> Tensor | None:
        if self.head is None or self.embedding.tokens is None:
            return None
        return self.head(states, self.embedding.tokens.weight)  # type: ignore[no-any-return]


def prefix_layer_names(items: dict[str, Item], prefix: str) -> dict[str, Item]:
    """Rename L0 to encoder.L0 or decoder.L0; cross.L0 stays."""
    return {name if name.startswith("cross.") else f"{prefix}.{name}": each for name, each in items.items()}


@torch.no_grad()
def initialize_stack(stack: Stack) -> None:
    """Initialize all weights; those of the last layer before a residual are scaled down with the depth of the stack."""
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
        residual_layers = [
            block.attention.output,
            block.feed_forward.outer,
            *([] if block.cross is None else [block.cross.output]),
        ]
        for layer in residual_layers:
            layer.weight.mul_((len(residual_layers) * config.layers) ** -0.5)
    if stack.head is not None and stack.head.kind == "linear":
        nn.init.normal_(stack.head.weight, std=std)
