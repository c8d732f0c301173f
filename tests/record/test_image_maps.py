"""Maps of words over images, and the words that look at a part of an image."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import foci
from foci.record.labels import Labels, Segment
from foci.record.patch_layout import overlap
from foci.record.words import find_word

TEXT = ["<i>"] * 6 + ["a", " red", " sh", "oe", " and", " a", " boot"]


def labelled() -> Labels:
    return Labels.tokens([TEXT]).with_segments([Segment("patches", rows=2, columns=3)])


def record(labels: Labels | None = None) -> foci.Record:
    """Three layers of two heads; the tokens of "shoe" look at the patch 1,2 in head 1 of layer 2."""
    torch.manual_seed(0)
    matrices = [torch.rand(1, 2, 13, 13).softmax(-1) for _ in range(3)]
    for token in (8, 9):
        matrices[2][0, 1, token] = torch.eye(13)[5]
    return foci.Record.from_tensors(matrices, labelled() if labels is None else labels)


def test_a_hand_made_weight_points_to_its_patch() -> None:
    seen = record()
    expected = torch.zeros(2, 3)
    expected[1, 2] = 1
    assert torch.equal(seen.image_map("shoe", layer=2, head=1), expected)
    assert torch.equal(seen.image_map("shoe", layer="L2", head="each")[1], expected)
    each = seen.image_map("shoe", layer="each", head="each")
    assert each.shape == (3, 2, 2, 3)
    torch.testing.assert_close(each.mean((0, 1)), seen.image_map("shoe"))
    torch.testing.assert_close(each[:, 1].mean(0), seen.image_map("shoe", head=1))
    enlarged = seen.image_map("shoe", layer=2, head=1, upsample=(8, 12))
    assert divmod(int(enlarged.argmax()), 12)[0] >= 6
    assert divmod(int(enlarged.argmax()), 12)[1] >= 10


def test_rollout_through_the_layers() -> None:
    seen = record()
    expected = torch.stack([seen.rollout(8), seen.rollout(9)]).mean(0)[:6].view(2, 3)
    torch.testing.assert_close(seen.image_map("shoe", layer="rollout"), expected)
    with pytest.raises(ValueError, match="head must be None for layer='rollout'"):
        seen.image_map("shoe", layer="rollout", head=1)


@pytest.mark.parametrize("layer", ["L9", "vision", "L0H9"])
def test_unknown_layers_are_refused(layer: str) -> None:
    with pytest.raises(ValueError, match=r"(layer|head) must be .*, got"):
        record().image_map("shoe", layer=layer)


def test_words_are_found_by_text_and_occurrence() -> None:
    labels = labelled()
    assert [find_word(labels, word, 0) for word in ("a", "A#2", "red shoe", "boot", "oe")] == [
        [6],
        [11],
        [7, 8, 9],
        [12],
        [],
    ]
    # Texts of patches are not words of the text, and tokens without spaces are words.
    assert find_word(labels, "0,1", 0) == []
    assert find_word(Labels.tokens([["7", "8", "78"]]), "78", 0) == [2]


def test_words_that_look_at_a_part_of_the_image() -> None:
    seen = record()
    ranked = seen.words_for((0.5, 0.67, 1, 1), layer=2, head=1)
    assert ranked[0] == ("shoe", pytest.approx(1.0, abs=0.02))
    assert len(ranked) == 6
    # The whole patch, and half of it.
    half = dict(seen.words_for((0.5, 2 / 3, 0.75, 1), layer=2, head=1))["shoe"]
    assert half == pytest.approx(0.5)
    everything = dict(seen.words_for((0, 0, 1, 1)))["boot"]
    assert everything == pytest.approx(float(seen.image_map("boot").sum()), abs=1e-5)


def test_wrong_input_is_refused() -> None:
    seen = record()
    for match, wrong in (
        (r"query must be a word of the text \(a red shoe and a boot\) or a position, got 'hat'", {"query": "hat"}),
        (r"query must be a word or positions from -13 to 12, got 13", {"query": 13}),
        (r"image must be from 0 to 0, got 1", {"query": "a", "image": 1}),
        (r"image must be from 0 to 0, got a Tensor$", {"query": "a", "image": torch.rand(3, 8, 8)}),
        (r"query must be a word or positions from -13 to 12, got None", {"query": None}),
        (r"batch must be from 0 to 0, got 1", {"query": "a", "batch": 1}),
        (r"head must be None, 'each' or a number from \[0, 1\], got 2", {"query": "a", "head": 2}),
        (r"layer must be a number from \[0, 1, 2\], got 3", {"query": "a", "layer": 3}),
        (r"upsample must be \(height, width\), got True: the record has no picture", {"query": "a", "upsample": True}),
        (r"upsample must be True, False or \(height, width\) of at least 1, got 3", {"query": "a", "upsample": 3}),
        (r"upsample must be True, False or .* of at least 1, got \(0, 4\)", {"query": "a", "upsample": (0, 4)}),
        (r"head must be None, 'each' or a number from .*, got True", {"query": "a", "head": True}),
    ):
        with pytest.raises(ValueError, match=match):
            seen.image_map(**wrong)
    for box in ((0, 0, 2, 1), (0.5, 0, 0.5, 1), 3):
        with pytest.raises(ValueError, match=r"box must be \(top, left, bottom, right\)"):
            seen.words_for(box)
    without = foci.Record.from_tensors([torch.eye(3).view(1, 1, 3, 3)], tokens=["a", " b", " c"])
    for ask in (lambda: without.image_map("b"), lambda: without.words_for((0, 0, 1, 1))):
        with pytest.raises(ValueError, match=r"must have image patches among its keys, got none.*Labels.patches"):
            ask()


def test_a_vision_model_with_a_grid_by_hand() -> None:
    picture = torch.randint(256, (20, 30, 3), dtype=torch.uint8)
    labels = Labels.patches(2, 3, image=picture, extra=1)
    matrix = torch.rand(1, 2, 7, 7).softmax(-1)
    seen = foci.Record.from_tensors([matrix], labels)
    torch.testing.assert_close(seen.image_map("class token", head=0), matrix[0, 0, 0, 1:].view(2, 3))
    torch.testing.assert_close(seen.image_map("1,0", head=0), matrix[0, 0, 4, 1:].view(2, 3))
    assert seen.image_map(0, upsample=True).shape == (20, 30)
    with pytest.raises(ValueError, match="a text that attends to the image"):
        seen.words_for((0, 0, 1, 1))


def test_overlapping_cells_keep_their_sum() -> None:
    torch.testing.assert_close(overlap(4, 0.0, 1.0, 6).sum(0), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(overlap(3, 0.0, 1.0, 3), torch.eye(3, dtype=torch.float64))
    placed = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 1]], dtype=torch.float64)
    torch.testing.assert_close(overlap(2, 0.5, 1.0, 4), placed)


def test_segments_are_saved(tmp_path: Path) -> None:
    pictures = [torch.randint(256, (5, 7, 3), dtype=torch.uint8)]
    segments = [
        Segment("patches", rows=2, columns=2, stride=3, box=(0, 0, 0.5, 1), picture=0, order=(0, 2, 1, 3)),
        Segment("frames", start=7, columns=3, seconds=0.02),
    ]
    labels = Labels.tokens([TEXT]).with_segments(segments, pictures)
    record(labels).save(tmp_path / "a.foci")
    loaded = foci.load(tmp_path / "a.foci").labels["input"]
    assert loaded.segments == tuple(segments)
    assert torch.equal(loaded.pictures[0], pictures[0])
    assert loaded.texts == labels.texts
    assert labels.texts[0][:10] == ("0,0", "1,0", "", "0,1", "1,1", "", "a", "0.00s", "0.02s", "0.04s")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"kind": "words"}, "kind must be one of 'patches', 'frames'"),
        ({"rows": 0}, "rows must be an int of at least 1, got 0"),
        ({"columns": 2.5}, "columns must be an int of at least 1, got 2.5"),
        ({"columns": 3, "stride": 2}, "stride must be at least the 3 columns, got 2"),
        ({"columns": 2, "order": (0, 0)}, "order must have each of the 2 patches once"),
        ({"box": (0, 0, 0, 1)}, "box must be top, left, bottom, right"),
        ({"start": -1}, "must be at least 0"),
    ],
)
def test_wrong_segments_are_refused(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Segment(**{"kind": "patches"} | wrong)  # type: ignore[arg-type]


def test_segments_outside_of_the_labels_are_refused() -> None:
    with pytest.raises(
        ValueError, match="segments must lie within 1 sequences of 13 positions, got positions 10 to 13"
    ):
        Labels("tokens", (tuple(TEXT),), segments=(Segment("patches", start=10, columns=4),))
    with pytest.raises(
        ValueError, match="segments must have no position in common, got position 3 of sequence 0 twice"
    ):
        Labels("tokens", (tuple(TEXT),), segments=(Segment("patches", rows=2, columns=2), Segment("patches", start=3)))
    # The rows of two images beside each other alternate.
    apart = [Segment("patches", start=start, rows=2, columns=2, stride=4, image=start // 2) for start in (0, 2)]
    assert len(Labels("tokens", (tuple(TEXT),), segments=tuple(apart)).segments) == 2
    with pytest.raises(ValueError, match="picture must be below the 0 pictures, got 0"):
        Labels("tokens", (tuple(TEXT),), segments=(Segment("patches", picture=0),))
    with pytest.raises(ValueError, match="image must be a PIL image"):
        Labels.patches(2, 2, image=torch.zeros(5))


def test_pictures_of_any_kind() -> None:
    from PIL import Image

    grey = Labels.patches(2, 2, image=Image.new("L", (6, 4), 7)).images
    assert grey is not None
    assert grey.shape == (1, 4, 6, 3)
    assert int(grey.max()) == 7
    floats = Labels.patches(2, 2, image=torch.ones(3, 4, 6)).images
    assert floats is not None
    assert floats.shape == (1, 4, 6, 3)
    assert int(floats.min()) == 255
    large = Labels.patches(2, 2, image=torch.zeros(1000, 500, 3, dtype=torch.uint8)).images
    assert large is not None
    assert large.shape == (1, 768, 384, 3)


def test_prefixes_keep_their_segments() -> None:
    labels = labelled()
    assert labels.select(range(8)).segments == labels.segments
    assert labels.select(range(5)).segments == ()
    assert labels.select([0, 2]).segments == ()
