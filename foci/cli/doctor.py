"""`foci doctor`: report installed packages, devices, and which backend runs which call."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any

import foci
from foci.cli.output import print_page
from foci.runtime.console import TextPage, supports_color, terminal_columns

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EXAMPLES = """\
examples:
  foci doctor
"""
EXTRA_REQUIREMENT = re.compile(r"^(?P<name>[\w.-]+)[^;]*;.*extra == ['\"](?P<extra>\w+)['\"]")


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor", help="report installed packages, devices, and which backend runs which call", epilog=EXAMPLES
    )
    parser.set_defaults(run=run)


def run(_options: argparse.Namespace) -> int:
    """Print the report."""
    print_page(build_report(TextPage(terminal_columns(), supports_color(sys.stdout))))
    return 0


def build_report(page: TextPage | None = None) -> TextPage:
    """Everything that a question about this installation should include."""
    import torch

    page = page or TextPage()
    write_versions(page)
    write_extras(page)
    write_devices(page)
    write_plans(page, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return page


def installed_version(package: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def optional_packages() -> dict[str, list[str]]:
    """The optional packages of each extra, as the installed package declares them.

    Without `all`, which contains the others, and `dev`, which is for working on foci.
    """
    packages: dict[str, list[str]] = {}
    try:
        declared = requires("foci") or []
    except PackageNotFoundError:
        declared = []
    for match in filter(None, map(EXTRA_REQUIREMENT.match, declared)):
        if match["extra"] not in ("all", "dev", "docs"):
            packages.setdefault(match["extra"], []).append(match["name"])
    return packages


def write_versions(page: TextPage) -> None:
    import torch

    page.lines.append(page.bold("versions"))
    page.line(f"foci    {foci.__version__}")
    page.line(f"python  {platform.python_version()} on {platform.system()} {platform.machine()}")
    page.line(f"torch   {torch.__version__}")
    page.line(f"triton  {installed_version('triton') or 'not installed: pip install triton (Linux only)'}")


def write_extras(page: TextPage) -> None:
    if not optional_packages():
        return
    page.heading("optional packages")
    width = max(7, *map(len, optional_packages()))
    for extra, packages in sorted(optional_packages().items()):
        versions = {package: installed_version(package) for package in packages}
        present = [f"{package} {version}" for package, version in versions.items() if version]
        missing = [package for package, version in versions.items() if not version]
        if present:
            page.wrapped([f"{extra:<{width}}", *", ".join(present).split()], hang=width + 1)
        if missing:
            adds = ["adds", *", ".join(missing).split()]
            page.wrapped(
                [" " * width if present else f"{extra:<{width}}", f"pip install 'foci[{extra}]'", *adds], hang=width + 1
            )


def write_devices(page: TextPage) -> None:
    import torch

    page.heading("devices")
    page.line(f"cpu     {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        capability = f"compute capability {properties.major}.{properties.minor}"
        page.line(f"cuda:{index}  {properties.name}, {memory:.0f} GiB, {capability}")
        for line in describe_self_checks(index):
            page.wrapped(["       ", *line.split()], hang=8)
    if not torch.cuda.is_available():
        page.line("cuda    none")
    if os.environ.get("TRITON_INTERPRET") == "1":
        page.line("TRITON_INTERPRET=1: Triton kernels run in its slow interpreter")


def describe_self_checks(index: int) -> list[str]:
    """Fast paths that do not work with this version of Triton on this GPU, with the reasons."""
    from foci.gpu.self_check import address_failure
    from foci.runtime.device import has_triton, major_capability
    from foci.statistics.cuda.hopper import gluon_failure

    if not has_triton():
        return []
    failures = {"every launch goes through Triton": address_failure(index)}
    if major_capability(index) == 9:
        failures["statistics use the plain Triton kernel"] = gluon_failure(index)
    return [f"{effect}: the self-check failed ({failure})" for effect, failure in failures.items() if failure]


def write_plans(page: TextPage, device: torch.device) -> None:
    import torch

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    page.heading(f"backend of each call ({device.type}, {str(dtype).removeprefix('torch.')}, 2 × 8 heads × 256 × 64)")
    q = torch.zeros(2, 8, 256, 64, device=device, dtype=dtype)
    for name, options in typical_calls(q).items():
        plan = foci.plan(q, q, q, **options)
        page.line(f"{name:<22} {page.accent(plan.chosen or 'none')}")
        for backend, reasons in plan.refusals.items():
            page.wrapped([f"  {backend} refuses:", *"; ".join(reasons).split()], hang=4)


def typical_calls(q: Tensor) -> dict[str, dict[str, Any]]:
    """Common calls, each as the keyword arguments that it adds to `foci.attention(q, q, q)`."""
    import torch

    return {
        "plain": {},
        "causal": {"mask": foci.causal},
        "causal, with weights": {"mask": foci.causal, "return_weights": True},
        "window(128)": {"mask": foci.window(128)},
        "padded batch": {"mask": foci.padding(torch.tensor([200, 256], device=q.device))},
        "softcap": {"score": foci.Dot(softcap=30.0)},
        "additive score": {"score": foci.Additive(torch.ones(q.shape[-1], device=q.device, dtype=q.dtype))},
        "ALiBi": {"mask": foci.causal, "bias": foci.ALiBi()},
        "sink": {"sink": torch.zeros(q.shape[1], device=q.device, dtype=q.dtype)},
        "mask function": {"mask": foci.mask_function(lambda b, h, i, j: (i - j) % 2 == 0)},
    }
