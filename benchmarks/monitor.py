"""The cost of `foci.Monitor`: training steps of a GPT with 124 million parameters, plain and monitored.

A step is forward, backward and a fused AdamW, with bfloat16 weights on a GPU. Compiled and eager with `foci.nn`, and
eager with the GPT-2 of transformers on SDPA. `times` is a multiple of the plain step of the same case; a monitored step
does not include `log`, and `amortised` runs 50 steps of which one is monitored and logged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gates import GateError
from table import Options, Table, parse_options
from timing import Contestant, compare, format_error, free_memory, log, make_clock
from torch import Tensor, nn

import foci

COLUMNS = ("case", "contestant", "ms", "spread", "rounds", "times", "mib", "first_s", "note")
EVERY = 50
# The allowed difference between the statistics of compiled and eager steps in bfloat16, relative to their mean.
ALLOWED = 2e-2

BASE = {"batch": 32, "length": 1024, "vocabulary": 50304, "width": 768, "layers": 12, "heads": 12}
QUICK = {"batch": 2, "length": 32, "vocabulary": 104, "width": 32, "layers": 2, "heads": 2}


class Training:
    """A model in training; `step` runs one step, inside the block of a monitor if there is one."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(self, monitor: foci.Monitor | None = None, *_: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if monitor is None:
            loss = self.loss()
        else:
            with monitor:
                loss = self.loss()
        loss.backward()
        self.optimizer.step()


