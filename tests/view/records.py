"""Small records with known weights, for the tests of views."""

from dataclasses import replace

import torch
from torch import Tensor

import foci
from foci.record.kept import Keep, KeptStatistics
from foci.record.labels import Labels, Segment
from foci.record.layer import Layer
from foci.record.record import Record

JANE = ("[CLS]", "Jane", " is", " hun", "gry", ".", "[SEP]")
JANE_WORDS = (None, 0, 1, 2, 2, 3, None)

# Weights in percent: “hungry” (two tokens) attends to Jane.
HUNGRY = (
    (40, 10, 10, 10, 10, 10, 10),
    (50, 20, 10, 5, 5, 5, 5),
    (10, 10, 40, 20, 10, 5, 5),
    (10, 70, 5, 5, 5, 0, 5),
    (10, 50, 10, 10, 10, 5, 5),
    (60, 10, 5, 5, 5, 10, 5),
    (90, 0, 0, 0, 0, 0, 10),
)


def percent(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.tensor(rows) / 100


def jane() -> Record:
    """A sentence of seven tokens, five of them words; L0H0 is the identity, L0H1 is HUNGRY."""
    matrix = torch.stack([torch.eye(7), percent(HUNGRY)])[None]
    labels = Labels.tokens([JANE], words=[JANE_WORDS])
    return Record({"layers.0": Layer("layers.0", matrix=matrix)}, {"input": labels}, model="BertModel", calls=1)


def of_texts(*texts: str, seed: int = 0, layers: int = 1, heads: int = 1) -> Record:
    """A record of these tokens with random weights."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, heads, len(texts), len(texts))
    matrices = [torch.randn(shape, generator=generator).mul(2).softmax(-1) for _ in range(layers)]
    made = {f"layers.{i}": Layer(f"layers.{i}", index=i, matrix=matrix) for i, matrix in enumerate(matrices)}
    return Record(made, {"input": Labels.tokens([texts])}, model="Model", calls=layers)


def kept() -> Record:
    """A record of statistics only: the two top keys of each query and a picture of 3 x 3."""
    q = torch.arange(24.0).sin().view(1, 1, 6, 4) * 4
    _, weights = foci.attention(q, q, q, return_weights=True)
    statistics = Keep(top=2, picture=3).compute(weights)
    layer = Layer("layers.0", kept=KeptStatistics(statistics, (1, 1, 6, 6)))
    return Record({"layers.0": layer}, {"input": Labels.tokens([tuple("abcdef")])}, model="Kept", calls=1)


def translation() -> Record:
    """An encoder-decoder of one layer and two heads; cross.L0H1 has the clearer alignment."""
    clear = percent(((80, 10, 10), (10, 80, 10), (0, 10, 90), (0, 0, 100)))
    vague = percent(((40, 30, 30), (30, 40, 30), (30, 30, 40), (20, 20, 60)))
    layers = [
        Layer("encoder.0", "encoder", 0, matrix=torch.eye(3).expand(1, 2, 3, 3), queries="source", keys="source"),
        Layer("decoder.0", "decoder", 0, matrix=torch.eye(4).expand(1, 2, 4, 4), queries="target", keys="target"),
        Layer("cross.0", "cross", 0, matrix=torch.stack([vague, clear])[None], queries="target", keys="source"),
    ]
    labels = {
        "source": Labels.tokens([("A", " man", " sleeps")]),
        "target": Labels.tokens([("Ein", " Mann", " schläft", "</s>")]),
    }
    return Record({layer.name: layer for layer in layers}, labels, model="EncoderDecoder", calls=3)


def translation_with_sinks() -> Record:
    """The heads of cross.L0 and cross.L2 attend to the last token only; those of cross.L1 align the words."""
    on_the_end = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(1, 2, 4, 4)
    aligned = percent(((70, 10, 10, 10), (10, 70, 10, 10), (10, 10, 70, 10), (0, 0, 0, 100))).expand(1, 2, 4, 4)
    layers = [
        Layer(f"cross.{i}", "cross", i, matrix=matrix, queries="target", keys="source")
        for i, matrix in enumerate((on_the_end, aligned, on_the_end))
    ]
    labels = {
        "source": Labels.tokens([("A", " man", " sleeps", "<stop>")]),
        "target": Labels.tokens([("Ein", " Mann", " schläft", "<stop>")]),
    }
    return Record({layer.name: layer for layer in layers}, labels, model="EncoderDecoder", calls=3)


def image(grid: tuple[int, int] = (2, 3), pictures: bool = True) -> Record:
    """Patches after a class token, whose largest weight is on the last patch."""
    count = grid[0] * grid[1]
    rows = torch.eye(count + 1) * 0.5 + 0.5 / (count + 1)
    rows[0] = torch.cat([torch.tensor([0.1]), 0.9 * torch.arange(1.0, count + 1) / (count * (count + 1) / 2)])
    shown = torch.arange(count * 3, dtype=torch.uint8).mul(10).view(1, *grid, 3) if pictures else None
    texts = ("class", *(f"{i // grid[1]},{i % grid[1]}" for i in range(count)))
    labels = Labels("patches", (texts,), grid=grid, leading=1, images=shown)
    layer = Layer("blocks.0", matrix=rows[None, None], queries="patches", keys="patches")
    return Record({"blocks.0": layer}, {"patches": labels}, model="VisionTransformer", calls=1)


def words_and_images(images: int = 1, frames: int = 0, pictures: bool = True, heads: int = 2) -> Record:
    """A text after images of 2 x 3 patches; “red” attends to the patch 0,1 of each, “shoe” to 1,2 of the first."""
    texts, segments = ["<s>"], []
    for number in range(frames or images):
        segments.append(
            Segment(
                "patches",
                start=len(texts),
                rows=2,
                columns=3,
                image=0 if frames else number,
                frame=number if frames else None,
                picture=number if pictures else None,
            )
        )
        texts += ["<image>"] * 6
    first = len(texts)
    texts += ["A", " red", " sh", "oe", "."]
    rows = torch.full((heads, len(texts), len(texts)), 0.1 / len(texts))
    for segment in segments:
        rows[:, first + 1, segment.positions[0, 1]] = 0.9 / len(segments)
    rows[:, first + 2 : first + 4, segments[0].positions[1, 2]] = 0.9
    rows /= rows.sum(-1, keepdim=True)
    labels = Labels.tokens([texts], [[None] * first + [0, 1, 2, 2, 3]])
    shown = [torch.full((20, 30, 3), 200 - 40 * n, dtype=torch.uint8) for n in range(len(segments))] if pictures else []
    layers = {f"layers.{i}": Layer(f"layers.{i}", index=i, matrix=rows[None] ** (1 + i)) for i in range(2)}
    for layer in layers.values():
        assert layer.matrix is not None
        layer.matrix /= layer.matrix.sum(-1, keepdim=True)
    return Record(layers, {"input": labels.with_segments(segments, shown)}, model="VisionLanguage", calls=2)


def mirrored_images(frames: int = 0) -> tuple[Record, Record]:
    """The same text on two pictures or videos; in the second, each word attends to the patch at the other end."""
    first, second = words_and_images(frames=frames), words_and_images(frames=frames)
    labels = second.labels["input"]
    second.label(replace(labels, pictures=tuple(255 - picture for picture in labels.pictures)))
    patches = torch.cat([segment.positions.flatten() for segment in labels.segments])
    for layer in second.layers.values():
        assert layer.matrix is not None
        layer.matrix[..., patches] = layer.matrix[..., patches.flip(0)]
    return first, second


def denoising(steps: int = 4, frames: int = 0) -> Record:
    """Patches of 4 x 4 that attend to a prompt; at step n, patch n attends to “shoe”. With frames, of a video."""
    patches = Labels.patches(4, 4)
    if frames:
        rows = 4 // frames
        parts = [Segment("patches", start=4 * rows * n, rows=rows, columns=4, frame=n) for n in range(frames)]
        patches = Labels("patches", (("",) * 16,)).with_segments(parts)
    labels = {"prompt": Labels.tokens([["<s>", "red", " shoe"]]), "image": patches}
    found = []
    for step in range(steps):
        rows = torch.tensor([0.8, 0.1, 0.1]).repeat(16, 1)
        rows[step] = torch.tensor([0.1, 0.1, 0.8])
        layer = Layer("attn2", "cross", matrix=rows.expand(1, 2, 16, 3), queries="image", keys="prompt")
        found.append(Record({"attn2": layer}, labels, model="UNet", calls=1))
    return Record.from_steps(found)


def plain_image(grid: tuple[int, int]) -> Record:
    """Black patches without a class token; the largest weight of each is on itself."""
    count = grid[0] * grid[1]
    texts = tuple(f"{i // grid[1]},{i % grid[1]}" for i in range(count))
    labels = Labels("patches", (texts,), grid=grid, images=torch.zeros(1, *grid, 3, dtype=torch.uint8))
    rows = torch.eye(count) * 0.5 + 0.5 / count
    layer = Layer("blocks.0", matrix=rows[None, None], queries="patches", keys="patches")
    return Record({"blocks.0": layer}, {"patches": labels}, model="VisionTransformer", calls=1, answer="a night")


def words_and_sound() -> Record:
    """A question before and an answer after 8 frames of two tones: "low" attends to the first, "high" to the second."""
    rate, seconds = 8000, 0.1
    times = torch.arange(8 * 800) / rate
    tones = torch.where(times < 0.4, (2 * torch.pi * 500 * times).sin(), (2 * torch.pi * 2500 * times).sin())
    texts = ["What", " do", " you", " hear", "?", *[""] * 8, " First", " low", ",", " then", " high", "."]
    rows = torch.full((2, len(texts), len(texts)), 0.1).tril()
    rows[:, 14, 5:9] = rows[:, 17, 9:13] = 2.0
    rows /= rows.sum(-1, keepdim=True)
    labels = Labels.tokens([texts]).with_segments([Segment("frames", start=5, columns=8, seconds=seconds)])
    sounds = (20_000 * tones).to(torch.int16)[None]
    labels = replace(labels, sounds=sounds, rate=rate, seconds=seconds)
    layers = {f"layers.{i}": Layer(f"layers.{i}", index=i, matrix=rows[None]) for i in range(2)}
    return Record(layers, {"input": labels}, model="AudioLanguage", calls=2)


def words_and_spectrograms() -> Record:
    """The same text; of the recording, only the spectrogram that the model read is known, in two parts."""
    record = words_and_sound()
    pictures = [torch.zeros(8, 40, 3, dtype=torch.uint8) for _ in range(2)]
    # A low sound, then a high one.
    pictures[0][-1] = pictures[1][0] = 255
    texts = list(record.labels["input"].texts[0])
    segments = [
        Segment("frames", start=5 + 4 * n, columns=4, frame=4 * n or None, picture=n, seconds=0.1) for n in range(2)
    ]
    texts[5:13] = [""] * 8
    labels = Labels.tokens([texts]).with_segments(segments, pictures)
    return Record(record.layers, {"input": labels}, model="AudioLanguage", calls=2)
