"""Random changes of a batch of images that keep what they show: data augmentation.

All randomness comes from the given generator, so a run can be repeated.

B images, C channels, height and width in pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_flip(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Mirrors each image left to right with probability 0.5: (B, C, height, width)."""
    chosen = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(chosen, images.flip(-1), images)


def random_shift(images: Tensor, limit: int, generator: torch.Generator | None = None) -> Tensor:
    """Shifts each image by up to `limit` pixels in each direction; the uncovered border is filled with zeros."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (limit, limit, limit, limit))
    down = torch.randint(2 * limit + 1, (batch, 1), generator=generator) + torch.arange(height)
    across = torch.randint(2 * limit + 1, (batch, 1), generator=generator) + torch.arange(width)
    # (B, height, width, C): the axes indexed by tensors come first.
    shifted = padded[torch.arange(batch)[:, None, None], :, down[:, :, None], across[:, None, :]]
    return shifted.permute(0, 3, 1, 2)


def random_rotation(images: Tensor, degrees: float, larger: float, generator: torch.Generator | None = None) -> Tensor:
    """Rotates each image by up to `degrees` and scales it by up to a factor of `1 + larger`; floats only."""
    angle = (torch.rand(len(images), generator=generator) * 2 - 1) * torch.pi / 180 * degrees
    factor = (1.0 + larger) ** (torch.rand(len(images), generator=generator) * 2 - 1)
    cos, sin, zero = torch.cos(angle) * factor, torch.sin(angle) * factor, torch.zeros_like(angle)
    matrix = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = F.affine_grid(matrix.to(images.dtype), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def random_boxes(
    batch: int, height: int, width: int, areas: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draws one box per image: bool (B, 1, height, width), True inside.

    Args:
        batch, height, width: of the images.
        areas: (B,), the fraction of the image that each box covers if it lies wholly inside.
        generator: draws shapes and positions.
    """
    ratio = torch.exp((torch.rand(batch, generator=generator) * 2 - 1) * 0.7)
    sides = []
    for length, stretched in ((height, (areas * ratio).sqrt()), (width, (areas / ratio).sqrt())):
        center = torch.rand(batch, generator=generator)[:, None] * length
        half = (stretched.clamp(max=1.0) * length / 2)[:, None]
        pixels = torch.arange(length) + 0.5
        sides.append((pixels > center - half) & (pixels < center + half))
    return (sides[0][:, :, None] & sides[1][:, None, :])[:, None]


def random_erase(images: Tensor, probability: float, generator: torch.Generator | None = None) -> Tensor:
    """Fills a box of 2% to 33% of an image with noise, with the given probability; floats only."""
    batch, _, height, width = images.shape
    areas = torch.rand(batch, generator=generator) * 0.31 + 0.02
    chosen = (torch.rand(batch, generator=generator) < probability).view(-1, 1, 1, 1)
    noise = torch.randn(images.shape, generator=generator)
    return torch.where(random_boxes(batch, height, width, areas, generator) & chosen, noise, images)


def mixup_or_cutmix(
    images: Tensor, probability: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes each image with another of the batch, by mixup or in a box (CutMix), with the given probability.

    Returns the images, the index of the other image (B,), and the fraction of each image that is its own (B,), which
    weights the loss.
    """
    batch, _, height, width = images.shape
    other = torch.randperm(batch, generator=generator)
    if torch.rand((), generator=generator).item() >= probability:
        return images, other, torch.ones(batch)
    if torch.rand((), generator=generator).item() < 0.5:
        own = sample_beta(0.8, batch, generator)
        parts = own.view(-1, 1, 1, 1)
        return images * parts + images[other] * (1 - parts), other, own
    inside = random_boxes(batch, height, width, 1 - sample_beta(1.0, batch, generator), generator)
    own = 1 - inside.flatten(1).float().mean(1)
    return torch.where(inside, images[other], images), other, own


def sample_beta(strength: float, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Samples Beta(strength, strength) by Jöhnk's method: near 0 and 1 for a small strength, uniform for 1."""
    samples = torch.empty(0)
    while len(samples) < count:
        x, y = torch.rand(2, 4 * count, generator=generator).double() ** (1 / strength)
        total = x + y
        samples = torch.cat([samples, (x / total)[(total <= 1) & (total > 0)].float()])
    return samples[:count]
