"""A pointer-generator: an encoder-decoder that generates each token or copies it from the source by attention.

B batch, S tokens of the source, T tokens of the target, V vocabulary size.
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

# Copy probabilities are clamped to this, so that their logarithms stay finite.
MIN_COPY_PROBABILITY = 1e-9


class CopyMemory(NamedTuple):
    """The encoded source, and its tokens, which the decoder may copy."""

    states: Tensor  # (B, S, width)
    layout: Layout
    weights: dict[str, Weights]
    tokens: Tensor  # (B, S)

    def select_rows(self, index: Tensor) -> CopyMemory:
        """The memory of the rows `index` of the batch, as in `Caches.reorder`."""
        return CopyMemory(*Memory(self.states, self.layout, self.weights).select_rows(index), self.tokens[index])


class CopyingTransformer(EncoderDecoder):
    """An encoder-decoder that generates target tokens or copies them from the source (a pointer-generator).

    >>> model = foci.nn.CopyingTransformer.from_name("tiny", vocabulary=100, shared=True)
    >>> source, target = torch.randint(100, (2, 12)), torch.randint(100, (2, 10))
    >>> out = model(source, target[:, :-1], return_weights=True)
    >>> out.logits.shape, out.weights["copy.L0"].shape                 # copy.L0: the source token to copy
    (torch.Size([2, 9, 100]), (2, 1, 9, 12))

    The logits are log-probabilities: a learned gate mixes the distribution of generated tokens with that of copied
    tokens.

    Args:
        config: the config of encoder and decoder; the decoder needs a head.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__(config)
        width = config.decoder.width
        # One head, of at most the width that every fused kernel supports.
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
        """Encode the source once; `decode` attends to the result and copies from it."""
        if documents is not None:
            raise ValueError("documents must be None for CopyingTransformer, got a tensor: pad the sources instead")
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
        """The log-probabilities of the next token after each token of the target."""
        if not isinstance(memory, CopyMemory):
            raise TypeError(f"memory must be the result of this model's encode, got {type(memory).__name__}")
        plain = Memory(memory.states, memory.layout, memory.weights)
        out = super().decode(target, plain, padding=padding, caches=caches, return_weights=return_weights)
        if out.logits is None:
            raise ValueError("config.decoder.head must be set for CopyingTransformer, got None")
        mask = memory.layout.build_mask(Layout())
        context, weights = self.pointer(out.states, memory.states, mask=mask, return_weights=True)
        gate = self.gate(torch.cat([out.states, context], dim=-1)).float()  # (B, T, 1)
        copy_probabilities = sum_weights_by_token(weights.dense()[:, 0].float(), memory.tokens, out.logits.shape[-1])
        generated = out.logits.float().log_softmax(-1) + F.logsigmoid(gate)
        copied = copy_probabilities.clamp(min=MIN_COPY_PROBABILITY).log() + F.logsigmoid(-gate)
        logits = torch.logaddexp(generated, copied)
        return Output(out.states, logits, out.weights | ({"copy.L0": weights} if return_weights else {}))

    def attentions(self) -> dict[str, Attention]:
        """Every attention module, under the name of its weights."""
        return super().attentions() | {"copy.L0": self.pointer}


def sum_weights_by_token(weights: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Sum the attention weights over all occurrences of each token of the vocabulary: (B, T, S) -> (B, T, V)."""
    index = tokens[:, None].expand(-1, weights.shape[1], -1)
    return weights.new_zeros(*weights.shape[:2], vocabulary).scatter_add(2, index, weights)
