"""A bias by distance as a row table, which kernels look up at clip(distance) + clip, and what is left to torch.

Buckets share one row among all queries. Shaw's vectors give each query its own, q · keys[distance], and the row is
linear in q and keys, so its gradient is handed on by two matrix products. Rows exist for some heads at a time only.

B batch, H heads, Tq queries, W = 2 clip + 1 distances, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes of row tables at a time. Enough for a thousand programs at 128 queries and 257 distances.
MAX_ROW_TABLE_BYTES = 2**28

HeadSlices = tuple[slice, slice]

# What of a bias can be learned.
LEARNED_FIELDS = ("table", "keys", "values", "slopes")


class DistanceBiasOptions(NamedTuple):
    """Everything of a call beyond query, key and value; None is absent. Tables are float32."""

    table: Tensor | None  # Buckets: (buckets, H)
    buckets: Tensor | None  # the bucket of each distance: (W,)
    keys: Tensor | None  # Relative: (W, D) or (H, W, D)
    values: Tensor | None  # (W, Dv) or (H, W, Dv)
    slopes: Tensor | None  # ALiBi: (H,)
    spans: Tensor | None  # masks, as in kernel_masks
    query_ids: Tensor | None
    key_ids: Tensor | None
    dense: Tensor | None
    seed: Tensor | None
    causal: bool
    scale: float
    softcap: float  # 0.0 is none
    dropout: float

    @property
    def width(self) -> int:
        """The number of distances; 1 where there is no table."""
        if self.buckets is not None:
            return self.buckets.shape[0]
        return 1 if self.keys is None else self.keys.shape[-2]

    @property
    def kind(self) -> int:
        """As the kernels name it: no table, one inside the scale, one that is added at the end."""
        return 2 if self.table is not None else 0 if self.keys is None else 1

    def part(self, place: HeadSlices) -> DistanceBiasOptions:
        """The same for some sequences and heads; the bucket table stays whole, it is small."""
        batches, heads = place
        return self._replace(
            table=None if self.table is None else self.table[:, heads],
            keys=select_heads(self.keys, heads),
            values=select_heads(self.values, heads),
            slopes=None if self.slopes is None else self.slopes[heads],
            spans=select_batch(self.spans, batches),
            query_ids=select_batch(self.query_ids, batches),
            key_ids=select_batch(self.key_ids, batches),
            dense=None if self.dense is None else select_batch(self.dense, batches, heads),
        )


def learned_fields(terms: DistanceBiasOptions, wanted: bool) -> list[str]:
    """The learned tensors that this bias has; none where no gradient of them is wanted."""
    return [name for name in LEARNED_FIELDS if wanted and getattr(terms, name) is not None]


def select_heads(table: Tensor | None, heads: slice) -> Tensor | None:
    return table if table is None or table.dim() == 2 else table[heads]


def select_batch(x: Tensor | None, batches: slice, heads: slice = slice(None)) -> Tensor | None:
    """The rows of some sequences, of a tensor that may have one row for all."""
    if x is None:
        return None
    x = x if x.shape[0] == 1 else x[batches]
    return x if heads == slice(None) or x.shape[1] == 1 else x[:, heads]


def split_by_memory(q: Tensor, group: int, row_bytes: int) -> Iterator[HeadSlices]:
    """Parts of the call whose row tables fit the budget; heads that share keys stay together."""
    batch, heads, queries, _ = q.shape
    pairs = max(MAX_ROW_TABLE_BYTES // max(row_bytes * queries, 1), 1)
    if pairs >= heads:
        step = pairs // heads
        yield from ((slice(b, min(b + step, batch)), slice(0, heads)) for b in range(0, batch, step))
        return
    step = max(pairs // group, 1) * group
    for b in range(batch):
        yield from ((slice(b, b + 1), slice(h, min(h + step, heads))) for h in range(0, heads, step))


def compute_row_table(q: Tensor, terms: DistanceBiasOptions) -> Tensor | None:
    """The row table of vectors (B, H, Tq, W); None where the bias has none. Buckets' own is made by a kernel."""
    return None if terms.keys is None else q.float() @ terms.keys.mT


def add_matmul(into: Tensor, rows: Tensor, table: Tensor) -> None:
    """into += rows @ table, all float32; (B, H, Tq, D), (B, H, Tq, W) and (W, D) or (H, W, D)."""
    if table.dim() == 2:
        into.view(-1, into.shape[-1]).addmm_(rows.view(-1, rows.shape[-1]), table)
        return
    tables = table.expand(into.shape[0], *table.shape).flatten(0, 1)
    into.view(-1, *into.shape[2:]).baddbmm_(rows.view(-1, *rows.shape[2:]), tables)


def table_gradient(table: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """Σ rowsᵀ x, the gradient of a table (W, D) or (H, W, D), given (B, H, Tq, W) and (B, H, Tq, D)."""
    products = rows.mT @ x.float()
    return products.sum((0, 1)) if table.dim() == 2 else products.sum(0)


def weights_by_distance(band: Tensor, peaks: Tensor, extras: Tensor) -> Tensor:
    """Logits inside the clip, base 2, become weights; the sums at the two ends already are. In place."""
    finite = torch.where(peaks == -torch.inf, 0.0, peaks + extras).unsqueeze(-1)
    band[..., 1:-1].sub_(finite).exp2_()
    return band
