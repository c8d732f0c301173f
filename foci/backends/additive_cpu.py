"""The scores wᵀ tanh(q + k) of a strip on a CPU, from exponentials that are taken once per query and once per key.

tanh(a + b) = 1 - 2 / (1 + e^2a e^2b), so a term costs a product, a sum and a quotient. Compiled C does it where there
is a compiler, small blocks in torch where not. Where e^2a is no float of full precision, the formula is taken as it is.

B batch, H heads, G key heads, R queries, C keys, D width, r and c queries and keys of a block.
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
from foci.runtime.checks import is_traced
from foci.runtime.double_backward import make_distinct_views
from foci.scores import Additive

# Up to here e^2a and e^-2a are floats of full precision.
MAX_EXPONENTIAL_INPUT = 43.0

# Terms of a block in torch, and its rows: what stays in a core's cache.
TERMS_PER_BLOCK = 2**19
ROWS_PER_BLOCK = 32

# Exponentials of the keys pay off from so many queries on.
MIN_QUERIES_FOR_EXPONENTIALS = 4

# Terms that are worth a thread.
TERMS_PER_THREAD = 2**18

STRUCT_POINTERS = (
    *("queries", "keys", "weight", "panels", "near", "scores", "slopes"),
    *("d_queries", "d_keys", "d_weight"),
)
STRUCT_SIZES = ("pairs", "heads", "group", "query_count", "key_count", "panel_count", "width", "parts", "exponentials")

PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class FastAdditive(Additive):
    """The same score, computed here."""

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        if 0 in q.shape or 0 in k.shape:
            return Additive(self.weight).raw(q, k)
        weight = self.weight.to(q.dtype).expand(q.shape[1], q.shape[3])
        return AdditiveScores.apply(q, k, weight)  # type: ignore[no-any-return, no-untyped-call]


def with_fast_additive(call: Call) -> Call:
    """The call with its additive score computed here, where it is one that this serves.

    Whoever looks through operations (a compiler, torch.func) is given those of the formula.
    """
    if type(call.score) is not Additive or call.wide != torch.float32 or call.q.device.type != "cpu":
        return call
    unusual = any(type(tensor) not in PLAIN_TENSOR_TYPES for tensor in (call.q, call.k, call.score.weight))
    if unusual or is_traced(call.q) or call.transformed:
        return call
    return replace(call, score=FastAdditive(call.score.weight))


class AdditiveScores(torch.autograd.Function):
    """Keeps the inputs alone; a gradient that shall have a gradient itself is that of the formula."""

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
                wanted = [tensor for tensor in (q, k, weight) if tensor.requires_grad]
                found = iter(torch.autograd.grad(Additive(weight).raw(q, k), wanted, slopes, create_graph=True))
            return tuple(next(found) if tensor.requires_grad else None for tensor in (q, k, weight))
        if missing_c_library() is None:
            return compute_gradients_in_c(q, k, weight, slopes, has_exact_exponentials(q, k))
        return compute_gradients_in_blocks(q, k, weight, slopes)


def has_exact_exponentials(q: Tensor, k: Tensor) -> bool:
    """Whether all exponentials are floats of full precision; NaN is not."""
    return all(float(edge.abs()) <= MAX_EXPONENTIAL_INPUT for x in (q.detach(), k.detach()) for edge in x.aminmax())


def compute_scores_in_blocks(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """(B, H, R, D), (B, G, C, D) and (H, D) -> (B, H, R, C)."""
    scores = q.new_empty(*q.shape[:3], k.shape[2])
    near = has_exact_exponentials(q, k)
    left, right = ((2.0 * q).exp_(), (2.0 * k).exp_()) if near else (q, k)
    room = allocate_block_buffer(q, k)
    for place, columns in iterate_blocks(q, k):
        b, h, rows = place
        x = sigmoid_terms(left[place], right[b, h * k.shape[1] // q.shape[1], columns], near, room)
        scores[b, h, rows, columns] = (x.flatten(0, 1) @ weight[h]).view(x.shape[:2])
    return torch.add(weight.sum(-1).view(-1, 1, 1), scores, alpha=-2.0)


def sigmoid_terms(left: Tensor, right: Tensor, near: bool, room: Tensor) -> Tensor:
    """1 / (1 + e^2(q + k)), which is half of 1 - tanh(q + k): (r, D) and (c, D) -> (r, c, D), in the given room."""
    x = room[: left.shape[0] * right.numel()].view(left.shape[0], *right.shape)
    left = left.unsqueeze(1)
    if near:
        return torch.addcmul(left.new_ones(()), left, right, out=x).reciprocal_()
    return torch.add(left, right, out=x).tanh_().mul_(-0.5).add_(0.5)


def compute_gradients_in_blocks(q: Tensor, k: Tensor, weight: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With the shares s: sums of slope 4 w (s - s²) for queries and keys, and of slope (1 - 2 s) for the weight."""
    near = has_exact_exponentials(q, k)
    left, right = ((2.0 * q).exp_(), (2.0 * k).exp_()) if near else (q, k)
    room = allocate_block_buffer(q, k)
    d_q, d_k, d_weight = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(weight)
    for place, columns in iterate_blocks(q, k):
        b, h, rows = place
        key_place = b, h * k.shape[1] // q.shape[1], columns
        x = sigmoid_terms(left[place], right[key_place], near, room)
        slope = slopes[b, h, rows, columns].unsqueeze(-1)
        d_weight[h] += slope.flatten() @ x.flatten(0, 1)
        x.addcmul_(x, x, value=-1.0).mul_(slope)
        d_q[place] += x.sum(1) * weight[h]
        d_k[key_place] += x.sum(0) * weight[h]
    return d_q.mul_(4.0), d_k.mul_(4.0), slopes.sum((0, 2, 3)).unsqueeze(-1) - 2.0 * d_weight


