"""Training: a config, a loop that reads from top to bottom, checkpoints that survive, one process or many."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foci.training.config import RunConfig, TrainConfig, read_config

if TYPE_CHECKING:
    from foci.training.loop import train

__all__ = ["RunConfig", "TrainConfig", "read_config", "train"]


def __getattr__(name: str) -> Any:
    """The loop brings PyTorch's tensors of many processes, which take a second: `foci run` goes without."""
    if name == "train":
        return import_module("foci.training.loop").train
    raise AttributeError(f"module 'foci.training' has no attribute {name!r}")
