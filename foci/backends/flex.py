"""FlexAttention: fused kernels for masks and scores that it can express, on CUDA."""

from __future__ import annotations

from torch import Tensor

from foci.arguments import Call

NAME = "flex"


def refuses(call: Call) -> list[str]:
    return ["not yet"]


def run(call: Call) -> tuple[Tensor, Tensor]:
    raise NotImplementedError
