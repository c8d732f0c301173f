"""Records with denoising steps: one step, the mean over the steps, word maps, files and wrong arguments."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import foci
from foci.record.kept import KeptStatistics, TextPositions
from foci.record.layer import Layer

ROWS, COLUMNS, WORDS, STEPS, HEADS = 3, 4, 5, 4, 2
TEXTS = ["a", " red", " sh", "oe", ""]


def make_matrices(queries: int = ROWS * COLUMNS, keys: int = WORDS) -> list[Tensor]:
    torch.manual_seed(queries)
    return [torch.rand(1, HEADS, queries, keys).softmax(-1) for _ in range(STEPS)]


def make_record() -> foci.Record:
    """Cross-attention of 3 x 4 and of 6 x 8 patches to five tokens, with lazy and with dense matrices."""
    labels = {
        "image 3x4": foci.Labels.patches(ROWS, COLUMNS),
        "image 6x8": foci.Labels.patches(2 * ROWS, 2 * COLUMNS),
        "prompt": foci.Labels.tokens([TEXTS]),
    }
    records = []
    for small, large in zip(make_matrices(), make_matrices(4 * ROWS * COLUMNS), strict=True):
        layers = {
            "down.attn": Layer("down.attn", "cross", 0, queries="image 6x8", keys="prompt", matrix=large),
            "mid.attn": Layer("mid.attn", "cross", 1, queries="image 3x4", keys="prompt", matrix=small),
        }
        records.append(foci.Record(layers, labels, calls=2))
    return foci.Record.from_steps(records)


def make_lazy_steps() -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    weights = [foci.attention(*torch.randn(3, 2, 4, 6, 8), return_weights=True)[1] for _ in range(3)]
    steps = {number: Layer("x", weights=each) for number, each in enumerate(weights)}
    return Layer("x", steps=steps), torch.stack([each.dense() for each in weights]).mean(0)


def test_a_record_has_its_steps_and_their_mean() -> None:
    seen = make_record()
    assert (seen.steps, seen.calls, len(seen.layers)) == (STEPS, 2 * STEPS, 2)
    torch.testing.assert_close(seen.at(step=2)["cross.L1"].dense(), make_matrices()[2])
    torch.testing.assert_close(seen.at(step=-1)["cross.L1"].dense(), make_matrices()[-1])
    mean = seen.mean("steps")
    assert (mean.steps, seen.at(step=0).steps) == (1, 1)
    torch.testing.assert_close(mean["cross.L1"].dense(), torch.stack(make_matrices()).mean(0))
    torch.testing.assert_close(seen["cross.L1"].at(1).dense(), make_matrices()[1])


def test_the_mean_of_lazy_steps_has_the_statistics_of_the_mean_matrix() -> None:
    layer, dense = make_lazy_steps()
    exact = Layer("x", matrix=dense)
    for part, other in ((layer, exact), (layer.head(2), exact.head(2)), (layer.head(2).with_head_axis(), None)):
        if other is None:
            assert part.shape == (2, 1, 6, 6)
            continue
        for ask in (
            lambda x: x.entropy(),
            lambda x: x.received(),
            lambda x: x.received([1, 2]),
            lambda x: x.distance(),
            lambda x: x.top(2).values,
            lambda x: x.picture(3, 2),
            lambda x: x.picture(3, 2, "max"),
            lambda x: x.grouped([(0, 4)], [(0, 2), (2, 6)]),
            lambda x: x[..., 2, :],
            lambda x: x.columns([1, 4]),
            lambda x: x.lines([0, 3]),
            lambda x: x @ torch.ones(6, 2),
            lambda x: torch.ones(2, 6) @ x,
            lambda x: x.dense(),
        ):
            torch.testing.assert_close(ask(part), ask(other), atol=1e-6, rtol=1e-5)
    averaged = layer.mean("heads")
    torch.testing.assert_close(averaged[1, 3], dense[1, :, 3].mean(0))
    with pytest.raises(ValueError, match="'lse' of L0 cannot be computed from the mean over steps"):
        _ = layer.lse
    with pytest.raises(ValueError, match="above the limit"):
        layer.dense(limit=8)


def test_a_word_map_averages_heads_layers_and_steps_on_the_finest_grid() -> None:
    seen = make_record()
    small = torch.stack(make_matrices())[:, 0].mean((0, 1))[:, 2:4].mean(-1).view(ROWS, COLUMNS)
    large = torch.stack(make_matrices(4 * ROWS * COLUMNS))[:, 0].mean((0, 1))[:, 2:4].mean(-1)
    torch.testing.assert_close(seen.image_map("shoe", layer="mid"), small)
    resized = torch.nn.functional.interpolate(small[None, None], (2 * ROWS, 2 * COLUMNS), mode="bicubic")[0, 0]
    expected = (resized.clamp(min=0) + large.view(2 * ROWS, 2 * COLUMNS)) / 2
    torch.testing.assert_close(seen.image_map("shoe"), expected)
    each = seen.image_map("shoe", step="each", layer="cross.L1")
    assert each.shape == (STEPS, ROWS, COLUMNS)
    torch.testing.assert_close(each[3], seen.image_map("shoe", step=3, layer="cross.L1"))
    assert seen.image_map("red", layer="each", head="each").shape == (2, HEADS, 2 * ROWS, 2 * COLUMNS)
    assert seen.image_map("red", head=1, upsample=(30, 40)).shape == (30, 40)


def test_a_map_has_the_orientation_of_the_image() -> None:
    """One patch, in row 1 and column 3, looks at the second word."""
    matrix = torch.zeros(1, 1, ROWS * COLUMNS, WORDS)
    matrix[..., 0] = 1
    matrix[0, 0, 1 * COLUMNS + 3] = torch.tensor([0, 1.0, 0, 0, 0])
    labels = {"image": foci.Labels.patches(ROWS, COLUMNS), "prompt": foci.Labels.tokens([TEXTS])}
    layer = Layer("x", queries="image", keys="prompt", matrix=matrix)
    seen = foci.Record.from_steps([foci.Record({"x": layer}, labels)])
    found = seen.image_map("red")
    assert found[1, 3] == 1
    assert found.sum() == 1
    box = (1 / ROWS, 3 / COLUMNS, 2 / ROWS, 1.0)
    assert dict(seen.words_for(box)) == {"a": 0.0, "red": 1.0, "shoe": 0.0}
    assert dict(seen.words_for((0, 0, 1 / ROWS, 1)))["a"] == 1.0


def test_kept_columns_of_text_give_the_same_maps() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 12, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    weights = foci.attention(q, k, v, return_weights=True)[1]
    labels = {"image": foci.Labels.patches(ROWS, COLUMNS), "prompt": foci.Labels.tokens([TEXTS])}
    keep = foci.Keep(keys="text", queries="text")
    text = TextPositions(queries=(3, 5), keys=(0, 1, 2, 3))
    kept = KeptStatistics(keep.compute_text(weights, text), weights.shape)
    names = {"queries": "image", "keys": "prompt"}
    lazy = foci.Record({"x": Layer("x", weights=weights, **names)}, labels)
    layer = Layer("x", kept=kept, kept_keys=text.keys, kept_queries=text.queries, **names)
    seen = foci.Record({"x": layer}, labels)
    torch.testing.assert_close(seen.image_map("shoe"), lazy.image_map("shoe"))
    assert dict(seen.words_for((0, 0, 0.5, 1))) == pytest.approx(dict(lazy.words_for((0, 0, 0.5, 1))))
    torch.testing.assert_close(layer.lines([5]), weights[..., [5], :])
    assert layer.available == {"columns", "lines"}
    assert seen.scores() == {}
    with pytest.raises(ValueError, match=r"key must be one of those kept of L0 \(\(0, 1, 2, 3\)\), got 4"):
        layer.columns([4])
    with pytest.raises(ValueError, match="'entropy' was not recorded"):
        layer.entropy()
    mean = foci.Record.from_steps([seen, seen])
    torch.testing.assert_close(mean.image_map("shoe"), lazy.image_map("shoe"))


def test_quadrants_and_blocks_of_text_and_image() -> None:
    torch.manual_seed(0)
    labels = foci.Labels.tokens([["a", " shoe", *[""] * 4]])
    labels = labels.with_segments([foci.Segment("patches", start=2, rows=2, columns=2)])
    matrix = torch.rand(1, 3, 6, 6).softmax(-1)
    layer = foci.Record.from_tensors([matrix], labels)["L0"]
    shares = layer.quadrants()
    assert list(shares) == ["text->text", "text->image", "image->text", "image->image"]
    torch.testing.assert_close(shares["text->image"], matrix[0, :, :2, 2:].sum(-1).mean(-1))
    torch.testing.assert_close(shares["image->text"] + shares["image->image"], torch.ones(3))
    torch.testing.assert_close(layer.block("image", "text"), matrix[0, :, 2:, :2])
    with pytest.raises(ValueError, match="queries must be 'text' or 'image' for L0, got 'sound'"):
        layer.block("sound", "text")
    with pytest.raises(ValueError, match="limit must be at least the 96 bytes"):
        layer.block("image", "text", limit=95)
    with pytest.raises(ValueError, match="labels of text and image"):
        foci.Record.from_tensors([matrix])["L0"].quadrants()


def test_a_saved_record_keeps_its_steps(tmp_path: Path) -> None:
    seen = make_record()
    seen.save(tmp_path / "a.foci")
    loaded = foci.load(tmp_path / "a.foci")
    assert loaded.steps == STEPS
    torch.testing.assert_close(loaded.image_map("shoe", step=1), seen.image_map("shoe", step=1))
    seen.mean("steps").save(tmp_path / "b.foci")
    mean = foci.load(tmp_path / "b.foci")
    assert mean.steps == 1
    torch.testing.assert_close(mean.image_map("shoe"), seen.image_map("shoe"))


def test_wrong_arguments_are_refused() -> None:
    seen = make_record()
    plain = foci.Record.from_tensors(make_matrices())
    for step in (STEPS, -STEPS - 1, "last", True):
        with pytest.raises(ValueError, match=rf"step must be from -{STEPS} to {STEPS - 1}, got"):
            seen.at(step=step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"step must be from -1 to 0, got 1: the record has no denoising steps"):
        plain.at(step=1)
    assert plain.at(step=0)["L0"].shape == plain["L0"].shape
    with pytest.raises(ValueError, match="over must be 'steps', got 'heads'"):
        seen.mean("heads")
    with pytest.raises(ValueError, match=r"query must be a word of the text \(a red shoe\) or a position, got 'boot'"):
        seen.image_map("boot")
    with pytest.raises(ValueError, match=r"step must be from -4 to 3, got 4"):
        seen.image_map("shoe", step=4)
    with pytest.raises(ValueError, match="direction must be one of 'text->image', 'image->text', got 'up'"):
        seen.image_map("shoe", direction="up")
    with pytest.raises(ValueError, match="direction must be 'image->text' for a record whose text attends to no image"):
        seen.image_map("shoe", direction="text->image")
    with pytest.raises(ValueError, match="layer must not be 'rollout'"):
        seen.image_map("shoe", layer="rollout")
    with pytest.raises(ValueError, match="records must be at least one record, got none"):
        foci.Record.from_steps([])
    with pytest.raises(ValueError, match="steps must have one shape"):
        Layer("x", steps={0: Layer("x", matrix=torch.ones(1, 1, 1, 1)), 1: Layer("x", matrix=torch.ones(1, 1, 2, 2))})
    with pytest.raises(ValueError, match="keys must be 'text' or None, got 'image'"):
        foci.Keep(keys="image")
    with pytest.raises(ValueError, match="keys and queries must be given without other arguments"):
        foci.Keep(keys="text", top=3)
