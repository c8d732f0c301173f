"""A Vision Transformer: splits images into patches and encodes them as a sequence.

B batch, C channels, N patches in `rows` x `columns`, T tokens: registers and class token first, then the patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.nn.attention import Attention
from foci.nn.config import (
    HALVINGS_LIMIT,
    LAYERS_LIMIT,
    VOCABULARY_LIMIT,
    WIDTH_LIMIT,
    BlockConfig,
    Config,
    TransformerConfig,
)
from foci.nn.model import Model
from foci.nn.stack import Output
from foci.nn.transformer import Encoder
from foci.positions import sinusoidal

# The number of channels per group of a stem's GroupNorm.
STEM_GROUP_CHANNELS = 16


@dataclass(frozen=True)
class VisionConfig(BlockConfig):
    """The config of `VisionTransformer`.

    >>> foci.nn.VisionTransformer.from_name("tiny", classes=10).config.classes
    10
    """

    layers: int = 12  # the number of blocks
    image: int = 224  # the height and width of the images, in pixels
    patch: int = 16  # the height and width of a patch, in pixels
    channels: int = 3  # the number of channels per pixel
    classes: int | None = None  # the number of classes; None: no logits
    pool: Literal["class", "mean"] = "class"  # the state used for classification: a class token, or the patches' mean
    positions: Literal["learned", "sinusoidal"] = "learned"  # the position table, by row and column
    registers: int = 0  # the number of register tokens: learned tokens without a patch, which act as attention sinks
    stem: int = 0  # the number of 3 x 3 convolutions before the patches are cut; they help on small datasets
    stem_width: int = 64  # the channels of these convolutions, doubled after every halving
    stem_pool: int = 0  # how often the stem halves height and width, spread evenly, the last time at its end
    checkpoint: bool = False  # gradient checkpointing: recompute each block in the backward to save memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, LAYERS_LIMIT, "layers")
        self.check_range(1, WIDTH_LIMIT, "image", "patch", "channels", "stem_width")
        self.check_range(1, VOCABULARY_LIMIT, "classes")
        self.check_range(0, LAYERS_LIMIT, "registers", "stem")
        self.check_range(0, HALVINGS_LIMIT, "stem_pool")
        if self.image % self.patch:
            raise ValueError(f"image must be a multiple of patch={self.patch}, got {self.image}")
        if self.stem_pool > self.stem:
            raise ValueError(f"stem_pool must be at most stem={self.stem}, got {self.stem_pool}")
        if self.patch % 2**self.stem_pool:
            raise ValueError(
                f"patch must be a multiple of {2**self.stem_pool} pixels with stem_pool={self.stem_pool},"
                f" got {self.patch}"
            )
        if self.positions == "sinusoidal" and self.width % 4:
            raise ValueError(f"width must be a multiple of 4 for sinusoidal positions in 2-D, got {self.width}")

    def encoder(self) -> TransformerConfig:
        """The config of the encoder; it has no positions, because the patches already include them."""
        block = {field.name: getattr(self, field.name) for field in fields(BlockConfig)}
        return TransformerConfig(**block, layers=self.layers, positions=None, checkpoint=self.checkpoint)


class VisionTransformer(Model):
    """A Vision Transformer with a class token or mean pooling, and optional registers.

    >>> model = foci.nn.VisionTransformer.from_name("tiny", classes=10)       # 32 x 32 pixels, 64 patches
    >>> out = model(torch.randn(2, 3, 32, 32), return_weights=True)
    >>> out.logits.shape, out.states.shape
    (torch.Size([2, 10]), torch.Size([2, 65, 128]))
    >>> weights = out.weights["L3"][0, 0, 0, model.leading:]                  # class token to patches
    >>> weights.view(model.grid(32, 32)).shape
    torch.Size([8, 8])

    Images of other sizes work too: sinusoidal positions are extended, learned ones are interpolated to the new grid.
    """

    config_type = VisionConfig
    config: VisionConfig
    sizes: ClassVar[dict[str, Config]] = {
        "tiny": VisionConfig(width=128, layers=4, heads=4, image=32, patch=4),
        "small": VisionConfig(width=384, layers=12, heads=6),
        "base": VisionConfig(width=768, layers=12, heads=12),
    }

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width, side = config.width, config.image // config.patch
        self.stem = build_stem(config)
        self.stem_patch = config.patch // 2**config.stem_pool  # the size of a patch in the output of the stem
        self.embed = nn.Linear(count_stem_channels(config, config.stem) * self.stem_patch**2, width)
        self.leading = config.registers + (config.pool == "class")  # the number of tokens before the patches
        self.extra = nn.Parameter(torch.empty(self.leading, width)) if self.leading else None
        self.places: Tensor  # (rows, columns, width)
        if config.positions == "learned":
            self.places = nn.Parameter(torch.empty(side, side, width))
        else:
            self.register_buffer("places", sinusoidal_2d(side, side, width), persistent=False)
        self.encoder = Encoder(config.encoder())
        self.head = None if config.classes is None else nn.Linear(width, config.classes)
        for table in (self.extra, self.places):
            if isinstance(table, nn.Parameter):
                nn.init.normal_(table, std=0.02)

    def forward(self, images: Tensor, *, padding: Tensor | None = None, return_weights: bool = False) -> Output:
        """(B, C, height, width) -> states (B, T, width) of all tokens, and logits (B, classes).

        Args:
            images: (B, C, height, width).
            padding: bool (B, rows, columns), True for real patches, for images of unequal size in one batch. Real
                patches are in the upper left corner.
            return_weights: also return every layer's weights, by name.
        """
        self._check_images(images)
        rows, columns = self.grid(*images.shape[2:])
        x = self.embed(split_patches(images if self.stem is None else self.stem(images), self.stem_patch))
        x = x + self._get_positions(rows, columns).flatten(0, 1).to(x.dtype)
        real = None
        if self.extra is not None:
            x = torch.cat([self.extra.to(x.dtype).expand(len(x), -1, -1), x], dim=1)
        if padding is not None:
            self._check_padding(padding, rows, columns)
            real = F.pad(padding.flatten(1), (self.leading, 0), value=True)
        out: Output = self.encoder(x, padding=real, return_weights=return_weights)
        if self.head is None:
            return out
        return Output(out.states, self.head(self.pool_states(out.states, real)), out.weights)

    def pool_states(self, states: Tensor, real: Tensor | None = None) -> Tensor:
        """The state of the whole image: (B, width)."""
        if self.config.pool == "class":
            return states[:, 0]
        patches = states[:, self.leading :]
        if real is None:
            return patches.mean(1)
        real_patches = real[:, self.leading :, None].to(patches.dtype)
        return (patches * real_patches).sum(1) / real_patches.sum(1)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """The number of rows and columns of patches in an image of this size."""
        return height // self.config.patch, width // self.config.patch

    def attentions(self) -> dict[str, Attention]:
        """Every attention module, under the name of its weights."""
        return self.encoder.attentions()

    def _get_positions(self, rows: int, columns: int) -> Tensor:
        """The position table for a grid of patches: (rows, columns, width)."""
        if self.places.shape[:2] == (rows, columns):
            return self.places
        if self.config.positions == "sinusoidal":
            return sinusoidal_2d(rows, columns, self.config.width).to(self.places)
        table = self.places.permute(2, 0, 1).unsqueeze(0).float()
        resized = F.interpolate(table, (rows, columns), mode="bicubic", align_corners=False, antialias=True)
        return resized[0].permute(1, 2, 0)

    def _check_images(self, images: Tensor) -> None:
        channels, patch = self.config.channels, self.config.patch
        if images.dim() != 4 or images.shape[1] != channels or images.shape[2] % patch or images.shape[3] % patch:
            raise ValueError(
                f"images must have shape (B, {channels}, height, width), both sizes multiples of {patch},"
                f" got {tuple(images.shape)}"
            )

    def _check_padding(self, padding: Tensor, rows: int, columns: int) -> None:
        got = f"{padding.dtype} {tuple(padding.shape)}"
        if self.stem is not None:
            raise ValueError(f"padding must be None with a stem, whose convolutions cross patch borders, got {got}")
        if padding.dtype != torch.bool or padding.shape[1:] != (rows, columns):
            raise ValueError(f"padding must be bool (B, {rows}, {columns}), True for real patches, got {got}")


class StandardConv2d(nn.Conv2d):
    """A convolution with weight standardization: every filter has mean 0 and variance 1.

    Followed by GroupNorm, it trains as fast as with BatchNorm, and behaves the same in training and in evaluation.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, F.layer_norm(self.weight, self.weight.shape[1:]), self.bias, self.stride, self.padding)


