"""Kinds of call that our GPU kernels are compiled for, and how to compile them without a GPU.

`python -m tests.kernels.kinds 90` compiles every kind for compute capability 9.0 with the installed Triton and prints
a line for each that does not compile. `python -m tests.kernels.kinds --versions 3.5 3.9` does that for 8.0, 9.0 and
10.0 with each of these versions of Triton, in an environment of its own; `--versions newest` with the newest one.
`--resources file.csv` lists the registers, stack and shared memory that each kernel takes.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

# Triton reads this when a kernel is defined.
os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import foci
import foci.statistics.cuda.hopper
from foci.arguments import Call, prepare_call
from foci.gpu import additive, attention, compilation, launcher
from foci.gpu.compilation import CollectedLaunch, collect_launches
from foci.statistics.cuda import columns, divergence, plan

CAPABILITIES = (80, 90, 100)
# Bytes of shared memory that a launch can have.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
NEWEST = "newest"
Arguments = dict[str, Any]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of the GPU that does not exist."""
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def table(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.float32)


def documents(length: int) -> foci.Mask:
    return foci.causal & foci.documents(tensor(2, length, dtype=torch.int64))


# By name: dtype, width, queries, whether the backward and the summary of the weights run, and the other arguments.
Kind = tuple[torch.dtype, int, int, bool, bool, Callable[[int, int], Arguments]]
HALF, FULL = torch.bfloat16, torch.float32
LENGTH = 256

