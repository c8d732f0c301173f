"""Launches the kernels of attention with a bias by distance, part by part.

B batch, H heads, G key heads, Tq queries, Tk keys, D width, Dv value width, W = 2 clip + 1 distances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.backends import row_tables
from foci.backends.row_tables import Place, Terms


class Tiles(NamedTuple):
    """How a kernel is launched: queries and keys of a tile, warps, and loads that are under way at a time."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # the most that a thread may take, so that more programs share a processor

    def options(self) -> dict[str, int]:
        most = {} if self.registers is None else {"maxnreg": self.registers}
        return {"BM": self.queries, "BN": self.keys, "num_warps": self.warps, "num_stages": self.stages} | most


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


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences and heads of a call, with the row table that is theirs."""

    place: Place
    q: Tensor
    k: Tensor
    v: Tensor
    peaks: Tensor
    extras: Tensor
    terms: Terms
    table: Tensor | None

    @property
    def pairs(self) -> int:
        return self.q.shape[0] * self.q.shape[1]

    def band(self, fill: float) -> Tensor:
        """One number per query and distance."""
        return self.q.new_full((*self.q.shape[:3], self.terms.width), fill, dtype=torch.float32)


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
    # These hold yet another tile.
    crowded = terms.values is not None or terms.dense is not None
    return found._replace(registers=None) if crowded else found


def parts(q: Tensor, k: Tensor, v: Tensor, peaks: Tensor, extras: Tensor, terms: Terms, bands: int) -> Iterator[Part]:
    """The call in parts, each with room for its row table and `bands` more."""
    own = terms.kind == 1
    for place in row_tables.places(q, q.shape[1] // k.shape[1], 4 * terms.width * (bands + own)):
        some, shared = terms.part(place), in_keys(place, q.shape[1] // k.shape[1])
        inputs = q[place], k[shared], v[shared], peaks[place], extras[place]
        yield Part(place, *inputs, some, row_tables.rows(q[place], some))


def in_keys(place: Place, group: int) -> Place:
    """The key heads of some heads."""
    batches, heads = place
    return batches, slice(heads.start // group, heads.stop // group)


def forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (even(x) for x in (q, k, v))
    out, peaks, extras = results(q, v)
    for part in parts(q, k, v, peaks, extras, terms, bands=terms.values is not None):
        forward_part(part, out[part.place])
    return out, peaks, extras


def forward_part(part: Part, out: Tensor) -> None:
    from foci.kernels.biased import forward as kernel

    values, tiles = part.terms.values, tiles_of("forward", part)
    band = None if values is None else part.band(-torch.inf)
    # What the values per distance add comes on top, before the one rounding.
    into = out if values is None else out.new_empty(out.shape, dtype=torch.float32)
    kernel[(blocks(part.q.shape[2], tiles.queries) * part.pairs,)](
        **arguments(part), **strided("out", into), **present(part.peaks, band=band), BAND=band is not None,
        **tiles.options(),
    )  # fmt: skip
    if band is not None and values is not None:
        row_tables.add_products(into, row_tables.weights_by_distance(band, part.peaks, part.extras), values)
        out.copy_(into)


def backward(
    d_out: Tensor,
    d_extras: Tensor,
    out: Tensor,
    peaks: Tensor,
    extras: Tensor,
    tables: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
) -> list[Tensor]:
    q, k, v, d_out, d_extras = even(q), even(k), even(v), even(d_out), d_extras.contiguous()
    found = gradients(q, k, v, terms, tables)
    learned = dict(zip(row_tables.learned(terms, tables), (x.zero_() for x in found[3:]), strict=True))
    delta = torch.empty_like(peaks)
    bands = 3 if terms.values is not None else int(terms.kind == 1 or "table" in learned)
    for part in parts(q, k, v, peaks, extras, terms, bands):
        rows, columns = part.place, in_keys(part.place, q.shape[1] // k.shape[1])
        after = After(out[rows], d_out[rows], d_extras[rows], delta[rows], gains_of(part, d_out[rows]))
        queries_part(part, after, found[0][rows], learned)
        keys_part(part, after, found[1][columns], found[2][columns])
    return found


@dataclass(frozen=True, slots=True)
class After:
    """What the backward of a part has besides its inputs."""

    out: Tensor
    d_out: Tensor
    d_extras: Tensor  # the gradient of the log-sum-exp in base 2
    delta: Tensor  # filled by the pass over the queries
    gains: Tensor | None  # what a weight at each distance adds to the output, times d_out: (B, H, Tq, W)


def gains_of(part: Part, d_out: Tensor) -> Tensor | None:
    return None if part.terms.values is None else d_out.float() @ part.terms.values.mT


def queries_part(part: Part, after: After, d_q: Tensor, learned: dict[str, Tensor]) -> None:
    """The gradients of the queries and of what is learned."""
    from foci.kernels.biased_backward import queries as kernel

    terms, tiles = part.terms, tiles_of("queries", part)
    count = blocks(part.q.shape[2], tiles.queries)
    d_rows = part.band(0.0) if terms.kind == 1 or "table" in learned else None
    band = None if terms.values is None else part.band(0.0)
    d_slopes = part.peaks.new_empty(*part.q.shape[:2], count) if "slopes" in learned else None
    into = d_q.new_empty(d_q.shape, dtype=torch.float32) if terms.kind == 1 else d_q
    kernel[(count * part.pairs,)](
        **arguments(part), **strided("out", after.out), **strided("d_out", after.d_out), **strided("d_q", into),
        d_extras=after.d_extras, delta=after.delta, **present(part.peaks, gains=after.gains, d_table=d_rows, band=band),
        **present(part.peaks, d_slopes=d_slopes), VALUED=band is not None, TABLE_GRADIENT=d_rows is not None,
        SLOPE_GRADIENT=d_slopes is not None,
        **tiles.options(),
    )  # fmt: skip
    if terms.kind == 1:
        assert terms.keys is not None and d_rows is not None
        row_tables.add_products(into, d_rows, terms.keys)
        d_q.copy_(into)
    learn(part, after, learned, d_rows, band, d_slopes)


def learn(
    part: Part,
    after: After,
    learned: dict[str, Tensor],
    d_rows: Tensor | None,
    band: Tensor | None,
    d_slopes: Tensor | None,
) -> None:
    """Adds a part's share to the gradients of table, keys, values and slopes."""
    terms, heads = part.terms, part.place[1]
    if "table" in learned and d_rows is not None:
        learned["table"][:, heads] += row_tables.buckets_gradient(d_rows.sum((0, 2)), terms)
    if "slopes" in learned and d_slopes is not None:
        learned["slopes"][heads] += d_slopes.sum((0, 2))
    if "keys" in learned and d_rows is not None:
        row_tables.add_gradient(learned["keys"], d_rows, part.q, heads)
    if "values" in learned and band is not None:
        row_tables.add_gradient(learned["values"], band, after.d_out, heads)


