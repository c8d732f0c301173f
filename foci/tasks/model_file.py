"""Saves and loads a trained model with its task: weights, config, tokenizer and metrics, in one or several files.

A file is what `foci.nn.Model.save` writes, with one more header entry for the task, its settings and its files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from foci.nn.model import MODEL_FORMAT, Model, find_model_class, iter_unique_tensors, load_tensors
from foci.runtime.safetensors_file import checksum_tensors, open_safetensors, write_tensors
from foci.tasks import find_task
from foci.tasks.task import Task

Storage = Literal["float32", "bfloat16", "int8"]
SCALE_SUFFIX = ".scale"


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
    described = {"name": task.name, "settings": asdict(task.settings), "files": task.files(), "about": about or {}}
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
    try:
        numbers = sorted(header.get("part", 1) for header in headers)
        if numbers != list(range(1, headers[0].get("parts", 1) + 1)):
            raise ValueError(f"the parts must be 1 to {headers[0].get('parts', 1)}, got {numbers}")
        kind = find_model_class(Model, headers[0]["kind"])
        model: Model = kind(kind.config_type.from_dict(headers[0]["config"]))
        load_tensors(model, decode_from_storage(tensors))
        task_type = find_task(described["name"])
        task = task_type.from_files(task_type.settings_type.from_dict(described["settings"]), described["files"])
        check_vocabulary(task, asdict(model.config))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    return TrainedModel(task, model.to(device).eval(), described.get("about", {}))


def check_vocabulary(task: Task[Any, Any], config: dict[str, Any]) -> None:
    """Raises ValueError if the vocabulary of the model differs from that of its tokenizer."""
    size = getattr(getattr(task, "tokenizer", None), "vocabulary", None)
    tables = [config, *(part for part in config.values() if isinstance(part, dict))]
    known = {table["vocabulary"] for table in tables if table.get("vocabulary") is not None}
    if size is not None and known and size not in known:
        raise ValueError(f"the model has a vocabulary of {max(known)} tokens, but its tokenizer has {size}")


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
        header = json.loads(metadata.get("foci", "{}"))
        if header.get("format") != MODEL_FORMAT or header.get("checksum") != checksum_tensors(own):
            raise ValueError(f"{path} must be a foci model: its header does not match its tensors, or it is damaged")
        headers.append(header)
        tensors |= own
        described = json.loads(metadata["task"]) if "task" in metadata else described
    if described is None:
        raise ValueError(f"{paths[0]} must be a model trained for a task, got one without a task")
    return headers, tensors, described


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
    """Reverses `encode_for_storage`, to float32."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in tensors:
            continue
        scale = tensors.get(name + SCALE_SUFFIX)
        value = tensor.float() if tensor.is_floating_point() or tensor.dtype == torch.int8 else tensor
        result[name] = value if scale is None else value * scale.view(-1, *[1] * (value.dim() - 1))
    return result


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
