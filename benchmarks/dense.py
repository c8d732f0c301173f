"""Statistics from a dense matrix: the eager contestant, and the truth in float64, block by block.

B batch, H heads, R some of the queries, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import torch
from gates import GateError, row_error
from peers import Case
from torch import Tensor

TOP = 8
PICTURE = 256

# Allowed error relative to the value and to the mean of its kind: float32 arithmetic in any order.
SHARE = 2e-4
MEAN_SHARE = 1e-4
OUT = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Found = dict[str, Tensor]


def matrix(q: Tensor, k: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """All scores and weights."""
    scores = q @ repeat_heads(k, q.shape[1]).mT * q.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores, scores.softmax(-1)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values for every query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def average_blocks(weights: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix averaged in blocks; the lengths must be multiples of the numbers of blocks."""
    blocks: Tensor = weights.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
    return blocks.mean((-1, -3))


def eager(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, top: bool) -> Found:
    """Output, entropy, column sums, picture and heaviest keys in eager code, with the softmax in float32."""
    _, weights = matrix(q.float(), k.float(), visible)
    found = {
        "out": weights.to(v.dtype) @ repeat_heads(v, q.shape[1]),
        "entropy": torch.special.entr(weights).sum(-1),
        "received": weights.sum(-2),
        "picture": average_blocks(weights, *picture_size(q, k)),
    }
    if top:
        found["top_values"], found["top_keys"] = weights.topk(TOP, dim=-1)
    return found


def picture_size(q: Tensor, k: Tensor) -> tuple[int, int]:
    return min(PICTURE, q.shape[2]), min(PICTURE, k.shape[2])


class Truth:
    """Every statistic in float64 on the inputs that are timed."""

    def __init__(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> None:
        rows, columns = picture_size(q, k)
        if q.shape[2] % rows or k.shape[2] % columns:
            raise ValueError(f"lengths must be multiples of {rows} x {columns} blocks, got {case.name}")
        self.case, self.q, self.k = case, q, k
        wide = repeat_heads(k, q.shape[1]).double(), repeat_heads(v, q.shape[1]).double()
        height = q.shape[2] // rows
        parts = [self.part(*wide, block, height, columns) for block in self.blocks(height)]
        self.found = {name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]}
        self.found["received"] = self.found["received"].sum(2)
        self.found["largest"] = self.found["largest"].amax(2)

    def blocks(self, height: int) -> tuple[Tensor, ...]:
        """The queries in groups of whole picture rows, each small enough for its matrix to fit in memory."""
        entries = 2**27 if self.q.device.type == "cuda" else 2**22
        across = self.q.shape[0] * self.q.shape[1] * self.k.shape[2] * height
        queries = torch.arange(self.q.shape[2], device=self.q.device)
        return torch.split(queries, height * max(entries // across, 1))

    def part(self, k: Tensor, v: Tensor, rows: Tensor, height: int, columns: int) -> Found:
        """The statistics of some queries; those per key or head have an axis along which parts are concatenated."""
        scores, weights = matrix(self.q[:, :, rows].double(), k, self.case.visible(rows))
        keys = torch.arange(self.case.tk, device=rows.device)
        away = (keys - rows.unsqueeze(-1) - (self.case.tk - self.case.queries)).abs().double()
        return {
            "out": weights @ v,
            "lse": scores.logsumexp(-1),
            "entropy": torch.special.entr(weights).sum(-1),
            "received": weights.sum(-2, keepdim=True),
            "distance": (weights * away).sum(-1),
            "largest": scores.amax((-2, -1)).unsqueeze(-1),
            "picture": average_blocks(weights, len(rows) // height, columns),
            # top-k in float64 takes many more passes on a GPU, for digits that are not compared.
            "top_values": weights.float().topk(TOP, dim=-1).values,
        }

    def check(self, found: Found) -> None:
        """Raise if a statistic is wrong."""
        for name, tensor in found.items():
            if name == "top_keys":
                self.check_keys(tensor, found["top_values"])
            elif name == "out":
                check_within(name, row_error(tensor, self.found[name]), OUT[self.q.dtype])
            else:
                truth = self.found[name].double()
                allowed = SHARE * truth.abs() + MEAN_SHARE * truth.abs().mean()
                check_within(name, float(((tensor.double() - truth).abs() / allowed).max()), 1.0)

    def check_keys(self, keys: Tensor, values: Tensor) -> None:
        """Check that each key occurs once, is visible and has the returned weight."""
        counted = values > 0
        ordered = torch.where(counted, keys, -1 - torch.arange(TOP, device=keys.device)).sort(-1).values
        if bool((ordered.diff(dim=-1) == 0).any()):
            raise GateError("top_keys names a key twice")
        for rows in torch.arange(self.case.queries, device=keys.device).split(256):
            some = keys[:, :, rows].clamp(min=0)
            weights = self.weights_at(rows, some)
            error = (weights - values[:, :, rows].double()).abs() / (weights.abs() * SHARE + 1e-9)
            check_within("the weight of a top key", float(torch.where(counted[:, :, rows], error, 0.0).max()), 1.0)

    def weights_at(self, rows: Tensor, keys: Tensor) -> Tensor:
        """The weights of single entries: keys (B, H, R, TOP)."""
        batch = torch.arange(keys.shape[0], device=keys.device).view(-1, 1, 1, 1)
        head = torch.arange(keys.shape[1], device=keys.device).view(1, -1, 1, 1)
        chosen = self.k[batch, head // (self.q.shape[1] // self.k.shape[1]), keys].double()  # (B, H, R, TOP, D)
        scores = (self.q[:, :, rows, None].double() * chosen).sum(-1) * self.q.shape[-1] ** -0.5
        weights = (scores - self.found["lse"][:, :, rows, None]).exp()
        visibility = self.case.visibility(keys.device)
        return (
            weights
            if visibility is None
            else torch.where(visibility(batch, head, rows.view(1, 1, -1, 1), keys), weights, 0.0)
        )


def check_within(name: str, error: float, allowed: float) -> None:
    # Written this way, NaN fails.
    if not error <= allowed:
        raise GateError(f"{name} is off by {error / allowed:.2g} times what is allowed")
