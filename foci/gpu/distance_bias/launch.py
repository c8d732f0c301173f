"""Launches the kernels of attention with a bias by distance, part by part.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width, W = 2 clip + 1 distances.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.gpu.distance_bias import row_table, tables
from foci.gpu.distance_bias.row_table import Place, Terms
from foci.gpu.launcher import Launches, batch_stride, kept, layout, step
from foci.runtime.checks import keeps_dtypes


class Tiles(NamedTuple):
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
HALF = {
    "forward": {64: Tiles(128, 64, 8, 3, 128), 128: Tiles(128, 64, 8, 2), 256: Tiles(128, 64, 8, 2)},
    "queries": {64: Tiles(64, 64, 4, 2, 168), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 4, 2)},
    "keys": {64: Tiles(32, 64, 4, 3), 128: Tiles(32, 128, 8, 2), 256: Tiles(32, 64, 8, 2)},
}
# Products of float32 are taken by the plain units, from twice the memory.
FULL = {
    "forward": {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(64, 32, 8, 1)},
    "queries": {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 8, 1), 256: Tiles(32, 16, 4, 1)},
    "keys": {64: Tiles(32, 64, 8, 2), 128: Tiles(32, 64, 8, 1), 256: Tiles(16, 32, 4, 1)},
}
# Small ones for the interpreter, which goes through them number by number.
INTERPRETED = Tiles(16, 16, 4, 1)


def padded(width: int) -> int:
    """A power of two, which a kernel's tiles need, of at least 16, which its products need."""
    return max(16, 1 << (width - 1).bit_length())


