"""`foci doctor`: what is installed here, which devices there are, and which backend serves which call."""

import os
import platform
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from torch import Tensor

import foci
from foci.runtime.console import TextPage

EXTRA_REQUIREMENT = re.compile(r"^(?P<name>[\w.-]+)[^;]*;.*extra == ['\"](?P<extra>\w+)['\"]")

# Calls that users make, each as the keyword arguments it adds to `foci.attention(q, k, v)`.
TYPICAL_CALLS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "plain": lambda q: {},
    "causal": lambda q: {"mask": foci.causal},
    "causal, with weights": lambda q: {"mask": foci.causal, "return_weights": True},
    "window(128)": lambda q: {"mask": foci.window(128)},
    "padded batch": lambda q: {"mask": foci.padding(torch.tensor([200, 256], device=q.device))},
    "softcap": lambda q: {"score": foci.Dot(softcap=30.0)},
    "additive score": lambda q: {"score": foci.Additive(torch.ones(q.shape[-1], device=q.device, dtype=q.dtype))},
    "ALiBi": lambda q: {"mask": foci.causal, "bias": foci.ALiBi()},
    "sink": lambda q: {"sink": torch.zeros(q.shape[1], device=q.device, dtype=q.dtype)},
    "mask from a function": lambda q: {"mask": foci.from_function(lambda b, h, i, j: (i - j) % 2 == 0)},
}


def build_report(page: TextPage | None = None) -> TextPage:
    """All that a question about this installation should come with."""
    page = page or TextPage()
    write_versions(page)
    write_extras(page)
    write_devices(page)
    write_plans(page, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return page


def installed_version(package: str) -> str | None:
    """The package's version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def optional_packages() -> dict[str, list[str]]:
    """The optional packages of each extra, as the installed package declares them.

    `all` is made of the others and `dev` is for those who work on foci: neither is listed.
    """
    found: dict[str, list[str]] = {}
    try:
        declared = requires("foci") or []
    except PackageNotFoundError:
        declared = []
    for match in filter(None, map(EXTRA_REQUIREMENT.match, declared)):
        if match["extra"] not in ("all", "dev"):
            found.setdefault(match["extra"], []).append(match["name"])
    return found


def write_versions(page: TextPage) -> None:
    page.lines.append(page.bold("versions"))
    page.line(f"foci    {foci.__version__}")
    page.line(f"python  {platform.python_version()} on {platform.system()} {platform.machine()}")
    page.line(f"torch   {torch.__version__}")
    page.line(f"triton  {installed_version('triton') or 'not installed: pip install triton (Linux only)'}")


def write_extras(page: TextPage) -> None:
    if not optional_packages():
        return
    page.heading("extras, each optional")
    for extra, packages in sorted(optional_packages().items()):
        versions = {package: installed_version(package) for package in packages}
        there = [f"{package} {version}" for package, version in versions.items() if version]
        absent = [package for package, version in versions.items() if not version]
        if there:
            page.wrapped([f"{extra:<7}", *", ".join(there).split()], hang=8)
        if absent:
            adds = ["adds", *", ".join(absent).split()]
            page.wrapped([" " * 7 if there else f"{extra:<7}", f"pip install 'foci[{extra}]'", *adds], hang=8)


def write_devices(page: TextPage) -> None:
    page.heading("devices")
    page.line(f"cpu     {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch")
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        memory = seen.total_memory / 2**30
        page.line(f"cuda:{index}  {seen.name}, {memory:.0f} GiB, compute capability {seen.major}.{seen.minor}")
    if not torch.cuda.is_available():
        page.line("cuda    none")
    if os.environ.get("TRITON_INTERPRET") == "1":
        page.line("TRITON_INTERPRET=1 is set: Triton kernels run in its interpreter, slowly")


def write_plans(page: TextPage, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    page.heading(f"who serves what ({device.type}, {str(dtype).removeprefix('torch.')}, 2 × 8 heads × 256 × 64)")
    q = torch.zeros(2, 8, 256, 64, device=device, dtype=dtype)
    for name, made in TYPICAL_CALLS.items():
        plan = foci.plan(q, q, q, **made(q))
        page.line(f"{name:<22} {page.accent(plan.chosen or 'nobody')}")
        for backend, reasons in plan.refusals.items():
            page.wrapped([f"  {backend} refuses:", *"; ".join(reasons).split()], hang=4)
