"""What is said of an attention matrix at once: the heaviest keys, and all of its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Top(NamedTuple):
    """The heaviest keys of each query, heaviest first; 0 and -1 where fewer are visible."""

    values: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Summary:
    """The statistics of an attention matrix, each as the method of `Weights` of the same name gives it."""

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
