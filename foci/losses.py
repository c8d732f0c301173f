"""Losses on attention weights: exact, with gradients, without building the matrix.

    divergence   a student learns the attention of a teacher, or an indexer that of a whole layer
    alignment    given keys for each query: guided attention
    entropy      against heads that collapse to one key

B batch, H heads, Tq queries, Tk keys, K given keys per query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foci.runtime.checks import check_values
from foci.weights import operators
from foci.weights.divergence import compute_divergence
from foci.weights.indexing import parse_axis_index
from foci.weights.weights import Weights

__all__ = ["alignment", "divergence", "entropy"]


def __dir__() -> list[str]:
    return __all__


def divergence(teacher: Weights, student: Weights, *, keys: Tensor | None = None) -> Tensor:
    """The Kullback-Leibler divergence KL(teacher || student), the mean over all queries that see a key.

    >>> q, k, v = torch.randn(3, 2, 8, 16, 32)                                   # a layer of 8 heads
    >>> index_q, index_k = torch.randn(2, 2, 1, 16, 8).requires_grad_()          # an indexer of one head
    >>> _, teacher = foci.attention(q, k, v, mask=foci.causal, return_weights=True)
    >>> _, student = foci.attention(index_q, index_k, index_k, mask=foci.causal, return_weights=True)
    >>> foci.losses.divergence(teacher.mean("heads"), student).backward()

    Gradients reach the queries, keys and parameters of each side that needs them; pass a teacher that was computed
    under torch.no_grad to train the student only. Both sides are normalized over the keys that are compared; a sink is
    left out.

    Args:
        teacher, student: of the same batch, queries and keys. The heads broadcast: one side may have one head, or be
            the mean over heads.
        keys: compares only these keys of each query, and of them those that the student sees: int (B, Tq, K) or
            (Tq, K), -1 for no key. Without `keys`, a key that the teacher attends to and the student cannot see is an
            error.
    """
    check_pair(teacher, student)
    chosen = None if keys is None else normalize_keys(keys, student, student.shape[-2])
    averaged = teacher.is_averaged, student.is_averaged
    lse = teacher.tensors.lse, student.tensors.lse
    found, counted, hidden = compute_divergence(teacher.call, student.call, averaged, chosen, lse)
    check_values(~hidden, lambda: hidden_keys_message(hidden))
    return mean_where(found, counted)


def alignment(weights: Weights, keys: Tensor | Sequence[Any], *, queries: Any = None) -> Tensor:
    """-ln of the weight that each query puts on its given keys, the mean over queries with keys.

    >>> q, k = torch.randn(2, 1, 4, 3, 8).requires_grad_()
    >>> _, weights = foci.attention(q, k, k, return_weights=True)
    >>> foci.losses.alignment(weights, [0, [1, 2], slice(0, 2)]).backward()      # the keys of each of three queries
    >>> foci.losses.alignment(weights.mean("heads"), [[0]], queries=[2]).shape   # the keys of the last query
    torch.Size([])

    Args:
        weights: of every head, or the mean over heads.
        keys: the keys of each query: a list of numbers, lists, slices, and None for a query without keys; or an int
            tensor (Tq, K) or (B, Tq, K), -1 for no key.
        queries: the queries that `keys` belong to, a slice or a list of numbers; None: all.
    """
    check_weights("weights", weights)
    rows = parse_axis_index(slice(None) if queries is None else queries, weights.shape[-2], "query", weights.device)
    given = normalize_keys(keys, weights, rows.index.shape[0])
    call, lse = weights.call, weights.tensors.lse
    mass = operators.compute_key_mass(call, lse, rows.index, given, weights.is_averaged)
    counted = (given >= 0).any(-1).unsqueeze(1) & find_visible_rows(weights)[:, :, rows.index]
    check_values(
        ~counted | (mass > -torch.inf),
        lambda: "keys must hold a key that its query can see for each query with keys, got only masked ones for some",
    )
    return -mean_where(mass, counted)


def entropy(weights: Weights, *, at_least: float = 0.5) -> Tensor:
    """The mean over queries of how far their entropy is below `at_least`: max(at_least - entropy, 0).

    >>> q, k = torch.randn(2, 1, 4, 6, 8).requires_grad_()
    >>> _, weights = foci.attention(q, k, k, return_weights=True)
    >>> foci.losses.entropy(weights, at_least=1.0).backward()

    Args:
        weights: of every head, or the mean over heads. Fully masked rows do not count.
        at_least: queries with at least this entropy in nats are not penalized: 0 = one key, ln n = uniform over n keys.
    """
    check_weights("weights", weights)
    if not isinstance(at_least, int | float) or not 0 <= at_least < math.inf:
        raise ValueError(f"at_least must be a number of nats >= 0, got {at_least!r}")
    found = weights.entropy()
    return mean_where((at_least - found).clamp(min=0.0), find_visible_rows(weights).reshape(found.shape))


def find_visible_rows(weights: Weights) -> Tensor:
    """Which rows are not fully masked, (B, H, Tq); a row whose sink has all the weight counts as masked."""
    lse, sink = weights.tensors.lse.detach(), weights.call.sink
    visible = lse > (-torch.inf if sink is None else sink.detach().to(lse.dtype).view(1, -1, 1))
    return visible.any(1, keepdim=True) if weights.is_averaged else visible


def check_weights(name: str, weights: Any) -> None:
    if not isinstance(weights, Weights):
        got = type(weights).__name__
        raise TypeError(f"{name} must be Weights, as foci.attention(return_weights=True) returns them, got {got}")


def check_pair(teacher: Weights, student: Weights) -> None:
    """Raises unless two matrices can be compared."""
    check_weights("teacher", teacher)
    check_weights("student", student)
    sizes = [(weights.call.q.shape[0], *weights.shape[-2:]) for weights in (teacher, student)]
    heads = [1 if weights.is_averaged else weights.call.q.shape[1] for weights in (teacher, student)]
    if sizes[0] != sizes[1] or (heads[0] != heads[1] and 1 not in heads):
        raise ValueError(
            "teacher and student must have the same batch, queries and keys, and heads that broadcast,"
            f" got {teacher.shape} and {student.shape}"
        )
    if teacher.device != student.device:
        raise ValueError(f"teacher must be on {student.device} like the student, got {teacher.device}")
    if 0 in (*sizes[0], *heads):
        raise ValueError(f"teacher and student must not be empty, got {teacher.shape} and {student.shape}")


def normalize_keys(keys: Any, weights: Weights, queries: int) -> Tensor:
    """The keys of each query as a checked int tensor (B or 1, queries, K), -1 for no key."""
    given = keys if isinstance(keys, Tensor) else pad_keys(keys, weights.shape[-1])
    if given.is_floating_point() or given.dtype == torch.bool:
        raise TypeError(f"keys must be integers, got {given.dtype}")
    batch = weights.call.q.shape[0]
    shapes = {(queries,), (batch, queries), (1, queries)}
    if given.dim() < 2 or tuple(given.shape[:-1]) not in shapes:
        raise ValueError(f"keys must have shape ({queries}, K) or ({batch}, {queries}, K), got {tuple(given.shape)}")
    size = weights.shape[-1]
    given = given.to(weights.device, torch.int64)
    check_values((given >= -1) & (given < size), lambda: f"keys must be from -1 to {size - 1}, got {given.tolist()}")
    return given if given.dim() == 3 else given.unsqueeze(0)


def pad_keys(keys: Any, size: int) -> Tensor:
    """Lists of keys of different lengths as one tensor, padded with -1."""
    if not isinstance(keys, Sequence) or isinstance(keys, str):
        raise TypeError(f"keys must be a list with the keys of each query, or an int tensor, got {type(keys).__name__}")
    lists = [list_keys(item, size) for item in keys]
    longest = max([1, *(len(item) for item in lists)])
    rows = [item + [-1] * (longest - len(item)) for item in lists]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, longest)


def list_keys(item: Any, size: int) -> list[int]:
    """The keys of one query, counted from 0."""
    if item is None:
        return []
    if isinstance(item, slice):
        return list(range(size)[item])
    items = list(item) if isinstance(item, Sequence) and not isinstance(item, str) else [item]
    for key in items:
        if not isinstance(key, int) or isinstance(key, bool) or not -size <= key < size:
            raise ValueError(f"keys must be numbers from {-size} to {size - 1}, got {key!r}")
    return [key % size for key in items]


def hidden_keys_message(hidden: Tensor) -> str:
    count = int(hidden.sum())
    return (
        "teacher must attend only to keys that the student can see,"
        f" got other keys for {count} of {hidden.numel()} queries: use the same mask, or keys="
    )


def mean_where(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of the values that count; 0 if none does."""
    total = torch.where(counted, values, 0.0).sum()
    return total / counted.expand(values.shape).sum().clamp(min=1)
