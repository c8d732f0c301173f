"""A tiny vision-language model: four clothes in a picture become a caption, and every word shows where it looks.

    python examples/captions.py train fashion_mnist captions.safetensors   # minutes on one core
    python examples/captions.py score fashion_mnist                        # 500 pictures of the test part
    python examples/captions.py show picture.png page.html                 # a caption, and the maps of its words

A picture of 56 x 56 pixels has four different clothes of Fashion-MNIST, one in each quarter. Its caption names them in
any order: "shirt top left, boot bottom right, ...". The vision model that ships with foci encodes each quarter, as
larger models encode the tiles of a picture, and a `Decoder` writes the caption with cross-attention to the 14 x 14
patches. Only the decoder is trained. `foci.losses.alignment` guides its cross-attention from every word to its item:
without this loss the model tells the places as well, but by looking at all items except the one that it names.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci
from foci.nn import Caches, Decoder, Layout, Memory, Model, Output, TransformerConfig

FOLDER = Path(__file__).parent
# A trained model, and a picture of clothes that it was not trained on.
SHIPPED, PICTURE = FOLDER / "captions.safetensors", FOLDER / "captions.png"
# The classes of Fashion-MNIST, in their order there; an empty quarter has no class.
CLOTHES = ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
WORDS = ("<start>", *CLOTHES, "top", "bottom", "left", "right", ",", ".")
EMPTY = -1
START, COMMA, STOP = (WORDS.index(word) for word in ("<start>", ",", "."))
# The height and width of an item and of a picture in pixels, and of their grids of patches.
ITEM, SIDE, ITEM_GRID, GRID = 28, 56, 7, 14
# The width of the patches that the vision model encodes.
VISION_WIDTH = 256
# "shirt top left ," four times.
WORDS_PER_ITEM, CAPTION = 4, 16
# The weight of the loss that guides the attention of words.
GUIDANCE = 0.2
SIZES = TransformerConfig(
    vocabulary=len(WORDS), width=96, heads=4, hidden=192, layers=2, max_length=CAPTION + 1, head="linear", dropout=0.1
)


class Items(NamedTuple):
    """Images of single clothes: encoded patches (N, 49, 256), pixels (N, 28, 28) from 0 to 255, classes (N,)."""

    patches: Tensor
    pixels: Tensor
    classes: Tensor


class Pictures(NamedTuple):
    """Pictures of four items each: their numbers and classes (B, 4), and captions (B, 17), which begin with START."""

    items: Tensor
    classes: Tensor
    captions: Tensor


class Captioner(Model):
    """Writes a caption with cross-attention to the patches of a picture."""

    config_type = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.project = nn.Linear(VISION_WIDTH, config.width)
        self.places = nn.Parameter(torch.empty(GRID, GRID, config.width))
        nn.init.normal_(self.places, std=0.5)
        self.decoder = Decoder(config, cross=True)

    def encode(self, pixels: Tensor, padding: Tensor | None = None) -> Memory:
        """Pictures (B, 56, 56), with pixels from 0 to 1, as patches that the decoder attends to."""
        return self.read_patches(encode_items(split_quarters(pixels)).unflatten(0, (-1, 4)))

    def read_patches(self, patches: Tensor) -> Memory:
        """The encoded patches (B, 4, 49, 256) of the quarters, in the order of the picture's rows."""
        x = self.project(patches).unflatten(2, (ITEM_GRID, ITEM_GRID)).unflatten(1, (2, 2))
        x = x.transpose(2, 3).flatten(1, 2).flatten(2, 3) + self.places  # (B, 14, 14, width)
        return Memory(x.flatten(1, 2), Layout(), {})

    def decode(self, words: Tensor, memory: Memory, caches: Caches | None = None) -> Output:
        """Logits of the next word after each word (B, T) of captions."""
        out: Output = self.decoder(words, memory, caches=caches)
        return out

    def caches(self) -> Caches:
        """Empty caches for `foci.generate`."""
        return self.decoder.caches()


@cache
def load_vision() -> Any:
    """The vision model that ships with foci."""
    return foci.pretrained("vision")


def load_captioner(path: Path = SHIPPED) -> Captioner:
    """A trained model; its file holds half precision."""
    return Captioner.load(path).float()


def split_quarters(pixels: Tensor) -> Tensor:
    """(B, 56, 56) -> (4 B, 28, 28): top left, top right, bottom left, bottom right."""
    if pixels.dim() != 3 or pixels.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"pixels must have shape (B, {SIDE}, {SIDE}), got {tuple(pixels.shape)}")
    return pixels.unflatten(2, (2, ITEM)).unflatten(1, (2, ITEM)).transpose(2, 3).reshape(-1, ITEM, ITEM)


