"""What the views ask of a Record: which head, which words, and how much each word looks at the others.

B batch, H heads, Tq queries, Tk keys, U units (words, or single tokens).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.runtime.printable import printable, visible

# Tokens that a tokenizer adds: [CLS], <s>, <|endoftext|>.
ADDED = re.compile(r"\[[A-Z]+\d*\]|<[^<>\s]+>")
# Marks around a word.
MARKS = re.compile(r"^[^\w<\[]+|[^\w>\]]+$")
# The time of a frame, with or without its unit.
TIME = re.compile(r"^([\d.]*\d) ?s?$")
LONGEST = 200
# Above so many positions not every head is asked before one is shown.
LONG = 2048
# A token so many places away is a neighbour, as the word before and after is: heads that look there are many.
NEAR = 2
# Up to so many entries a layer's links are looked through before one is shown.
MOST_SEARCHED = 2**22


@dataclass(frozen=True)
class Unit:
    """Something that looks or is looked at: a word or a token, at the positions from start to stop."""

    text: str
    start: int
    stop: int
    # Whether a space, or a new line, stands before it in the running text.
    spaced: bool = True
    breaks: bool = False
    # Whether the tokenizer added it: [CLS], <s>.
    added: bool = False

    @property
    def spoken(self) -> bool:
        """Whether it is a word that somebody wrote, not punctuation."""
        return not self.added and any(map(str.isalnum, self.text))

    @property
    def positions(self) -> list[int]:
        return list(range(self.start, self.stop))


@dataclass(frozen=True)
class Choice:
    """One head of a record, or the mean of a layer's heads."""

    layer: Layer
    head: int | None
    name: str

    @property
    def places(self) -> list[int]:
        """Where the heads stand along the layer's axis of heads."""
        heads = self.layer.heads
        return list(range(len(heads))) if self.head is None else [heads.index(self.head)]

    @property
    def exact(self) -> bool:
        """Whether every entry can be asked for; otherwise the heaviest keys of each query are known."""
        return "entries" in self.layer.can


def units(labels: Labels, batch: int = 0, by_token: bool = False) -> list[Unit]:
    """The words of a sequence, or its tokens where nobody said which belong together; padding is left out."""
    texts = texts_of(labels, batch)
    numbers = labels.words[batch] if labels.words is not None else None
    # GPT-2 and others keep the space in the token; where none has one, tokens stand apart.
    keeps_spaces = any(text[:1].isspace() for text in texts[1:])
    found: list[Unit] = []
    for start, stop in runs(texts, None if by_token else numbers):
        text = "".join(texts[start:stop])
        added = bool(ADDED.fullmatch(text.strip())) or (numbers is not None and numbers[start] is None)
        spaced = added or not keeps_spaces or text[:1].isspace() or (bool(found) and found[-1].added)
        breaks = bool(text.strip()) and "\n" in text[: len(text) - len(text.lstrip())]
        found.append(Unit(visible(shortened(text)), start, stop, spaced, breaks, added))
    return found


def texts_of(labels: Labels, batch: int) -> tuple[str, ...]:
    """What stands at each position; the times of a sound's frames with their unit: "0.04 s"."""
    if labels.kind != "frames" or labels.seconds is None:
        return labels.texts[batch]
    return tuple(TIME.sub(r"\1 s", text) for text in labels.texts[batch])


def shortened(text: str) -> str:
    """A token may be a megabyte; nobody reads more than its beginning."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def runs(texts: Sequence[str], numbers: Sequence[int | None] | None) -> list[tuple[int, int]]:
    """Positions in runs of one number; what has no number stands alone, and what reads as nothing joins what is before.

    >>> runs(["[CLS]", "hun", "gry", "!", "", ""], [None, 0, 0, 1, 1, None])
    [(0, 1), (1, 3), (3, 5)]
    """
    length = len(texts)
    while length and not texts[length - 1] and (numbers is None or numbers[length - 1] is None):
        length -= 1
    if not length:
        return [(i, i + 1) for i in range(len(texts))]
    edges = [i for i in range(length) if i == 0 or (texts[i] and begins(i, numbers))]
    return list(zip(edges, [*edges[1:], length], strict=True))


def begins(place: int, numbers: Sequence[int | None] | None) -> bool:
    return numbers is None or numbers[place] is None or numbers[place] != numbers[place - 1]


def name_of(record: Record, layer: Layer, head: int | None = None) -> str:
    """What `Record.name_of` says, as a terminal can show it: the stack may be named by a stranger's file."""
    return printable(shortened(record.name_of(layer, head)))


