"""Training: a config, a loop that reads from top to bottom, checkpoints that survive, one process or many."""

from foci.training.config import RunConfig, TrainConfig, read_config
from foci.training.loop import train

__all__ = ["RunConfig", "TrainConfig", "read_config", "train"]
