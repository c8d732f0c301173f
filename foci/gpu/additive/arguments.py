"""Arguments of the additive attention kernels: options of a call, tilings, tensor layout, scalars and workspace sizes.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width. A pair is one head of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.arguments import (
    layout_key,
    make_contiguous,
    mask_arguments,
    next_power_of_two,
    stride_arguments,
    view_as_bytes,
    with_contiguous_rows,
)
from foci.gpu.launcher import KernelLaunch, build_kernel_launch, count_multiprocessors


class AdditiveOptions(NamedTuple):
    """Everything of a call besides q, k, v and weight: the fields of KernelMasks, and dropout."""

    key_ranges: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    dense: Tensor | None
    seed: Tensor | None
    causal: bool
    dropout: float


@dataclass(frozen=True)
class AdditiveTiling:
    """The tile sizes and launch options of one pass."""

    queries: int = 64  # of a tile
    keys: int = 64  # of a tile
    query_threads: int = 8  # threads along the queries of a tile
    chunk: int = 8  # features per loop iteration
    warps: int = 4
    stages: int = 1
    registers: int | None = None
    max_shared: int = 4  # terms that may share one reciprocal
    programs: int = 2  # of a backward, per multiprocessor
    feature_threads: int = 32  # threads along the features, in the one-pass backward

    def options(self) -> dict[str, Any]:
        """Triton's launch options."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | limit


# Partial results of split keys that a program merges per loop iteration.
SPLITS_PER_STEP = 16
# Small, because the interpreter also spends time on padding.
INTERPRETER_TILING = AdditiveTiling(queries=16, keys=16)


def plan_key(
    build: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions, *more: Any
) -> tuple[Any, ...]:
    """The cache key of a launch plan: everything that it depends on."""
    device = q.device
    tensors = layout_key(q), layout_key(k), layout_key(v), layout_key(weight), *map(layout_key, options[:5])
    return build, device, count_multiprocessors(device), tensors, options[5:], more


def to_kernel_layout(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, AdditiveOptions]:
    """Make features, weight and mask tensors contiguous, and view the dense mask as bytes."""
    q, k, v = map(with_contiguous_rows, (q, k, v))
    key_ranges, query_ids, key_ids = make_contiguous(*options[:3])
    dense = view_as_bytes(options.dense, q, k)
    return q, k, v, weight.contiguous(), AdditiveOptions(key_ranges, query_ids, key_ids, dense, *options[4:])


