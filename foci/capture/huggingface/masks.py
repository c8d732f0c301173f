"""Reads the masks of transformers as masks of foci; known masks never build an n x n tensor.

transformers describes a mask by a function of four indices (causal, a window, documents, combined with and / or) and a
2-D tensor that marks the real tokens. Both are read here; transformers builds the tensor of any unknown mask function.

B batch, Tq queries, Tk keys.
"""

from __future__ import annotations

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
from foci.runtime.interception import get_interceptors, hide_key
from foci.runtime.tracing import is_traced

MaskConjuncts = list[Mask]
IndexMaskFunction = Callable[..., Any]

# On a CPU, a dense mask of up to this many entries is cheaper than a foci mask, and runs the same kernel as SDPA.
MAX_SMALL_MASK_ENTRIES = 2**20

# The operators by which eager attention code puts a mask on its scores.
EAGER_MASK_OPERATORS = (torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.masked_fill)


@dataclass(frozen=True)
class MaskPositions:
    """The positions of a mask's queries and keys: query i at query_start + i, key j at key_start + j."""

    batch: int
    queries: int
    keys: int
    query_start: int
    key_start: int
    device: torch.device

    @property
    def is_aligned(self) -> bool:
        """Whether the last query is at the position of the last key, the default of foci."""
        return self.query_start - self.key_start == self.keys - self.queries

    def without_future_keys(self) -> MaskPositions:
        """Drops the keys after the last query: the empty slots of a static cache."""
        return replace(self, keys=min(self.keys, self.query_start + self.queries - self.key_start))

    def split_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of a (B, length) tensor for the queries and for the keys."""
        queries = ids[:, self.query_start : self.query_start + self.queries]
        return queries, ids[:, self.key_start : self.key_start + self.keys]


class DeferredMask(Tensor):
    """A tensor subclass that stands for a dense mask: transformers may store it, pass it on and read its shape.

    Any operation on it, such as a slice, builds the bool tensor (True = may attend). Code that adds it to scores, or
    fills scores where it is not 0, is eager attention code: it gets an additive or inverted mask, and a warning.
    """

    mask: Mask
    # The number of keys that the mask covers; later keys are masked.
    keys: int

    @staticmethod
    def __new__(cls, mask: Mask, positions: MaskPositions, all_keys: int) -> DeferredMask:
        shape = (positions.batch, 1, positions.queries, all_keys)
        deferred: DeferredMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=positions.device)
        deferred.mask, deferred.keys = mask, positions.keys
        return deferred

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        convert: Callable[[DeferredMask], Tensor] = build_deferred_mask
        if function.overloadpacket in EAGER_MASK_OPERATORS:
            warn_eager_attention()
            scores = args[1] if isinstance(args[0], cls) else args[0]
            is_fill = function.overloadpacket is torch.ops.aten.masked_fill
            convert = to_inverted_mask if is_fill else partial(to_additive_mask, like=scores)
        args, kwargs = tree_map_only(cls, convert, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredMask({self.mask!r}, {tuple(self.shape)})"


def build_deferred_mask(deferred: DeferredMask) -> Tensor:
    """The dense bool tensor that a deferred mask stands for."""
    (batch, _, queries, all_keys), keys, device = deferred.shape, deferred.keys, deferred.device
    mask = deferred.mask.fit(CallSizes((batch,), 1, queries, keys, device))
    query, key = torch.arange(queries, device=device).view(1, 1, -1, 1), torch.arange(keys, device=device)
    sequence = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    where = Tile(sequence, torch.zeros_like(sequence[:1]), query, key.view(1, 1, 1, -1), query + keys - queries, key)
    return F.pad(mask.visible(where).expand(batch, 1, queries, keys), (0, all_keys - keys))


def to_additive_mask(deferred: DeferredMask, like: Tensor) -> Tensor:
    """The mask that eager code adds to its scores: 0 where a query may attend, the lowest number elsewhere."""
    return torch.where(build_deferred_mask(deferred), 0.0, torch.finfo(like.dtype).min).to(like.dtype)


def to_inverted_mask(deferred: DeferredMask) -> Tensor:
    """The bool tensor of masked entries, which eager code fills."""
    return ~build_deferred_mask(deferred)


def is_watch_active() -> bool:
    """Whether a `foci.watch` block of this thread is open."""
    return bool(get_interceptors())


def warn_eager_attention() -> None:
    # The record of a watched model lists unseen modules already.
    if not is_watch_active():
        warnings.warn(
            "attn_implementation='foci' is not used by a module of this model, which applies the mask to its own"
            " scores: its output is correct, but not computed by foci",
            stacklevel=3,
        )


def build_attention_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: IndexMaskFunction | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """Builds the mask of a forward pass with the arguments of transformers; None if all keys are visible.

    >>> mask = foci.hf.build_attention_mask(2, q_length=3, kv_length=3, attention_mask=torch.ones(2, 3).bool())
    >>> mask.shape
    torch.Size([2, 1, 3, 3])

    The result is a `DeferredMask`, also for a causal mask: modules that ignore `attn_implementation` would not apply
    `is_causal`. Only for a watched model that used a fused implementation before, a causal mask is left to `is_causal`.
    While compiling, the result is the dense mask of eager code, which every module understands.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    arguments: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset, "device": device}
    if cache_position is not None:
        # The first versions of transformers 5 pass the position of each query.
        arguments = {"cache_position": cache_position}
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    arguments |= {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "mask_function": function}
    arguments |= {"attention_mask": attention_mask, "allow_is_causal_skip": False, **others}
    if torch.compiler.is_compiling() or is_traced(torch.as_tensor(q_offset)):
        return eager_mask(**arguments, allow_is_bidirectional_skip=allow_is_bidirectional_skip)  # type: ignore[no-any-return]
    # The end of a static cache is known only on its device: a single query uses a dense row, without synchronizing.
    is_end_unknown = isinstance(q_offset, Tensor) and q_length == 1 and not is_watch_active()
    start = kv_offset + kv_length - 1 if is_end_unknown else int(q_offset)
    positions = MaskPositions(batch_size, q_length, kv_length, start, kv_offset, torch.device(device))
    positions, conjuncts = (positions, None) if is_end_unknown else read_conjuncts(function, attention_mask, positions)
    if conjuncts == [] and allow_is_bidirectional_skip:
        return None
    is_plain_causal = conjuncts == [causal] and (start == 0 or q_length == 1)
    if allow_is_causal_skip and is_plain_causal and ran_fused_before_watch(others.get("config")):
        return None
    if conjuncts is None or (conjuncts != [causal] and is_small_mask(positions)):
        # Older versions of transformers build some masks with vmap and a higher-order operator.
        with hide_key():
            conjuncts = [DenseMask(sdpa_mask(**arguments)[..., : positions.keys])]
    return DeferredMask(reduce(and_, conjuncts or [window(None, None)]), positions, kv_length)


