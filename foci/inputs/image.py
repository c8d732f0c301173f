"""Reads image files into tensors.

C channels (1: grey, 3: red, green and blue), pixels as integers from 0 to 255.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.inputs.files import describe_path

if TYPE_CHECKING:
    from PIL import Image

# The header of binary Netpbm files: format, width, height and largest value, separated by white space or comments.
NETPBM_HEADER = re.compile(rb"(P[56])(?:\s|#[^\n]*\n)+(\d+)(?:\s|#[^\n]*\n)+(\d+)(?:\s|#[^\n]*\n)+(\d+)\s")


def read_image(path: str | os.PathLike[str], channels: int = 3, size: int | None = None) -> Tensor:
    """Reads the pixels of an image file: uint8 (C, height, width).

    Netpbm bitmaps (.pgm, .ppm) need no other library; Pillow reads all other formats.

    Args:
        path: the file.
        channels: 1 for grey, 3 for colour; the image is converted if necessary.
        size: height and width of the result: the centre square is cropped and resized; None: that of the file.
    """
    if channels not in {1, 3}:
        raise ValueError(f"channels must be 1 or 3, got {channels!r}")
    name = os.fspath(path)
    if not Path(name).is_file():
        raise FileNotFoundError(f"{name} must be an image file, got {describe_path(Path(name))}")
    bitmap = name.lower().endswith((".pgm", ".ppm"))
    pixels = read_netpbm(name) if bitmap else read_with_pillow(name)
    return crop_and_resize(convert_channels(pixels, channels), size)


def read_netpbm(name: str) -> Tensor:
    """Reads a binary PGM (grey) or PPM (colour) file with one byte per value."""
    content = Path(name).read_bytes()
    header = NETPBM_HEADER.match(content)
    if header is None or int(header[4]) > 255:
        raise ValueError(f"{name} must be a binary PGM or PPM image with one byte per value")
    width, height, channels = int(header[2]), int(header[3]), 1 if header[1] == b"P5" else 3
    expected, actual = width * height * channels, len(content) - header.end()
    if expected == 0 or actual < expected:
        raise ValueError(f"{name} must hold {expected} bytes of {width} x {height} pixels, got {actual}")
    flat = torch.frombuffer(bytearray(content[header.end() : header.end() + expected]), dtype=torch.uint8)
    if int(header[4]) < 255:
        flat = (flat.float() * (255.0 / int(header[4]))).round().clamp(0, 255).to(torch.uint8)
    return flat.view(height, width, channels).permute(2, 0, 1).contiguous()


def read_with_pillow(name: str) -> Tensor:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(f"reading {name} needs Pillow: pip install 'foci[tasks]'") from error
    try:
        with Image.open(name) as opened:
            image = ImageOps.exif_transpose(opened)
            grey = image.mode in {"1", "L", "LA", "La", "I;16", "I", "F"}
            image = (composite_on_white(image) if image.has_transparency_data else image).convert(
                "L" if grey else "RGB"
            )
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} must be an image file, but Pillow cannot read it: {error}") from error
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, -1).permute(2, 0, 1).contiguous()


def composite_on_white(image: Image.Image) -> Image.Image:
    """Composites a transparent image on white, because the colours of transparent pixels are arbitrary."""
    from PIL import Image

    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def match_background(pixels: Tensor, ground: Literal["dark", "light"]) -> Tensor:
    """Inverts the pixels if the border of the image is not as dark or light as `ground` requires."""
    edge = torch.cat([pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]], dim=1).float().mean()
    return 255 - pixels if (edge > 127.5) == (ground == "dark") else pixels


def convert_channels(pixels: Tensor, channels: int) -> Tensor:
    """Converts colour to grey by luma, or grey to colour by repeating the channel."""
    if len(pixels) == channels:
        return pixels
    if channels == 3:
        return pixels.expand(3, -1, -1).contiguous()
    luma = torch.tensor([0.299, 0.587, 0.114])
    return torch.einsum("chw,c->hw", pixels.float(), luma).round().to(torch.uint8)[None]


def crop_and_resize(pixels: Tensor, size: int | None) -> Tensor:
    """Crops the centre square and resizes it: (C, size, size)."""
    height, width = pixels.shape[1:]
    if size is None or (height, width) == (size, size):
        return pixels
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = pixels[:, top : top + side, left : left + side].float()
    resized = F.interpolate(square[None], (size, size), mode="bilinear", align_corners=False, antialias=True)[0]
    return resized.round().clamp(0, 255).to(torch.uint8)