KINDS: dict[str, Kind] = {
    "window": (HALF, 64, LENGTH, True, True, lambda d, t: {"mask": foci.causal & foci.window(64)}),
    "window 128": (HALF, 128, LENGTH, True, True, lambda d, t: {"mask": foci.causal & foci.window(64)}),
    "window 256": (HALF, 256, LENGTH, True, False, lambda d, t: {"mask": foci.causal & foci.window(64)}),
    "window float32": (FULL, 64, LENGTH, True, True, lambda d, t: {"mask": foci.causal & foci.window(64)}),
    "window odd width": (HALF, 40, LENGTH, True, True, lambda d, t: {"mask": foci.causal & foci.window(64)}),
    "padding": (HALF, 64, LENGTH, True, True, lambda d, t: {"mask": foci.padding(tensor(2, dtype=torch.int64))}),
    "documents 128": (HALF, 128, LENGTH, True, False, lambda d, t: {"mask": documents(LENGTH)}),
    "documents": (HALF, 64, LENGTH, True, True, lambda d, t: {"mask": documents(LENGTH)}),
    "prefix": (HALF, 64, LENGTH, True, True, lambda d, t: {"mask": foci.causal | foci.prefix(30)}),
    "dense": (HALF, 64, LENGTH, True, True, lambda d, t: {"mask": tensor(t, LENGTH, dtype=torch.bool)}),
    "softcap": (HALF, 64, LENGTH, True, True, lambda d, t: {"score": foci.Dot(softcap=30.0), "mask": foci.causal}),
    "alibi": (HALF, 64, LENGTH, True, True, lambda d, t: {"bias": foci.ALiBi(table(8)), "mask": foci.causal}),
    "dense bias": (HALF, 64, LENGTH, True, False, lambda d, t: {"bias": tensor(8, t, LENGTH)}),
    "dense bias, other dtype": (HALF, 128, LENGTH, True, False, lambda d, t: {"bias": table(t, LENGTH)}),
    "dense bias 128": (HALF, 128, LENGTH, True, False, lambda d, t: {"bias": tensor(8, t, LENGTH)}),
    "dense bias 256 float32": (FULL, 256, LENGTH, True, False, lambda d, t: {"bias": table(8, t, LENGTH)}),
    "sink": (HALF, 64, LENGTH, True, False, lambda d, t: {"mask": foci.causal, "sink": table(8)}),
    "dropout": (HALF, 64, LENGTH, True, False, lambda d, t: {"mask": foci.window(64), "dropout": 0.1}),
    "one query": (HALF, 64, 1, True, True, lambda d, t: {"mask": foci.window(64)}),
    "buckets": (HALF, 64, LENGTH, True, False, lambda d, t: {"bias": foci.Buckets(table(32, 8), True, 128)}),
    "buckets causal": (
        HALF, 128, LENGTH, True, True,
        lambda d, t: {"bias": foci.Buckets(table(32, 8), False, 128), "mask": foci.causal},
    ),
    "buckets 256": (HALF, 256, LENGTH, True, False, lambda d, t: {"bias": foci.Buckets(table(32, 8), True, 128)}),
    "buckets float32": (FULL, 64, LENGTH, True, True, lambda d, t: {"bias": foci.Buckets(table(32, 8), True, 128)}),
    "relative": (HALF, 64, LENGTH, True, True, lambda d, t: {"bias": foci.Relative(table(65, d))}),
    "relative values": (
        HALF, 64, LENGTH, True, False, lambda d, t: {"bias": foci.Relative(table(65, d), table(65, d))},
    ),
    "additive": (HALF, 64, LENGTH, True, True, lambda d, t: {"score": foci.Additive(tensor(d)), "mask": foci.causal}),
    "additive 256": (HALF, 256, LENGTH, True, True, lambda d, t: {"score": foci.Additive(tensor(d))}),
    "additive float32": (FULL, 64, LENGTH, True, True, lambda d, t: {"score": foci.Additive(table(d))}),
    "additive padding": (
        HALF, 64, LENGTH, True, False,
        lambda d, t: {"score": foci.Additive(tensor(d)), "mask": foci.padding(tensor(2, dtype=torch.int64))},
    ),
    "additive deterministic": (HALF, 64, LENGTH, True, False, lambda d, t: {"score": foci.Additive(tensor(d))}),
    "additive few queries": (HALF, 64, 12, True, False, lambda d, t: {"score": foci.Additive(tensor(d))}),
    "additive one query": (HALF, 64, 1, True, False, lambda d, t: {"score": foci.Additive(tensor(d))}),
    "causal summary": (HALF, 64, LENGTH, False, True, lambda d, t: {"mask": foci.causal}),
    "causal summary 128": (HALF, 128, LENGTH, False, True, lambda d, t: {"mask": foci.causal}),
    "causal summary any length": (HALF, 128, 2000, False, True, lambda d, t: {"mask": foci.causal}),
    "summary odd length": (HALF, 64, 200, False, True, lambda d, t: {}),
    "summary float32 maxima": (FULL, 64, LENGTH, False, True, lambda d, t: {}),
    "divergence": (HALF, 128, LENGTH, False, False, lambda d, t: {"mask": foci.causal}),
    "columns": (HALF, 64, LENGTH, False, False, lambda d, t: {}),
    "columns float32": (FULL, 256, LENGTH, False, False, lambda d, t: {}),
}  # fmt: skip


class TargetDriver:
    """Stands for the driver of a GPU: Triton compiles for its target and never launches."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        # Triton finds the kernels that it compiled by this number.
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


class Context:
    """Stands for the context of an autograd function: fake tensors of a GPU have no autograd without a GPU."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (True,) * inputs

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, wanted: bool) -> None:
        pass


def index_fake_tensor(x: Tensor, index: Any) -> Tensor:
    """x[index] as a new tensor of the same layout: indexing a fake tensor of a GPU needs PyTorch for CUDA."""
    if isinstance(index, Tensor):
        return x.index_select(0, index)
    part = torch._C.TensorBase.__getitem__(x.to("meta"), index)
    return torch.empty_strided(part.shape, part.stride(), dtype=x.dtype, device=x.device)


def run_both_directions(function: Any) -> Callable[..., Any]:
    def apply(*inputs: Any) -> Any:
        context = Context(len(inputs))
        results = function.forward(context, *inputs)
        outputs = results if isinstance(results, tuple) else (results,)
        function.backward(context, torch.empty_like(outputs[0]), *[None] * (len(outputs) - 1))
        return results

    return apply