def ran_fused_before_watch(config: Any) -> bool:
    """Whether a watched model used a fused implementation before.

    Its modules then apply causality by themselves, as before: with a mask, the output of a module that is not causal
    would change.
    """
    return implementation_before_watch(config) not in {None, "eager", "foci"}


def is_small_mask(positions: MaskPositions) -> bool:
    entries = positions.batch * positions.queries * positions.keys
    return positions.device.type == "cpu" and entries <= MAX_SMALL_MASK_ENTRIES


def read_conjuncts(
    function: IndexMaskFunction, attention_mask: Tensor | None, positions: MaskPositions
) -> tuple[MaskPositions, MaskConjuncts | None]:
    """The conjuncts of a mask, and its positions without fully masked keys; None for an unknown mask."""
    conjuncts = read_mask_function(function, positions)
    if conjuncts is not None and causal in conjuncts:
        positions = positions.without_future_keys()
        conjuncts = read_mask_function(function, positions)
    if conjuncts is None or (conjuncts and not positions.is_aligned):
        return positions, None
    return positions, conjuncts + read_padding_mask(attention_mask, positions)


def read_mask_function(function: IndexMaskFunction, positions: MaskPositions) -> MaskConjuncts | None:
    """The masks that must all hold: [] if everything is visible, None if one of them is not known."""
    reader = (
        MASK_FUNCTION_READERS.get(function.__qualname__)
        if function.__module__ == "transformers.masking_utils"
        else None
    )
    if reader is None:
        return None
    cells = function.__closure__ or ()
    variables = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    return reader(positions, **variables)


