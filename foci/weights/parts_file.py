"""Saves and loads dicts of tensors, numbers, masks, scores and biases: the content of weights and record files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

from torch import Tensor

from foci import biases, scores
from foci.masks import base, kinds
from foci.runtime.json_text import parse_json
from foci.runtime.limits import MAX_EMPTY_SIZE
from foci.runtime.safetensors_file import checksum_tensors, open_safetensors, write_with_header

WEIGHTS_FORMAT = "foci.weights/1"
SAVED_CLASSES = {
    kind.__name__: kind
    for kind in (
        *(scores.Dot, scores.Additive, scores.General, scores.Cosine),
        *(kinds.Causal, kinds.Window, kinds.Padding, kinds.Documents, kinds.Prefix, base.DenseMask),
        *(base.Intersection, base.Union, base.Complement),
        *(biases.ALiBi, biases.Buckets, biases.Relative, biases.DenseBias),
    )
}


def save_parts(path: str | os.PathLike[str], parts: dict[str, Any], kind: str = WEIGHTS_FORMAT) -> None:
    """Writes a dict of tensors, numbers, masks, scores and biases to one safetensors file."""
    tensors: dict[str, Tensor] = {}
    content = encode_part(parts, tensors, "", {})
    write_with_header(path, tensors, {"format": kind, "content": content})


def load_parts(path: str | os.PathLike[str], kind: str = WEIGHTS_FORMAT) -> dict[str, Any]:
    """The parts that `save_parts` wrote; raises ValueError if the file holds something else."""
    with open_safetensors(path) as file:
        header = (file.metadata() or {}).get("foci")
        if header is None:
            raise ValueError("the metadata must have an entry 'foci', got none")
        content = parse_json(header, "the header")
        if not isinstance(content, dict) or content.get("format") != kind:
            got = content.get("format") if isinstance(content, dict) else content
            raise ValueError(f"the format must be {kind!r}, got {got!r}")
        # Copies, so that the tensors do not depend on the file.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        check_empty_tensor(name, tensor)
    parts = decode_part(content.get("content"), tensors)
    if not isinstance(parts, dict):
        raise ValueError(f"the content must be a dict of parts, got {type(parts).__name__}")
    if content.get("checksum") != checksum_tensors(tensors):
        raise ValueError("the checksum of the tensors does not match: the file was changed or damaged")
    return parts


@contextmanager
def explain_damage(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turns the errors of a damaged or malicious file, which can make the checks raise anything, into ValueError."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is not a valid {kind}: {error}") from error


def check_empty_tensor(name: str, tensor: Tensor) -> None:
    """Refuses an empty tensor that claims sizes which take no bytes of the file, such as many keys of width 0."""
    if tensor.numel() == 0:
        MAX_EMPTY_SIZE.check(f"the tensor {name!r}", math.prod(size for size in tensor.shape if size))


def encode_part(thing: Any, tensors: dict[str, Tensor], name: str, saved: dict[Any, str]) -> Any:
    """The object as JSON; its tensors are added to `tensors` under their path, a shared tensor only once."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, Tensor):
        memory = (thing.device, thing.data_ptr(), thing.shape, thing.stride(), thing.dtype)
        first = saved.setdefault(memory, name) if thing.numel() else name
        if first == name:
            tensors[name] = thing.detach().cpu().contiguous().clone()
        return {"tensor": first}
    if isinstance(thing, dict):
        return {
            "dict": {key: encode_part(item, tensors, f"{name}.{key}".lstrip("."), saved) for key, item in thing.items()}
        }
    if isinstance(thing, tuple | list):
        return {"tuple": [encode_part(item, tensors, f"{name}.{i}", saved) for i, item in enumerate(thing)]}
    if is_dataclass(thing) and SAVED_CLASSES.get(type(thing).__name__) is type(thing):
        parts = {f.name: encode_part(getattr(thing, f.name), tensors, f"{name}.{f.name}", saved) for f in fields(thing)}
        return {"kind": type(thing).__name__, "fields": parts}
    raise TypeError(
        f"weights with {thing!r} cannot be saved, because a file holds no code: use foci's own masks, scores and biases"
        " (a bool tensor can replace any mask)"
    )


def decode_part(content: Any, tensors: dict[str, Tensor]) -> Any:
    """The object that `encode_part` encoded."""
    if content is None or isinstance(content, bool | int | float | str):
        return content
    match content:
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"dict": dict(items)}:
            return {key: decode_part(item, tensors) for key, item in items.items()}
        case {"tuple": list(items)}:
            return tuple(decode_part(item, tensors) for item in items)
        case {"kind": str(kind), "fields": dict(items)}:
            return rebuild_object(kind, {key: decode_part(item, tensors) for key, item in items.items()})
    raise ValueError(f"a part must be a number, a tensor of the file, a dict or a known kind, got {str(content)[:80]}")


def rebuild_object(name: str, parts: dict[str, Any]) -> Any:
    """A score, mask or bias from its fields, whose types are checked against the class."""
    if name not in SAVED_CLASSES:
        raise ValueError(f"kind must be one of {', '.join(SAVED_CLASSES)}, got {name!r}")
    kind = SAVED_CLASSES[name]
    declared = get_type_hints(kind)
    if parts.keys() != {field.name for field in fields(kind)}:
        raise ValueError(f"{name} must have the fields {[field.name for field in fields(kind)]}, got {list(parts)}")
    for part, thing in parts.items():
        if not isinstance(thing, declared[part]) and not (isinstance(thing, int) and isinstance(0.0, declared[part])):
            raise ValueError(f"{name}.{part} must be {declared[part]}, got {type(thing).__name__}")
    return kind(**parts)


def map_tensors(thing: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of the object with `change` applied to every tensor in it."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, dict):
        return {key: map_tensors(item, change) for key, item in thing.items()}
    if isinstance(thing, tuple):
        return tuple(map_tensors(item, change) for item in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: map_tensors(getattr(thing, f.name), change) for f in fields(thing)})
    return thing
