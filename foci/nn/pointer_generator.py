"""An encoder-decoder that may copy: each word is made up, or taken from the source where attention points.

B batch, S tokens of the source, T tokens of the target, V words of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.nn.attention import Attention
from foci.nn.config import EncoderDecoderConfig
from foci.nn.layer_caches import Caches
from foci.nn.layout import Layout
from foci.nn.stack import Memory, Output
from foci.nn.transformer import EncoderDecoder
from foci.weights.weights import Weights

# The least that is copied of any word: logarithms stay finite.
MIN_COPY_PROBABILITY = 1e-9


class CopyMemory(NamedTuple):
    """What a decoder looks at, and the words that it may copy from there."""

    states: Tensor  # (B, S, width)
    layout: Layout
    weights: dict[str, Weights]
    tokens: Tensor  # (B, S)

    def at(self, index: Tensor) -> CopyMemory:
        """The memory of some rows of the batch, as `Caches.reorder` takes them."""
        return CopyMemory(*Memory(self.states, self.layout, self.weights).at(index), self.tokens[index])


class CopyingTransformer(EncoderDecoder):
    """Reads a source, and writes a target whose words it makes up or copies (a pointer-generator).

    >>> model = foci.nn.CopyingTransformer.from_name("tiny", vocabulary=100, shared=True)
    >>> source, target = torch.randint(100, (2, 12)), torch.randint(100, (2, 10))
    >>> out = model(source, target[:, :-1], return_weights=True)
    >>> out.logits.shape, out.weights["copy.L0"].shape                 # where each word would be copied from
    (torch.Size([2, 9, 100]), (2, 1, 9, 12))

    The logits are logarithms of probabilities: those of the words that are made up and of those that are copied,
    mixed by a gate that is learned.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__(config)
        width = config.decoder.width
        # One head, as wide as every fused kernel takes it.
        self.pointer = Attention(width, 1, head_width=min(width, 128))
        self.gate = nn.Linear(2 * width, 1)

    def encode(
        self,
        source: Tensor,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        return_weights: bool = False,
    ) -> Memory:
        """The source, read once: what `decode` looks at and copies from."""
        if documents is not None:
            raise ValueError("a model that copies takes padded sources, but got documents")
        memory = super().encode(source, padding=padding, return_weights=return_weights)
        return CopyMemory(*memory, source)  # type: ignore[return-value]

    def decode(
        self,
        target: Tensor,
        memory: Memory | CopyMemory,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        caches: Caches | None = None,
        return_weights: bool = False,
    ) -> Output:
        """What comes after each token of the target, as logarithms of probabilities."""
        if not isinstance(memory, CopyMemory):
            raise TypeError(f"decode takes what this model's encode gave, but got {type(memory).__name__}")
        plain = Memory(memory.states, memory.layout, memory.weights)
        out = super().decode(target, plain, padding=padding, caches=caches, return_weights=return_weights)
        if out.logits is None:
            raise ValueError("a model that copies needs logits, but its decoder has no head")
        mask = memory.layout.seen_by(Layout())
        context, looked = self.pointer(out.states, memory.states, mask=mask, return_weights=True)
        gate = self.gate(torch.cat([out.states, context], dim=-1)).float()  # (B, T, 1)
        copied = sum_weights_by_token(looked.dense()[:, 0].float(), memory.tokens, out.logits.shape[-1])
        made_up = out.logits.float().log_softmax(-1) + F.logsigmoid(gate)
        likely = torch.logaddexp(made_up, copied.clamp(min=MIN_COPY_PROBABILITY).log() + F.logsigmoid(-gate))
        return Output(out.states, likely, out.weights | ({"copy.L0": looked} if return_weights else {}))

    def attentions(self) -> dict[str, Attention]:
        """Every attention module by the name that its weights have."""
        return super().attentions() | {"copy.L0": self.pointer}


def sum_weights_by_token(looked: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """The attention that each word of the vocabulary gets, wherever it stands: (B, T, S) -> (B, T, V)."""
    words = tokens[:, None].expand(-1, looked.shape[1], -1)
    return looked.new_zeros(*looked.shape[:2], vocabulary).scatter_add(2, words, looked)
