"""The layout of a batch: plain, padded, or packed with several documents per row.

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
    """Which tokens of a batch are real, and which document each belongs to; it gives their mask and positions.

    >>> foci.nn.Layout(documents=torch.tensor([0, 0, 0, 1, 1])).positions()
    tensor([0, 1, 2, 0, 1])

    Args:
        padding: lengths (B,) of sequences padded on the right, or bool (B, T), True for real tokens.
        documents: (T,) or (B, T), the document number of each token; documents are contiguous. Padding in a packed row
            is a document of its own.

    Without either, every token is real.
    """

    padding: Tensor | None = None
    documents: Tensor | None = None

    def __post_init__(self) -> None:
        if self.padding is not None and self.documents is not None:
            raise ValueError("padding and documents must not both be given: a batch is padded or packed, got both")
        if self.padding is not None and self.padding.dim() != (2 if self.padding.dtype == torch.bool else 1):
            shape = f"{self.padding.dtype} {tuple(self.padding.shape)}"
            raise ValueError(f"padding must be lengths (B,), or bool (B, T) with True = real token, got {shape}")

    @property
    def has_lengths(self) -> bool:
        """Whether padding was given as lengths, so that it is on the right."""
        return self.padding is not None and self.padding.dim() == 1

    def build_mask(self, queries: Layout) -> Mask | None:
        """The mask of these tokens as keys for the given queries; None: all are visible."""
        if (self.documents is None) != (queries.documents is None):
            raise ValueError("documents must be given for both sequences or for neither, got them for one")
        if self.documents is not None and queries.documents is not None:
            return documents(queries.documents, self.documents)
        if self.padding is None:
            return None
        return padding(self.padding) if self.has_lengths else as_mask(self.padding[:, None, None, :])

    def positions(self) -> Tensor | None:
        """The position of each token in its own sequence, (T,) or (B, T); None: in order from 0."""
        if self.documents is not None:
            return compute_document_positions(self.documents)
        if self.padding is None or self.has_lengths:
            return None
        return (self.padding.long().cumsum(-1) - 1).clamp(min=0)


def compute_document_positions(ids: Tensor) -> Tensor:
    """The position of each token within its document."""
    index = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    starts = torch.zeros_like(index)
    starts[..., 1:] = torch.where(ids[..., 1:] != ids[..., :-1], index[..., 1:], 0)
    return index - starts.cummax(-1).values
