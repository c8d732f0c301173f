"""The masks of transformers, read as masks of foci: nothing of size n x n is built where the rule is a known one.

transformers describes a mask by a function of four indices (causal, a window, documents, joined by and and or) and a
2-D tensor that says which tokens are real. Both are read here; a rule that is not known is built by transformers.

B batch, Tq queries, Tk keys.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import and_, or_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from foci.capture.huggingface.switch import implementation_before_watch
from foci.masks.base import DenseMask, Mask
from foci.masks.kinds import causal, documents, padding, window
from foci.masks.tile import CallSizes, Tile
from foci.runtime.checks import is_traced

MaskConjuncts = list[Mask]
MaskFunction = Callable[..., Any]

# On a CPU a dense mask of this many entries is cheaper than a rule, and its kernel is the one that SDPA takes.
MAX_SMALL_MASK_ENTRIES = 2**20

# What code does to its scores that computes its attention itself.
EAGER_MASK_OPERATORS = (torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.masked_fill)


@dataclass(frozen=True)
class MaskPositions:
    """Where the queries and keys of a mask stand: query i at query_start + i, key j at key_start + j."""

    batch: int
    queries: int
    keys: int
    query_start: int
    key_start: int
    device: torch.device

    @property
    def aligned(self) -> bool:
        """Whether the last query stands at the last key, which foci takes for granted."""
        return self.query_start - self.key_start == self.keys - self.queries

    def up_to_the_last_query(self) -> MaskPositions:
        """Without the keys that stand behind every query: the part of a cache of fixed size that is still empty."""
        return replace(self, keys=min(self.keys, self.query_start + self.queries - self.key_start))

    def ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What a (B, length) tensor holds for the queries and for the keys."""
        queries = ids[:, self.query_start : self.query_start + self.queries]
        return queries, ids[:, self.key_start : self.key_start + self.keys]


