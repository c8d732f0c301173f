"""The call of this process: its tensors, its part of the matrix, and the arguments of the whole call.

B batch, H heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foci.arguments import fold_batch, prepare_call
from foci.sharding.call_parts import CallParts, check_parts
from foci.sharding.layout import CallLayout, Part
from foci.weights.parts_file import map_tensors
from foci.weights.weights import Weights

# The arguments besides query, key and value that the matrix depends on.
PARAMETERS = ("score", "mask", "bias", "sink", "positions")


@dataclass(frozen=True)
class LocalCall:
    """The tensors of this process as (B, H, T, D), its part of the matrix, and the arguments of the whole call."""

    q: Tensor
    k: Tensor
    v: Tensor
    lead: tuple[int, ...]  # batch and heads of the part, as the caller has them
    part: Part
    parts: CallParts

    @property
    def has_default_positions(self) -> bool:
        """Whether the last query of the part has the position of the last key."""
        return bool(self.part.queries.stop == self.parts.sizes.queries)

    def restore_lead(self, tensor: Tensor) -> Tensor:
        """(B, H, ...) with the leading dimensions of the caller's query."""
        return tensor.reshape(*self.lead, *tensor.shape[2:])

    def build_weights(self, lse: Tensor, positions: bool = False) -> Weights:
        """The weights of the part, with all keys; `positions`: with the positions of its queries in any case."""
        arguments = self.parts.select(self.part, self.parts.sizes.keys, self.has_default_positions)
        if positions and arguments["positions"] is None and not self.has_default_positions:
            arguments["positions"] = self.parts.default_positions(self.part), None
        return Weights.from_call(prepare_call(self.q, self.k, self.k, **arguments, dropout=0.0, needs_lse=True), lse)


def build_local_call(layout: CallLayout, query: DTensor, key: DTensor, value: DTensor, options: Any) -> LocalCall:
    """Gathers what this process needs, and selects its part of the arguments."""
    part = layout.part()
    q, k, v = layout.place(query, True), layout.place(key, False), layout.place(value, False)
    if layout.heads is not None and not layout.has_whole_groups:
        # The key/value head of each query head of this process.
        index = torch.arange(part.heads.start, part.heads.stop, device=q.device) // (layout.heads // layout.kv_heads)
        k, v = k.index_select(-3, index), v.index_select(-3, index)
    lead = tuple(each.stop - each.start for each in part.batch)
    lead = lead if layout.heads is None else (*lead, part.heads.stop - part.heads.start)
    folded = fold_batch(q, k, v)[:3]
    options = map_tensors({name: options[name] for name in PARAMETERS}, layout.gather_parameter)
    return LocalCall(*folded, lead, part, check_parts(options, layout.sizes(q.device), *folded))
