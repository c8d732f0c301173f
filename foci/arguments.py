"""`Call`: the checked arguments of one attention call in one shape, which every backend receives.

B batch (all leading dimensions as one), H query heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci.biases import Bias, Relative, as_bias
from foci.masks.base import Mask, as_mask
from foci.masks.tile import CallSizes, Tile
from foci.runtime.checks import to_call_device
from foci.runtime.tracing import is_autocast_enabled, is_inside_torch_func, is_vmapped
from foci.scores import Dot, Score

HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)
# The dtypes that our own kernels take.
KERNEL_DTYPES = (*HALF_DTYPES, torch.float32)


@dataclass(slots=True)
class Call:
    """A checked call; `batch_ids` and `head_ids` are the sequences and heads of the original call it covers."""

    q: Tensor  # (B, H, Tq, D)
    k: Tensor  # (B, G, Tk, Dk)
    v: Tensor  # (B, G, Tk, Dv)
    sizes: CallSizes
    score: Score
    mask: Mask | None = None
    bias: Bias | None = None
    sink: Tensor | None = None
    positions: tuple[Tensor, Tensor] | None = None  # (B or 1, Tq), (B or 1, Tk)
    dropout: float = 0.0
    seed: Tensor | None = None
    needs_lse: bool = False
    batch_ids: Tensor | None = None
    head_ids: Tensor | None = None

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.q.shape[1] // max(self.k.shape[1], 1)

    @property
    def softmax_dtype(self) -> torch.dtype:
        """The dtype in which logits and softmax are computed."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors())

    @property
    def device(self) -> torch.device:
        return self.sizes.device

    @property
    def is_vmapped(self) -> bool:
        """Whether torch.func.vmap hides a batch dimension of the inputs."""
        return is_vmapped(self.q) or is_vmapped(self.k) or is_vmapped(self.v)

    @property
    def is_transformed(self) -> bool:
        """Whether a torch.func transform is active (grad, jacrev, vmap), which supports less than autograd."""
        return not torch.compiler.is_compiling() and is_inside_torch_func()

    def tensors(self) -> list[Tensor]:
        """Every tensor that a gradient may reach."""
        tensors = [self.q, self.k, self.v, *self.score.tensors().values()]
        if self.bias is not None:
            tensors += self.bias.tensors().values()
        return tensors if self.sink is None else [*tensors, self.sink]

    def tile(self, rows: slice, columns: slice) -> Tile:
        """The indices and positions of a tile of the matrix."""
        device = self.q.device
        query = torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1)
        key = torch.arange(columns.start, columns.stop, device=device).view(1, 1, 1, -1)
        query_position, key_position = query + (self.k.shape[2] - self.q.shape[2]), key
        if self.positions is not None:
            queries, keys = (self._select_batch(p) for p in self.positions)
            query_position, key_position = queries[:, None, rows, None], keys[:, None, None, columns]
        return Tile(self.batch_index, self.head_index, query, key, query_position, key_position, rows, columns)

    @property
    def batch_index(self) -> Tensor:
        """The original number of each sequence: (B, 1, 1, 1)."""
        ids = torch.arange(self.q.shape[0], device=self.q.device) if self.batch_ids is None else self.batch_ids
        return ids.view(-1, 1, 1, 1)

    @property
    def head_index(self) -> Tensor:
        """The original number of each head: (1, H, 1, 1)."""
        ids = torch.arange(self.q.shape[1], device=self.q.device) if self.head_ids is None else self.head_ids
        return ids.view(1, -1, 1, 1)

    def _select_batch(self, positions: Tensor) -> Tensor:
        return positions if positions.shape[0] == 1 or self.batch_ids is None else positions[self.batch_ids]

    def full_tile(self) -> Tile:
        """The whole matrix as one tile."""
        return self.tile(slice(0, self.q.shape[2]), slice(0, self.k.shape[2]))

    def select(self, batches: slice | Tensor, heads: slice) -> Call:
        """The same call for some of its sequences and heads; if whole groups are selected, the keys stay views."""
        chosen = range(self.q.shape[1])[heads]
        shared = [h // self.group for h in chosen]
        aligned = (
            len(shared) == 0
            or len(set(shared)) == 1
            or (heads.step in {None, 1} and len(chosen) % self.group == 0 and chosen[0] % self.group == 0)
        )
        run = slice(shared[0], shared[-1] + 1) if shared else slice(0, 0)
        kv = run if aligned else torch.tensor(shared, device=self.q.device)
        k, v = self.k[batches][:, kv], self.v[batches][:, kv]
        return replace(
            self,
            q=self.q[batches, heads],
            k=k,
            v=k if self.v is self.k else v,
            score=self.score.select_heads(heads),
            sink=None if self.sink is None else self.sink[heads],
            batch_ids=self.batch_index.flatten()[batches],
            head_ids=self.head_index.flatten()[heads],
        )

    def with_dot(self) -> Call | None:
        """The same call with a dot-product score; None if the score is not equivalent to a dot product."""
        if not self.score.is_dot_product:
            return None
        if type(self.score) is Dot:
            return self
        equivalent = self.score.as_dot(self.q, self.k)
        if equivalent is None:
            return None
        q, k, score = equivalent
        return replace(self, q=q, k=k, score=score)

    def restore_shape(self, out: Tensor) -> Tensor:
        """(B, H, T, D) with the leading dimensions of the caller's query."""
        heads = () if self.sizes.heads is None else (self.sizes.heads,)
        return out.reshape(*self.sizes.batch, *heads, *out.shape[2:])


def prepare_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    sink: Tensor | None,
    positions: tuple[Tensor | None, Tensor | None] | None,
    dropout: float,
    needs_lse: bool,
) -> Call:
    """Checks the arguments of a call and brings them to (B, H, T, D)."""
    check_tensors(query, key, value)
    device_type = query.device.type
    if is_autocast_enabled(device_type):
        query, key, value = (cast_for_autocast(t, device_type) for t in (query, key, value))
        if not query.dtype == key.dtype == value.dtype:
            raise_for_dtypes(query, key, value)
    q, k, v, sizes = fold_batch(query, key, value)
    check_heads(q, k, v)
    if type(score) is not Dot:
        check_score(score)
    score.check(q, k, sizes.heads)
    call = Call(q, k, v, sizes, score, needs_lse=needs_lse or sink is not None)
    if mask is not None:
        call.mask = as_mask(mask).fit(sizes)
    if bias is not None:
        call.bias = as_bias(bias).fit(sizes, q, v)
    if sink is not None:
        call.sink = normalize_sink(sink, sizes)
    if positions is not None:
        call.positions = normalize_positions(positions, sizes)
    if dropout != 0:
        call.dropout, call.seed = check_dropout(dropout), torch.randint(2**31, (), device=q.device)
    return replace_score_by_dot(call) if needs_lse and q.dtype in HALF_DTYPES else call


