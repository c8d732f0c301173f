"""Compiles the C sources of `foci/kernels/c` once per machine, if there is a C compiler, and loads the libraries.

The environment variable FOCI_CC names the compiler; FOCI_CC=none disables compilation.
"""

from __future__ import annotations

import ctypes
import glob
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

from foci.runtime.durable_files import replace_durably

SOURCE_FOLDER = Path(__file__).parents[1] / "kernels" / "c"
COMPILERS = ("cc", "gcc", "clang")

# No -ffast-math: sums must not be reordered, NaN and infinity must compare as usual, and loading the library must not
# change the floating point modes of the process.
COMPILER_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")

# Listed instead of -march=native, so that machines that share a home directory keep a library for each kind of CPU.
CPU_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}


class UnavailableError(Exception):
    """The reason why a library cannot be compiled or loaded."""


def load_library(name: str) -> ctypes.CDLL:
    """The library of one C source; raises UnavailableError with the reason if there is none."""
    library = open_library(name)
    if isinstance(library, str):
        raise UnavailableError(library)
    return library


def why_unavailable(name: str) -> str | None:
    """The reason why a library is not available; None if it is."""
    library = open_library(name)
    return library if isinstance(library, str) else None


@cache
def open_library(name: str) -> ctypes.CDLL | str:
    """The library, or the reason why there is none; cached."""
    try:
        path = build_library(name, compiler_command())
        return ctypes.CDLL(str(path))
    except (UnavailableError, OSError) as error:
        return str(error)


def count_threads(work: int, least_per_thread: int) -> int:
    """The number of threads for some work: at most torch's, and so few that each has enough to do."""
    return min(torch.get_num_threads(), max(work // least_per_thread, 1))


def run_in_threads(function: Any, argument: ctypes.Structure, threads: int) -> None:
    """Calls a C function once in each of `threads` threads, with the same argument."""
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
    """GOMP_parallel of torch's own OpenMP, which runs a function in its threads; None with another runtime.

    The OpenMP threads spin for a while after an operation and would slow down additional threads.
    """
    try:
        team = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    team.argtypes, team.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return team


def compiler_command() -> tuple[str, ...]:
    """The compiler with its flags; raises UnavailableError if there is none."""
    if os.name != "posix":
        raise UnavailableError(f"C sources are compiled on Linux and macOS only, not on {sys.platform}")
    requested = os.environ.get("FOCI_CC")
    if requested == "none":
        raise UnavailableError("FOCI_CC=none disables the C compiler")
    compiler = next(filter(None, map(shutil.which, [requested] if requested else COMPILERS)), None)
    if compiler is None:
        raise UnavailableError(f"no C compiler was found: looked for {requested or ', '.join(COMPILERS)}")
    return (compiler, *COMPILER_FLAGS, *CPU_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))


def build_library(name: str, compile_with: tuple[str, ...]) -> Path:
    """The path of the compiled library: its name holds a hash of all inputs, so that it is never outdated."""
    sources = [SOURCE_FOLDER / f"{name}.c", *sorted(SOURCE_FOLDER.glob("*.h"))]
    inputs = [*compile_with, sys.platform, platform.machine(), *platform.libc_ver(), *(s.read_text() for s in sources)]
    folder, inputs_hash = library_folder(), short_hash("\0".join(inputs).encode())
    remove_unfinished_builds(folder)
    for path in folder.glob(f"{name}-{inputs_hash}-*.so"):
        if is_intact(path):
            return path
    # Compiling the same inputs gives the same name, so that a damaged library is replaced.
    return compile_source(sources[0], folder / f"{name}-{inputs_hash}", compile_with)


def compile_source(source: Path, stem: Path, compile_with: tuple[str, ...]) -> Path:
    """Compiles to a temporary file and renames it, so that other processes never see a partial library."""
    handle, created = tempfile.mkstemp(f".{platform.node()}.part", f"{stem.name}.{os.getpid()}.", stem.parent)
    os.close(handle)
    temporary = Path(created)
    try:
        run = subprocess.run([*compile_with, str(source), "-o", created], capture_output=True, text=True, timeout=120)
        if run.returncode != 0:
            raise UnavailableError(f"{compile_with[0]} could not compile {source.name}: {first_error(run.stderr)}")
        temporary.chmod(0o700)
        path = stem.with_name(f"{stem.name}-{short_hash(temporary.read_bytes())}.so")
        replace_durably(temporary, path)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{compile_with[0]} took more than two minutes for {source.name}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def is_intact(path: Path) -> bool:
    """Whether a library is private and has the hash that its name ends with; loading a damaged one may crash."""
    return is_private(path) and short_hash(path.read_bytes()) == path.stem.rpartition("-")[2]


def remove_unfinished_builds(folder: Path) -> None:
    """Deletes what builds of killed processes left; those of other machines that share the folder are their own."""
    for path in folder.glob(f"*.{glob.escape(platform.node())}.part"):
        number = path.name.split(".")[1]
        if not (number.isdigit() and is_running(int(number))):
            path.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # It belongs to somebody else.
        return True
    return True


def first_error(output: str) -> str:
    """The first line of the compiler's output with an error."""
    errors = [line.strip() for line in output.splitlines() if "error" in line]
    return errors[0] if errors else output.strip()[:200] or "no output"


def library_folder() -> Path:
    return cache_folder("native")


def cache_folder(name: str) -> Path:
    """A directory in the user's cache directory, or a temporary one if that is not private to the user."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    if cache_home and not Path(cache_home).is_absolute():
        raise UnavailableError(f"XDG_CACHE_HOME must be an absolute path, got {cache_home!r}")
    try:
        root = (Path(cache_home) if cache_home else Path.home() / ".cache").resolve()
        folders = (root, root / "foci", root / "foci" / name)
        for folder in folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if all(map(is_private, folders)) and os.access(folders[-1], os.W_OK):
            return folders[-1]
    except (OSError, RuntimeError):
        pass
    return Path(temporary_folder().name)


@cache
def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A directory that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="foci-")


def is_private(path: Path) -> bool:
    """Whether only this user can write to it; libraries are loaded only from private files and directories."""
    status = path.lstat()
    plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return plain and status.st_uid == os.getuid() and not status.st_mode & 0o022