def choose(record: Record, head: str | int | None = None, layer: int | None = None) -> Choice:
    """The head that was asked for: "L5H3", "cross.L0H2", "L5" (the mean of its heads), or two numbers.

    Where a record has several stacks and none was named, the one that answers before the others is taken.
    """
    if not isinstance(head, str) and layer is None:
        raise ValueError(f"expected a layer beside head {head}, or both in one name, such as {names(record)}")
    asked = head if isinstance(head, str) else f"L{layer}" + ("" if head is None else f"H{head}")
    for one in telling_first(record):
        for number in (None, *one.heads):
            name = record.name_of(one, number)
            if asked in (name, name.removeprefix(f"{one.stack}.")):
                return mean_of(record, one) if number is None else Choice(one, number, name_of(record, one, number))
    raise ValueError(f"expected one of the heads {names(record)}, received {asked!r}")


def telling_first(record: Record) -> list[Layer]:
    """The layers, those between two sequences before the others: they are what a translation is looked at for."""
    return sorted(record.layers.values(), key=lambda layer: layer.queries == layer.keys)


def names(record: Record) -> str:
    """The heads that a record has, in short: from the first to the last of each stack."""
    stacks: dict[str, list[Layer]] = {}
    for layer in record.layers.values():
        stacks.setdefault(layer.stack, []).append(layer)
    ends = [(name_of(record, s[0], s[0].heads[0]), name_of(record, s[-1], s[-1].heads[-1])) for s in stacks.values()]
    return ", ".join(f"{first} to {last}" for first, last in ends) or "none, because nothing was seen"


def sides(record: Record, layer: Layer, batch: int, by_token: bool = False) -> tuple[list[Unit], list[Unit]]:
    """The words that look and those that are looked at; a word's positions are those along the layer's axes."""
    check_batch(layer, batch)
    queries, keys = record.labels_of(layer)
    return units(queries, batch, by_token), units(keys, batch, by_token)


def check_batch(layer: Layer, batch: int) -> None:
    if not 0 <= batch < layer.shape[0]:
        raise ValueError(f"expected a sequence from 0 to {layer.shape[0] - 1}, received batch={batch}")


def rows(choice: Choice, batch: int, queries: list[int]) -> Tensor:
    """Where these queries look: (queries, Tk), exact where the record has the entries.

    Where it kept only the heaviest keys of each query, the others read as 0.
    """
    check_batch(choice.layer, batch)
    with torch.no_grad():
        some = [rows_of_head(choice.layer, batch, place, queries) for place in choice.places]
    return torch.stack(some).mean(0)


def rows_of_head(layer: Layer, batch: int, place: int, queries: list[int]) -> Tensor:
    if "entries" in layer.can:
        found = layer[batch, place, queries]
        assert isinstance(found, Tensor)
        return found.float().cpu()
    if not layer.most:
        raise ValueError(f"the entries of {layer.label} were not kept, nor its heaviest keys: watch with keep='lazy'")
    values, keys = (found[batch, place, queries].cpu() for found in layer.top(layer.most))
    entries = torch.zeros(len(queries), layer.shape[3] + 1)
    # A key of -1 says that fewer were visible: it goes to one more column, which is cut off.
    return entries.scatter_(1, keys % entries.shape[1], values.float())[:, :-1]


