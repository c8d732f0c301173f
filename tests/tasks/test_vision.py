"""Vision: shapes drawn by chance are told apart; folders, tables, what is wrong with them, and what is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.tasks.vision import Picture, Vision, VisionSettings
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


def test_shapes_are_told_apart(learned: Lesson) -> None:
    assert learned.before < 60.0
    assert learned.after > 90.0


def test_an_answer_names_the_class_and_how_likely_it_is(learned: Lesson) -> None:
    task, model, _ = learned.trained
    example = next(each for each in learned.dev if each.label == "standing")
    said = task.write(model, [task.given(example.path)])
    assert said[0].endswith("%)")
    assert said[0].split(" (")[0] in {"standing", "lying", "square"}


def test_what_is_seen_has_the_picture_and_its_patches(learned: Lesson) -> None:
    task, model, _ = learned.trained
    record = task.show(model, learned.dev[0])
    labels = record.labels["input"]
    assert (labels.kind, labels.grid, labels.leading, len(labels)) == ("patches", (4, 4), 1, 17)
    assert labels.images is not None
    assert labels.images.shape == (1, 12, 12, 3)
    assert record["L1H0"].shape == (1, 1, 17, 17)
    assert record.answer == task.write(model, learned.dev[:1])[0]


def test_a_table_is_as_good_as_folders(tmp_path: Path) -> None:
    drawn(tmp_path / "pictures", 2, 1)
    table = tmp_path / "table.tsv"
    table.write_text("image\tlabel\npictures/square/0.pgm\tsquare\npictures/lying/1.pgm\tlying\n")
    settings = VisionSettings(image=12, channels=1)
    found = Vision.read([table], settings)
    assert [(Path(each.path).name, each.label) for each in found] == [("0.pgm", "square"), ("1.pgm", "lying")]
    assert [str(each) for each in Vision.check([table], settings)] == []


def test_everything_wrong_is_told_line_by_line(tmp_path: Path) -> None:
    drawn(tmp_path / "pictures", 1, 1)
    (tmp_path / "broken.pgm").write_text("no picture")
    table = tmp_path / "table.tsv"
    table.write_text(
        "pictures/square/0.pgm\tsquare\nbroken.pgm\tsquare\nmissing.png\tsquare\nonly\npictures/lying/0.pgm\t\n"
    )
    found = [str(each) for each in Vision.check([table], VisionSettings(channels=1))]
    assert [each.split(": ")[0].rsplit(":", 1)[1] for each in found[:4]] == ["4", "2", "3", "5"]
    for each, wanted in zip(
        found, ("but got 1", "it is not", "there is no such file", "expected a label, but it is empty"), strict=False
    ):
        assert wanted in each
    with pytest.raises(ValueError, match=r"table.tsv:4: expected 2 columns"):
        Vision.read([table], VisionSettings())


def test_a_folder_without_pictures_and_a_single_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a sub-folder with pictures for each class, but found none"):
        Vision.read([tmp_path], VisionSettings())
    with pytest.raises(ValueError, match=r"at least 2 classes to learn from, but got \['one'\]"):
        Vision.start(VisionSettings(), [Picture("a.png", "one")])


def test_a_label_that_was_not_learned_is_refused_with_the_known_ones(learned: Lesson) -> None:
    wrong = Picture(learned.dev[0].path, "circle")
    with pytest.raises(ValueError, match="expected one of the classes lying, square, standing, but got 'circle'"):
        learned.trained.task.batch([wrong], False, torch.Generator())


def test_a_mixture_has_the_loss_of_its_parts(learned: Lesson) -> None:
    task, model, _ = learned.trained
    examples = [learned.dev[0], learned.dev[-1]]
    batch = task.batch(examples, False, torch.Generator())
    alone, count = task.loss(model, batch)
    swapped, _ = task.loss(model, batch | {"labels": batch["labels"].flip(0)})
    both = batch | {"others": batch["labels"].flip(0), "own": torch.tensor([0.25, 0.25])}
    assert int(count) == 2
    assert torch.allclose(task.loss(model, both)[0], 0.25 * alone + 0.75 * swapped)


def test_an_answer_to_both_mirror_images_is_the_mean(learned: Lesson) -> None:
    task, model, _ = learned.trained
    assert isinstance(task, Vision)
    both = Vision(task.settings.changed(mirror=True), task.labels, task.mean, task.std)
    images = task.images(learned.dev[:3])
    with torch.no_grad():
        apart = [model(each).logits.softmax(-1) for each in (images, images.flip(-1))]
        assert not torch.allclose(*apart, atol=1e-4)
        assert torch.allclose(both.shares(model, images), (apart[0] + apart[1]) / 2, atol=1e-6)
        assert torch.allclose(both.shares(model, images.flip(-1)), both.shares(model, images), atol=1e-6)
        assert both.decode(model, learned.dev[:1])[0].share == pytest.approx(float(both.shares(model, images)[0].max()))
    with pytest.raises(ValueError, match=r"^task\.mirror needs task\.flip, .* but got task\.flip=false$"):
        VisionSettings(flip=False, mirror=True)


def test_a_picture_has_as_many_patches_with_a_stem_that_halves(learned: Lesson) -> None:
    settings = VisionSettings(image=12, channels=1, patch=4, stem=2, stem_width=8, stem_pool=2, width=16, heads=2)
    task = Vision(settings, ["lying", "square", "standing"], [0.2], [0.2])
    torch.manual_seed(0)
    record = task.show(task.model().eval(), learned.dev[0])
    assert task.size(learned.dev[0]) == 9
    assert (record.labels["input"].grid, record["L0H0"].shape) == ((3, 3), (1, 1, 10, 10))
