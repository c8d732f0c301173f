"""Joins the steps of a generation into one lazy matrix: the queries and log-sum-exps of all steps over the last keys.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import gcd
from operator import and_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.arguments import Call
from foci.biases import Bias, DenseBias
from foci.call import DEFAULT_SCORE
from foci.capture.errors import CaptureError
from foci.masks.base import Mask, as_mask, split_conjunction
from foci.masks.kinds import Causal, Padding, Prefix, Window, causal, padding
from foci.masks.tile import CallSizes
from foci.weights.tensors import TENSORLESS_TYPES, find_tensors, fingerprint
from foci.weights.weights import Weights

# The largest dense mask that joining steps may allocate, in bytes.
MAX_DENSE_MASK_BYTES = 2**31

INTEGER_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint_keys(k: Tensor) -> Tensor:
    """One integer per key, (B, G, Tk): the sum of its bits as integers, which does not depend on the order of adding.

    Reads eight bytes at a time where the width allows: widening each element first took a hundred times as long on a
    CPU.
    """
    k, elements = k.detach() if k.requires_grad else k, 8 // k.element_size()
    if k.shape[-1] % elements or k.numel() == 0:
        return k.view(INTEGER_BY_ITEMSIZE[k.element_size()]).sum(-1, dtype=torch.int64)
    *strides, last = k.storage_offset(), *k.stride()
    is_viewable = last == 1 and gcd(*strides) % elements == 0
    return (k if is_viewable else k.clone(memory_format=torch.contiguous_format)).view(torch.int64).sum(-1)


def make_empty_keys(k: Tensor) -> Tensor:
    """Keys of length 0; a slice of the keys would hold the memory of all of them."""
    return k.new_empty((*k.shape[:2], 0, k.shape[3]))


@dataclass
class GenerationStep:
    """One attention call of a generation, without its keys."""

    call: Call  # its k and v are empty
    lse: Tensor
    keys: int
    fingerprints: tuple[Any, Any]

    @classmethod
    def from_weights(cls, weights: Weights) -> GenerationStep:
        held, call = weights.tensors, weights.tensors.call
        nothing = make_empty_keys(call.k)
        fingerprints = held.fingerprint_of(call.q), held.fingerprint_of(held.lse)
        # Faster than `dataclasses.replace`: every step of a generation runs it in every layer.
        without_keys = Call(
            call.q, nothing, nothing, call.sizes, call.score, call.mask, call.bias, call.sink, call.positions,
            needs_lse=call.needs_lse, batch_ids=call.batch_ids, head_ids=call.head_ids,
        )  # fmt: skip
        return cls(without_keys, held.lse, call.k.shape[2], fingerprints)

    @classmethod
    def from_token(cls, q: Tensor, k: Tensor, lse: Tensor) -> GenerationStep:
        """The step of a call (B, H, T, D) without a mask and of the default score."""
        nothing, shape, keys = make_empty_keys(k), q.shape, k.shape[2]
        sizes = CallSizes((shape[0],), shape[1], shape[2], keys, q.device)
        call = Call(q, nothing, nothing, sizes, DEFAULT_SCORE, needs_lse=True)
        return cls(call, lse, keys, (fingerprint(q), fingerprint(lse)))

    @property
    def queries(self) -> int:
        return self.call.q.shape[2]

    def with_keys(self, k: Tensor) -> Call:
        """The original call, with its keys taken from the last keys `k`."""
        keys = k[:, :, : self.keys]
        return replace(self.call, k=keys, v=keys)

    def to_weights(self, k: Tensor) -> Weights:
        """The weights of the step, with its keys taken from the last keys `k`."""
        return Weights(self.with_keys(k), self.lse, (k.shape[0],), True)


def count_step_bytes(weights: Weights) -> int:
    """The bytes that the weights of one step hold, without their keys."""
    call, lse = weights.tensors.call, weights.tensors.lse
    size = call.q.nbytes + lse.nbytes
    for part in (call.mask, call.bias):
        if type(part) not in TENSORLESS_TYPES:
            size += sum(tensor.nbytes for tensor in find_tensors(part))
    return size


def check_queries(steps: Sequence[GenerationStep]) -> None:
    """Raises if the queries of a step were changed since its call."""
    for step in steps:
        if (fingerprint(step.call.q), fingerprint(step.lse)) != step.fingerprints:
            raise CaptureError(
                "the generation steps cannot be joined: the queries of a step were changed in place after its call"
            )


def join_steps(steps: Sequence[GenerationStep], k: Tensor, cross: bool) -> Weights:
    """Joins the rows of all steps into one lazy matrix over the last keys (B, G, Tk, D)."""
    check_queries(steps)
    last = steps[-1].call
    q, lse = torch.cat([s.call.q for s in steps], 2), torch.cat([s.lse for s in steps], 2)
    batch, heads, queries = lse.shape
    sizes = CallSizes((batch,), last.sizes.heads or heads, queries, k.shape[2], k.device)
    call = replace(last, q=q, k=k, v=k, sizes=sizes, mask=None, bias=None)
    call.positions = None if cross else join_positions(steps, k.shape[2])
    fitted = sizes._replace(heads=heads)
    mask = join_masks(steps, k, cross)
    call.mask = None if mask is None else mask.fit(fitted)
    call.bias = join_biases(steps, k)
    return Weights(call, lse, (batch,), True)


def query_positions_of(step: GenerationStep) -> Tensor:
    """The positions of a step's queries, (B or 1, Tq)."""
    if step.call.positions is not None:
        return step.call.positions[0]
    return (torch.arange(step.queries, device=step.lse.device) + (step.keys - step.queries)).unsqueeze(0)


