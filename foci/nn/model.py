"""The base class of models: built from a config or a named size, saved to and loaded from one file.

The file is a safetensors file: every tensor once, and in its header the class name and the config as JSON. Loading
never executes anything from the file.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foci.nn.config import Config
from foci.runtime.json_text import parse_json
from foci.runtime.safetensors_file import checksum_tensors, open_safetensors, write_with_header

MODEL_FORMAT = "foci.model/1"
PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Position tables that are computed when a model is built may always have this size.
MIN_TABLE_BYTES = 2**28


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
        with explain_loading_faults(path):
            model: Self = build_saved_model(cls, header, tensors)
        return model.eval()


@contextmanager
def explain_loading_faults(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns any error that a damaged or hostile file causes into one sentence."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise ValueError(f"{os.fspath(path)} cannot be loaded: {reason or type(error).__name__}") from error


def read_model_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the tensors of a model file."""
    try:
        with open_safetensors(path, "tasks") as file:
            header = parse_json((file.metadata() or {}).get("foci", "null"), "the header")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is not a complete safetensors file: {error}") from error
    if not isinstance(header, dict) or header.get("format") != MODEL_FORMAT:
        found = header.get("format") if isinstance(header, dict) else "no foci header"
        raise ValueError(
            f"{os.fspath(path)} must be a foci model of format {MODEL_FORMAT!r}, got {reprlib.repr(found)}"
        )
    if header.get("checksum") != checksum_tensors(tensors):
        raise ValueError(f"{os.fspath(path)} is damaged: its tensors do not match the saved checksum")
    # Copies, because safetensors returns views of the file, and the file may change.
    return header, {name: tensor.clone() for name, tensor in tensors.items()}


def build_saved_model(base: type[Model], header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Build the model of a file; nothing is allocated before the config is compared with the tensors."""
    kind = find_model_class(base, header["kind"])
    config = kind.config_type.from_dict(header["config"])
    with torch.device("meta"), SkipInitialValues():
        outline = kind(config)
    match_tensors(outline, tensors)
    check_computed_tables(outline, tensors)
    check_finite_weights(tensors)
    with torch.device("cpu"), SkipInitialValues():
        model = kind(config)
    load_tensors(model, tensors)
    return model


def check_finite_weights(tensors: dict[str, Tensor]) -> None:
    """Refuse tensors that are not floats, and NaN and infinity in them."""
    for name, tensor in tensors.items():
        if tensor.dtype not in PARAMETER_DTYPES:
            raise ValueError(f"tensor {name} must hold floats, got {tensor.dtype}")
        # The smallest and largest value are NaN if one value is: one pass without a copy.
        if tensor.numel() and not all(map(math.isfinite, (each.item() for each in tensor.aminmax()))):
            raise ValueError(f"tensor {name} must hold finite numbers, got NaN or infinity")


class SkipInitialValues(TorchFunctionMode):
    """Leaves parameters uninitialized: those of a file replace them, and on the meta device they have no values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def check_computed_tables(outline: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Refuse a model whose position tables, which a file does not hold, are large and larger than its tensors."""
    computed = sum(buffer.nbytes for buffer in outline.buffers())
    limit = max(MIN_TABLE_BYTES, sum(tensor.nbytes for tensor in tensors.values()))
    if computed > limit:
        raise ValueError(f"the position tables of the config must have at most {limit:,} bytes, got {computed:,}")


def load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Make tensors those of a model; names and shapes must match exactly."""
    for name, tensor in match_tensors(model, tensors).items():
        tensor.data = tensors[name]


def match_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model by name; refuses tensors with other names or shapes."""
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
    return own


def iter_unique_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and saved buffer; a shared tensor is yielded once, under its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def find_model_class(base: type[Model], name: Any) -> type[Any]:
    """Find `base` or a subclass of it by class name; only classes with a config can be in a file."""
    kinds = [base]
    for kind in kinds:
        if kind.__name__ == name and hasattr(kind, "config_type"):
            return kind
        kinds += kind.__subclasses__()
    raise ValueError(f"the model in the file must be of class {base.__name__}, got {reprlib.repr(name)}")
