"""Calls whose attention matrix is small enough to be built: what the lazy matrix is compared with.

The truth of a call is the reference's dense matrix in float64; every statistic of it is written here as its definition.

B batch, H heads, Tq queries, Tk keys, D width.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.backends import strips
from foci.weights.parts_file import map_tensors

Arguments = dict[str, Any]
B, H, TQ, TK, D = 2, 4, 11, 17, 6


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def qkv(queries: int = TQ, keys: int = TK, kv_heads: int = H, lead: tuple[int, ...] = (B,)) -> Arguments:
    return {
        "query": randn(*lead, H, queries, D, seed=1),
        "key": randn(*lead, kv_heads, keys, D, seed=2),
        "value": randn(*lead, kv_heads, keys, D + 1, seed=3),
    }


def sink() -> Tensor:
    return randn(H, seed=4)


def holes() -> Tensor:
    """A bool tensor with a hole for every other entry or so, and rows that see nothing."""
    seen = randn(B, H, TQ, TK, seed=5) > -0.3
    seen[:, :, 3] = False
    seen[0, 1, 7] = False
    return seen


def hidden_bias() -> Tensor:
    return torch.where(holes(), randn(B, H, TQ, TK, seed=6), -torch.inf)


def scattered() -> tuple[Tensor, Tensor]:
    """Positions of each sequence's own, in no order."""
    generator = torch.Generator().manual_seed(7)
    queries = torch.stack([torch.randperm(3 * TQ, generator=generator)[:TQ] for _ in range(B)])
    return queries, torch.stack([torch.randperm(2 * TK, generator=generator)[:TK] for _ in range(B)])


def flat() -> Arguments:
    return {"query": randn(TQ, D, seed=1), "key": randn(TK, D, seed=2), "value": randn(TK, D, seed=3)}


def headless() -> Arguments:
    return {"query": randn(B, TQ, D, seed=1), "key": randn(B, TK, D, seed=2), "value": randn(B, TK, D, seed=3)}


def relative(*lead: int) -> foci.Relative:
    return foci.Relative(randn(*lead, 7, D, seed=8), randn(*lead, 7, D + 1, seed=9))


def odd(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (batch + head + query + key) % 3 != 0


def halves(length: int) -> list[tuple[int, int]]:
    """Two groups with a token between them that belongs to none; one group where there is no room."""
    middle = length // 2
    return [(0, middle), (middle + 1, length)] if length > 2 else [(0, length)]


IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 9]]).expand(B, -1).contiguous()
KEY_IDS = torch.tensor([[0] * 5 + [1] * 5 + [2] * 7, [2] * 3 + [1] * 6 + [0] * 8])

# A query that sees nothing is in each case whose name ends in "empty rows".
CASES: dict[str, Callable[[], Arguments]] = {
    "plain": qkv,
    "causal": lambda: qkv() | {"mask": foci.causal},
    "square causal": lambda: qkv(TK) | {"mask": foci.causal},
    "causal, empty rows": lambda: qkv(TK, TQ) | {"mask": foci.causal},
    "causal.at, empty rows": lambda: qkv() | {"mask": foci.causal.at(-4)},
    "window": lambda: qkv(TK) | {"mask": foci.window(3, 2)},
    "window, empty rows": lambda: qkv(TK, 5) | {"mask": foci.window(2, 1)},
    "padding, empty rows": lambda: qkv() | {"mask": foci.padding([12, 0])},
    "padding on the left": lambda: qkv() | {"mask": foci.padding([17, 6], side="left")},
    "documents, empty rows": lambda: qkv() | {"mask": foci.documents(IDS, KEY_IDS)},
    "prefix": lambda: qkv(TK) | {"mask": foci.causal | foci.prefix(4)},
    "outside a window": lambda: qkv() | {"mask": ~foci.window(4, 3)},
    "bool tensor, empty rows": lambda: qkv() | {"mask": holes()},
    "bool row": lambda: qkv() | {"mask": holes()[0, 0, 0]},
    "mask_function": lambda: qkv() | {"mask": foci.mask_function(odd)},
    "joined, empty rows": lambda: qkv() | {"mask": (foci.causal & foci.padding([9, 17])) & ~foci.window(1) & holes()},
    "scale": lambda: qkv() | {"score": foci.Dot(1.0)},
    "softcap": lambda: qkv() | {"score": foci.Dot(softcap=1.5), "mask": foci.causal},
    "additive": lambda: qkv() | {"score": foci.Additive(randn(H, D, seed=10)), "mask": foci.causal},
    "additive, one vector": lambda: qkv(kv_heads=2) | {"score": foci.Additive(randn(D, seed=10))},
    "general": lambda: qkv() | {"score": foci.General(randn(H, D, D, seed=11))},
    "cosine": lambda: qkv() | {"score": foci.Cosine(randn(H, seed=12) * 3)},
    "alibi": lambda: qkv() | {"bias": foci.ALiBi(), "mask": foci.causal},
    "buckets": lambda: qkv() | {"bias": foci.Buckets(randn(8, H, seed=13), True, 12)},
    "relative": lambda: qkv() | {"bias": relative(H)},
    "relative, one table": lambda: qkv() | {"bias": relative(), "mask": foci.causal},
    "bias tensor": lambda: qkv() | {"bias": randn(H, 1, TK, seed=14)},
    "bias tensor, empty rows": lambda: qkv() | {"bias": hidden_bias()},
    "sink": lambda: qkv() | {"sink": sink()},
    "sink, empty rows": lambda: qkv(TK, TQ) | {"sink": sink(), "mask": foci.causal},
    "sink and bias, empty rows": lambda: qkv() | {"sink": sink(), "bias": hidden_bias()},
    "positions": lambda: qkv() | {"positions": scattered(), "bias": foci.ALiBi()},
    "positions, empty rows": lambda: qkv() | {"positions": scattered(), "mask": foci.window(1, 0)},
    "grouped heads": lambda: qkv(kv_heads=2),
    "grouped heads, empty rows": lambda: qkv(TK, TQ, 2) | {"mask": foci.causal, "sink": sink(), "bias": relative(H)},
    "one key head": lambda: qkv(kv_heads=1) | {"mask": holes(), "bias": foci.ALiBi(randn(H, seed=15).abs())},
    "no heads": lambda: headless() | {"mask": foci.causal},
    "one matrix": lambda: flat() | {"mask": foci.causal},
    "deep": lambda: (
        qkv(lead=(2, 3)) | {"mask": foci.padding(torch.arange(4, 10).view(2, 3)), "bias": randn(3, 1, TQ, 1, seed=16)}
    ),
    "sequences that broadcast": lambda: {
        "query": randn(2, 1, H, TQ, D, seed=1),
        "key": randn(1, 3, H, TK, D, seed=2),
        "value": randn(1, 3, H, TK, D, seed=3),
        "mask": foci.causal,
        "sink": sink(),
    },
    "one query": lambda: qkv(1) | {"mask": foci.causal},
    "one key": lambda: qkv(5, 1),
}


