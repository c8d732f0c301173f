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

SOURCE_FOLDER = Path(__file__).parents[1] / "kernels" / "c"
COMPILERS = ("cc", "gcc", "clang")

# Nothing that changes what a sum or a comparison gives, and nothing that changes the processor's modes for others.
COMPILER_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")

# Named one by one instead of -march=native: a home that two machines share then keeps a library for each kind.
CPU_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}


class UnavailableError(Exception):
    """Why there is no such library here."""


def load_library(name: str) -> ctypes.CDLL:
    """The library of one C source; raises UnavailableError with the reason where there is none."""
    found = open_library(name)
    if isinstance(found, str):
        raise UnavailableError(found)
    return found


def why_unavailable(name: str) -> str | None:
    """Why there is no such library here; None where there is one."""
    found = open_library(name)
    return found if isinstance(found, str) else None


@cache
def open_library(name: str) -> ctypes.CDLL | str:
    """The library, or the reason why there is none: asked for often, found out once."""
    try:
        path = build_library(name, compiler_command())
        return ctypes.CDLL(str(path))
    except (UnavailableError, OSError) as error:
        return str(error)


def run_in_threads(function: Any, argument: ctypes.Structure, threads: int) -> None:
    """Calls a function of a library once in each of some threads, with the same argument."""
    team = find_openmp()
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
def find_openmp() -> Any:
    """How torch's own OpenMP runs a function in its threads; None where torch came with another runtime.

    Those threads spin for a while after an operation and would keep the cores from threads of our own.
    """
    try:
        team = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    team.argtypes, team.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return team


def compiler_command() -> tuple[str, ...]:
    """The compiler with its flags."""
    if os.name != "posix":
        raise UnavailableError(f"C sources are compiled on Linux and macOS, but this is {sys.platform}")
    asked = os.environ.get("FOCI_CC")
    if asked == "none":
        raise UnavailableError("FOCI_CC=none asks for no compiler")
    compiler = next(filter(None, map(shutil.which, [asked] if asked else COMPILERS)), None)
    if compiler is None:
        raise UnavailableError(f"no C compiler was found: looked for {asked or ', '.join(COMPILERS)}")
    return (compiler, *COMPILER_FLAGS, *CPU_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))


def build_library(name: str, compile_with: tuple[str, ...]) -> Path:
    """The compiled source. What it was made of is in its name, so that nothing outdated is ever loaded."""
    sources = [SOURCE_FOLDER / f"{name}.c", *sorted(SOURCE_FOLDER.glob("*.h"))]
    made_of = [*compile_with, sys.platform, platform.machine(), *platform.libc_ver(), *(s.read_text() for s in sources)]
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:20]
    path = library_folder() / f"{name}-{digest}.so"
    if not (path.exists() and is_private(path)):
        compile_source(sources[0], path, compile_with)
    return path


def compile_source(source: Path, path: Path, compile_with: tuple[str, ...]) -> None:
    """Written beside its place and moved there: another process sees all of it or nothing."""
    handle, beside = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        run = subprocess.run([*compile_with, str(source), "-o", beside], capture_output=True, text=True, timeout=120)
        if run.returncode != 0:
            raise UnavailableError(f"{compile_with[0]} could not compile {source.name}: {first_error(run.stderr)}")
        Path(beside).chmod(0o700)
        Path(beside).replace(path)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{compile_with[0]} took more than two minutes for {source.name}") from None
    finally:
        Path(beside).unlink(missing_ok=True)


def first_error(said: str) -> str:
    errors = [line.strip() for line in said.splitlines() if "error" in line]
    return errors[0] if errors else said.strip()[:200] or "it said nothing"


def library_folder() -> Path:
    """The user's cache; a folder of this process alone where that one is not the user's own."""
    named = os.environ.get("XDG_CACHE_HOME")
    try:
        wanted = (Path(named) if named else Path.home() / ".cache") / "foci" / "native"
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(wanted) and os.access(wanted, os.W_OK):
            return wanted
    except (OSError, RuntimeError):
        pass
    return Path(temporary_folder().name)


@cache
def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="foci-")


def is_private(path: Path) -> bool:
    """Whether it belongs to this user and nobody else can write to it: code is loaded from there."""
    found = path.lstat()
    plain = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    return plain and found.st_uid == os.getuid() and not found.st_mode & 0o022