def join_positions(steps: Sequence[GenerationStep], keys: int) -> tuple[Tensor, Tensor] | None:
    """The positions of all queries and keys; None for the default positions."""
    parts = [query_positions_of(step) for step in steps]
    batch = max(part.shape[0] for part in parts)
    queries = torch.cat([part.expand(batch, -1) for part in parts], 1)
    explicit = [step.call.positions[1] for step in steps if step.call.positions is not None]
    default = torch.arange(keys, device=queries.device).unsqueeze(0)
    if not explicit:
        is_default = torch.equal(queries, default[:, keys - queries.shape[1] :]) if queries.shape[1] <= keys else False
        return None if is_default else (queries, default)
    last = explicit[-1]
    if last.shape[1] != keys or any(not are_equal_positions(part, last[:, : part.shape[1]]) for part in explicit):
        raise CaptureError(
            "the generation steps cannot be joined: the positions of the keys changed (a cache that overwrites keys)"
        )
    return queries, last


def are_equal_positions(left: Tensor, right: Tensor) -> bool:
    return torch.equal(*torch.broadcast_tensors(left, right)) if left.shape[1] == right.shape[1] else False


def join_masks(steps: Sequence[GenerationStep], k: Tensor, cross: bool) -> Mask | None:
    """One mask for all rows: the rule that all steps share, else a dense mask of their rows."""
    rules = [read_mask_rules(step, cross) for step in steps]
    if all(rule is not None for rule in rules):
        known = [rule for rule in rules if rule is not None]
        if all(are_equal_rules(rule, known[0]) for rule in known[1:]):
            return build_mask_from_rules(known[0], k.shape[2])
    return join_dense_masks(steps, k)


# The parts of a conjunction of masks: the parameter of each, by its kind.
MaskRules = dict[str, Any]


def read_mask_rules(step: GenerationStep, cross: bool) -> MaskRules | None:
    """A step's mask as rules that mean the same at every step; None if it has other parts."""
    rules: MaskRules = {}
    # A single query at the last position sees all keys, as with a causal mask.
    if not cross and step.queries == 1 and step.call.positions is None:
        rules["causal"] = True
    for part in split_conjunction(step.call.mask):
        if isinstance(part, Causal) and part.offset is None:
            rules["causal"] = True
        elif isinstance(part, Window) and "window" not in rules:
            rules["window"] = (part.left, part.right)
        elif isinstance(part, Prefix) and "prefix" not in rules:
            rules["prefix"] = part.length
        elif isinstance(part, Padding) and part.side not in rules:
            lengths = part.lengths if step.call.batch_ids is None else part.lengths[step.call.batch_ids]
            rules[part.side] = lengths if part.side == "right" else part.keys - lengths
        else:
            return None
    return rules if cross or "causal" in rules else None


