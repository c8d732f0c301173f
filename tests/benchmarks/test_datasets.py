"""Published formats into plain ones: made as the datasets are made, turned, and read by the tasks."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import lzma
import struct
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from foci.tasks.sentiment import LabelledText, Sentiment, SentimentSettings
from foci.tasks.speech import Speech
from foci.tasks.speech_features import SpeechSettings
from foci.tasks.summarization import Document, Summarization, SummarizationSettings
from foci.tasks.vision import Vision, VisionSettings
from tests.inputs.test_audio import write_wav

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "datasets.py"


@pytest.fixture(scope="module")
def datasets() -> ModuleType:
    found = importlib.util.spec_from_file_location("datasets", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def pack(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def idx(*shape: int) -> bytes:
    count = torch.Size(shape).numel()
    return (
        b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(i % 10 for i in range(count))
    )


def test_idx_becomes_folders(datasets: ModuleType, tmp_path: Path) -> None:
    counts = {"train": 5010, "t10k": 20}
    for split, count in counts.items():
        (tmp_path / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(count, 2, 3)))
        (tmp_path / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(count)))
    datasets.fashion_mnist(tmp_path, tmp_path / "out")
    settings = VisionSettings(image=2, channels=1, patch=1)
    found = {split: Vision.read([tmp_path / "out" / split], settings) for split in ("train", "dev", "test")}
    assert {split: len(each) for split, each in found.items()} == {"train": 10, "dev": 5000, "test": 20}
    shirt = next(each for each in found["train"] if each.label == "shirt")
    assert Path(shirt.path).name == "00006.pgm"
    # Picture 6 begins with byte 36: 6, 7, 8 and 9, 0, 1.
    assert Path(shirt.path).read_bytes() == b"P5 3 2 255\n" + bytes([6, 7, 8, 9, 0, 1])
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"abcd"))
    with pytest.raises(ValueError, match="must be an IDX file of bytes"):
        datasets.idx(tmp_path / "x.gz")


def test_names_of_recordings_become_tables(datasets: ModuleType, tmp_path: Path) -> None:
    sound = write_wav(tmp_path / "sound.wav", torch.ones(800), 8000).read_bytes()
    names = [f"{d}_{who}_{n}.wav" for d in (3, 7) for who in ("theo", "george") for n in (0, 5, 10)]
    pack(tmp_path / "fsdd.tar.gz", {f"fsdd/recordings/{name}": sound for name in names})
    datasets.fsdd(tmp_path, tmp_path / "out")
    settings = SpeechSettings(rate=8000)
    for split, number in (("test", 0), ("dev", 5), ("train", 10)):
        found = Speech.read([tmp_path / "out" / f"{split}.tsv"], settings)
        assert [(Path(each.path).name, each.text) for each in found] == [
            (f"{d}_{who}_{number}.wav", text) for d, text in ((3, "three"), (7, "seven")) for who in ("george", "theo")
        ]
    left_out = Speech.read([tmp_path / "out" / "without-theo" / "test.tsv"], settings)
    assert len(left_out) == 6
    assert all("theo" in each.path for each in left_out)
    kept = Speech.read([tmp_path / "out" / "without-theo" / "train.tsv"], settings)
    assert [Path(each.path).name for each in kept] == ["3_george_10.wav", "7_george_10.wav"]


def test_cepstra_become_bands_whose_cosine_transform_they_are(datasets: ModuleType, tmp_path: Path) -> None:
    cepstra = torch.randn(4, 13, generator=torch.Generator().manual_seed(1))
    content = struct.pack(">i", 52) + struct.pack(">52f", *cepstra.flatten().tolist())
    train = "".join(f"<s> WORD {i} </s> (t{i})\n" for i in range(101))
    files = {f"an4/feat/x/{name}.mfc": content for name in ("s0", *(f"t{i}" for i in range(101)))}
    files |= {"an4/etc/an4_train.transcription": train.encode(), "an4/etc/an4_test.transcription": b"YES NO (s0)\n"}
    pack(tmp_path / "an4_mfcc.tar.xz", files)
    datasets.an4_mfcc(tmp_path, tmp_path / "out")
    splits = {
        name: Speech.read([tmp_path / "out" / f"{name}.tsv"], SpeechSettings()) for name in ("train", "dev", "test")
    }
    assert [len(each) for each in splits.values()] == [1, 100, 1]
    assert splits["test"][0].text == "yes no"
    assert splits["train"][0].text == "word 100"
    bands = torch.from_numpy(pytest.importorskip("numpy").load(splits["test"][0].path))
    places = (torch.arange(40) + 0.5) / 40
    waves = torch.cos(torch.pi * torch.arange(13)[:, None] * places)
    assert torch.allclose(bands @ waves.T / 40, cepstra, atol=1e-5)
    with pytest.raises(ValueError, match="must hold 52 floats, 13 per frame, got 10 bytes"):
        datasets.mfcc(content[:14], "x.mfc")


def test_reviews_become_lines(datasets: ModuleType, tmp_path: Path) -> None:
    rows = [{"id": i, "label": i % 2, "text": f"Film {i}<br /><br />it &amp; that"} for i in range(20)]
    for split in ("train", "test"):
        with lzma.open(tmp_path / f"{split}.jsonl.xz", "wt") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    datasets.imdb(tmp_path, tmp_path / "out")
    read = {
        name: Sentiment.read([tmp_path / "out" / f"{name}.jsonl"], SentimentSettings()) for name in ("train", "dev")
    }
    assert read["dev"] == [LabelledText("Film 0 it & that", "negative"), LabelledText("Film 10 it & that", "negative")]
    assert len(read["train"]) == 18


def test_labels_before_sentences_become_a_table(datasets: ModuleType, tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        (tmp_path / f"stsa.binary.{split}").write_text("1 a joy , it is\n0 dull\n")
    datasets.sst2(tmp_path, tmp_path / "out")
    found = Sentiment.read([tmp_path / "out" / "dev.tsv"], SentimentSettings())
    assert found == [LabelledText("a joy , it is", "positive"), LabelledText("dull", "negative")]


def test_subjects_become_summaries(datasets: ModuleType, tmp_path: Path) -> None:
    mail = b"Hi,\nlunch at noon?\n\n@subject\nLunch\n\n@ann0\nmeal"
    names = {split: f"aeslc/enron_subject_line/{split}/a.subject" for split in ("train", "dev", "test")}
    pack(
        tmp_path / "aeslc.tar.xz",
        dict.fromkeys(names.values(), mail) | {names["train"] + "x.subject": b"-\n@subject\n-"},
    )
    datasets.aeslc(tmp_path, tmp_path / "out")
    for split in names:
        found = Summarization.read([tmp_path / "out" / f"{split}.jsonl"], SummarizationSettings())
        assert found == [Document("Hi, lunch at noon?", "Lunch")]


def test_abstracts_train_with_every_summary(datasets: ModuleType, tmp_path: Path) -> None:
    row = {"source": ["We ask.", "We answer."], "target": ["An answer.", "A question."]}
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    datasets.scitldr(tmp_path, tmp_path / "out")
    counts = [len((tmp_path / "out" / f"{split}.jsonl").read_text().splitlines()) for split in ("train", "dev", "test")]
    assert counts == [2, 1, 1]


def test_a_text_is_cut_at_nine_tenths(datasets: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("abcdefghij" * 2)
    datasets.tinyshakespeare(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "train.txt").read_text() + "|" + (tmp_path / "out" / "dev.txt").read_text() == (
        "abcdefghijabcdefgh|ij"
    )
