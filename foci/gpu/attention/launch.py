"""Run the attention kernels: choose tiles, split the call where row tables need it, plan and launch.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width, W = 2 clip + 1 distances.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.attention import row_table
from foci.gpu.attention.arguments import (
    AttentionOptions,
    CallPart,
    attention_scalars,
    empty_with_layout_of,
    key_head_slices,
    learned_fields,
    plan_key,
    stride_arguments,
    tensor_arguments,
    to_kernel_layout,
    with_contiguous_rows,
)
from foci.gpu.launcher import LaunchPlan, build_kernel_launch, get_or_build_plan, layout_key, next_power_of_two
from foci.runtime.tracing import disable_autocast


class AttentionTiling(NamedTuple):
    """The tile sizes and launch options of one kernel."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # maximum per thread, so that more programs share a multiprocessor

    def sizes(self) -> dict[str, Any]:
        return {"BM": self.queries, "BN": self.keys}

    def options(self) -> dict[str, Any]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | limit


# By pass and by the larger of D and Dv, for 16-bit inputs without a row table.
ATTENTION_TILINGS = {
    "forward": {
        64: AttentionTiling(128, 64, 8, 3, 128),
        128: AttentionTiling(128, 64, 8, 3),
        256: AttentionTiling(128, 64, 8, 2),
    },
    "queries": {
        64: AttentionTiling(64, 64, 4, 3),
        128: AttentionTiling(128, 64, 8, 2),
        256: AttentionTiling(64, 32, 4, 2),
    },
    "keys": {
        64: AttentionTiling(64, 64, 4, 3),
        128: AttentionTiling(32, 64, 4, 3),
        256: AttentionTiling(32, 64, 8, 2),
    },
}
# The same with a row table. Near the diagonal a program also holds a tile of values from
# the row table: larger tiles than these spill registers there.
ROW_TABLE_TILINGS = {
    "forward": {
        64: AttentionTiling(128, 64, 8, 3, 128),
        128: AttentionTiling(128, 64, 8, 2),
        256: AttentionTiling(128, 64, 8, 2),
    },
    "queries": {
        64: AttentionTiling(64, 64, 4, 2, 168),
        128: AttentionTiling(128, 64, 8, 2),
        256: AttentionTiling(64, 32, 4, 2),
    },
    "keys": {
        64: AttentionTiling(32, 64, 4, 3),
        128: AttentionTiling(32, 128, 8, 2),
        256: AttentionTiling(32, 64, 8, 2),
    },
}
# Products of float32 do not run on tensor cores and read twice the memory.
FLOAT32_TILINGS = {
    "forward": {
        64: AttentionTiling(64, 32, 4, 2),
        128: AttentionTiling(64, 32, 8, 2),
        256: AttentionTiling(64, 32, 8, 1),
    },
    "queries": {
        64: AttentionTiling(64, 32, 4, 2),
        128: AttentionTiling(64, 32, 8, 1),
        256: AttentionTiling(32, 16, 4, 1),
    },
    "keys": {
        64: AttentionTiling(32, 64, 8, 2),
        128: AttentionTiling(32, 64, 8, 1),
        256: AttentionTiling(16, 32, 4, 1),
    },
}
# Calls with at most this many queries use tiles of this size: one more kernel per kind of call, not one per length.
FEW_QUERIES = 16
# The keys of few queries are split among at most MAX_KEY_SPLITS programs, of at least MIN_SPLIT_KEYS keys each.
MAX_KEY_SPLITS = 64
MIN_SPLIT_KEYS = 512
# Small, because the interpreter also spends time on padding.
INTERPRETER_TILES = AttentionTiling(16, 16, 4, 1)


