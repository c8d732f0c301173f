"""`foci.load`: open any file that foci wrote, by the format that its header names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from foci.nn.model import MODEL_FORMAT, Model
from foci.record.file import RECORD_FORMAT
from foci.record.history import HISTORY_SUFFIX, History
from foci.record.record import Record
from foci.runtime.json_text import parse_json
from foci.runtime.safetensors_file import open_safetensors
from foci.weights.parts_file import WEIGHTS_FORMAT
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from foci.models.pretrained import Pretrained

ACCEPTED = (
    "a file of Weights, a Record (.foci), a model file, the attention.jsonl of a monitored training, or a run directory"
    " or folder with a model"
)


def load(path: str | os.PathLike[str]) -> Weights | Record | Model | Pretrained | History:
    """Open a file or directory that foci wrote.

    >>> import tempfile
    >>> _, weights = foci.attention(*torch.randn(3, 1, 2, 5, 8), return_weights=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     weights.save(f"{folder}/weights.safetensors")
    ...     foci.load(f"{folder}/weights.safetensors").shape
    (1, 2, 5, 5)

    A file of weights gives `Weights`, a .foci file a `Record`, and a run directory or the file of a trained model a
    `Pretrained` model that answers inputs. A model file without a task, as `foci.nn.Model.save` writes it, gives the
    module in eval mode. The attention.jsonl of a monitored training gives its
    `History`. Nothing in the file is executed.

    Args:
        path: a file, or a directory with model.safetensors or its parts.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path must be {ACCEPTED}, got {path}, which does not exist")
    if path.is_dir():
        if not any(path.glob("model*.safetensors")):
            raise unsupported_file_error(path, "a directory without a model")
        return load_answering_model(path)
    if path.suffix.lower() == HISTORY_SUFFIX:
        return History.load(path)
    kind, has_task = read_format(path)
    if kind == WEIGHTS_FORMAT:
        return Weights.load(path)
    if kind == RECORD_FORMAT:
        return Record.load(path)
    if kind == MODEL_FORMAT:
        return load_answering_model(path) if has_task else Model.load(path)
    raise unsupported_file_error(path, f"of format {kind!r}" if kind else "which is none of these")


def unsupported_file_error(path: Path, reason: str) -> ValueError:
    """The error for a path that cannot be opened."""
    return ValueError(f"path must be {ACCEPTED}, got {path}, {reason}")


def read_format(path: Path) -> tuple[str | None, bool]:
    """The format in the header of a safetensors file, None if there is none; and whether the header names a task."""
    try:
        with open_safetensors(path) as file:
            metadata = file.metadata() or {}
        header = parse_json(metadata.get("foci", "{}"), "the header")
    except (OSError, ImportError):
        raise
    except Exception as error:
        # safetensors has an error class of its own for a file of another kind.
        raise unsupported_file_error(path, f"which is none of these ({error})") from error
    kind = header.get("format") if isinstance(header, dict) else None
    return kind if isinstance(kind, str) else None, "task" in metadata


def load_answering_model(path: Path) -> Pretrained:
    """A trained model with its task."""
    from foci.models.pretrained import Pretrained
    from foci.tasks.model_file import load_trained_model

    return Pretrained(*load_trained_model(path))
