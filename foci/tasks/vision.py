"""Image classification: a picture in, the name of its class out.

B pictures, C channels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.inputs.image import negative, read_image
from foci.inputs.image_augmentation import cropped, erased, flipped, mixed, turned
from foci.inputs.sample_cache import Shelf
from foci.inputs.tables import good_rows, only, rows
from foci.nn.config import Config
from foci.nn.model import Model
from foci.nn.vision import VisionTransformer
from foci.record.labels import Labels
from foci.record.record import Record
from foci.tasks.class_prediction import Guess, accuracy
from foci.tasks.task import Done, Problem, Task, unheard
from foci.tasks.task_record import record_of

COLUMNS = ("image", "label")
ENDINGS = {".png", ".jpg", ".jpeg", ".pgm", ".ppm", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
# How many pictures the mean and the spread of the pixels are measured on, and how many are answered at a time.
MEASURED, TOGETHER = 2000, 250
CHANGES = (
    "image",
    "channels",
    "patch",
    "width",
    "layers",
    "heads",
    "hidden",
    "pool",
    "registers",
    "stem",
    "stem_width",
    "stem_pool",
    "dropout",
    "attention_dropout",
    "depth_dropout",
)


@dataclass(frozen=True)
class Picture:
    """A picture's file, and the name of its class, where it is known."""

    path: str
    label: str | None = None


@dataclass(frozen=True)
class VisionSettings(Config):
    """What pictures become, how they are varied, and what reads them: [task] in a run's TOML."""

    section = "task"

    image: int = 32  # the height and width that pictures are brought to, in pixels
    channels: int = 3  # 3 for colours, 1 for grey
    patch: int = 4  # the height and width of a patch
    size: Literal["tiny", "small", "base"] = "tiny"  # of the model; what follows changes single numbers of it
    width: int | None = None  # of the patches' states
    layers: int | None = None  # how many blocks
    heads: int | None = None  # of each attention
    hidden: int | None = None  # the width inside the feed-forward
    dropout: float | None = None  # the share dropped while training
    attention_dropout: float | None = None  # the share of attention weights dropped while training
    depth_dropout: float | None = None  # how often the last layer is skipped while training
    ground: Literal["dark", "light"] | None = None  # pictures on the other ground become their negatives; None: none
    pool: Literal["class", "mean"] = "class"  # what stands for the picture: a token of its own, or the patches' mean
    registers: int = 0  # tokens without a patch, which give attention a place to rest
    stem: int = 0  # 3 x 3 convolutions over the pixels before they are cut
    stem_width: int | None = None  # numbers per pixel after each of them, twice as many after a halving
    stem_pool: int = 0  # how often they halve the height and width; patches are still counted in pixels of the picture
    crop: int = 2  # how many pixels a picture is moved by at most, while training
    flip: bool = True  # whether left and right may be exchanged, while training
    turn: float = 0.0  # how many degrees a picture is turned by at most, while training
    larger: float = 0.0  # by what share a picture is made larger or smaller at most, while training
    erase: float = 0.0  # how often a box in a picture is filled with noise, while training
    mix: float = 0.0  # how often a batch of pictures is mixed with itself (mixup, cutmix), while training
    smoothing: float = 0.1  # the share of each target that is spread over all classes, while training
    mirror: bool = False  # whether an answer is the mean of those to the picture and its mirror image

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "image", "patch", "width", "layers", "heads", "hidden", "stem_width")
        self.at_least(0, "crop", "turn", "registers", "stem", "stem_pool")
        self.shares("erase", "mix")
        self.shares("larger", "smoothing", "dropout", "attention_dropout", "depth_dropout", whole=False)
        if self.channels not in {1, 3}:
            raise ValueError(f"task.channels must be 1 or 3, but got {self.channels}")
        if self.mirror and not self.flip:
            raise ValueError("task.mirror needs task.flip, which teaches mirror images, but got task.flip=false")


