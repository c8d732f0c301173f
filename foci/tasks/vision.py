"""Image classification: an image in, the name of its class out.

B images, C channels.
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

from foci.inputs.image import crop_and_resize, match_background, read_image
from foci.inputs.image_augmentation import mixup_or_cutmix, random_erase, random_flip, random_rotation, random_shift
from foci.inputs.sample_cache import SampleCache
from foci.inputs.tables import read_table_rows, read_valid_rows, require_one_path
from foci.nn.config import HALVINGS_LIMIT, LAYERS_LIMIT, WIDTH_LIMIT
from foci.nn.model import Model
from foci.nn.vision import VisionTransformer
from foci.record.labels import Labels
from foci.record.record import Record
from foci.tasks.class_prediction import ClassPrediction, accuracy
from foci.tasks.rejection import REJECTION_FILE, Rejection
from foci.tasks.task import Problem, ProgressCallback, Task, TaskSettings, ignore_progress
from foci.tasks.task_files import check_class_names, check_numbers, parse_object
from foci.tasks.task_record import build_task_record

COLUMNS = ("image", "label")
INPUT_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".pgm", ".ppm", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
# The largest side of the image in a record, in pixels.
MAX_SHOWN_SIDE = 512
# Images used to measure mean and standard deviation of the pixels; images decoded at a time.
STATISTICS_IMAGES, DECODE_IMAGES = 2000, 250
# The largest height and width that a setting may name, in pixels.
IMAGE_LIMIT = 4096
MODEL_FIELDS = (
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
class LabelledImage:
    """The path of an image, and its label if known."""

    path: str
    label: str | None = None


@dataclass(frozen=True)
class VisionSettings(TaskSettings):
    """Settings of image classification: the [task] section of a run's TOML."""

    image: int = 32  # height and width that images are resized to, in pixels
    channels: int = 3  # 3: colour, 1: grey
    patch: int = 4  # height and width of a patch, in pixels
    size: Literal["tiny", "small", "base"] = "tiny"  # model size; the next settings override single values
    width: int | None = None  # model width
    layers: int | None = None  # number of blocks
    heads: int | None = None  # attention heads
    hidden: int | None = None  # width inside the feed-forward
    dropout: float | None = None  # dropout rate
    attention_dropout: float | None = None  # dropout rate of the attention weights
    depth_dropout: float | None = None  # stochastic depth: how often the last layer is skipped in training
    ground: Literal["dark", "light"] | None = None  # background; images with the other one are inverted; None: keep
    pool: Literal["class", "mean"] = "class"  # image representation: a class token, or the mean of the patches
    registers: int = 0  # register tokens, which belong to no patch
    stem: int = 0  # 3 x 3 convolutions before the image is cut into patches
    stem_width: int | None = None  # channels of these convolutions, doubled at each pooling
    stem_pool: int = 0  # how often the stem halves height and width; `patch` still counts pixels of the image
    crop: int = 2  # maximum shift in pixels, in training
    flip: bool = True  # mirror images at random, in training
    turn: float = 0.0  # maximum rotation in degrees, in training
    larger: float = 0.0  # maximum relative change of size, in training
    erase: float = 0.0  # probability that a box is filled with noise (random erasing), in training
    mix: float = 0.0  # probability that a batch is mixed by mixup or CutMix, in training
    smoothing: float = 0.1  # label smoothing, in training
    mirror: bool = False  # average the predictions for the image and its mirror image

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, IMAGE_LIMIT, "image", "patch")
        self.check_range(0, IMAGE_LIMIT, "crop")
        self.check_range(0, 360, "turn")
        self.check_range(1, WIDTH_LIMIT, "stem_width")
        self.check_range(0, LAYERS_LIMIT, "registers", "stem")
        self.check_range(0, HALVINGS_LIMIT, "stem_pool")
        self.check_range(1, 3, "channels")
        self.check_fractions("erase", "mix")
        self.check_fractions("larger", "smoothing", "dropout", "attention_dropout", "depth_dropout", include_one=False)
        if self.channels not in {1, 3}:
            raise ValueError(f"task.channels must be 1 or 3, got {self.channels}")
        if self.mirror and not self.flip:
            raise ValueError(
                "task.flip must be true with task.mirror, got false: the model must be trained on mirrored images"
            )


