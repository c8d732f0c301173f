"""The launches of additive attention: what is allocated, how it is tiled, in which order the kernels run.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.launcher import (
    KernelLaunch,
    LaunchPlan,
    build_kernel_launch,
    count_multiprocessors,
    get_or_build_plan,
    layout_key,
)

# So few queries, or fewer, are each on their own.
MAX_DECODE_QUERIES = 4


class AdditiveOptions(NamedTuple):
    """What a call has besides its tensors: kernel_masks' forms, and dropout."""

    spans: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    dense: Tensor | None
    seed: Tensor | None
    causal: bool
    dropout: float


@dataclass(frozen=True)
class AdditiveTiling:
    """How a pass is tiled: queries and keys of a tile, threads along its queries, features per turn of the loop.

    Programs of the backward: as many as a processor holds. Lanes: threads along the features, where those are threads.
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


# The interpreter's time goes with what is padded.
INTERPRETER_TILING = AdditiveTiling(queries=16, keys=16)


def choose_forward_tiling(
    queries: int, pairs: int, value_width: int, dtype: torch.dtype, device: torch.device
) -> AdditiveTiling:
    """Few registers per value width; small blocks of queries where there are few of them."""
    if device.type != "cuda":
        return INTERPRETER_TILING
    if queries <= 16:
        return AdditiveTiling(queries=16)
    if value_width > 256:
        return AdditiveTiling(queries=32, warps=8, across=16)
    programs = -(-queries // 64) * pairs
    # On an H200 128 of these programs took 0.24 ms where twice as many with half the queries took 0.29.
    if value_width > 128 and dtype != torch.float32 and queries > 32 and programs * 2 > count_multiprocessors(device):
        return AdditiveTiling(keys=128, warps=8)
    if queries <= 32 or programs < count_multiprocessors(device):
        return AdditiveTiling(queries=32)
    return AdditiveTiling() if value_width <= 128 else AdditiveTiling(warps=8, across=16)


def choose_two_pass_tiling(queries: int, value_width: int, device: torch.device) -> AdditiveTiling:
    if device.type != "cuda":
        return INTERPRETER_TILING
    if value_width > 256:
        return AdditiveTiling(queries=32, keys=32, across=16, warps=8)
    rows = 16 if queries <= 16 else 32 if queries <= 32 else 64
    return AdditiveTiling(queries=rows, across=16, warps=8) if value_width > 128 else AdditiveTiling(queries=rows)


def forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions, tiling: AdditiveTiling | None = None
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Tq, Dv) and the log-sum-exp (B, H, Tq), in base 2."""
    q, k, v, weight, terms = to_kernel_layout(q, k, v, weight, terms)
    out, lse = allocate_results(q, v)
    make = one_by_one if q.shape[2] <= MAX_DECODE_QUERIES and tiling is None else plan_tiled_forward
    launches = get_or_build_plan(
        plan_key(make, q, k, v, weight, terms, tiling), lambda: make(q, k, v, weight, terms, out, tiling)
    )
    launches(tensor_arguments(q, k, v, weight, terms) | {"out": out, "lse": lse})
    return out, lse


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions, out: Tensor, _: AdditiveTiling | None
) -> LaunchPlan:
    from foci.gpu.additive import decode

    return decode.plan_decode_forward(q, k, v, weight, terms, out)


