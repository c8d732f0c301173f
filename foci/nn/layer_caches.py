"""The key/value caches of all layers of a decoder, used during generation.

B batch, T new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.cache import Cache
from foci.masks.base import Mask
from foci.masks.kinds import causal, padding
from foci.nn.layout import Layout


class Caches:
    """Two caches per layer: the keys and values of the decoder's own tokens, and those of the memory.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100).eval()
    >>> caches = model.caches()
    >>> with torch.no_grad():
    ...     logits = model(torch.tensor([[5, 3, 8]]), caches=caches).logits[:, -1]       # the prompt
    ...     logits = model(logits.argmax(-1, keepdim=True), caches=caches).logits[:, -1]  # one token more
    >>> caches.length
    4

    Prompts of unequal length are padded on the left; pass `padding` once, together with the prompts.

    Args:
        layers: the number of layers.
        capacity: the number of tokens to reserve memory for; None: the caches grow.
    """

    def __init__(self, layers: int, capacity: int | None = None) -> None:
        self.layers = [(Cache(capacity=capacity), Cache()) for _ in range(layers)]
        self.left_padding: Tensor | None = None  # (B,): the number of padding tokens on the left of each sequence

    @property
    def length(self) -> int:
        """The number of tokens so far, including padding."""
        return max((own.length for own, _ in self.layers), default=0)

    def set_padding(self, layout: Layout) -> None:
        """Store the padding of the first tokens."""
        if layout.documents is not None:
            raise ValueError("documents must be None with caches, got a tensor: generate for one sequence per row")
        if layout.padding is None:
            return
        if self.length or layout.has_lengths or not is_left_padded(layout.padding):
            raise ValueError(
                "padding must be bool (B, T), on the left, given once with the first tokens when caches are used, got"
                f" {layout.padding.dtype} {tuple(layout.padding.shape)} after {self.length} tokens"
            )
        self.left_padding = (~layout.padding).sum(-1)

    def mask(self, count: int) -> Mask:
        """The mask of the next `count` tokens."""
        if self.left_padding is None:
            return causal
        real = padding(self.length + count - self.left_padding, side="left")
        # A single token is the last one, so all keys are before it, and a padding mask alone is faster.
        return real if count == 1 else causal & real

    def positions(self, count: int) -> Tensor | None:
        """The positions of the next `count` tokens, (B, T); None if no sequence has padding: in order."""
        if self.left_padding is None:
            return None
        columns = torch.arange(self.length, self.length + count, device=self.left_padding.device)
        return (columns - self.left_padding[:, None]).clamp(min=0)

    def crop(self, length: int) -> None:
        """Drop the newest tokens until `length` are left."""
        for own, _ in self.layers:
            own.crop(length)

    def reorder(self, index: Tensor) -> None:
        """Replace row i of the batch by row index[i] (beam search)."""
        for own, memory in self.layers:
            own.reorder(index)
            memory.reorder(index)
        if self.left_padding is not None:
            self.left_padding = self.left_padding[index]


def is_left_padded(real: Tensor) -> bool:
    """Whether no padding follows a real token; not checked on a GPU, where it would force a sync."""
    return real.device.type != "cpu" or bool((real[:, 1:] >= real[:, :-1]).all())
