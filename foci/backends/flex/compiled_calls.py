"""FlexAttention, compiled: a program for each kind of call.

A kind is what a call is made of, without its numbers and lengths. Each kind has a function of its own, because Dynamo
counts recompilations per function and, past the eighth, would run unfused code that builds the matrix, with a warning.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from foci.backends.flex.block_masks import BLOCK_SIZE, BlockLists
from foci.biases import Bias
from foci.masks.base import Mask
from foci.masks.tile import Tile
from foci.runtime import compile_switch
from foci.runtime.checks import index_by_batch
from foci.scores import Dot

# Programs that are kept; the one that was used least recently goes first.
MAX_PROGRAMS = 64

USE_BLOCKED_HINT = "name backend='blocked' to run it without a compiler"


@dataclass(frozen=True, slots=True)
class FlexInputs:
    """What a program is given besides queries, keys and values. Numbers are tensors, so another number is no news."""

    mask: Mask | None
    bias: Bias | None
    blocks: BlockLists | None
    shift: Tensor  # where the first query stands
    positions: tuple[Tensor, Tensor] | None
    batch_ids: Tensor | None
    head_ids: Tensor | None

    def where(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tile:
        batch = batch if self.batch_ids is None else self.batch_ids[batch]
        head = head if self.head_ids is None else self.head_ids[head]
        if self.positions is None:
            return Tile(batch, head, query, key, query + self.shift, key)
        queries, keys = self.positions
        return Tile(batch, head, query, key, index_by_batch(queries, batch, query), index_by_batch(keys, batch, key))


def call_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, parts: FlexInputs, score: Dot, kernel_options: dict[str, bool], needs_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(B, H, Tq, D), (B, G, Tk, D), (B, G, Tk, Dv) -> (B, H, Tq, Dv) and (B, H, Tq); the score names its scale.

    The mask and the bias are traced as they are. This runs compiled only: on its own it would build the matrix.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if not torch.compiler.is_compiling():
        raise RuntimeError("torch.compile is switched off, and without it FlexAttention would build the matrix")
    mask, bias, blocks = parts.mask, parts.bias, parts.blocks

    def finished(raw: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        logit = raw if score.softcap is None else score.finish(raw, q.shape[-1])
        term = None if bias is None else bias.term(parts.where(batch, head, query, key))
        return logit if term is None else logit + term

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert mask is not None
        return mask.visible(parts.where(batch, head, query, key))

    attention: Callable[..., Any] = flex_attention
    found = attention(
        q,
        k,
        v,
        score_mod=None if bias is None and score.softcap is None else finished,
        block_mask=None if blocks is None else to_torch_block_mask(blocks, (q.shape[2], k.shape[2]), visible),
        # A softcap comes after the scale: there `finish` does both.
        scale=score.scale if score.softcap is None else 1.0,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=kernel_options,
        return_aux=AuxRequest(lse=True) if needs_lse else None,
    )
    return (found[0], found[1].lse) if needs_lse else (found, None)


def to_torch_block_mask(blocks: BlockLists, lengths: tuple[int, int], visible: Callable[..., Tensor]) -> Any:
    """The blocks in FlexAttention's words, where the mask is asked only in those that it cuts."""
    from torch.nn.attention.flex_attention import BlockMask

    columns = blocks.columns
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=blocks.cut.counts,
        kv_indices=blocks.cut.order,
        full_kv_num_blocks=blocks.full.counts,
        full_kv_indices=blocks.full.order,
        q_num_blocks=None if columns is None else columns.cut.counts,
        q_indices=None if columns is None else columns.cut.order,
        full_q_num_blocks=None if columns is None else columns.full.counts,
        full_q_indices=None if columns is None else columns.full.order,
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=visible,
    )


def run_program(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """`attend`, as a program for this kind of call."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    q, k, v, parts = arguments[:4]
    mark_block_counts_dynamic(parts.blocks)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(q.device.type)
    sizes = q.device, q.shape[1], q.shape[3], k.shape[1], v.shape[3], k is q, v is k, v is q
    try:
        with compile_switch.enable_compile():
            return get_program((program_key(arguments), modes, sizes))(*arguments)
    except FailOnRecompileLimitHit as error:
        reason = "one kind of call was compiled as often as torch._dynamo.config.recompile_limit allows"
        raise RuntimeError(f"{reason}; {USE_BLOCKED_HINT}") from error
    except TorchDynamoException as error:
        reason = " ".join(str(error).split("\n")[:2])
        raise RuntimeError(f"FlexAttention does not compile for this call ({reason}); {USE_BLOCKED_HINT}") from error


def mark_block_counts_dynamic(blocks: BlockLists | None) -> None:
    """Says that the number of blocks varies: it changes later than the lengths do, and would be compiled for again."""
    if blocks is not None:
        for counts, order in (blocks.cut, blocks.full):
            torch._dynamo.maybe_mark_dynamic(counts, 2)
            torch._dynamo.maybe_mark_dynamic(order, (2, 3))
        mark_block_counts_dynamic(blocks.columns)


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def get_program(kind: Hashable) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """One kind's own compiled `attend`; `fullgraph` makes a limit or a break an error instead of slow code."""
    name = f"attend_{zlib.crc32(repr(kind).encode()):08x}"
    own = FunctionType(call_flex_attention.__code__.replace(co_name=name), call_flex_attention.__globals__, name)
    return torch.compile(own, fullgraph=True)


def program_key(part: Any) -> Hashable:
    """What a program is compiled for: types, and how tensors are laid out, without their lengths and contents."""
    if isinstance(part, Tensor):
        ones = tuple(size == 1 for size in part.shape)
        order = tuple(sorted(range(part.dim()), key=part.stride().__getitem__))
        return part.dtype, part.requires_grad, part.is_inference(), ones, order, 0 in part.stride()
    if is_dataclass(part):
        return type(part), *(program_key(getattr(part, field.name)) for field in fields(part))
    if isinstance(part, dict):
        return tuple(part.items())
    if isinstance(part, tuple):
        return tuple(map(program_key, part))
    if isinstance(part, bool | int | float | str | None):
        return part
    kind: Hashable = getattr(part, "__code__", None) or part.__class__
    return kind
