"""Intact files of every kind, small, from which damaged ones are made."""

import gzip
import json
import lzma
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from PIL import Image

from foci.tasks import find_task
from foci.tasks.model_file import save_trained_model
from foci.training import read_config, train
from tests.faults.mutations import damage_bytes, damage_safetensors, damage_text
from tests.inputs.test_audio import write_wav
from tests.record.test_file import record

PAIRS = [("A man sleeps.", "Ein Mann schläft."), ("Two dogs, 3 cats", "Zwei Hunde, 3 Katzen"), ("7", "sieben")] * 3
MODEL_SIZE = [
    "task.size=tiny",
    "task.width=16",
    "task.hidden=16",
    "task.layers=1",
    "task.heads=2",
    "task.vocabulary=300",
]

Damage = Callable[[bytes, random.Random], bytes]
DAMAGE: dict[str, Damage] = {
    "record": damage_safetensors,
    "model": damage_safetensors,
    "config": damage_text,
    "table": damage_text,
    "sound": damage_bytes,
    "image": damage_bytes,
}


def write_records(folder: Path) -> Iterator[Path]:
    record().save(folder / "a.foci")
    yield folder / "a.foci"


def write_tables(folder: Path) -> Iterator[Path]:
    contents = {
        ".tsv": "".join(f"{source}\t{target}\n" for source, target in PAIRS),
        ".csv": "source,target\n" + "".join(f'"{source}","{target}"\n' for source, target in PAIRS),
        ".jsonl": "".join(json.dumps({"source": a, "target": b, "number": 3}) + "\n" for a, b in PAIRS),
    }
    for suffix, text in contents.items():
        for compression, compress in {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}.items():
            path = folder / f"a{suffix}{compression}"
            path.write_bytes(compress(text.encode()))
            yield path


def write_sounds(folder: Path) -> Iterator[Path]:
    import numpy
    import soundfile

    tone = torch.sin(2 * math.pi * 440 / 8000 * torch.arange(800))
    yield write_wav(folder / "a.wav", tone, 8000)
    yield write_wav(folder / "b.wav", tone, 8000, width=3, channels=2)
    for name in ("a.flac", "a.ogg"):
        soundfile.write(folder / name, tone.numpy(), 8000)
        yield folder / name
    numpy.save(folder / "a.npy", numpy.ones((20, 80), "float32"))
    yield folder / "a.npy"


def write_images(folder: Path) -> Iterator[Path]:
    pixels = bytes(random.Random(0).randbytes(3 * 12 * 9))
    image = Image.frombytes("RGB", (12, 9), pixels)
    for kind in ("PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF", "PPM"):
        path = folder / f"a.{kind.lower()}"
        image.save(path)
        yield path
    image.convert("RGBA").save(folder / "b.png")
    yield folder / "b.png"
    image.convert("P").save(folder / "b.tiff", compression="tiff_lzw")
    yield folder / "b.tiff"


def write_configs(folder: Path) -> Iterator[Path]:
    for task in ("translation", "speech", "vision"):
        path = folder / f"{task}.toml"
        path.write_text(read_config(task, changes=["task.size=tiny"], data=["pairs.tsv"]).to_toml())
        yield path


def write_models(folder: Path) -> Iterator[Path]:
    """A model of each task whose files differ: tokenizers, classes and statistics of frames and pixels."""
    tables = {
        "translation": [f"{source}\t{target}\n" for source, target in PAIRS],
        "sentiment": [f"{source}\t{target[:3]}\n" for source, target in PAIRS],
        "speech": ["input-speech\tone\n"],
        "vision": ["input-vision\tshirt\n", "input-vision\tshoe\n"],
    }
    write_wav(folder / "input-speech", torch.sin(torch.arange(4000) * 0.3), 16_000)
    Image.new("L", (28, 28)).save(folder / "input-vision", "PNG")
    for name, lines in tables.items():
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
        sizes = [change for change in MODEL_SIZE if name != "vision" or "vocabulary" not in change]
        sizes += ["task.tokenizer=bpe"] if name == "translation" else []
        settings = read_config(name, changes=sizes).settings
        kind = find_task(name)
        examples = kind.read([folder / f"{name}.tsv"], settings)
        task = kind.from_examples(settings, examples)
        torch.manual_seed(0)
        save_trained_model(folder / f"{name}.safetensors", task, task.model(), {"score": 1.0}, storage="int8")
        yield folder / f"{name}.safetensors"


def write_run(folder: Path) -> Path:
    """A run directory with two checkpoints."""
    (folder / "pairs.tsv").write_text("".join(f"number {i} a\t{i} b\n" for i in range(8)))
    changes = [
        *MODEL_SIZE,
        "task.tokenizer=words",
        "train.steps=2",
        "train.checkpoint_every=1",
        "train.evaluate_every=1",
    ]
    config = read_config("translation", changes=changes, data=[str(folder / "pairs.tsv")])
    train(config, folder / "run", quiet=True)
    return folder / "run"


SEEDS: dict[str, Callable[[Path], Iterator[Path]]] = {
    "record": write_records,
    "model": write_models,
    "config": write_configs,
    "table": write_tables,
    "sound": write_sounds,
    "image": write_images,
}


def write_damaged_files(kind: str, folder: Path, count: int) -> list[Path]:
    """Damaged copies of intact files; the same for every run."""
    folder.mkdir(parents=True)
    seeds = list(SEEDS[kind](folder))
    dice = random.Random(f"{kind} 1")
    paths = []
    for number in range(count):
        seed = seeds[number % len(seeds)]
        path = folder / f"damaged-{number}-{seed.name}"
        path.write_bytes(DAMAGE[kind](seed.read_bytes(), dice))
        paths.append(path)
    return [*seeds, *paths]
