"""Products with the lazy matrix: W x is attention with other values, Wᵀ x sums over the queries of each key.

A product has the dtype of x; it is computed in the dtype of the softmax if those of x and the query differ.

B batch, H heads, G key/value heads, Tq queries, Tk keys, E width of x.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foci import backends
from foci.arguments import Call
from foci.statistics.streaming import finite_lse
from foci.weights import operators


def multiply(call: Call, lead: tuple[int, ...], x: Tensor, averaged: bool, name: str = "W @ x") -> Tensor:
    """W x: (..., Tk, E) -> (..., Tq, E); a vector (Tk,) gives (..., Tq)."""
    check_operand(call, x, call.k.shape[2], name)
    dtype = call.q.dtype if x.dtype == call.q.dtype else call.softmax_dtype
    heads = count_operand_heads(call, x, averaged)
    wanted = lead if averaged or heads == call.q.shape[1] else (*lead[:-1], heads)
    values = expand_operand(x, wanted, (call.q.shape[0], heads), name).to(dtype)
    k = call.k.to(dtype)
    if values.shape[1] > k.shape[1]:
        k = k.repeat_interleave(call.group, dim=1)
    values = values.expand(-1, k.shape[1], -1, -1)
    product = replace(call, q=call.q.to(dtype), k=k, v=values, needs_lse=call.sink is not None)
    out, lse = backends.run(product, None)
    if call.sink is not None:
        assert lse is not None
        out = out * torch.sigmoid(finite_lse(lse) - call.sink.to(lse.dtype).view(1, -1, 1)).unsqueeze(-1)
    return reshape_product(out.mean(1) if averaged else out, lead, x)


def multiply_transposed(
    call: Call, lse: Tensor, lead: tuple[int, ...], x: Tensor, averaged: bool, name: str = "W.T @ x"
) -> Tensor:
    """Wᵀ x: (..., Tq, E) -> (..., Tk, E); a vector (Tq,) gives (..., Tk)."""
    check_operand(call, x, call.q.shape[2], name)
    values = expand_operand(x, lead, (call.q.shape[0], 1 if averaged else call.q.shape[1]), name)
    values = values.to(call.softmax_dtype)
    return reshape_product(operators.compute_transposed_product(call, lse, values, averaged), lead, x)


def count_operand_heads(call: Call, x: Tensor, averaged: bool) -> int:
    """The number of heads of x: like values, x may have one per key head, which its query heads share."""
    if averaged:
        return 1
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    return kv_heads if heads > kv_heads and (x.dim() < 3 or x.shape[-3] in {1, kv_heads}) else heads


def expand_operand(x: Tensor, lead: tuple[int, ...], folded: tuple[int, int], name: str) -> Tensor:
    """x expanded to the leading axes, which are folded to two: (B, heads, T, E)."""
    matrix = x.unsqueeze(-1) if x.dim() == 1 else x
    try:
        return matrix.expand(*lead, *matrix.shape[-2:]).reshape(*folded, *matrix.shape[-2:])
    except RuntimeError:
        raise ValueError(f"x must have leading axes that expand to {lead} in {name}, got {tuple(x.shape)}") from None


def check_operand(call: Call, x: Tensor, length: int, name: str) -> None:
    """Raises unless x fits; in a product that starts with x (`name`), x was transposed by the caller."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = f"a {x.dtype} tensor" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a float tensor in {name}, got {got}")
    if x.device != call.q.device:
        raise ValueError(f"x must be on {call.q.device} like the weights in {name}, got {x.device}")
    if x.dim() == 0 or x.shape[-2 if x.dim() > 1 else -1] != length:
        left = name.startswith("x")
        expected = f"({length},) or (..., {f'E, {length}' if left else f'{length}, E'})"
        got = str(tuple(x.mT.shape if left and x.dim() > 1 else x.shape))
        raise ValueError(f"x must have shape {expected} in {name}, got {got}")


def reshape_product(out: Tensor, lead: tuple[int, ...], x: Tensor) -> Tensor:
    """The product with the leading axes of the weights and the dtype of x; a vector if x is one."""
    out = out.reshape(*lead, *out.shape[-2:]).to(x.dtype)
    return out.squeeze(-1) if x.dim() == 1 else out
