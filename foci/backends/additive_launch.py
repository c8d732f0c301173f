"""The launches of additive attention: what is allocated, how it is tiled, in which order the kernels run.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# With fewer queries each is on its own.
FEW_QUERIES = 4


class Terms(NamedTuple):
    """What a call has besides its tensors: kernel_masks' forms, and dropout."""

    spans: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    dense: Tensor | None
    seed: Tensor | None
    causal: bool
    dropout: float


@dataclass(frozen=True)
class Tiling:
    """How a pass is tiled: queries and keys of a tile, threads along its queries, features per turn of the loop.

    Programs of the backward: as many as a processor holds, each has a tile of memory to itself. Lanes: threads along
    the features, where those are threads. Ahead: exponentials are fetched a turn before they are needed.
    """

    queries: int = 64
    keys: int = 64
    across: int = 8
    chunk: int = 8
    warps: int = 4
    stages: int = 1
    registers: int | None = None
    most: int = 4
    programs: int = 2
    lanes: int = 32
    ahead: bool = False


# The interpreter's time goes with what is padded.
INTERPRETED = Tiling(queries=16, keys=16)


@cache
def forward_tiling(queries: int, pairs: int, value_width: int, dtype: torch.dtype, device: torch.device) -> Tiling:
    """Few registers per value width; small blocks of queries where there are few of them."""
    if device.type != "cuda":
        return INTERPRETED
    if queries <= 16:
        return Tiling(queries=16)
    if value_width > 256:
        return Tiling(queries=32, warps=8, across=16)
    if -(-queries // 64) * pairs < processors(device):
        return Tiling(queries=32)
    if value_width <= 128:
        return Tiling()
    return Tiling(warps=8, across=16) if dtype == torch.float32 else Tiling(keys=128, warps=8)


@cache
def backward_tiling(queries: int, value_width: int, device: torch.device) -> Tiling:
    if device.type != "cuda":
        return INTERPRETED
    if value_width > 256:
        return Tiling(queries=32, keys=32, across=16, warps=8)
    rows = 16 if queries <= 16 else 32 if queries <= 32 else 64
    return Tiling(queries=rows, across=16, warps=8) if value_width > 128 else Tiling(queries=rows)


def forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: Terms, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and the log-sum-exp (B, H, Tq), in base 2."""
    q, k, v, weight = readable(q, k, v, weight)
    out, lse = results(q, v)
    if q.shape[2] <= FEW_QUERIES and tiling is None:
        from foci.backends import additive_few

        additive_few.forward(q, k, v, weight, terms, out, lse)
        return out, lse
    from foci.kernels.additive import forward as kernel

    pairs, Tq, Tk = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    tiling = tiling or forward_tiling(Tq, pairs, v.shape[3], q.dtype, q.device)
    programs = -(-Tq // tiling.queries) * pairs
    blocks = -(-Tk // tiling.keys)
    splits = splits_for(programs, blocks, 1, q.device)
    parts = partial_results(splits, out, lse)
    kernel[(programs, splits)](
        **inputs(q, k, v, weight, terms), **prepared(q, k, weight, tiling), **shape(q, v, tiling),
        out=parts[0], lse=parts[1], pairs=pairs, per_split=-(-blocks // splits), SPLITS=splits,
        BV=power_of_two(v.shape[3]), AHEAD=tiling.ahead, **options(tiling),
    )  # fmt: skip
    join(splits, parts, out, lse)
    return out, lse


def readable(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the kernels read them: features that lie side by side, and of the weight also the heads."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v, weight.contiguous()


def splits_for(programs: int, blocks: int, per_processor: int, device: torch.device) -> int:
    """Into how many parts the keys are split: enough programs for every processor, a few blocks for each of them."""
    wanted = processors(device) * per_processor
    return max(1, min(wanted // programs, blocks // 4, 64)) if programs * 2 <= wanted else 1


def partial_results(splits: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    if splits == 1:
        return out, lse
    return out.new_empty((splits, *out.shape), dtype=torch.float32), lse.new_empty((splits, *lse.shape))


def join(splits: int, parts: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    if splits == 1:
        return
    from foci.kernels.additive import join as kernel

    width = min(power_of_two(out.shape[3]), 64)
    kernel[(lse.numel(), -(-out.shape[3] // width))](
        *parts, out, lse, lse.numel(), out.shape[3], SPLITS=splits, BS=power_of_two(splits, 1), BV=width, num_warps=4
    )


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight.

    One pass over the terms adds to the queries in no fixed order; two passes take twice as long and are the same in
    every run, for those who ask for that. So is the one pass for very few queries.
    """
    if q.shape[2] <= FEW_QUERIES:
        from foci.backends import additive_few

        return additive_few.backward(d_out, d_lse, q, k, v, weight, out, lse, terms)
    if torch.are_deterministic_algorithms_enabled():
        return two_passes(d_out, d_lse, q, k, v, weight, out, lse, terms)
    from foci.backends import additive_joint

    return additive_joint.backward(d_out, d_lse, q, k, v, weight, out, lse, terms)


def two_passes(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight, the same in every run."""
    from foci.kernels.additive_backward import columns, rows

    q, k, v, weight = readable(q, k, v, weight)
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse.contiguous()
    tiling = tiling or backward_tiling(q.shape[2], v.shape[3], q.device)
    pairs, weights = q.shape[0] * q.shape[1], weight.numel() // weight.shape[-1]
    arguments = inputs(q, k, v, weight, terms) | prepared(q, k, weight, tiling) | shape(q, v, tiling)
    features = min(power_of_two(q.shape[3]), 64)
    threads_across = min(features, 16)
    arguments |= {
        "lse": lse, "d_out": d_out.contiguous(), "delta": torch.empty_like(lse), "pairs": pairs,
        "BV": power_of_two(v.shape[3]), "VC": min(power_of_two(v.shape[3]), 64), "DC": features, "DT": threads_across,
        "RT": tiling.warps * 32 // threads_across,
    }  # fmt: skip
    room = tiling.queries * tiling.keys + tiling.keys * features
    items = -(-q.shape[2] // tiling.queries) * pairs
    programs = min(items, processors(q.device) * tiling.programs)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dw = torch.zeros((programs, weights, q.shape[3]), dtype=torch.float32, device=q.device)
    rows[(programs,)](
        **arguments, out=out, d_lse=d_lse, dq=dq, dw=dw,
        room=dw.new_empty((programs, room)), items=items, programs=programs, **options(tiling),
    )  # fmt: skip
    dq, d_weight = dq.to(q.dtype), dw.sum(0).view(weight.shape).to(weight.dtype)
    room = tiling.queries * tiling.keys + tiling.queries * features
    items = -(-k.shape[2] // tiling.keys) * k.shape[0] * k.shape[1]
    programs = min(items, processors(q.device) * tiling.programs)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    columns[(programs,)](
        **arguments, dk=dk, dv=dv, room=dw.new_empty((programs, room)), items=items, programs=programs,
        **options(tiling),
    )  # fmt: skip
    return dq, dk.to(k.dtype), dv, d_weight


def prepared(q: Tensor, k: Tensor, weight: Tensor, tiling: Tiling) -> dict[str, Any]:
    """The exponentials, laid out for a tiling, and what is known of their sizes."""
    from foci.kernels.additive_powers import prepare as kernel

    found = parts(preparation(q, k, weight, tiling), q.device)
    kernel[(blocks_of(q, k, tiling),)](q=q, k=k, weight=weight, **found, **preparing(q, k, weight, tiling))
    return found | {"headed": int(weight.dim() == 2)}


def parts(sizes: dict[str, int], device: torch.device) -> dict[str, Tensor]:
    """Many arrays of floats in one allocation, each from a multiple of 128 bytes on: allocating is the host's time."""
    rounded = [-(-size // 32) * 32 for size in sizes.values()]
    whole = torch.empty(sum(rounded), dtype=torch.float32, device=device)
    return dict(zip(sizes, whole.split(rounded), strict=True))


def preparation(q: Tensor, k: Tensor, weight: Tensor, tiling: Tiling) -> dict[str, int]:
    """How many floats each result of `prepare` has."""
    B, H, Tq, D = q.shape
    q_blocks, k_blocks = B * H * -(-Tq // tiling.queries), B * k.shape[1] * -(-k.shape[2] // tiling.keys)
    width, weights = rounded(D, tiling), weight.numel() // D
    return {
        "E": q_blocks * width * tiling.queries, "F": k_blocks * width * tiling.keys,
        "table": weights * width, "sizes": weights * width, "constants": weights * 2,
        "q_most": q_blocks * width, "k_most": k_blocks * width, "q_reach": q_blocks, "k_reach": k_blocks,
    }  # fmt: skip


def preparing(q: Tensor, k: Tensor, weight: Tensor, tiling: Tiling) -> dict[str, Any]:
    """What `prepare` is told besides its tensors."""
    (B, H, Tq, D), (G, Tk), headed = q.shape, k.shape[1:3], weight.dim() == 2
    return {
        "B": B, "H": H, "G": G, "Tq": Tq, "Tk": Tk, "D": D,
        "q_batch": q.stride(0), "q_head": q.stride(1), "q_query": q.stride(2),
        "k_batch": k.stride(0), "k_head": k.stride(1), "k_key": k.stride(2),
        "weight_head": D if headed else 0, "weights": H if headed else 1,
        "BM": tiling.queries, "BN": tiling.keys, "DP": rounded(D, tiling), "BD": power_of_two(D),
        "STEP": min(power_of_two(D), 64), "GPU": q.is_cuda, "num_warps": 4,
    }  # fmt: skip


def blocks_of(q: Tensor, k: Tensor, tiling: Tiling) -> int:
    """Blocks of queries and blocks of keys: the programs of `prepare`."""
    B, H, Tq, _ = q.shape
    return B * (H * -(-Tq // tiling.queries) + k.shape[1] * -(-k.shape[2] // tiling.keys))


def inputs(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: Terms) -> dict[str, Any]:
    """What every kernel reads. What is not given points at the weight and is never read."""
    dense = terms.dense
    if dense is not None:
        dense = dense.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).view(torch.uint8)
    strides = (0, 0, 0, 0) if dense is None else dense.stride()
    masks = {"spans": terms.spans, "query_ids": terms.query_ids, "key_ids": terms.key_ids}
    masks = {name: None if x is None else x.contiguous() for name, x in masks.items()}
    return dict(
        q=q, k=k, v=v, weight=weight, dense=weight if dense is None else dense,
        seed=weight if terms.seed is None else terms.seed,
        **{name: weight if x is None else x for name, x in masks.items()},
        **{f"{name}_batch": 0 if x is None or x.shape[0] == 1 else x.stride(0) for name, x in masks.items()},
        dense_batch=strides[0], dense_head=strides[1], dense_query=strides[2], dense_key=strides[3],
        H=q.shape[1], group=q.shape[1] // k.shape[1], Tq=q.shape[2], Tk=k.shape[2],
        q_batch=q.stride(0), q_head=q.stride(1), q_query=q.stride(2),
        k_batch=k.stride(0), k_head=k.stride(1), k_key=k.stride(2),
        v_batch=v.stride(0), v_head=v.stride(1), v_key=v.stride(2),
        weight_head=weight.shape[-1] if weight.dim() == 2 else 0,
        threshold=int(terms.dropout * 2**32), grown=1.0 / (1.0 - terms.dropout),
        CAUSAL=terms.causal, SPANS=0 if terms.spans is None else terms.spans.shape[1],
        IDS=terms.query_ids is not None, DENSE=dense is not None, DROPOUT=terms.seed is not None,
    )  # fmt: skip


def shape(q: Tensor, v: Tensor, tiling: Tiling) -> dict[str, Any]:
    """The sizes of a tile, for the kernels that work on tiles."""
    D, threads = q.shape[3], tiling.warps * 32
    return {
        "D": D, "Dv": v.shape[3], "DP": rounded(D, tiling), "BD": power_of_two(D),
        "BM": tiling.queries, "BN": tiling.keys, "MT": tiling.across, "NT": threads // tiling.across,
        "CHUNK": tiling.chunk, "MOST": tiling.most, "GPU": q.is_cuda,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def rounded(width: int, tiling: Tiling) -> int:
    """The width up to whole turns of the loop over features."""
    return -(-width // tiling.chunk) * tiling.chunk


def options(tiling: Tiling) -> dict[str, Any]:
    found: dict[str, Any] = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    return found if tiling.registers is None else found | {"maxnreg": tiling.registers}


def results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def power_of_two(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


@cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2
