"""How long a first call waits: a kind of call that no process ran before, and lengths that this process did not run.

Each kind runs in one process with an empty Triton cache and in a second one with the cache of the first. A process
calls SDPA first, so that loading CUDA is not counted. New lengths: 24 random lengths, batch sizes and numbers of heads,
forward and backward. Kinds named "summary" call `weights.summary(top=8)` after the forward, instead of the backward.

All processes share a folder of bytecode, which a process before them fills: where an installation cannot write
bytecode, Python would parse the sources of Triton and foci in every process.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from table import Table, parse_options
from torch import Tensor

import foci

COLUMNS = ("case", "contestant", "forward_s", "second_s", "slow_lengths", "worst_s", "lengths_s", "note")
LENGTHS = 24
SLOW_SECONDS = 0.2
WIDTH = 64

Arguments = dict[str, Any]


def packed_documents(batch: int, length: int, device: torch.device) -> foci.Mask:
    return foci.causal & foci.documents((torch.arange(length, device=device) * 5 // length).expand(batch, length))


def parameter(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


KINDS: dict[str, Callable[[int, int, torch.device], Arguments]] = {
    "causal": lambda b, t, device: {"mask": foci.causal},
    "window": lambda b, t, device: {"mask": foci.causal & foci.window(max(t // 8, 1))},
    "padding": lambda b, t, device: {"mask": foci.padding(torch.randint(1, t + 1, (b,), device=device))},
    "documents": lambda b, t, device: {"mask": packed_documents(b, t, device)},
    "softcap": lambda b, t, device: {"mask": foci.causal, "score": foci.Dot(softcap=30.0)},
    "prefix": lambda b, t, device: {"mask": foci.causal | foci.prefix(t // 4)},
    "alibi": lambda b, t, device: {"mask": foci.causal, "bias": foci.ALiBi()},
    "additive": lambda b, t, device: {"mask": foci.causal, "score": foci.Additive(parameter(device, WIDTH))},
    "buckets": lambda b, t, device: {"mask": foci.causal, "bias": foci.Buckets(parameter(device, 32, 8), False, 128)},
    "relative": lambda b, t, device: {"mask": foci.causal, "bias": foci.Relative(parameter(device, 65, WIDTH))},
}
SUMMARIES = ("causal", "window", "padding", "documents", "softcap", "alibi", "additive", "relative")


def make_inputs(batch: int, heads: int, length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    shape = (batch, heads, length, WIDTH)
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]


def time_call(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds until the device is done, and the result."""
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def measure_kind(kind: str, dtype: torch.dtype, device: torch.device, largest: int) -> dict[str, float]:
    """The first call of a kind in this process, then new lengths."""
    rng = random.Random(0)
    q, k, v = make_inputs(2, 8, 300, dtype, device)
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    name, summarized = kind.removesuffix(" summary"), kind.endswith(" summary")
    arguments = KINDS[name](2, 300, device)
    forward, result = time_call(lambda: foci.attention(q, k, v, return_weights=summarized, **arguments), device)
    second, _ = time_call(lambda: finish_call(result, summarized), device)
    seconds = []
    for _ in range(LENGTHS):
        # Buckets have one column per head.
        heads = 8 if name == "buckets" else rng.choice((4, 8))
        batch, length = rng.randint(1, 4), rng.randint(17, largest)
        inputs, arguments = make_inputs(batch, heads, length, dtype, device), KINDS[name](batch, length, device)
        seconds.append(time_call(lambda x=inputs, a=arguments: run_both(x, a, summarized), device)[0])
    slow = sum(second > SLOW_SECONDS for second in seconds)
    return {
        "forward_s": forward, "second_s": second, "slow_lengths": slow, "worst_s": max(seconds),
        "lengths_s": sum(seconds),
    }  # fmt: skip


def run_both(inputs: list[Tensor], arguments: Arguments, summarized: bool) -> None:
    finish_call(foci.attention(*inputs, return_weights=summarized, **arguments), summarized)


def finish_call(result: Any, summarized: bool) -> None:
    """The backward, or the summary of the weights."""
    if summarized:
        result[1].summary(top=8)
    else:
        result.sum().backward()


def measure_in_process(
    kind: str, dtype: torch.dtype, device: torch.device, largest: int, cache: str, bytecode: str
) -> dict[str, Any]:
    """Runs measure_kind in a process of its own, with its own Triton cache."""
    command = [sys.executable, __file__, "--kind", kind, str(dtype).removeprefix("torch."), str(device), str(largest)]
    folders = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    environment = os.environ | folders | {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"note": done.stderr.strip().splitlines()[-1][:200]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    options = parse_options("first_call", str(__doc__).splitlines()[0], (torch.float32,))
    table = Table(options.device, COLUMNS, options.path)
    largest = 64 if options.quick else 2000
    kinds = [kind for kind in (*KINDS, *(f"{name} summary" for name in SUMMARIES)) if options.wants(kind)]
    with tempfile.TemporaryDirectory() as bytecode:
        measure = partial(measure_in_process, dtype=options.dtypes[0], device=options.device, bytecode=bytecode)
        with tempfile.TemporaryDirectory() as cache:
            measure("window summary", largest=64, cache=cache)
        for kind in kinds:
            if options.out_of_time:
                break
            with tempfile.TemporaryDirectory() as cache:
                for contestant in ("foci, empty cache", "foci, second process"):
                    table.add(case=kind, contestant=contestant, **measure(kind, largest=largest, cache=cache))
    table.print_table("first forward, seconds", ("case",), "forward_s", {})
    table.print_table("first backward or summary, seconds", ("case",), "second_s", {})
    table.print_table(f"of {LENGTHS} new lengths, over {SLOW_SECONDS} s", ("case",), "slow_lengths", {})
    table.print_table("the slowest of them, seconds", ("case",), "worst_s", {})
    table.print_failures()
    table.print_footer()
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--kind":
        name, dtype_name, device_name, longest = sys.argv[2:]
        print(json.dumps(measure_kind(name, getattr(torch, dtype_name), torch.device(device_name), int(longest))))
    else:
        raise SystemExit(main())
