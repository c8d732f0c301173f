"""Results of several tensors: `Top`, the heaviest keys, and `Summary`, all statistics of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foci.runtime.tracing import is_traced


class Top(NamedTuple):
    """The heaviest keys of each query, heaviest first; value 0 and key -1 if fewer are visible."""

    values: Tensor
    keys: Tensor


class SummaryParts(NamedTuple):
    """What a summary is made of: the results of the pass, (B, H, ...), and the log-sum-exp.

    lead: the leading axes of the fields; None where they are (B, H).
    """

    results: Mapping[str, Tensor]
    lse: Tensor
    lead: tuple[int, ...] | None


def make_field(parts: SummaryParts, name: str) -> Tensor | Top | None:
    """A field of the summary, as it is without a sink; None for what was left out."""
    results, lse, _ = parts
    if name == "top":
        if "top_keys" not in results:
            return None
        return Top(with_lead(results["top_values"], parts), with_lead(results["top_keys"], parts))
    if name == "lse":
        return with_lead(lse.detach(), parts)
    if name == "sink_mass":
        return with_lead(torch.zeros_like(lse), parts)
    return with_lead(results[name], parts) if name in results else None


def with_lead(result: Tensor, parts: SummaryParts) -> Tensor:
    return result if parts.lead is None else result.reshape((*parts.lead, *result.shape[2:]))


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

    @classmethod
    def from_parts(cls, parts: SummaryParts, made: dict[str, Tensor]) -> Summary:
        """A summary of the fields in `made` and of others, which are made when they are first read."""
        if is_traced(parts.lse):
            fields: dict[str, Any] = {name: make_field(parts, name) for name in FIELDS if name not in made}
            return cls(**(fields | made))
        summary = object.__new__(cls)
        summary.__dict__.update(made, _parts=parts)
        return summary

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            parts = self.__dict__.get("_parts")
            if parts is None or name not in FIELDS:
                raise AttributeError(f"'Summary' object has no attribute {name!r}")
            value = self.__dict__[name] = make_field(parts, name)
            return value

    def __getstate__(self) -> dict[str, Any]:
        """All fields as they are copied and pickled."""
        return {name: getattr(self, name) for name in FIELDS}

    def __repr__(self) -> str:
        shapes = {name: getattr(self, name) for name in FIELDS}
        if self.top is not None:
            shapes["top"] = self.top.keys
        return f"Summary({', '.join(f'{name} {tuple(x.shape)}' for name, x in shapes.items() if x is not None)})"


FIELDS = tuple(Summary.__dataclass_fields__)
