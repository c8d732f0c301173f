"""Vision: random shapes are classified; folders, tables, their errors, and the record of the attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.tasks.vision import LabelledImage, Vision, VisionSettings
from tests.tasks.lessons import Lesson, lesson

SMALL = (
    *("task.image=12", "task.channels=1", "task.patch=3", "task.width=32", "task.layers=2", "task.heads=2"),
    *("task.crop=1", "task.flip=true", "task.erase=0.1", "task.mix=0.2"),
    *("train.batch_tokens=512", "train.steps=150", "train.rate=0.003"),
)


def shape(kind: str, generator: torch.Generator) -> Tensor:
    """A bar that stands, a bar that lies, or a square, somewhere in noise."""
    picture = torch.randint(60, (12, 12), generator=generator)
    row, column = torch.randint(1, 6, (2,), generator=generator).tolist()
    height, width = {"standing": (6, 2), "lying": (2, 6), "square": (4, 4)}[kind]
    picture[row : row + height, column : column + width] += 150
    return picture.to(torch.uint8)


def drawn(folder: Path, count: int, seed: int) -> Path:
    """A folder with a sub-folder for each class."""
    generator = torch.Generator().manual_seed(seed)
    for kind in ("standing", "lying", "square"):
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            content = bytes(shape(kind, generator).flatten().tolist())
            (folder / kind / f"{number}.pgm").write_bytes(b"P5 12 12 255\n" + content)
    return folder


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    folder = tmp_path_factory.mktemp("shapes")
    return lesson("vision", folder, drawn(folder / "train", 80, 1), drawn(folder / "dev", 30, 2), *SMALL)


def test_shapes_are_classified(learned: Lesson) -> None:
    assert learned.before < 60.0
    assert learned.after > 90.0


def test_an_answer_has_class_and_probability(learned: Lesson) -> None:
    task, model, _ = learned.trained
    example = next(each for each in learned.dev if each.label == "standing")
    said = task.answer(model, [task.parse_input(example.path)])
    assert said[0].endswith("%)")
    assert said[0].split(" (")[0] in {"standing", "lying", "square"}


def test_the_record_has_the_image_as_given(learned: Lesson, tmp_path: Path) -> None:
    task, model, _ = learned.trained
    pixels = torch.full((30, 40), 250, dtype=torch.uint8)
    pixels[10:20, 10:30] = 5
    (tmp_path / "wide.pgm").write_bytes(b"P5 40 30 255\n" + bytes(pixels.flatten().tolist()))
    inverting = type(task)(replace(task.settings, ground="dark"), task.labels, task.mean, task.std)
    record = inverting.record_attention(model, inverting.parse_input(str(tmp_path / "wide.pgm")))
    shown = record.labels["input"].images
    assert shown is not None
    assert torch.equal(shown[0, :, :, 0], pixels[:, 5:35])
    assert record.notes == ["the image has 40 × 30 pixels: the model reads the center square of 30 × 30"]


def test_the_record_has_the_image_and_its_patches(learned: Lesson) -> None:
    task, model, _ = learned.trained
    record = task.record_attention(model, learned.dev[0])
    labels = record.labels["input"]
    assert (labels.kind, labels.grid, labels.leading, len(labels)) == ("patches", (4, 4), 1, 17)
    assert labels.texts[0][:2] == ("class token", "0,0")
    assert labels.images is not None
    assert labels.images.shape == (1, 12, 12, 3)
    assert record["L1H0"].shape == (1, 17, 17)
    assert record.answer == task.answer(model, learned.dev[:1])[0]


def test_a_table_and_folders_read_alike(tmp_path: Path) -> None:
    drawn(tmp_path / "pictures", 2, 1)
    table = tmp_path / "table.tsv"
    table.write_text("image\tlabel\npictures/square/0.pgm\tsquare\npictures/lying/1.pgm\tlying\n")
    settings = VisionSettings(image=12, channels=1)
    found = Vision.read([table], settings)
    assert [(Path(each.path).name, each.label) for each in found] == [("0.pgm", "square"), ("1.pgm", "lying")]
    assert [str(each) for each in Vision.check([table], settings)] == []


def test_all_problems_are_reported_line_by_line(tmp_path: Path) -> None:
    drawn(tmp_path / "pictures", 1, 1)
    (tmp_path / "broken.pgm").write_text("no picture")
    table = tmp_path / "table.tsv"
    table.write_text(
        "pictures/square/0.pgm\tsquare\nbroken.pgm\tsquare\nmissing.png\tsquare\nonly\npictures/lying/0.pgm\t\n"
    )
    found = [str(each) for each in Vision.check([table], VisionSettings(channels=1))]
    assert [each.split(": ")[0].rsplit(":", 1)[1] for each in found[:4]] == ["4", "2", "3", "5"]
    for each, wanted in zip(
        found,
        (
            "got 1",
            "must be a PNG, JPEG, WebP, GIF, BMP, TIFF, PGM or PPM file",
            "got no such file",
            "label must not be empty",
        ),
        strict=False,
    ):
        assert wanted in each
    with pytest.raises(ValueError, match=r"table.tsv:4: a line must have 2 tab-separated columns"):
        Vision.read([table], VisionSettings())


def test_an_empty_folder_and_a_single_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must have one subfolder with images per class, got none"):
        Vision.read([tmp_path], VisionSettings())
    with pytest.raises(ValueError, match=r"the training data must have at least 2 classes, got \['one'\]"):
        Vision.from_examples(VisionSettings(), [LabelledImage("a.png", "one")])


def test_an_unknown_label_is_refused_with_the_known_ones(learned: Lesson) -> None:
    wrong = LabelledImage(learned.dev[0].path, "circle")
    with pytest.raises(ValueError, match="must be one of lying, square, standing, got 'circle'"):
        learned.trained.task.batch([wrong], False, torch.Generator())


def test_a_mixed_image_has_the_weighted_loss_of_both(learned: Lesson) -> None:
    task, model, _ = learned.trained
    examples = [learned.dev[0], learned.dev[-1]]
    batch = task.batch(examples, False, torch.Generator())
    alone, count = task.loss(model, batch)
    swapped, _ = task.loss(model, batch | {"labels": batch["labels"].flip(0)})
    both = batch | {"others": batch["labels"].flip(0), "own": torch.tensor([0.25, 0.25])}
    assert int(count) == 2
    assert torch.allclose(task.loss(model, both)[0], 0.25 * alone + 0.75 * swapped)


def test_mirror_averages_both_predictions(learned: Lesson) -> None:
    task, model, _ = learned.trained
    assert isinstance(task, Vision)
    both = Vision(task.settings.replace(mirror=True), task.labels, task.mean, task.std)
    images = task.load_images(learned.dev[:3])
    with torch.no_grad():
        apart = [model(each).logits.softmax(-1) for each in (images, images.flip(-1))]
        assert not torch.allclose(*apart, atol=1e-4)
        assert torch.allclose(both.classify(model, images)[0], (apart[0] + apart[1]) / 2, atol=1e-6)
        assert torch.allclose(both.classify(model, images.flip(-1))[0], both.classify(model, images)[0], atol=1e-6)
        assert both.decode(model, learned.dev[:1])[0].probability == pytest.approx(
            float(both.classify(model, images)[0][0].max())
        )
    with pytest.raises(ValueError, match=r"^task\.flip must be true with task\.mirror, got false: "):
        VisionSettings(flip=False, mirror=True)


def test_a_pooling_stem_keeps_the_number_of_patches(learned: Lesson) -> None:
    settings = VisionSettings(image=12, channels=1, patch=4, stem=2, stem_width=8, stem_pool=2, width=16, heads=2)
    task = Vision(settings, ["lying", "square", "standing"], [0.2], [0.2])
    torch.manual_seed(0)
    record = task.record_attention(task.model().eval(), learned.dev[0])
    assert task.size(learned.dev[0]) == 9
    assert (record.labels["input"].grid, record["L0H0"].shape) == ((3, 3), (1, 10, 10))
