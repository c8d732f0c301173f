"""Convert published datasets to the formats that `foci train` reads: TSV, JSONL, folders, tables.

    python benchmarks/datasets.py fsdd --data DATA --out plain/fsdd

DATA is the folder that holds one folder per dataset, as it was published. Every split is written whole: train, dev and
test; where none is published, dev is a part of train that train then lacks. Nothing but torch and the standard library
is needed, so this also runs where a model is trained.
"""

from __future__ import annotations

import argparse
import gzip
import html
import io
import json
import lzma
import math
import re
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
FEELINGS = {"0": "negative", "1": "positive"}
# Mel bands to which the 13 cepstra are expanded again; they are smooth, so nothing is lost.
BANDS = 40


def fashion_mnist(data: Path, out: Path) -> None:
    """IDX files -> a folder for each split with a folder for each class; dev: the last 5,000 of train."""
    pictures, labels = idx(data / "train-images-idx3-ubyte.gz"), idx(data / "train-labels-idx1-ubyte.gz")
    write_pictures(out / "train", pictures[:-5000], labels[:-5000], 0)
    write_pictures(out / "dev", pictures[-5000:], labels[-5000:], len(pictures) - 5000)
    write_pictures(out / "test", idx(data / "t10k-images-idx3-ubyte.gz"), idx(data / "t10k-labels-idx1-ubyte.gz"), 0)


def idx(path: Path) -> Tensor:
    """The tensor of an IDX file of bytes: two zeros, the type 8, how many axes, their lengths, then the numbers."""
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} must be an IDX file of bytes, got one that starts with {content[:4]!r}")
    axes = content[3]
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    flat = torch.frombuffer(bytearray(content[4 + 4 * axes :]), dtype=torch.uint8)
    return flat.view(*shape)


def write_pictures(folder: Path, pictures: Tensor, labels: Tensor, first: int) -> None:
    for name in CLOTHES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    header = f"P5 {pictures.shape[2]} {pictures.shape[1]} 255\n".encode()
    for number, (picture, label) in enumerate(zip(pictures, labels.tolist(), strict=True), start=first):
        (folder / CLOTHES[label] / f"{number:05}.pgm").write_bytes(header + bytes(picture.flatten().tolist()))


def fsdd(data: Path, out: Path) -> None:
    """DIGIT_SPEAKER_N.wav -> tables; test: N 0-4, dev: 5-9; and for each speaker tables without and with only them."""
    names = []
    with tarfile.open(data / "fsdd.tar.gz") as archive:
        for path, content in members(archive, ".wav"):
            write(out / "recordings" / path.name, content)
            names.append(path.name)
    rows = [
        (f"recordings/{name}", DIGITS[int(digit)], speaker, int(number))
        for name, digit, speaker, number in parts(names)
    ]
    taken = {"test": range(5), "dev": range(5, 10), "train": range(10, 50)}
    for split, numbers in taken.items():
        write_table(out / f"{split}.tsv", ("sound", "text"), [row[:2] for row in rows if row[3] in numbers])
    for speaker in SPEAKERS:
        for split, numbers in (("dev", range(10)), ("train", range(10, 50))):
            others = [row[:2] for row in rows if row[2] != speaker and row[3] in numbers]
            write_table(out / f"without-{speaker}" / f"{split}.tsv", ("sound", "text"), moved(others))
        own = [row[:2] for row in rows if row[2] == speaker]
        write_table(out / f"without-{speaker}" / "test.tsv", ("sound", "text"), moved(own))


