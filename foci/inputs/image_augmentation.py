"""Changes that leave what is in a picture as it was, for a whole batch at once.

Every choice is drawn from the generator that is given, so a run can be repeated.

B pictures, C channels, height and width in pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def flipped(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Every other picture, by chance, with left and right exchanged: (B, C, height, width)."""
    turned = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(turned, images.flip(-1), images)


def cropped(images: Tensor, most: int, generator: torch.Generator | None = None) -> Tensor:
    """Each picture moved by up to so many pixels in each direction; what comes in from outside is black."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (most, most, most, most))
    down = torch.randint(2 * most + 1, (batch, 1), generator=generator) + torch.arange(height)
    across = torch.randint(2 * most + 1, (batch, 1), generator=generator) + torch.arange(width)
    # (B, height, width, C): what is indexed by tensors comes first.
    found = padded[torch.arange(batch)[:, None, None], :, down[:, :, None], across[:, None, :]]
    return found.permute(0, 3, 1, 2)


def turned(images: Tensor, degrees: float, larger: float, generator: torch.Generator | None = None) -> Tensor:
    """Each picture turned by up to so many degrees and scaled by up to a factor of `1 + larger`: floats only."""
    angle = (torch.rand(len(images), generator=generator) * 2 - 1) * torch.pi / 180 * degrees
    factor = (1.0 + larger) ** (torch.rand(len(images), generator=generator) * 2 - 1)
    cos, sin, none = torch.cos(angle) * factor, torch.sin(angle) * factor, torch.zeros_like(angle)
    matrix = torch.stack([torch.stack([cos, -sin, none], 1), torch.stack([sin, cos, none], 1)], 1)
    grid = F.affine_grid(matrix.to(images.dtype), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def boxes(batch: int, height: int, width: int, areas: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One box in each picture that covers about such a share of it: bool (B, 1, height, width), True inside.

    Args:
        batch, height, width: of the pictures.
        areas: (B,), the share of the picture that each box covers where it lies wholly inside.
        generator: draws shapes and places.
    """
    ratio = torch.exp((torch.rand(batch, generator=generator) * 2 - 1) * 0.7)
    sides = []
    for length, stretched in ((height, (areas * ratio).sqrt()), (width, (areas / ratio).sqrt())):
        middle = torch.rand(batch, generator=generator)[:, None] * length
        half = (stretched.clamp(max=1.0) * length / 2)[:, None]
        pixels = torch.arange(length) + 0.5
        sides.append((pixels > middle - half) & (pixels < middle + half))
    return (sides[0][:, :, None] & sides[1][:, None, :])[:, None]


def erased(images: Tensor, share: float, generator: torch.Generator | None = None) -> Tensor:
    """So often a box of 2% to 33% of a picture is filled with noise: floats only."""
    batch, _, height, width = images.shape
    areas = torch.rand(batch, generator=generator) * 0.31 + 0.02
    chosen = (torch.rand(batch, generator=generator) < share).view(-1, 1, 1, 1)
    noise = torch.randn(images.shape, generator=generator)
    return torch.where(boxes(batch, height, width, areas, generator) & chosen, noise, images)


def mixed(images: Tensor, share: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """So often the whole batch is mixed with itself: each picture with another, all over or in a box.

    Gives the pictures, the other's number (B,), and how much of each picture is its own (B,): what the loss takes too.
    """
    batch, _, height, width = images.shape
    other = torch.randperm(batch, generator=generator)
    if torch.rand((), generator=generator).item() >= share:
        return images, other, torch.ones(batch)
    if torch.rand((), generator=generator).item() < 0.5:
        own = beta(0.8, batch, generator)
        parts = own.view(-1, 1, 1, 1)
        return images * parts + images[other] * (1 - parts), other, own
    inside = boxes(batch, height, width, 1 - beta(1.0, batch, generator), generator)
    own = 1 - inside.flatten(1).float().mean(1)
    return torch.where(inside, images[other], images), other, own


def beta(strength: float, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Numbers between 0 and 1, by Jöhnk's method: near the ends for a small strength, all alike for 1."""
    found = torch.empty(0)
    while len(found) < count:
        x, y = torch.rand(2, 4 * count, generator=generator).double() ** (1 / strength)
        total = x + y
        found = torch.cat([found, (x / total)[(total <= 1) & (total > 0)].float()])
    return found[:count]