def keys_part(part: Part, after: After, d_k: Tensor, d_v: Tensor) -> None:
    """The gradients of keys and values."""
    from foci.kernels.biased_backward import keys as kernel

    tiles = tiles_of("keys", part)
    reach, inner = reaches(part.terms.spans, part.k.shape[2], tiles)
    kernel[(blocks(part.k.shape[2], tiles.keys) * part.k.shape[0] * part.k.shape[1],)](
        **arguments(part), **strided("d_out", after.d_out), **strided("d_k", d_k), **strided("d_v", d_v),
        delta=after.delta, **present(part.peaks, gains=after.gains, reach=reach, inner=inner),
        reach_batch=batch_stride(reach), inner_batch=batch_stride(inner), VALUED=after.gains is not None,
        **tiles.options(),
    )  # fmt: skip


def reaches(spans: Tensor | None, keys: int, tiles: Tiles) -> tuple[Tensor | None, Tensor | None]:
    """Which tiles of queries see some of a tile of keys, and which run of keys all queries of a tile see.

    (Bm, runs, 2, Tq) -> (Bm, tiles of keys, 2), first and last, and (Bm, tiles of queries, 2), low and high.
    """
    if spans is None:
        return None, None
    low, high = spans[:, :, 0], spans[:, :, 1]
    start = tiled(torch.where(low < high, low, keys), tiles.queries, keys).amin(-1)  # (Bm, runs, nq)
    stop = tiled(torch.where(low < high, high, 0), tiles.queries, 0).amax(-1)
    first_j = torch.arange(blocks(keys, tiles.keys), device=spans.device) * tiles.keys
    seen = ((start.unsqueeze(-1) < first_j + tiles.keys) & (stop.unsqueeze(-1) > first_j)).any(1)  # (Bm, nq, nk)
    index = torch.arange(seen.shape[1], device=spans.device).unsqueeze(-1)
    reach = torch.where(seen, index, seen.shape[1]).amin(1), torch.where(seen, index + 1, 0).amax(1)
    # Of two runs a tile of keys may need both: then the mask is asked everywhere.
    one = int(spans.shape[1] == 1)
    inner = tiled(low, tiles.queries, 0).amax((1, 3)), tiled(high, tiles.queries, keys).amin((1, 3)) * one
    return torch.stack(reach, -1).int(), torch.stack(inner, -1).int()


