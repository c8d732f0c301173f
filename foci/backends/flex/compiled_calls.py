"""FlexAttention, compiled once per kind of call.

Calls are of one kind if they differ only in numbers and lengths. Each kind has its own function, because Dynamo counts
recompilations per function and, after the eighth, would run unfused code that builds the matrix, with a warning.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
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
from foci.masks.tile import Tile, index_by_batch
from foci.runtime import compile_switch
from foci.runtime.interception import hide_key
from foci.scores import Dot

# Compiled programs that are cached; the least recently used one is dropped first.
MAX_PROGRAMS = 64

USE_BLOCKED_HINT = "use backend='blocked' to run it without a compiler"


@dataclass(frozen=True, slots=True)
class FlexInputs:
    """Inputs of a program besides query, key and value. Numbers are tensors: new values do not recompile it."""

    mask: Mask | None
    bias: Bias | None
    blocks: BlockLists | None
    query_offset: Tensor  # position of the first query
    positions: tuple[Tensor, Tensor] | None
    batch_ids: Tensor | None
    head_ids: Tensor | None

    def tile(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tile:
        batch = batch if self.batch_ids is None else self.batch_ids[batch]
        head = head if self.head_ids is None else self.head_ids[head]
        if self.positions is None:
            return Tile(batch, head, query, key, query + self.query_offset, key)
        queries, keys = self.positions
        return Tile(batch, head, query, key, index_by_batch(queries, batch, query), index_by_batch(keys, batch, key))


def call_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, inputs: FlexInputs, score: Dot, kernel_options: dict[str, bool], needs_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(B, H, Tq, D), (B, G, Tk, D), (B, G, Tk, Dv) -> (B, H, Tq, Dv) and (B, H, Tq); the score has a scale.

    The mask and the bias are traced as they are. This runs only compiled: eager FlexAttention builds the matrix.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if not torch.compiler.is_compiling():
        raise RuntimeError("torch.compile is switched off, and without it FlexAttention would build the matrix")
    mask, bias, blocks = inputs.mask, inputs.bias, inputs.blocks
    # Read here: a function that captures the query does not compile for a second length.
    width = q.shape[-1]

    def score_mod(raw: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        logit = raw if score.softcap is None else score.finish(raw, width)
        term = None if bias is None else bias.term(inputs.tile(batch, head, query, key))
        return logit if term is None else logit + term

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert mask is not None
        return mask.visible(inputs.tile(batch, head, query, key))

    attention: Callable[..., Any] = flex_attention
    result = attention(
        q,
        k,
        v,
        score_mod=None if bias is None and score.softcap is None else score_mod,
        block_mask=None if blocks is None else to_torch_block_mask(blocks, (q.shape[2], k.shape[2]), mask_mod),
        # A softcap is applied after the scale, so `finish` does both.
        scale=score.scale if score.softcap is None else 1.0,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=kernel_options,
        return_aux=AuxRequest(lse=True) if needs_lse else None,
    )
    return (result[0], result[1].lse) if needs_lse else (result, None)


def to_torch_block_mask(blocks: BlockLists, lengths: tuple[int, int], mask_mod: Callable[..., Tensor]) -> Any:
    """The block lists as FlexAttention's BlockMask, which evaluates the mask only in partial blocks."""
    from torch.nn.attention.flex_attention import BlockMask

    columns = blocks.columns
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=blocks.partial.counts,
        kv_indices=blocks.partial.order,
        full_kv_num_blocks=blocks.full.counts,
        full_kv_indices=blocks.full.order,
        q_num_blocks=None if columns is None else columns.partial.counts,
        q_indices=None if columns is None else columns.partial.order,
        full_q_num_blocks=None if columns is None else columns.full.counts,
        full_q_indices=None if columns is None else columns.full.order,
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=mask_mod,
    )


def run_program(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Runs `call_flex_attention` as the compiled program for this kind of call."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    q, k, v, inputs = arguments[:4]
    mark_block_counts_dynamic(inputs.blocks)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(q.device.type)
    sizes = q.device, q.shape[1], q.shape[3], k.shape[1], v.shape[3], k is q, v is k, v is q
    try:
        with compile_switch.enable_compile(), hide_key():
            return get_program((program_key(arguments), modes, sizes))(*arguments)
    except FailOnRecompileLimitHit as error:
        reason = (
            "FlexAttention was recompiled for one kind of call as often as torch._dynamo.config.recompile_limit allows"
        )
        raise RuntimeError(f"{reason}; {USE_BLOCKED_HINT}") from error
    except TorchDynamoException as error:
        reason = " ".join(str(error).split("\n")[:2])
        raise RuntimeError(f"FlexAttention does not compile for this call ({reason}); {USE_BLOCKED_HINT}") from error


def mark_block_counts_dynamic(blocks: BlockLists | None) -> None:
    """Marks the block counts as dynamic: they change later than the lengths and would trigger another recompilation."""
    if blocks is not None:
        for counts, order in (blocks.partial, blocks.full):
            torch._dynamo.maybe_mark_dynamic(counts, 2)
            torch._dynamo.maybe_mark_dynamic(order, (2, 3))
        mark_block_counts_dynamic(blocks.columns)


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def get_program(kind: Hashable) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Compiles `call_flex_attention` for one kind of call; with `fullgraph`, graph breaks and the limit are errors."""
    name = f"flex_attention_{zlib.crc32(repr(kind).encode()):08x}"
    function = FunctionType(call_flex_attention.__code__.replace(co_name=name), call_flex_attention.__globals__, name)
    return torch.compile(function, fullgraph=True)


def program_key(part: Any) -> Hashable:
    """What a program is compiled for: types and tensor layouts, without lengths and contents."""
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
