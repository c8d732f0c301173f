"""Fast additive scores wᵀ tanh(q + k) of a strip on a CPU, from one exponential per query and one per key.

tanh(a + b) = 1 - 2 / (1 + e^2a e^2b), so a term costs a product, a sum and a quotient. Compiled C computes it where a C
compiler is available (kernels/c/additive.c), small blocks in torch where not. Where e^2a is not a float of full
precision, tanh is computed as written.

B batch, H heads, G key/value heads, R queries, C keys, D width, r and c queries and keys of a block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.arguments import Call
from foci.runtime import native
from foci.runtime.checks import PLAIN_TENSOR_TYPES
from foci.runtime.double_backward import make_distinct_views
from foci.runtime.tracing import is_traced
from foci.scores import Additive

# Up to this |a|, e^2a and e^-2a are float32 numbers of full precision.
MAX_EXPONENTIAL_INPUT = 43.0

# Terms and rows of a block in torch, chosen to stay in a core's cache.
TERMS_PER_BLOCK = 2**19
ROWS_PER_BLOCK = 32

# Computing exponentials of the keys is worth it from this number of queries on.
MIN_QUERIES_FOR_EXPONENTIALS = 4

# Fewer terms than this are not worth another thread.
TERMS_PER_THREAD = 2**18

STRUCT_POINTERS = (
    *("queries", "keys", "weight", "panels", "near", "scores", "slopes"),
    *("d_queries", "d_keys", "d_weight"),
)
STRUCT_SIZES = ("pairs", "heads", "group", "query_count", "key_count", "panel_count", "width", "parts", "exponentials")


@dataclass(frozen=True, slots=True)
class FastAdditive(Additive):
    """An additive score that is computed by this module."""

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        if 0 in q.shape or 0 in k.shape:
            return Additive(self.weight).raw(q, k)
        weight = self.weight.to(q.dtype).expand(q.shape[1], q.shape[3])
        return AdditiveScores.apply(q, k, weight)  # type: ignore[no-any-return, no-untyped-call]


def with_fast_additive(call: Call) -> Call:
    """The call with its additive score computed by this module, where that is supported.

    torch.compile and torch.func trace through operations and get those of the formula instead.
    """
    if type(call.score) is not Additive or call.softmax_dtype != torch.float32 or call.q.device.type != "cpu":
        return call
    has_subclass = any(type(tensor) not in PLAIN_TENSOR_TYPES for tensor in (call.q, call.k, call.score.weight))
    if has_subclass or is_traced(call.q) or call.is_transformed:
        return call
    return replace(call, score=FastAdditive(call.score.weight))


class AdditiveScores(torch.autograd.Function):
    """Saves only the inputs; a double backward differentiates the formula."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, weight)
        if missing_c_library() is None:
            return compute_scores_in_c(q, k, weight)
        return compute_scores_in_blocks(q, k, weight)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            q, k, weight = make_distinct_views(q, k, weight)
            with torch.enable_grad():
                leaves = [tensor for tensor in (q, k, weight) if tensor.requires_grad]
                grads = iter(torch.autograd.grad(Additive(weight).raw(q, k), leaves, slopes, create_graph=True))
            return tuple(next(grads) if tensor.requires_grad else None for tensor in (q, k, weight))
        if missing_c_library() is None:
            return compute_gradients_in_c(q, k, weight, slopes, has_exact_exponentials(q, k))
        return compute_gradients_in_blocks(q, k, weight, slopes)


def has_exact_exponentials(q: Tensor, k: Tensor) -> bool:
    """Whether all exponentials are floats of full precision; False for NaN."""
    return all(float(edge.abs()) <= MAX_EXPONENTIAL_INPUT for x in (q.detach(), k.detach()) for edge in x.aminmax())