class Vision(Task[LabelledImage, ClassPrediction]):
    """Classification of images, from a folder with one subfolder per class, or a table of paths and labels."""

    name = "vision"
    metric = "accuracy"
    better = "higher"
    settings_type = VisionSettings
    settings: VisionSettings

    def __init__(
        self,
        settings: VisionSettings,
        labels: Sequence[str],
        mean: Sequence[float],
        std: Sequence[float],
        rejection: Rejection | None = None,
    ) -> None:
        self.settings, self.labels, self.mean, self.std = settings, list(labels), list(mean), list(std)
        # Declines images of none of the classes, if the model file has it.
        self.rejection = rejection
        self._class_indices = {label: number for number, label in enumerate(self.labels)}
        self._pixels = make_image_cache(settings)

    @classmethod
    def read(cls, paths: Sequence[Path], settings: Any) -> list[LabelledImage]:
        path = require_one_path(paths, "a folder with one subfolder per class, or a table of paths and labels")
        if path.is_dir():
            return list_class_folders(path)
        return [image_from_row(path, row.fields) for row in read_valid_rows(path, COLUMNS)]

    @classmethod
    def check(cls, paths: Sequence[Path], settings: VisionSettings) -> Iterator[Problem]:
        path = require_one_path(paths, "a folder with one subfolder per class, or a table of paths and labels")
        images: list[LabelledImage] = []
        if path.is_dir():
            images = list_class_folders(path)
            yield from check_images([(each.path, each) for each in images], settings)
        else:
            located = []
            for row in read_table_rows(path, COLUMNS):
                if row.problem is not None:
                    yield Problem(row.location, row.problem)
                    continue
                if row.warning is not None:
                    yield Problem(row.location, row.warning, "warning")
                located.append((row.location, image_from_row(path, row.fields)))
            images = [each for _, each in located]
            yield from check_images(located, settings)
        counts = Counter(each.label for each in images)
        if len(counts) < 2:
            yield Problem(str(path), f"the data must have at least 2 classes, got {len(counts)}")

    @classmethod
    def from_examples(cls, settings: VisionSettings, train: Sequence[LabelledImage]) -> Self:
        labels = sorted({each.label for each in train if each.label is not None})
        if len(labels) < 2:
            raise ValueError(f"the training data must have at least 2 classes, got {labels}")
        load = make_image_cache(settings)
        sample = torch.stack([load(each.path) for each in train[:: len(train) // STATISTICS_IMAGES + 1]]).float() / 255
        return cls(settings, labels, sample.mean((0, 2, 3)).tolist(), sample.std((0, 2, 3)).clamp(min=0.01).tolist())

    def learned_state(self) -> dict[str, str]:
        files = {"classes.json": json.dumps({"labels": self.labels, "mean": self.mean, "std": self.std})}
        return files if self.rejection is None else files | {REJECTION_FILE: self.rejection.to_json()}

    @classmethod
    def from_learned_state(cls, settings: VisionSettings, files: dict[str, str]) -> Self:
        labels, mean, std = parse_object(files["classes.json"], "classes.json", "labels", "mean", "std")
        mean, std = check_numbers(mean, "mean"), check_numbers(std, "std", above=0.0)
        if not len(mean) == len(std) == settings.channels:
            raise ValueError(f"mean and std must have {settings.channels} numbers, got {len(mean)} and {len(std)}")
        return cls(settings, check_class_names(labels), mean, std, Rejection.from_files(files))

    def model(self) -> Model:
        own = self.settings
        changes = {name: getattr(own, name) for name in MODEL_FIELDS if getattr(own, name) is not None}
        return VisionTransformer.from_name(own.size, classes=len(self.labels), **changes)

    def size(self, example: LabelledImage) -> int:
        return (self.settings.image // self.settings.patch) ** 2

    def batch(self, examples: Sequence[LabelledImage], training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        images = self.load_images(examples)
        labels = torch.tensor([self.class_index(each) for each in examples])
        if not training:
            return {"images": images, "labels": labels}
        images, other, own = mixup_or_cutmix(self.augment(images, generator), self.settings.mix, generator)
        return {"images": images, "labels": labels, "others": labels[other], "own": own}

    def load_images(self, examples: Sequence[LabelledImage]) -> Tensor:
        """Loads images, normalized to mean 0 and standard deviation 1: (B, C, height, width)."""
        pixels = torch.stack([self._pixels(each.path) for each in examples]).float() / 255
        return (pixels - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)

    def augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Applies the random changes of the settings to a batch of normalized images."""
        own = self.settings
        # The augmentations fill uncovered pixels with zeros, so black is moved to zero and back.
        darkest = -(torch.tensor(self.mean) / torch.tensor(self.std)).view(-1, 1, 1)
        images = images - darkest
        if own.turn or own.larger:
            images = random_rotation(images, own.turn, own.larger, generator)
        if own.crop:
            images = random_shift(images, own.crop, generator)
        images = images + darkest
        if own.flip:
            images = random_flip(images, generator)
        return random_erase(images, own.erase, generator) if own.erase else images

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch["images"]).logits.float()
        smoothing = self.settings.smoothing if model.training else 0.0
        losses = partial(F.cross_entropy, logits, reduction="none", label_smoothing=smoothing)
        loss = losses(batch["labels"])
        if "own" in batch:
            loss = batch["own"] * loss + (1 - batch["own"]) * losses(batch["others"])
        return loss.sum(), torch.full((), len(loss), device=loss.device)

    def decode(
        self, model: nn.Module, examples: Sequence[LabelledImage], done: ProgressCallback = ignore_progress
    ) -> list[ClassPrediction]:
        device = next(model.parameters()).device
        predictions: list[ClassPrediction] = []
        for first in range(0, len(examples), DECODE_IMAGES):
            images = self.load_images(examples[first : first + DECODE_IMAGES]).to(device)
            all_probabilities, declined = self.classify(model, images)
            probabilities, classes = all_probabilities.max(-1)
            rows = zip(classes.tolist(), probabilities.tolist(), declined.tolist(), strict=True)
            predictions += [ClassPrediction(self.labels[number], share, other) for number, share, other in rows]
            done(len(images))
        return predictions

    def classify(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the probability of each class (B, classes), and whether an image shows none of them (B,)."""
        views = [images, images.flip(-1)] if self.settings.mirror else [images]
        outs = [model(each) for each in views]
        probabilities = torch.stack([out.logits.float().softmax(-1) for out in outs]).mean(0)
        if self.rejection is None:
            return probabilities, torch.zeros(len(images), dtype=torch.bool)
        return probabilities, self.rejection.declines(cast("VisionTransformer", model).pool_states(outs[0].states))

    def score(self, answers: Sequence[ClassPrediction], examples: Sequence[LabelledImage]) -> dict[str, float | str]:
        return accuracy(answers, examples)

    def parse_input(self, text: str) -> LabelledImage:
        return LabelledImage(text)

    def answer(self, model: nn.Module, examples: Sequence[LabelledImage]) -> list[str]:
        return [str(prediction) for prediction in self.decode(model, examples)]

    def record_attention(self, model: nn.Module, example: LabelledImage) -> Record:
        """Records the attention over the patches and the class token, with the image."""
        transformer = cast("VisionTransformer", model)
        with torch.no_grad():
            answer = self.answer(model, [example])[0]
            out = transformer(self.load_images([example]).to(next(model.parameters()).device), return_weights=True)
        grid = transformer.grid(self.settings.image, self.settings.image)
        has_class = self.settings.pool == "class"
        leading = ["class token"] * has_class
        leading += [f"register {i + 1}" for i in range(transformer.leading - has_class)]
        patches = [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
        # The image as it was given: the model sees it smaller, and maybe inverted.
        given = read_image(example.path, channels=3)
        shown = crop_and_resize(given, min(*given.shape[1:], MAX_SHOWN_SIDE)).permute(1, 2, 0).contiguous()[None]
        labels = Labels("patches", ((*leading, *patches),), grid=grid, leading=transformer.leading, images=shown)
        record = build_task_record(model, out.weights, {"input": labels}, answer)
        height, width = given.shape[1:]
        if height != width:
            square = f"the center square of {min(height, width)} × {min(height, width)}"
            record.notes.append(f"the image has {width} × {height} pixels: the model reads {square}")
        return record

    def class_index(self, example: LabelledImage) -> int:
        if example.label is None or example.label not in self._class_indices:
            known = ", ".join(self.labels[:10]) + (", ..." if len(self.labels) > 10 else "")
            raise ValueError(f"the label of {example.path} must be one of {known}, got {example.label!r}")
        return self._class_indices[example.label]


def make_image_cache(settings: VisionSettings) -> SampleCache:
    """Returns a cached function from a path to its pixels."""
    return SampleCache(partial(load_pixels, settings=settings))


def load_pixels(path: str, settings: VisionSettings) -> Tensor:
    """Reads an image as the settings describe it: uint8 (C, height, width)."""
    pixels = read_image(path, channels=settings.channels, size=settings.image)
    return pixels if settings.ground is None else match_background(pixels, settings.ground)


def list_class_folders(folder: Path) -> list[LabelledImage]:
    """Lists the images of a folder with one subfolder per class."""
    images = [
        LabelledImage(str(path), each.name)
        for each in sorted(folder.iterdir())
        if each.is_dir()
        for path in sorted(each.iterdir())
        if path.suffix.lower() in INPUT_IMAGE_SUFFIXES
    ]
    if not images:
        raise ValueError(f"{folder} must have one subfolder with images per class, got none")
    return images


def image_from_row(table: Path, fields: dict[str, str]) -> LabelledImage:
    """Converts a row of a table; its path is relative to the table."""
    return LabelledImage(str(table.parent / fields["image"]), fields["label"].strip())


def check_images(located: Sequence[tuple[str, LabelledImage]], settings: VisionSettings) -> Iterator[Problem]:
    """Yields images that cannot be read or have no label."""
    for location, each in located:
        if not each.label:
            yield Problem(location, "label must not be empty")
        try:
            read_image(each.path, settings.channels)
        except (OSError, ValueError) as error:
            yield Problem(location, str(error))