def are_equal_rules(left: MaskRules, right: MaskRules) -> bool:
    if left.keys() != right.keys():
        return False
    return all(
        torch.equal(each, right[name]) if isinstance(each, Tensor) else each == right[name]
        for name, each in left.items()
    )


def build_mask_from_rules(rules: MaskRules, keys: int) -> Mask | None:
    """Builds the mask that the rules describe."""
    parts: list[Mask] = []
    if "causal" in rules:
        parts.append(causal)
    if "window" in rules:
        parts.append(Window(*rules["window"]))
    if "prefix" in rules:
        parts.append(Prefix(rules["prefix"]))
    if "right" in rules:
        parts.append(padding(rules["right"]))
    if "left" in rules:
        parts.append(padding(keys - rules["left"], side="left"))
    return reduce(and_, parts) if parts else None


def join_dense_masks(steps: Sequence[GenerationStep], k: Tensor) -> Mask:
    """A dense mask of the rows of all steps; keys added later are masked."""
    keys = k.shape[2]
    rows = [get_visible_entries(step, k) for step in steps]
    batch, heads = (max(row.shape[axis] for row in rows) for axis in (0, 1))
    size = batch * heads * keys * sum(step.queries for step in steps)
    if size > MAX_DENSE_MASK_BYTES:
        raise CaptureError(
            f"the generation steps cannot be joined: their masks differ, and a dense mask of all steps takes {size:,}"
            f" bytes, above the limit of {MAX_DENSE_MASK_BYTES:,}"
        )
    padded = [F.pad(row, (0, keys - row.shape[3])).expand(batch, heads, -1, -1) for row in rows]
    return as_mask(torch.cat(padded, 2))


def get_visible_entries(step: GenerationStep, k: Tensor) -> Tensor:
    """Which keys each query of a step may attend to, bool (B or 1, H or 1, Tq, keys of the step)."""
    call = step.with_keys(k)
    if call.mask is None:
        return torch.ones(1, 1, step.queries, step.keys, dtype=torch.bool, device=k.device)
    visible = call.mask.visible(call.full_tile())
    return visible.expand(*visible.shape[:2], step.queries, step.keys)


def join_biases(steps: Sequence[GenerationStep], k: Tensor) -> Bias | None:
    """One bias for all rows: a distance bias must be the same at every step; dense biases are concatenated."""
    biases = [step.call.bias for step in steps]
    first = biases[0]
    if any(isinstance(bias, DenseBias) for bias in biases):
        return join_dense_biases(steps, k)
    for bias in biases[1:]:
        if type(bias) is not type(first) or any(
            not torch.equal(a, b) for a, b in zip(find_tensors(bias), find_tensors(first), strict=True)
        ):
            raise CaptureError("the generation steps cannot be joined: their biases differ")
    return biases[-1]


def join_dense_biases(steps: Sequence[GenerationStep], k: Tensor) -> Bias:
    rows = []
    for step in steps:
        call = step.with_keys(k)
        term = None if call.bias is None else call.bias.term(call.full_tile())
        if term is None:
            term = torch.zeros(1, 1, 1, 1, dtype=call.q.dtype, device=k.device)
        rows.append(term.expand(*term.shape[:2], step.queries, step.keys))
    batch, heads = (max(row.shape[axis] for row in rows) for axis in (0, 1))
    keys = k.shape[2]
    return DenseBias(torch.cat([F.pad(r, (0, keys - r.shape[3])).expand(batch, heads, -1, -1) for r in rows], 2))


def take_heads(weights: Weights, heads: Sequence[int]) -> Weights:
    """The weights (B, H, Tq, Tk) of some heads."""
    call, lse = weights.call, weights.tensors.lse
    index = torch.tensor(list(heads), device=call.q.device)
    k = call.k[:, index // call.group]
    part = replace(
        call,
        q=call.q[:, index],
        k=k,
        v=k,
        score=call.score.select_heads(index),  # type: ignore[arg-type]
        sink=None if call.sink is None else call.sink[index],
        head_ids=call.head_index.flatten()[index],
    )
    return Weights(part, lse[:, index], weights.batch_shape, True)
