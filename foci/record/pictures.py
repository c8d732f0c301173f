"""Pictures of labels: from images, arrays and tensors to uint8 (height, width, 3) of a bounded size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The number of channels of a picture: grey, color, color with opacity.
CHANNELS = (1, 3, 4)
# The longest side of a kept picture, in pixels.
MAX_PICTURE_SIDE = 768


def to_pictures(image: Any) -> list[Tensor]:
    """One or several pictures as uint8 (height, width, 3): of a PIL image, an array, a tensor, or a list of them."""
    expected = "image must be a PIL image, or an array (height, width, 3), (3, height, width) or (height, width), got"
    if isinstance(image, list | tuple):
        return [picture for each in image for picture in to_pictures(each)]
    if isinstance(image, Tensor):
        tensor = image.detach().cpu()
    else:
        import numpy

        # A copy: the array of a PIL image is read-only.
        array = numpy.array(image)
        if array.dtype.kind not in "buif":
            raise TypeError(f"{expected} a {type(image).__name__}")
        tensor = torch.from_numpy(array)
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(-1)
    if tensor.dim() == 4:
        return [picture for each in tensor for picture in to_pictures(each)]
    if tensor.dim() == 3 and tensor.shape[-1] not in CHANNELS and tensor.shape[0] in CHANNELS:
        tensor = tensor.permute(1, 2, 0)
    if tensor.dim() != 3 or tensor.shape[-1] not in CHANNELS:
        raise ValueError(f"{expected} {tuple(tensor.shape)}")
    color = tensor[..., :3].expand(*tensor.shape[:2], 3)
    return [color if color.dtype == torch.uint8 else scale_to_bytes(color)]


def scale_to_bytes(picture: Tensor) -> Tensor:
    """Floats of any scale -> uint8: from 0 to 1 as they are, otherwise from the smallest to the largest."""
    picture = picture.detach().float()
    low, high = float(picture.min()), float(picture.max())
    if low < 0 or high > 1:
        picture = (picture - low) / max(high - low, 1e-6)
    return (picture * 255).round().to(torch.uint8)


def shrink_picture(picture: Tensor, side: int = MAX_PICTURE_SIDE) -> Tensor:
    """A picture uint8 (height, width, 3) whose longer side has at most `side` pixels."""
    height, width = picture.shape[:2]
    if max(height, width) <= side:
        return picture.contiguous()
    size = [max(1, round(each * side / max(height, width))) for each in (height, width)]
    channels_first = picture.permute(2, 0, 1).unsqueeze(0).float()
    small = F.interpolate(channels_first, size, mode="bilinear", antialias=True)[0]
    return small.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()
