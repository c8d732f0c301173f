"""Which tokens of a batch are real, and where each of them stands: plain, padded or packed.

B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foci.masks.base import Mask, as_mask
from foci.masks.kinds import documents, padding


@dataclass(frozen=True)
class Layout:
    """One of three: every token is real; sequences are padded; or several documents are packed into each row.

    padding: lengths (B,) of sequences padded on the right, or bool (B, T), True where a token is real.
    documents: (T,) or (B, T), the number of the document that each token belongs to; documents are contiguous.
        Padding in a packed row is a document of its own.
    """

    padding: Tensor | None = None
    documents: Tensor | None = None

    def __post_init__(self) -> None:
        if self.padding is not None and self.documents is not None:
            raise ValueError("a batch is padded or packed: expected padding or documents, but got both")
        if self.padding is not None and self.padding.dim() != (2 if self.padding.dtype == torch.bool else 1):
            shape = f"{self.padding.dtype} {tuple(self.padding.shape)}"
            raise ValueError(f"padding must be lengths (B,), or bool (B, T) with True = a real token, but got {shape}")

    @property
    def by_lengths(self) -> bool:
        """Whether the padding is on the right for certain."""
        return self.padding is not None and self.padding.dim() == 1

    def seen_by(self, queries: Layout) -> Mask | None:
        """Which of these tokens those others may look at; None: all."""
        if (self.documents is None) != (queries.documents is None):
            raise ValueError("documents must be given for both sequences or for none, but got them for one")
        if self.documents is not None and queries.documents is not None:
            return documents(queries.documents, self.documents)
        if self.padding is None:
            return None
        return padding(self.padding) if self.by_lengths else as_mask(self.padding[:, None, None, :])

    def positions(self) -> Tensor | None:
        """Where each token stands in its own sequence, (T,) or (B, T); None: in order from 0."""
        if self.documents is not None:
            return compute_document_positions(self.documents)
        if self.padding is None or self.by_lengths:
            return None
        return (self.padding.long().cumsum(-1) - 1).clamp(min=0)


def compute_document_positions(ids: Tensor) -> Tensor:
    """How many tokens of the same document stand before each token."""
    index = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    starts = torch.zeros_like(index)
    starts[..., 1:] = torch.where(ids[..., 1:] != ids[..., :-1], index[..., 1:], 0)
    return index - starts.cummax(-1).values
