"""C sources of this folder as libraries: compiled where a C compiler is, once per machine, and kept.

FOCI_CC names the compiler; FOCI_CC=none is for a machine on which nothing is to be compiled.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parents[1] / "kernels" / "c"
COMPILERS = ("cc", "gcc", "clang")

# Nothing that changes what a sum or a comparison gives, and nothing that changes the processor's modes for others.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")

# Named one by one instead of -march=native: a home that two machines share then keeps a library for each kind.
CAPABILITIES = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}


class UnavailableError(Exception):
    """Why there is no such library here."""


def library(name: str) -> ctypes.CDLL:
    """The library of one C source; raises UnavailableError with the reason where there is none."""
    found = opened(name)
    if isinstance(found, str):
        raise UnavailableError(found)
    return found


def refusal(name: str) -> str | None:
    """Why there is no such library here; None where there is one."""
    found = opened(name)
    return found if isinstance(found, str) else None


@cache
def opened(name: str) -> ctypes.CDLL | str:
    """The library, or the reason why there is none: asked for often, found out once."""
    try:
        path = built(name, command())
        return ctypes.CDLL(str(path))
    except (UnavailableError, OSError) as error:
        return str(error)


def run(function: Any, argument: ctypes.Structure, threads: int) -> None:
    """Calls a function of a library once in each of some threads, with the same argument."""
    team = openmp()
    address = ctypes.byref(argument)
    if threads <= 1:
        function(address)
    elif team is not None:
        team(function, address, threads, 0)
    else:
        others = [threading.Thread(target=function, args=(address,)) for _ in range(threads - 1)]
        for thread in others:
            thread.start()
        function(address)
        for thread in others:
            thread.join()


@cache
def openmp() -> Any:
    """How torch's own OpenMP runs a function in its threads; None where torch came with another runtime.

    Those threads spin for a while after an operation and would keep the cores from threads of our own.
    """
    try:
        team = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    team.argtypes, team.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return team


def command() -> tuple[str, ...]:
    """The compiler with its flags."""
    if os.name != "posix":
        raise UnavailableError(f"C sources are compiled on Linux and macOS, but this is {sys.platform}")
    asked = os.environ.get("FOCI_CC")
    if asked == "none":
        raise UnavailableError("FOCI_CC=none asks for no compiler")
    compiler = next(filter(None, map(shutil.which, [asked] if asked else COMPILERS)), None)
    if compiler is None:
        raise UnavailableError(f"no C compiler was found: looked for {asked or ', '.join(COMPILERS)}")
    return (compiler, *FLAGS, *CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ()))


def built(name: str, compile_with: tuple[str, ...]) -> Path:
    """The compiled source. What it was made of is in its name, so that nothing outdated is ever loaded."""
    sources = [HERE / f"{name}.c", *sorted(HERE.glob("*.h"))]
    made_of = [*compile_with, sys.platform, platform.machine(), *platform.libc_ver(), *(s.read_text() for s in sources)]
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:20]
    path = folder() / f"{name}-{digest}.so"
    if not (path.exists() and is_own(path)):
        compile_source(sources[0], path, compile_with)
    return path


def compile_source(source: Path, path: Path, compile_with: tuple[str, ...]) -> None:
    """Written beside its place and moved there: another process sees all of it or nothing."""
    handle, beside = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        run = subprocess.run([*compile_with, str(source), "-o", beside], capture_output=True, text=True, timeout=120)
        if run.returncode != 0:
            raise UnavailableError(f"{compile_with[0]} could not compile {source.name}: {first_line(run.stderr)}")
        Path(beside).chmod(0o700)
        Path(beside).replace(path)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{compile_with[0]} took more than two minutes for {source.name}") from None
    finally:
        Path(beside).unlink(missing_ok=True)


def first_line(said: str) -> str:
    errors = [line.strip() for line in said.splitlines() if "error" in line]
    return errors[0] if errors else said.strip()[:200] or "it said nothing"


def folder() -> Path:
    """The user's cache; a folder of this process alone where that one is not the user's own."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        wanted = (Path(named) if named else Path.home() / ".cache") / "foci" / "native"
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_own(wanted) and os.access(wanted, os.W_OK):
            return wanted
    except (OSError, RuntimeError):
        pass
    return Path(own_folder().name)


@cache
def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="foci-")


def is_own(path: Path) -> bool:
    """Whether it belongs to this user and nobody else can write to it: code is loaded from there."""
    found = path.lstat()
    plain = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    return plain and found.st_uid == os.getuid() and not found.st_mode & 0o022