def parts(names: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    for name in sorted(names):
        digit, speaker, number = name.removesuffix(".wav").split("_")
        yield name, digit, speaker, number


def moved(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Paths relative to a subfolder."""
    return [(f"../{row[0]}", *row[1:]) for row in rows]


def an4_mfcc(data: Path, out: Path) -> None:
    """MFCC files -> frames as .npy and tables; dev: the first 100 of train.

    The cosine transform of the 13 cepstra is undone, which gives smooth log-mel bands: nothing is lost, and bands can
    be masked and moved as those of a sound.
    """
    texts: dict[str, list[tuple[str, str]]] = {}
    with tarfile.open(data / "an4_mfcc.tar.xz") as archive:
        for path, content in members(archive, ".mfc"):
            write(out / "frames" / f"{path.stem}.npy", npy(uncosined(mfcc(content, str(path)))))
        for path, content in members(archive, ".transcription"):
            texts[path.stem] = list(transcripts(content.decode()))
    train, test = texts["an4_train"], texts["an4_test"]
    for split, rows in (("dev", train[:100]), ("train", train[100:]), ("test", test)):
        write_table(out / f"{split}.tsv", ("sound", "text"), [(f"frames/{name}.npy", text) for text, name in rows])


def mfcc(content: bytes, name: str) -> Tensor:
    """Read a big-endian count and that many big-endian floats, 13 per frame: (F, 13)."""
    (count,) = struct.unpack(">i", content[:4])
    if 4 * count != len(content) - 4 or count % 13:
        raise ValueError(f"{name} must hold {count} floats, 13 per frame, got {len(content) - 4} bytes")
    return torch.tensor(struct.unpack(f">{count}f", content[4:])).view(-1, 13)


def uncosined(cepstra: Tensor) -> Tensor:
    """(F, 13) -> (F, BANDS): the smooth log-mel bands with this cosine transform."""
    places = (torch.arange(BANDS) + 0.5) / BANDS
    waves = torch.cos(math.pi * torch.arange(cepstra.shape[1])[:, None] * places)
    return cepstra @ torch.where(torch.arange(cepstra.shape[1])[:, None] == 0, waves, 2.0 * waves)


def npy(frames: Tensor) -> bytes:
    """Write a .npy file without NumPy: a header with dtype and shape, then the numbers."""
    shape = f"({frames.shape[0]}, {frames.shape[1]})"
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    numbers = struct.pack(f"<{frames.numel()}f", *frames.flatten().tolist())
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + numbers


def transcripts(content: str) -> Iterator[tuple[str, str]]:
    """`<s> YES </s> (an251-fash-b)` -> ("yes", "an251-fash-b")."""
    for line in content.splitlines():
        found = re.fullmatch(r"\s*(.*?)\s*\((\S+)\)\s*", re.sub(r"</?s>", "", line))
        if found is None:
            raise ValueError(f"a transcript must end with its file in brackets, got {line!r}")
        yield found[1].lower(), found[2]


def imdb(data: Path, out: Path) -> None:
    """JSONL -> JSONL with text and label; dev: every tenth of train."""
    train = list(imdb_rows(data / "train.jsonl.xz"))
    write_lines(out / "dev.jsonl", train[::10])
    write_lines(out / "train.jsonl", [row for number, row in enumerate(train) if number % 10])
    write_lines(out / "test.jsonl", imdb_rows(data / "test.jsonl.xz"))


def imdb_rows(path: Path) -> Iterator[dict[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            text = html.unescape(re.sub(r"<br\s*/?>", " ", row["text"]))
            yield {"text": " ".join(text.split()), "label": FEELINGS[str(row["label"])]}


def sst2(data: Path, out: Path) -> None:
    """`label text` -> TSV with text and label."""
    for split in ("train", "dev", "test"):
        lines = (data / f"stsa.binary.{split}").read_text(encoding="utf-8").splitlines()
        pairs = (line.split(" ", 1) for line in lines if line)
        write_table(out / f"{split}.tsv", ("text", "label"), [(text, FEELINGS[label]) for label, text in pairs])


def reviews(data: Path, out: Path) -> None:
    """`label text` -> TSV with text and label: train and dev of both files together, test of each file by itself.

    The smaller file is in train three times, so that both weigh about the same.
    """
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in ("labelled_sentences", "polarity"):
        for split in ("train", "dev", "test"):
            with lzma.open(data / f"{name}.{split}.tsv.xz", "rt", encoding="utf-8") as file:
                pairs = [line.rstrip("\n").split("\t", 1) for line in file]
            target = f"test.{name}" if split == "test" else split
            parts.setdefault(target, []).extend(
                (text, label)
                for label, text in pairs * (3 if target == "train" and name == "labelled_sentences" else 1)
            )
    for target, rows in parts.items():
        write_table(out / f"{target}.tsv", ("text", "label"), rows)


def aeslc(data: Path, out: Path) -> None:
    """Body, `@subject`, subject -> JSONL with document and summary."""
    found: dict[str, list[dict[str, str]]] = {"train": [], "dev": [], "test": []}
    with tarfile.open(data / "aeslc.tar.xz") as archive:
        for path, content in members(archive, ".subject"):
            body, _, rest = content.decode("utf-8", errors="replace").partition("\n@subject\n")
            subject = rest.split("\n@ann0", 1)[0]
            row = {"document": " ".join(body.split()), "summary": " ".join(subject.split())}
            if row["document"] and re.search(r"\w", row["summary"]) and re.search(r"\w", row["document"]):
                found[path.parent.name].append(row)
    for split, rows in found.items():
        write_lines(out / f"{split}.jsonl", rows)


def scitldr(data: Path, out: Path) -> None:
    """JSONL with sentences and several targets -> JSONL with document and summary; train has one row per target."""
    for split in ("train", "dev", "test"):
        rows = []
        with gzip.open(data / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                targets = row["target"] if split == "train" else row["target"][:1]
                rows += [{"document": " ".join(row["source"]), "summary": target} for target in targets if target]
        write_lines(out / f"{split}.jsonl", rows)


def tinyshakespeare(data: Path, out: Path) -> None:
    """The first 90% of the text are train, the last 10% dev."""
    text = (data / "input.txt").read_text(encoding="utf-8")
    cut = int(0.9 * len(text))
    for split, part in (("train", text[:cut]), ("dev", text[cut:])):
        write(out / f"{split}.txt", part.encode())


def members(archive: tarfile.TarFile, ending: str) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The files of an archive with a suffix, by name; nothing is extracted to disk."""
    for member in sorted(archive.getmembers(), key=lambda each: each.name):
        file = archive.extractfile(member) if member.isfile() and member.name.endswith(ending) else None
        if file is not None:
            yield PurePosixPath(member.name), file.read()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_table(path: Path, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    lines = io.StringIO()
    for row in (columns, *rows):
        lines.write("\t".join(" ".join(cell.split()) for cell in row) + "\n")
    write(path, lines.getvalue().encode())


def write_lines(path: Path, rows: Iterable[dict[str, str]]) -> None:
    write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


DATASETS: dict[str, Callable[[Path, Path], None]] = {
    each.__name__: each
    for each in (fashion_mnist, fsdd, an4_mfcc, imdb, sst2, reviews, aeslc, scitldr, tinyshakespeare)
}


def main() -> None:
    """Convert one dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=DATASETS)
    parser.add_argument("--data", type=Path, required=True, help="the folder with one folder per dataset")
    parser.add_argument("--out", type=Path, required=True, help="the output folder")
    options = parser.parse_args()
    DATASETS[options.name](options.data / options.name, options.out)


if __name__ == "__main__":
    main()
