"""Files that survive a crash and reveal damage: flushed before they are renamed, and read with their checksum."""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

READ_CHUNK_BYTES = 2**24


def fsync_path(path: Path) -> None:
    """Flushes a file or directory to disk; on Windows, which flushes no directories, the system decides when."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_durably(temporary: Path, target: Path) -> None:
    """Renames a file so that a crash leaves either the old file or the complete new one."""
    fsync_path(temporary)
    temporary.replace(target)
    # Some network file systems cannot flush a directory.
    with suppress(OSError):
        fsync_path(target.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a text file so that a crash leaves either the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        replace_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_checked_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an object as JSON together with its checksum."""
    write_text_atomically(path, json.dumps(content | {"checksum": checksum_json(content)}, ensure_ascii=False))


def read_checked_json(path: Path) -> dict[str, Any]:
    """Reads what `write_checked_json` wrote; raises ValueError if it is damaged or was changed."""
    try:
        # Reading a device or a pipe would never end.
        content = json.loads(path.read_text(encoding="utf-8") if path.is_file() else "null")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        got = type(content).__name__ if path.is_file() else "no file"
        raise ValueError(f"{path.name} must be a file with a JSON object, got {got}")
    if content.pop("checksum", None) != checksum_json(content):
        raise ValueError(f"the checksum of {path.name} does not match")
    return content


def checksum_json(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def checksum_file(path: Path) -> int | None:
    """Computes the checksum of a file's bytes; None if it is missing or not a plain file."""
    if not path.is_file():
        return None
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
    return total
