"""Locks a run directory, so that one command at a time trains in it.

The lock is held on an open file (flock). The system releases it when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from foci.runtime.printable import make_printable
from foci.training.distributed import Processes

LOCK_NAME = ".lock"
MAX_HOLDER_BYTES = 200
held_handles: set[int] = set()


@contextmanager
def lock_run(folder: Path, processes: Processes) -> Iterator[list[str]]:
    """Locks a run directory in the first process, or raises the same error in all of them; yields messages."""
    with ExitStack() as stack:
        messages: list[str] = []
        refusals: list[Exception] = []
        if processes.is_first:
            try:
                messages += stack.enter_context(lock_directory(folder))
            except (ValueError, OSError) as error:
                refusals.append(error)
        for refusal in processes.broadcast(refusals):
            raise refusal
        yield messages


@contextmanager
def lock_directory(folder: Path) -> Iterator[list[str]]:
    """Creates and locks a directory; one that is still empty at the end is removed again."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} must be a run directory, got a file")
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        handle, messages = acquire_lock(folder)
        held_handles.add(handle)
        try:
            yield messages
        finally:
            # Deleted before the lock is released: afterwards the file may be the lock of another process.
            (folder / LOCK_NAME).unlink(missing_ok=True)
            held_handles.discard(handle)
            os.close(handle)
    finally:
        with suppress(OSError):
            for path in created:
                path.rmdir()


def acquire_lock(folder: Path) -> tuple[int, list[str]]:
    """Opens and locks the lock file; raises ValueError with the process that holds it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        messages = []
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = make_printable(os.read(handle, MAX_HOLDER_BYTES).decode(errors="replace"))
            os.close(handle)
            raise ValueError(
                f"{folder} must not be in use, but {holder or 'another process'} trains in it: wait until it ends, stop"
                " it, or use --out for another directory"
            ) from None
        except OSError as error:
            # Some network file systems have no locks.
            messages = [f"{folder} cannot be locked ({error.strerror}): do not start a second training in it"]
        if is_open_file(handle, folder / LOCK_NAME):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
            return handle, messages
        # Another process finished and deleted the file after it was opened here.
        os.close(handle)


def is_open_file(handle: int, path: Path) -> bool:
    """Whether a path still names the file that was opened."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def close_inherited_locks() -> None:
    """Closes the locks in a forked process: a worker that outlives a killed training must not hold its lock."""
    for handle in held_handles:
        os.close(handle)
    held_handles.clear()


os.register_at_fork(after_in_child=close_inherited_locks)
