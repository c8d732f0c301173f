"""Runs a module in several processes that talk over gloo, started as torchrun starts them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def run_processes(count: int, *command: str, timeout: float = 240, folder: Path = ROOT) -> list[tuple[int, str, str]]:
    """Runs `python -m command...` in processes of one group; returns exit status, output and errors of each rank."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    rendezvous |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=timeout) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(running, said, strict=True)]
