"""Small attention matrices and their statistics by definition, in float64: the expected results of the tile pass."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foci.statistics.cuda.arguments import AFTER_SCALE, BEFORE_SCALE
from foci.statistics.cuda.plan import launch_statistics
from foci.statistics.cuda.tiling import TileConfig
from foci.statistics.request import Request

SMALL = TileConfig(queries=16, keys=32, warps=4, stages=1, programs_per_sm=1)
FETCHED = replace(SMALL, use_tma=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Tolerance for weights of the top keys in half precision: logits of up to 10 that lack 7 of 24 bits.
KEPT = 1e-5


@pytest.fixture(autouse=True)
def nan_in_fresh_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN, so that entries a kernel does not write are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def within_nan(x: Tensor, beyond: int = 5) -> Tensor:
    """The same values as a view into memory filled with NaN, so that reads past the end are noticed."""
    b, h, t, d = x.shape
    around = torch.full((b, t + 3, h, d + beyond), torch.nan, dtype=x.dtype, device=x.device)
    around[:, 1 : t + 1, :, :d] = x.transpose(1, 2)
    return around[:, 1 : t + 1, :, :d].transpose(1, 2)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test with an empty cache: some tests change what a plan depends on."""
    monkeypatch.setattr("foci.statistics.cuda.plan.PASS_CACHE", {})


class Case:
    """Inputs, visible keys of each query, and the dense reference."""

    def __init__(self, heads=(2, 2), queries=24, keys=40, width=24, dtype=torch.float32, batch=1, seed=0, sharp=1.0):
        make = torch.Generator().manual_seed(seed)
        self.q = torch.randn(batch, heads[0], queries, width, generator=make).mul(sharp).to(DEVICE, dtype)
        self.k = torch.randn(batch, heads[1], keys, width, generator=make).to(DEVICE, dtype)
        self.seen = torch.ones(batch, heads[0], queries, keys, dtype=torch.bool, device=DEVICE)
        self.scale = width**-0.5
        self.options: dict[str, object] = {}
        self.sink = None

    @property
    def apart(self) -> Tensor:
        queries, keys = self.seen.shape[-2:]
        at = torch.arange(queries, device=DEVICE) + keys - queries
        return (at[:, None] - torch.arange(keys, device=DEVICE)).abs().double()

    def logits(self) -> Tensor:
        k = self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)
        s = self.q.double() @ k.double().mT
        if (weight := self.options.get("weight")) is not None:
            weight = weight.double().view(-1, 1, 1, self.q.shape[-1])
            s = (weight * torch.tanh(self.q.double().unsqueeze(3) + k.double().unsqueeze(2))).sum(-1)
        if self.options.get("bias_kind") == BEFORE_SCALE:
            s = s + self.biases()
        s = self.scale * s
        if cap := self.options.get("softcap"):
            s = cap * torch.tanh(s / cap)
        if (slopes := self.options.get("slopes")) is not None:
            s = s - slopes.double()[:, None, None] * self.apart
        if self.options.get("bias_kind") == AFTER_SCALE:
            s = s + self.biases()
        return s.masked_fill(~self.seen, -torch.inf)

    def biases(self) -> Tensor:
        """The entries of the row table of each query and key."""
        table = self.options["bias"].double().expand(*self.q.shape[:3], -1)
        clip, (queries, keys) = table.shape[-1] // 2, self.seen.shape[-2:]
        distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        index = (distance.clamp(-clip, clip) + clip).to(DEVICE)
        return table.gather(-1, index.expand(*self.q.shape[:2], -1, -1))

    def truth(self) -> tuple[Tensor, Tensor]:
        s = self.logits()
        lse = s.logsumexp(-1)
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink.double()[:, None])
        return torch.where(self.seen, torch.exp(s - lse.unsqueeze(-1)), 0.0), lse

    def run(self, wanted: Request, config: TileConfig = SMALL) -> dict[str, Tensor]:
        _, lse = self.truth()
        q, k = within_nan(self.q), within_nan(self.k)
        return launch_statistics(q, k, lse.float(), scale=self.scale, request=wanted, config=config, **self.options)


def no_mask() -> Case:
    return Case(queries=40, keys=40)


def causal(**kinds) -> Case:
    case = Case(**kinds)
    queries, keys = case.seen.shape[-2:]
    case.seen &= torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)
    case.options["causal"] = True
    return case


def pooled(weights: Tensor, rows: int, columns: int, reduce: str) -> Tensor:
    """By definition, cell by cell, with edges at floor(r T / rows)."""
    queries, keys = weights.shape[-2:]
    out = weights.new_zeros(*weights.shape[:-2], rows, columns)
    for r in range(rows):
        for c in range(columns):
            part = weights[..., r * queries // rows : (r + 1) * queries // rows, :]
            part = part[..., c * keys // columns : (c + 1) * keys // columns]
            out[..., r, c] = part.mean((-1, -2)) if reduce == "mean" else part.amax((-1, -2))
    return out


def close(got: Tensor, truth: Tensor, tolerance: float = 3e-6) -> None:
    torch.testing.assert_close(got.double(), truth, rtol=tolerance * 4, atol=tolerance)


def check_top(got: dict[str, Tensor], case: Case, top: int, tolerance: float = 3e-6) -> None:
    """Check that values are the largest weights, that keys match their values, are unique and visible."""
    weights, _ = case.truth()
    values, keys = got["top_values"], got["top_keys"].long()
    expected = weights.sort(-1, descending=True).values[..., :top]
    expected = torch.nn.functional.pad(expected, (0, top - expected.shape[-1]))
    close(values, expected, tolerance)
    count = case.seen.sum(-1, keepdim=True).clamp(max=top)
    assert torch.equal(keys >= 0, torch.arange(top, device=DEVICE) < count)
    named = weights.gather(-1, keys.clamp(min=0)).where(keys >= 0, torch.zeros((), dtype=torch.double, device=DEVICE))
    close(values, named, tolerance)
    assert bool(case.seen.gather(-1, keys.clamp(min=0))[keys >= 0].all())
    marks = torch.zeros_like(weights).scatter_add_(-1, keys.clamp(min=0), (keys >= 0).double())
    assert float(marks.max()) <= 1
