"""One-time checks of fast paths that depend on details of Triton, for versions that they were not run with.

A check compares a fast path with a plain one. Its result is stored on disk, by versions and GPU. Where it fails, the
plain path runs, and `foci doctor` and `foci.plan` give the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from foci.runtime.durable_files import write_text_atomically
from foci.runtime.native import UnavailableError, cache_folder

# The GPU tests ran with these versions, so nothing is checked.
TESTED_TRITON_VERSIONS = ((3, 6),)
# Set in the process of a check, which uses the fast path that it checks.
CHECKING = "FOCI_SELF_CHECK"
MAX_CHECK_SECONDS = 180
KERNELS = Path(__file__).parents[1] / "kernels"


def find_failure(name: str, index: int, check: Callable[[], str | None]) -> str | None:
    """Why a fast path does not work on this GPU; None where it does. Runs the check if no result is stored.

    Args:
        check: returns the reason of a failure, or None; an error counts as a failure.
    """
    if os.environ.get(CHECKING) == "1" or triton_version() in TESTED_TRITON_VERSIONS:
        return None
    path = result_path(name, index)
    stored = None if path is None else read_result(path)
    if stored is not None:
        return stored or None
    try:
        failure = check()
    except Exception as error:  # noqa: BLE001 - an unknown version of Triton may raise anything
        failure = describe_failure(error)
    if path is not None:
        write_result(path, failure or "")
    return failure


def triton_version() -> tuple[int, ...]:
    """The major and minor version of Triton."""
    from triton import __version__ as version

    return tuple(map(int, version.split(".")[:2]))


def describe_failure(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def result_path(name: str, index: int) -> Path | None:
    """The file of a result, for these versions, kernels and GPU; None if the cache directory is not usable."""
    from triton import __version__ as version

    sources = "".join(path.read_text() for path in sorted(KERNELS.rglob("*.py")))
    parts = (name, version, torch.__version__, torch.cuda.get_device_name(index), sources)
    try:
        folder = cache_folder("self_check")
    except UnavailableError:
        return None
    return folder / f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json"


def read_result(path: Path) -> str | None:
    """The stored reason of a failure, empty after a success; None where nothing valid is stored."""
    try:
        failure = json.loads(path.read_text())["failure"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return failure if isinstance(failure, str) else None


def write_result(path: Path, failure: str) -> None:
    # Without a place to store it, each process checks again.
    with suppress(OSError):
        write_text_atomically(path, json.dumps({"failure": failure}))


def run_in_process(module: str, function: str, index: int) -> str | None:
    """Run a check in a process of its own: a kernel that fails must not take this process with it."""
    program = f"from {module} import {function} as check; print('failure:', check({index}) or '')"
    environment = os.environ | {CHECKING: "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=MAX_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the self-check took more than {MAX_CHECK_SECONDS} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"the self-check ended with status {done.returncode}"])[-1][:200]
    return done.stdout.strip().splitlines()[-1].removeprefix("failure:").strip() or None


@cache
def address_failure(index: int) -> str | None:
    """Why compiled kernels cannot be launched with addresses instead of tensors; None where they can."""
    if torch.version.hip is not None:
        return "ROCm is not supported"
    return find_failure("addresses", index, lambda: check_addresses(index))


def check_addresses(index: int) -> str | None:
    """Launch a small kernel through Triton, then with addresses, and compare."""
    from foci.gpu.compiled_launch import bind_launch
    from foci.kernels.self_check import combine_rows

    device = torch.device("cuda", index)
    x, y = (torch.randn(3, 32, device=device) for _ in range(2))
    found, expected = (torch.full((3, 32), torch.nan, device=device) for _ in range(2))
    scalars = (30, 1, 32, 0.5, 32, True)
    with torch.cuda.device(device):
        compiled = combine_rows[(3,)](x, y, expected, *scalars)
        bind_launch(compiled, (3,), device)(x.data_ptr(), y.data_ptr(), found.data_ptr(), *scalars)
    if not torch.equal(expected[:, :30], x[:, :30] * 0.5 - y[:, :30]) or not expected[:, 30:].isnan().all():
        return "a small kernel computed a wrong result"
    same = torch.equal(found[:, :30], expected[:, :30]) and bool(found[:, 30:].isnan().all())
    return None if same else "a kernel launched with addresses computed a wrong result"
