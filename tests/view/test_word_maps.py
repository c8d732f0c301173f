"""Figures of words on images, and of denoising steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foci.record.record import Record
from foci.view.figures import plots, word_maps
from tests.view import records

PIL = pytest.importorskip("PIL.Image")


def drawn(ax: Any) -> torch.Tensor:
    return torch.as_tensor(ax.images[-1].get_array().filled(float("nan")))


def test_each_word_has_its_map() -> None:
    record = records.words_and_images()
    ax = plots.plot_word_maps(record, ["red", "shoe"])
    axes = ax.figure.axes
    assert [each.get_title(loc="left") for each in axes] == ["red", "shoe"]
    for each, word in zip(axes, ("red", "shoe"), strict=True):
        torch.testing.assert_close(drawn(each), record.image_map(word).to(drawn(each)))
        assert len(each.images) == 2
    assert word_maps.list_text_words(record, 0) == ["<s>", "A", "red", "shoe."]
    bare = plots.plot_word_maps(records.words_and_images(pictures=False), relative=False)
    assert len(bare.images) == 1
    # Four words and the color bar.
    assert len(bare.figure.axes) == 5


def test_the_words_are_those_of_the_text_beside_a_vision_tower() -> None:
    tower, text = records.image(), records.words_and_images()
    record = Record(tower.layers | text.layers, tower.labels | text.labels, model="VisionLanguage")
    assert word_maps.list_text_words(record, 0) == ["<s>", "A", "red", "shoe."]


def test_a_vision_model_and_a_video_have_maps() -> None:
    assert plots.plot_word_maps(records.image()).get_title(loc="left") == "class"
    video = records.words_and_images(frames=3)
    ax = plots.plot_word_maps(video, "shoe", frame=0)
    torch.testing.assert_close(drawn(ax), video.image_map("shoe")[0].to(drawn(ax)))
    with pytest.raises(ValueError, match=r"frame must be from 0 to 2, got 7"):
        plots.plot_word_maps(video, "shoe", frame=7)


def test_steps_are_a_row_or_an_animation(tmp_path: Path) -> None:
    record = records.denoising(steps=5)
    ax = plots.plot_word_steps(record, "shoe", frames=3)
    titles = [each.get_title(loc="left") for each in ax.figure.axes[:3]]
    assert titles == ["step 1", "step 3", "step 5"]
    record.save(tmp_path / "x.gif", word="shoe", dpi=40)
    with PIL.open(tmp_path / "x.gif") as animation:
        assert animation.n_frames == 5


def test_the_steps_of_a_video_are_drawn_for_a_frame(tmp_path: Path) -> None:
    record = records.denoising(steps=6, frames=2)
    ax = plots.plot_word_steps(record, "shoe", frames=2, frame=1)
    torch.testing.assert_close(drawn(ax), record.image_map("shoe", step=0)[1].to(drawn(ax)))
    record.save(tmp_path / "x.gif", word="shoe", dpi=40)
    with PIL.open(tmp_path / "x.gif") as animation:
        assert animation.n_frames >= 5
        # As wide as its frames of 2 x 4 patches, without margins.
        assert animation.height < 0.7 * animation.width
    with pytest.raises(ValueError, match=r"frame must be from 0 to 1, got 'last'"):
        record.save(tmp_path / "x.gif", word="shoe", frame="last")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_figures_of_words_are_written(suffix: str, tmp_path: Path) -> None:
    records.words_and_images().save(tmp_path / f"x.{suffix}", words=["red"], dpi=40)
    assert (tmp_path / f"x.{suffix}").stat().st_size > 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"what": "words", "words": ["cat"]},
            r"query must be a word of the text \(<s> A red shoe\.\) or a position, got",
        ),
        ({"what": "words", "words": []}, r"words must be 1 to 24 words, got 0"),
        ({"what": "words", "image": 3}, r"image must be from 0 to 0, got 3"),
        ({"what": "steps", "word": "red"}, r"record must be that of a diffusion model with denoising steps, got"),
    ],
)
def test_wrong_words_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        records.words_and_images().save(tmp_path / "x.png", **options)


def test_other_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the record must have image patches among its keys, got none"):
        records.jane().save(tmp_path / "x.png", what="words")
    with pytest.raises(ValueError, match=r"word must be a word or a position of the prompt, got None"):
        records.denoising().save(tmp_path / "x.gif")
    with pytest.raises(ValueError, match=r"what must be 'steps' for a GIF, got 'heads'"):
        records.denoising().save(tmp_path / "x.gif", what="heads")
    with pytest.raises(ValueError, match=r"frames must be an int of at least 1, got 0"):
        plots.plot_word_steps(records.denoising(), "shoe", frames=0)
