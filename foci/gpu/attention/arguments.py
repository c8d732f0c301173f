"""Arguments of the attention kernels: options of a call, parts of a call, tensor layout, scalars.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width, W = 2 clip + 1 distances.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from foci.gpu.arguments import (
    batch_stride,
    layout_key,
    mask_arguments,
    next_power_of_two,
    stride_arguments,
    view_as_bytes,
    with_contiguous_rows,
)

# Some sequences of a batch, and some heads.
HeadSlices = tuple[slice, slice]

# The number of fields of AttentionOptions that are tensors; they come first.
TENSORS = 13
# The fields of AttentionOptions that may have gradients.
LEARNED_FIELDS = ("table", "keys", "values", "slopes", "bias", "sink")


class AttentionOptions(NamedTuple):
    """Everything of a call besides q, k and v; None is absent. Tables are float32."""

    table: Tensor | None  # Buckets: (buckets, H)
    buckets: Tensor | None  # the bucket of each distance: (W,)
    keys: Tensor | None  # Relative: (W, D) or (H, W, D)
    values: Tensor | None  # (W, Dv) or (H, W, Dv)
    slopes: Tensor | None  # ALiBi: (H,)
    bias: Tensor | None  # of any float dtype: (B or 1, H or 1, Tq or 1, Tk or 1)
    sink: Tensor | None  # float32, (H,)
    lengths: Tensor | None  # this and the next four as in VisibleKeys, or in KernelMasks with a row table
    key_ranges: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    dense: Tensor | None
    seed: Tensor | None
    causal: bool  # only with a row table; else `right` is 0
    left: int  # this and the next four as in VisibleKeys
    right: int
    always: int
    stop: int
    padded: int
    scale: float
    softcap: float  # 0.0 is none
    dropout: float

    @property
    def distances(self) -> int:
        """The number W of distances; 1 without a table."""
        if self.buckets is not None:
            return self.buckets.shape[0]
        return 1 if self.keys is None else self.keys.shape[-2]

    @property
    def table_kind(self) -> int:
        """The kernels' TABLE: 0 without a table, 1 for one added before scaling, 2 for one added to the logits."""
        return 2 if self.table is not None else 0 if self.keys is None else 1

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields that are tensors."""
        return cast("tuple[Tensor | None, ...]", self[:TENSORS])

    def select(self, slices: HeadSlices) -> AttentionOptions:
        """The options of some sequences and heads."""
        batches, heads = slices
        return self._replace(
            table=None if self.table is None else self.table[:, heads],
            keys=select_heads(self.keys, heads),
            values=select_heads(self.values, heads),
            slopes=None if self.slopes is None else self.slopes[heads],
            bias=None if self.bias is None else select_batch(self.bias, batches, heads),
            sink=None if self.sink is None else self.sink[heads],
            lengths=select_batch(self.lengths, batches),
            key_ranges=select_batch(self.key_ranges, batches),
            query_ids=select_batch(self.query_ids, batches),
            key_ids=select_batch(self.key_ids, batches),
            dense=None if self.dense is None else select_batch(self.dense, batches, heads),
        )


def learned_fields(options: AttentionOptions, wanted: bool) -> list[str]:
    """The names of the learned tensors of this bias; empty if their gradients are not wanted."""
    return [name for name in LEARNED_FIELDS if wanted and getattr(options, name) is not None]


def select_heads(table: Tensor | None, heads: slice) -> Tensor | None:
    return table if table is None or table.dim() == 2 else table[heads]


def select_batch(x: Tensor | None, batches: slice, heads: slice = slice(None)) -> Tensor | None:
    """Slice batch and heads of a tensor whose batch and head sizes may be 1."""
    if x is None:
        return None
    x = x if x.shape[0] == 1 else x[batches]
    return x if heads == slice(None) or x.shape[1] == 1 else x[:, heads]


class CallPart(NamedTuple):
    """Some sequences and heads of a call, with their row table."""

    slices: HeadSlices | None  # None is the whole call
    q: Tensor
    k: Tensor
    v: Tensor
    peaks: Tensor
    log_sums: Tensor
    options: AttentionOptions
    row_table: Tensor | None  # of Relative keys, (B, H, Tq, W)

    @property
    def first(self) -> tuple[int, int]:
        """The index of the first sequence and of the first head."""
        return (0, 0) if self.slices is None else (self.slices[0].start, self.slices[1].start)

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def pairs(self) -> int:
        """The number of (sequence, head) pairs."""
        return self.q.shape[0] * self.q.shape[1]

    def select(self, x: Tensor) -> Tensor:
        """This part of a tensor that has the heads of the queries."""
        return x if self.slices is None else x[self.slices]

    def select_key_heads(self, x: Tensor) -> Tensor:
        """This part of a tensor that has the heads of the keys."""
        return x if self.slices is None else x[key_head_slices(self.slices, self.q.shape[1] // self.k.shape[1])]

    def new_band(self, fill: float) -> Tensor:
        """A new float32 tensor (B, H, Tq, W)."""
        sizes = (*self.q.shape[:3], self.options.distances)
        return torch.full(sizes, fill, dtype=torch.float32, device=self.q.device)


def key_head_slices(slices: HeadSlices, group: int) -> HeadSlices:
    """The key/value heads of some query heads."""
    batches, heads = slices
    return batches, slice(heads.start // group, heads.stop // group)


def plan_key(part: CallPart, *more: Hashable) -> Hashable:
    """The cache key of a launch plan: everything that it depends on."""
    _, q, k, v, peaks, _, options, _ = part
    return part.first, q.device, *map(layout_key, (q, k, v, peaks, *options.tensors())), options[TENSORS:], more


def to_kernel_layout(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    """Make features, ids, slopes and sinks contiguous, and view the dense mask as bytes."""
    changed: dict[str, Any] = {}
    for name in ("lengths", "key_ranges", "query_ids", "key_ids", "slopes", "sink"):
        x = getattr(options, name)
        if x is not None and not x.is_contiguous():
            changed[name] = x.contiguous()
    if options.dense is not None:
        changed["dense"] = view_as_bytes(options.dense, q, k)
    if changed:
        options = options._replace(**changed)
    return with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v), options


def empty_with_layout_of(x: Tensor) -> Tensor:
    """An uninitialized tensor with the memory layout of x; its rows are contiguous even if those of x overlap."""
    return with_contiguous_rows(torch.empty_like(x))


def tensor_arguments(part: CallPart) -> dict[str, Tensor]:
    """The tensors that every kernel reads. An absent one points at `peaks` and is never read."""
    _, q, k, v, peaks, log_sums, options, row_table = part
    by_bucket, buckets, _, _, slopes, bias, sink, lengths, key_ranges, query_ids, key_ids, dense, seed = (
        peaks if x is None else x for x in options.tensors()
    )
    return {
        "q": q, "k": k, "v": v, "peaks": peaks, "log_sums": log_sums, "slopes": slopes, "bias": bias, "sinks": sink,
        "table": peaks if row_table is None else row_table, "by_bucket": by_bucket, "buckets": buckets,
        "lengths": lengths, "document_ranges": peaks, "key_ranges": key_ranges, "query_ids": query_ids,
        "key_ids": key_ids, "dense": dense, "seed": seed,
    }  # fmt: skip


def attention_scalars(part: CallPart) -> dict[str, Any]:
    """Sizes, strides and flags that the forward and both backward kernels take."""
    q, k, v, peaks, options = part.q, part.k, part.v, part.peaks, part.options
    widths = next_power_of_two(q.shape[-1]), next_power_of_two(v.shape[-1])
    return dict(
        **stride_arguments("q", q), **stride_arguments("k", k), **stride_arguments("v", v),
        peaks_batch=peaks.stride(0), peaks_head=peaks.stride(1),
        left=options.left, right=options.right, always=options.always, stop=options.stop, PADDED=options.padded,
        **mask_arguments(options.key_ranges, options.query_ids, options.key_ids, options.dense),
        lengths_batch=batch_stride(options.lengths), CAUSAL=options.causal,
        document_ranges_batch=3 * q.shape[2] * (count_document_rows(options) > 1), **bias_strides(options.bias),
        H=q.shape[1], group=q.shape[1] // k.shape[1], Tq=q.shape[2], Tk=k.shape[2], D=q.shape[3], Dv=v.shape[3],
        clip=options.distances // 2, first_b=part.first[0], first_h=part.first[1],
        scale=options.scale, softcap=options.softcap,
        threshold=int(options.dropout * 2**32), keep_scale=1.0 / (1.0 - options.dropout),
        SOFTCAP=options.softcap > 0, ALIBI=options.slopes is not None, SINK=options.sink is not None,
        TABLE=options.table_kind, POSITIVE=options.scale > 0,
        DROPOUT=options.dropout > 0, EVEN=widths == (q.shape[3], v.shape[3]), BD=widths[0], BV=widths[1],
        PRECISION=dot_precision(q), EXACT=q.dtype == torch.float32, DIRECT=q.is_cuda and torch.version.hip is None,
    )  # fmt: skip


def count_document_rows(options: AttentionOptions) -> int:
    """The number of sequences with document ids of their own; 0 without documents."""
    if options.query_ids is None or options.key_ids is None:
        return 0
    return max(options.query_ids.shape[0], options.key_ids.shape[0])


def bias_strides(bias: Tensor | None) -> dict[str, int]:
    """The strides of a dense bias, and the kernels' BIAS: 0 without one, 1 for aligned rows, 2 for other strides."""
    if bias is None:
        return {"bias_batch": 0, "bias_head": 0, "bias_query": 0, "bias_key": 0, "BIAS": 0}
    batch, head, query, key = (0 if n == 1 else step for n, step in zip(bias.shape, bias.stride(), strict=True))
    aligned = key == 1 and bias.shape[3] % 8 == batch % 8 == head % 8 == query % 8 == 0
    # The kernels multiply strides of aligned rows by 8, so that the compiler sees the alignment.
    batch, head, query = (step // 8 if aligned else step for step in (batch, head, query))
    return {"bias_batch": batch, "bias_head": head, "bias_query": query, "bias_key": key, "BIAS": 1 if aligned else 2}


def dot_precision(q: Tensor) -> str:
    """Full precision for products of float32: table gradients have many terms, so rounding errors would add up."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