def choose_tiling(name: str, part: CallPart) -> AttentionTiling:
    """Choose the tiles of a pass: "forward", "queries" or "keys". Few queries get small tiles."""
    q, v, options = part.q, part.v, part.options
    if q.device.type == "cpu":
        return INTERPRETER_TILES
    width = max(next_power_of_two(q.shape[-1]), next_power_of_two(v.shape[-1]), 64)
    half_precision = ROW_TABLE_TILINGS if options.table_kind else ATTENTION_TILINGS
    tiling = (FLOAT32_TILINGS if q.dtype == torch.float32 else half_precision)[name][width]
    if q.shape[2] <= FEW_QUERIES:
        return tiling._replace(queries=FEW_QUERIES, warps=4, registers=None)
    # Under a mask the ends of the rows need registers, too. With three stages some spilled in every tile; with two none
    # do, and as many programs share a multiprocessor.
    if name == "forward" and options.table_kind == 2 and (options.causal or options.key_ranges is not None):
        tiling = tiling._replace(stages=min(tiling.stages, 2))
    # Relative values and dense masks hold one more tile in registers.
    needs_registers = options.values is not None or options.dense is not None
    return tiling._replace(registers=None) if needs_registers else tiling


def split_call(
    q: Tensor, k: Tensor, v: Tensor, peaks: Tensor, log_sums: Tensor, options: AttentionOptions, bands: int
) -> Iterator[CallPart]:
    """Split the call so that the row table of a part and `bands` more tensors of its size fit; usually one part."""
    group = q.shape[1] // k.shape[1]
    row_bytes = 4 * options.distances * (bands + (options.table_kind == 1))
    all_slices = list(row_table.split_by_memory(q, group, row_bytes))
    if len(all_slices) == 1:
        yield CallPart(None, q, k, v, peaks, log_sums, options, row_table.compute_row_table(q, options))
        return
    for slices in all_slices:
        own_options, key_slices = options.select(slices), key_head_slices(slices, group)
        tensors = q[slices], k[key_slices], v[key_slices], peaks[slices], log_sums[slices]
        yield CallPart(slices, *tensors, own_options, row_table.compute_row_table(q[slices], own_options))


def forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output (B, H, Tq, Dv) and the two parts of the log-sum-exp in base 2, (B, H, Tq) each."""
    q, k, v, options = to_kernel_layout(q, k, v, options)
    out, peaks, log_sums = allocate_results(q, v)
    for part in split_call(q, k, v, peaks, log_sums, options, bands=options.values is not None):
        forward_part(part, part.select(out))
    return out, peaks, log_sums


def allocate_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized output, in the memory layout of the queries, and the two parts of the log-sum-exp."""
    same = q.shape[-1] == v.shape[-1]
    out = empty_with_layout_of(with_contiguous_rows(q)) if same else q.new_empty(*q.shape[:3], v.shape[-1])
    rows = [torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2)]
    return out, rows[0], rows[1]


def forward_part(part: CallPart, out: Tensor) -> None:
    values, tiling = part.options.values, choose_tiling("forward", part)
    band = None if values is None else part.new_band(-torch.inf)
    # Relative values are added in float32, before the only rounding.
    kernel_out = out if values is None else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    plan = get_or_build_plan(
        plan_key(part, tiling, layout_key(kernel_out)), lambda: plan_forward(part, kernel_out, tiling)
    )
    plan(tensor_arguments(part) | {"out": kernel_out, "band": part.peaks if band is None else band})
    if band is not None and values is not None:
        weights = row_table.weights_by_distance(band, part.peaks, part.log_sums)
        row_table.add_matmul(kernel_out, weights, values)
        out.copy_(kernel_out)


