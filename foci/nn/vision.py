"""Images: cut into patches, which an Encoder reads as a sequence.

B batch, C channels, N patches in `rows` x `columns`, T tokens: those that stand for no patch first, then the patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.nn.attention import Attention
from foci.nn.config import BlockConfig, Config, TransformerConfig
from foci.nn.model import Model
from foci.nn.stack import Output
from foci.nn.transformer import Encoder
from foci.positions import sinusoidal

# So many channels of a stem have one norm.
STEM_GROUP_CHANNELS = 16


@dataclass(frozen=True)
class VisionConfig(BlockConfig):
    """What `VisionTransformer` is made of."""

    layers: int = 12  # how many blocks
    image: int = 224  # the height and width of the images, in pixels
    patch: int = 16  # the height and width of a patch
    channels: int = 3  # numbers per pixel
    classes: int | None = None  # how many classes the logits tell apart; None: no logits
    pool: Literal["class", "mean"] = "class"  # the state that stands for the image: a token's own, or the patches' mean
    positions: Literal["learned", "sinusoidal"] = "learned"  # where a patch stands, by row and column
    registers: int = 0  # learned tokens without a patch, which give attention a place to rest
    stem: int = 0  # 3 x 3 convolutions over the pixels before they are cut: little data goes further with some
    stem_width: int = 64  # numbers per pixel after each of them, twice as many after a halving
    stem_pool: int = 0  # how often it halves the height and width, evenly among them, last after the last
    checkpoint: bool = False  # gradient checkpointing: recompute each block in the backward, for less memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "layers", "image", "patch", "channels", "classes", "stem_width")
        self.at_least(0, "registers", "stem", "stem_pool")
        if self.image % self.patch:
            raise ValueError(f"an image must be a multiple of the patch, but got {self.image} and {self.patch}")
        if self.stem_pool > self.stem:
            raise ValueError(f"a convolution halves once at most, but got {self.stem_pool} halvings by {self.stem}")
        if self.patch % 2**self.stem_pool:
            raise ValueError(
                f"a patch must be a multiple of {2**self.stem_pool} pixels, which {self.stem_pool} halvings make one,"
                f" but got {self.patch}"
            )
        if self.positions == "sinusoidal" and self.width % 4:
            raise ValueError(f"sinusoidal positions in 2-D take a width that is a multiple of 4, but got {self.width}")

    def encoder(self) -> TransformerConfig:
        """The stack that reads the patches; where they stand is told to it with them."""
        block = {field.name: getattr(self, field.name) for field in fields(BlockConfig)}
        return TransformerConfig(**block, layers=self.layers, positions=None, checkpoint=self.checkpoint)


class VisionTransformer(Model):
    """Patches of an image through an encoder, with a class token or a mean, and registers.

    >>> model = foci.nn.VisionTransformer.from_name("tiny", classes=10)       # 32 x 32 pixels in 64 patches
    >>> out = model(torch.randn(2, 3, 32, 32), return_weights=True)
    >>> out.logits.shape, out.states.shape
    (torch.Size([2, 10]), torch.Size([2, 65, 128]))
    >>> looked = out.weights["L3"][0, 0, 0, model.leading:]                   # the class token at the patches
    >>> looked.view(model.grid(32, 32)).shape
    torch.Size([8, 8])

    Images of another size are taken too: sinusoidal positions go on, learned ones are stretched to the new grid.
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
        self.cut = config.patch // 2**config.stem_pool  # a patch, as the stem leaves it
        self.embed = nn.Linear(count_stem_channels(config, config.stem) * self.cut**2, width)
        self.leading = config.registers + (config.pool == "class")  # the tokens before the patches
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
        """Images (B, C, height, width): states (B, T, width) of all tokens, and logits (B, classes) of the image.

        Args:
            padding: bool (B, rows, columns), True where a patch is real, for images of unequal size in one batch.
                Real patches stand in the upper left corner.
            return_weights: also give every layer's weights, by name.
        """
        rows, columns = self.grid(*self._checked(images).shape[2:])
        x = self.embed(split_patches(images if self.stem is None else self.stem(images), self.cut))
        x = x + self._places(rows, columns).flatten(0, 1).to(x.dtype)
        real = None
        if self.extra is not None:
            x = torch.cat([self.extra.to(x.dtype).expand(len(x), -1, -1), x], dim=1)
        if padding is not None:
            real = F.pad(self._checked_padding(padding, rows, columns).flatten(1), (self.leading, 0), value=True)
        out: Output = self.encoder(x, padding=real, return_weights=return_weights)
        if self.head is None:
            return out
        return Output(out.states, self.head(self.pooled(out.states, real)), out.weights)

    def pooled(self, states: Tensor, real: Tensor | None = None) -> Tensor:
        """What stands for the whole image: (B, width)."""
        if self.config.pool == "class":
            return states[:, 0]
        seen = states[:, self.leading :]
        if real is None:
            return seen.mean(1)
        share = real[:, self.leading :, None].to(seen.dtype)
        return (seen * share).sum(1) / share.sum(1)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """How many rows and columns of patches an image of this size has."""
        return height // self.config.patch, width // self.config.patch

    def attentions(self) -> dict[str, Attention]:
        """Every attention module by the name that its weights have."""
        return self.encoder.attentions()

    def _places(self, rows: int, columns: int) -> Tensor:
        """Where the patches stand: (rows, columns, width)."""
        if self.places.shape[:2] == (rows, columns):
            return self.places
        if self.config.positions == "sinusoidal":
            return sinusoidal_2d(rows, columns, self.config.width).to(self.places)
        table = self.places.permute(2, 0, 1).unsqueeze(0).float()
        stretched = F.interpolate(table, (rows, columns), mode="bicubic", align_corners=False, antialias=True)
        return stretched[0].permute(1, 2, 0)

    def _checked(self, images: Tensor) -> Tensor:
        channels, patch = self.config.channels, self.config.patch
        if images.dim() != 4 or images.shape[1] != channels or images.shape[2] % patch or images.shape[3] % patch:
            raise ValueError(
                f"images must have shape (B, {channels}, height, width), both sizes multiples of {patch},"
                f" but got {tuple(images.shape)}"
            )
        return images

    def _checked_padding(self, padding: Tensor, rows: int, columns: int) -> Tensor:
        if self.stem is not None:
            raise ValueError("a stem sees across patches, so it takes images of one size, but got padding")
        if padding.dtype != torch.bool or padding.shape[1:] != (rows, columns):
            got = f"{padding.dtype} {tuple(padding.shape)}"
            raise ValueError(f"padding must be bool (B, {rows}, {columns}), True where a patch is real, but got {got}")
        return padding


