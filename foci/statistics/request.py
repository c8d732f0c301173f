"""Which statistics to compute, and the limits that the kernels share."""

from __future__ import annotations

from dataclasses import dataclass

# As many top keys as the C and GPU kernels support.
MAX_TOP_KEYS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """The statistics of one pass.

    entropy, distance: of each query; received: the sum of weights of each key; largest_logit: of each head;
    picture: (rows, columns, "mean" or "max") of the pooled matrix, or None; top: how many top keys of each query;
    int32_keys: return the top keys as int32, not int64, which halves their memory.
    """

    entropy: bool = False
    received: bool = False
    picture: tuple[int, int, str] | None = None
    top: int = 0
    largest_logit: bool = False
    distance: bool = False
    int32_keys: bool = False
