"""A `Weights` as one safetensors file: tensors by name, and how they belong together as JSON. Nothing is ever executed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci import biases, masks, scores

FORMAT = "foci.weights/1"
KINDS = {
    kind.__name__: kind
    for kind in (
        *(scores.Dot, scores.Additive, scores.General, scores.Cosine),
        *(masks.Causal, masks.Window, masks.Padding, masks.Documents, masks.Prefix, masks.Entries),
        *(masks.Both, masks.Either, masks.Opposite),
        *(biases.ALiBi, biases.Buckets, biases.Relative, biases.Added),
    )
}


def save(path: str | os.PathLike[str], described: dict[str, Any]) -> None:
    """Writes to the side and renames, so that a file is whole or not there."""
    tensors: dict[str, Tensor] = {}
    content = json.dumps({"format": FORMAT, "content": packed(described, tensors, "")})
    beside = f"{os.fspath(path)}.part"
    safetensors().save_file(tensors, beside, metadata={"foci": content})
    os.replace(beside, path)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with safetensors().safe_open(os.fspath(path), framework="pt") as file:
            content = json.loads((file.metadata() or {})["foci"])
            if content["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, but got {content['format']!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = unpacked(content["content"], tensors)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is not a whole file of foci weights: {error}") from error
    if not isinstance(described, dict):
        raise ValueError(f"{os.fspath(path)} is not a file of foci weights: expected a table of parts")
    return described


def packed(thing: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """The thing as JSON, its tensors put aside under their path."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, Tensor):
        tensors[name] = thing.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(thing, dict):
        return {"dict": {key: packed(item, tensors, f"{name}.{key}".lstrip(".")) for key, item in thing.items()}}
    if isinstance(thing, tuple | list):
        return {"tuple": [packed(item, tensors, f"{name}.{i}") for i, item in enumerate(thing)]}
    if is_dataclass(thing) and type(thing).__name__ in KINDS:
        parts = {f.name: packed(getattr(thing, f.name), tensors, f"{name}.{f.name}") for f in fields(thing)}
        return {"kind": type(thing).__name__, "fields": parts}
    raise TypeError(f"weights with {thing!r} cannot be saved: code is never written to a file; pass a bool tensor instead")


def unpacked(content: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(content, dict):
        return content
    if "tensor" in content:
        return tensors[content["tensor"]]
    if "dict" in content:
        return {key: unpacked(item, tensors) for key, item in content["dict"].items()}
    if "tuple" in content:
        return tuple(unpacked(item, tensors) for item in content["tuple"])
    return KINDS[content["kind"]](**{key: unpacked(item, tensors) for key, item in content["fields"].items()})


def mapped(thing: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same thing with every tensor in it changed."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, dict):
        return {key: mapped(item, change) for key, item in thing.items()}
    if isinstance(thing, tuple):
        return tuple(mapped(item, change) for item in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: mapped(getattr(thing, f.name), change) for f in fields(thing)})
    return thing


def safetensors() -> Any:
    try:
        import safetensors as package
        import safetensors.torch as module
    except ImportError as error:
        raise ImportError("saving weights needs safetensors: pip install 'foci[all]'") from error
    module.safe_open = package.safe_open
    return module
