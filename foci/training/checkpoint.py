"""Atomic checkpoints: written to a temporary directory and renamed, with checksums that detect damage.

A checkpoint is a directory with one safetensors file per process that holds a shard of the weights, and state.json,
which lists the shards of every tensor and the checksum of every file. Loading executes no code from it.
"""

from __future__ import annotations

import re
import reprlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from foci.runtime.durable_files import checksum_file, fsync_path, read_checked_json, write_checked_json
from foci.runtime.safetensors_file import import_safetensors, write_tensors
from foci.training.distributed import Processes
from foci.training.state import EvaluatedModel, State

CHECKPOINT_FORMAT = "foci.checkpoint/3"
CHECKPOINT_PREFIX = "step-"
FILE_NAME = re.compile(r"rank-\d{5}\.safetensors")
# More than one is kept, because the newest may turn out to be damaged.
MAX_CHECKPOINTS = 2


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: State,
    processes: Processes,
    orders: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the checkpoint of a step; all processes must call it, each writes its own rows.

    `orders`: the order of the rows of tensors that are reordered in memory, by name.
    """
    target = folder / f"{CHECKPOINT_PREFIX}{state.step:08d}"
    temporary = folder / f".{target.name}.part"
    if processes.is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    processes.barrier()
    try:
        written = processes.all_gather(write_rows(temporary, tensors, processes, orders or {}))
        if processes.is_first:
            content = {"format": CHECKPOINT_FORMAT, "state": asdict(state)}
            content |= {"files": {name: checksum for name, checksum, _ in written if name}}
            content |= {"tensors": index_tensors([rows for _, _, rows in written])}
            write_checked_json(temporary / "state.json", content)
            replace_directory(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            error.errno,
            f"could not write the checkpoint of step {state.step} ({error.strerror}); earlier checkpoints are intact",
            str(target),
        ) from error
    processes.barrier()
    if processes.is_first:
        for old in list_checkpoints(folder)[MAX_CHECKPOINTS:]:
            shutil.rmtree(old)


def write_rows(
    temporary: Path, tensors: Mapping[str, Tensor], processes: Processes, orders: Mapping[str, Tensor]
) -> tuple[str, int | None, dict[str, Any]]:
    """Writes this process's file; returns its name, its checksum, and the full shape and row range of each tensor."""
    own, rows = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            first = row_offset(tensor, processes)
            local = take_rows(tensor, first, processes, orders.get(name))
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


def take_rows(tensor: DTensor, first: int, processes: Processes, order: Tensor | None) -> Tensor:
    """The rows that this process saves; with tensor parallelism they are not those that it holds."""
    if tensor.device_mesh.ndim == 1 and tensor.device_mesh.size() == processes.world:
        return tensor.to_local().detach()
    whole: Tensor = tensor.full_tensor().detach()
    whole = whole if order is None else whole[order.argsort()]
    return whole[first : first - (-len(whole) // processes.world)]


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
    """A checkpoint on disk, every file of it verified."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        try:
            content = read_checked_json(folder / "state.json")
            if content["format"] != CHECKPOINT_FORMAT:
                raise ValueError(f"format must be {CHECKPOINT_FORMAT!r}, got {content['format']!r}")
            self.state = State.from_json(content["state"])
            self.tensors: dict[str, Any] = content["tensors"]
            self._verify_files(content["files"])
            self._verify_index()
        except Exception as error:
            # Content of any kind can stand in a damaged file; the caller gets one type of error.
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error

    def _verify_files(self, files: dict[str, int]) -> None:
        for name, checksum in files.items():
            if not FILE_NAME.fullmatch(name) or checksum_file(self.folder / name) != checksum:
                raise ValueError(f"the checksum of {reprlib.repr(name)} does not match")
            self._files[name] = import_safetensors().safe_open(str(self.folder / name), framework="pt")

    def _verify_index(self) -> None:
        """Checks that the listed rows are in the files, and that they are all rows of each tensor."""
        for name, entry in self.tensors.items():
            shape, total = entry["shape"], 0
            for file, first, rows in entry["shards"]:
                expected = [rows, *shape[1:]] if shape else []
                if first != total or list(self._files[file].get_slice(name).get_shape()) != expected:
                    raise ValueError(f"the rows of {reprlib.repr(name)} do not match its files")
                total += rows
            if shape and total != shape[0]:
                raise ValueError(f"{reprlib.repr(name)} must have {shape[0]} rows, got {total}")

    @cached_property
    def lost_models(self) -> list[EvaluatedModel]:
        """Returns the best models of the checkpoint whose files are missing or damaged."""
        return [each for each in self.state.best if not each.is_intact(self.folder.parent.parent)]

    def load_into(
        self, tensors: Mapping[str, Tensor], processes: Processes, orders: Mapping[str, Tensor] | None = None
    ) -> None:
        """Copies the saved values into tensors; the processes and their mesh may have changed since saving."""
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
                self._copy(name, tensor, processes, (orders or {}).get(name))

    def _copy(self, name: str, tensor: Tensor, processes: Processes, order: Tensor | None) -> None:
        local, first = tensor, 0
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.ndim > 1 or tensor.device_mesh.size() < processes.world:
                tensor.copy_(self._distribute(name, tensor, order))
                return
            local, first = tensor.to_local(), row_offset(tensor, processes)
        for file, start, rows in self.tensors[name]["shards"]:
            if local.dim() == 0:
                local.copy_(self._files[file].get_tensor(name))
                continue
            begin, end = max(first, start), min(first + len(local), start + rows)
            if begin < end:
                local[begin - first : end - first].copy_(self._files[file].get_slice(name)[begin - start : end - start])

    def _distribute(self, name: str, tensor: DTensor, order: Tensor | None) -> DTensor:
        """The saved tensor in the placements of another one."""
        parts = [self._files[file].get_tensor(name) for file, _, _ in self.tensors[name]["shards"]]
        whole = torch.cat(parts).to(tensor.device)
        whole = whole if order is None else whole[order]
        return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def load_newest(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Loads the newest checkpoint that is intact, with its best models; damaged ones are reported and skipped."""
    candidates = list_checkpoints(folder)
    incomplete: list[Checkpoint] = []
    for index, candidate in enumerate(candidates):
        fallback = "using the one before it" if index + 1 < len(candidates) else "there is none before it"
        try:
            found = Checkpoint(candidate)
        except ValueError as error:
            report(f"{error}; {fallback}")
            continue
        if not found.lost_models:
            return found
        report(f"the best model {found.lost_models[0].path(folder.parent)} of {candidate} is damaged; {fallback}")
        incomplete.append(found)
    if incomplete:
        return drop_lost_models(incomplete[0], report)
    if candidates:
        raise ValueError(f"{folder} must hold an intact checkpoint, got {len(candidates)} damaged ones")
    return None


def drop_lost_models(found: Checkpoint, report: Callable[[str], None]) -> Checkpoint:
    """Removes damaged models from the best ones, if no checkpoint can restore them."""
    lost = found.lost_models
    steps = ", ".join(str(each.step) for each in lost)
    report(f"no checkpoint has all of its best models: using {found.folder} without those of step {steps}")
    found.state.best = [each for each in found.state.best if each not in lost]
    if found.state.step not in found.state.best_steps:
        # The model of the checkpoint may have been one of them: it can be evaluated again.
        found.state.evaluated_step = 0
    return found


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
            steps |= State.from_json(read_checked_json(path / "state.json")["state"]).best_steps
    return steps


def replace_directory(temporary: Path, target: Path) -> None:
    """Renames a finished directory; one of the same step, from before a resume, is deleted first."""
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    fsync_path(target.parent)