def build_stem(config: VisionConfig) -> nn.Sequential | None:
    """Convolutions with GroupNorm and GELU; max pooling over 3 x 3 pixels lets neighboring patches share pixels."""
    if not config.stem:
        return None
    parts: list[nn.Module] = []
    for i in range(config.stem):
        inner, outer = count_stem_channels(config, i), count_stem_channels(config, i + 1)
        norm = nn.GroupNorm(math.gcd(outer, max(outer // STEM_GROUP_CHANNELS, 1)), outer)
        parts += [StandardConv2d(inner, outer, 3, padding=1, bias=False), norm, nn.GELU()]
        if count_halvings(config, i + 1) > count_halvings(config, i):
            parts.append(nn.MaxPool2d(3, stride=2, padding=1))
    return nn.Sequential(*parts)


def count_halvings(config: VisionConfig, count: int) -> int:
    """How often the first `count` convolutions of a stem halve height and width."""
    return count * config.stem_pool // config.stem


def count_stem_channels(config: VisionConfig, count: int) -> int:
    """The number of channels after the first `count` convolutions of a stem."""
    return config.stem_width * 2 ** count_halvings(config, count - 1) if count else config.channels


def split_patches(images: Tensor, size: int) -> Tensor:
    """(B, C, height, width) -> (B, N, C · size²), row by row."""
    batch, channels, height, width = images.shape
    split = images.reshape(batch, channels, height // size, size, width // size, size)
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def sinusoidal_2d(rows: int, columns: int, width: int) -> Tensor:
    """A table whose first half encodes the row of a patch and whose second half its column: (rows, columns, width)."""
    down, across = sinusoidal(rows, width // 2), sinusoidal(columns, width // 2)
    return torch.cat([down[:, None].expand(-1, columns, -1), across.expand(rows, -1, -1)], dim=-1)
