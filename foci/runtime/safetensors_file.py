"""Safetensors files: written atomically, with a JSON header and a checksum. No code is executed on reading."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from foci.runtime.durable_files import replace_durably


def write_with_header(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Writes one safetensors file with a JSON header and a checksum."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} must be an existing directory to save {target.name}, got none")
    write_tensors(target, tensors, {"foci": json.dumps(header | {"checksum": checksum_tensors(tensors)})})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file under a temporary name and renames it, so that it is never partial."""
    package = import_safetensors(str(path))
    from safetensors import SafetensorError

    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # New files get the default mode of the user; the package would make them readable by the owner only.
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        package.save_file(tensors, temporary, metadata=metadata)
        sort_metadata(temporary)
        temporary.chmod(mode)
        replace_durably(temporary, path)
    except OSError as error:
        if error.filename is not None:
            error.filename = str(path)
        raise
    except SafetensorError as error:
        # Errors of the disk are OSErrors, as with every other file.
        reason = str(error).partition("I/O error: ")[2].partition(" (os error")[0] or str(error)
        raise OSError(errno.EIO, reason, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def sort_metadata(path: Path) -> None:
    """Sorts the metadata in the header, which the package writes in random order: equal content gives equal bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= size, "the package writes the same compact JSON, in another order"
        file.seek(8)
        file.write(text.ljust(size))


def open_safetensors(path: str | os.PathLike[str], extra: str = "view") -> Any:
    """Opens a safetensors file for reading."""
    # The package reports a file without read permission as missing; open() raises the right OSError.
    Path(path).open("rb").close()
    package = import_safetensors(os.fspath(path), extra)
    from safetensors import SafetensorError

    try:
        return package.safe_open(os.fspath(path), framework="pt")
    except SafetensorError as error:
        is_empty = Path(path).stat().st_size == 0
        raise ValueError("the file is empty" if is_empty else "the file is damaged or of another kind") from error


def checksum_tensors(tensors: dict[str, Tensor]) -> int:
    """A checksum of names, dtypes, shapes and values: safetensors itself does not detect changed values."""
    total = 0
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total = zlib.crc32(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode(), total)
        # An empty tensor has no address, and the checksum of no memory is 0 whatever came before it.
        if tensor.nbytes:
            total = zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), total)
    return total


def import_safetensors(what: str = "a weights file", extra: str = "view") -> Any:
    """The safetensors package; the ImportError names what needs it and the extra that installs it."""
    try:
        import safetensors.torch as package
    except ImportError as error:
        raise ImportError(f"{what} needs safetensors, which is not installed: pip install 'foci[{extra}]'") from error
    return package
