"""Bytes as printable characters, 13 bytes in 16 of them: an eighth less than base64, and as safe inside a page.

13 bytes are 8 groups of 13 bits, and a group is two digits of base 91. The digits are the printable characters of ASCII
without `<`, `>` and `&`. The other side is `fromText` in payload.js.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.view.page.arrays import tensor_bytes

DIGITS = "".join(chr(code) for code in range(33, 127) if chr(code) not in "<>&")
GROUP = 13
# So many bytes are turned at a time: the integers in between take many times their size.
AT_ONCE = GROUP * 100_000


def text_of(data: bytes) -> str:
    """The text; its first characters, up to a space, are the number of bytes.

    >>> text_of(b"attention")
    '9 F:V-X_6NY)qE!!!!'
    """
    padded = data + bytes(-len(data) % GROUP)
    parts = (padded[start : start + AT_ONCE] for start in range(0, len(padded), AT_ONCE))
    return f"{len(data)} " + "".join(digits(part) for part in parts)


def digits(data: bytes) -> str:
    """Whole groups as digits."""
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, GROUP).long()
    # 104 bits do not fit into an integer: two halves of 52 do.
    upper = joined(values[:, :6]) << 4 | values[:, 6] >> 4
    lower = (values[:, 6] & 15) << 48 | joined(values[:, 7:])
    shifts = torch.tensor([39, 26, 13, 0])
    groups = torch.cat([(half[:, None] >> shifts) & 8191 for half in (upper, lower)], dim=1)
    table = torch.tensor([ord(digit) for digit in DIGITS], dtype=torch.uint8)
    pairs = torch.stack([groups // len(DIGITS), groups % len(DIGITS)], dim=-1)
    return tensor_bytes(table[pairs.view(-1)].contiguous()).decode("ascii")


def joined(values: Tensor) -> Tensor:
    """Six bytes as one integer, the first the largest."""
    found = torch.zeros_like(values[:, 0])
    for column in values.unbind(1):
        found = found << 8 | column
    return found