def tiled(ends: Tensor, size: int, fill: int) -> Tensor:
    """(Bm, runs, Tq) -> (Bm, runs, tiles, size)."""
    padded: Tensor = F.pad(ends, (0, -ends.shape[-1] % size), value=fill)
    return padded.view(*ends.shape[:-1], -1, size)


def gradients(q: Tensor, k: Tensor, v: Tensor, terms: Terms, tables: bool) -> list[Tensor]:
    """Where the gradients go: of q, k, v, and of what is learned."""
    learned = [getattr(terms, name) for name in row_tables.learned(terms, tables)]
    return [*(torch.empty_like(even(x)) for x in (q, k, v)), *(x.new_empty(x.shape) for x in learned)]


def results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the output and the log-sum-exp go; the output lies in memory as the queries do."""
    same = q.shape[-1] == v.shape[-1]
    out = torch.empty_like(even(q)) if same else q.new_empty(*q.shape[:3], v.shape[-1])
    rows = [q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2)]
    return out, rows[0], rows[1]


def even(x: Tensor) -> Tensor:
    """Rows that lie in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def whole(x: Tensor | None) -> Tensor | None:
    """All of it in one piece: what is read without strides."""
    return None if x is None else x.contiguous()


def blocks(length: int, size: int) -> int:
    return -(-length // size)


def arguments(part: Part) -> dict[str, Any]:
    """What all three kernels take."""
    q, k, v, peaks, terms, table = part.q, part.k, part.v, part.peaks, part.terms, part.table
    dense = None if terms.dense is None else terms.dense.expand(*q.shape[:3], k.shape[2]).view(torch.uint8)
    widths = padded(q.shape[-1]), padded(v.shape[-1])
    return dict(
        **strided("q", q), **strided("k", k), **strided("v", v),
        peaks=peaks, extras=part.extras, peaks_batch=peaks.stride(0), peaks_head=peaks.stride(1),
        **masks(terms, dense, peaks),
        **present(peaks, slopes=whole(terms.slopes), seed=terms.seed, table=table),
        H=q.shape[1], group=q.shape[1] // k.shape[1], Tq=q.shape[2], Tk=k.shape[2], D=q.shape[3], Dv=v.shape[3],
        clip=terms.width // 2, first_b=part.place[0].start, first_h=part.place[1].start,
        scale=terms.scale, softcap=terms.softcap,
        threshold=int(terms.dropout * 2**32), keep_scale=1.0 / (1.0 - terms.dropout),
        SOFTCAP=terms.softcap > 0, ALIBI=terms.slopes is not None, TABLE=terms.kind, DROPOUT=terms.dropout > 0,
        EVEN=widths == (q.shape[3], v.shape[3]), BD=widths[0], BV=widths[1],
        PRECISION=precision(q), EXACT=q.dtype == torch.float32, DIRECT=q.is_cuda and torch.version.hip is None,
    )  # fmt: skip


def masks(terms: Terms, dense: Tensor | None, unused: Tensor) -> dict[str, Any]:
    spans, query_ids, key_ids = whole(terms.spans), whole(terms.query_ids), whole(terms.key_ids)
    strides = (0, 0, 0, 0) if dense is None else dense.stride()
    return dict(
        **present(unused, spans=spans, query_ids=query_ids, key_ids=key_ids, dense=dense),
        spans_batch=batch_stride(spans), query_ids_batch=batch_stride(query_ids), key_ids_batch=batch_stride(key_ids),
        dense_batch=strides[0], dense_head=strides[1], dense_query=strides[2], dense_key=strides[3],
        CAUSAL=terms.causal, SPANS=0 if spans is None else spans.shape[1],
        IDS=query_ids is not None, DENSE=dense is not None,
    )  # fmt: skip


def present(unused: Tensor, **tensors: Tensor | None) -> dict[str, Tensor]:
    """What is absent points at something, and is never read."""
    return {name: unused if x is None else x for name, x in tensors.items()}


def strided(name: str, x: Tensor) -> dict[str, Any]:
    return {name: x, f"{name}_batch": x.stride(0), f"{name}_head": x.stride(1), f"{name}_row": x.stride(2)}


def batch_stride(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


def precision(q: Tensor) -> str:
    """Products of float32 are taken as they are: the gradients of a table sum too many to lose bits before."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
