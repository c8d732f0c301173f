"""The fused kernels that PyTorch has on CUDA: cuDNN on Hopper and later, flash elsewhere, efficient for float32.

B batch, H heads, G key heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.arguments import Call

HALF = (torch.float16, torch.bfloat16)


def reasons(call: Call, masked: bool) -> list[str]:
    return ["not yet"]


def run(call: Call, scale: float, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    raise NotImplementedError