class Part(NamedTuple):
    """Some sequences and heads of a call, with the row table that is theirs."""

    place: Place | None  # all of them
    q: Tensor
    k: Tensor
    v: Tensor
    peaks: Tensor
    extras: Tensor
    terms: Terms
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
        return x if self.place is None else x[in_keys(self.place, self.q.shape[1] // self.k.shape[1])]

    def band(self, fill: float) -> Tensor:
        """One number per query and distance."""
        sizes = (*self.q.shape[:3], self.terms.width)
        return torch.full(sizes, fill, dtype=torch.float32, device=self.q.device)


def tiles_of(name: str, part: Part) -> Tiles:
    """The tiles of a pass; few queries get small ones."""
    q, v, terms = part.q, part.v, part.terms
    if q.device.type == "cpu":
        return INTERPRETED
    width = max(padded(q.shape[-1]), padded(v.shape[-1]), 64)
    found = (FULL if q.dtype == torch.float32 else HALF)[name][width]
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


def parts(q: Tensor, k: Tensor, v: Tensor, peaks: Tensor, extras: Tensor, terms: Terms, bands: int) -> Iterator[Part]:
    """The call in parts, each with room for its row table and `bands` more; mostly there is one."""
    group, row_bytes = q.shape[1] // k.shape[1], 4 * terms.width * (bands + (terms.kind == 1))
    found = list(row_table.places(q, group, row_bytes))
    if len(found) == 1:
        yield Part(None, q, k, v, peaks, extras, terms, row_table.rows(q, terms))
        return
    for place in found:
        some, shared = terms.part(place), in_keys(place, group)
        inputs = q[place], k[shared], v[shared], peaks[place], extras[place]
        yield Part(place, *inputs, some, row_table.rows(q[place], some))


def in_keys(place: Place, group: int) -> Place:
    """The key heads of some heads."""
    batches, heads = place
    return batches, slice(heads.start // group, heads.stop // group)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, terms = readable(q, k, v, terms)
    out, peaks, extras = results(q, v)
    for part in parts(q, k, v, peaks, extras, terms, bands=terms.values is not None):
        forward_part(part, part.of(out))
    return out, peaks, extras


def forward_part(part: Part, out: Tensor) -> None:
    values, tiles = part.terms.values, tiles_of("forward", part)
    band = None if values is None else part.band(-torch.inf)
    # What the values per distance add comes on top, before the one rounding.
    into = out if values is None else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    launches = kept(kind(part, tiles, layout(into)), lambda: over_keys(part, into, tiles))
    launches(tensors_of(part) | {"out": into, "band": part.peaks if band is None else band})
    if band is not None and values is not None:
        row_table.add_products(into, row_table.weights_by_distance(band, part.peaks, part.extras), values)
        out.copy_(into)


def over_keys(part: Part, out: Tensor, tiles: Tiles) -> Launches:
    """The forward's launches: the row table, and every tile of queries over the keys."""
    from foci.kernels.distance_bias.forward import forward as kernel

    numbers = numbers_of(part) | strides("out", out) | tiles.sizes() | {"BAND": part.terms.values is not None}
    grid = (blocks(part.q.shape[2], tiles.queries) * part.pairs,)
    steps = [*tables.spreading(part.terms, part.q.shape[1]), step(kernel, grid, numbers, **tiles.options())]
    return Launches(tables.row_sizes(part.terms, part.q.shape[1]), part.q.device, steps)


@keeps_dtypes
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
    terms: Terms,
) -> list[Tensor]:
    """The gradients of q, k, v and of what is learned; `d_extras` is that of the log-sum-exp in base 2."""
    q, k, v, terms = readable(q, k, v, terms)
    d_out, d_extras = even(d_out), None if d_extras is None else d_extras.contiguous()
    names = row_table.learned(terms, tables)
    found = [alike(x) for x in (q, k, v)]
    shares: list[tuple[Part, dict[str, Tensor]]] = []
    bands = 3 if terms.values is not None else int(terms.kind == 1 or "table" in names)
    for part in parts(q, k, v, peaks, extras, terms, bands):
        after = After(
            part.of(out), part.of(d_out), None if d_extras is None else part.of(d_extras),
            part.of(found[0]), part.of_keys(found[1]), part.of_keys(found[2]), names,
        )  # fmt: skip
        shares.append((part, backward_part(part, after)))
    return [*found, *(joined(name, getattr(terms, name), shares) for name in names)]


def joined(name: str, learned: Tensor, shares: list[tuple[Part, dict[str, Tensor]]]) -> Tensor:
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


class After(NamedTuple):
    """What the backward of a part has besides its inputs, and where the gradients go."""

    out: Tensor
    d_out: Tensor
    d_extras: Tensor | None
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    learned: list[str]


class Passing(NamedTuple):
    """What the passes leave to be summed: the gradient of the row table, weights by distance, slopes by tile, buckets;
    and `gains`, which they read: what a weight at each distance adds to the output, times d_out, (B, H, Tq, W).
    """

    gains: Tensor | None
    d_table: Tensor | None
    band: Tensor | None
    d_slopes: Tensor | None
    d_by_bucket: Tensor | None


def passing(part: Part, after: After, tiles: Tiles) -> Passing:
    terms, learned, empty = part.terms, after.learned, part.peaks.new_empty
    valued = terms.values is not None
    return Passing(
        gains=after.d_out.float() @ terms.values.mT if terms.values is not None else None,
        d_table=part.band(0.0) if terms.kind == 1 or "table" in learned else None,
        band=part.band(0.0) if valued else None,
        d_slopes=empty(*part.q.shape[:2], blocks(part.q.shape[2], tiles.queries)) if "slopes" in learned else None,
        d_by_bucket=empty(terms.table.shape) if terms.table is not None and "table" in learned else None,
    )


def backward_part(part: Part, after: After) -> dict[str, Tensor]:
    """Both passes of a part; gives the gradients of what is learned."""
    terms, tiles = part.terms, (tiles_of("queries", part), tiles_of("keys", part))
    found = passing(part, after, tiles[0])
    d_q = after.d_q if terms.kind != 1 else torch.empty(part.q.shape, dtype=torch.float32, device=part.q.device)
    key = kind(part, tiles, layout(d_q), *map(layout, after[:6]), tuple(after.learned))
    launches = kept(key, lambda: both_passes(part, after, found, d_q, tiles))
    given = {"out": after.out, "d_out": after.d_out, "d_q": d_q, "d_k": after.d_k, "d_v": after.d_v}
    optional = found._asdict() | {"d_extras": after.d_extras, "reach": None, "inner": None}
    launches(tensors_of(part) | given | {name: part.peaks if x is None else x for name, x in optional.items()})
    if terms.keys is not None and found.d_table is not None:
        row_table.add_products(d_q, found.d_table, terms.keys)
        after.d_q.copy_(d_q)
    return learn(part, after, found)


def both_passes(part: Part, after: After, found: Passing, d_q: Tensor, tiles: tuple[Tiles, Tiles]) -> Launches:
    """The backward's launches: tables, the pass over queries, the pass over keys, and sums."""
    from foci.kernels.distance_bias.backward import keys, queries

    terms, H = part.terms, part.q.shape[1]
    reaching, sizes = tables.reaching(terms.spans, part.k.shape[2], tiles[1].queries, tiles[1].keys)
    collecting, sums = ([], {}) if found.d_by_bucket is None else tables.collecting(terms, part.q)
    numbers = numbers_of(part) | strides("out", after.out) | strides("d_out", after.d_out) | strides("d_q", d_q)
    numbers |= strides("d_k", after.d_k) | strides("d_v", after.d_v)
    apart = terms.spans is not None and terms.spans.shape[0] > 1
    numbers |= {
        "reach_batch": 2 * blocks(part.k.shape[2], tiles[1].keys) * apart,
        "inner_batch": 2 * blocks(part.q.shape[2], tiles[1].queries) * apart,
        "VALUED": terms.values is not None, "TABLE_GRADIENT": found.d_table is not None,
        "SLOPE_GRADIENT": found.d_slopes is not None, "EXTRAS": after.d_extras is not None,
    }  # fmt: skip
    rows = (blocks(part.q.shape[2], tiles[0].queries) * part.pairs,)
    columns = (blocks(part.k.shape[2], tiles[1].keys) * part.k.shape[0] * part.k.shape[1],)
    steps = [
        *tables.spreading(terms, H), *reaching,
        step(queries, rows, numbers | tiles[0].sizes(), **tiles[0].options()),
        step(keys, columns, numbers | tiles[1].sizes(), **tiles[1].options()), *collecting,
    ]  # fmt: skip
    sizes |= tables.row_sizes(terms, H) | sums | {"delta": part.pairs * part.q.shape[2]}
    return Launches(sizes, part.q.device, steps)


def learn(part: Part, after: After, found: Passing) -> dict[str, Tensor]:
    """A part's share of the gradients of table, keys, values and slopes."""
    terms, shares = part.terms, {}
    if found.d_by_bucket is not None:
        shares["table"] = found.d_by_bucket
    if found.d_slopes is not None:
        shares["slopes"] = found.d_slopes.sum((0, 2))
    if "keys" in after.learned and terms.keys is not None and found.d_table is not None:
        shares["keys"] = row_table.gradient(terms.keys, found.d_table, part.q)
    if "values" in after.learned and terms.values is not None and found.band is not None:
        shares["values"] = row_table.gradient(terms.values, found.band, after.d_out)
    return shares


def gradients(q: Tensor, k: Tensor, v: Tensor, terms: Terms, tables: bool) -> list[Tensor]:
    """As the backward gives them, and empty: of q, k, v, and of what is learned."""
    learned = [getattr(terms, name) for name in row_table.learned(terms, tables)]
    return [*(alike(even(x)) for x in (q, k, v)), *(x.new_empty(x.shape) for x in learned)]


def results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the output and the log-sum-exp go; the output lies in memory as the queries do."""
    same = q.shape[-1] == v.shape[-1]
    out = alike(even(q)) if same else q.new_empty(*q.shape[:3], v.shape[-1])
    rows = [torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2)]
    return out, rows[0], rows[1]


def readable(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor, Terms]:
    """As the kernels read them: features that lie side by side, ids and slopes in one piece, masks in bytes."""
    spans, query_ids, key_ids, slopes = (
        None if x is None else x.contiguous() for x in (terms.spans, terms.query_ids, terms.key_ids, terms.slopes)
    )
    dense = terms.dense
    if dense is not None:
        dense = dense.expand(*q.shape[:3], k.shape[2]).view(torch.uint8)
    if spans is not None or query_ids is not None or dense is not None or slopes is not terms.slopes:
        terms = terms._replace(spans=spans, query_ids=query_ids, key_ids=key_ids, slopes=slopes, dense=dense)
    return even(q), even(k), even(v), terms


def even(x: Tensor) -> Tensor:
    """Rows that lie in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def alike(x: Tensor) -> Tensor:
    """Room that lies in memory as x does; its rows in one piece also where those of x overlap."""
    return even(torch.empty_like(x))


def blocks(length: int, size: int) -> int:
    return -(-length // size)


def kind(part: Part, *more: Hashable) -> Hashable:
    """What the launches of a part follow from, besides the addresses of its tensors."""
    _, q, k, v, peaks, _, terms, _ = part
    return part.first, q.device, *map(layout, (q, k, v, peaks, *terms[:10])), terms[10:], more


def tensors_of(part: Part) -> dict[str, Tensor]:
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


def numbers_of(part: Part) -> dict[str, Any]:
    """What all three kernels are told."""
    q, k, v, peaks, terms = part.q, part.k, part.v, part.peaks, part.terms
    widths = padded(q.shape[-1]), padded(v.shape[-1])
    dense = (0, 0, 0, 0) if terms.dense is None else terms.dense.stride()
    return dict(
        **strides("q", q), **strides("k", k), **strides("v", v),
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
        PRECISION=precision(q), EXACT=q.dtype == torch.float32, DIRECT=q.is_cuda and torch.version.hip is None,
    )  # fmt: skip


def strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_batch": x.stride(0), f"{name}_head": x.stride(1), f"{name}_row": x.stride(2)}


def precision(q: Tensor) -> str:
    """Products of float32 are taken as they are: the gradients of a table sum too many to lose bits before."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
