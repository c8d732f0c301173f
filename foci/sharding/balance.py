"""An order of the tokens that gives every process the same work under a causal mask."""

from __future__ import annotations

import torch
from torch import Tensor


def head_tail_order(length: int, processes: int, device: torch.device | str | None = None) -> Tensor:
    """The order of the tokens in which each process gets one run from the head and one from the tail: (T,).

    Under a causal mask the last tokens see the most keys. In this order the parts of all processes cost the same:

    >>> foci.sharding.head_tail_order(8, 2)            # process 0: 0 1 6 7, process 1: 2 3 4 5
    tensor([0, 1, 6, 7, 2, 3, 4, 5])

    Reorder the tokens with it, and pass it as the positions: `foci.attention(q, k, v, mask=foci.causal,
    positions=(order, order))`. `order.argsort()` restores the original order.

    Args:
        length: the number of tokens, a multiple of 2 · processes.
        processes: the number of processes that shard the sequence.
    """
    if processes < 1 or length % (2 * processes):
        raise ValueError(f"length must be a multiple of 2 · processes = {2 * processes}, got {length}")
    runs = torch.arange(length, device=device).view(2 * processes, -1)
    return torch.cat([torch.cat([runs[i], runs[2 * processes - 1 - i]]) for i in range(processes)])
