"""A trained model as one file, or as several small ones: weights, config, task, tokenizer and what was measured.

A file is what `foci.nn.Model.save` writes, with one more entry in its header: the task, its settings and its files.
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
from foci.tasks import find
from foci.tasks.task import Task

Storage = Literal["float32", "bfloat16", "int8"]
SCALE = ".scale"


class Trained(NamedTuple):
    """A model that answers."""

    task: Task[Any, Any]
    model: Model
    about: dict[str, Any]  # score, data, licence: whatever was saved with it


def save(
    path: Path,
    task: Task[Any, Any],
    model: Model,
    about: dict[str, Any] | None = None,
    *,
    storage: Storage = "float32",
    largest: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """Writes a model with its task; gives the files.

    Args:
        path: of the file; with `largest` parts beside it: model-1-of-3.safetensors.
        about: what else to say of it, as JSON.
        storage: how the weights are kept; int8 keeps matrices as whole numbers with a scale for each row.
        largest: how many bytes of weights a file holds at most; None: all in one.
        weights: other weights than the model's own, by name.
    """
    own = dict(iter_unique_tensors(model)) if weights is None else weights
    stored = {key: part for name, tensor in own.items() for key, part in kept(name, tensor, storage)}
    groups = in_groups(stored, largest)
    described = {"name": task.name, "settings": asdict(task.settings), "files": task.files(), "about": about or {}}
    paths = []
    for number, group in enumerate(groups, start=1):
        file = path if largest is None else path.with_name(f"{path.stem}-{number}-of-{len(groups)}{path.suffix}")
        header: dict[str, Any] = {"format": MODEL_FORMAT, "kind": type(model).__name__, "config": asdict(model.config)}
        header |= {"checksum": checksum_tensors(group), "part": number, "parts": len(groups)}
        metadata = {"foci": json.dumps(header)} | ({"task": json.dumps(described)} if number == 1 else {})
        write_tensors(file, group, metadata)
        paths.append(file)
    return paths


def load(path: Path, *, device: str | torch.device = "cpu") -> Trained:
    """The model in a file, in a run's folder, or in a folder with its parts; in eval mode and float32."""
    headers, tensors, described = read(found(path))
    try:
        numbers = sorted(header.get("part", 1) for header in headers)
        if numbers != list(range(1, headers[0].get("parts", 1) + 1)):
            raise ValueError(f"expected the parts 1 to {headers[0].get('parts', 1)}, but got {numbers}")
        kind = find_model_class(Model, headers[0]["kind"])
        model: Model = kind(kind.config_type.from_dict(headers[0]["config"]))
        load_tensors(model, whole(tensors))
        named = find(described["name"])
        task = named.from_files(named.settings_type.from_dict(described["settings"]), described["files"])
        check_vocabulary(task, asdict(model.config))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    return Trained(task, model.to(device).eval(), described.get("about", {}))


def check_vocabulary(task: Task[Any, Any], config: dict[str, Any]) -> None:
    """Refuses a model whose words are not those of its tokenizer."""
    size = getattr(getattr(task, "tokenizer", None), "vocabulary", None)
    tables = [config, *(part for part in config.values() if isinstance(part, dict))]
    known = {table["vocabulary"] for table in tables if table.get("vocabulary") is not None}
    if size is not None and known and size not in known:
        raise ValueError(f"the model knows {max(known)} tokens, but its tokenizer has {size}")


def found(path: Path) -> list[Path]:
    """The files of a model."""
    if path.is_file():
        return [path]
    whole = path / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(path.glob("model-*-of-*.safetensors"))
    if not files:
        raise ValueError(f"expected a model at {path}: a file, or a folder with model.safetensors, but there is none")
    return files


def read(paths: list[Path]) -> tuple[list[dict[str, Any]], dict[str, Tensor], dict[str, Any]]:
    """The headers, all tensors and the task of some files."""
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
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        header = json.loads(metadata.get("foci", "{}"))
        if header.get("format") != MODEL_FORMAT or header.get("checksum") != checksum_tensors(own):
            raise ValueError(f"{path} is damaged or no model of foci: its header does not fit its tensors")
        headers.append(header)
        tensors |= own
        described = json.loads(metadata["task"]) if "task" in metadata else described
    if described is None:
        raise ValueError(f"expected a model that was trained for a task, but {paths[0]} names none")
    return headers, tensors, described


def kept(name: str, tensor: Tensor, storage: Storage) -> Iterator[tuple[str, Tensor]]:
    """A tensor as it is stored; for int8 with its scales, one for each row of a matrix."""
    tensor = tensor.detach().cpu().contiguous()
    if not tensor.is_floating_point():
        yield name, tensor
    elif storage == "int8" and tensor.dim() >= 2:
        rows = tensor.float().flatten(1)
        scale = rows.abs().amax(1).clamp(min=1e-12) / 127
        yield name, (rows / scale[:, None]).round().to(torch.int8).view(tensor.shape)
        yield name + SCALE, scale
    elif storage == "bfloat16":
        yield name, tensor.bfloat16()
    else:
        yield name, tensor.float()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `kept` was given, in float32."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors:
            continue
        scale = tensors.get(name + SCALE)
        value = tensor.float() if tensor.is_floating_point() or tensor.dtype == torch.int8 else tensor
        result[name] = value if scale is None else value * scale.view(-1, *[1] * (value.dim() - 1))
    return result


def in_groups(tensors: dict[str, Tensor], largest: int | None) -> list[dict[str, Tensor]]:
    """The tensors in as few files as their size allows, in order."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if largest is not None and groups[-1] and size + tensor.nbytes > largest:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups
