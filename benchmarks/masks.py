"""Masks, softcaps, biases and sinks on a GPU: foci and compiled FlexAttention, decoding, and the host time of a call.

`--compile-first` compiles both for all cases in parallel processes before anything is timed.

B batch, H heads, G key/value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gates import FLOOR, GateError, error_of, sample_rows
from table import Options, Table, parse_options
from timing import Contestant, Measured, compare, format_error, free_memory, log, make_clock, measure_call_overhead
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import foci

COLUMNS = (
    "case", "direction", "contestant", "ms", "spread", "rounds", "tflops", "tb_per_s", "mib", "speed", "us", "note",
)  # fmt: skip
TOKENS, WIDTH = 16384, 2048
KINDS = ("window", "padding", "documents", "softcap", "bias", "sink", "prefix", "joined")
SOFTCAP = 20.0
COMPILERS = 14


@dataclass(frozen=True)
class Case:
    """One kind of mask, score or bias, and one shape: 16,384 tokens in all, width 2,048."""

    kind: str
    length: int
    width: int
    value_width: int | None = None

    @property
    def name(self) -> str:
        values = "" if self.value_width is None else f"/{self.value_width}"
        return f"{self.kind} b{self.batch} h{self.heads} d{self.width}{values} n{self.length}"

    @property
    def batch(self) -> int:
        return max(TOKENS // self.length, 1)

    @property
    def heads(self) -> int:
        return WIDTH // self.width

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Queries, keys, values and what is learned besides: bfloat16, on the device."""
        sizes = (self.batch, self.heads, self.length)
        made = {name: torch.randn(*sizes, self.width, device=device, dtype=torch.bfloat16) for name in "qk"}
        made["v"] = torch.randn(*sizes, self.value_width or self.width, device=device, dtype=torch.bfloat16)
        if self.kind == "bias":
            made["bias"] = torch.randn(1, self.heads, self.length, self.length, device=device, dtype=torch.bfloat16)
        if self.kind == "sink":
            made["sink"] = torch.randn(self.heads, device=device)
        return made

    def ids(self, device: torch.device) -> Tensor:
        """Eight documents of uneven lengths."""
        ends = (torch.linspace(0.4, 1.6, 8).cumsum(0) / 8 * self.length).round().long()
        return torch.searchsorted(ends, torch.arange(self.length), right=True).to(device)

    def lengths(self, device: torch.device) -> Tensor:
        """From a quarter of the tokens to all; a single sequence has three quarters."""
        if self.batch == 1:
            return torch.tensor([self.length * 3 // 4], device=device)
        return torch.linspace(self.length / 4, self.length, self.batch).round().long().to(device)

    def predicate(self, device: torch.device) -> Callable[[Any, Any, Any, Any], Tensor] | None:
        """The mask as FlexAttention takes it."""
        lengths, ids, prefix = self.lengths(device), self.ids(device), self.length // 8
        predicates: dict[str, Callable[[Any, Any, Any, Any], Tensor]] = {
            "window": lambda b, h, i, j: (j <= i) & (i - j < 1024),
            "padding": lambda b, h, i, j: j < lengths[b],
            "documents": lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i),
            "softcap": lambda b, h, i, j: j <= i,
            "sink": lambda b, h, i, j: j <= i,
            "prefix": lambda b, h, i, j: (j <= i) | (j < prefix),
            "joined": lambda b, h, i, j: (j <= i) & (i - j < 1024) & (j < lengths[b]),
        }
        return predicates.get(self.kind)

    def mask(self, device: torch.device) -> foci.Mask | None:
        """The same as a foci mask."""
        return {
            "window": lambda: foci.window(1023),
            "padding": lambda: foci.padding(self.lengths(device)),
            "documents": lambda: foci.causal & foci.documents(self.ids(device)),
            "prefix": lambda: foci.causal | foci.prefix(self.length // 8),
            "joined": lambda: foci.window(1023) & foci.padding(self.lengths(device)),
            "bias": lambda: None,
        }.get(self.kind, lambda: foci.causal)()  # type: ignore[no-any-return]

    def visible(self, rows: Tensor) -> Tensor | None:
        """The mask of some queries as a bool tensor."""
        predicate = self.predicate(rows.device)
        if predicate is None:
            return None
        batch = torch.arange(self.batch, device=rows.device).view(-1, 1, 1, 1)
        keys = torch.arange(self.length, device=rows.device).view(1, 1, 1, -1)
        return predicate(batch, 0, rows.view(1, 1, -1, 1), keys)

    def pairs(self, device: torch.device) -> int:
        """The number of visible (query, key) pairs."""
        total = 0
        for rows in torch.arange(self.length, device=device).split(512):
            mask = self.visible(rows)
            shape = (self.batch, 1, len(rows), self.length)
            total += math.prod(shape) if mask is None else int(mask.expand(shape).sum())
        return total * self.heads


def foci_attention(case: Case, device: torch.device) -> Callable[..., Tensor]:
    mask, score = case.mask(device), foci.Dot(softcap=SOFTCAP) if case.kind == "softcap" else foci.Dot()
    return lambda q, k, v, **more: foci.attention(q, k, v, mask=mask, score=score, **more)


def flex(case: Case, device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention, compiled for this shape."""
    torch._dynamo.reset()
    predicate, batch = case.predicate(device), case.batch if case.kind in {"padding", "joined"} else None
    blocks = None
    if predicate is not None:
        blocks = create_block_mask(predicate, batch, None, case.length, case.length, device=str(device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
        if sink is not None:
            out, lse = compiled(q, k, v, block_mask=blocks, return_lse=True)
            return out * torch.sigmoid(lse - sink.view(1, -1, 1)).unsqueeze(-1).to(out.dtype)
        if bias is not None:
            return compiled(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[0, h, i, j])  # type: ignore[no-any-return]
        if case.kind == "softcap":
            cap = lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP)  # noqa: E731
            return compiled(q, k, v, score_mod=cap, block_mask=blocks)  # type: ignore[no-any-return]
        return compiled(q, k, v, block_mask=blocks)  # type: ignore[no-any-return]

    return attend


def check_gate(case: Case, tensors: dict[str, Tensor], attend: Callable[..., Tensor]) -> None:
    """Raise if output or gradients of some queries are further from float64 than twice the reference's error."""
    rows = sample_rows(case.length, tensors["q"].device)
    out_gradient = torch.zeros(*tensors["q"].shape[:3], tensors["v"].shape[-1]).to(tensors["q"])
    out_gradient[:, :, rows] = torch.randn_like(out_gradient[:, :, rows])
    few = tensors | {"q": tensors["q"][:, :, rows]}
    if "bias" in few:
        few["bias"] = few["bias"][:, :, rows]
    score = foci.Dot(softcap=SOFTCAP) if case.kind == "softcap" else foci.Dot()

    def reference(q: Tensor, k: Tensor, v: Tensor, **more: Tensor) -> Tensor:
        return foci.attention(q, k, v, mask=case.visible(rows), score=score, backend="reference", **more)

    few_gradient = out_gradient[:, :, rows]
    truth = with_gradients(reference, {name: x.double() for name, x in few.items()}, few_gradient.double())
    eager = with_gradients(reference, few, few_gradient)
    found = with_gradients(attend, tensors, out_gradient)
    for name in ("out", "q", "k", "v"):
        own = found[name][:, :, rows] if name in {"out", "q"} else found[name]
        kind = "out" if name == "out" else "gradient"
        allowed = 2 * error_of(kind, eager[name], truth[name]) + FLOOR[torch.bfloat16]
        error = error_of(kind, own, truth[name])
        if not error <= allowed:
            raise GateError(f"{name} is off by {error:.2e}, allowed {allowed:.2e}")


def with_gradients(
    attend: Callable[..., Tensor], tensors: dict[str, Tensor], out_gradient: Tensor
) -> dict[str, Tensor]:
    """Output and gradients by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = attend(**leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), out_gradient)
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def forward(attend: Callable[..., Tensor], tensors: dict[str, Tensor], name: str) -> Contestant:
    def run() -> Tensor:
        with torch.no_grad():
            return attend(**tensors)

    return Contestant(name, run)


def backward(attend: Callable[..., Tensor], tensors: dict[str, Tensor], name: str) -> Contestant:
    """The backward alone; its forward runs before the timing."""
    leaves = {key: x.detach().requires_grad_() for key, x in tensors.items()}
    out_gradient = torch.randn(*tensors["q"].shape[:3], tensors["v"].shape[-1]).to(tensors["q"])

    def run(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, list(leaves.values()), out_gradient)

    return Contestant(name, run, before=lambda: attend(**leaves))


def run_case(case: Case, options: Options, table: Table) -> None:
    """Check and time both directions of one case."""
    device, tensors = options.device, case.tensors(options.device)
    attends = {"foci": foci_attention(case, device)}
    if case.value_width is None:
        attends["flex compiled"] = flex(case, device)
    notes: dict[str, str] = {}
    for name, attend in attends.items():
        try:
            check_gate(case, tensors, attend)
        except GateError as error:
            notes[name] = f"GATE FAILED: {error}"
        except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
            notes[name] = format_error(error)
        free_memory()
    operations, pairs = {"forward": 4, "backward": 10}, case.pairs(device)
    for direction, make in (("forward", forward), ("backward", backward)):
        running = [make(attend, tensors, name) for name, attend in attends.items() if name not in notes]
        found: dict[str, Measured | str] = notes | compare(running, make_clock(device), options.seconds)
        others = [m.ms for name, m in found.items() if isinstance(m, Measured) and name != "foci"]
        for name, measured in found.items():
            about = {"case": case.name, "direction": direction, "contestant": name}
            if isinstance(measured, str):
                table.add(**about, ms=None, note=measured)
                continue
            tflops = operations[direction] * pairs * (case.width + (case.value_width or case.width)) / 2 / measured.ms
            table.add(
                **about, ms=measured.ms, spread=measured.spread, rounds=measured.rounds, tflops=tflops / 1e9,
                mib=measured.mib, speed=min(others) / measured.ms if others else None,
            )  # fmt: skip


def run_decode(options: Options, table: Table) -> None:
    """A few queries against many keys, with padding and heads that share keys: bytes of keys and values per second."""
    device = options.device
    for width, group, queries, keys, batch in decode_cases():
        name = f"decode b{batch} h{8 * group}/8 d{width} n{queries}/{keys}"
        if not options.wants(name):
            continue
        q = torch.randn(batch, 8 * group, queries, width, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 8, keys, width, device=device, dtype=torch.bfloat16) for _ in range(2))
        lengths = torch.full((batch,), keys - 3, device=device)
        dense = (torch.arange(keys, device=device) < keys - 3).view(1, 1, 1, keys).expand(1, 1, queries, keys)
        copy = torch.empty(k.numel() * 2, device=device, dtype=torch.bfloat16)
        attends: dict[str, Callable[[], Any]] = {
            "foci": lambda: foci.attention(q, k, v, mask=foci.padding(lengths)),  # noqa: B023
            "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True),  # noqa: B023
            "copy": lambda: copy[: k.numel()].copy_(copy[k.numel() :]),  # noqa: B023
        }
        size = 2 * k.numel() * k.element_size()
        with torch.no_grad():
            found = compare([Contestant(key, run) for key, run in attends.items()], make_clock(device), options.seconds)
        add_decode_rows(table, name, "forward", found, size)
        if queries == 16 and keys == 16384:
            leaves = [x.requires_grad_() for x in (q, k, v)]
            gradient = torch.randn_like(q)
            contestants = [
                Contestant(key, lambda out: torch.autograd.grad(out, leaves, gradient), before=attends[key])  # noqa: B023
                for key in ("foci", "sdpa")
            ]
            found = compare(contestants, make_clock(device), options.seconds)
            add_decode_rows(table, name, "backward", found, 2 * size)
        free_memory()


def decode_cases() -> Iterator[tuple[int, int, int, int, int]]:
    """Width, heads per key/value head, queries, keys, sequences: up to 512 MiB of keys and values."""
    for group, queries, keys in ((4, 1, 16384), (4, 1, 131072), (4, 16, 16384), (4, 16, 131072), (1, 16, 16384)):
        yield 128, group, queries, keys, 131072 // keys


def add_decode_rows(table: Table, name: str, direction: str, found: dict[str, Measured | str], size: int) -> None:
    for contestant, measured in found.items():
        about = {"case": name, "direction": direction, "contestant": contestant}
        if isinstance(measured, str):
            table.add(**about, ms=None, note=measured)
        else:
            table.add(**about, ms=measured.ms, spread=measured.spread, tb_per_s=size / measured.ms / 1e9)


def run_host_time(options: Options, table: Table) -> None:
    """The host time of a call at 64 tokens; the mask object is made in each call."""
    if not options.wants("host"):
        return
    device = options.device
    q = torch.randn(2, 8, 64, 64, device=device, dtype=torch.bfloat16)
    lengths, ids, dense = torch.tensor([64, 30], device=device), torch.arange(64, device=device) // 16, None
    dense = torch.ones(64, 64, device=device, dtype=torch.bool).tril()
    attend, sdpa = foci.attention, F.scaled_dot_product_attention
    calls: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: sdpa(q, q, q),
        "sdpa, bool mask": lambda: sdpa(q, q, q, attn_mask=dense),
        "plain": lambda: attend(q, q, q),
        "window": lambda: attend(q, q, q, mask=foci.window(16)),
        "padding": lambda: attend(q, q, q, mask=foci.padding(lengths)),
        "documents": lambda: attend(q, q, q, mask=foci.documents(ids)),
        "joined": lambda: attend(q, q, q, mask=foci.causal & foci.documents(ids) & foci.padding(lengths)),
        "softcap": lambda: attend(q, q, q, score=foci.Dot(softcap=SOFTCAP)),
        "prefix": lambda: attend(q, q, q, mask=foci.causal | foci.prefix(9)),
        "dense mask": lambda: attend(q, q, q, mask=dense),
    }
    with torch.no_grad():
        for name, cost in measure_call_overhead(calls, device, quick=True).items():
            table.add(case="host b2 h8 d64 n64", direction="forward", contestant=name, us=cost)


def cases() -> list[Case]:
    """The important ones first. A bias of 16,384 tokens would take 8 GiB."""
    plain = [
        Case(kind, length, width)
        for length in (4096, 1024, 16384)
        for width in (128, 64)
        for kind in KINDS
        if kind != "bias" or length < 16384
    ]
    return [*plain, Case("window", 4096, 256), Case("softcap", 4096, 256), Case("window", 4096, 192, 128)]


def compile_in_processes(names: list[str]) -> None:
    """Fill the compiler's cache on disk, several cases at a time."""
    running: list[subprocess.Popen[bytes]] = []
    for part in range(min(COMPILERS, len(names))):
        command = [sys.executable, __file__, "--compile", *names[part::COMPILERS]]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for process in running:
        process.wait()


def compile_cases(names: list[str]) -> None:
    """Compile both contestants, forward and backward, for the cases of these names."""
    device = torch.device("cuda")
    for case in cases():
        if case.name not in names:
            continue
        tensors = case.tensors(device)
        out_gradient = torch.randn(*tensors["q"].shape[:3], tensors["v"].shape[-1]).to(tensors["q"])
        for make in (foci_attention, flex) if case.value_width is None else (foci_attention,):
            with_gradients(make(case, device), tensors, out_gradient)
            with torch.no_grad():
                make(case, device)(**tensors)


def main() -> int:
    """Run the benchmark; the exit status is 1 if foci failed a gate."""
    if "--compile" in sys.argv:
        compile_cases(sys.argv[sys.argv.index("--compile") + 1 :])
        return 0
    first = "--compile-first" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--compile-first"]
    options = parse_options("masks", __doc__ or "", (torch.bfloat16,))
    if options.device.type != "cuda":
        raise SystemExit("masks.py needs a CUDA device")
    table = Table(options.device, COLUMNS, options.path)
    wanted = [case for case in cases() if options.wants(case.name)]
    if first:
        compile_in_processes([case.name for case in wanted])
    run_host_time(options, table)
    run_decode(options, table)
    for case in wanted:
        if options.out_of_time:
            table.add(case=case.name, contestant="foci", ms=None, note="not run: out of time")
            continue
        log(case.name)
        try:
            run_case(case, options, table)
        except Exception as error:  # noqa: BLE001 - continue with the other cases
            table.add(case=case.name, contestant="foci", ms=None, note=format_error(error))
        free_memory()
    table.print_table("host microseconds of a call", ("case",), "us", {})
    own = {"foci TFLOP/s": ("foci", "tflops"), "TB/s": ("foci", "tb_per_s"), "speed": ("foci", "speed")}
    table.print_table("milliseconds (speed: FlexAttention's / foci's)", ("case", "direction"), "ms", own)
    table.print_failures()
    table.print_footer()
    return int(table.has_failed_gate())


if __name__ == "__main__":
    sys.exit(main())
