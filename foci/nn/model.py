"""A model as one file, and by the name of its size.

A file is a safetensors file: every tensor once, and in its header JSON that says which model it is and its config.
Nothing in a file is ever executed.
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
    """A module made from a config: by size, or from a file.

    >>> import tempfile
    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=1000)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(f"{folder}/model.safetensors")
    ...     again = foci.nn.Decoder.load(f"{folder}/model.safetensors")
    >>> again.config == model.config
    True

    A subclass names its config and its sizes, and is then saved and loaded like every other.
    """

    config_type: ClassVar[type[Config]]
    sizes: ClassVar[dict[str, Config]]
    config: Config

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> Self:
        """A new model of a named size, with some fields of its config changed."""
        if name not in cls.sizes:
            raise ValueError(f"{cls.__name__} has the sizes {', '.join(cls.sizes)}, but got {name!r}")
        return cls(cls.sizes[name].changed(**changes))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file with the config inside: to the side first, so that it is whole or not there."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in iter_unique_tensors(self)}
        kind = {"format": MODEL_FORMAT, "kind": type(self).__name__, "config": asdict(self.config)}
        write_with_header(path, tensors, kind)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The model in a file that `save` wrote, in eval mode and in the dtype it was saved in.

        `Model.load` takes every kind of model, `Encoder.load` only an Encoder. A damaged or foreign file is refused.
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
    """The header and the tensors of a model file."""
    try:
        with open_safetensors(path, "tasks") as file:
            header = json.loads((file.metadata() or {}).get("foci", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is not a whole safetensors file: {error}") from error
    if not isinstance(header, dict) or header.get("format") != MODEL_FORMAT:
        found = header.get("format") if isinstance(header, dict) else "no header of foci"
        raise ValueError(
            f"{os.fspath(path)} is not a foci model: expected format {MODEL_FORMAT!r}, but found {found!r}"
        )
    if header.get("checksum") != checksum_tensors(tensors):
        raise ValueError(f"{os.fspath(path)} is damaged: its tensors do not have the checksum that was saved with them")
    return header, tensors


def load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Gives a model its tensors; names and shapes must be exactly those that it has."""
    own = dict(iter_unique_tensors(model))
    missing, foreign = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    if missing or foreign:
        raise ValueError(f"the tensors {sorted(missing)[:4]} are missing and {sorted(foreign)[:4]} belong to no part")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{tuple(tensor.shape)}, but got {tuple(tensors[name].shape)}"
            raise ValueError(f"the tensor {name} must have shape {shapes}")
        # A copy: what safetensors hands out is a view of the file, and the file may change.
        tensor.data = tensors[name].clone()


def iter_unique_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and saved buffer; what several parts share comes once, under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def find_model_class(base: type[Model], name: Any) -> type[Any]:
    """The class that is `base` or stands under it and has this name."""
    kinds = [base]
    for kind in kinds:
        if kind.__name__ == name:
            return kind
        kinds += kind.__subclasses__()
    raise ValueError(f"expected {base.__name__}, but the file holds {name!r}")