def allocate_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized output (B, H, Tq, Dv) and log-sum-exp (B, H, Tq)."""
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def tensor_arguments(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions) -> dict[str, Tensor]:
    """The tensors that every kernel reads. An absent one points at the weight and is never read."""
    key_ranges, query_ids, key_ids, dense, seed = (weight if x is None else x for x in options[:5])
    return {
        "q": q, "k": k, "v": v, "weight": weight,
        "key_ranges": key_ranges, "query_ids": query_ids, "key_ids": key_ids, "dense": dense, "seed": seed,
    }  # fmt: skip


def additive_scalars(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, options: AdditiveOptions) -> dict[str, Any]:
    """Sizes, strides and flags of the tensors."""
    (B, H, Tq, D), (G, Tk), Dv, headed = q.shape, k.shape[1:3], v.shape[3], weight.dim() == 2
    return {
        "B": B, "H": H, "G": G, "group": H // G, "pairs": B * H, "Tq": Tq, "Tk": Tk, "D": D, "Dv": Dv,
        **stride_arguments("q", q, "query"), **stride_arguments("k", k, "key"), **stride_arguments("v", v, "key"),
        "weight_head": D if headed else 0, "headed": int(headed), "weights": H if headed else 1,
        **mask_arguments(*options[:4]), "CAUSAL": options.causal, "DROPOUT": options.seed is not None,
        "threshold": int(options.dropout * 2**32), "keep_scale": 1.0 / (1.0 - options.dropout),
        "BD": next_power_of_two(D), "BV": next_power_of_two(Dv), "GPU": q.is_cuda,
    }  # fmt: skip


def tile_arguments(q: Tensor, v: Tensor, tiling: AdditiveTiling) -> dict[str, Any]:
    """The sizes of a tile, for the kernels that work on tiles."""
    D, threads = q.shape[3], tiling.warps * 32
    return {
        "DP": pad_width(D, tiling), "STEP": min(next_power_of_two(D), 64), "VC": min(next_power_of_two(v.shape[3]), 64),
        "BM": tiling.queries, "BN": tiling.keys, "MT": tiling.query_threads, "NT": threads // tiling.query_threads,
        "CHUNK": tiling.chunk, "MAX_SHARED": tiling.max_shared,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def exponentials_launch(q: Tensor, k: Tensor, tiling: AdditiveTiling, scalars: dict[str, Any]) -> KernelLaunch:
    """The launch that computes the exponentials of queries and keys, laid out for a tiling, and their bounds."""
    from foci.kernels.additive.exponentials import prepare_exponentials as kernel

    scalars = scalars | {"ROW_GROUP": tiling.queries}
    return build_kernel_launch(kernel, (count_blocks(q, k, tiling),), scalars, num_warps=4)


def exponentials_workspace(q: Tensor, k: Tensor, weight: Tensor, tiling: AdditiveTiling) -> dict[str, int]:
    """The sizes of the results of `prepare_exponentials`. F must follow E: the backward reads a few floats past E."""
    B, H, Tq, D = q.shape
    q_blocks, k_blocks = B * H * -(-Tq // tiling.queries), B * k.shape[1] * -(-k.shape[2] // tiling.keys)
    width, weights = pad_width(D, tiling), weight.numel() // D
    return {
        "E": q_blocks * width * tiling.queries, "F": k_blocks * width * tiling.keys,
        "table": weights * width, "sizes": weights * width, "constants": weights * 2,
        "q_max": q_blocks * width, "k_max": k_blocks * width, "q_magnitude": q_blocks, "k_magnitude": k_blocks,
    }  # fmt: skip


def count_blocks(q: Tensor, k: Tensor, tiling: AdditiveTiling) -> int:
    """The number of query blocks plus key blocks: the programs of `prepare_exponentials`."""
    B, H, Tq, _ = q.shape
    return B * (H * -(-Tq // tiling.queries) + k.shape[1] * -(-k.shape[2] // tiling.keys))


def pad_width(width: int, tiling: AdditiveTiling) -> int:
    """Round the width up to whole iterations of the loop over features."""
    return -(-width // tiling.chunk) * tiling.chunk


def choose_split_count(
    programs: int, blocks: int, per_multiprocessor: int, device: torch.device, maximum: int = 64
) -> int:
    """Choose how many parts to split the keys into.

    There should be enough programs to fill the GPU, and each should have at least four blocks of keys.
    """
    wanted = count_multiprocessors(device) * per_multiprocessor
    return max(1, min(wanted // programs, blocks // 4, maximum)) if programs * 2 <= wanted else 1


def split_workspace(splits: int, out: Tensor) -> tuple[dict[str, int], dict[str, str]]:
    """The sizes of the partial results of split keys, and which array each output argument of the kernel maps to."""
    if splits == 1:
        return {}, {}
    sizes = {"parts": splits * out.numel(), "part_lse": splits * out.numel() // out.shape[3]}
    return sizes, {"out": "parts", "lse": "part_lse"}


def split_merge_launches(splits: int, out: Tensor) -> list[KernelLaunch]:
    """The launch that merges the partial results of split keys; none for a single split."""
    if splits == 1:
        return []
    from foci.kernels.additive.forward import merge_splits as kernel

    rows, width = out.numel() // out.shape[3], min(next_power_of_two(out.shape[3]), 64)
    scalars = {"splits": splits, "rows": rows, "Dv": out.shape[3], "BS": SPLITS_PER_STEP, "BV": width}
    return [build_kernel_launch(kernel, (rows, -(-out.shape[3] // width)), scalars, num_warps=4)]
