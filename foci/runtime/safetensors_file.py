"""Things made of tensors as one safetensors file: the tensors, and as JSON how they belong together. No code is run."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from torch import Tensor

from foci import biases, scores
from foci.masks import base, kinds

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


def save_parts(path: str | os.PathLike[str], described: dict[str, Any], kind: str = WEIGHTS_FORMAT) -> None:
    """Writes one safetensors file with everything that is described."""
    tensors: dict[str, Tensor] = {}
    content = encode_part(described, tensors, "", {})
    write_with_header(path, tensors, {"format": kind, "content": content})


def write_with_header(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """One safetensors file with a header as JSON."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder of {target} must be there to save into it, but {target.parent} is not")
    write_tensors(target, tensors, {"foci": json.dumps(header | {"checksum": checksum_tensors(tensors)})})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, written to the side and renamed: it is whole or not there, and may be read as any other."""
    package = import_safetensors(str(path))
    from safetensors import SafetensorError

    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # What is new has the rights that the user gives to all files; the package lets nobody else read what it writes.
        beside.touch()
        rights = stat.S_IMODE(beside.stat().st_mode)
        package.save_file(tensors, beside, metadata=metadata)
        beside.chmod(rights)
        beside.replace(path)
    except OSError as error:
        if error.filename is not None:
            error.filename = str(path)
        raise
    except SafetensorError as error:
        # What goes wrong with the disk is an OSError, as with every other file.
        why = str(error).partition("I/O error: ")[2].partition(" (os error")[0] or str(error)
        raise OSError(errno.EIO, why, str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def load_parts(path: str | os.PathLike[str], kind: str = WEIGHTS_FORMAT) -> dict[str, Any]:
    """What `save` was given; raises ValueError where the file does not say that."""
    with open_safetensors(path) as file:
        written = (file.metadata() or {}).get("foci")
        if written is None:
            raise ValueError("expected a safetensors file with an entry 'foci' in its metadata, but it has none")
        content = json.loads(written)
        if not isinstance(content, dict) or content.get("format") != kind:
            got = content.get("format") if isinstance(content, dict) else content
            raise ValueError(f"expected the format {kind!r}, but got {got!r}")
        # A copy, so that nothing depends on the file from here on.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    described = decode_part(content.get("content"), tensors)
    if not isinstance(described, dict):
        raise ValueError(f"expected a table of parts, but got {type(described).__name__}")
    if content.get("checksum") != checksum_tensors(tensors):
        raise ValueError("expected tensors with the checksum that was saved with them, but they were changed since")
    return described


def open_safetensors(path: str | os.PathLike[str], extra: str = "view") -> Any:
    """A safetensors file to read from; the package says of one that may not be read that it is not there."""
    Path(path).open("rb").close()
    return import_safetensors(os.fspath(path), extra).safe_open(os.fspath(path), framework="pt")


def encode_part(thing: Any, tensors: dict[str, Tensor], name: str, seen: dict[Any, str]) -> Any:
    """The thing as JSON, its tensors put aside under their path: one of several layers only once."""
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if isinstance(thing, Tensor):
        place = (thing.device, thing.data_ptr(), thing.shape, thing.stride(), thing.dtype)
        first = seen.setdefault(place, name) if thing.numel() else name
        if first == name:
            tensors[name] = thing.detach().cpu().contiguous().clone()
        return {"tensor": first}
    if isinstance(thing, dict):
        return {"dict": {key: encode_part(item, tensors, f"{name}.{key}".lstrip("."), seen) for key, item in thing.items()}}
    if isinstance(thing, tuple | list):
        return {"tuple": [encode_part(item, tensors, f"{name}.{i}", seen) for i, item in enumerate(thing)]}
    if is_dataclass(thing) and SAVED_CLASSES.get(type(thing).__name__) is type(thing):
        parts = {f.name: encode_part(getattr(thing, f.name), tensors, f"{name}.{f.name}", seen) for f in fields(thing)}
        return {"kind": type(thing).__name__, "fields": parts}
    raise TypeError(
        f"weights with {thing!r} cannot be saved: a file holds no code, expected masks, scores and biases of foci's own"
        " kinds (a bool tensor serves as any mask)"
    )


def decode_part(content: Any, tensors: dict[str, Tensor]) -> Any:
    """What `packed` was given."""
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
    raise ValueError(f"expected a number, a tensor of the file, a table or a known kind, but got {str(content)[:80]}")


def rebuild_object(name: str, parts: dict[str, Any]) -> Any:
    """A score, a mask or a bias of its parts, each of the type that its kind declares."""
    if name not in SAVED_CLASSES:
        raise ValueError(f"expected one of the kinds {', '.join(SAVED_CLASSES)}, but got {name!r}")
    kind = SAVED_CLASSES[name]
    declared = get_type_hints(kind)
    if parts.keys() != {field.name for field in fields(kind)}:
        raise ValueError(f"expected {name} with {[field.name for field in fields(kind)]}, but got {list(parts)}")
    for part, thing in parts.items():
        if not isinstance(thing, declared[part]) and not (isinstance(thing, int) and isinstance(0.0, declared[part])):
            raise ValueError(f"expected {name}.{part} to be {declared[part]}, but got {type(thing).__name__}")
    return kind(**parts)


def map_tensors(thing: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same thing with every tensor in it changed."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, dict):
        return {key: map_tensors(item, change) for key, item in thing.items()}
    if isinstance(thing, tuple):
        return tuple(map_tensors(item, change) for item in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: map_tensors(getattr(thing, f.name), change) for f in fields(thing)})
    return thing


def checksum_tensors(tensors: dict[str, Tensor]) -> int:
    """Tells damaged tensors; safetensors itself sees only a damaged header or a missing end."""
    total = 0
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), total)
    return total


def import_safetensors(what: str = "a file of weights", extra: str = "view") -> Any:
    """The package; where it is missing, what needs it and the extra that brings it."""
    try:
        import safetensors.torch as package
    except ImportError as error:
        raise ImportError(f"{what} needs safetensors, which is not installed: pip install 'foci[{extra}]'") from error
    return package
