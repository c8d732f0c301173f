"""Models of transformers that read text and sound: the frames among their tokens, with their times."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foci
from foci.capture.huggingface.sounds import find_sound_segments
from tests.capture.architectures import ARCHITECTURES
from tests.capture.audio_language import AUDIO, CASES, VIDEO, Case

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def no_warnings_of_unseen_towers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "foci.watch could not record")
        yield


def build(name: str) -> tuple[Case, nn.Module]:
    torch.manual_seed(0)
    return CASES[name], CASES[name].build(transformers).eval()


def watch(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> foci.Record:
    with foci.watch(model, **options) as seen, torch.no_grad():
        model(**inputs)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_frames_are_found_among_the_tokens(name: str) -> None:
    case, model = build(name)
    inputs = case.inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
    with foci.watch(model) as seen, torch.no_grad():
        out = model(**inputs).logits
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    (segment,) = seen.labels["input"].segments
    assert (segment.kind, segment.start, segment.columns) == ("frames", 2, case.tokens)
    assert segment.seconds == pytest.approx(case.seconds)
    last = (case.tokens - 1) * case.seconds
    texts = ["5", "6", "0.00s", f"{case.seconds:.2f}s", f"{last:.2f}s", "7", "8", "9"]
    row = seen.labels["input"].texts[0]
    assert [*row[:4], *row[-4:]] == texts
    assert [*seen.layers.values()][-1].shape[-2:] == (5 + case.tokens, 5 + case.tokens)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.states])
def test_states_of_an_audio_tower_have_times(name: str) -> None:
    case, model = build(name)
    seen = watch(model, case.inputs())
    towers = [layer for layer in seen.layers.values() if "audio_tower" in layer.name]
    start = 0.0
    for layer, (length, seconds) in zip(towers, case.states, strict=True):
        labels = seen.labels[layer.keys]
        assert (labels.kind, len(labels), layer.shape[-1]) == ("frames", length, length)
        assert labels.seconds == pytest.approx(seconds)
        assert labels.texts[0][1] == f"{start + seconds:.2f}s"
        start += length * seconds


@pytest.mark.parametrize("name", ["qwen2_audio", "voxtral", "gemma3n"])
def test_the_spectrogram_is_kept_with_low_sounds_at_the_bottom(name: str) -> None:
    case, model = build(name)
    inputs = case.inputs()
    features = torch.zeros_like(inputs["input_features"])
    # The lowest band of 100 to 120 ms, in either layout.
    (features if features.shape[1] == 8 else features.transpose(1, 2))[0, 0, 10:12] = 1.0
    seen = watch(model, inputs | {"input_features": features})
    labels = seen.labels["input"]
    picture = labels.pictures[labels.segments[0].picture]
    assert picture[..., 0].nonzero().tolist() == [[7, 10], [7, 11]]


def test_generated_text_follows_the_frames() -> None:
    case, model = build("qwen2_audio")
    with foci.watch(model) as seen, torch.no_grad():
        out = model.generate(**case.inputs(), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    labels = seen.labels["input"]
    assert [each.start for each in labels.segments] == [2]
    assert len(labels) == out.shape[1] - 1


def test_a_second_text_in_the_block_has_frames_of_its_own() -> None:
    case, model = build("audioflamingo3")
    with foci.watch(model) as seen, torch.no_grad():
        model(**case.inputs())
        model(**case.inputs())
    assert len(seen.labels["input"].segments) == len(seen.labels["input#2"].segments) == 1
    assert {layer.keys for layer in seen.layers.values()} == {"frames", "input", "input#2"}


def test_given_labels_of_the_states_are_kept() -> None:
    case, model = build("voxtral")
    given = foci.Labels.tokens([[f"part {i}" for i in range(20)]])
    seen = watch(model, case.inputs(), labels={"frames": given})
    assert seen.labels["frames"] is given


def find(ids: list[int], model_type: str = "qwen2_audio", **inputs: Any) -> list[foci.Segment]:
    config = SimpleNamespace(model_type=model_type, audio_token_id=AUDIO, video_token_id=VIDEO)
    segments, _ = find_sound_segments(config, torch.tensor([ids]), inputs)
    return segments


def test_neighboring_audio_tokens_are_a_recording() -> None:
    first, second = find([AUDIO, AUDIO, 7, 8, AUDIO, AUDIO, AUDIO])
    assert [(each.start, each.columns, each.image) for each in (first, second)] == [(0, 2, 0), (4, 3, 1)]
    assert second.texts() == ["0.00s", "0.04s", "0.08s"]


def test_the_sound_of_a_video_goes_on_after_its_frames() -> None:
    ids = [VIDEO, AUDIO, AUDIO, VIDEO, VIDEO, AUDIO, 7, AUDIO, AUDIO]
    first, second, other = find(ids, "qwen2_5_omni_thinker")
    assert (first.texts(), second.texts(), other.texts()) == (["0.00s", "0.04s"], ["0.08s"], ["0.00s", "0.04s"])
    assert [each.image for each in (first, second, other)] == [0, 0, 1]


def test_an_unknown_model_has_frames_without_times() -> None:
    (segment,) = find([5, AUDIO, AUDIO, AUDIO], "another_model")
    assert segment.seconds is None
    assert segment.texts() == ["0", "1", "2"]


def test_a_token_that_stands_for_a_whole_recording_is_no_frame() -> None:
    assert find([5, AUDIO, 6, AUDIO]) == []


def test_a_recording_in_several_rows_is_joined() -> None:
    config = SimpleNamespace(model_type="voxtral", audio_token_id=AUDIO)
    ids = torch.tensor([[AUDIO] * 10 + [5] + [AUDIO] * 5])
    features = torch.arange(3.0)[:, None, None].expand(3, 8, 40)
    segments, pictures = find_sound_segments(config, ids, {"input_features": features})
    assert [each.picture for each in segments] == [0, 1]
    assert [picture.shape[1] for picture in pictures] == [80, 40]


def test_frames_by_hand() -> None:
    text = foci.Labels.tokens([["Hear", "<a>", "<a>", "!"]])
    seen = foci.Record.from_tensors([torch.eye(4).view(1, 1, 4, 4)], tokens=text)
    seen.label(text.with_segments([foci.Segment("frames", start=1, columns=2, seconds=0.5)]))
    assert seen.labels["input"].texts == (("Hear", "0.00s", "0.50s", "!"),)
    with pytest.raises(ValueError, match="segments must lie within 1 sequences of 4 positions, got positions 3 to 4"):
        text.with_segments([foci.Segment("frames", start=3, columns=2, seconds=0.5)])


def test_the_first_frame_survives_a_file(tmp_path: Any) -> None:
    text = foci.Labels.tokens([["<a>", "<a>"]]).with_segments([foci.Segment("frames", columns=2, frame=3, seconds=0.5)])
    seen = foci.Record.from_tensors([torch.eye(2).view(1, 1, 2, 2)], tokens=text)
    seen.save(tmp_path / "a.foci")
    loaded = foci.load(tmp_path / "a.foci").labels["input"]
    assert loaded.texts == (("1.50s", "2.00s"),)
    assert loaded.segments == (replace(text.segments[0]),)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
ENCODERS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...], float]] = {
    "parakeet": (
        "ParakeetEncoder",
        "ParakeetEncoderConfig",
        {"num_mel_bins": 16, "subsampling_conv_channels": 8},
        (1, 80, 16),
        0.08,
    ),
    "wav2vec2-bert": (
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        {"feature_projection_input_dim": 16},
        (1, 40, 16),
        0.02,
    ),
    # Two neighboring states are joined.
    "sew": (
        "SEWModel",
        "SEWConfig",
        {
            "conv_dim": (8, 8),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
        (1, 800),
        20 / 16000,
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_states_of_an_encoder_have_times(name: str) -> None:
    model, config, sizes, shape, seconds = ENCODERS[name]
    built = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **sizes)).eval()
    seen = watch(built, {built.main_input_name: torch.randn(shape)})
    labels = seen.labels["frames"]
    assert (labels.kind, len(labels)) == ("frames", seen["L0"].shape[-1])
    assert labels.seconds == pytest.approx(seconds)


def test_patches_of_a_spectrogram() -> None:
    architecture = ARCHITECTURES["audio-spectrogram"]
    model = transformers.ASTModel(transformers.ASTConfig(**architecture.sizes)).eval()
    # 24 columns of 16 bands: 3 patches of 8 x 8 side by side, in 2 rows.
    values = torch.zeros(1, 24, 16)
    values[0, 20, 3] = 1.0
    seen = watch(model, {"input_values": values})
    labels = seen.labels["frames"]
    assert (labels.kind, labels.grid, labels.texts[0][:3]) == (
        "patches",
        (2, 3),
        ("class token", "distillation token", "0,0"),
    )
    assert labels.images[0, ..., 0].nonzero().tolist() == [[3, 20]]
    assert seen.image_map("class token").shape == (2, 3)