@contextmanager
def imagined_gpu(capability: int, backward: bool) -> Iterator[None]:
    """Fake tensors on "cuda" count as real ones of a GPU with 132 multiprocessors."""
    from triton.runtime import driver

    driver.set_active(TargetDriver(capability))
    answers = {
        "is_traced": lambda tensor: False,
        "count_multiprocessors": lambda device: 132,
        "major_capability": lambda index: capability // 10,
        "is_hopper_or_later": lambda index: capability >= 90,
        "address_failure": lambda index: None,
        "gluon_failure": lambda index: None,
        "forbid_double_backward": lambda gradients, *inputs: gradients,
    }
    with ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("foci.")]:
            for name, answer in answers.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, answer))
        stack.enter_context(mock.patch.object(compilation, "is_traced", return_value=True))
        # Plans made for another GPU.
        stack.enter_context(mock.patch.object(launcher, "CACHED_PLANS", {}))
        stack.enter_context(mock.patch.object(plan, "PASS_CACHE", {}))
        stack.enter_context(mock.patch.object(columns, "COLUMNS_LAUNCHES", {}))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)))
        stack.enter_context(mock.patch.object(Call, "needs_grad", property(lambda call: backward)))
        stack.enter_context(mock.patch.object(Tensor, "copy_", return_value=None))
        stack.enter_context(mock.patch.object(Tensor, "__getitem__", index_fake_tensor))
        for function in (additive.AdditiveAttention, attention.KernelAttention, divergence.DivergenceFunction):
            stack.enter_context(mock.patch.object(function, "apply", run_both_directions(function)))
        yield


def collect_kind(name: str, capability: int) -> list[CollectedLaunch]:
    """The launches of one kind of call."""
    dtype, width, queries, backward, summary, build = KINDS[name]
    with (
        imagined_gpu(capability, backward),
        FakeTensorMode(allow_non_fake_inputs=True),
        collect_launches() as collected,
    ):
        q, k = tensor(2, 8, queries, width, dtype=dtype), tensor(2, 8, max(LENGTH, queries), width, dtype=dtype)
        arguments = build(width, queries)
        if name == "divergence":
            collect_divergence(q, k, arguments)
        elif name.startswith("columns"):
            columns.compute_columns(q, k, range(1, 2), range(11), dtype)
        elif not name.startswith(("causal summary", "summary")):
            with mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value="determin" in name):
                foci.attention(q, k, k, backend="triton", **arguments)
        if summary:
            collect_summary(q, k, arguments, "max" if name.endswith("maxima") else "mean")
    return collected


def collect_divergence(q: Tensor, k: Tensor, arguments: Arguments) -> None:
    """The launches of the divergence of a head from the mean of all heads, and of its gradients."""
    teacher, student = (call_of(queries, keys, arguments) for queries, keys in ((q, k), (q[:, :1], k[:, :1])))
    with torch.no_grad():
        divergence.compute_divergence(teacher, student, True, (None, None), lambda q, k: q)


def collect_summary(q: Tensor, k: Tensor, arguments: Arguments, reduce: str) -> None:
    """The launches of a summary with a picture; the forward of another backend is not of interest."""
    from foci.statistics import compute_statistics
    from foci.statistics.request import Request

    call = call_of(q, k, arguments)
    size = (min(64, q.shape[2]), 64, reduce)
    request = Request(entropy=True, received=True, picture=size, top=8, largest_logit=True, distance=True)
    compute_statistics(call, table(*q.shape[:3]), request, False)


def call_of(q: Tensor, k: Tensor, arguments: Arguments) -> Call:
    given = arguments.get("score", foci.Dot()), arguments.get("mask"), arguments.get("bias")
    return prepare_call(q, k, k, *given, None, None, 0.0, True)


