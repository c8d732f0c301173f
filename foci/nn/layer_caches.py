"""What a decoder keeps while it generates, for all of its layers.

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
    """Of each layer two caches: the keys and values of its own tokens, and those of the memory it looks at.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100).eval()
    >>> caches = model.caches()
    >>> with torch.no_grad():
    ...     logits = model(torch.tensor([[5, 3, 8]]), caches=caches).logits[:, -1]       # the prompt
    ...     logits = model(logits.argmax(-1, keepdim=True), caches=caches).logits[:, -1]  # one token more
    >>> caches.length
    4

    Prompts of unequal length are padded on the left, and the padding is told with them, once.
    """

    def __init__(self, layers: int, capacity: int | None = None) -> None:
        self.layers = [(Cache(capacity=capacity), Cache()) for _ in range(layers)]
        self.skipped: Tensor | None = None  # (B,): how many tokens on the left of each sequence are padding

    @property
    def length(self) -> int:
        """The tokens seen so far, padding included."""
        return max((own.length for own, _ in self.layers), default=0)

    def begin(self, layout: Layout) -> None:
        """Takes note of the padding of the first tokens."""
        if layout.documents is not None:
            raise ValueError("caches take padded batches, but documents were given: generate for one sequence per row")
        if layout.padding is None:
            return
        if self.length or layout.by_lengths or not is_left_padded(layout.padding):
            raise ValueError(
                "with caches, padding is bool (B, T), on the left, and given once with the first tokens, but got"
                f" {layout.padding.dtype} {tuple(layout.padding.shape)} after {self.length} tokens"
            )
        self.skipped = (~layout.padding).sum(-1)

    def mask(self, count: int) -> Mask:
        """What the next `count` tokens may look at."""
        if self.skipped is None:
            return causal
        real = padding(self.length + count - self.skipped, side="left")
        # A single token stands at the end: it may look at everything before it, and a plain padding mask is faster.
        return real if count == 1 else causal & real

    def positions(self, count: int) -> Tensor | None:
        """Where the next `count` tokens stand, (B, T); None where no sequence has padding: in order."""
        if self.skipped is None:
            return None
        places = torch.arange(self.length, self.length + count, device=self.skipped.device)
        return (places - self.skipped[:, None]).clamp(min=0)

    def crop(self, length: int) -> None:
        """Drops the newest tokens until `length` are left."""
        for own, _ in self.layers:
            own.crop(length)

    def reorder(self, index: Tensor) -> None:
        """Makes row i of the batch what row index[i] was (beam search)."""
        for own, memory in self.layers:
            own.reorder(index)
            memory.reorder(index)
        if self.skipped is not None:
            self.skipped = self.skipped[index]


def is_left_padded(real: Tensor) -> bool:
    """Whether no padding follows a real token; on a GPU that is taken on trust, so as not to wait for it."""
    return real.device.type != "cpu" or bool((real[:, 1:] >= real[:, :-1]).all())
