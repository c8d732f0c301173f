"""Vision-language models under `foci.watch`: which positions are which patches, and the maps of words."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import foci
from foci.capture.errors import CaptureError
from foci.record.dense import MAX_STRIP_ENTRIES
from foci.record.labels import Segment
from foci.record.layer import Layer
from tests.allocation import LargestTensor
from tests.capture.vision_language import CASES, IMAGE, VIDEO, Case, to_merged_patches

transformers = pytest.importorskip("transformers")

FAMILIES = [pytest.param(case, id=name) for name, case in CASES.items()]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build(transformers).eval()


def record(model: nn.Module, inputs: dict[str, Any], **options: Any) -> tuple[foci.Record, Any]:
    with foci.watch(model, **options) as seen, torch.no_grad():
        out = model(**inputs)
    return seen, out


def language_layers(seen: foci.Record) -> list[Any]:
    return [layer for layer in seen.layers.values() if layer.queries == "input"]


def cell_of(segment: Segment, row: float, column: float) -> tuple[int, int] | None:
    """The patch of a segment at a place of the picture, given as parts of height and width."""
    top, left, bottom, right = segment.box
    if not (top <= row < bottom and left <= column < right):
        return None
    return int((row - top) / (bottom - top) * segment.rows), int((column - left) / (right - left) * segment.columns)


@pytest.mark.parametrize("case", FAMILIES)
def test_patches_are_found_and_lie_where_they_are_in_the_picture(case: Case) -> None:
    model = build(case)
    plain, marked = (record(model, case.inputs(case.draw(is_marked)))[0] for is_marked in (False, True))
    labels = plain.labels["input"]
    assert [(each.rows, each.columns) for each in labels.segments] == case.grids
    assert all(each.image == 0 and each.picture == 0 for each in labels.segments)
    covered = sorted(p for each in labels.segments for p in each.positions.flatten().tolist())
    assert {case.ids[position] for position in covered} == {IMAGE}
    assert len(set(covered)) == len(covered)
    # The values of the first layer come from the embeddings: those of the marked patch change most.
    first, second = (language_layers(seen)[0].values for seen in (plain, marked))
    change = (first - second).norm(dim=-1).mean((0, 1))
    (row, column), (height, width) = case.spot, case.picture
    place = (row + 1) / height, (column + 1) / width
    found = [(segment, cell_of(segment, *place)) for segment in labels.segments]
    assert any(cell is not None for _, cell in found)
    for segment, cell in found:
        if cell is not None:
            changes = change[segment.positions]
            assert divmod(int(changes.argmax()), segment.columns) == cell, segment


@pytest.mark.parametrize("case", FAMILIES)
def test_maps_equal_those_of_eager_attention(case: Case) -> None:
    # In float64: random towers give nearly constant states, whose norms magnify rounding errors.
    model, inputs = build(case).double(), case.inputs(case.draw().double())
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation("eager")
        eager = model(**inputs, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
    seen, out = record(model, inputs)
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)
    layers = language_layers(seen)
    assert len(layers) == len(eager) == 2
    last, segments = len(case.ids) - 1, seen.labels["input"].segments
    finest = max(segments, key=lambda each: each.rows * each.columns)
    for index, weights in enumerate(eager):
        each = seen.image_map(last, layer=layers[index].name, head="each")
        on_image = torch.cat([weights[0, :, last, s.positions.flatten()] for s in segments], -1)
        torch.testing.assert_close(each.sum((-2, -1)), on_image.float().sum(-1), rtol=1e-5, atol=1e-6)
        if len(segments) == 1:
            torch.testing.assert_close(each, weights[0, :, last, finest.positions].float(), rtol=1e-5, atol=1e-6)
    mean = torch.stack([weights[0, :, last].mean(0) for weights in eager]).mean(0).float()
    assert seen.image_map(last).shape == seen.image_map(last, layer="each").shape[1:]
    torch.testing.assert_close(
        seen.image_map(last).sum(), torch.stack([mean[s.positions].sum() for s in segments]).sum(), rtol=1e-5, atol=1e-6
    )


def test_tiles_and_the_whole_image_are_added_where_they_lie() -> None:
    """Two rows of three tiles with 2 x 2 patches, and the whole image with 2 x 2 patches: a map of 4 x 6."""
    case = CASES["internvl"]
    seen, _ = record(build(case), case.inputs(case.draw()))
    last = len(case.ids) - 1
    rows = [layer[0, :, last].mean(0) for layer in language_layers(seen)]
    weights = torch.stack(rows).mean(0)
    expected = torch.zeros(4, 6)
    for number, start in enumerate(range(2, 26, 4)):
        top, left = divmod(number, 3)
        expected[2 * top : 2 * top + 2, 2 * left : 2 * left + 2] += weights[start : start + 4].view(2, 2)
    # A patch of the whole image covers 2 x 3 patches of the tiles.
    expected += weights[26:30].view(2, 2).repeat_interleave(2, 0).repeat_interleave(3, 1) / 6
    torch.testing.assert_close(seen.image_map(last), expected)


def test_several_images_generated_words_and_the_processor() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], **options: Any) -> str:
            return "".join(f" w{each}" for each in ids)

    class Processor:
        tokenizer = Tokenizer()
        image_mean, image_std = [0.5] * 3, [0.5] * 3

    case = CASES["llava"]
    model = build(case)
    pictures = torch.stack([case.draw(), -case.draw().clamp(-1, 1)])
    ids = torch.tensor([[1, *[IMAGE] * 16, 5, *[IMAGE] * 16, 7, 8]])
    with foci.watch(model, processor=Processor()) as seen, torch.no_grad():
        answer = model.generate(ids, pixel_values=pictures, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    labels = seen.labels["input"]
    assert [(each.start, each.image, each.picture) for each in labels.segments] == [(1, 0, 0), (18, 1, 1)]
    expected = ((-pictures[1] * -0.5 + 0.5).clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    assert torch.equal(labels.pictures[1], expected)
    word = f"w{int(answer[0, -3])}"
    assert labels.texts[0][36:] == (f" {word}", f" w{int(answer[0, -2])}")
    generated = torch.stack([layer[0, :, 36].mean(0) for layer in language_layers(seen)]).mean(0)
    found = seen.image_map(f"{word}#{1 + sum(f' {word}' == text for text in labels.texts[0][:36])}", image=1)
    torch.testing.assert_close(found, generated[18:34].view(4, 4))
    assert seen.image_map("w7", image=1, upsample=True).shape == (16, 16)
    with pytest.raises(ValueError, match="image must be from 0 to 1, got 2"):
        seen.image_map("w7", image=2)


def test_answers_of_a_beam_search_are_read_in_one_pass() -> None:
    """Beam search reorders the cache, so its steps are refused; a pass over its answers has the images of each."""
    case = CASES["llava"]
    model, inputs = build(case), case.inputs(case.draw())
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, "do_sample": False}
    with (
        pytest.raises(CaptureError, match=r"beam search.*watch one forward pass"),
        foci.watch(model),
        torch.no_grad(),
    ):
        answers = model.generate(**inputs, **options)
    answers = model.generate(**inputs, **options)
    pixels = inputs["pixel_values"].repeat(3, 1, 1, 1)
    seen, _ = record(model, {"input_ids": answers, "pixel_values": pixels})
    alone, _ = record(model, {"input_ids": answers[2:], "pixel_values": pixels[:1]})
    last = answers.shape[1] - 1
    torch.testing.assert_close(seen.image_map(last, batch=2), alone.image_map(last))


def test_a_model_copied_inside_of_a_block_encodes_its_own_images() -> None:
    case = CASES["llava"]
    model = build(case)
    with foci.watch(model), torch.no_grad():
        copied = copy.deepcopy(model)
    nn.init.zeros_(copied.model.multi_modal_projector.linear_2.weight)
    nn.init.zeros_(copied.model.multi_modal_projector.linear_2.bias)
    assert "get_image_features" not in vars(model.model)
    with torch.no_grad():
        features = copied.model.get_image_features(pixel_values=case.draw()[None])
    assert float(torch.cat(list(features.pooler_output)).abs().max()) == 0


def test_videos_have_frames() -> None:
    case = CASES["qwen2-vl"]
    model = build(case)
    frames = torch.randn(2, 2, 3, 16, 24)
    ids = torch.tensor([[1, 5, *[VIDEO] * 12, 7, 8]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == VIDEO).long(),
        "pixel_values_videos": to_merged_patches(frames),
        "video_grid_thw": torch.tensor([[2, 4, 6]]),
    }
    seen, _ = record(model, inputs)
    labels = seen.labels["input"]
    assert [(each.frame, each.rows, each.columns, each.picture) for each in labels.segments] == [
        (0, 2, 3, 0),
        (1, 2, 3, 1),
    ]
    weights = torch.stack([layer[0, :, 15].mean(0) for layer in language_layers(seen)]).mean(0)
    torch.testing.assert_close(seen.image_map(15), weights[2:14].view(2, 2, 3))
    assert labels.picture(frame=1) is not None
    assert labels.pictures[1].shape == (16, 24, 3)
    # The picture of a frame is put together again from its patches.
    second = frames[1, 0] - frames[1, 0].min()
    assert torch.equal(labels.pictures[1], (second / second.max() * 255).round().byte().permute(1, 2, 0))


def test_the_tower_of_qwen_reads_squares_of_patches() -> None:
    case = CASES["qwen2-vl"]
    seen, _ = record(build(case), case.inputs(case.draw()))
    labels = seen.labels["patches"]
    assert labels.texts[0][:6] == ("0,0", "0,1", "1,0", "1,1", "0,2", "0,3")
    layer = next(layer for layer in seen.layers.values() if layer.queries == "patches")
    row = layer[0, :, 3].mean(0)
    found = seen.image_map("2,4", layer=layer.name)
    position = labels.texts[0].index("2,4")
    assert found.shape == (4, 6)
    assert found[1, 2] == layer[0, :, position].mean(0)[labels.texts[0].index("1,2")]
    assert row.shape == (24,)


def test_a_tower_with_windows_has_patches_where_it_attends_to_the_whole_image() -> None:
    case = CASES["qwen2.5-vl"]
    model = build(case)
    plain, marked = (record(model, case.inputs(case.draw(is_marked)))[0] for is_marked in (False, True))
    labels = plain.labels["patches"]
    assert labels.texts[0][:4] == ("0,0", "0,1", "1,0", "1,1")
    assert labels.texts[0][8:12] == ("2,0", "2,1", "3,0", "3,1")
    first, second = (seen.layers["model.visual.blocks.1.attn"].values for seen in (plain, marked))
    position = int((first - second).norm(dim=-1).mean((0, 1)).argmax())
    assert labels.texts[0][position] == "{},{}".format(*(number // 4 for number in case.spot))
    assert plain.image_map("2,4", layer="model.visual.blocks.1.attn").shape == (6, 8)
    assert sum("attends in windows" in note for note in plain.notes) == 1


def test_the_tower_of_llama_4_reads_tiles_with_the_class_token_last() -> None:
    case = CASES["llama4"]
    model, images = build(case), [case.inputs(case.draw(is_marked)) for is_marked in (False, True)]
    plain, marked = (record(model, inputs)[0] for inputs in images)
    labels, name = plain.labels["patches"], "vision_model.model.layers.0.self_attn"
    tiles = len(images[0]["pixel_values"])
    assert labels.batch == tiles == plain.layers[name].shape[0]
    assert {row[-1] for row in labels.texts} == {"class token"}
    changes = (plain.layers[name].values - marked.layers[name].values).norm(dim=-1).mean(1)
    pixels = (images[0]["pixel_values"] - images[1]["pixel_values"]).abs().sum(1)
    size = model.config.vision_config.patch_size
    changed = [tile for tile in range(tiles) if pixels[tile].any()]
    assert changed
    for tile in changed:
        blocks = pixels[tile].unflatten(1, (-1, size)).unflatten(0, (-1, size)).sum((1, 3))
        row, column = divmod(int(blocks.argmax()), blocks.shape[1])
        assert labels.texts[tile][int(changes[tile].argmax())] == f"{row},{column}"
    assert plain.image_map("class token", layer=name, batch=tiles - 1).shape == blocks.shape
    assert labels.picture(tiles - 1, 0) is not None


def test_images_that_do_not_fit_their_tokens_are_left_as_tokens() -> None:
    from foci.capture.huggingface.images import find_segments

    config = build(CASES["llava"]).config
    inputs = dict.fromkeys(("image_grid_thw", "image_sizes", "pixel_values_videos", "video_grid_thw"))
    pixels = torch.zeros(1, 3, 16, 16)
    for ids in ([IMAGE] * 15, [IMAGE] * 8 + [5] + [IMAGE] * 8):
        assert find_segments(config, torch.tensor([ids]), inputs | {"pixel_values": pixels}, None) == ([], [])
    with_class = find_segments(config, torch.tensor([[IMAGE] * 17]), inputs | {"pixel_values": pixels}, None)[0]
    assert [(each.start, each.rows, each.columns) for each in with_class] == [(1, 4, 4)]


def test_sixteen_frames_of_a_thousand_patches() -> None:
    """A map of one word needs its row only: the matrix would have 256 million entries per head."""
    frames, rows, columns, text = 16, 25, 40, 8
    length = frames * rows * columns + text
    q, k = (torch.randn(1, 2, length, 8) for _ in range(2))
    _, weights = foci.attention(q, k, k, mask=foci.causal, return_weights=True)
    segments = [Segment("patches", 0, f * rows * columns, rows, columns, frame=f) for f in range(frames)]
    labels = foci.Labels.positions(1, length).with_segments(segments)
    labels = foci.Labels("tokens", labels.texts, segments=labels.segments)
    seen = foci.Record.from_tensors([weights], labels)
    found = seen.image_map(length - 1)
    assert found.shape == (frames, rows, columns)
    exact = (q[0, :, -1:] @ k[0].mT / 8**0.5).softmax(-1).mean(0)[0, :-text]
    torch.testing.assert_close(found.flatten(), exact, rtol=1e-3, atol=1e-7)
    with LargestTensor() as memory:
        words = dict(seen.words_for((0, 0, 0.2, 0.5)))
    # A strip of rows; the matrix would have 2 x 16,008 x 16,008 entries.
    assert memory.largest <= 2 * MAX_STRIP_ENTRIES
    assert memory.peak < 2**27
    inside = exact.view(frames, rows, columns)[:, :5, :20].sum()
    assert words[str(length - 1)] == pytest.approx(float(inside), rel=1e-3)


def test_a_long_text_that_many_patches_read() -> None:
    """The patches attend to the text, as in a diffusion model: the columns of the words are read in strips."""
    frames, rows, columns, text = 16, 25, 40, 1000
    count = frames * rows * columns
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, count, 8), torch.randn(1, 2, text, 8)
    _, weights = foci.attention(q, k, k, return_weights=True)
    layer = Layer("cross", "", 0, queries="video", keys="prompt", weights=weights)
    segments = [Segment("patches", 0, f * rows * columns, rows, columns, frame=f) for f in range(frames)]
    video = foci.Labels("patches", (("",) * count,)).with_segments(segments)
    prompt = foci.Labels.tokens([[f" word{number}" for number in range(text)]])
    seen = foci.Record({"cross": layer}, {"video": video, "prompt": prompt})
    with LargestTensor() as memory:
        words = dict(seen.words_for((0, 0, 0.2, 0.5)))
    # 32 million entries would be the matrix of both heads.
    assert memory.largest <= 2 * MAX_STRIP_ENTRIES
    chosen = q[0].view(2, frames, rows, columns, 8)[:, :, :5, :20].flatten(1, 3)
    exact = (chosen @ k[0].mT / 8**0.5).softmax(-1).mean((0, 1))
    torch.testing.assert_close(torch.tensor([words[f"word{number}"] for number in range(text)]), exact)
