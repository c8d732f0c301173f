"""Files that are made to take all memory or time, or to end the process: each claims more than it holds."""

import json
import lzma
import shutil
import struct
import wave
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from foci.runtime.safetensors_file import checksum_tensors

Change = Callable[[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]], None]


def rewrite_model(seed: Path, path: Path, change: Change) -> Path:
    """A model file whose header, task or tensors are changed, with the right checksum."""
    with safe_open(seed, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header, task = json.loads(metadata["foci"]), json.loads(metadata["task"])
    change(header, task, tensors)
    header["checksum"] = checksum_tensors(tensors)
    save_file(tensors, path, metadata={"foci": json.dumps(header), "task": json.dumps(task)})
    return path


def change_config(name: str, value: Any) -> Change:
    """Changes a number of the model's config, wherever it stands in it."""

    def change(header: dict[str, Any], _task: dict[str, Any], _tensors: dict[str, torch.Tensor]) -> None:
        tables = [header["config"], *(part for part in header["config"].values() if isinstance(part, dict))]
        for table in tables:
            table.update({name: value} if name in table else {})

    return change


def change_tokenizer(name: str, value: Any) -> Change:
    """Changes a part of the tokenizer that its library would execute."""

    def change(_header: dict[str, Any], task: dict[str, Any], _tensors: dict[str, torch.Tensor]) -> None:
        tokenizer = json.loads(task["files"]["tokenizer.json"])
        model = json.loads(tokenizer["model"])
        tokenizer["model"] = json.dumps(model | {name: value})
        task["files"]["tokenizer.json"] = json.dumps(tokenizer)

    return change


def change_tensors(convert: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda _header, _task, tensors: tensors.update({name: convert(each) for name, each in tensors.items()})


def nest(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"dict": {"a": value}}
    return value


PADDING = {
    "strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<pad>",
}  # fmt: skip
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
REGEX = {"type": "Split", "pattern": {"Regex": "(a*)*b"}, "behavior": "Isolated", "invert": False}
MODEL_CHANGES: dict[str, Change] = {
    "layers": change_config("layers", 10**9),
    "width": change_config("width", 2**22),
    "heads": change_config("heads", 2**40),
    "hidden": change_config("hidden", 10**12),
    "vocabulary": change_config("vocabulary", 10**12),
    "parts": lambda header, _task, _tensors: header.update(parts=10**9),
    "many-parts": lambda header, _task, _tensors: header.update(parts=4294967296),
    "kind": lambda header, _task, _tensors: header.update(kind="Model"),
    "config-type": lambda header, _task, _tensors: header.update(config=[1]),
    "task-type": lambda _header, task, _tensors: task.update(settings=3),
    "files-type": lambda _header, task, _tensors: task.update(files={"tokenizer.json": 3}),
    "deep-settings": lambda _header, task, _tensors: task.update(settings=nest(400)),
    "integers": change_tensors(lambda tensor: tensor.to(torch.int32)),
    "padding": change_tokenizer("padding", PADDING),
    "template": change_tokenizer("post_processor", TEMPLATE),
    "regex": change_tokenizer("pre_tokenizer", REGEX),
    "truncation": change_tokenizer("truncation", {"max_length": 2**63, "stride": 2**62, "strategy": "LongestFirst"}),
}
# The contents of files of a run directory; None: half of the content.
RUN_FILES: dict[str, tuple[str, bytes | None]] = {
    "empty-description": ("run.json", b"{}"),
    "list-description": ("run.json", b"[]"),
    "cut-description": ("run.json", None),
    "deep-description": ("run.json", b"[" * 100_000),
    "empty-state": ("checkpoints/step-00000002/state.json", b"{}"),
    "list-state": ("checkpoints/step-00000002/state.json", b"[[]]"),
    "cut-state": ("checkpoints/step-00000002/state.json", None),
    "other-file": (
        "checkpoints/step-00000002/state.json",
        json.dumps({"format": "foci.checkpoint/3", "state": {}, "files": {"/dev/zero": 1}, "tensors": {}}).encode(),
    ),
    "cut-tensors": ("checkpoints/step-00000002/rank-00000.safetensors", None),
    "cut-best": ("best/step-00000002.safetensors", None),
    "cut-config": ("config.toml", None),
    "seed": ("config.toml", b"seed = 99999999999999999999999999"),
    "cut-metrics": ("metrics.jsonl", None),
}
CONFIG_LINES = {
    "max-length": "[task]\nmax_length = 9223372036854775807",
    "penalty": "[task]\nlength_penalty = 1e9",
    "clip": "[train]\nclip = 99999999999999999999999",
    "vocabulary": "[task]\nvocabulary = 1000000000000",
    "rate": "[train]\nrate = 1e400",
    "dotted": "[task]\n" + "a." * 200_000 + "a = 1",
    "dotted-table": "[" + "a." * 100_000 + "a]\nb = 1",
    "nested": "data = " + "[" * 100_000,
    "long": "# " + "x" * 2**21,
}


def write_hostile_models(seed: Path, folder: Path) -> list[Path]:
    """Models that claim sizes, types or tokenizers that they must not have."""
    deep = folder / "deep.safetensors"
    save_file({}, deep, metadata={"foci": "[" * 100_000, "task": "[" * 100_000})
    return [deep, *(rewrite_model(seed, folder / f"{name}.safetensors", c) for name, c in MODEL_CHANGES.items())]


def write_hostile_runs(seed: Path, folder: Path) -> list[Path]:
    """Run directories with one damaged file each."""
    for name, (file, content) in RUN_FILES.items():
        shutil.copytree(seed, folder / name)
        path = folder / name / file
        before = path.read_bytes()
        path.write_bytes(before[: len(before) // 2] if content is None else content)
    return [folder / name for name in RUN_FILES]


def write_hostile_configs(folder: Path) -> list[Path]:
    for name, lines in CONFIG_LINES.items():
        (folder / f"{name}.toml").write_text(lines.replace("[task]", '[task]\nname = "translation"'))
    return [folder / f"{name}.toml" for name in CONFIG_LINES]


def write_hostile_tables(folder: Path) -> list[Path]:
    """One line of 6 GB, and 100 million lines."""
    line, lines = folder / "line.tsv.xz", folder / "lines.tsv.xz"
    line.write_bytes(lzma.compress(b"a" * 2**24) * 384)
    lines.write_bytes(lzma.compress(b"a\tb\n" * 2**22) * 24)
    (folder / "nested.jsonl").write_text('{"source": ' + "[" * 10**6)
    (folder / "quote.csv").write_text('a,"' + "b,c\n" * 10**5)
    return [line, lines, folder / "nested.jsonl", folder / "quote.csv"]


def write_hostile_sounds(folder: Path) -> list[Path]:
    """Ten hours of silence by the header of a FLAC, and long recordings at 160 Hz and at 4 GHz."""
    import soundfile

    paths = [folder / "silence.flac", folder / "slow.wav", folder / "fast.wav"]
    soundfile.write(paths[0], torch.zeros(48_000).numpy(), 48_000)
    content = bytearray(paths[0].read_bytes())
    content[22:26] = struct.pack(">I", 36_000 * 48_000)
    paths[0].write_bytes(content)
    for path, rate in zip(paths[1:], (160, 2**32 - 1), strict=True):
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 1, rate, 0, "NONE", ""))
            file.writeframes(bytes(2**22))
    (folder / "shape.npy").write_bytes(
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 80), }".ljust(117)
        + b"\n"
    )
    return [*paths, folder / "shape.npy"]