def block_shape(q: Tensor, k: Tensor) -> tuple[int, int]:
    rows = min(ROWS_PER_BLOCK, q.shape[2])
    return rows, min(max(TERMS_PER_BLOCK // (rows * q.shape[3]), 1), k.shape[2])


def allocate_block_buffer(q: Tensor, k: Tensor) -> Tensor:
    """For the terms of any block: memory that is new for each of them costs more than what is done in it."""
    rows, columns = block_shape(q, k)
    return q.new_empty(rows * columns * q.shape[3])


def iterate_blocks(q: Tensor, k: Tensor) -> Iterator[tuple[tuple[int, int, slice], slice]]:
    """Some queries of a head and some keys at a time, few enough to stay in cache."""
    batch, heads, queries, _ = q.shape
    rows, step = block_shape(q, k)
    for b in range(batch):
        for h in range(heads):
            for row in range(0, queries, rows):
                for column in range(0, k.shape[2], step):
                    yield (b, h, slice(row, row + rows)), slice(column, column + step)


class AdditiveStruct(ctypes.Structure):
    """What kernels/additive.c is given, in its order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in STRUCT_POINTERS),
        *((name, ctypes.c_int64) for name in (*STRUCT_SIZES, "next", "failed")),
    )


def missing_c_library() -> str | None:
    """Why there is no such library here; None where there is one."""
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
    work = fill_struct(tensors, panel_count=panels)
    if "panels" in tensors:
        run_c_function(library.lay_out, work)
    run_c_function(library.score, work)
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
    run_c_function(library.slope, fill_struct(tensors, parts=parts, exponentials=int(exponentials)))
    d_keys = tensors["d_keys"][0] if parts == 1 else tensors["d_keys"].sum(0)
    d_weight = slopes.sum((0, 2, 3)).unsqueeze(-1) - 2.0 * tensors["d_weight"].sum((0, 1))
    return tuple(found[..., : q.shape[3]] for found in (tensors["d_queries"], d_keys, d_weight))


def pad_features(x: Tensor, beyond: int) -> Tensor:
    """As much wider, with zeros, and contiguous."""
    return pad(x, (0, beyond)).contiguous() if beyond else x.contiguous()


def fill_struct(tensors: dict[str, Tensor], **more: int) -> AdditiveStruct:
    queries, keys = tensors["queries"], tensors["keys"]
    return AdditiveStruct(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        pairs=queries.shape[:2].numel(),
        heads=queries.shape[1],
        group=queries.shape[1] // keys.shape[1],
        query_count=queries.shape[2],
        key_count=keys.shape[2],
        width=queries.shape[3],
        **more,
    )


def run_c_function(function: Any, work: AdditiveStruct) -> None:
    work.next = 0
    native.run_in_threads(
        function, work, choose_thread_count(work.pairs * work.query_count * work.key_count * work.width)
    )
    if work.failed:
        raise MemoryError("there is no memory for the few queries that are compared at once")


def choose_thread_count(terms: int) -> int:
    return min(torch.get_num_threads(), max(terms // TERMS_PER_THREAD, 1))


def choose_part_count(q: Tensor, k: Tensor) -> int:
    """Where heads alone do not give every thread the same, the rows are shared out too, a few parts for each thread."""
    pieces, count = k.shape[:2].numel(), choose_thread_count(q.numel() * k.shape[2])
    return 1 if pieces % count == 0 else min(-(-4 * count // pieces), -(-q.shape[2] // MIN_QUERIES_FOR_EXPONENTIALS))