def build_decoder(
    size: dict[str, int], device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A decoder of foci with the sizes of GPT-2, and its loss."""
    config = foci.nn.TransformerConfig(
        vocabulary=size["vocabulary"],
        width=size["width"],
        layers=size["layers"],
        heads=size["heads"],
        max_length=size["length"],
        positions="learned",
        dropout=0.0,
    )
    model = foci.nn.Decoder(config).to(device, dtype)
    tokens = torch.randint(size["vocabulary"], (size["batch"], size["length"]), device=device)
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)

    def loss() -> Tensor:
        return foci.nn.token_loss(model(tokens).states, model.embedding.tokens.weight, labels, chunk=8192)

    return model, loss


def build_gpt2(
    size: dict[str, int], device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The GPT-2 of transformers without dropout, on SDPA."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size["vocabulary"],
        n_positions=size["length"],
        n_embd=size["width"],
        n_layer=size["layers"],
        n_head=size["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=None,
    )
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config).to(device, dtype)
    tokens = torch.randint(size["vocabulary"], (size["batch"], size["length"]), device=device)

    def loss() -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found

    return model, loss


def measure(case: str, training: Training, compiled: bool, options: Options, table: Table) -> None:
    """Time the plain step, the monitored step with all statistics and, of eager models, with the largest logit only."""
    seconds = {"plain": timed(training.step)}
    monitors = {"monitored": foci.Monitor(training.model, every=1, compiled=compiled)}
    if not compiled:
        # Compiled, it would take a third graph.
        monitors["largest logit"] = foci.Monitor(training.model, every=1, statistics=["largest_logit"])
    for name, monitor in monitors.items():
        # The first monitored step of a compiled model runs uncompiled, the second compiles.
        seconds[name] = timed(partial(training.step, monitor)) + timed(partial(training.step, monitor))
        log(f"  {case}: two first steps {name}: {seconds[name]:.1f} s")
    check(case, training, monitors["monitored"], compiled)
    contestants = [Contestant("plain", training.step)]
    contestants += [
        Contestant(name, partial(training.step, monitor), monitor.log) for name, monitor in monitors.items()
    ]
    clock = make_clock(options.device)
    clock.min_rounds = 5
    found = compare(contestants, clock, 3 * options.seconds)
    plain = found["plain"]
    for name, each in found.items():
        if isinstance(each, str) or isinstance(plain, str):
            table.add(case=case, contestant=name, times=None, note=str(each))
            continue
        times = each.ms / plain.ms
        table.add(
            case=case,
            contestant=name,
            ms=each.ms,
            spread=each.spread,
            rounds=each.rounds,
            times=times,
            mib=each.mib,
            first_s=seconds[name],
        )
        log(f"  {case}, {name}: {each.ms:.2f} ms, {times:.3f} of the plain step, {each.mib:,.0f} MiB")
    if options.quick or options.seconds >= 1:
        # A hundred steps: not in a short run.
        add_amortised(case, training, monitors["monitored"], options, table)


def add_amortised(case: str, training: Training, monitor: foci.Monitor, options: Options, table: Table) -> None:
    """50 steps of which one is monitored and logged, after 50 plain ones, by the clock of the host."""
    monitor.every = steps = 4 if options.quick else EVERY
    monitor.step = 1
    plain = timed(lambda: run_steps(training, steps, None))
    monitored = timed(lambda: run_steps(training, steps, monitor))
    times = monitored / plain
    table.add(case=case, contestant="amortised", ms=1e3 * monitored / steps, rounds=1, times=times)
    log(f"  {case}, one of {steps} steps monitored and logged: {times:.4f} of plain steps")


def run_steps(training: Training, steps: int, monitor: foci.Monitor | None) -> None:
    for _ in range(steps):
        training.step(monitor)
        if monitor is not None:
            monitor.log()


def timed(run: Callable[[], Any]) -> float:
    """The seconds of a run, until the GPU is idle."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check(case: str, training: Training, monitor: foci.Monitor, compiled: bool) -> None:
    """The statistics of a compiled step equal those of an eager one, and a monitored step does not wait for the GPU."""
    if monitor.uncompiled is not None:
        raise GateError(f"the monitored step runs uncompiled: {monitor.uncompiled}")
    monitor.log()
    eager = foci.Monitor(training.model, compiled=False)
    with eager:
        training.loss()
    eager.log()
    waits = does_wait(training.loss)

    def run_monitored() -> None:
        with monitor:
            training.loss()

    if does_wait(run_monitored) and not waits:
        raise GateError("a monitored step waits for the GPU, a plain one does not")
    if waits:
        log(f"  {case}: the plain step waits for the GPU by itself")
        run_monitored()
    monitor.log()
    for name in ("entropy", "heaviest", "first_token", "distance", "largest_logit"):
        found, expected = monitor.history.values(name)[-1], eager.history.values(name)[-1]
        error = float((found - expected).abs().mean() / expected.abs().mean())
        if not error <= ALLOWED:
            raise GateError(f"{name} is off by {error:.2e} on average, allowed {ALLOWED:.0e}")
    log(f"  {case}: gates passed; largest logit {float(found.max()):.2f}")


def does_wait(run: Callable[[], Any]) -> bool:
    """Whether a run waits for the GPU."""
    if not torch.cuda.is_available():
        run()
        return False
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def main() -> int:
    """Run the benchmark; the exit status is 1 if a gate failed."""
    options = parse_options("monitor", __doc__ or "", (torch.float32,))
    table = Table(options.device, COLUMNS, options.path)
    size, (dtype, *_) = QUICK if options.quick else BASE, options.dtypes
    backend = "aot_eager" if options.quick and options.device.type == "cpu" else "inductor"
    cases: dict[str, tuple[Callable[..., Any], bool]] = {
        "foci eager": (build_decoder, False),
        "transformers eager": (build_gpt2, False),
        "foci, blocks compiled": (build_decoder, True),
        "foci, whole step compiled": (build_decoder, True),
    }
    for case, (build, compiled) in cases.items():
        if not options.wants(case):
            continue
        torch.manual_seed(0)
        try:
            if options.out_of_time:
                raise TimeoutError("not run: out of time")
            model, loss = build(size, options.device, dtype)
            if case == "foci, blocks compiled":
                # One graph for all of them, which compiles in a fraction of the time.
                for block in model.blocks:
                    block.compile(backend=backend, dynamic=False)
            elif compiled:
                loss = torch.compile(loss, backend=backend, dynamic=False)
            training = Training(model, loss)
            measure(case, training, compiled, options, table)
        except Exception as error:  # noqa: BLE001 - continue with the other cases
            failed = "GATE FAILED: " if isinstance(error, GateError) else ""
            table.add(case=case, contestant="foci", times=None, note=failed + format_error(error))
            log(f"  {case}: {failed}{format_error(error)}")
        torch._dynamo.reset()
        free_memory()
    table.print_table("multiples of the plain step", ("case",), "times", {"plain ms": ("plain", "ms")})
    table.print_failures()
    table.print_footer()
    return int(table.has_failed_gate())


if __name__ == "__main__":
    sys.exit(main())