# How far float32 sums, and the log-sum-exp of a kernel that reads half precision, may be from the truth.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-4, torch.bfloat16: 5e-4}
DTYPES = tuple(TOLERANCE)


def in_dtype(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    return map_tensors(arguments, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def lazy(arguments: Arguments, backend: str | None = None) -> foci.Weights:
    inputs = [arguments[name] for name in ("query", "key", "value")]
    options = {name: option for name, option in arguments.items() if name not in {"query", "key", "value"}}
    return foci.attention(*inputs, **options, backend=backend, return_weights=True)[1]


def truth(arguments: Arguments) -> Tensor:
    """The dense matrix, float64, of the numbers that the call was given."""
    query, score = arguments["query"], arguments.get("score")
    if query.dtype in {torch.float16, torch.bfloat16} and isinstance(score, foci.General | foci.Cosine):
        # In half precision the queries are turned in their own dtype, as a fused kernel needs them.
        query, key, score = score.as_dot(query, arguments["key"])
        arguments = arguments | {"query": query, "key": key, "score": score}
    with torch.no_grad():
        return lazy(in_dtype(arguments, torch.float64), "reference").dense()


@cache
def both(case: str, dtype: torch.dtype = torch.float32) -> tuple[foci.Weights, Tensor]:
    """The lazy matrix of a case, and the truth: made once, since no question changes them."""
    arguments = in_dtype(CASES[case](), dtype)
    return lazy(arguments), truth(arguments)


def assert_close(found: Tensor, true: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """`scale`: how large the terms are that were added up."""
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = TOLERANCE[dtype] * scale
    torch.testing.assert_close(found.double(), true, atol=tolerance, rtol=tolerance)


def small_strips(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """Makes strips of this many entries, all threads together, so that many of them are needed."""
    monkeypatch.setattr(strips, "MAX_CPU_STRIP_ENTRIES", max(entries // torch.get_num_threads(), 1))


def positions(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Where queries and keys stand, each with the axes (B, H, T) in front of them as far as they are given."""
    queries, keys = arguments["query"].shape[-2], arguments["key"].shape[-2]
    if arguments.get("positions") is None:
        return torch.arange(queries) + keys - queries, torch.arange(keys)
    query, key = arguments["positions"]
    return (query.unsqueeze(1), key.unsqueeze(1)) if query.dim() > 1 else (query, key)


def entropy(w: Tensor) -> Tensor:
    return -torch.where(w > 0, w * w.log(), 0.0).sum(-1)


def distance(w: Tensor, arguments: Arguments) -> Tensor:
    query, key = positions(arguments)
    return (w * (key.unsqueeze(-2) - query.unsqueeze(-1)).abs()).sum(-1)


def diagonal(w: Tensor, arguments: Arguments, offset: int) -> Tensor:
    query, key = positions(arguments)
    return (w * (key.unsqueeze(-2) == query.unsqueeze(-1) + offset)).sum(-1)


def top(w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Heaviest first, of equal ones the lower key; 0 and -1 where the query does not see as many."""
    values, keys = w.sort(dim=-1, descending=True, stable=True)
    values, keys = values[..., :k], keys[..., :k]
    return values, torch.where(values > 0, keys, -1)


def picture(w: Tensor, rows: int, columns: int, reduce: str) -> Tensor:
    queries, keys = w.shape[-2:]
    blocks = [
        [w[..., r * queries // rows : (r + 1) * queries // rows, c * keys // columns : (c + 1) * keys // columns]
         for c in range(columns)]
        for r in range(rows)
    ]  # fmt: skip
    join = torch.mean if reduce == "mean" else torch.amax
    return torch.stack([torch.stack([join(b, dim=(-2, -1)) for b in row], dim=-1) for row in blocks], dim=-2)


def grouped(w: Tensor, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> Tensor:
    cells = [[w[..., a:b, c:d].sum(-1).mean(-1) for c, d in columns] for a, b in rows]
    return torch.stack([torch.stack(row, dim=-1) for row in cells], dim=-2)