class DeferredMask(Tensor):
    """A mask that stands for a dense tensor: transformers may hold it, pass it on and ask for its shape.

    An operation on it builds the bool tensor (True = may look), so whoever slices it gets what they expect. Code that
    adds it to scores, or fills scores where it is not 0, takes it for the mask of eager code: it gets that, and a
    warning says so.
    """

    mask: Mask
    # The number of keys that anybody may look at; those behind them are masked.
    keys: int

    @staticmethod
    def __new__(cls, mask: Mask, place: MaskPositions, all_keys: int) -> DeferredMask:
        shape = (place.batch, 1, place.queries, all_keys)
        made: DeferredMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=place.device)
        made.mask, made.keys = mask, place.keys
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        form: Callable[[DeferredMask], Tensor] = build_deferred_mask
        if function.overloadpacket in EAGER_MASK_OPERATORS:
            warn_eager_attention()
            filled = function.overloadpacket is torch.ops.aten.masked_fill
            form = (
                to_inverted_mask
                if filled
                else partial(to_additive_mask, like=args[1] if isinstance(args[0], cls) else args[0])
            )
        args, kwargs = tree_map_only(cls, form, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred({self.mask!r}, {tuple(self.shape)})"


def build_deferred_mask(deferred: DeferredMask) -> Tensor:
    """The dense bool tensor that a deferred mask stands for."""
    (batch, _, queries, all_keys), keys, device = deferred.shape, deferred.keys, deferred.device
    mask = deferred.mask.fit(CallSizes((batch,), 1, queries, keys, device))
    query, key = torch.arange(queries, device=device).view(1, 1, -1, 1), torch.arange(keys, device=device)
    sequence = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    where = Tile(sequence, torch.zeros_like(sequence[:1]), query, key.view(1, 1, 1, -1), query + keys - queries, key)
    return F.pad(mask.visible(where).expand(batch, 1, queries, keys), (0, all_keys - keys))


def to_additive_mask(deferred: DeferredMask, like: Tensor) -> Tensor:
    """What eager code adds to its scores: 0 where a query may look, the lowest number where not."""
    return torch.where(build_deferred_mask(deferred), 0.0, torch.finfo(like.dtype).min).to(like.dtype)


def to_inverted_mask(deferred: DeferredMask) -> Tensor:
    """Where eager masks are not 0."""
    return ~build_deferred_mask(deferred)


def is_watched() -> bool:
    """Whether a `foci.watch` block of this thread is open; its module is there once one was."""
    recorder = sys.modules.get("foci.capture.recorder")
    return recorder is not None and bool(recorder.active())


def warn_eager_attention() -> None:
    # A watched model says which modules it could not see.
    if not is_watched():
        warnings.warn(
            "attn_implementation='foci' is not used by a module of this model: it puts the mask on scores of its own,"
            " so its output is right, but foci does not compute it",
            stacklevel=3,
        )


def build_attention_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """The mask of a forward, as transformers asks for it: a `Deferred`, or None where everything is visible.

    A causal mask is never left to `is_causal`: modules that take no notice of `attn_implementation` would lose it.
    While compiling it is the dense mask of eager code, which every module understands.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    asked: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset, "device": device}
    if cache_position is not None:
        # The first versions say where each query stands.
        asked = {"cache_position": cache_position}
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    asked |= {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "mask_function": function}
    asked |= {"attention_mask": attention_mask, "allow_is_causal_skip": False, **others}
    if torch.compiler.is_compiling() or is_traced(torch.as_tensor(q_offset)):
        return eager_mask(**asked, allow_is_bidirectional_skip=allow_is_bidirectional_skip)  # type: ignore[no-any-return]
    # Where a cache of fixed size ends is on its device: one query has a row of entries, and nothing waits for it.
    unknown = isinstance(q_offset, Tensor) and q_length == 1 and not is_watched()
    start = kv_offset + kv_length - 1 if unknown else int(q_offset)
    place = MaskPositions(batch_size, q_length, kv_length, start, kv_offset, torch.device(device))
    place, rules = (place, None) if unknown else read_conjuncts(function, attention_mask, place)
    if rules == [] and allow_is_bidirectional_skip:
        return None
    if (
        allow_is_causal_skip
        and rules == [causal]
        and (start == 0 or q_length == 1)
        and ran_fused_before_watch(others.get("config"))
    ):
        return None
    if rules is None or (rules != [causal] and is_small_mask(place)):
        rules = [DenseMask(sdpa_mask(**asked)[..., : place.keys])]
    return DeferredMask(reduce(and_, rules or [window(None, None)]), place, kv_length)


def ran_fused_before_watch(config: Any) -> bool:
    """Whether a model that is watched ran on SDPA before: it goes on leaving causality to its modules, or its output
    would change where they have another opinion.
    """
    return implementation_before_watch(config) not in {None, "eager", "foci"}


def is_small_mask(place: MaskPositions) -> bool:
    return place.device.type == "cpu" and place.batch * place.queries * place.keys <= MAX_SMALL_MASK_ENTRIES


def read_conjuncts(
    function: MaskFunction, attention_mask: Tensor | None, place: MaskPositions
) -> tuple[MaskPositions, MaskConjuncts | None]:
    """The rules of a mask, and its place without the keys that nobody sees; no rules where one is not known."""
    rules = read_mask_function(function, place)
    if rules is not None and causal in rules:
        place = place.up_to_the_last_query()
        rules = read_mask_function(function, place)
    if rules is None or (rules and not place.aligned):
        return place, None
    return place, rules + read_padding_mask(attention_mask, place)


def read_mask_function(function: MaskFunction, place: MaskPositions) -> MaskConjuncts | None:
    """The rules that must all hold, none where everything is visible; None where one of them is not known."""
    known = (
        MASK_FUNCTION_READERS.get(function.__qualname__)
        if function.__module__ == "transformers.masking_utils"
        else None
    )
    if known is None:
        return None
    cells = function.__closure__ or ()
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    return known(place, **held)


def read_and(place: MaskPositions, mask_functions: tuple[MaskFunction, ...]) -> MaskConjuncts | None:
    found = [read_mask_function(function, place) for function in mask_functions]
    return None if None in found else [rule for rules in found for rule in rules or ()]


def read_or(place: MaskPositions, mask_functions: tuple[MaskFunction, ...]) -> MaskConjuncts | None:
    found = [read_mask_function(function, place) for function in mask_functions]
    if None in found:
        return None
    # One that lets everything through makes the others idle.
    return [reduce(or_, (reduce(and_, rules) for rules in found if rules))] if all(found) else []


def read_causal(place: MaskPositions) -> MaskConjuncts:
    return [causal]


def read_bidirectional(place: MaskPositions) -> MaskConjuncts:
    return []


def read_sliding_window(place: MaskPositions, sliding_window: int) -> MaskConjuncts:
    return [] if sliding_window >= place.keys else [window(sliding_window - 1, None)]


def read_bidirectional_window(place: MaskPositions, sliding_window: int) -> MaskConjuncts:
    return [] if sliding_window >= place.keys else [window(sliding_window, sliding_window)]


def read_chunks(place: MaskPositions, chunk_size: int, left_padding: Tensor) -> MaskConjuncts:
    """Chunks are counted from the first real token."""
    end = max(place.query_start + place.queries, place.key_start + place.keys)
    chunks = (torch.arange(end, device=left_padding.device) - left_padding.view(-1, 1)) // chunk_size
    return [documents(*place.ids(chunks))]


def read_packed_sequences(place: MaskPositions, packed_sequence_mask: Tensor) -> MaskConjuncts:
    return [documents(*place.ids(packed_sequence_mask))]


def read_blocks(place: MaskPositions, block_sequence_ids: Tensor) -> MaskConjuncts:
    """Tokens with the number -1 belong to no block, so they meet no key."""
    queries, keys = place.ids(block_sequence_ids)
    return [documents(queries, torch.where(keys < 0, -2, keys))]


def read_padding(place: MaskPositions, padding_mask: Tensor) -> MaskConjuncts:
    return read_padding_mask(padding_mask, place)


MASK_FUNCTION_READERS: dict[str, Callable[..., MaskConjuncts | None]] = {
    "causal_mask_function": read_causal,
    "bidirectional_mask_function": read_bidirectional,
    "and_masks.<locals>.and_mask": read_and,
    "or_masks.<locals>.or_mask": read_or,
    "sliding_window_overlay.<locals>.inner_mask": read_sliding_window,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": read_bidirectional_window,
    "chunked_overlay.<locals>.inner_mask": read_chunks,
    "packed_sequence_mask_function.<locals>.inner_mask": read_packed_sequences,
    "blockwise_overlay.<locals>.inner_mask": read_blocks,
    "padding_mask_function.<locals>.inner_mask": read_padding,
}


def read_padding_mask(attention_mask: Tensor | None, place: MaskPositions) -> MaskConjuncts:
    """Which keys are real tokens: as lengths where they are contiguous, which costs one look at the values."""
    if attention_mask is None:
        return []
    _, there = place.ids(attention_mask.bool())
    # Keys past the end of the tensor are not real: transformers pads it with zeros.
    there = F.pad(there, (0, place.keys - there.shape[1]))
    lengths = there.sum(-1)
    first_ones = torch.arange(place.keys, device=there.device) < lengths.view(-1, 1)
    kinds = torch.stack([there.all(), (there == first_ones).all(), (there == first_ones.flip(-1)).all()])
    everything, right, left = kinds.tolist()
    if everything:
        return []
    if right or left:
        return [padding(lengths, "right" if right else "left")]
    return [DenseMask(there[:, None, None, :])]