def shares(choice: Choice, batch: int, queries: Sequence[Unit], keys: Sequence[Unit]) -> Tensor:
    """How much each unit looks at each other one: averaged over its own tokens, added up over theirs: (Uq, Uk)."""
    if not queries or not keys:
        return torch.zeros(len(queries), len(keys))
    entries = rows(choice, batch, [i for unit in queries for i in unit.positions])
    looking = torch.tensor([place for place, unit in enumerate(queries) for _ in unit.positions])
    averaged = torch.zeros(len(queries), entries.shape[1]).index_add(0, looking, entries)
    averaged /= looking.bincount(minlength=len(queries)).unsqueeze(1)
    ends = averaged.cumsum(1, dtype=torch.float64)
    ends = torch.nn.functional.pad(ends, (1, 0))
    return ends[:, [unit.stop for unit in keys]].sub(ends[:, [unit.start for unit in keys]]).float()


@torch.no_grad()
def unknown(choice: Choice, batch: int) -> Tensor:
    """Which queries have weights that are no numbers: (Tq,). Of a long text that was not kept, none is asked."""
    layer = choice.layer
    if layer.kept is None and max(layer.shape[2:]) > LONG:
        return torch.zeros(layer.shape[2], dtype=torch.bool)
    nats = layer.entropy()[batch].view(layer.shape[1], layer.shape[2])
    return ~nats[choice.places].isfinite().all(0).cpu()


def picture(choice: Choice, batch: int, rows: int, columns: int) -> Tensor:
    """The matrix in blocks: (rows, columns)."""
    with torch.no_grad():
        if choice.head is not None:
            return choice.layer.head(choice.head).picture(rows, columns)[batch].float().cpu()
        return choice.layer.picture(rows, columns)[batch].float().mean(0).cpu()


def find(shown: Sequence[Unit], word: str | int) -> int:
    """Where a word stands: by its text ("the", "the#2" for the second), or by its number from 0."""
    if isinstance(word, int) and 0 <= word < len(shown):
        return word
    text, _, count = str(word).partition("#") if str(word) not in {unit.text for unit in shown} else (str(word), "", "")
    asked = text.strip().casefold()
    same = [i for i, unit in enumerate(shown) if unit.text.casefold() in (asked, f"{asked} s")]
    # “Bahnhof?” is found as Bahnhof too.
    same = same or [i for i, unit in enumerate(shown) if asked and MARKS.sub("", unit.text.casefold()) == asked]
    number = int(count) - 1 if count.isdigit() else 0
    if 0 <= number < len(same):
        return same[number]
    if not same and text.isdigit() and int(text) < len(shown):
        return int(text)
    words = " ".join(unit.text for unit in shown[:40])
    raise ValueError(f"expected one of the words {words}{' …' if len(shown) > 40 else ''}, received {str(word)[:40]!r}")


@torch.no_grad()
def telling(record: Record, batch: int = 0) -> Choice:
    """The head to begin with where none was named.

    Between two sequences the clearest layer, all its heads together: the alignment. For patches and for very long texts
    the last layer. For a text, the head that most clearly picks words which are not next to the one that looks.
    """
    layers = telling_first(record)
    if not layers:
        raise ValueError("expected a record with at least one attention, received one that has seen none")
    check_batch(layers[0], batch)
    across = clearest_across(record, batch)
    return telling_of(record, layers, batch) if across is None else mean_of(record, across)


@torch.no_grad()
def clearest_across(record: Record, batch: int = 0) -> Layer | None:
    """Of the layers between two sequences the one whose words have the clearest links; None where there is none."""
    crossing = [layer for layer in record.layers.values() if layer.queries != layer.keys]
    return max(crossing, key=lambda layer: clearness(record, layer, batch), default=None)


def reading_of(record: Record, alignment: Choice, batch: int = 0) -> Choice | None:
    """The head to begin with of what reads the text that an alignment looks at; None where nothing does."""
    source = alignment.layer.keys
    layers = [layer for layer in record.layers.values() if layer.queries == layer.keys == source]
    if alignment.layer.queries == source or not layers or record.labels_of(layers[0])[1].kind != "tokens":
        return None
    return telling_of(record, layers, batch)