def plan_tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions, out: Tensor, tiling: AdditiveTiling | None
) -> LaunchPlan:
    """The forward of a block of queries against blocks of keys."""
    from foci.kernels.additive.forward import additive_forward as kernel

    pairs, Tq, Tk = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    tiling = tiling or choose_forward_tiling(Tq, pairs, v.shape[3], q.dtype, q.device)
    programs = -(-Tq // tiling.queries) * pairs
    blocks = -(-Tk // tiling.keys)
    splits = choose_split_count(programs, blocks, 1, q.device)
    numbers = scalar_arguments(q, k, v, weight, terms) | tile_arguments(q, v, tiling)
    numbers |= {"per_split": -(-blocks // splits), "SPLITS": splits}
    sizes, renamed = split_workspace(splits, out)
    attend = build_kernel_launch(kernel, (programs, splits), numbers, renamed, **launch_options(tiling))
    steps = [exponentials_launch(q, k, tiling, numbers), attend, *split_merge_launches(splits, out)]
    return LaunchPlan(exponentials_workspace(q, k, weight, tiling) | sizes, q.device, steps)


def plan_key(
    make: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions, *more: Any
) -> tuple[Any, ...]:
    """What the launches of a call follow from, besides the addresses of its tensors."""
    device = q.device
    tensors = layout_key(q), layout_key(k), layout_key(v), layout_key(weight), *map(layout_key, terms[:5])
    return make, device, count_multiprocessors(device), tensors, terms[5:], more


def to_kernel_layout(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, AdditiveOptions]:
    """As the kernels read them: features that lie side by side, and of the weight also the heads; masks in bytes."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    spans, query_ids, key_ids = (None if x is None else x.contiguous() for x in terms[:3])
    dense = terms.dense
    if dense is not None:
        dense = dense.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).view(torch.uint8)
    return q, k, v, weight.contiguous(), AdditiveOptions(spans, query_ids, key_ids, dense, *terms[4:])


def choose_split_count(programs: int, blocks: int, per_processor: int, device: torch.device, most: int = 64) -> int:
    """Into how many parts the keys are split: enough programs for every processor, a few blocks for each of them."""
    wanted = count_multiprocessors(device) * per_processor
    return max(1, min(wanted // programs, blocks // 4, most)) if programs * 2 <= wanted else 1


def split_workspace(splits: int, out: Tensor) -> tuple[dict[str, int], dict[str, str]]:
    """Where the splits put their own results: how many floats these are, and what stands for what."""
    if splits == 1:
        return {}, {}
    sizes = {"parts": splits * out.numel(), "part_lse": splits * out.numel() // out.shape[3]}
    return sizes, {"out": "parts", "lse": "part_lse"}


def split_merge_launches(splits: int, out: Tensor) -> list[KernelLaunch]:
    if splits == 1:
        return []
    from foci.kernels.additive.forward import merge_splits as kernel

    rows, width = out.numel() // out.shape[3], min(next_power_of_two(out.shape[3]), 64)
    numbers = {"rows": rows, "Dv": out.shape[3], "SPLITS": splits, "BS": next_power_of_two(splits, 1), "BV": width}
    return [build_kernel_launch(kernel, (rows, -(-out.shape[3] // width)), numbers, num_warps=4)]


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: AdditiveOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight.

    One pass over the terms adds to the queries in no fixed order; two passes take twice as long and are the same in
    every run, for those who ask for that. So is the one pass for very few queries.
    """
    if q.shape[2] <= MAX_DECODE_QUERIES:
        from foci.gpu.additive import decode

        return decode.decode_backward(d_out, d_lse, q, k, v, weight, out, lse, terms)
    if torch.are_deterministic_algorithms_enabled():
        return backward_in_two_passes(d_out, d_lse, q, k, v, weight, out, lse, terms)
    from foci.gpu.additive import one_pass_backward

    return one_pass_backward.backward_in_one_pass(d_out, d_lse, q, k, v, weight, out, lse, terms)


def backward_in_two_passes(
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: AdditiveOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and weight, the same in every run."""
    q, k, v, weight, terms = to_kernel_layout(q, k, v, weight, terms)
    tiling = choose_two_pass_tiling(q.shape[2], v.shape[3], q.device)
    programs = count_programs(q, k, tiling)
    launches = get_or_build_plan(
        plan_key(plan_two_pass_backward, q, k, v, weight, terms, programs, d_out.dtype),
        lambda: plan_two_pass_backward(q, k, v, weight, terms, tiling, programs),
    )
    given = tensor_arguments(q, k, v, weight, terms) | {"out": out, "lse": lse, "d_out": d_out.contiguous()}
    given["d_lse"] = torch.zeros_like(lse) if d_lse is None else d_lse.contiguous()
    dw = torch.zeros((programs[0], *weight.shape), dtype=torch.float32, device=q.device)
    given |= {"dq": torch.zeros(q.shape, dtype=torch.float32, device=q.device), "dw": dw}
    found: dict[str, Tensor] = {}

    def late() -> dict[str, Tensor]:
        """The sums for the queries are done: they need no memory next to those for the keys."""
        found["d_query"] = given.pop("dq").to(q.dtype)
        found["dk"] = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        found["dv"] = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        return found

    launches(given, late)
    return found["d_query"], found["dk"].to(k.dtype), found["dv"], dw.sum(0).to(weight.dtype)


def count_programs(q: Tensor, k: Tensor, tiling: AdditiveTiling) -> tuple[int, int]:
    """Of the pass over the rows, and of that over the columns."""
    rows, columns = -(-q.shape[2] // tiling.queries) * q.shape[1], -(-k.shape[2] // tiling.keys) * k.shape[1]
    most = count_multiprocessors(q.device) * tiling.programs
    return min(rows * q.shape[0], most), min(columns * k.shape[0], most)


def plan_two_pass_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    terms: AdditiveOptions,
    tiling: AdditiveTiling,
    programs: tuple[int, int],
) -> LaunchPlan:
    from foci.kernels.additive.backward import additive_key_gradients, additive_query_gradients

    features = min(next_power_of_two(q.shape[3]), 64)
    across = min(features, 16)
    numbers = scalar_arguments(q, k, v, weight, terms) | tile_arguments(q, v, tiling)
    numbers |= {"DC": features, "DT": across, "RT": tiling.warps * 32 // across}
    tile = tiling.queries * tiling.keys
    rooms = programs[0] * (tile + tiling.keys * features), programs[1] * (tile + tiling.queries * features)
    sizes = exponentials_workspace(q, k, weight, tiling) | {"delta": q.numel() // q.shape[3], "room": max(rooms)}
    row_items = numbers["pairs"] * -(-q.shape[2] // tiling.queries)
    column_items = k.shape[0] * k.shape[1] * -(-k.shape[2] // tiling.keys)
    by_rows = numbers | {"items": row_items, "programs": programs[0]}
    by_columns = numbers | {"items": column_items, "programs": programs[1]}
    steps = [
        exponentials_launch(q, k, tiling, numbers),
        build_kernel_launch(additive_query_gradients, programs[:1], by_rows, **launch_options(tiling)),
        build_kernel_launch(additive_key_gradients, programs[1:], by_columns, **launch_options(tiling)),
    ]
    return LaunchPlan({}, q.device, steps, lasting=sizes)


def exponentials_launch(q: Tensor, k: Tensor, tiling: AdditiveTiling, numbers: dict[str, Any]) -> KernelLaunch:
    """The exponentials, laid out for a tiling, and what is known of their sizes."""
    from foci.kernels.additive.exponentials import prepare_exponentials as kernel

    return build_kernel_launch(
        kernel, (count_blocks(q, k, tiling),), numbers | {"TOGETHER": tiling.queries}, num_warps=4
    )


def exponentials_workspace(q: Tensor, k: Tensor, weight: Tensor, tiling: AdditiveTiling) -> dict[str, int]:
    """How many floats each result of `prepare` has. The backward reads a few beyond E: F must follow it."""
    B, H, Tq, D = q.shape
    q_blocks, k_blocks = B * H * -(-Tq // tiling.queries), B * k.shape[1] * -(-k.shape[2] // tiling.keys)
    width, weights = pad_width(D, tiling), weight.numel() // D
    return {
        "E": q_blocks * width * tiling.queries, "F": k_blocks * width * tiling.keys,
        "table": weights * width, "sizes": weights * width, "constants": weights * 2,
        "q_most": q_blocks * width, "k_most": k_blocks * width, "q_reach": q_blocks, "k_reach": k_blocks,
    }  # fmt: skip


def count_blocks(q: Tensor, k: Tensor, tiling: AdditiveTiling) -> int:
    """Blocks of queries and blocks of keys: the programs of `prepare`."""
    B, H, Tq, _ = q.shape
    return B * (H * -(-Tq // tiling.queries) + k.shape[1] * -(-k.shape[2] // tiling.keys))


def tensor_arguments(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions) -> dict[str, Tensor]:
    """What every kernel reads. What is not given points at the weight and is never read."""
    spans, query_ids, key_ids, dense, seed = (weight if x is None else x for x in terms[:5])
    return {
        "q": q, "k": k, "v": v, "weight": weight,
        "spans": spans, "query_ids": query_ids, "key_ids": key_ids, "dense": dense, "seed": seed,
    }  # fmt: skip


def scalar_arguments(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, terms: AdditiveOptions) -> dict[str, Any]:
    """What the kernels are told of these tensors."""
    (B, H, Tq, D), (G, Tk), Dv, headed = q.shape, k.shape[1:3], v.shape[3], weight.dim() == 2
    strides = (0, 0, 0, 0) if terms.dense is None else terms.dense.stride()
    masks = {"spans": terms.spans, "query_ids": terms.query_ids, "key_ids": terms.key_ids}
    return {
        "B": B, "H": H, "G": G, "group": H // G, "pairs": B * H, "Tq": Tq, "Tk": Tk, "D": D, "Dv": Dv,
        "q_batch": q.stride(0), "q_head": q.stride(1), "q_query": q.stride(2),
        "k_batch": k.stride(0), "k_head": k.stride(1), "k_key": k.stride(2),
        "v_batch": v.stride(0), "v_head": v.stride(1), "v_key": v.stride(2),
        "weight_head": D if headed else 0, "headed": int(headed), "weights": H if headed else 1,
        **{f"{name}_batch": 0 if x is None or x.shape[0] == 1 else x.stride(0) for name, x in masks.items()},
        "dense_batch": strides[0], "dense_head": strides[1], "dense_query": strides[2], "dense_key": strides[3],
        "threshold": int(terms.dropout * 2**32), "grown": 1.0 / (1.0 - terms.dropout),
        "CAUSAL": terms.causal, "SPANS": 0 if terms.spans is None else terms.spans.shape[1],
        "IDS": terms.query_ids is not None, "DENSE": terms.dense is not None, "DROPOUT": terms.seed is not None,
        "BD": next_power_of_two(D), "BV": next_power_of_two(Dv), "GPU": q.is_cuda,
    }  # fmt: skip


def tile_arguments(q: Tensor, v: Tensor, tiling: AdditiveTiling) -> dict[str, Any]:
    """The sizes of a tile, for the kernels that work on tiles."""
    D, threads = q.shape[3], tiling.warps * 32
    return {
        "DP": pad_width(D, tiling), "STEP": min(next_power_of_two(D), 64), "VC": min(next_power_of_two(v.shape[3]), 64),
        "BM": tiling.queries, "BN": tiling.keys, "MT": tiling.across, "NT": threads // tiling.across,
        "CHUNK": tiling.chunk, "MOST": tiling.most, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def pad_width(width: int, tiling: AdditiveTiling) -> int:
    """The width up to whole turns of the loop over features."""
    return -(-width // tiling.chunk) * tiling.chunk


def launch_options(tiling: AdditiveTiling) -> dict[str, Any]:
    found: dict[str, Any] = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    return found if tiling.registers is None else found | {"maxnreg": tiling.registers}


def allocate_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def next_power_of_two(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())