class Resources(NamedTuple):
    """What a compiled kernel takes: warps, bytes of shared memory, registers and bytes of stack per thread."""

    kernel: str
    warps: int
    shared: int
    registers: int
    stack: int  # spilled registers, nearly always


def compile_kind(name: str, capability: int) -> list[Resources]:
    """Compile the kernels of a kind and read what they take; an error where they do not fit on the GPU."""
    collected = collect_kind(name, capability)
    assert collected, "no launches"
    compilation.compile_collected(collected)
    compiled = {
        kernel.hash: (each.launch.kernel.__name__, kernel)
        for each in collected
        for kernel in [compilation.start_compiling(each.launch, each.arguments())]
    }
    found = [read_resources(*each) for each in compiled.values()]
    for each in found:
        assert each.shared <= SHARED_MEMORY[capability], (
            f"{each.kernel} takes {each.shared} bytes of shared memory, the GPU has {SHARED_MEMORY[capability]}"
        )
    return found


def read_resources(name: str, kernel: Any) -> Resources:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(number) for number in re.findall(r"(?:REG|STACK):(\d+)", text))
    return Resources(name, kernel.metadata.num_warps, kernel.metadata.shared, registers, stack)


def compile_kinds(capability: int, names: list[str], file: Path | None = None) -> dict[str, str]:
    """The kinds that do not compile or do not fit, with the reason; appends what the kernels take to a file."""
    import triton

    failures = {}
    for name in names:
        try:
            found = compile_kind(name, capability)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            found = []
        if file is not None:
            rows: list[tuple[Any, ...]] = [*found] or [(failures[name],)]
            append_rows(file, [(triton.__version__, capability, name, *row) for row in rows])
    return failures


def append_rows(file: Path, rows: list[tuple[Any, ...]]) -> None:
    """Append lines to a CSV file; a new one starts with the names of its columns."""
    is_new = not file.exists()
    with file.open("a", newline="") as opened:
        csv.writer(opened).writerows([("triton", "capability", "kind", *Resources._fields)] * is_new + rows)


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("capability", type=int, nargs="*", help="80, 90 or 100 (default: all)")
    parser.add_argument("--only", nargs="+", default=[], help="kinds whose name contains one of these")
    parser.add_argument("--resources", type=Path, help="a CSV file; appends warps, memory and registers per kernel")
    parser.add_argument("--versions", nargs="+", help=f"versions of Triton, or {NEWEST}, each in an environment")
    parser.add_argument("--environments", type=Path, default=Path("build/triton"), help="where these are kept")
    options = parser.parse_args()
    if options.versions:
        return max(run_version(version, options) for version in options.versions)
    names = [name for name in KINDS if not options.only or any(text in name for text in options.only)]
    failed = 0
    for capability in options.capability or CAPABILITIES:
        start = time.perf_counter()
        failures = compile_kinds(capability, names, options.resources)
        failed += len(failures)
        print(
            f"triton {triton.__version__}, sm_{capability}: {len(names) - len(failures)} of {len(names)} kinds", end=""
        )
        print(f" in {time.perf_counter() - start:.0f} s", flush=True)
        for name, reason in failures.items():
            print(f"  {name}: {reason}", flush=True)
    return min(failed, 1)


def run_version(version: str, options: argparse.Namespace) -> int:
    """Compile the kinds with one version of Triton; its environment uses the other packages of this one."""
    folder = options.environments / version
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        packages = next((folder / "lib").glob("python*/site-packages"))
        (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
        package = "triton" if version == NEWEST else f"triton=={version}.*"
        install = [python, "-m", "pip", "install", "--quiet", "--ignore-installed", "--no-deps", package]
        subprocess.run(install, check=True)
    command = [python, "-m", "tests.kernels.kinds", *map(str, options.capability)]
    if options.only:
        command += ["--only", *options.only]
    if options.resources:
        command += ["--resources", options.resources]
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