class StandardConv2d(nn.Conv2d):
    """A convolution whose every filter has mean 0 and spread 1, and so learns what differs within its window.

    With a norm over groups of channels after it, a stem learns as fast as with one over the batch, and is the same in
    training and in use.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, F.layer_norm(self.weight, self.weight.shape[1:]), self.bias, self.stride, self.padding)


def build_stem(config: VisionConfig) -> nn.Sequential | None:
    """Where a convolution halves, its maxima are over 3 x 3 pixels, so that neighbouring patches share some."""
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
    """How often the first `count` convolutions of a stem halve what they are given."""
    return count * config.stem_pool // config.stem


def count_stem_channels(config: VisionConfig, count: int) -> int:
    """After the first `count` convolutions of a stem."""
    return config.stem_width * 2 ** count_halvings(config, count - 1) if count else config.channels


def split_patches(images: Tensor, size: int) -> Tensor:
    """(B, C, height, width) -> (B, N, C · size²), row by row."""
    batch, channels, height, width = images.shape
    cut = images.reshape(batch, channels, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def sinusoidal_2d(rows: int, columns: int, width: int) -> Tensor:
    """Half of the width says in which row a patch stands, the other half in which column: (rows, columns, width)."""
    down, across = sinusoidal(rows, width // 2), sinusoidal(columns, width // 2)
    return torch.cat([down[:, None].expand(-1, columns, -1), across.expand(rows, -1, -1)], dim=-1)
