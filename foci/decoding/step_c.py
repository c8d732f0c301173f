"""The parts of a decoding step in C: matrix products, attention of one token per row, and the likeliest tokens.

R rows, N outputs, V vocabulary size, K tokens, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from foci.nn.attention import Attention
from foci.runtime import native

# Minimum products per thread, some tens of microseconds: threads wait for each other after every product, and for much
# longer than that on a machine that runs other work.
PRODUCTS_PER_THREAD = 2**18


class LinearStruct(ctypes.Structure):
    """LinearStruct in kernels/c/decoding.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("inputs", "weight", "bias", "added", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "outputs", "next")),
    )


class TokenAttentionStruct(ctypes.Structure):
    """TokenAttentionStruct in kernels/c/decoding.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "out", "key_rows", "first", "last")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "group", "width", "key_count")),
        *((name, ctypes.c_int64) for name in ("query_row", "key_slot", "key_row", "key_head", "key_row_step")),
        ("scale", ctypes.c_double),
        ("next", ctypes.c_int64),
    )


class RankStruct(ctypes.Structure):
    """RankStruct in kernels/c/decoding.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "values", "tokens", "sums")),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "count", "next")),
    )


class Linear:
    """A linear layer, or some of its outputs, on float32 rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Keep the memory that the struct points to: a parameter may get another while an answer is streamed.
        weight, bias = weight.detach().contiguous(), None if bias is None else bias.detach().contiguous()
        self.tensors = weight, bias
        self.outputs, width = weight.shape
        self.struct = LinearStruct(
            weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(), width=width, outputs=self.outputs
        )
        self.run = native.load_library("decoding").compute_linear
        self.products = self.outputs * width

    @classmethod
    def of(cls, layer: nn.Linear) -> Linear:
        """A whole layer."""
        return cls(layer.weight, layer.bias)

    def __call__(self, x: Tensor, added: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """(R, width) -> (R, N), plus `added` (R, N)."""
        struct, rows, x = self.struct, len(x), x.contiguous()
        added = None if added is None else added.contiguous()
        out = x.new_empty(rows, self.outputs) if out is None else out
        struct.inputs, struct.out = x.data_ptr(), out.data_ptr()
        struct.added = None if added is None else added.data_ptr()
        struct.rows, struct.next = rows, 0
        native.run_in_threads(self.run, struct, native.count_threads(rows * self.products, PRODUCTS_PER_THREAD))
        return out


class TokenAttention:
    """Attention of one query per row to keys that lie in slots, in any row of them."""

    def __init__(self, layer: Attention) -> None:
        self.struct = TokenAttentionStruct(
            heads=layer.heads,
            group=layer.heads // layer.kv_heads,
            width=layer.head_width,
            key_head=layer.head_width,
            scale=layer.head_width**-0.5,
        )
        self.run = native.load_library("decoding").attend_tokens
        self.out_width = layer.heads * layer.head_width

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        key_rows: Tensor,
        first: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """(R, H D) -> (R, H D).

        Args:
            keys, values: (slots, rows, G D), with the same strides.
            key_rows: (slots, R), or (R,) for all slots alike: which row of a slot belongs to each query.
            first, last: (R,), the first visible slot and the last + 1; None: all slots.
        """
        out = queries.new_empty(len(queries), self.out_width)
        struct = self.struct
        struct.queries, struct.keys, struct.values = queries.data_ptr(), keys.data_ptr(), values.data_ptr()
        struct.out, struct.key_rows = out.data_ptr(), key_rows.data_ptr()
        struct.first, struct.last = (None if bound is None else bound.data_ptr() for bound in (first, last))
        struct.rows, struct.key_count, struct.query_row = len(queries), len(keys), queries.stride(0)
        struct.key_slot, struct.key_row = keys.stride(0), keys.stride(1)
        struct.key_row_step = key_rows.stride(0) if key_rows.dim() == 2 else 0
        struct.next = 0
        products = 2 * len(queries) * len(keys) * self.out_width
        native.run_in_threads(self.run, struct, native.count_threads(products, PRODUCTS_PER_THREAD))
        return out


def rank_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row in descending order: log-probabilities and tokens, (R, K) each."""
    logits = logits.float().contiguous()
    if not is_rankable(logits, count):
        # The log-probabilities of all tokens are not needed. Of equal logits `max` takes the first.
        values, tokens = logits.max(-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1)
        return values - logits.logsumexp(-1, keepdim=True), tokens
    rows, vocabulary = logits.shape
    values, sums = logits.new_empty(rows, count), logits.new_empty(rows, 1)
    tokens = logits.new_empty(rows, count, dtype=torch.long)
    struct = RankStruct(
        *(tensor.data_ptr() for tensor in (logits, values, tokens, sums)),
        rows=rows,
        vocabulary=vocabulary,
        count=count,
    )
    threads = native.count_threads(rows * vocabulary, PRODUCTS_PER_THREAD)
    native.run_in_threads(native.load_library("decoding").rank_tokens, struct, threads)
    return values - values[:, :1] - sums.log_(), tokens


def is_rankable(logits: Tensor, count: int) -> bool:
    plain = type(logits) is Tensor and logits.device.type == "cpu"
    available = plain and native.why_unavailable("decoding") is None
    return available and count <= native.load_library("decoding").max_count()
