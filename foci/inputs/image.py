"""Reads image files into tensors.

C channels (1: grey, 3: red, green and blue), pixels as integers from 0 to 255.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.inputs.files import describe_path, detect_format
from foci.runtime.limits import MAX_PIXELS

if TYPE_CHECKING:
    from PIL import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF", "PGM", "PPM")
# Comments may make the header of a Netpbm file longer than its few numbers.
MAX_NETPBM_HEADER = 4096
# The header of binary Netpbm files: format, width, height and largest value, separated by white space or comments.
NETPBM_HEADER = re.compile(rb"(P[56])(?:\s|#[^\n]*\n)+(\d+)(?:\s|#[^\n]*\n)+(\d+)(?:\s|#[^\n]*\n)+(\d+)\s")


def read_image(path: str | os.PathLike[str], channels: int = 3, size: int | None = None) -> Tensor:
    """Reads the pixels of an image file: uint8 (C, height, width).

    Reads PNG, JPEG, WebP, GIF, BMP and TIFF with Pillow, and binary PGM and PPM without it. The number of pixels is
    limited by FOCI_MAX_PIXELS.

    Args:
        path: the file.
        channels: 1 for grey, 3 for color; the image is converted if necessary.
        size: height and width of the result: the center square is cropped and resized; None: that of the file.
    """
    if channels not in {1, 3}:
        raise ValueError(f"channels must be 1 or 3, got {channels!r}")
    name = os.fspath(path)
    if not Path(name).is_file():
        raise FileNotFoundError(f"{name} must be an image file, got {describe_path(Path(name))}")
    kind = detect_format(name, IMAGE_FORMATS)
    pixels = read_netpbm(name) if kind in {"PGM", "PPM"} else read_with_pillow(name, kind)
    return crop_and_resize(convert_channels(pixels, channels), size)


def read_netpbm(name: str) -> Tensor:
    """Reads a binary PGM (grey) or PPM (color) file with one byte per value."""
    with Path(name).open("rb") as file:
        header = NETPBM_HEADER.match(file.read(MAX_NETPBM_HEADER))
    if header is None or not 0 < int(header[4]) <= 255:
        got = "no valid header" if header is None else f"values up to {int(header[4])}"
        raise ValueError(f"{name} must be a binary PGM or PPM image with one byte per value, got {got}")
    width, height, channels = int(header[2]), int(header[3]), 1 if header[1] == b"P5" else 3
    MAX_PIXELS.check(name, width * height)
    expected = width * height * channels
    with Path(name).open("rb") as file:
        file.seek(header.end())
        content = bytearray(file.read(expected))
    if expected == 0 or len(content) < expected:
        raise ValueError(f"{name} must hold {expected} bytes of {width} x {height} pixels, got {len(content)}")
    flat = torch.frombuffer(content, dtype=torch.uint8)
    if int(header[4]) < 255:
        flat = (flat.float() * (255.0 / int(header[4]))).round().clamp(0, 255).to(torch.uint8)
    return flat.view(height, width, channels).permute(2, 0, 1).contiguous()


def read_with_pillow(name: str, kind: str) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"reading {name} needs Pillow: pip install 'foci[tasks]'") from error
    Image.init()
    with Path(name).open("rb") as file:
        with explain_pillow_errors(name, kind):
            # Image.open refuses large images by a limit of the whole process; we have our own.
            image = Image.OPEN[kind.upper()][0](file, name)
        MAX_PIXELS.check(name, image.width * image.height)
        with explain_pillow_errors(name, kind):
            return convert_to_pixels(image)


@contextmanager
def explain_pillow_errors(name: str, kind: str) -> Iterator[None]:
    """Turns the many kinds of errors that Pillow raises for damaged files into a ValueError."""
    try:
        yield
    except Exception as error:
        # These are the errors that Pillow raises itself; the others name its internals.
        is_own = isinstance(error, OSError | SyntaxError | ValueError) and " " in str(error)
        reason = str(error) if is_own else "its content is damaged"
        raise ValueError(f"{name} must be an intact {kind} file, but Pillow cannot read it: {reason}") from error


def convert_to_pixels(image: Image.Image) -> Tensor:
    """Decodes the first frame, upright and on white: uint8 (C, height, width)."""
    from PIL import ImageOps

    ImageOps.exif_transpose(image, in_place=True)
    mode = "L" if image.mode in {"1", "L", "LA", "La", "I;16", "I", "F"} else "RGB"
    if image.has_transparency_data:
        image = composite_on_white(image)
    if image.mode != mode:
        image = image.convert(mode)
    size = image.height, image.width
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    del image
    return flat.view(*size, -1).permute(2, 0, 1).contiguous()


def composite_on_white(image: Image.Image) -> Image.Image:
    """Composites a transparent image on white, because the colors of transparent pixels are arbitrary."""
    from PIL import Image

    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def match_background(pixels: Tensor, ground: Literal["dark", "light"]) -> Tensor:
    """Inverts the pixels if the border of the image is not as dark or light as `ground` requires."""
    edge = torch.cat([pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]], dim=1).float().mean()
    return 255 - pixels if (edge > 127.5) == (ground == "dark") else pixels


def convert_channels(pixels: Tensor, channels: int) -> Tensor:
    """Converts color to grey by luma, or grey to color by repeating the channel."""
    if len(pixels) == channels:
        return pixels
    if channels == 3:
        return pixels.expand(3, -1, -1).contiguous()
    # Channel by channel, because floats take four times the memory of the image.
    luma = pixels[0].float().mul_(0.299).add_(pixels[1], alpha=0.587).add_(pixels[2], alpha=0.114)
    return luma.round_().to(torch.uint8)[None]


def crop_and_resize(pixels: Tensor, size: int | None) -> Tensor:
    """Crops the center square and resizes it: (C, size, size)."""
    height, width = pixels.shape[1:]
    if size is None or (height, width) == (size, size):
        return pixels
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = pixels[:, top : top + side, left : left + side]
    resized = [
        F.interpolate(each[None, None].float(), (size, size), mode="bilinear", align_corners=False, antialias=True)[0]
        for each in square
    ]
    return torch.cat(resized).round().clamp(0, 255).to(torch.uint8)
