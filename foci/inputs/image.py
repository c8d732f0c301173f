"""Image files into tensors.

C channels (1: grey, 3: red, green and blue), pixels as whole numbers from 0 to 255.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.inputs.files import found_at

if TYPE_CHECKING:
    from PIL import Image

# A header of the plain bitmap formats: its kind, width, height and largest value, each after white space or comments.
BITMAP = re.compile(rb"(P[56])(?:\s|#[^\n]*\n)+(\d+)(?:\s|#[^\n]*\n)+(\d+)(?:\s|#[^\n]*\n)+(\d+)\s")


def read_image(path: str | os.PathLike[str], channels: int = 3, size: int | None = None) -> Tensor:
    """The pixels of an image file: uint8 (C, height, width).

    The bitmaps of Netpbm (.pgm, .ppm) need no other library; Pillow reads all other kinds.

    Args:
        path: the file.
        channels: 1 for grey, 3 for colours; an image of the other kind is turned into this one.
        size: the height and width that are wanted: the middle square is taken and scaled; None: as it is in the file.
    """
    if channels not in {1, 3}:
        raise ValueError(f"an image has 1 or 3 channels, but got {channels!r}")
    name = os.fspath(path)
    if not Path(name).is_file():
        raise FileNotFoundError(f"{name} should be an image, but there is {found_at(Path(name))}")
    bitmap = name.lower().endswith((".pgm", ".ppm"))
    pixels = read_bitmap(name) if bitmap else read_with_pillow(name)
    return scaled(in_channels(pixels, channels), size)


def read_bitmap(name: str) -> Tensor:
    """A binary PGM (grey) or PPM (colours) file with one byte per number."""
    content = Path(name).read_bytes()
    header = BITMAP.match(content)
    if header is None or int(header[4]) > 255:
        raise ValueError(f"{name} should be a binary PGM or PPM image with one byte per number, but it is not")
    width, height, channels = int(header[2]), int(header[3]), 1 if header[1] == b"P5" else 3
    wanted, given = width * height * channels, len(content) - header.end()
    if wanted == 0 or given < wanted:
        raise ValueError(f"{name} should hold {wanted} bytes of {width} x {height} pixels, but it holds {given}")
    flat = torch.frombuffer(bytearray(content[header.end() : header.end() + wanted]), dtype=torch.uint8)
    if int(header[4]) < 255:
        flat = (flat.float() * (255.0 / int(header[4]))).round().clamp(0, 255).to(torch.uint8)
    return flat.view(height, width, channels).permute(2, 0, 1).contiguous()


def read_with_pillow(name: str) -> Tensor:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(f"{name} needs Pillow to be read: pip install 'foci[tasks]'") from error
    try:
        with Image.open(name) as opened:
            image = ImageOps.exif_transpose(opened)
            grey = image.mode in {"1", "L", "LA", "La", "I;16", "I", "F"}
            image = (on_white(image) if image.has_transparency_data else image).convert("L" if grey else "RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} should be an image, but Pillow cannot read it: {error}") from error
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, -1).permute(2, 0, 1).contiguous()


def on_white(image: Image.Image) -> Image.Image:
    """What shows through is white, as on a page: the colours under it are nobody's choice."""
    from PIL import Image

    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def negative(pixels: Tensor, ground: Literal["dark", "light"]) -> Tensor:
    """The pixels, turned into their negative where their edge is not as dark or light as the ground is to be."""
    edge = torch.cat([pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]], dim=1).float().mean()
    return 255 - pixels if (edge > 127.5) == (ground == "dark") else pixels


def in_channels(pixels: Tensor, channels: int) -> Tensor:
    """Grey by how bright the eye sees the colours; colours from grey by saying it three times."""
    if len(pixels) == channels:
        return pixels
    if channels == 3:
        return pixels.expand(3, -1, -1).contiguous()
    shares = torch.tensor([0.299, 0.587, 0.114])
    return torch.einsum("chw,c->hw", pixels.float(), shares).round().to(torch.uint8)[None]


def scaled(pixels: Tensor, size: int | None) -> Tensor:
    """The middle square, at a new size: (C, size, size)."""
    height, width = pixels.shape[1:]
    if size is None or (height, width) == (size, size):
        return pixels
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = pixels[:, top : top + side, left : left + side].float()
    wanted = F.interpolate(square[None], (size, size), mode="bilinear", align_corners=False, antialias=True)[0]
    return wanted.round().clamp(0, 255).to(torch.uint8)
