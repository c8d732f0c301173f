"""Packs named arrays into bytes, in byte planes because gzip compresses those better; assets/payload.js decodes them.

A weight w is stored as

    f4      float32
    log16   0 if w is 0, else 65535 + 2048 ln w: a relative error of 1/4096 over 32 nats
    log8    0 if w is 0, else 255 + 16 ln(w / peak), with the peak of each head in another array: for pictures
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

# Codes per nat, and the code of the largest weight.
LOG16 = (2048.0, 65535)
LOG8 = (16.0, 255)


class PackedArrays:
    """Named arrays: `index` has the kind, shape and offset of each, `data` the bytes."""

    def __init__(self) -> None:
        self.index: dict[str, dict[str, Any]] = {}
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, name: str, tensor: Tensor, kind: str) -> None:
        """Add a tensor as `kind`: f4, f2, u1, u2, u3, u4, log16 or log8 (which adds its peaks as `name.peak`)."""
        tensor = tensor.detach().cpu()
        if kind == "log8":
            peak = (
                tensor.nan_to_num(0.0, 0.0, 0.0).flatten(1).amax(1)
                if tensor.numel()
                else tensor.new_zeros(tensor.shape[0])
            )
            self.add(f"{name}.peak", peak, "f4")
            tensor = divide_by_peak(tensor, peak)
        planes = pack_byte_planes(encode_numbers(tensor, kind), bytes_per_number(kind))
        self.index[name] = {"kind": kind, "shape": list(tensor.shape), "at": self._size}
        self._parts.append(planes)
        self._size += len(planes)

    @property
    def data(self) -> bytes:
        """The bytes of all arrays, one after the other."""
        return b"".join(self._parts)


def divide_by_peak(tensor: Tensor, peak: Tensor) -> Tensor:
    """Divide each head by its peak; a head of zeros stays zeros."""
    return tensor / torch.where(peak > 0, peak, 1.0).view(-1, *[1] * (tensor.dim() - 1))


def bytes_per_number(kind: str) -> int:
    """Return the bytes that a number of this kind takes."""
    return {"f4": 4, "f2": 2, "u1": 1, "u2": 2, "u3": 3, "u4": 4, "log16": 2, "log8": 1}[kind]


def encode_numbers(tensor: Tensor, kind: str) -> Tensor:
    """Convert numbers to a type whose first bytes are the stored ones."""
    if kind == "f4":
        return tensor.float()
    if kind == "f2":
        return tensor.half()
    if kind == "log16":
        return encode_logarithm(tensor, *LOG16)
    if kind == "log8":
        return encode_logarithm(tensor, *LOG8)
    return tensor.to(torch.int32)


def encode_logarithm(weights: Tensor, steps: float, largest: int) -> Tensor:
    """Encode positive weights as 1 to `largest`, and 0 as 0."""
    codes = torch.log(weights.double().clamp(min=1e-30)).mul_(steps).add_(largest).round_().clamp_(1, largest)
    return torch.where(weights > 0, codes, 0.0).to(torch.int32)


def pack_byte_planes(tensor: Tensor, width: int) -> bytes:
    """Pack all first bytes, then all second bytes, and so on; numbers are little-endian."""
    if not tensor.numel():
        return b""
    planes = tensor.contiguous().view(-1).view(torch.uint8).view(tensor.numel(), -1)[:, :width]
    return tensor_bytes(planes.T.contiguous())


def tensor_bytes(tensor: Tensor) -> bytes:
    """Copy the memory of a contiguous CPU tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
