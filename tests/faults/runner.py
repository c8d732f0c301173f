"""Runs the worker over files: a file that hangs or ends the process is reported, and the next ones still run."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
# Of processor time for each file; on a busy machine it may take longer until the answer comes.
SECONDS = 10.0
MAX_WAIT_SECONDS = 90.0


class Outcome(NamedTuple):
    """What happened to one file."""

    kind: str
    path: Path
    outcome: str  # "answered", "refused" or "fault"
    message: str


def open_files(files: list[tuple[str, Path]], folder: Path) -> list[Outcome]:
    """Opens files by kind in subprocesses with limits on memory and time."""
    manifest = folder / "manifest.txt"
    manifest.write_text("".join(f"{kind}\t{path}\n" for kind, path in files), encoding="utf-8")
    found: list[Outcome] = []
    while len(found) < len(files):
        before = len(found)
        for result in run_worker(manifest, before):
            kind, path = files[len(found)]
            slow = result.get("seconds", 0.0) > SECONDS
            message = f"it took {result['seconds']:.0f} seconds" if slow else result["message"]
            found.append(Outcome(kind, path, "fault" if slow else result["outcome"], message))
        assert len(found) > before, "the worker did not start"
    return found


def run_worker(manifest: Path, first: int) -> list[dict[str, Any]]:
    """The results from the file with this number on, up to the first one that hangs or ends the process."""
    command = [sys.executable, "-m", "tests.faults.worker", str(manifest), str(first)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    results: list[dict[str, Any]] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        lines: queue.Queue[str] = queue.Queue()
        threads = [threading.Thread(target=read_lines_into, args=(process.stdout, lines), daemon=True)]
        threads[0].start()
        errors: list[str] = []
        threads.append(threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True))  # type: ignore[union-attr]
        threads[1].start()
        while True:
            try:
                line = lines.get(timeout=MAX_WAIT_SECONDS)
            except queue.Empty:
                process.kill()
                return [*results, {"outcome": "fault", "message": f"no answer within {MAX_WAIT_SECONDS:.0f} seconds"}]
            if not line:
                break
            results.append(json.loads(line))
        process.wait()
        threads[1].join()
    if process.returncode:
        ended = f"the process ended with status {process.returncode}: {''.join(errors)[-2000:]}"
        results.append({"outcome": "fault", "message": ended})
    return results


def read_lines_into(stream: Any, lines: queue.Queue[str]) -> None:
    """Passes on lines, and an empty one at the end."""
    for line in stream:
        lines.put(line)
    lines.put("")