def compute_scores_in_blocks(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """(B, H, R, D), (B, G, C, D) and (H, D) -> (B, H, R, C)."""
    scores = q.new_empty(*q.shape[:3], k.shape[2])
    near, left, right = prepare_terms(q, k)
    buffer = allocate_block_buffer(q, k)
    for place, columns in iterate_blocks(q, k):
        b, h, rows = place
        x = sigmoid_terms(left[place], right[b, h * k.shape[1] // q.shape[1], columns], near, buffer)
        scores[b, h, rows, columns] = (x.flatten(0, 1) @ weight[h]).view(x.shape[:2])
    return torch.add(weight.sum(-1).view(-1, 1, 1), scores, alpha=-2.0)


def prepare_terms(q: Tensor, k: Tensor) -> tuple[bool, Tensor, Tensor]:
    """Whether `sigmoid_terms` uses exponentials, and its left and right factors or terms."""
    if q.shape[2] >= MIN_QUERIES_FOR_EXPONENTIALS and has_exact_exponentials(q, k):
        return True, (2.0 * q).exp_(), (2.0 * k).exp_()
    return False, -2.0 * q, k


def sigmoid_terms(left: Tensor, right: Tensor, near: bool, buffer: Tensor) -> Tensor:
    """s = 1 / (1 + e^2(q + k)) = (1 - tanh(q + k)) / 2: (r, D) and (c, D) -> (r, c, D), in the given buffer."""
    x = buffer[: left.shape[0] * right.numel()].view(left.shape[0], *right.shape)
    left = left.unsqueeze(1)
    if near:
        return torch.addcmul(left.new_ones(()), left, right, out=x).reciprocal_()
    # A sigmoid takes a sixth of the time of a tanh.
    return torch.add(left, right, alpha=-2.0, out=x).sigmoid_()


def compute_gradients_in_blocks(q: Tensor, k: Tensor, weight: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With s from `sigmoid_terms`: sums of slope 4 w (s - s²) for queries and keys, slope (1 - 2 s) for the weight."""
    near, left, right = prepare_terms(q, k)
    buffer = allocate_block_buffer(q, k)
    d_q, d_k, d_weight = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(weight)
    factors = 4.0 * weight
    for place, columns in iterate_blocks(q, k):
        b, h, rows = place
        key_place = b, h * k.shape[1] // q.shape[1], columns
        x = sigmoid_terms(left[place], right[key_place], near, buffer)
        slope = slopes[b, h, rows, columns]
        d_weight[h] += slope.flatten() @ x.flatten(0, 1)
        x.addcmul_(x, x, value=-1.0).mul_(slope.unsqueeze(-1))
        d_q[place].addcmul_(x.sum(1), factors[h])
        d_k[key_place].addcmul_(x[0] if x.shape[0] == 1 else x.sum(0), factors[h])
    return d_q, d_k, slopes.sum((0, 2, 3)).unsqueeze(-1) - 2.0 * d_weight


def block_shape(q: Tensor, k: Tensor) -> tuple[int, int]:
    rows = min(ROWS_PER_BLOCK, q.shape[2])
    return rows, min(max(TERMS_PER_BLOCK // (rows * q.shape[3]), 1), k.shape[2])


def allocate_block_buffer(q: Tensor, k: Tensor) -> Tensor:
    """Memory for the terms of one block, reused: allocating it per block costs more than the computation."""
    rows, columns = block_shape(q, k)
    return q.new_empty(rows * columns * q.shape[3])


def iterate_blocks(q: Tensor, k: Tensor) -> Iterator[tuple[tuple[int, int, slice], slice]]:
    """Yields (sequence, head, rows) and columns of blocks that are small enough to stay in cache."""
    batch, heads, queries, _ = q.shape
    rows, step = block_shape(q, k)
    for b in range(batch):
        for h in range(heads):
            for row in range(0, queries, rows):
                for column in range(0, k.shape[2], step):
                    yield (b, h, slice(row, row + rows)), slice(column, column + step)


class AdditiveStruct(ctypes.Structure):
    """The argument of the functions in kernels/c/additive.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in STRUCT_POINTERS),
        *((name, ctypes.c_int64) for name in (*STRUCT_SIZES, "next", "failed")),
    )


def missing_c_library() -> str | None:
    """Why the compiled library is not available; None where it is."""
    return native.why_unavailable("additive")


def compute_scores_in_c(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """(B, H, R, D), (B, G, C, D) and (H, D), float32 -> (B, H, R, C)."""
    library = native.load_library("additive")
    lanes = library.lanes()
    panels = -(-k.shape[2] // lanes)
    tensors = {"queries": q.contiguous(), "keys": k.contiguous(), "weight": weight.contiguous()}
    tensors["scores"] = q.new_empty(*q.shape[:3], k.shape[2])
    if q.shape[2] >= MIN_QUERIES_FOR_EXPONENTIALS:
        tensors["panels"] = k.new_empty(*k.shape[:2], panels, k.shape[3], lanes)
        tensors["near"] = k.new_empty(*k.shape[:2], panels, dtype=torch.int64)
    struct = fill_struct(tensors, panel_count=panels)
    if "panels" in tensors:
        run_c_function(library.pack_keys, struct)
    run_c_function(library.compute_scores, struct)
    return tensors["scores"]


def compute_gradients_in_c(q: Tensor, k: Tensor, weight: Tensor, slopes: Tensor, near: bool) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and weight from that of the scores (B, H, R, C); `near`: use exponentials."""
    library = native.load_library("additive")
    beyond = -q.shape[3] % library.lanes()
    exponentials = near and q.shape[2] >= MIN_QUERIES_FOR_EXPONENTIALS
    queries, keys = (pad_features((x * 2).exp_() if exponentials else x, beyond) for x in (q, k))
    parts = choose_part_count(q, k)
    tensors = {
        "queries": queries,
        "keys": keys,
        "weight": pad_features(weight, beyond),
        "slopes": slopes.contiguous(),
        "d_queries": q.new_zeros(queries.shape),
        "d_keys": k.new_zeros(parts, *keys.shape),
        "d_weight": q.new_zeros(parts, *q.shape[:2], queries.shape[3]),
    }
    run_c_function(library.compute_gradients, fill_struct(tensors, parts=parts, exponentials=int(exponentials)))
    d_keys = tensors["d_keys"][0] if parts == 1 else tensors["d_keys"].sum(0)
    d_weight = slopes.sum((0, 2, 3)).unsqueeze(-1) - 2.0 * tensors["d_weight"].sum((0, 1))
    return tuple(gradient[..., : q.shape[3]] for gradient in (tensors["d_queries"], d_keys, d_weight))


def pad_features(x: Tensor, count: int) -> Tensor:
    """Appends `count` zeros to the last dimension; contiguous."""
    return pad(x, (0, count)).contiguous() if count else x.contiguous()


def fill_struct(tensors: dict[str, Tensor], **sizes: int) -> AdditiveStruct:
    queries, keys = tensors["queries"], tensors["keys"]
    return AdditiveStruct(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        pairs=queries.shape[:2].numel(),
        heads=queries.shape[1],
        group=queries.shape[1] // keys.shape[1],
        query_count=queries.shape[2],
        key_count=keys.shape[2],
        width=queries.shape[3],
        **sizes,
    )


def run_c_function(function: Any, struct: AdditiveStruct) -> None:
    struct.next = 0
    terms = struct.pairs * struct.query_count * struct.key_count * struct.width
    native.run_in_threads(function, struct, native.count_threads(terms, TERMS_PER_THREAD))
    if struct.failed:
        raise MemoryError("out of memory for the buffers of additive scores")


def choose_part_count(q: Tensor, k: Tensor) -> int:
    """Splits the rows into parts, a few per thread, where the heads alone do not divide evenly among the threads."""
    pieces, count = k.shape[:2].numel(), native.count_threads(q.numel() * k.shape[2], TERMS_PER_THREAD)
    return 1 if pieces % count == 0 else min(-(-4 * count // pieces), -(-q.shape[2] // MIN_QUERIES_FOR_EXPONENTIALS))
