"""Image files: read with and without Pillow, brought to a size and to channels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.inputs.image import match_background, read_image


def write_bitmap(path: Path, pixels: Tensor) -> Path:
    """uint8 (C, height, width) as PGM or PPM."""
    kind = "P5" if len(pixels) == 1 else "P6"
    header = f"{kind}\n# made by a test\n{pixels.shape[2]} {pixels.shape[1]}\n255\n"
    path.write_bytes(header.encode() + bytes(pixels.permute(1, 2, 0).flatten().tolist()))
    return path


def pixels(channels: int, height: int = 5, width: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (channels, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("channels", [1, 3])
def test_bitmaps_are_read_as_pillow_reads_them(channels: int, tmp_path: Path) -> None:
    given = pixels(channels)
    path = write_bitmap(tmp_path / ("a.pgm" if channels == 1 else "a.ppm"), given)
    assert torch.equal(read_image(path, channels), given)
    pillow = pytest.importorskip("PIL.Image")
    with pillow.open(path) as image:
        image.save(tmp_path / "a.png")
    assert torch.equal(read_image(tmp_path / "a.png", channels), given)


def test_grey_and_color_are_converted(tmp_path: Path) -> None:
    grey = write_bitmap(tmp_path / "grey.pgm", pixels(1))
    assert torch.equal(read_image(grey, 3), pixels(1).expand(3, -1, -1))
    red = torch.zeros(3, 2, 2, dtype=torch.uint8)
    red[0] = 200
    # The eye sees 0.299 of red.
    assert read_image(write_bitmap(tmp_path / "red.ppm", red), 1).unique().tolist() == [60]


def test_the_centre_square_is_resized(tmp_path: Path) -> None:
    wide = torch.zeros(1, 4, 12, dtype=torch.uint8)
    wide[:, :, 4:8] = 100
    path = write_bitmap(tmp_path / "wide.pgm", wide)
    assert read_image(path, 1, size=2).tolist() == [[[100, 100], [100, 100]]]
    assert read_image(path, 1, size=8).shape == (1, 8, 8)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_becomes_white(mode: str, tmp_path: Path) -> None:
    from PIL import Image

    image = Image.new("RGBA", (3, 2), (10, 200, 30, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    image.convert(mode).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", channels=1).tolist() == [[[255, 0, 255], [255, 255, 255]]]


def test_an_image_on_the_other_background_is_inverted() -> None:
    dark = torch.zeros(1, 5, 5, dtype=torch.uint8)
    dark[:, 1:4, 1:4] = 200
    assert match_background(dark, "dark") is dark
    assert torch.equal(match_background(255 - dark, "dark"), dark)
    assert torch.equal(match_background(dark, "light"), 255 - dark)


def test_grey_values_are_scaled_to_255(tmp_path: Path) -> None:
    path = tmp_path / "few.pgm"
    path.write_bytes(b"P5 3 1 15\n" + bytes([0, 5, 15]))
    assert read_image(path, 1).tolist() == [[[0, 85, 255]]]


def test_invalid_image_files_give_clear_errors(tmp_path: Path) -> None:
    for name in ("text.png", "text.pgm"):
        (tmp_path / name).write_text("no image")
    accepted = "must be a PNG, JPEG, WebP, GIF, BMP, TIFF, PGM or PPM file"
    for name in ("text.png", "text.pgm"):
        with pytest.raises(ValueError, match=f"{name} {accepted}, got a text file"):
            read_image(tmp_path / name)
    (tmp_path / "a.png").write_bytes(b"DDS " + bytes(200))
    with pytest.raises(ValueError, match=f"a.png {accepted}, got a file in DDS format"):
        read_image(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ValueError, match=r"cut.png must be an intact PNG file, but Pillow cannot read it: .+"):
        read_image(tmp_path / "cut.png")
    (tmp_path / "text.pgm").write_bytes(b"P5 many pixels")
    with pytest.raises(ValueError, match=r"text.pgm must be a binary PGM or PPM image .*, got no valid header$"):
        read_image(tmp_path / "text.pgm")
    (tmp_path / "wide.pgm").write_bytes(b"P5 1 1 65535\n12")
    with pytest.raises(ValueError, match=r"wide.pgm must be a binary PGM or PPM image .*, got values up to 65535$"):
        read_image(tmp_path / "wide.pgm")
    (tmp_path / "short.pgm").write_bytes(b"P5 3 3 255\n1234")
    with pytest.raises(ValueError, match=r"short.pgm must hold 9 bytes of 3 x 3 pixels, got 4"):
        read_image(tmp_path / "short.pgm")
    with pytest.raises(FileNotFoundError, match=r"nothing.png must be an image file, got no such file"):
        read_image(tmp_path / "nothing.png")
    with pytest.raises(FileNotFoundError, match=r"must be an image file, got a directory"):
        read_image(tmp_path)
    with pytest.raises(ValueError, match="channels must be 1 or 3, got 2"):
        read_image(tmp_path / "text.png", 2)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_accepted_format_is_recognised_by_its_content(kind: str, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "image.data"
    Image.new("RGB", (6, 4), (200, 0, 0)).save(path, kind)
    found = read_image(path)
    assert found.shape == (3, 4, 6)
    assert (found.float().mean((1, 2)) - torch.tensor([200.0, 0.0, 0.0])).abs().max() < 6


@pytest.mark.parametrize("name", ["large.png", "large.pgm"])
def test_images_above_the_limit_are_refused_before_they_are_decoded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    path = tmp_path / name
    Image.new("L", (13300, 13300)).save(path, compress_level=1)
    message = "must have at most 67,108,864 pixels, got 176,890,000: set FOCI_MAX_PIXELS=176890000 to read it"
    with pytest.raises(ValueError, match=message):
        read_image(path)
    path = write_bitmap(tmp_path / "small.pgm", pixels(1))
    monkeypatch.setenv("FOCI_MAX_PIXELS", "34")
    with pytest.raises(ValueError, match="must have at most 34 pixels, got 35"):
        read_image(path)
    monkeypatch.setenv("FOCI_MAX_PIXELS", "35")
    assert read_image(path, 1).shape == (1, 5, 7)


def test_without_pillow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ImportError, match=r"needs Pillow: pip install 'foci\[tasks\]'"):
        read_image(tmp_path / "a.png")
    assert read_image(write_bitmap(tmp_path / "a.pgm", pixels(1)), 1).shape == (1, 5, 7)