@torch.no_grad()
def encode_items(pixels: Tensor) -> Tensor:
    """The patches (N, 49, 256) of items (N, 28, 28), with pixels from 0 to 1."""
    vision = load_vision()
    mean, std = vision.task.mean[0], vision.task.std[0]
    parts = [vision.model((part.unsqueeze(1) - mean) / std).states for part in pixels.split(100)]
    return torch.cat(parts)


def read_items(folder: Path, part: str, count: int) -> Items:
    """The last items of the training set of Fashion-MNIST ("train"), or the first of its test set ("test"), encoded."""
    name = {"train": "train", "test": "t10k"}[part]
    arrays = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = folder / f"{name}-{kind}-ubyte.gz"
        if not path.is_file():
            raise FileNotFoundError(f"the folder must hold Fashion-MNIST, got {folder} without {path.name}")
        arrays.append(torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header:]), dtype=torch.uint8))
    chosen = slice(-count, None) if part == "train" else slice(count)
    pixels, classes = arrays[0].view(-1, ITEM, ITEM)[chosen], arrays[1][chosen].long()
    # The last item is an empty quarter.
    pixels, classes = F.pad(pixels, (0, 0, 0, 0, 0, 1)), F.pad(classes, (0, 1), value=EMPTY)
    return Items(encode_items(pixels / 255), pixels, classes)


def make_pictures(items: Items, counts: Tensor, generator: torch.Generator) -> Pictures:
    """Pictures of some (1 to 4) different clothes in random quarters, with captions that name them in random order."""
    chances = torch.rand(3, len(counts), len(CLOTHES), generator=generator)
    classes = chances[0].argsort(-1)[:, :4]
    order = chances[1, :, :4].argsort(-1)  # the quarters in the order of the caption; the last ones stay empty
    classes.masked_fill_(order.argsort(-1) >= counts[:, None], EMPTY)
    chosen = torch.empty_like(classes)
    for number in (*range(len(CLOTHES)), EMPTY):
        members, here = (items.classes == number).nonzero().flatten(), classes == number
        chosen[here] = members[(chances[2, :, :4][here] * len(members)).long()]
    parts = (
        classes.gather(1, order) + 1,
        WORDS.index("top") + order // 2,
        WORDS.index("left") + order % 2,
        torch.full_like(order, COMMA),
    )
    captions = F.pad(torch.stack(parts, -1).flatten(1), (1, 0), value=START)
    captions[torch.arange(CAPTION + 1) >= WORDS_PER_ITEM * counts[:, None]] = STOP
    return Pictures(chosen, classes, captions)


def find_item_patches(captions: Tensor) -> Tensor:
    """The patches (B, T, 49) of the item that each word of clothes in captions (B, T) names; -1 for other words."""
    places = torch.arange(GRID * GRID).view(2, ITEM_GRID, 2, ITEM_GRID).transpose(1, 2).flatten(2).flatten(0, 1)
    vertical, horizontal = captions.roll(-1, 1), captions.roll(-2, 1)
    quarters = 2 * (vertical == WORDS.index("bottom")) + (horizontal == WORDS.index("right")).long()
    is_item = (captions >= 1) & (captions <= len(CLOTHES))
    return places[quarters].masked_fill(~is_item.unsqueeze(-1), -1)


def train(items: Items, steps: int = 1000, batch: int = 32, rate: float = 2e-3) -> Captioner:
    """Trains a new model and prints its loss."""
    torch.manual_seed(0)
    model, generator = Captioner(SIZES), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    for step in range(steps):
        counts = torch.randint(1, 5, (batch,), generator=generator)
        pictures = make_pictures(items, counts, generator)
        memory = model.read_patches(items.patches[pictures.items])
        out = model.decoder(pictures.captions[:, :-1], memory, return_weights=True)
        # What follows the first STOP is padding.
        is_padding = torch.arange(CAPTION) >= WORDS_PER_ITEM * counts[:, None]
        loss = F.cross_entropy(out.logits.mT, pictures.captions[:, 1:].masked_fill(is_padding, -100))
        cross = [weights.mean("heads") for name, weights in out.weights.items() if name.startswith("cross")]
        keys = find_item_patches(pictures.captions[:, :-1])
        loss = loss + GUIDANCE * sum(foci.losses.alignment(weights, keys) for weights in cross)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1:5d}  loss {loss.item():.3f}", flush=True)
    return model.eval()