def telling_of(record: Record, layers: Sequence[Layer], batch: int) -> Choice:
    """The head to begin with among layers of one sequence."""
    if record.labels_of(layers[0])[1].kind == "patches" or not all(map(quickly_asked, layers)):
        return mean_of(record, layers[-1])
    # Squares: a head that picks some words clearly comes before one that prefers many a little.
    found = [far(record, layer, batch).square().mean(1) for layer in layers]
    layer, best = max(zip(layers, found, strict=True), key=lambda pair: float(pair[1].max()))
    head = layer.heads[int(best.argmax())]
    return Choice(layer, head, name_of(record, layer, head))


def mean_of(record: Record, layer: Layer) -> Choice:
    """The mean of a layer's heads; of a single head, that head."""
    head = layer.heads[0] if len(layer.heads) == 1 else None
    return Choice(layer, head, name_of(record, layer, head))


def clearness(record: Record, layer: Layer, batch: int) -> tuple[float, float]:
    """How much a word gives to the word that it looks at most, on average; then, how little the heads spread.

    A head that rests on the end of a sentence spreads little and says nothing, so spread alone would mislead.
    """
    spread = float(layer.entropy().float().nanmean().nan_to_num()) if "entropy" in layer.can else 0.0
    if "entries" not in layer.can or prod(layer.shape[1:]) > MOST_SEARCHED:
        return 0.0, -spread
    queries, keys = ([unit for unit in units if unit.spoken] for units in sides(record, layer, batch))
    if not queries or not keys:
        return 0.0, -spread
    return float(shares(mean_of(record, layer), batch, queries, keys).nan_to_num().amax(1).mean()), -spread


def quickly_asked(layer: Layer) -> bool:
    """Whether looking through the whole matrix takes no time that anybody would notice."""
    return "top" in layer.can and max(layer.shape[2:]) <= LONG


@torch.no_grad()
def far(record: Record, layer: Layer, batch: int) -> Tensor:
    """For each head and query, how much one word that is not its neighbour stands out: (H, Tq); no added tokens."""
    values, keys = (
        found[batch].view(layer.shape[1], layer.shape[2], -1).cpu() for found in layer.top(min(8, layer.most))
    )
    values = values.float()
    if "received" in layer.can:
        # What every query looks at says little about the one that does.
        usual = layer.received()[batch].view(layer.shape[1], -1).float().cpu().nan_to_num(0.0, 0.0) / layer.shape[2]
        values = values - usual.unsqueeze(1).expand(-1, layer.shape[2], -1).gather(2, keys.clamp(min=0))
    queries_spoken, keys_spoken = (spoken(labels, batch) for labels in record.labels_of(layer))
    seen = keys_spoken[keys.clamp(min=0)] & (keys >= 0)
    if layer.queries == layer.keys:
        places = layer.places
        words = numbered(record.labels_of(layer)[1], batch)
        seen &= (keys - places.view(1, -1, 1)).abs() > NEAR
        # Queries before the first key are next to it at best.
        seen &= (words[keys.clamp(min=0)] - words[places.clamp(min=0)].view(1, -1, 1)).abs() > 1
    # What is no number stands out from nothing.
    return values.where(seen & values.isfinite(), 0).amax(-1) * queries_spoken


def numbered(labels: Labels, batch: int) -> Tensor:
    """The number of the word that each position belongs to, of what is no word that of the word before: (T,)."""
    found = torch.zeros(len(labels), dtype=torch.long)
    number = 0
    for unit in units(labels, batch):
        number += unit.spoken
        found[unit.start : unit.stop] = number
    return found


def spoken(labels: Labels, batch: int) -> Tensor:
    """Which positions belong to words that somebody wrote; a mark inside of one, the dot of "Italy.", is none: (T,)."""
    texts = labels.texts[batch]
    found = torch.zeros(len(labels), dtype=torch.bool)
    for unit in units(labels, batch):
        for place in unit.positions:
            found[place] = unit.spoken and (not texts[place] or any(map(str.isalnum, texts[place])))
    return found
