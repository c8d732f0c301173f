"""Speech: tones in a row are written down as words; tables, what is wrong with them, and what is heard when."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.inputs.audio_augmentation import change_duration
from foci.nn.speech import SpeechEncoder
from foci.tasks.speech import Recording, Speech, error_rates
from foci.tasks.speech_features import (
    SpeechSettings,
    compute_features,
    compute_log_mel,
    join_recordings,
    load_recording,
)
from tests.inputs.test_audio import write_wav
from tests.tasks.lessons import Lesson, lesson

RATE = 4000
TONES = {"low": 300.0, "middle": 700.0, "high": 1500.0}
SMALL = (
    *("task.size=tiny", "task.width=48", "task.layers=1", "task.decoder_layers=1", "task.heads=2", "task.halvings=1"),
    *("task.tokenizer=words", "task.rate=4000", "task.bands=16", "task.hop=0.02", "task.dropout=0.0", "task.beam=2"),
    *("task.max_tokens=6", "task.longest_mask=2", "task.widest_mask=2", "task.speed=0.05", "task.voice=0.02"),
    *("train.batch_tokens=800", "train.steps=120", "train.rate=0.004"),
)


def sung(words: list[str], chance: random.Random) -> Tensor:
    """Each word is a tone of its own, longer or shorter, with a pause after it."""
    parts = [torch.zeros(200)]
    for word in words:
        times = torch.arange(round(RATE * chance.uniform(0.08, 0.14))) / RATE
        tone = torch.sin(2 * math.pi * TONES[word] * chance.uniform(0.95, 1.05) * times)
        parts += [chance.uniform(0.1, 0.9) * tone, torch.zeros(round(RATE * 0.06))]
    return torch.cat(parts)


def recorded(folder: Path, count: int, seed: int) -> Path:
    """Wav files and a table of them."""
    chance, lines = random.Random(seed), ["sound\ttext"]
    (folder / "sounds").mkdir(parents=True)
    for number in range(count):
        words = [chance.choice(list(TONES)) for _ in range(chance.randint(1, 3))]
        write_wav(folder / "sounds" / f"{number}.wav", sung(words, chance), RATE)
        lines.append(f"sounds/{number}.wav\t{' '.join(words)}")
    table = folder / "table.tsv"
    table.write_text("\n".join(lines) + "\n")
    return table


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    folder = tmp_path_factory.mktemp("tones")
    return lesson("speech", folder, recorded(folder / "a", 150, 1), recorded(folder / "b", 50, 2), *SMALL)


def test_tones_are_transcribed(learned: Lesson) -> None:
    assert learned.before > 70.0
    assert learned.after < 10.0


def test_ctc_and_decoder_both_learn(learned: Lesson) -> None:
    """The choice between them can hide that one has learned nothing."""
    task, model, _ = learned.trained
    assert isinstance(task, Speech)
    assert isinstance(model, SpeechEncoder)
    for alone in ("decoder", "ctc"):
        told = [proposals(task, model, each, alone) for each in learned.dev]
        assert float(task.score(told, learned.dev)["wer"]) < 50.0, alone


def proposals(task: Speech, model: SpeechEncoder, example: Recording, alone: str) -> str:
    from foci.decoding import generate
    from foci.nn.speech import read_ctc

    with torch.no_grad():
        frames = task.frames(example)
        if alone == "ctc":
            found = read_ctc(model(frames[None]).ctc)[0]
        else:
            found = generate(model, frames, start=1, stop=2, new_tokens=6)[0].tokens
    return task.tokenizer.decode(found)


def test_answers_keep_the_order_of_the_recordings(learned: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    task, model, _ = learned.trained
    with torch.no_grad():
        together = task.decode(model, learned.dev[:12])
        monkeypatch.setattr("foci.tasks.speech.DECODE_FRAMES", 1)
        alone = task.decode(model, learned.dev[:12])
    assert together == alone


@pytest.mark.parametrize("least", [0, 1, 3])
def test_an_answer_has_at_least_min_tokens(least: int, learned: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    """CTC hears nothing, and the shortest answer would win; where none is long enough, it does."""
    task, model, _ = learned.trained
    assert isinstance(task, Speech)
    monkeypatch.setattr(task, "settings", replace(task.settings, min_tokens=least))
    monkeypatch.setattr("foci.tasks.speech.read_ctc", lambda logits, lengths, blank: [[] for _ in logits])
    monkeypatch.setattr(
        task, "rescore", lambda model, frames, ctc, candidates: -torch.tensor([len(each) for each in candidates])
    )
    short = [each for each in learned.dev if len(each.text.split()) < 3]
    with torch.no_grad():
        counts = [len(answer.split()) for answer in task.decode(model, short)]
    assert counts == [0] * len(short) if least == 0 else min(counts) >= 1 if least == 1 else 0 in counts


def test_a_recording_can_keep_its_mean_spectrum(tmp_path: Path) -> None:
    """A steady tone is nothing but its mean spectrum."""
    low, high = (torch.sin(2 * math.pi * pitch * torch.arange(4000) / RATE) for pitch in (300.0, 1500.0))
    for colour in (False, True):
        settings = SpeechSettings(rate=RATE, bands=16, colour=colour)
        apart = (compute_features(low, settings) - compute_features(high, settings))[5:-5].square().mean().sqrt()
        assert (float(apart) > 1.0) == colour


def test_a_dynamic_range_hides_quiet_noise() -> None:
    torch.manual_seed(0)
    loud = torch.sin(torch.arange(4000) / 4)
    spoken = torch.cat([loud, torch.zeros(2000)])
    noisy = spoken + 1e-4 * torch.randn(6000)
    for dynamic_range, limit in ((0.0, 1e9), (8.0, 0.1)):
        settings = SpeechSettings(rate=8000, bands=48, colour=True, dynamic_range=dynamic_range)
        features = [compute_features(each, settings) for each in (spoken, noisy)]
        changed = float((features[0] - features[1]).abs().max())
        assert changed < limit
        assert dynamic_range > 0.0 or changed > 1.0
        assert float(features[0].max() - features[0].min()) <= (dynamic_range or 100.0) + 1e-4


def test_smooth_bands_hide_the_pitch() -> None:
    """Two voices that differ only in the distance of their harmonics."""
    times = torch.arange(4000) / 8000
    low, high = (
        torch.stack([torch.sin(2 * math.pi * each * times) for each in range(pitch, 3900, pitch)]).sum(0)
        for pitch in (200, 228)
    )
    apart = []
    for cosines in (0, 8):
        settings = SpeechSettings(rate=8000, bands=48, colour=True, cosines=cosines)
        first, second = (compute_features(each, settings)[10:-10] for each in (low, high))
        assert first.shape[1] == 48
        apart.append(float((first - second).square().mean() / first.var()))
    assert apart[1] < apart[0] / 3


def test_bands_begin_at_the_lowest_frequency() -> None:
    """Below it, a tone is as silent as nothing."""
    hum = torch.sin(2 * math.pi * 50.0 * torch.arange(4000) / RATE)
    loudest = [
        float(compute_log_mel(hum, SpeechSettings(rate=RATE, bands=16, lowest=lowest))[5:-5].max())
        for lowest in (20.0, 300.0)
    ]
    assert loudest[0] > loudest[1] + 8.0


def test_recordings_are_joined() -> None:
    frames = [torch.full((length, 2), float(length)) for length in (1, 2, 3)]
    texts = [[1], [2, 2], [3]]
    longer, said = join_recordings(frames, texts, 1.0, torch.Generator().manual_seed(1))
    for own, text, whole, words in zip(frames, texts, longer, said, strict=True):
        other = whole[len(own) :]
        assert torch.equal(whole[: len(own)], own)
        assert words == [*text, *texts[len(other) - 1]]
        assert torch.equal(other, frames[len(other) - 1])
    same, kept = join_recordings(frames, texts, 0.0, torch.Generator())
    assert all(map(torch.equal, same, frames))
    assert kept == texts


def test_each_part_of_a_recording_of_single_words_is_answered(
    learned: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that answers every recording with one word answers each part between pauses."""
    task, model, _ = learned.trained
    words = list(TONES)[:3]
    sounds = [sung([word], random.Random(0)) for word in words]
    pause = torch.zeros(RATE // 2)
    write_wav(tmp_path / "one.wav", sounds[0], RATE)
    write_wav(tmp_path / "three.wav", torch.cat([sounds[0], pause, sounds[1], pause, sounds[2]]), RATE)
    one, three = (task.parse_input(str(tmp_path / f"{name}.wav")) for name in ("one", "three"))
    whole = task.transcribe
    monkeypatch.setattr(task, "transcribe", lambda model, frames: [row[:1] for row in whole(model, frames)])
    single = [row.split()[0] for row in task.decode(model, [one])]
    with torch.no_grad():
        answers = task.decode(model, [three, one])
    assert answers[0].split() == words
    assert answers[1:] == single
    assert task.record_attention(model, one).notes == []
    record = task.record_attention(model, three)
    assert len(record.notes) == 1
    assert record.notes[0].startswith(
        "the recording has 3 parts with pauses between them: each was answered on its own"
    )
    assert record.answer == answers[0]
    assert record["cross.L0"].shape[0] == 3
    source = record.labels["source"]
    assert source.sounds is not None
    assert source.sounds.shape[0] == 3
    assert source.sounds.shape[1] / RATE == pytest.approx(len(source) * source.seconds, abs=0.1)
    starts = [float(row[0]) for row in source.texts]
    assert starts[0] < starts[1] - len(sounds[0]) / RATE < starts[2]


def test_words_that_are_no_answers_are_declined(learned: Lesson, tmp_path: Path) -> None:
    task, model, _ = learned.trained
    assert isinstance(task, Speech)
    answering = Speech(replace(task.settings, answers="high low"), task.tokenizer, task.std.tolist())
    chance = random.Random(3)
    spoken = [(word, write_wav(tmp_path / f"{word}.wav", sung([word], chance), RATE)) for word in TONES]
    examples = {word: answering.parse_input(str(path)) for word, path in spoken}
    with torch.no_grad():
        found = dict(zip(examples, answering.answer(model, list(examples.values())), strict=True))
        nearest = answering.decode(model, [examples["middle"]])
    assert re.fullmatch(r"high \(\d+%\)", found["high"])
    assert re.fullmatch(r"low \(\d+%\)", found["low"])
    assert found["middle"] == f"not one of my classes (the nearest is {nearest[0]})"
    assert nearest[0] in ("high", "low")
    # Without answers any text of the vocabulary is one.
    assert task.answer(model, [examples["middle"]]) == ["middle"]


def test_sounds_are_declined_by_likelihood_or_without_any_change(
    learned: Lesson, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, model, _ = learned.trained
    assert isinstance(task, Speech)
    assert isinstance(model, SpeechEncoder)
    # The other words are exp(-0.3) = 0.74 times as likely as the answers.
    scores = torch.tensor([0.0, -99.0]), torch.tensor([-0.3, -99.0])
    monkeypatch.setattr(Speech, "score_words", lambda self, model, frames: scores)

    def declines(frames: Tensor, decline: float) -> bool:
        settings = replace(task.settings, answers="high low", decline=decline)
        answering = Speech(settings, task.tokenizer, task.std.tolist())
        return answering.judge(model, frames, [answering.answers[0]]).declined

    frames = task.frames(learned.dev[0])
    assert [declines(frames, limit) for limit in (0.7, 0.8, 1.0)] == [True, False, False]
    assert declines(torch.zeros_like(frames), 1000.0)
    with pytest.raises(ValueError, match=r"decline must be between 0\.001 and 1000, got 0\.0"):
        SpeechSettings(decline=0.0)


def test_scores_are_averaged_over_tempos(learned: Lesson) -> None:
    task, model, _ = learned.trained
    assert isinstance(task, Speech)
    assert isinstance(model, SpeechEncoder)
    settings = replace(task.settings, answers="high low", tempo=0.25)
    answering = Speech(settings, task.tokenizer, task.std.tolist())
    frames = answering.frames(learned.dev[0])
    with torch.no_grad():
        answers, others = answering.score_words(model, frames)
        tempos = [frames, change_duration(frames, 1.25), change_duration(frames, 0.8)]
        expected = torch.stack([answering.score_vocabulary(model, each) for each in tempos]).mean(0)
    assert [len(each) / len(frames) for each in tempos[1:]] == pytest.approx([1.25, 0.8], abs=1 / len(frames))
    torch.testing.assert_close(torch.cat([answers, others]), expected)
    assert not torch.equal(expected, answering.score_vocabulary(model, frames))


def test_answers_must_be_words_of_the_vocabulary(learned: Lesson) -> None:
    task = learned.trained[0]
    assert isinstance(task, Speech)
    with pytest.raises(ValueError, match="answers must be words of the vocabulary, got loud quiet"):
        Speech(replace(task.settings, answers="loud high quiet"), task.tokenizer, task.std.tolist())


def test_the_record_has_seconds_and_words(learned: Lesson) -> None:
    task, model, _ = learned.trained
    example = next(each for each in learned.dev if len(each.text.split()) == 2)
    record = task.record_attention(model, example)
    frames = record.labels["source"]
    assert (frames.kind, frames.seconds) == ("frames", 0.04)
    assert frames.texts[0][:3] == ("0.00", "0.04", "0.08")
    words = len((record.answer or "").split())
    assert record["cross.L0H0"].shape == (1, words + 1, len(frames))
    assert record.labels_of(record["cross.L0"])[0].texts[0][-1].strip() == "<stop>"


def test_precomputed_frames_are_used(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    given = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    numpy.save(tmp_path / "a.npy", given.numpy())
    (tmp_path / "table.tsv").write_text("a.npy\tyes\n")
    settings = SpeechSettings(deltas=True)
    examples = Speech.read([tmp_path / "table.tsv"], settings)
    task = Speech.from_examples(settings, examples)
    assert torch.equal(load_recording(examples[0].path, 16_000), given)
    assert task.size(examples[0]) == 20
    batch = task.batch(examples, False, torch.Generator())
    assert batch["frames"].shape == (1, 24, 15)
    assert torch.allclose(batch["frames"][0, :20, :5], (given - given.mean(0)) / given.std(0), atol=1e-5)
    numpy.save(tmp_path / "b.npy", numpy.zeros((4, 3), dtype="float32"))
    with pytest.raises(ValueError, match="must have 15 features per frame, as the training data, got 9"):
        task.frames(Recording(str(tmp_path / "b.npy")))


def test_features_are_augmented_only_in_training(learned: Lesson) -> None:
    task = learned.trained.task
    plain, again = (task.batch(learned.dev[:2], False, torch.Generator())["frames"] for _ in range(2))
    assert torch.equal(plain, again)
    one, same, other = (
        task.batch(learned.dev[:2], True, torch.Generator().manual_seed(seed))["frames"] for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert one.shape != other.shape or not torch.equal(one, other)


@pytest.mark.parametrize(("found", "written"), [(b"'descr'", b"'''desc"), (b"{", b"("), (b"(3, 2)", b"(9, 9)")])
def test_a_damaged_file_of_frames_is_refused(found: bytes, written: bytes, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "frames.npy"
    numpy.save(path, numpy.ones((3, 2), "float32"))
    assert load_recording(str(path), 16_000).tolist() == [[1.0, 1.0]] * 3
    path.write_bytes(path.read_bytes().replace(found, written, 1))
    with pytest.raises(ValueError, match=r"frames.npy must hold frames as floats \(F, M\), but it cannot be read: .+"):
        load_recording(str(path), 16_000)


def test_all_problems_are_reported_line_by_line(tmp_path: Path) -> None:
    write_wav(tmp_path / "fine.wav", torch.ones(800), RATE)
    write_wav(tmp_path / "silent.wav", torch.zeros(800), RATE)
    (tmp_path / "text.wav").write_text("no sound")
    table = tmp_path / "table.tsv"
    table.write_text("fine.wav\tyes\nmissing.wav\tyes\ntext.wav\tyes\nfine.wav\t\nsilent.wav\tno\nalone\n")
    found = [str(each) for each in Speech.check([table], SpeechSettings(rate=RATE))]
    wanted = {
        2: "got no such file",
        3: "text.wav must be a WAV, FLAC or OGG file, got a text file",
        4: "text must not be empty",
        5: "silent.wav is silent",
        6: "a line must have 2 tab-separated columns (sound, text)",
    }
    assert len(found) == len(wanted)
    for told, (line, what) in zip(found, wanted.items(), strict=True):
        assert f"table.tsv:{line}: " in told
        assert what in told
    table.write_text("fine.wav\tyes\nmissing.wav\tyes\n")
    with pytest.raises(ValueError, match=r"table.tsv:2: .*missing.wav must be an audio file, but it does not exist"):
        Speech.read([table], SpeechSettings())


@pytest.mark.parametrize("name", ["ctc", "noise", "join"])
def test_a_fraction_above_one_is_refused(name: str) -> None:
    SpeechSettings().replace(**{name: 1.0})
    with pytest.raises(ValueError, match=rf"task.{name} must be between 0 and 1, got 1.5"):
        SpeechSettings().replace(**{name: 1.5})


@pytest.mark.parametrize("name", ["speed", "voice", "stretch", "dropout", "smoothing"])
def test_a_fraction_of_one_is_refused_where_nothing_would_remain(name: str) -> None:
    for value in (1.0, -0.1):
        with pytest.raises(ValueError, match=rf"task.{name} must be at least 0 and below 1, got {value}"):
            SpeechSettings().replace(**{name: value})


@pytest.mark.parametrize(("share", "heads"), [(0.0, (False, True)), (1.0, (True, False)), (0.5, (True, True))])
def test_the_ctc_weight_decides_which_heads_exist(share: float, heads: tuple[bool, bool], learned: Lesson) -> None:
    task = Speech(learned.trained.task.settings.replace(ctc=share), learned.trained.task.tokenizer, [1.0] * 16)
    model = task.model()
    assert isinstance(model, SpeechEncoder)
    assert (model.ctc is not None, model.decoder is not None) == heads
    loss, count = task.loss(model, task.batch(learned.dev[:3], True, torch.Generator()))
    assert bool(loss.isfinite())
    assert int(count) == sum(len(each.text.split()) + 1 for each in learned.dev[:3])


def test_error_rates_equal_those_of_jiwer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jiwer")
    chance = random.Random(1)
    pairs = [[[chance.choice(list(TONES)) for _ in range(chance.randint(1, 8))] for _ in range(2)] for _ in range(50)]
    texts, said = ([" ".join(pair[side]) for pair in pairs] for side in range(2))
    said[7] = ""
    counted = error_rates(texts, said)
    monkeypatch.setitem(__import__("sys").modules, "jiwer", None)
    alone = error_rates(texts, said)
    assert (counted[2], alone[2]) == ("jiwer", "edits")
    assert counted[:2] == pytest.approx(alone[:2])
    assert 0.3 < alone[0] < 1.0


def test_a_long_recording_is_truncated_to_its_beginning(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    settings = SpeechSettings(size="tiny", halvings=0, width=16, heads=2, layers=1, ctc=1.0)
    paths = [tmp_path / name for name in ("long.npy", "beginning.npy", "short.npy")]
    frames = numpy.random.default_rng(1).normal(size=(4100, 4)).astype("float32")
    for path, count in zip(paths, (4100, 4096, 10), strict=True):
        numpy.save(path, frames[:count])
    examples = [Recording(str(path), "a") for path in paths]
    task = Speech.from_examples(settings, examples[2:])
    assert [task.is_truncated(each) for each in examples] == [True, False, False]
    read, whole = 4096 * settings.hop, 4100 * settings.hop
    assert task.describe_read_part(examples[0]) == f"the first {read:.1f} of {whole:.1f} seconds"
    assert [len(task.frames(each)) for each in examples] == [4096, 4096, 10]
    with torch.no_grad():
        assert len(task.decode(task.model().eval(), examples[::2])) == 2