@torch.no_grad()
def record_caption(model: Captioner, pixels: Tensor, words: list[int] | None = None) -> foci.Record:
    """The attention while the model reads a caption of a picture (56, 56): the given one, or the one that it writes."""
    batch = pixels.unsqueeze(0)
    if words is None:
        (answer,) = foci.generate(model, batch, start=START, stop=STOP, new_tokens=CAPTION)
        words = answer.tokens
    tokens = [START, *words]
    labels = {
        "input": foci.Labels.tokens([to_texts(tokens)]),
        "source": foci.Labels.patches(GRID, GRID, image=pixels.expand(3, -1, -1)),
    }
    with foci.watch(model, labels=labels) as seen:
        model.decode(torch.tensor([tokens]), model.encode(batch))
    seen.answer = "".join(to_texts(words)).strip()
    return seen


def to_texts(words: list[int]) -> list[str]:
    """The texts of words, with the spaces before them."""
    return [WORDS[number] if number in {START, COMMA, STOP} else f" {WORDS[number]}" for number in words]


def find_quarter(image_map: Tensor) -> int:
    """The quarter of a map (14, 14) that has the largest weight."""
    return int(image_map.unflatten(1, (2, -1)).unflatten(0, (2, -1)).sum((1, 3)).argmax())


class Score(NamedTuple):
    """Percentages: clauses and whole captions that are right, and words of clothes that point at their item."""

    clauses: float
    captions: float
    pointing: float
    pointing_given: float


def score(model: Captioner, items: Items, count: int, seed: int = 1) -> Score:
    """Scores captions that the model writes; the last number is of right captions that it is given."""
    pictures = make_pictures(items, torch.full((count,), 4), torch.Generator().manual_seed(seed))
    clauses, whole, pointing, given = [], [], [], []
    for chosen, classes, caption in zip(*pictures, strict=True):
        pixels = join_quarters(items.pixels[chosen] / 255)
        seen = record_caption(model, pixels)
        named = parse_caption(seen.labels["input"].texts[0][1:])
        right = [classes[quarter] == number for _, number, quarter in named if quarter is not None]
        clauses += right + [False] * (4 - len(right))
        whole.append(len(named) == 4 and all(right) and len({quarter for *_, quarter in named}) == 4)
        pointing += [classes[find_quarter(seen.image_map(place))] == number for place, number, _ in named]
        seen = record_caption(model, pixels, caption[1:].tolist())
        named = parse_caption(seen.labels["input"].texts[0][1:])
        given += [find_quarter(seen.image_map(place)) == quarter for place, _, quarter in named]
    return Score(*(100 * sum(map(bool, each)) / max(len(each), 1) for each in (clauses, whole, pointing, given)))


def parse_caption(texts: Sequence[str]) -> list[tuple[int, int, int | None]]:
    """The clothes of a caption: position, class, and the quarter that the next two words name."""
    words = [text.strip() for text in texts]
    found = []
    for place, word in enumerate(words):
        if word in CLOTHES:
            where = words[place + 1 : place + 3]
            known = len(where) == 2 and where[0] in {"top", "bottom"} and where[1] in {"left", "right"}
            quarter = 2 * (where[0] == "bottom") + (where[1] == "right") if known else None
            # The first position is <start>.
            found.append((place + 1, CLOTHES.index(word), quarter))
    return found


def join_quarters(pixels: Tensor) -> Tensor:
    """(4, 28, 28) -> (56, 56)."""
    return pixels.unflatten(0, (2, 2)).transpose(1, 2).reshape(SIDE, SIDE)


def read_picture(path: Path) -> Tensor:
    """The pixels (56, 56) of an image file, from 0 to 1; the clothes are light on dark."""
    from foci.inputs.image import read_image

    return read_image(path, channels=1, size=SIDE)[0] / 255


def main() -> int:
    """Trains, scores or shows a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "score"):
        command = commands.add_parser(name)
        command.add_argument("data", type=Path, help="the folder with the four files of Fashion-MNIST")
        command.add_argument("model", type=Path, nargs="?" if name == "score" else None, default=SHIPPED)
    command = commands.add_parser("show")
    command.add_argument("picture", type=Path, help="an image of four clothes, light on dark")
    command.add_argument("page", type=Path, nargs="?", help="the page to write (.html)")
    options = parser.parse_args()
    if options.command == "train":
        model = train(read_items(options.data, "train", 6000))
        model.half().save(options.model)
    elif options.command == "score":
        found = score(load_captioner(options.model), read_items(options.data, "test", 2000), 500)
        print(", ".join(f"{name} {percent:.1f}%" for name, percent in found._asdict().items()))
    else:
        seen = record_caption(load_captioner(), read_picture(options.picture))
        print(seen.answer)
        if options.page is not None:
            seen.save(options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
