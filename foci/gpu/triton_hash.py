"""Stores the hash of Triton's own files, which a process needs before it finds a compiled kernel on disk.

Triton reads half a gigabyte for it, in every process. The stored hash is used as long as no file of Triton has another
size or time of change.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from foci.runtime.durable_files import write_text_atomically
from foci.runtime.native import UnavailableError, cache_folder

# The parts of the package that the hash covers.
HASHED = ("_C", "backends", "compiler", "language", "runtime")
HASHED_SUFFIXES = (".py", ".so", ".pyd")


def prepare_triton_hash() -> None:
    """Let Triton find its hash: stored by an earlier process, or computed and stored."""
    from triton.runtime import cache as triton_cache

    path = hash_path(Path(triton_cache.__file__).parents[1])
    stored = None if path is None else read_hash(path)
    if stored is None:
        computed = triton_cache.triton_key()
        if path is not None:
            write_hash(path, computed)
    else:
        triton_cache.triton_key = cache(lambda: stored)


def hash_path(package: Path) -> Path | None:
    """The file of the hash, named after all files of this Triton; None if the cache directory is not usable."""
    try:
        folder = cache_folder("triton_hash")
    except UnavailableError:
        return None
    return folder / f"{hashlib.sha256(describe_files(package).encode()).hexdigest()[:16]}.txt"


def describe_files(package: Path) -> str:
    """Path, size and time of change of every file that Triton hashes, and of those beside them."""
    found = (path for name in HASHED for suffix in HASHED_SUFFIXES for path in (package / name).rglob(f"*{suffix}"))
    return "\n".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sorted(found))


def read_hash(path: Path) -> str | None:
    """The stored hash; None where nothing is stored, or nothing complete."""
    try:
        *_, text, end = path.read_text().split("\n")
    except (OSError, ValueError):
        return None
    return text if text and not end else None


def write_hash(path: Path, text: str) -> None:
    # Without a place to store it, each process computes it again.
    with suppress(OSError):
        write_text_atomically(path, f"{text}\n")