def write_hostile_images(folder: Path) -> list[Path]:
    """An image of 177 megapixels, and one of 4 billion."""
    paths = []
    for name, side, rows in (("large.png", 13_300, 13_300), ("claimed.png", 65_000, 1)):
        header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        pixels = zlib.compress(bytes((side + 1) * rows), 1)
        chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
        content = b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
        paths.append(folder / name)
        paths[-1].write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return paths


def write_hostile_records(seed: Path, folder: Path) -> list[Path]:
    """A record with 2^22 keys of width 0, and one whose header is nested deeply."""
    with safe_open(seed, framework="pt") as file:
        header = json.loads(file.metadata()["foci"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = header["content"]["dict"]["layers"]["tuple"][0]["dict"]["weights"]["dict"]
    batch, heads, queries, _ = tensors[weights["q"]["tensor"]].shape
    groups = tensors[weights["k"]["tensor"]].shape[1]
    tensors[weights["q"]["tensor"]] = torch.zeros(batch, heads, queries, 0)
    tensors[weights["k"]["tensor"]] = torch.zeros(batch, groups, 2**22, 0)
    weights["sizes"]["tuple"][3] = 2**22
    header["checksum"] = checksum_tensors(tensors)
    save_file(tensors, folder / "keys.foci", metadata={"foci": json.dumps(header)})
    header["content"] = nest(300)
    save_file(tensors, folder / "deep.foci", metadata={"foci": json.dumps(header)})
    return [folder / "keys.foci", folder / "deep.foci"]
