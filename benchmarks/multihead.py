"""foci.nn.MultiheadAttention and torch.nn.MultiheadAttention with the same weights, with and without the matrix.

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
from table import Options, Table, dtype_name, parse_options
from timing import Clock, Contestant, Measured, compare, format_error, free_memory, log, make_clock
from torch import Tensor, nn

import foci.nn

COLUMNS = ("case", "dtype", "direction", "contestant", "ms", "spread", "rounds", "mib", "speed", "error", "note")
RETURNED_WEIGHTS: dict[str, dict[str, bool]] = {
    "no weights": {"need_weights": False},
    "averaged": {},
    "per head": {"average_attn_weights": False},
}
Results = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Case:
    """One layer, one input, and which weights it returns."""

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
        """Both layers, with the same weights."""
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
        found: Results = layer(x, x, x, attn_mask=hidden, is_causal=self.causal, **RETURNED_WEIGHTS[self.weights])
        return found


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(2, 33, 24, 2, weights) for weights in RETURNED_WEIGHTS]
    sizes = [(1, 2048, 512, 8), (4, 2048, 256, 4), (1, 2048, 256, 8), (4, 512, 512, 8)]
    plain = [Case(*size, weights) for size in sizes for weights in RETURNED_WEIGHTS]
    return [*plain, *(Case(1, 2048, 512, 8, weights, causal=True) for weights in RETURNED_WEIGHTS)]


def check_layers(case: Case, layers: dict[str, nn.Module], x: Tensor) -> dict[str, float | str]:
    """The largest error of each layer against float64, or why it fails: more than twice PyTorch's error and a floor."""
    exact = deepcopy(layers["torch"]).double().eval()
    found: dict[str, float | str] = {}
    with torch.no_grad():
        true = case.call(exact, x.double())
        errors = {name: largest_error(case.call(layer.eval(), x), true) for name, layer in layers.items()}
    for name, error in errors.items():
        allowed = 2 * errors["torch"] + FLOOR[x.dtype]
        # Written this way, NaN fails.
        gate = None if error <= allowed else format_error(GateError(f"off by {error:.2e}, allowed {allowed:.2e}"))
        found[name] = error if gate is None else f"GATE FAILED: {gate}"
    return found


def largest_error(found: Results, true: Results) -> float:
    pairs = [(one, other) for one, other in zip(found, true, strict=True) if one is not None and other is not None]
    return max(float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs)


def timed_function(case: Case, layer: nn.Module, x: Tensor, direction: str) -> Callable[[], Any]:
    """The function that is timed."""
    leaf = x.clone().requires_grad_()

    def forward() -> Results:
        with torch.no_grad():
            return case.call(layer.eval(), x)

    def training() -> tuple[Tensor, ...]:
        out, _ = case.call(layer.train(), leaf)
        return torch.autograd.grad(out.sum(), [leaf, *layer.parameters()])

    return forward if direction == "forward" else training


def run_case(case: Case, dtype: torch.dtype, options: Options, table: Table, clock: Clock) -> None:
    log(case.name)
    layers = case.layers(options.device, dtype)
    x = torch.randn(case.batch, case.tokens, case.width, device=options.device, dtype=dtype)
    errors = check_layers(case, layers, x)
    for direction in ("forward", "training"):
        passed = [name for name, error in errors.items() if isinstance(error, float)]
        runs = [Contestant(name, timed_function(case, layers[name], x, direction)) for name in passed]
        found: dict[str, Measured | str] = {name: str(error) for name, error in errors.items() if name not in passed}
        found |= compare(runs, clock, options.seconds)
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
    about = {"case": case.name, "dtype": dtype_name(dtype), "direction": direction}
    for name, measured in found.items():
        if isinstance(measured, str):
            table.add(**about, contestant=name, ms=None, note=measured)
            continue
        speed = peer.ms / measured.ms if isinstance(peer, Measured) else None
        figures = {"ms": measured.ms, "spread": measured.spread, "rounds": measured.rounds, "mib": measured.mib}
        table.add(**about, contestant=name, **figures, speed=speed, error=errors[name])


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    options = parse_options("multihead", __doc__ or "", (torch.float32,))
    table = Table(options.device, COLUMNS, options.path)
    clock = make_clock(options.device)
    for dtype in options.dtypes:
        for case in cases(options.quick):
            if not options.wants(case.name):
                continue
            if options.out_of_time:
                table.add(
                    case=case.name, dtype=dtype_name(dtype), contestant="foci", ms=None, note="not run: out of time"
                )
                continue
            run_case(case, dtype, options, table, clock)
            free_memory()
    table.print_table("milliseconds, median", ("case", "direction"), "ms", {"speed": ("foci", "speed")})
    table.print_table("peak MiB in addition to the inputs", ("case", "direction"), "mib", {})
    table.print_failures()
    table.print_footer()
    return int(table.has_failed_gate())


if __name__ == "__main__":
    sys.exit(main())
