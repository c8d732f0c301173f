"""Results of several tensors: `Top`, the heaviest keys, and `Summary`, all statistics of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Top(NamedTuple):
    """The heaviest keys of each query, heaviest first; value 0 and key -1 if fewer are visible."""

    values: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Summary:
    """The statistics of an attention matrix, each like the method of `Weights` with the same name."""

    entropy: Tensor
    received: Tensor
    distance: Tensor | None
    lse: Tensor
    sink_mass: Tensor
    largest_logit: Tensor | None
    top: Top | None
    picture: Tensor | None

    def __repr__(self) -> str:
        shapes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.top is not None:
            shapes["top"] = self.top.keys
        return f"Summary({', '.join(f'{name} {tuple(x.shape)}' for name, x in shapes.items() if x is not None)})"
