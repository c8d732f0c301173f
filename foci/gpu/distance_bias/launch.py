"""Launches the kernels of attention with a bias by distance, part by part.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width, W = 2 clip + 1 distances.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.distance_bias import row_table, tables
from foci.gpu.distance_bias.row_table import DistanceBiasOptions, HeadSlices
from foci.gpu.launcher import LaunchPlan, batch_stride, build_kernel_launch, get_or_build_plan, layout_key
from foci.runtime.checks import disable_autocast


class DistanceBiasTiling(NamedTuple):
    """How a kernel is launched: queries and keys of a tile, warps, and loads that are under way at a time."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # the most that a thread may take, so that more programs share a processor

    def sizes(self) -> dict[str, Any]:
        return {"BM": self.queries, "BN": self.keys}

    def options(self) -> dict[str, Any]:
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | most


# By pass and by the wider of D and Dv, for 16-bit inputs. Near the diagonal a program holds a tile of numbers that it
# looked up besides all else: larger tiles than these spill registers there.
HALF_PRECISION_TILINGS = {
    "forward": {
        64: DistanceBiasTiling(128, 64, 8, 3, 128),
        128: DistanceBiasTiling(128, 64, 8, 2),
        256: DistanceBiasTiling(128, 64, 8, 2),
    },
    "queries": {
        64: DistanceBiasTiling(64, 64, 4, 2, 168),
        128: DistanceBiasTiling(128, 64, 8, 2),
        256: DistanceBiasTiling(64, 32, 4, 2),
    },
    "keys": {
        64: DistanceBiasTiling(32, 64, 4, 3),
        128: DistanceBiasTiling(32, 128, 8, 2),
        256: DistanceBiasTiling(32, 64, 8, 2),
    },
}
# Products of float32 are taken by the plain units, from twice the memory.
FLOAT32_TILINGS = {
    "forward": {
        64: DistanceBiasTiling(64, 32, 4, 2),
        128: DistanceBiasTiling(64, 32, 8, 2),
        256: DistanceBiasTiling(64, 32, 8, 1),
    },
    "queries": {
        64: DistanceBiasTiling(64, 32, 4, 2),
        128: DistanceBiasTiling(64, 32, 8, 1),
        256: DistanceBiasTiling(32, 16, 4, 1),
    },
    "keys": {
        64: DistanceBiasTiling(32, 64, 8, 2),
        128: DistanceBiasTiling(32, 64, 8, 1),
        256: DistanceBiasTiling(16, 32, 4, 1),
    },
}
# Small ones for the interpreter, which goes through them number by number.
INTERPRETER_TILES = DistanceBiasTiling(16, 16, 4, 1)


def padded(width: int) -> int:
    """A power of two, which a kernel's tiles need, of at least 16, which its products need."""
    return max(16, 1 << (width - 1).bit_length())