def plan_forward(part: CallPart, out: Tensor, tiling: AttentionTiling) -> LaunchPlan:
    """Plan the row table, and the forward kernel with one program per tile of queries."""
    if part.options.table_kind:
        from foci.kernels.distance_bias.forward import distance_bias_forward as kernel
    else:
        from foci.kernels.attention.forward import attention_forward_kernel as kernel

    scalars = attention_scalars(part) | stride_arguments("out", out) | tiling.sizes()
    scalars |= {"BAND": part.options.values is not None}
    grid = (ceil_divide(part.q.shape[2], tiling.queries) * part.pairs,)
    heads = part.q.shape[1]
    splits = 1 if part.options.table_kind else count_key_splits(part)
    if splits > 1:
        return plan_split_forward(part, out, tiling, scalars, splits)
    scalars |= {"SPLIT": False, "out_split": 0, "peaks_split": 0, "split_tiles": 0}
    launches = [
        *row_table.fill_row_table_launches(part.options, heads),
        build_kernel_launch(kernel, grid, scalars, **tiling.options()),
    ]
    return LaunchPlan(row_table.row_table_workspace(part.options, heads), part.q.device, launches)


def count_key_splits(part: CallPart) -> int:
    """The number of programs that share the keys of one tile of queries; it depends on the lengths only."""
    queries, keys = part.q.shape[2], part.k.shape[2]
    return 1 if queries > FEW_QUERIES else max(1, min(keys // MIN_SPLIT_KEYS, MAX_KEY_SPLITS))


def plan_split_forward(
    part: CallPart, out: Tensor, tiling: AttentionTiling, scalars: dict[str, Any], splits: int
) -> LaunchPlan:
    """Plan the forward kernel with one program per split of the keys, and the merge of its results."""
    from foci.kernels.attention.forward import attention_forward_kernel, merge_attention_splits

    (_, H, Tq, _), Dv, rows = part.q.shape, part.v.shape[3], part.pairs * part.q.shape[2]
    split_scalars = scalars | {
        "SPLIT": True, "split_tiles": ceil_divide(ceil_divide(part.k.shape[2], tiling.keys), splits),
        "out_split": rows * Dv, "out_batch": H * Tq * Dv, "out_head": Tq * Dv, "out_row": Dv,
        "peaks_split": rows, "peaks_batch": H * Tq, "peaks_head": Tq,
    }  # fmt: skip
    grid = (ceil_divide(Tq, tiling.queries) * part.pairs, splits)
    names = {"out": "split_out", "peaks": "split_peaks", "log_sums": "split_log_sums"}
    merge_scalars = scalars | {"splits": splits, "BS": MAX_KEY_SPLITS}
    launches = [
        build_kernel_launch(attention_forward_kernel, grid, split_scalars, names, **tiling.options()),
        build_kernel_launch(merge_attention_splits, (rows,), merge_scalars, num_warps=4),
    ]
    sizes = {"split_out": splits * rows * Dv, "split_peaks": splits * rows, "split_log_sums": splits * rows}
    return LaunchPlan(sizes, part.q.device, launches)


class BackwardTensors(NamedTuple):
    """The tensors of one part of the backward besides its inputs: results, their gradients, gradients to write."""

    out: Tensor
    d_out: Tensor
    d_log_sums: Tensor | None
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    learned: list[str]


@disable_autocast
def backward(
    d_out: Tensor,
    d_log_sums: Tensor | None,
    out: Tensor,
    peaks: Tensor,
    log_sums: Tensor,
    bias_gradients: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
) -> list[Tensor]:
    """Compute the gradients of q, k, v and of the learned tensors; d_log_sums is that of the log-sum-exp in base 2."""
    q, k, v, options = to_kernel_layout(q, k, v, options)
    d_out, d_log_sums = with_contiguous_rows(d_out), None if d_log_sums is None else d_log_sums.contiguous()
    names = learned_fields(options, bias_gradients)
    gradients = [empty_with_layout_of(x) for x in (q, k, v)]
    part_gradients: list[tuple[CallPart, dict[str, Tensor]]] = []
    bands = 3 if options.values is not None else int(options.table_kind == 1 or "table" in names)
    for part in split_call(q, k, v, peaks, log_sums, options, bands):
        tensors = BackwardTensors(
            part.select(out), part.select(d_out), None if d_log_sums is None else part.select(d_log_sums),
            part.select(gradients[0]), part.select_key_heads(gradients[1]), part.select_key_heads(gradients[2]), names,
        )  # fmt: skip
        part_gradients.append((part, backward_part(part, tensors)))
    return [*gradients, *(sum_part_gradients(name, getattr(options, name), part_gradients) for name in names)]


def allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, bias_gradients: bool
) -> list[Tensor]:
    """Uninitialized tensors like those that `backward` returns."""
    learned = [getattr(options, name) for name in learned_fields(options, bias_gradients)]
    gradients = (empty_with_layout_of(with_contiguous_rows(x)) for x in (q, k, v))
    return [*gradients, *(x.new_empty(x.shape) for x in learned)]


def sum_part_gradients(name: str, learned: Tensor, part_gradients: list[tuple[CallPart, dict[str, Tensor]]]) -> Tensor:
    """Sum the gradients of a learned tensor over all parts of the call."""
    if len(part_gradients) == 1:
        return part_gradients[0][1][name]
    total = torch.zeros(learned.shape, dtype=learned.dtype, device=learned.device)
    for part, gradients in part_gradients:
        assert part.slices is not None
        heads = part.slices[1]
        headless = name in {"keys", "values"} and learned.dim() == 2
        own = total if headless else total[:, heads] if name == "table" else total[heads]
        own += gradients[name]
    return total


class BackwardIntermediates(NamedTuple):
    """Tensors between the backward kernels and the gradients of the learned tensors; None if not needed.

    The kernels read `gains`, (B, H, Tq, W): d_out times what a weight at each distance adds to the output.
    They write the rest.
    """

    gains: Tensor | None
    d_table: Tensor | None  # of the row table
    band: Tensor | None  # the weights by distance
    d_slopes: Tensor | None  # by tile
    d_by_bucket: Tensor | None


def allocate_intermediates(part: CallPart, tensors: BackwardTensors, tiling: AttentionTiling) -> BackwardIntermediates:
    options, learned, empty = part.options, tensors.learned, part.peaks.new_empty
    query_tiles = ceil_divide(part.q.shape[2], tiling.queries)
    return BackwardIntermediates(
        gains=tensors.d_out.float() @ options.values.mT if options.values is not None else None,
        d_table=part.new_band(0.0) if options.table_kind == 1 or "table" in learned else None,
        band=part.new_band(0.0) if options.values is not None else None,
        d_slopes=empty(*part.q.shape[:2], query_tiles) if "slopes" in learned else None,
        d_by_bucket=empty(options.table.shape) if options.table is not None and "table" in learned else None,
    )


def backward_part(part: CallPart, tensors: BackwardTensors) -> dict[str, Tensor]:
    """Run both passes of a part; return its gradients of the learned tensors."""
    options, tilings = part.options, (choose_tiling("queries", part), choose_tiling("keys", part))
    intermediates = allocate_intermediates(part, tensors, tilings[0])
    in_float32 = options.table_kind == 1
    d_q = torch.empty(part.q.shape, dtype=torch.float32, device=part.q.device) if in_float32 else tensors.d_q
    key = plan_key(part, tilings, layout_key(d_q), *map(layout_key, tensors[:6]), tuple(tensors.learned))
    plan = get_or_build_plan(key, lambda: plan_backward(part, tensors, intermediates, d_q, tilings))
    optional = intermediates._asdict() | {"d_log_sums": tensors.d_log_sums, "query_tiles": None, "common_keys": None}
    plan(
        tensor_arguments(part)
        | {"out": tensors.out, "d_out": tensors.d_out, "d_q": d_q, "d_k": tensors.d_k, "d_v": tensors.d_v}
        | {name: part.peaks if x is None else x for name, x in optional.items()}
    )
    if options.keys is not None and intermediates.d_table is not None:
        row_table.add_matmul(d_q, intermediates.d_table, options.keys)
        tensors.d_q.copy_(d_q)
    return learned_gradients(part, tensors, intermediates)


def plan_backward(
    part: CallPart,
    tensors: BackwardTensors,
    intermediates: BackwardIntermediates,
    d_q: Tensor,
    tilings: tuple[AttentionTiling, AttentionTiling],
) -> LaunchPlan:
    """Plan the tables, the pass over queries, the pass over keys, and the bucket sums."""
    query_gradients, key_gradients = backward_kernels(part.options)
    options, H, (by_queries, by_keys) = part.options, part.q.shape[1], tilings
    range_launches, sizes = row_table.tile_range_launches(
        options.key_ranges, part.k.shape[2], by_keys.queries, by_keys.keys
    )
    bucket_launches, bucket_sizes = (
        ([], {}) if intermediates.d_by_bucket is None else row_table.bucket_gradient_launches(options, part.q)
    )
    scalars = attention_scalars(part) | stride_arguments("out", tensors.out) | stride_arguments("d_out", tensors.d_out)
    scalars |= (
        stride_arguments("d_q", d_q) | stride_arguments("d_k", tensors.d_k) | stride_arguments("d_v", tensors.d_v)
    )
    per_sequence = options.key_ranges is not None and options.key_ranges.shape[0] > 1
    scalars |= {
        "query_tiles_batch": 4 * ceil_divide(part.k.shape[2], by_keys.keys) * per_sequence,
        "common_keys_batch": 2 * ceil_divide(part.q.shape[2], by_keys.queries) * per_sequence,
        "GROUPED": part.k.shape[1] != H, "VALUED": options.values is not None,
        "TABLE_GRADIENT": intermediates.d_table is not None,
        "SLOPE_GRADIENT": intermediates.d_slopes is not None, "LSE_GRADIENT": tensors.d_log_sums is not None,
    }  # fmt: skip
    query_grid = (ceil_divide(part.q.shape[2], by_queries.queries) * part.pairs,)
    key_grid = (ceil_divide(part.k.shape[2], by_keys.keys) * part.k.shape[0] * part.k.shape[1],)
    query_scalars, key_scalars = scalars | by_queries.sizes(), scalars | by_keys.sizes()
    launches = [
        *row_table.fill_row_table_launches(options, H),
        *range_launches,
        build_kernel_launch(query_gradients, query_grid, query_scalars, **by_queries.options()),
        build_kernel_launch(key_gradients, key_grid, key_scalars, **by_keys.options()),
        *bucket_launches,
    ]
    sizes |= row_table.row_table_workspace(options, H) | bucket_sizes | {"delta": part.pairs * part.q.shape[2]}
    return LaunchPlan(sizes, part.q.device, launches)


def backward_kernels(options: AttentionOptions) -> tuple[Any, Any]:
    """The kernels of the pass over queries and of the pass over keys."""
    if options.table_kind:
        from foci.kernels.distance_bias.backward import distance_bias_key_gradients, distance_bias_query_gradients

        return distance_bias_query_gradients, distance_bias_key_gradients
    from foci.kernels.attention.backward import attention_key_gradients, attention_query_gradients

    return attention_query_gradients, attention_key_gradients


def learned_gradients(
    part: CallPart, tensors: BackwardTensors, intermediates: BackwardIntermediates
) -> dict[str, Tensor]:
    """The gradients of table, keys, values and slopes, from one part of the call."""
    options, gradients = part.options, {}
    if intermediates.d_by_bucket is not None:
        gradients["table"] = intermediates.d_by_bucket
    if intermediates.d_slopes is not None:
        gradients["slopes"] = intermediates.d_slopes.sum((0, 2))
    if "keys" in tensors.learned and options.keys is not None and intermediates.d_table is not None:
        gradients["keys"] = row_table.table_gradient(options.keys, intermediates.d_table, part.q)
    if "values" in tensors.learned and options.values is not None and intermediates.band is not None:
        gradients["values"] = row_table.table_gradient(options.values, intermediates.band, tensors.d_out)
    return gradients


def ceil_divide(length: int, size: int) -> int:
    return -(-length // size)