class Vision(Task[Picture, Guess]):
    """Pictures in a folder with one sub-folder for each class, or named by a table of paths and labels."""

    name = "vision"
    metric = "accuracy"
    better = "higher"
    settings_type = VisionSettings
    settings: VisionSettings

    def __init__(self, settings: VisionSettings, labels: Sequence[str], mean: Sequence[float], std: Sequence[float]):
        self.settings, self.labels, self.mean, self.std = settings, list(labels), list(mean), list(std)
        self._numbers = {label: number for number, label in enumerate(self.labels)}
        self._pixels = reader(settings)

    @classmethod
    def read(cls, paths: Sequence[Path], settings: Any) -> list[Picture]:
        path = only(paths, "a folder with a sub-folder for each class, or a table of paths and labels")
        if path.is_dir():
            return in_folders(path)
        return [picture(path, row.fields) for row in good_rows(path, COLUMNS)]

    @classmethod
    def check(cls, paths: Sequence[Path], settings: VisionSettings) -> Iterator[Problem]:
        path = only(paths, "a folder with a sub-folder for each class, or a table of paths and labels")
        found: list[Picture] = []
        if path.is_dir():
            found = in_folders(path)
            yield from problems([(each.path, each) for each in found], settings)
        else:
            placed = []
            for row in rows(path, COLUMNS):
                if row.problem is not None:
                    yield Problem(row.place, row.problem)
                    continue
                if row.warning is not None:
                    yield Problem(row.place, row.warning, "warning")
                placed.append((row.place, picture(path, row.fields)))
            found = [each for _, each in placed]
            yield from problems(placed, settings)
        counts = Counter(each.label for each in found)
        if len(counts) < 2:
            yield Problem(str(path), f"expected pictures of at least 2 classes, but got {len(counts)}")

    @classmethod
    def start(cls, settings: VisionSettings, train: Sequence[Picture]) -> Self:
        labels = sorted({each.label for each in train if each.label is not None})
        if len(labels) < 2:
            raise ValueError(f"expected pictures of at least 2 classes to learn from, but got {labels}")
        pixels = reader(settings)
        some = torch.stack([pixels(each.path) for each in train[:: len(train) // MEASURED + 1]]).float() / 255
        return cls(settings, labels, some.mean((0, 2, 3)).tolist(), some.std((0, 2, 3)).clamp(min=0.01).tolist())

    def files(self) -> dict[str, str]:
        return {"classes.json": json.dumps({"labels": self.labels, "mean": self.mean, "std": self.std})}

    @classmethod
    def from_files(cls, settings: VisionSettings, files: dict[str, str]) -> Self:
        return cls(settings, **json.loads(files["classes.json"]))

    def model(self) -> Model:
        own = self.settings
        changes = {name: getattr(own, name) for name in CHANGES if getattr(own, name) is not None}
        return VisionTransformer.from_name(own.size, classes=len(self.labels), **changes)

    def size(self, example: Picture) -> int:
        return (self.settings.image // self.settings.patch) ** 2

    def batch(self, examples: Sequence[Picture], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        images = self.images(examples)
        labels = torch.tensor([self.number(each) for each in examples])
        if not training:
            return {"images": images, "labels": labels}
        images, other, own = mixed(self.varied(images, generator), self.settings.mix, generator)
        return {"images": images, "labels": labels, "others": labels[other], "own": own}

    def images(self, examples: Sequence[Picture]) -> Tensor:
        """The pixels with mean 0 and spread 1: (B, C, height, width)."""
        pixels = torch.stack([self._pixels(each.path) for each in examples]).float() / 255
        return (pixels - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)

    def varied(self, images: Tensor, generator: torch.Generator) -> Tensor:
        own = self.settings
        # What comes in from outside is the darkest that there is.
        darkest = -(torch.tensor(self.mean) / torch.tensor(self.std)).view(-1, 1, 1)
        images = images - darkest
        if own.turn or own.larger:
            images = turned(images, own.turn, own.larger, generator)
        if own.crop:
            images = cropped(images, own.crop, generator)
        images = images + darkest
        if own.flip:
            images = flipped(images, generator)
        return erased(images, own.erase, generator) if own.erase else images

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["images"]).logits.float()
        smoothing = self.settings.smoothing if model.training else 0.0
        losses = partial(F.cross_entropy, logits, reduction="none", label_smoothing=smoothing)
        found = losses(batch["labels"])
        if "own" in batch:
            found = batch["own"] * found + (1 - batch["own"]) * losses(batch["others"])
        return found.sum(), torch.full((), len(found), device=found.device)

    def decode(self, model: nn.Module, examples: Sequence[Picture], done: Done = unheard) -> list[Guess]:
        device = next(model.parameters()).device
        found: list[Guess] = []
        for first in range(0, len(examples), TOGETHER):
            images = self.images(examples[first : first + TOGETHER]).to(device)
            shares, numbers = self.shares(model, images).max(-1)
            pairs = zip(numbers.tolist(), shares.tolist(), strict=True)
            found += [Guess(self.labels[number], share) for number, share in pairs]
            done(len(images))
        return found

    def shares(self, model: nn.Module, images: Tensor) -> Tensor:
        """How likely each class is: (B, classes)."""
        asked = [images, images.flip(-1)] if self.settings.mirror else [images]
        return torch.stack([model(each).logits.float().softmax(-1) for each in asked]).mean(0)

    def score(self, answers: Sequence[Guess], examples: Sequence[Picture]) -> dict[str, float | str]:
        return accuracy(answers, examples)

    def given(self, text: str) -> Picture:
        return Picture(text)

    def write(self, model: nn.Module, examples: Sequence[Picture]) -> list[str]:
        return [str(guess) for guess in self.decode(model, examples)]

    def show(self, model: nn.Module, example: Picture) -> Record:
        """The picture, and where its patches and the token that stands for it look."""
        viewer = cast("VisionTransformer", model)
        with torch.no_grad():
            answer = self.write(model, [example])[0]
            out = viewer(self.images([example]).to(next(model.parameters()).device), return_weights=True)
        grid = viewer.grid(self.settings.image, self.settings.image)
        leading = [f"<{i}>" for i in range(viewer.leading)]
        if self.settings.pool == "class":
            leading[0] = "<class>"
        places = [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
        pixels = self._pixels(example.path).expand(3, -1, -1).permute(1, 2, 0).contiguous()[None]
        labels = Labels("patches", ((*leading, *places),), grid=grid, leading=viewer.leading, images=pixels)
        return record_of(model, out.weights, {"input": labels}, answer)

    def number(self, example: Picture) -> int:
        if example.label is None or example.label not in self._numbers:
            known = ", ".join(self.labels[:10]) + (", ..." if len(self.labels) > 10 else "")
            raise ValueError(f"{example.path}: expected one of the classes {known}, but got {example.label!r}")
        return self._numbers[example.label]


def reader(settings: VisionSettings) -> Shelf:
    return Shelf(partial(seen, settings=settings))


def seen(path: str, settings: VisionSettings) -> Tensor:
    """The pixels of a picture as the model is given them: uint8 (C, height, width)."""
    pixels = read_image(path, channels=settings.channels, size=settings.image)
    return pixels if settings.ground is None else negative(pixels, settings.ground)


def in_folders(folder: Path) -> list[Picture]:
    """The pictures of a folder: each class is a sub-folder that has its name."""
    found = [
        Picture(str(path), each.name)
        for each in sorted(folder.iterdir())
        if each.is_dir()
        for path in sorted(each.iterdir())
        if path.suffix.lower() in ENDINGS
    ]
    if not found:
        raise ValueError(f"{folder}: expected a sub-folder with pictures for each class, but found none")
    return found


def picture(table: Path, fields: dict[str, str]) -> Picture:
    """A row of a table; its path is meant from where the table is."""
    return Picture(str(table.parent / fields["image"]), fields["label"].strip())


def problems(placed: Sequence[tuple[str, Picture]], settings: VisionSettings) -> Iterator[Problem]:
    """Pictures that cannot be read, or have no class."""
    for place, each in placed:
        if not each.label:
            yield Problem(place, "expected a label, but it is empty")
        try:
            read_image(each.path, settings.channels)
        except (OSError, ValueError) as error:
            yield Problem(place, str(error))
