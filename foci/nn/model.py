"""The base class of models: built from a config or a named size, saved to and loaded from one file.

The file is a safetensors file: every tensor once, and in its header the class name and the config as JSON. Loading
never executes anything from the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from foci.nn.config import Config
from foci.runtime.safetensors_file import checksum_tensors, open_safetensors, write_with_header

MODEL_FORMAT = "foci.model/1"


class Model(nn.Module):
    """A module built from a config, by named size or from a file.

    >>> import tempfile
    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=1000)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(f"{folder}/model.safetensors")
    ...     again = foci.nn.Decoder.load(f"{folder}/model.safetensors")
    >>> again.config == model.config
    True

    A subclass sets `config_type` and `sizes`; `save` and `load` then work for it too.
    """

    config_type: ClassVar[type[Config]]
    sizes: ClassVar[dict[str, Config]]
    config: Config

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> Self:
        """Build a new model of a named size, with some fields of its config changed."""
        if name not in cls.sizes:
            raise ValueError(f"name must be a size of {cls.__name__} ({', '.join(cls.sizes)}), got {name!r}")
        return cls(cls.sizes[name].replace(**changes))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file with the config inside, atomically: through a temporary file."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in iter_unique_tensors(self)}
        header = {"format": MODEL_FORMAT, "kind": type(self).__name__, "config": asdict(self.config)}
        write_with_header(path, tensors, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load a model from a file written by `save`, in eval mode and in the dtype it was saved in.

        `Model.load` loads every class of model, `Encoder.load` only an Encoder. Raises ValueError for a damaged file,
        or one that is not a foci model.
        """
        header, tensors = read_model_file(path)
        try:
            kind = find_model_class(cls, header["kind"])
            model: Self = kind(kind.config_type.from_dict(header["config"]))
            load_tensors(model, tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} cannot be loaded: {error}") from error
        return model.eval()


def read_model_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the tensors of a model file."""
    try:
        with open_safetensors(path, "tasks") as file:
            header = json.loads((file.metadata() or {}).get("foci", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is not a complete safetensors file: {error}") from error
    if not isinstance(header, dict) or header.get("format") != MODEL_FORMAT:
        found = header.get("format") if isinstance(header, dict) else "no foci header"
        raise ValueError(f"{os.fspath(path)} must be a foci model of format {MODEL_FORMAT!r}, got {found!r}")
    if header.get("checksum") != checksum_tensors(tensors):
        raise ValueError(f"{os.fspath(path)} is damaged: its tensors do not match the saved checksum")
    return header, tensors


def load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into a model; names and shapes must match exactly."""
    own = dict(iter_unique_tensors(model))
    missing, unknown = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    if missing or unknown:
        raise ValueError(
            f"tensor names must match the model, got missing {sorted(missing)[:4]} and unknown {sorted(unknown)[:4]}"
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{tuple(tensor.shape)}, got {tuple(tensors[name].shape)}"
            raise ValueError(f"tensor {name} must have shape {shapes}")
        # A copy, because safetensors returns a view of the file, and the file may change.
        tensor.data = tensors[name].clone()


def iter_unique_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and saved buffer; a shared tensor is yielded once, under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def find_model_class(base: type[Model], name: Any) -> type[Any]:
    """Find `base` or a subclass of it by class name."""
    kinds = [base]
    for kind in kinds:
        if kind.__name__ == name:
            return kind
        kinds += kind.__subclasses__()
    raise ValueError(f"the model in the file must be of class {base.__name__}, got {name!r}")
