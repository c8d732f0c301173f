"""foci.nn.MultiheadAttention beside torch.nn.MultiheadAttention with the same weights, with and without its matrix.

    python benchmarks/multihead.py                      every case, written to results/
    python benchmarks/multihead.py --only 2048 --out /tmp/multihead.csv

`forward` runs without gradients, in eval mode; `training` is forward and backward of the output's sum.

N batch, L tokens, E width, H heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from gates import FLOOR, GateError
from table import Options, Table, options, short
from timing import Clock, Contestant, Measured, clock_of, compare, one_line, release, say
from torch import Tensor, nn

import foci.nn

COLUMNS = ("case", "dtype", "direction", "contestant", "ms", "spread", "rounds", "mib", "speed", "error", "note")
ASKED: dict[str, dict[str, bool]] = {
    "no weights": {"need_weights": False},
    "averaged": {},
    "per head": {"average_attn_weights": False},
}
Results = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Case:
    """One layer and one input, and what is asked of it."""

    batch: int
    tokens: int
    width: int
    heads: int
    weights: str
    causal: bool = False

    @property
    def name(self) -> str:
        hidden = ", causal mask" if self.causal else ""
        return f"{self.weights}{hidden} n{self.batch} l{self.tokens} e{self.width} h{self.heads}"

    def layers(self, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
        """Both with the same weights."""
        torch.manual_seed(0)
        made: dict[str, nn.Module] = {
            name: kind(self.width, self.heads, batch_first=True, device=device, dtype=dtype)
            for name, kind in (("foci", foci.nn.MultiheadAttention), ("torch", nn.MultiheadAttention))
        }
        made["foci"].load_state_dict(made["torch"].state_dict())
        return made

    def call(self, layer: nn.Module, x: Tensor) -> Results:
        hidden = (
            torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        )
        found: Results = layer(x, x, x, attn_mask=hidden, is_causal=self.causal, **ASKED[self.weights])
        return found


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(2, 33, 24, 2, weights) for weights in ASKED]
    sizes = [(1, 2048, 512, 8), (4, 2048, 256, 4), (1, 2048, 256, 8), (4, 512, 512, 8)]
    plain = [Case(*size, weights) for size in sizes for weights in ASKED]
    return [*plain, *(Case(1, 2048, 512, 8, weights, causal=True) for weights in ASKED)]


def checked(case: Case, layers: dict[str, nn.Module], x: Tensor) -> dict[str, float | str]:
    """Each layer's largest error against float64, or why it gets no figure: twice PyTorch's own and a floor may be."""
    exact = deepcopy(layers["torch"]).double().eval()
    found: dict[str, float | str] = {}
    with torch.no_grad():
        true = case.call(exact, x.double())
        errors = {name: largest(case.call(layer.eval(), x), true) for name, layer in layers.items()}
    for name, error in errors.items():
        allowed = 2 * errors["torch"] + FLOOR[x.dtype]
        # Asked this way round, NaN fails.
        gate = None if error <= allowed else one_line(GateError(f"off by {error:.2e}, allowed {allowed:.2e}"))
        found[name] = error if gate is None else f"GATE FAILED: {gate}"
    return found


def largest(found: Results, true: Results) -> float:
    pairs = [(one, other) for one, other in zip(found, true, strict=True) if one is not None and other is not None]
    return max(float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs)


def work(case: Case, layer: nn.Module, x: Tensor, direction: str) -> Callable[[], Any]:
    """What is timed."""
    leaf = x.clone().requires_grad_()

    def forward() -> Results:
        with torch.no_grad():
            return case.call(layer.eval(), x)

    def training() -> tuple[Tensor, ...]:
        out, _ = case.call(layer.train(), leaf)
        return torch.autograd.grad(out.sum(), [leaf, *layer.parameters()])

    return forward if direction == "forward" else training


def run_case(case: Case, dtype: torch.dtype, asked: Options, table: Table, clock: Clock) -> None:
    say(case.name)
    layers = case.layers(asked.device, dtype)
    x = torch.randn(case.batch, case.tokens, case.width, device=asked.device, dtype=dtype)
    errors = checked(case, layers, x)
    for direction in ("forward", "training"):
        passed = [name for name, error in errors.items() if isinstance(error, float)]
        runs = [Contestant(name, work(case, layers[name], x, direction)) for name in passed]
        found: dict[str, Measured | str] = {name: str(error) for name, error in errors.items() if name not in passed}
        found |= compare(runs, clock, asked.seconds)
        add_rows(table, case, dtype, direction, found, errors)


def add_rows(
    table: Table,
    case: Case,
    dtype: torch.dtype,
    direction: str,
    found: dict[str, Measured | str],
    errors: dict[str, float | str],
) -> None:
    peer = found.get("torch")
    about = {"case": case.name, "dtype": short(dtype), "direction": direction}
    for name, measured in found.items():
        if isinstance(measured, str):
            table.add(**about, contestant=name, ms=None, note=measured)
            continue
        speed = peer.ms / measured.ms if isinstance(peer, Measured) else None
        figures = {"ms": measured.ms, "spread": measured.spread, "rounds": measured.rounds, "mib": measured.mib}
        table.add(**about, contestant=name, **figures, speed=speed, error=errors[name])


def main() -> int:
    """Runs what the command line asks for; 1 where foci failed a gate."""
    asked = options("multihead", __doc__ or "", (torch.float32,))
    table = Table(asked.device, COLUMNS, asked.path)
    clock = clock_of(asked.device)
    for dtype in asked.dtypes:
        for case in cases(asked.quick):
            if not asked.wants(case.name):
                continue
            if asked.over:
                table.add(case=case.name, dtype=short(dtype), contestant="foci", ms=None, note="not run: time was over")
                continue
            run_case(case, dtype, asked, table, clock)
            release()
    table.show("milliseconds, median", ("case", "direction"), "ms", {"times as fast": ("foci", "speed")})
    table.show("peak MiB beyond the inputs", ("case", "direction"), "mib", {})
    table.complaints()
    table.close()
    return int(table.wrong())


if __name__ == "__main__":
    sys.exit(main())