def replace_score_by_dot(call: Call) -> Call:
    """Computes the dot-product form of General and Cosine before the kernel.

    A kernel that rounds the transformed queries returns a log-sum-exp that matches only these rounded queries, and the
    weights are computed from both.
    """
    return call if isinstance(call.bias, Relative) else call.with_dot() or call


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not are_compatible(query, key, value):
        raise_for_tensors(query, key, value)


def are_compatible(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether query, key and value fit each other: a quick check; `raise_for_tensors` finds the reason if not."""
    try:
        return (
            query.dim() == key.dim() == value.dim() >= 2
            and query.dtype == key.dtype == value.dtype
            and query.dtype in FLOAT_DTYPES
            and query.device == key.device == value.device
            and key.shape[-2] == value.shape[-2]
        )
    except AttributeError:
        return False


def describe_non_tensor(value: object) -> str:
    """The type of a value that is not a tensor, for an error message, with a hint for arrays."""
    is_array = isinstance(value, list) or hasattr(value, "__array__")
    return type(value).__name__ + (": use torch.as_tensor" if is_array else "")


def raise_for_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {describe_non_tensor(tensor)}")
        if tensor.dim() != query.dim() or tensor.dim() < 2:
            raise ValueError(
                "query, key and value must have the same number of dimensions, at least (T, D),"
                f" got {format_shapes(query, key, value)}"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(
                f"query, key and value must be on one device, got {query.device}, {key.device}, {value.device}"
            )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have the same length, got {key.shape[-2]} and {value.shape[-2]}")
    if not (query.dtype == key.dtype == value.dtype) and not is_autocast_enabled(query.device.type):
        raise_for_dtypes(query, key, value)


def raise_for_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    raise TypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype}, {value.dtype}")


def cast_for_autocast(tensor: Tensor, device_type: str) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(device_type))


def fold_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, CallSizes]:
    """Folds the inputs to four dimensions: missing heads become one head, leading dimensions one batch."""
    if query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        # Nearly every call has this shape already, and the general path takes longer than all other checks together.
        shape = query.shape
        return query, key, value, CallSizes((shape[0],), shape[1], shape[2], key.shape[2], query.device)
    headed = query.dim() >= 4
    leading = 3 if headed else 2
    try:
        batch = torch.broadcast_shapes(*(t.shape[:-leading] for t in (query, key, value)))
    except RuntimeError:
        raise ValueError(
            f"the batch dimensions of query, key and value must broadcast, got {format_shapes(query, key, value)}"
        ) from None
    size = 1
    for n in batch:
        size *= n
    folded = []
    for tensor in (query, key, value):
        rest = tensor.shape[-leading:]
        tensor = tensor.expand(*batch, *rest).reshape(size, *rest)
        folded.append(tensor if headed else tensor.unsqueeze(1))
    q, k, v = folded
    return q, k, v, CallSizes(tuple(batch), q.shape[1] if headed else None, q.shape[2], k.shape[2], q.device)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads != v.shape[1]:
        raise ValueError(f"key and value must have the same number of heads, got {kv_heads} and {v.shape[1]}")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"the number of query heads must be a multiple of the number of key/value heads, got {heads} and {kv_heads}"
        )


def check_score(score: Any) -> None:
    if not isinstance(score, Score):
        raise TypeError(f"score must be a Score such as foci.Dot() or foci.Additive(w), got {score!r}")


def normalize_sink(sink: Tensor, sizes: CallSizes) -> Tensor:
    if sizes.heads is None:
        raise ValueError(
            "query must be (..., H, T, D) for a sink, which is per head,"
            f" got {len(sizes.batch) + 2}-D inputs without heads"
        )
    if not isinstance(sink, Tensor) or not sink.is_floating_point() or tuple(sink.shape) != (sizes.heads,):
        got = f"{sink.dtype} {tuple(sink.shape)}" if isinstance(sink, Tensor) else type(sink).__name__
        raise ValueError(f"sink must be a float tensor of shape ({sizes.heads},), one logit per head, got {got}")
    return to_call_device(sink, sizes, "sink")


def normalize_positions(positions: Any, sizes: CallSizes) -> tuple[Tensor, Tensor]:
    if not isinstance(positions, tuple | list) or len(positions) != 2:
        got = f"{len(positions)} items" if isinstance(positions, tuple | list) else type(positions).__name__
        raise TypeError(f"positions must be a pair (query positions, key positions), got {got}")
    default = torch.arange(sizes.keys, device=sizes.device)
    queries, keys = positions
    if queries is None:
        queries = torch.arange(sizes.queries, device=sizes.device) + (sizes.keys - sizes.queries)
    return (
        normalize_position_tensor(queries, sizes, sizes.queries, "query positions"),
        normalize_position_tensor(default if keys is None else keys, sizes, sizes.keys, "key positions"),
    )


def normalize_position_tensor(positions: Tensor, sizes: CallSizes, length: int, name: str) -> Tensor:
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"{name} must be an int tensor, got {got}")
    accepted = dict.fromkeys([(length,), (1, length), (*sizes.batch, length)])
    if tuple(positions.shape) not in accepted:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, accepted))}, got {tuple(positions.shape)}")
    positions = to_call_device(positions, sizes, name).to(torch.int64)
    return positions.unsqueeze(0) if positions.dim() == 1 else positions.flatten(0, -2)


def check_dropout(dropout: float) -> float:
    if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be a number >= 0 and < 1, got {dropout!r}")
    return float(dropout)


def format_shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
