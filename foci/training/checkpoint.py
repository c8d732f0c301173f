"""Checkpoints: written to the side and renamed, so that each is whole or not there; a damaged one is refused.

A checkpoint is a folder: safetensors files, one for each process that holds a part of the weights, and state.json,
which says where every piece lies and what every file's checksum is. Nothing in it is ever executed.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foci.runtime.safetensors_file import import_safetensors, write_tensors
from foci.training.distributed import Processes

CHECKPOINT_FORMAT = "foci.checkpoint/1"
CHECKPOINT_PREFIX = "step-"
# So many are kept, because the last one may turn out to be damaged.
MAX_CHECKPOINTS = 2
READ_CHUNK_BYTES = 2**24


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], processes: Processes
) -> None:
    """Writes the checkpoint of a step; all processes take part, each with the rows that it holds."""
    target = folder / f"{CHECKPOINT_PREFIX}{step:08d}"
    beside = folder / f".{target.name}.part"
    if processes.first:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    processes.wait()
    try:
        written = processes.gathered(write_rows(beside, tensors, processes))
        if processes.first:
            content = {"format": CHECKPOINT_FORMAT, "step": step, "state": state}
            content |= {"files": {name: checksum for name, checksum, _ in written if name}}
            content |= {"tensors": index_tensors([rows for _, _, rows in written])}
            write_text_atomically(beside / "state.json", json.dumps(content))
            replace_directory(beside, target)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise OSError(
            error.errno,
            f"the checkpoint of step {step} could not be written ({error.strerror}), those before it are whole",
            str(target),
        ) from error
    processes.wait()
    if processes.first:
        for old in list_checkpoints(folder)[MAX_CHECKPOINTS:]:
            shutil.rmtree(old)


def write_rows(beside: Path, tensors: Mapping[str, Tensor], processes: Processes) -> tuple[str, int, dict[str, Any]]:
    """This process's file: its name, its checksum, and of each tensor the whole shape and the rows that are in it."""
    own, rows = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            local = tensor.to_local().detach()
            first = row_offset(tensor, processes)
        elif processes.first:
            local, first = tensor.detach(), 0
        else:
            continue
        if local.numel():
            own[name] = local.cpu().contiguous().clone()
            rows[name] = {"shape": list(tensor.shape), "first": first, "rows": len(local) if local.dim() else 0}
    if not own:
        return "", 0, {}
    file = f"rank-{processes.rank:05d}.safetensors"
    write_tensors(beside / file, own)
    fsync_path(beside / file)
    return file, file_checksum(beside / file), {name: each | {"file": file} for name, each in rows.items()}


def row_offset(tensor: DTensor, processes: Processes) -> int:
    """The first row that this process holds: FSDP2 cuts along the first axis, as torch.chunk does."""
    each = -(-tensor.shape[0] // processes.world)
    return min(each * processes.rank, tensor.shape[0])


def index_tensors(written: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each tensor its shape and where its rows are."""
    found: dict[str, Any] = {}
    for rows in written:
        for name, each in rows.items():
            entry = found.setdefault(name, {"shape": each["shape"], "pieces": []})
            entry["pieces"].append([each["file"], each["first"], each["rows"]])
    return found


class Checkpoint:
    """A checkpoint that was found whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            content = json.loads((folder / "state.json").read_text())
            if content["format"] != CHECKPOINT_FORMAT:
                raise ValueError(f"expected the format {CHECKPOINT_FORMAT!r}, but got {content['format']!r}")
            for name, checksum in content["files"].items():
                if file_checksum(folder / name) != checksum:
                    raise ValueError(f"{name} does not have the checksum that was saved with it")
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error
        self.step: int = content["step"]
        self.state: dict[str, Any] = content["state"]
        self.tensors: dict[str, Any] = content["tensors"]
        self._files: dict[str, Any] = {}

    def fill(self, tensors: Mapping[str, Tensor], processes: Processes) -> None:
        """Gives tensors their saved values, on as many processes as there are now."""
        own = {name for name, tensor in tensors.items() if tensor.numel()}
        # A parameter that never had a gradient has no state in the optimizer.
        lost = sorted(name for name in own - self.tensors.keys() if not name.startswith("optimizer."))
        more = sorted(self.tensors.keys() - own)
        if lost or more:
            lost, more = lost[:3], more[:3]
            raise ValueError(
                f"{self.folder} does not fit: it lacks {lost or 'nothing'} and has {more or 'nothing'} more"
            )
        for name, tensor in tensors.items():
            if name not in self.tensors:
                continue
            if list(tensor.shape) != self.tensors[name]["shape"]:
                got = f"{tuple(self.tensors[name]['shape'])}, but {tuple(tensor.shape)} is expected"
                raise ValueError(f"{self.folder} does not fit: {name} has the shape {got}")
            with torch.no_grad():
                self._copy(name, tensor, processes)

    def _copy(self, name: str, tensor: Tensor, processes: Processes) -> None:
        local, first = tensor, 0
        if isinstance(tensor, DTensor):
            local, first = tensor.to_local(), row_offset(tensor, processes)
        for file, start, rows in self.tensors[name]["pieces"]:
            if local.dim() == 0:
                local.copy_(self._open(file).get_tensor(name))
                continue
            begin, end = max(first, start), min(first + len(local), start + rows)
            if begin < end:
                local[begin - first : end - first].copy_(self._open(file).get_slice(name)[begin - start : end - start])

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = import_safetensors().safe_open(str(self.folder / name), framework="pt")
        return self._files[name]


def load_newest(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The last whole checkpoint; damaged ones are named and passed over."""
    candidates = list_checkpoints(folder)
    for place, candidate in enumerate(candidates):
        try:
            return Checkpoint(candidate)
        except ValueError as error:
            before = "the one before it is used" if place + 1 < len(candidates) else "there is none before it"
            say(f"{error}; {before}")
    if candidates:
        raise ValueError(f"expected a whole checkpoint in {folder}, but all {len(candidates)} are damaged")
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name.startswith(CHECKPOINT_PREFIX)), reverse=True)


def read_best_steps(folder: Path) -> set[int]:
    """The steps of the best models that the checkpoints in a folder name; a damaged one is left to `newest`."""
    steps: set[int] = set()
    for path in list_checkpoints(folder):
        with suppress(OSError, ValueError, KeyError, TypeError):
            steps |= {int(each[-1]) for each in json.loads((path / "state.json").read_text())["state"]["best"]}
    return steps


def replace_directory(beside: Path, target: Path) -> None:
    """Renames a finished folder; one of the same step, from before a resume, goes away first."""
    if target.exists():
        shutil.rmtree(target)
    beside.rename(target)
    fsync_path(target.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """A text file that is whole or not there."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    fsync_path(beside)
    beside.replace(path)


def fsync_path(path: Path) -> None:
    """Makes sure that it is on the disk, so that a rename never points to something half-written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
    return total
