"""What the GPU and the installed libraries support: compute capability, cuDNN, Triton.

`torch.compile` evaluates the marked functions once while it traces: traced themselves, they would break its graph.
`torch.compiler.assume_constant_result` sets the same mark, but importing it loads the compiler, which takes seconds.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


@cache
def major_capability(index: int) -> int:
    """Major compute capability of a CUDA device: 8 Ampere, 9 Hopper."""
    return torch.cuda.get_device_capability(index)[0]


def is_hopper_or_later(index: int) -> bool:
    return major_capability(index) >= 9


def has_cudnn() -> bool:
    return bool(torch.backends.cudnn.is_available())


def has_triton() -> bool:
    return find_spec("triton") is not None


def is_triton_interpreted() -> bool:
    """Whether Triton runs its kernels in Python on the CPU, as tests without a GPU do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


is_hopper_or_later._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]
