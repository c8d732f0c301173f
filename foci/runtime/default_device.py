"""Functions that prepare their data on the CPU, also where the user set another default device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def prepare_on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Let tensors without a named device be created on the CPU inside a function.

    Without it, `torch.set_default_device("cuda")` mixes tensors of two devices.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run