class CallPart(NamedTuple):
    """Some sequences and heads of a call, with the row table that is theirs."""

    place: HeadSlices | None  # all of them
    q: Tensor
    k: Tensor
    v: Tensor
    peaks: Tensor
    extras: Tensor
    terms: DistanceBiasOptions
    rows: Tensor | None  # the row table of vectors

    @property
    def first(self) -> tuple[int, int]:
        """The first sequence and head."""
        return (0, 0) if self.place is None else (self.place[0].start, self.place[1].start)

    @property
    def pairs(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    def of(self, x: Tensor) -> Tensor:
        """The same part of a tensor with the queries' heads."""
        return x if self.place is None else x[self.place]

    def of_keys(self, x: Tensor) -> Tensor:
        """The same part of a tensor with the keys' heads."""
        return x if self.place is None else x[key_head_slices(self.place, self.q.shape[1] // self.k.shape[1])]

    def band(self, fill: float) -> Tensor:
        """One number per query and distance."""
        sizes = (*self.q.shape[:3], self.terms.width)
        return torch.full(sizes, fill, dtype=torch.float32, device=self.q.device)


def choose_tiling(name: str, part: CallPart) -> DistanceBiasTiling:
    """The tiles of a pass; few queries get small ones."""
    q, v, terms = part.q, part.v, part.terms
    if q.device.type == "cpu":
        return INTERPRETER_TILES
    width = max(padded(q.shape[-1]), padded(v.shape[-1]), 64)
    found = (FLOAT32_TILINGS if q.dtype == torch.float32 else HALF_PRECISION_TILINGS)[name][width]
    few = padded(q.shape[2])
    if few < min(found.queries, 64):
        return found._replace(queries=few, warps=4, registers=None)
    # Under a mask the ends of the rows want registers too: with a third load under way some went to memory and back in
    # every tile, with two none does, and as many programs share a processor.
    if name == "forward" and terms.kind == 2 and (terms.causal or terms.spans is not None):
        found = found._replace(stages=min(found.stages, 2))
    # These hold yet another tile.
    crowded = terms.values is not None or terms.dense is not None
    return found._replace(registers=None) if crowded else found


def split_call(
    q: Tensor, k: Tensor, v: Tensor, peaks: Tensor, extras: Tensor, terms: DistanceBiasOptions, bands: int
) -> Iterator[CallPart]:
    """The call in parts, each with room for its row table and `bands` more; mostly there is one."""
    group, row_bytes = q.shape[1] // k.shape[1], 4 * terms.width * (bands + (terms.kind == 1))
    found = list(row_table.split_by_memory(q, group, row_bytes))
    if len(found) == 1:
        yield CallPart(None, q, k, v, peaks, extras, terms, row_table.compute_row_table(q, terms))
        return
    for place in found:
        some, shared = terms.part(place), key_head_slices(place, group)
        inputs = q[place], k[shared], v[shared], peaks[place], extras[place]
        yield CallPart(place, *inputs, some, row_table.compute_row_table(q[place], some))


def key_head_slices(place: HeadSlices, group: int) -> HeadSlices:
    """The key heads of some heads."""
    batches, heads = place
    return batches, slice(heads.start // group, heads.stop // group)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: DistanceBiasOptions) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, terms = to_kernel_layout(q, k, v, terms)
    out, peaks, extras = allocate_results(q, v)
    for part in split_call(q, k, v, peaks, extras, terms, bands=terms.values is not None):
        forward_part(part, part.of(out))
    return out, peaks, extras


def forward_part(part: CallPart, out: Tensor) -> None:
    values, tiles = part.terms.values, choose_tiling("forward", part)
    band = None if values is None else part.band(-torch.inf)
    # What the values per distance add comes on top, before the one rounding.
    into = out if values is None else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    launches = get_or_build_plan(plan_key(part, tiles, layout_key(into)), lambda: plan_forward(part, into, tiles))
    launches(tensor_arguments(part) | {"out": into, "band": part.peaks if band is None else band})
    if band is not None and values is not None:
        row_table.add_matmul(into, row_table.weights_by_distance(band, part.peaks, part.extras), values)
        out.copy_(into)


def plan_forward(part: CallPart, out: Tensor, tiles: DistanceBiasTiling) -> LaunchPlan:
    """The forward's launches: the row table, and every tile of queries over the keys."""
    from foci.kernels.distance_bias.forward import distance_bias_forward as kernel

    numbers = (
        scalar_arguments(part) | stride_arguments("out", out) | tiles.sizes() | {"BAND": part.terms.values is not None}
    )
    grid = (ceil_divide(part.q.shape[2], tiles.queries) * part.pairs,)
    steps = [
        *tables.fill_row_table_launches(part.terms, part.q.shape[1]),
        build_kernel_launch(kernel, grid, numbers, **tiles.options()),
    ]
    return LaunchPlan(tables.row_table_workspace(part.terms, part.q.shape[1]), part.q.device, steps)


@disable_autocast
def backward(
    d_out: Tensor,
    d_extras: Tensor | None,
    out: Tensor,
    peaks: Tensor,
    extras: Tensor,
    tables: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: DistanceBiasOptions,
) -> list[Tensor]:
    """The gradients of q, k, v and of what is learned; `d_extras` is that of the log-sum-exp in base 2."""
    q, k, v, terms = to_kernel_layout(q, k, v, terms)
    d_out, d_extras = with_contiguous_rows(d_out), None if d_extras is None else d_extras.contiguous()
    names = row_table.learned_fields(terms, tables)
    found = [empty_with_layout_of(x) for x in (q, k, v)]
    shares: list[tuple[CallPart, dict[str, Tensor]]] = []
    bands = 3 if terms.values is not None else int(terms.kind == 1 or "table" in names)
    for part in split_call(q, k, v, peaks, extras, terms, bands):
        after = BackwardTensors(
            part.of(out), part.of(d_out), None if d_extras is None else part.of(d_extras),
            part.of(found[0]), part.of_keys(found[1]), part.of_keys(found[2]), names,
        )  # fmt: skip
        shares.append((part, backward_part(part, after)))
    return [*found, *(sum_part_gradients(name, getattr(terms, name), shares) for name in names)]


def sum_part_gradients(name: str, learned: Tensor, shares: list[tuple[CallPart, dict[str, Tensor]]]) -> Tensor:
    """The gradient of a learned tensor, from those of all parts."""
    if len(shares) == 1:
        return shares[0][1][name]
    total = torch.zeros(learned.shape, dtype=learned.dtype, device=learned.device)
    for part, found in shares:
        assert part.place is not None
        heads = part.place[1]
        headless = name in {"keys", "values"} and learned.dim() == 2
        own = total if headless else total[:, heads] if name == "table" else total[heads]
        own += found[name]
    return total


class BackwardTensors(NamedTuple):
    """What the backward of a part has besides its inputs, and where the gradients go."""

    out: Tensor
    d_out: Tensor
    d_extras: Tensor | None
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    learned: list[str]


class BackwardIntermediates(NamedTuple):
    """What the passes leave to be summed: the gradient of the row table, weights by distance, slopes by tile, buckets;
    and `gains`, which they read: what a weight at each distance adds to the output, times d_out, (B, H, Tq, W).
    """

    gains: Tensor | None
    d_table: Tensor | None
    band: Tensor | None
    d_slopes: Tensor | None
    d_by_bucket: Tensor | None


def allocate_intermediates(part: CallPart, after: BackwardTensors, tiles: DistanceBiasTiling) -> BackwardIntermediates:
    terms, learned, empty = part.terms, after.learned, part.peaks.new_empty
    valued = terms.values is not None
    return BackwardIntermediates(
        gains=after.d_out.float() @ terms.values.mT if terms.values is not None else None,
        d_table=part.band(0.0) if terms.kind == 1 or "table" in learned else None,
        band=part.band(0.0) if valued else None,
        d_slopes=empty(*part.q.shape[:2], ceil_divide(part.q.shape[2], tiles.queries)) if "slopes" in learned else None,
        d_by_bucket=empty(terms.table.shape) if terms.table is not None and "table" in learned else None,
    )


def backward_part(part: CallPart, after: BackwardTensors) -> dict[str, Tensor]:
    """Both passes of a part; gives the gradients of what is learned."""
    terms, tiles = part.terms, (choose_tiling("queries", part), choose_tiling("keys", part))
    found = allocate_intermediates(part, after, tiles[0])
    d_q = after.d_q if terms.kind != 1 else torch.empty(part.q.shape, dtype=torch.float32, device=part.q.device)
    key = plan_key(part, tiles, layout_key(d_q), *map(layout_key, after[:6]), tuple(after.learned))
    launches = get_or_build_plan(key, lambda: plan_backward(part, after, found, d_q, tiles))
    given = {"out": after.out, "d_out": after.d_out, "d_q": d_q, "d_k": after.d_k, "d_v": after.d_v}
    optional = found._asdict() | {"d_extras": after.d_extras, "reach": None, "inner": None}
    launches(tensor_arguments(part) | given | {name: part.peaks if x is None else x for name, x in optional.items()})
    if terms.keys is not None and found.d_table is not None:
        row_table.add_matmul(d_q, found.d_table, terms.keys)
        after.d_q.copy_(d_q)
    return learned_gradients(part, after, found)


def plan_backward(
    part: CallPart,
    after: BackwardTensors,
    found: BackwardIntermediates,
    d_q: Tensor,
    tiles: tuple[DistanceBiasTiling, DistanceBiasTiling],
) -> LaunchPlan:
    """The backward's launches: tables, the pass over queries, the pass over keys, and sums."""
    from foci.kernels.distance_bias.backward import distance_bias_key_gradients, distance_bias_query_gradients

    terms, H = part.terms, part.q.shape[1]
    reaching, sizes = tables.tile_range_launches(terms.spans, part.k.shape[2], tiles[1].queries, tiles[1].keys)
    collecting, sums = ([], {}) if found.d_by_bucket is None else tables.bucket_gradient_launches(terms, part.q)
    numbers = (
        scalar_arguments(part)
        | stride_arguments("out", after.out)
        | stride_arguments("d_out", after.d_out)
        | stride_arguments("d_q", d_q)
    )
    numbers |= stride_arguments("d_k", after.d_k) | stride_arguments("d_v", after.d_v)
    apart = terms.spans is not None and terms.spans.shape[0] > 1
    numbers |= {
        "reach_batch": 2 * ceil_divide(part.k.shape[2], tiles[1].keys) * apart,
        "inner_batch": 2 * ceil_divide(part.q.shape[2], tiles[1].queries) * apart,
        "VALUED": terms.values is not None, "TABLE_GRADIENT": found.d_table is not None,
        "SLOPE_GRADIENT": found.d_slopes is not None, "EXTRAS": after.d_extras is not None,
    }  # fmt: skip
    rows = (ceil_divide(part.q.shape[2], tiles[0].queries) * part.pairs,)
    columns = (ceil_divide(part.k.shape[2], tiles[1].keys) * part.k.shape[0] * part.k.shape[1],)
    steps = [
        *tables.fill_row_table_launches(terms, H), *reaching,
        build_kernel_launch(distance_bias_query_gradients, rows, numbers | tiles[0].sizes(), **tiles[0].options()),
        build_kernel_launch(distance_bias_key_gradients, columns, numbers | tiles[1].sizes(), **tiles[1].options()), *collecting,
    ]  # fmt: skip
    sizes |= tables.row_table_workspace(terms, H) | sums | {"delta": part.pairs * part.q.shape[2]}
    return LaunchPlan(sizes, part.q.device, steps)


def learned_gradients(part: CallPart, after: BackwardTensors, found: BackwardIntermediates) -> dict[str, Tensor]:
    """A part's share of the gradients of table, keys, values and slopes."""
    terms, shares = part.terms, {}
    if found.d_by_bucket is not None:
        shares["table"] = found.d_by_bucket
    if found.d_slopes is not None:
        shares["slopes"] = found.d_slopes.sum((0, 2))
    if "keys" in after.learned and terms.keys is not None and found.d_table is not None:
        shares["keys"] = row_table.table_gradient(terms.keys, found.d_table, part.q)
    if "values" in after.learned and terms.values is not None and found.band is not None:
        shares["values"] = row_table.table_gradient(terms.values, found.band, after.d_out)
    return shares


def allocate_gradients(q: Tensor, k: Tensor, v: Tensor, terms: DistanceBiasOptions, tables: bool) -> list[Tensor]:
    """As the backward gives them, and empty: of q, k, v, and of what is learned."""
    learned = [getattr(terms, name) for name in row_table.learned_fields(terms, tables)]
    return [
        *(empty_with_layout_of(with_contiguous_rows(x)) for x in (q, k, v)),
        *(x.new_empty(x.shape) for x in learned),
    ]


def allocate_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the output and the log-sum-exp go; the output lies in memory as the queries do."""
    same = q.shape[-1] == v.shape[-1]
    out = empty_with_layout_of(with_contiguous_rows(q)) if same else q.new_empty(*q.shape[:3], v.shape[-1])
    rows = [torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2)]
    return out, rows[0], rows[1]


def to_kernel_layout(
    q: Tensor, k: Tensor, v: Tensor, terms: DistanceBiasOptions
) -> tuple[Tensor, Tensor, Tensor, DistanceBiasOptions]:
    """As the kernels read them: features that lie side by side, ids and slopes in one piece, masks in bytes."""
    spans, query_ids, key_ids, slopes = (
        None if x is None else x.contiguous() for x in (terms.spans, terms.query_ids, terms.key_ids, terms.slopes)
    )
    dense = terms.dense
    if dense is not None:
        dense = dense.expand(*q.shape[:3], k.shape[2]).view(torch.uint8)
    if spans is not None or query_ids is not None or dense is not None or slopes is not terms.slopes:
        terms = terms._replace(spans=spans, query_ids=query_ids, key_ids=key_ids, slopes=slopes, dense=dense)
    return with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v), terms


def with_contiguous_rows(x: Tensor) -> Tensor:
    """Rows that lie in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_with_layout_of(x: Tensor) -> Tensor:
    """Room that lies in memory as x does; its rows in one piece also where those of x overlap."""
    return with_contiguous_rows(torch.empty_like(x))


def ceil_divide(length: int, size: int) -> int:
    return -(-length // size)


def plan_key(part: CallPart, *more: Hashable) -> Hashable:
    """What the launches of a part follow from, besides the addresses of its tensors."""
    _, q, k, v, peaks, _, terms, _ = part
    return part.first, q.device, *map(layout_key, (q, k, v, peaks, *terms[:10])), terms[10:], more


def tensor_arguments(part: CallPart) -> dict[str, Tensor]:
    """What every kernel reads. What is not given points at something, and is never read."""
    _, q, k, v, peaks, extras, terms, rows = part
    by_bucket, buckets, _, _, slopes, spans, query_ids, key_ids, dense, seed = (
        peaks if x is None else x for x in terms[:10]
    )
    return {
        "q": q, "k": k, "v": v, "peaks": peaks, "extras": extras, "table": peaks if rows is None else rows,
        "by_bucket": by_bucket, "buckets": buckets, "slopes": slopes, "spans": spans, "query_ids": query_ids,
        "key_ids": key_ids, "dense": dense, "seed": seed,
    }  # fmt: skip


def scalar_arguments(part: CallPart) -> dict[str, Any]:
    """What all three kernels are told."""
    q, k, v, peaks, terms = part.q, part.k, part.v, part.peaks, part.terms
    widths = padded(q.shape[-1]), padded(v.shape[-1])
    dense = (0, 0, 0, 0) if terms.dense is None else terms.dense.stride()
    return dict(
        **stride_arguments("q", q), **stride_arguments("k", k), **stride_arguments("v", v),
        peaks_batch=peaks.stride(0), peaks_head=peaks.stride(1),
        spans_batch=batch_stride(terms.spans), query_ids_batch=batch_stride(terms.query_ids),
        key_ids_batch=batch_stride(terms.key_ids),
        dense_batch=dense[0], dense_head=dense[1], dense_query=dense[2], dense_key=dense[3],
        CAUSAL=terms.causal, SPANS=0 if terms.spans is None else terms.spans.shape[1],
        IDS=terms.query_ids is not None, DENSE=terms.dense is not None,
        H=q.shape[1], group=q.shape[1] // k.shape[1], Tq=q.shape[2], Tk=k.shape[2], D=q.shape[3], Dv=v.shape[3],
        clip=terms.width // 2, first_b=part.first[0], first_h=part.first[1],
        scale=terms.scale, softcap=terms.softcap,
        threshold=int(terms.dropout * 2**32), keep_scale=1.0 / (1.0 - terms.dropout),
        SOFTCAP=terms.softcap > 0, ALIBI=terms.slopes is not None, TABLE=terms.kind, DROPOUT=terms.dropout > 0,
        EVEN=widths == (q.shape[3], v.shape[3]), BD=widths[0], BV=widths[1],
        PRECISION=dot_precision(q), EXACT=q.dtype == torch.float32, DIRECT=q.is_cuda and torch.version.hip is None,
    )  # fmt: skip


def stride_arguments(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_batch": x.stride(0), f"{name}_head": x.stride(1), f"{name}_row": x.stride(2)}


def dot_precision(q: Tensor) -> str:
    """Products of float32 are taken as they are: the gradients of a table sum too many to lose bits before."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
