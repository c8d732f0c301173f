"""Run the attention kernels: choose tiles, split the call where row tables need it, plan and launch.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width, Dv value width, W = 2 clip + 1 distances.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.arguments import Tiling, layout_key, stride_arguments, with_contiguous_rows
from foci.gpu.attention import row_table
from foci.gpu.attention.arguments import (
    AttentionOptions,
    CallPart,
    attention_scalars,
    empty_with_layout_of,
    key_head_slices,
    learned_fields,
    plan_key,
    tensor_arguments,
    to_kernel_layout,
)
from foci.gpu.attention.tilings import (
    MAX_BIAS_SEQUENCES,
    MAX_KEY_SPLITS,
    ceil_divide,
    choose_tiling,
    count_key_splits,
    count_query_programs,
    is_packed,
)
from foci.gpu.attention.visible_tiles import document_range_launches, query_tile_launches
from foci.gpu.launcher import (
    KernelLaunch,
    LaunchPlan,
    build_kernel_launch,
    count_multiprocessors,
    get_or_build_plan,
)
from foci.masks.kernel_inputs import UNLIMITED
from foci.runtime.tracing import disable_autocast

# Compile the assertion about the lengths of padded sequences, without those that Triton adds to integer arithmetic.
CHECKED: dict[str, Any] = {"debug": True, "sanitize_overflow": False}


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


def find_forward_plan(part: CallPart, out: Tensor) -> LaunchPlan:
    """The plan of the forward, cached for all calls of the same layout."""
    tiling = choose_tiling("forward", part)
    return get_or_build_plan(plan_key(part, tiling, layout_key(out)), lambda: plan_forward(part, out, tiling))


def forward_part(part: CallPart, out: Tensor) -> None:
    values = part.options.values
    band = None if values is None else part.new_band(-torch.inf)
    # Relative values are added in float32, before the only rounding.
    kernel_out = out if values is None else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    plan = find_forward_plan(part, kernel_out)
    plan(tensor_arguments(part) | {"out": kernel_out, "band": part.peaks if band is None else band})
    if band is not None and values is not None:
        weights = row_table.weights_by_distance(band, part.peaks, part.log_sums)
        row_table.add_matmul(kernel_out, weights, values)
        out.copy_(kernel_out)


def plan_forward(part: CallPart, out: Tensor, tiling: Tiling) -> LaunchPlan:
    """Plan the row table, and the forward kernel with one program per tile of queries."""
    if part.options.table_kind:
        from foci.kernels.distance_bias.forward import distance_bias_forward as kernel
    else:
        from foci.kernels.attention.forward import attention_forward_kernel as kernel

    scalars = attention_scalars(part) | stride_arguments("out", out) | tiling.sizes()
    scalars |= {"BAND": part.options.values is not None, "PACKED": is_packed(part)}
    grid = (count_query_programs(part, tiling),)
    heads = part.q.shape[1]
    splits = 1 if part.options.table_kind else count_key_splits(part)
    if splits > 1:
        return plan_split_forward(part, out, tiling, scalars, splits)
    scalars |= {"SPLIT": False, "out_split": 0, "peaks_split": 0, "split_tiles": 0}
    document_launches, sizes = document_range_launches(part)
    launches = [
        *row_table.fill_row_table_launches(part.options, heads),
        *document_launches,
        *length_check_launches(part, scalars),
        build_kernel_launch(kernel, grid, scalars, **tiling.options()),
    ]
    return LaunchPlan(row_table.row_table_workspace(part.options, heads) | sizes, part.q.device, launches)


def length_check_launches(part: CallPart, scalars: dict[str, Any]) -> list[KernelLaunch]:
    """The launch that asserts that the lengths of padded sequences are valid; none without lengths."""
    if part.options.lengths is None:
        return []
    from foci.kernels.attention.tile import check_lengths

    return [build_kernel_launch(check_lengths, (part.options.lengths.shape[0],), scalars, num_warps=1, **CHECKED)]


def plan_split_forward(part: CallPart, out: Tensor, tiling: Tiling, scalars: dict[str, Any], splits: int) -> LaunchPlan:
    """Plan the forward kernel with one program per split of the keys, and the merge of its results."""
    from foci.kernels.attention.forward import attention_forward_kernel, merge_attention_splits

    (_, H, Tq, _), Dv, rows = part.q.shape, part.v.shape[3], part.pairs * part.q.shape[2]
    split_scalars = scalars | {
        "SPLIT": True, "split_tiles": ceil_divide(ceil_divide(part.k.shape[2], tiling.keys), splits),
        "out_split": rows * Dv, "out_batch": H * Tq * Dv, "out_head": Tq * Dv, "out_row": Dv,
        "peaks_split": rows, "peaks_batch": H * Tq, "peaks_head": Tq,
    }  # fmt: skip
    grid = (count_query_programs(part, tiling), splits)
    names = {"out": "split_out", "peaks": "split_peaks", "log_sums": "split_log_sums"}
    merge_scalars = scalars | {"splits": splits, "BS": MAX_KEY_SPLITS}
    checked = CHECKED if part.options.padded else {}
    document_launches, sizes = document_range_launches(part)
    launches = [
        *document_launches,
        build_kernel_launch(attention_forward_kernel, grid, split_scalars, names, **tiling.options()),
        build_kernel_launch(merge_attention_splits, (rows,), merge_scalars, num_warps=4, **checked),
    ]
    sizes |= {"split_out": splits * rows * Dv, "split_peaks": splits * rows, "split_log_sums": splits * rows}
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
    d_sinks: Tensor | None  # by tile
    d_bias: Tensor | None
    d_by_bucket: Tensor | None


def allocate_intermediates(part: CallPart, tensors: BackwardTensors, tiling: Tiling) -> BackwardIntermediates:
    options, learned, empty = part.options, tensors.learned, part.peaks.new_empty
    query_tiles = ceil_divide(part.q.shape[2], tiling.queries)
    return BackwardIntermediates(
        gains=tensors.d_out.float() @ options.values.mT if options.values is not None else None,
        d_table=part.new_band(0.0) if options.table_kind == 1 or "table" in learned else None,
        band=part.new_band(0.0) if options.values is not None else None,
        d_slopes=empty(*part.q.shape[:2], query_tiles) if "slopes" in learned else None,
        d_sinks=empty(*part.q.shape[:2], query_tiles) if "sink" in learned else None,
        d_bias=allocate_bias_gradient(options) if "bias" in learned else None,
        d_by_bucket=empty(options.table.shape) if options.table is not None and "table" in learned else None,
    )


def allocate_bias_gradient(options: AttentionOptions) -> Tensor | None:
    """A tensor for the gradient of the bias, with zeros if a mask may hide entries: these are not written."""
    if options.bias is None:
        return None
    tensors = options.lengths, options.key_ranges, options.query_ids, options.dense
    is_masked = any(x is not None for x in tensors) or min(options.left, options.right, options.stop) < UNLIMITED
    return (torch.zeros if is_masked else torch.empty)(
        options.bias.shape, dtype=options.bias.dtype, device=options.bias.device
    )


def plan_few_query_backward(part: CallPart, tensors: BackwardTensors) -> LaunchPlan:
    """Plan one pass over the keys, and the sum of its query gradients."""
    from foci.kernels.attention.few_queries import few_query_gradients, sum_query_gradient_splits

    tiling, splits, (_, _, Tq, D) = choose_tiling("queries", part), count_key_splits(part), part.q.shape
    scalars = attention_scalars(part) | tiling.sizes()
    for name in ("out", "d_out", "d_q", "d_k", "d_v"):
        scalars |= stride_arguments(name, getattr(tensors, name))
    scalars |= {"split_tiles": ceil_divide(ceil_divide(part.k.shape[2], tiling.keys), splits), "splits": splits}
    scalars |= {"LSE_GRADIENT": tensors.d_log_sums is not None, "SINK_GRADIENT": bool(tensors.learned)}
    scalars |= {"BS": MAX_KEY_SPLITS}
    document_launches, sizes = document_range_launches(part)
    launches = [
        *document_launches,
        build_kernel_launch(
            few_query_gradients, (count_query_programs(part, tiling), splits), scalars, **tiling.options()
        ),
        build_kernel_launch(sum_query_gradient_splits, (part.pairs * Tq,), scalars, num_warps=4),
    ]
    return LaunchPlan(sizes | {"split_d_q": splits * part.pairs * Tq * D}, part.q.device, launches)


def few_query_backward(part: CallPart, tensors: BackwardTensors) -> dict[str, Tensor]:
    """Run the pass of few queries; return the gradient of the sink if it is learned."""
    key = plan_key(part, few_query_backward, *map(layout_key, tensors[:6]), tuple(tensors.learned))
    plan = get_or_build_plan(key, lambda: plan_few_query_backward(part, tensors))
    d_log_sums = part.peaks if tensors.d_log_sums is None else tensors.d_log_sums
    d_sinks = part.peaks if not tensors.learned else torch.empty_like(part.peaks)
    plan(
        tensor_arguments(part)
        | {"out": tensors.out, "d_out": tensors.d_out, "d_log_sums": d_log_sums, "d_sinks": d_sinks}
        | {"d_q": tensors.d_q, "d_k": tensors.d_k, "d_v": tensors.d_v}
    )
    return {"sink": d_sinks.sum((0, 2))} if tensors.learned else {}


def backward_part(part: CallPart, tensors: BackwardTensors) -> dict[str, Tensor]:
    """Run both passes of a part; return its gradients of the learned tensors."""
    if is_packed(part) and {*tensors.learned} <= {"sink"}:
        return few_query_backward(part, tensors)
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
    tilings: tuple[Tiling, Tiling],
) -> LaunchPlan:
    """Plan the tables, the pass over queries, the pass over keys, and the bucket sums."""
    query_gradients, key_gradients = backward_kernels(part.options)
    options, H, (by_queries, by_keys) = part.options, part.q.shape[1], tilings
    bucket_launches, bucket_sizes = (
        ([], {}) if intermediates.d_by_bucket is None else row_table.bucket_gradient_launches(options, part.q)
    )
    scalars = attention_scalars(part) | stride_arguments("out", tensors.out) | stride_arguments("d_out", tensors.d_out)
    scalars |= (
        stride_arguments("d_q", d_q) | stride_arguments("d_k", tensors.d_k) | stride_arguments("d_v", tensors.d_v)
    )
    shared = adds_sequences(part, intermediates.d_bias, by_queries)
    per_sequence = options.key_ranges is not None and options.key_ranges.shape[0] > 1
    scalars |= {
        "query_tiles_batch": 5 * ceil_divide(part.k.shape[2], by_keys.keys) * per_sequence,
        "common_keys_batch": 2 * ceil_divide(part.q.shape[2], by_keys.queries) * per_sequence,
        "GROUPED": part.k.shape[1] != H, "VALUED": options.values is not None,
        "TABLE_GRADIENT": intermediates.d_table is not None,
        "BIAS_GRADIENT": is_whole_matrix(part, intermediates.d_bias) or shared, "SHARED_BIAS": shared,
        "SLOPE_GRADIENT": intermediates.d_slopes is not None,
        "SINK_GRADIENT": intermediates.d_sinks is not None, "LSE_GRADIENT": tensors.d_log_sums is not None,
    }  # fmt: skip
    sequences = part.q.shape[0] if shared else 1
    query_grid = (ceil_divide(part.q.shape[2], by_queries.queries) * part.pairs // sequences,)
    key_grid = (ceil_divide(part.k.shape[2], by_keys.keys) * part.k.shape[0] * part.k.shape[1],)
    query_scalars, key_scalars = scalars | by_queries.sizes(), scalars | by_keys.sizes()
    document_launches, sizes = document_range_launches(part)
    range_launches, range_sizes = query_tile_launches(part, scalars, by_keys)
    launches = [
        *row_table.fill_row_table_launches(options, H),
        *document_launches,
        *range_launches,
        *(
            build_kernel_launch(query_gradients, query_grid, query_scalars | {"sequence": b}, **by_queries.options())
            for b in range(sequences)
        ),
        build_kernel_launch(key_gradients, key_grid, key_scalars, **by_keys.options()),
        *bucket_launches,
        *([] if scalars["BIAS_GRADIENT"] else bias_gradient_launches(part, intermediates, scalars)),
    ]
    # The kernels round the number of rows of a head up to a multiple of 128.
    rows = part.pairs * ceil_divide(part.q.shape[2], 128) * 128
    sizes |= row_table.row_table_workspace(options, H) | bucket_sizes | range_sizes
    sizes |= {"delta": rows, "row_peaks": rows, "row_log_sums": rows if scalars["EXACT"] else 0}
    return LaunchPlan(sizes, part.q.device, launches)


def is_whole_matrix(part: CallPart, bias: Tensor | None) -> bool:
    """Whether the bias has an entry of its own for each entry of the matrix."""
    return bias is not None and bias.shape == (*part.q.shape[:3], part.k.shape[2])


def adds_sequences(part: CallPart, bias: Tensor | None, tiling: Tiling) -> bool:
    """Whether a few sequences share the bias, which add their gradients in turns: one is enough for the GPU."""
    (B, H, Tq, _), Tk = part.q.shape, part.k.shape[2]
    if bias is None or bias.shape != (1, H, Tq, Tk) or not 1 < B <= MAX_BIAS_SEQUENCES:
        return False
    return ceil_divide(Tq, tiling.queries) * H >= 2 * count_multiprocessors(part.q.device)


def bias_gradient_launches(
    part: CallPart, intermediates: BackwardIntermediates, scalars: dict[str, Any]
) -> list[KernelLaunch]:
    """The pass over a bias that several heads, sequences, queries or keys share."""
    d_bias = intermediates.d_bias
    if d_bias is None:
        return []
    from foci.kernels.attention.backward import attention_bias_gradients

    tiling, (batches, heads, rows, columns) = choose_tiling("bias", part), d_bias.shape
    scalars = scalars | {"B": part.q.shape[0], "bias_batches": batches, "bias_heads": heads}
    same_mask = part.options.lengths is part.options.key_ranges is part.options.query_ids is None
    is_tiled = same_mask and (rows, columns) == (part.q.shape[2], part.k.shape[2])
    scalars |= {"bias_rows": rows, "bias_columns": columns, "TILED": is_tiled} | tiling.sizes()
    grid = (batches * heads * ceil_divide(rows, tiling.queries) * ceil_divide(columns, tiling.keys),)
    return [build_kernel_launch(attention_bias_gradients, grid, scalars, **tiling.options())]


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
    """The gradients of table, keys, values, slopes, sink and bias, from one part of the call."""
    options, gradients = part.options, {}
    if intermediates.d_by_bucket is not None:
        gradients["table"] = intermediates.d_by_bucket
    if intermediates.d_slopes is not None:
        gradients["slopes"] = intermediates.d_slopes.sum((0, 2))
    if intermediates.d_sinks is not None:
        gradients["sink"] = intermediates.d_sinks.sum((0, 2))
    if intermediates.d_bias is not None:
        gradients["bias"] = intermediates.d_bias
    if "keys" in tensors.learned and options.keys is not None and intermediates.d_table is not None:
        gradients["keys"] = row_table.table_gradient(options.keys, intermediates.d_table, part.q)
    if "values" in tensors.learned and options.values is not None and intermediates.band is not None:
        gradients["values"] = row_table.table_gradient(options.values, intermediates.band, tensors.d_out)
    return gradients
