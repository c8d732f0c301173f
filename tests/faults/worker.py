"""Opens files one after the other, as a user would, under a memory limit, and prints one line of JSON for each.

Run as `python -m tests.faults.worker MANIFEST FIRST`. The manifest lists "kind<tab>path"; the caller limits the time.
"""

import io
import json
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

import foci
from foci.cli.main import main
from foci.inputs.image import read_image
from foci.tasks.model_file import load_trained_model
from foci.tasks.speech_features import load_recording
from foci.tasks.translation import Translation
from foci.training import read_config

MEMORY = 2**30
# What a user's mistake may raise.
CLEAR = (ValueError, FileNotFoundError, ImportError)
# Messages of Python and torch about wrong types and sizes do not describe the file.
INTERNAL = re.compile(
    r"object (is not|has no|cannot be|does not)|unhashable|out of range|unsupported operand|not supported between"
    r"|unexpected keyword|positional argument|alloc|Traceback|size mismatch"
)
INPUTS = {"translation": "a man sleeps", "sentiment": "a good film", "generation": "a man"}


def open_record(path: Path) -> None:
    record = foci.Record.load(path)
    record.show()
    record.save(path.with_suffix(".html"))
    path.with_suffix(".html").unlink()


def open_model(path: Path) -> None:
    task, model, _ = load_trained_model(path)
    given = INPUTS.get(task.name, str(path.parent / f"input-{task.name}"))
    with torch.no_grad():
        task.answer(model, [task.parse_input(given)])


def open_config(path: Path) -> None:
    read_config(None, path).to_toml()


def open_table(path: Path) -> None:
    list(Translation.check([path], None))
    Translation.read([path], None)  # type: ignore[arg-type]


def open_run(path: Path) -> None:
    printed = io.StringIO()
    with redirect_stderr(printed):
        status = main(["train", "translation", "--resume", "--out", str(path), "--set", "train.steps=3"])
    if status == 2:
        raise ValueError(printed.getvalue().strip())
    if status:
        raise RuntimeError(f"the status of foci train must be 0 or 2, got {status}: {printed.getvalue()}")


OPEN: dict[str, Callable[[Path], Any]] = {
    "record": open_record,
    "model": open_model,
    "config": open_config,
    "table": open_table,
    "sound": lambda path: load_recording(str(path), 16_000),
    "image": lambda path: read_image(path, 3, 32),
    "run": open_run,
}


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it replaced, is about memory."""
    if error is None:
        return False
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "alloc_cpu" in str(error):
        return True
    return ran_out_of_memory(error.__cause__) or ran_out_of_memory(error.__context__)


def is_clear(error: Exception) -> bool:
    """Whether the error is one sentence about the file."""
    text = str(error)
    return bool(text) and "\n" not in text and not INTERNAL.search(text) and not ran_out_of_memory(error)


def describe_outcome(kind: str, path: Path) -> dict[str, Any]:
    """Whether the file was answered, refused in a sentence, or neither; and what was printed or raised."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            OPEN[kind](path)
    except CLEAR as error:
        if is_clear(error):
            return {"outcome": "refused", "message": str(error)}
        return {"outcome": "fault", "message": traceback.format_exc()[-3000:]}
    except BaseException:  # noqa: BLE001 - the panics of a library are no Exceptions
        return {"outcome": "fault", "message": traceback.format_exc()[-3000:]}
    return {"outcome": "answered", "message": ""}


def virtual_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def limit_memory() -> None:
    limit = virtual_memory() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    torch.set_num_threads(1)
    files = [line.split("\t") for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    limit_memory()
    for kind, name in files[int(sys.argv[2]) :]:
        start = time.process_time()
        found = describe_outcome(kind, Path(name))
        print(json.dumps(found | {"seconds": time.process_time() - start}), flush=True)