def read_and(positions: MaskPositions, mask_functions: tuple[IndexMaskFunction, ...]) -> MaskConjuncts | None:
    parts = [read_mask_function(function, positions) for function in mask_functions]
    return None if None in parts else [mask for conjuncts in parts for mask in conjuncts or ()]


def read_or(positions: MaskPositions, mask_functions: tuple[IndexMaskFunction, ...]) -> MaskConjuncts | None:
    parts = [read_mask_function(function, positions) for function in mask_functions]
    if None in parts:
        return None
    # If one of the masks allows all keys, so does their union.
    return [reduce(or_, (reduce(and_, conjuncts) for conjuncts in parts if conjuncts))] if all(parts) else []


def read_causal(positions: MaskPositions) -> MaskConjuncts:
    return [causal]


def read_bidirectional(positions: MaskPositions) -> MaskConjuncts:
    return []


def read_sliding_window(positions: MaskPositions, sliding_window: int) -> MaskConjuncts:
    return [] if sliding_window >= positions.keys else [window(sliding_window - 1, None)]


def read_bidirectional_window(positions: MaskPositions, sliding_window: int) -> MaskConjuncts:
    return [] if sliding_window >= positions.keys else [window(sliding_window, sliding_window)]


def read_chunks(positions: MaskPositions, chunk_size: int, left_padding: Tensor | None = None) -> MaskConjuncts:
    """Chunks of a fixed size, counted from the first real token; before transformers 4.56 from the first position."""
    end = max(positions.query_start + positions.queries, positions.key_start + positions.keys)
    start = torch.zeros(1, dtype=torch.long, device=positions.device) if left_padding is None else left_padding
    chunks = (torch.arange(end, device=start.device) - start.view(-1, 1)) // chunk_size
    return [documents(*positions.split_ids(chunks))]


def read_packed_sequences(positions: MaskPositions, packed_sequence_mask: Tensor) -> MaskConjuncts:
    return [documents(*positions.split_ids(packed_sequence_mask))]


def read_blockwise_mask(positions: MaskPositions, block_sequence_ids: Tensor) -> MaskConjuncts:
    """Blocks of equal ids; tokens with the id -1 belong to no block and attend to no key."""
    queries, keys = positions.split_ids(block_sequence_ids)
    return [documents(queries, torch.where(keys < 0, -2, keys))]


def read_padding(positions: MaskPositions, padding_mask: Tensor) -> MaskConjuncts:
    return read_padding_mask(padding_mask, positions)


MASK_FUNCTION_READERS: dict[str, Callable[..., MaskConjuncts | None]] = {
    "causal_mask_function": read_causal,
    "bidirectional_mask_function": read_bidirectional,
    "and_masks.<locals>.and_mask": read_and,
    "or_masks.<locals>.or_mask": read_or,
    "sliding_window_overlay.<locals>.inner_mask": read_sliding_window,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": read_bidirectional_window,
    "chunked_overlay.<locals>.inner_mask": read_chunks,
    "packed_sequence_mask_function.<locals>.inner_mask": read_packed_sequences,
    "blockwise_overlay.<locals>.inner_mask": read_blockwise_mask,
    "padding_mask_function.<locals>.inner_mask": read_padding,
}


def read_padding_mask(attention_mask: Tensor | None, positions: MaskPositions) -> MaskConjuncts:
    """The keys that are real tokens: as lengths if they are contiguous, which reads the values once."""
    if attention_mask is None:
        return []
    _, is_real = positions.split_ids(attention_mask.bool())
    # Keys past the end of the tensor are padding: transformers fills it with zeros.
    if is_real.shape[1] < positions.keys:
        is_real = F.pad(is_real, (0, positions.keys - is_real.shape[1]))
    if bool(is_real.all()):
        # Nearly always, and at every step of a generation: the others take ten launches more.
        return []
    lengths = is_real.sum(-1)
    first_ones = torch.arange(positions.keys, device=is_real.device) < lengths.view(-1, 1)
    kinds = torch.stack([(is_real == first_ones).all(), (is_real == first_ones.flip(-1)).all()])
    right, left = kinds.tolist()
    if right or left:
        return [padding(lengths, "right" if right else "left")]
    return [DenseMask(is_real[:, None, None, :])]
