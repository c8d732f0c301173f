"""Saves and loads a trained model with its task: weights, config, tokenizer and metrics, in one or several files.

A file is what `foci.nn.Model.save` writes, with one more header entry for the task, its settings and its files.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from foci.nn.model import (
    MODEL_FORMAT,
    Model,
    SkipInitialValues,
    build_saved_model,
    explain_loading_faults,
    iter_unique_tensors,
)
from foci.runtime.json_text import parse_json
from foci.runtime.safetensors_file import checksum_tensors, open_safetensors, write_tensors
from foci.tasks import find_task
from foci.tasks.task import Task

Storage = Literal["float32", "bfloat16", "int8"]
SCALE_SUFFIX = ".scale"
END_SIZES = ("vocabulary", "classes", "features", "channels", "image")


class TrainedModel(NamedTuple):
    """A model with its task."""

    task: Task[Any, Any]
    model: Model
    about: dict[str, Any]  # score, data, licence: whatever was saved with it


def save_trained_model(
    path: Path,
    task: Task[Any, Any],
    model: Model,
    about: dict[str, Any] | None = None,
    *,
    storage: Storage = "float32",
    max_bytes: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """Writes a model with its task; returns the paths of the files.

    Args:
        path: of the file; with `max_bytes`, of parts such as model-1-of-3.safetensors.
        about: further information, as JSON values.
        storage: dtype of the stored weights; int8 stores matrices as integers with one scale per row.
        max_bytes: maximum bytes of weights per file; None: one file.
        weights: weights to save instead of the model's own, by name.
    """
    own = dict(iter_unique_tensors(model)) if weights is None else weights
    stored = {key: part for name, tensor in own.items() for key, part in encode_for_storage(name, tensor, storage)}
    groups = split_by_bytes(stored, max_bytes)
    described = {
        "name": task.name,
        "settings": asdict(task.settings),
        "files": task.learned_state(),
        "about": about or {},
    }
    paths = []
    for number, group in enumerate(groups, start=1):
        file = path if max_bytes is None else path.with_name(f"{path.stem}-{number}-of-{len(groups)}{path.suffix}")
        header: dict[str, Any] = {"format": MODEL_FORMAT, "kind": type(model).__name__, "config": asdict(model.config)}
        header |= {"checksum": checksum_tensors(group), "part": number, "parts": len(groups)}
        metadata = {"foci": json.dumps(header)} | ({"task": json.dumps(described)} if number == 1 else {})
        write_tensors(file, group, metadata)
        paths.append(file)
    return paths


def load_trained_model(path: Path, *, device: str | torch.device = "cpu") -> TrainedModel:
    """Loads the model of a file, a run directory, or a directory with parts; in eval mode and float32."""
    headers, tensors, described = read_model_files(find_model_files(path))
    with explain_loading_faults(path):
        check_model_parts(headers)
        task = parse_task(described)
        model: Model = build_saved_model(Model, headers[0], decode_from_storage(tensors))
        check_task_fits(task, model)
        about = described.get("about", {})
        if not isinstance(about, dict):
            raise ValueError(f"about must be a table, got {reprlib.repr(about)}")
    return TrainedModel(task, model.to(device).eval(), about)


def check_model_parts(headers: list[dict[str, Any]]) -> None:
    """Raises ValueError if files of a model are missing."""
    count = headers[0].get("parts", 1)
    numbers = [header.get("part", 1) for header in headers]
    if count != len(headers) or any(number not in numbers for number in range(1, len(headers) + 1)):
        found = ", ".join(reprlib.repr(number) for number in numbers)
        raise ValueError(f"the parts must be 1 to {reprlib.repr(count)}, got {found}")


def parse_task(described: dict[str, Any]) -> Task[Any, Any]:
    """Rebuilds the task of a model file."""
    task_type = find_task(described["name"])
    files = described["files"]
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ValueError(f"the files of the task must be texts by name, got {reprlib.repr(files)}")
    return task_type.from_learned_state(task_type.settings_type.from_dict(described["settings"]), files)


def check_task_fits(task: Task[Any, Any], model: Model) -> None:
    """Raises ValueError if the model is of another class than the task builds, or of another size at its ends."""
    with torch.device("meta"), SkipInitialValues():
        expected = task.model()
    if type(model) is not type(expected):
        names = f"{type(expected).__name__}, got {type(model).__name__}"
        raise ValueError(f"the model of this {task.name} task must be of class {names}")
    found, wanted = list_end_sizes(model), list_end_sizes(expected)
    if found != wanted:
        raise ValueError(f"the sizes of the model must be {wanted} for its task, got {found}")


def list_end_sizes(model: Model) -> dict[str, Any]:
    """Lists the sizes of inputs and outputs in the config of a model, which its task determines."""
    config = asdict(model.config)
    tables = {"": config} | {f"{name}.": part for name, part in config.items() if isinstance(part, dict)}
    return {prefix + name: table[name] for prefix, table in tables.items() for name in END_SIZES if name in table}


def find_model_files(path: Path) -> list[Path]:
    """Returns the files of a model."""
    if path.is_file():
        return [path]
    whole = path / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(path.glob("model-*-of-*.safetensors"))
    if not files:
        raise ValueError(f"{path} must be a model file, or a directory with model.safetensors, got neither")
    return files


def read_model_files(paths: list[Path]) -> tuple[list[dict[str, Any]], dict[str, Tensor], dict[str, Any]]:
    """Reads the headers, all tensors and the task of the files."""
    headers: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    described = None
    for path in paths:
        try:
            with open_safetensors(path, "tasks") as file:
                metadata = file.metadata() or {}
                own = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ImportError):
            raise
        except Exception as error:
            raise ValueError(f"{path} must be an intact safetensors file: {error}") from error
        header = parse_header(metadata.get("foci", "{}"), path)
        if header.get("format") != MODEL_FORMAT or header.get("checksum") != checksum_tensors(own):
            raise ValueError(f"{path} must be a foci model: its header does not match its tensors, or it is damaged")
        headers.append(header)
        tensors |= own
        described = parse_header(metadata["task"], path) if "task" in metadata else described
    if described is None:
        raise ValueError(f"{paths[0]} must be a model trained for a task, got one without a task")
    return headers, tensors, described


def parse_header(text: str, path: Path) -> dict[str, Any]:
    """Parses an entry of the metadata of a model file."""
    content = parse_json(text, f"the header of {path}")
    if not isinstance(content, dict):
        raise ValueError(f"the header of {path} must be a JSON object, got {reprlib.repr(content)}")
    return content


def encode_for_storage(name: str, tensor: Tensor, storage: Storage) -> Iterator[tuple[str, Tensor]]:
    """Converts a tensor to its stored form; int8 matrices come with one scale per row."""
    tensor = tensor.detach().cpu().contiguous()
    if not tensor.is_floating_point():
        yield name, tensor
    elif storage == "int8" and tensor.dim() >= 2:
        rows = tensor.float().flatten(1)
        scale = rows.abs().amax(1).clamp(min=1e-12) / 127
        yield name, (rows / scale[:, None]).round().to(torch.int8).view(tensor.shape)
        yield name + SCALE_SUFFIX, scale
    elif storage == "bfloat16":
        yield name, tensor.bfloat16()
    else:
        yield name, tensor.float()


def decode_from_storage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reverses `encode_for_storage`, to float32; the results share no memory with the file."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in tensors:
            continue
        scale = tensors.get(name + SCALE_SUFFIX)
        if scale is not None:
            check_scale(name, tensor, scale)
            # One pass: a product of int8 and float32 is float32.
            result[name] = tensor * scale.float().view(-1, *[1] * (tensor.dim() - 1))
        elif tensor.is_floating_point() or tensor.dtype == torch.int8:
            result[name] = tensor.to(torch.float32, copy=True)
        else:
            result[name] = tensor.clone()
    return result


def check_scale(name: str, tensor: Tensor, scale: Tensor) -> None:
    """Raises ValueError unless the scale of an int8 tensor has one finite number per row."""
    fits = tensor.dtype == torch.int8 and tensor.dim() >= 2 and scale.shape == tensor.shape[:1]
    if not fits or not scale.is_floating_point() or not bool(scale.isfinite().all()):
        expected = f"a finite float for each row of the int8 tensor {name}"
        raise ValueError(f"{name}{SCALE_SUFFIX} must have {expected}, got {scale.dtype} {tuple(scale.shape)}")


def split_by_bytes(tensors: dict[str, Tensor], max_bytes: int | None) -> list[dict[str, Tensor]]:
    """Groups the tensors, in order, into as few files as the size limit allows."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if max_bytes is not None and groups[-1] and size + tensor.nbytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups
