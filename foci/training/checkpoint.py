"""Atomic checkpoints: written to a temporary directory and renamed, with checksums that detect damage.

A checkpoint is a directory with one safetensors file per process that holds a shard of the weights, and state.json,
which lists the shards of every tensor and the checksum of every file. Loading executes no code from it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foci.runtime.durable_files import checksum_file, fsync_path, write_text_atomically
from foci.runtime.safetensors_file import import_safetensors, write_tensors
from foci.training.distributed import Processes

CHECKPOINT_FORMAT = "foci.checkpoint/2"
CHECKPOINT_PREFIX = "step-"
# More than one is kept, because the newest may turn out to be damaged.
MAX_CHECKPOINTS = 2


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], processes: Processes
) -> None:
    """Writes the checkpoint of a step; all processes must call it, each writes its own rows."""
    target = folder / f"{CHECKPOINT_PREFIX}{step:08d}"
    temporary = folder / f".{target.name}.part"
    if processes.is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    processes.barrier()
    try:
        written = processes.all_gather(write_rows(temporary, tensors, processes))
        if processes.is_first:
            content = {"format": CHECKPOINT_FORMAT, "step": step, "state": state}
            content |= {"files": {name: checksum for name, checksum, _ in written if name}}
            content |= {"tensors": index_tensors([rows for _, _, rows in written])}
            write_text_atomically(temporary / "state.json", json.dumps(content))
            replace_directory(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            error.errno,
            f"could not write the checkpoint of step {step} ({error.strerror}); earlier checkpoints are intact",
            str(target),
        ) from error
    processes.barrier()
    if processes.is_first:
        for old in list_checkpoints(folder)[MAX_CHECKPOINTS:]:
            shutil.rmtree(old)


def write_rows(
    temporary: Path, tensors: Mapping[str, Tensor], processes: Processes
) -> tuple[str, int | None, dict[str, Any]]:
    """Writes this process's file; returns its name, its checksum, and the full shape and row range of each tensor."""
    own, rows = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            local = tensor.to_local().detach()
            first = row_offset(tensor, processes)
        elif processes.is_first:
            local, first = tensor.detach(), 0
        else:
            continue
        if local.numel():
            own[name] = local.cpu().contiguous().clone()
            rows[name] = {"shape": list(tensor.shape), "first": first, "rows": len(local) if local.dim() else 0}
    if not own:
        return "", 0, {}
    file = f"rank-{processes.rank:05d}.safetensors"
    write_tensors(temporary / file, own)
    return file, checksum_file(temporary / file), {name: each | {"file": file} for name, each in rows.items()}


def row_offset(tensor: DTensor, processes: Processes) -> int:
    """Returns the first row of this process's shard: FSDP2 splits the first axis as torch.chunk does."""
    each = -(-tensor.shape[0] // processes.world)
    return min(each * processes.rank, tensor.shape[0])


def index_tensors(written: list[dict[str, Any]]) -> dict[str, Any]:
    """Collects the shape and the shards of each tensor over all processes."""
    index: dict[str, Any] = {}
    for rows in written:
        for name, each in rows.items():
            entry = index.setdefault(name, {"shape": each["shape"], "shards": []})
            entry["shards"].append([each["file"], each["first"], each["rows"]])
    return index


class Checkpoint:
    """A checkpoint on disk, its checksums verified."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            content = json.loads((folder / "state.json").read_text())
            if content["format"] != CHECKPOINT_FORMAT:
                raise ValueError(f"format must be {CHECKPOINT_FORMAT!r}, got {content['format']!r}")
            for name, checksum in content["files"].items():
                if checksum_file(folder / name) != checksum:
                    raise ValueError(f"the checksum of {name} does not match")
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error
        self.step: int = content["step"]
        self.state: dict[str, Any] = content["state"]
        self.tensors: dict[str, Any] = content["tensors"]
        self._files: dict[str, Any] = {}

    def load_into(self, tensors: Mapping[str, Tensor], processes: Processes) -> None:
        """Copies the saved values into tensors; the number of processes may have changed since saving."""
        own = {name for name, tensor in tensors.items() if tensor.numel()}
        # A parameter that never had a gradient has no state in the optimizer.
        missing = sorted(name for name in own - self.tensors.keys() if not name.startswith("optimizer."))
        unexpected = sorted(self.tensors.keys() - own)
        if missing or unexpected:
            raise ValueError(
                f"{self.folder} does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}"
            )
        for name, tensor in tensors.items():
            if name not in self.tensors:
                continue
            if list(tensor.shape) != self.tensors[name]["shape"]:
                shapes = f"{tuple(tensor.shape)}, got {tuple(self.tensors[name]['shape'])}"
                raise ValueError(f"{self.folder} does not fit the model: {name} must have the shape {shapes}")
            with torch.no_grad():
                self._copy(name, tensor, processes)

    def _copy(self, name: str, tensor: Tensor, processes: Processes) -> None:
        local, first = tensor, 0
        if isinstance(tensor, DTensor):
            local, first = tensor.to_local(), row_offset(tensor, processes)
        for file, start, rows in self.tensors[name]["shards"]:
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


def load_newest(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Loads the newest intact checkpoint; damaged ones are reported and skipped."""
    candidates = list_checkpoints(folder)
    for index, candidate in enumerate(candidates):
        try:
            return Checkpoint(candidate)
        except ValueError as error:
            fallback = "using the one before it" if index + 1 < len(candidates) else "there is none before it"
            report(f"{error}; {fallback}")
    if candidates:
        raise ValueError(f"{folder} must hold an intact checkpoint, got {len(candidates)} damaged ones")
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Lists the checkpoints in a directory, newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name.startswith(CHECKPOINT_PREFIX)), reverse=True)


def read_best_steps(folder: Path) -> set[int]:
    """Reads the steps of the best models from all checkpoints; damaged ones are skipped, `load_newest` reports them."""
    steps: set[int] = set()
    for path in list_checkpoints(folder):
        with suppress(OSError, ValueError, KeyError, TypeError):
            steps |= {int(each[-1]) for each in json.loads((path / "state.json").read_text())["state"]["best"]}
    return steps


def replace_directory(temporary: Path, target: Path) -> None:
    """Renames a finished directory; one of the same step, from before a resume, is deleted first."""
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    fsync_path(target.parent)
