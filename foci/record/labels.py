"""Labels: the texts of the positions of a sequence, ready to print; segments of patches and frames within it.

B batch, T length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci.record.pictures import shrink_picture, to_pictures
from foci.record.token_texts import decode_each_token, make_decoder, number_words_by_spaces, slice_by_offsets
from foci.runtime.checks import is_positive_int

LABEL_KINDS = ("tokens", "patches", "frames", "positions")
SEGMENT_KINDS = ("patches", "frames")
# The position of a text classifier whose state decides the answer.
CLASS_TOKEN = "<class>"

# The whole picture, as (top, left, bottom, right) in parts of its height and width.
WHOLE = (0.0, 0.0, 1.0, 1.0)

LabelTexts = tuple[tuple[str, ...], ...]
WordNumbers = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True)
class Segment:
    """Neighboring positions of a sequence that are image patches or audio frames, among tokens or on their own.

    >>> segment = foci.Segment("patches", start=5, rows=2, columns=3, stride=4)        # a line break after each row
    >>> segment.positions.tolist(), segment.stop
    ([[5, 6, 7], [9, 10, 11]], 13)

    Args:
        kind: "patches" or "frames".
        sequence: which sequence of the batch.
        start: the first position.
        rows, columns: the grid of patches; 1 and the number of frames.
        image: the number of the image or video in the batch; of the recording.
        frame: the number of the frame of a video, None for an image; of frames of sound, that of the first in its
            recording, None for 0.
        picture: the index of the picture in `Labels.pictures`; None if it was not kept. That of sound is a spectrogram.
        box: the part of the picture that the grid covers: top, left, bottom, right from 0 to 1. A tile covers a part.
        stride: positions from one row to the next; None: the rows follow each other.
        order: for each position the number of its patch in the grid, row by row; None: in this order.
        seconds: the duration of an audio frame.
    """

    kind: str
    sequence: int = 0
    start: int = 0
    rows: int = 1
    columns: int = 1
    image: int = 0
    frame: int | None = None
    picture: int | None = None
    box: tuple[float, float, float, float] = WHOLE
    stride: int | None = None
    order: tuple[int, ...] | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in SEGMENT_KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, SEGMENT_KINDS))}, got {self.kind!r}")
        for name in ("rows", "columns"):
            if not is_positive_int(getattr(self, name)):
                raise ValueError(f"{name} must be an int of at least 1, got {getattr(self, name)!r}")
        if min(self.sequence, self.start, self.image) < 0:
            raise ValueError(f"sequence, start and image must be at least 0, got {self}")
        if self.stride is not None and self.stride < self.columns:
            raise ValueError(f"stride must be at least the {self.columns} columns, got {self.stride}")
        if self.order is not None and sorted(self.order) != list(range(self.rows * self.columns)):
            raise ValueError(f"order must have each of the {self.rows * self.columns} patches once, got {self.order!r}")
        top, left, bottom, right = self.box
        if not (0 <= top < bottom <= 1 and 0 <= left < right <= 1):
            raise ValueError(f"box must be top, left, bottom, right with 0 <= top < bottom <= 1, got {self.box}")

    @property
    def stop(self) -> int:
        """The position after the last one, with what follows the last row."""
        return self.start + self.rows * (self.stride or self.columns)

    @property
    def positions(self) -> Tensor:
        """The position of each patch: (rows, columns)."""
        stride = self.stride or self.columns
        in_rows = self.start + torch.arange(self.rows)[:, None] * stride + torch.arange(self.columns)
        if self.order is None:
            return in_rows
        placed = torch.empty(self.rows * self.columns, dtype=torch.long)
        placed[torch.tensor(self.order)] = in_rows.flatten()
        return placed.view(self.rows, self.columns)

    def texts(self) -> list[str]:
        """The text of each position from start to stop: "row,column", "frame:row,column", a time; "" between rows."""
        if self.kind == "frames":
            first = self.frame or 0
            return name_frames(range(first, first + self.columns), self.seconds)
        texts, before = [""] * (self.stop - self.start), "" if self.frame is None else f"{self.frame}:"
        for row, line in enumerate(self.positions.tolist()):
            for column, position in enumerate(line):
                texts[position - self.start] = f"{before}{row},{column}"
        return texts


@dataclass(frozen=True)
class Labels:
    """The text of each position: a token, an image patch, an audio frame, or a bare position.

    >>> labels = foci.Labels.tokens([["Where", " does", " it", " look", "?"]], words=[[0, 1, 2, 3, 3]])
    >>> len(labels), labels.text(0)
    (5, 'Where does it look?')

    Args:
        kind: "tokens", "patches", "frames" or "positions".
        texts: [sequence][position], ready to print (" hello", never "Ġhello") and not escaped. A character that is
            split over several tokens is the text of the first; the others are "".
        words: [sequence][position], the number of the word that a token belongs to; None: no word.
        grid: rows and columns of patches.
        leading: the number of positions (class token, registers) before the first patch.
        images: the images, uint8 (B, height, width, 3).
        seconds: the duration of a frame.
        sounds: the recordings, int16 (B, samples); among tokens, what the segments of frames hear, one after the other.
        rate: the samples per second of `sounds`.
        segments: in a sequence of several kinds, such as the input of a vision-language model, the positions that are
            patches or frames; `kind` is that of the others.
        pictures: the images that the segments refer to, uint8 (height, width, 3) each.
    """

    kind: str
    texts: LabelTexts
    words: WordNumbers | None = None
    grid: tuple[int, int] | None = None
    leading: int = 0
    images: Tensor | None = None
    seconds: float | None = None
    sounds: Tensor | None = None
    rate: int | None = None
    segments: tuple[Segment, ...] = ()
    pictures: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        validate_labels(self)

    @classmethod
    def positions(cls, batch: int, length: int) -> Labels:
        """Position numbers from 0."""
        return cls("positions", (tuple(map(str, range(length))),) * batch)

    @classmethod
    def tokens(cls, texts: Iterable[Sequence[str]], words: Iterable[Sequence[int | None]] | None = None) -> Labels:
        """Labels from token texts; shorter sequences are padded with ""."""
        sequences = [texts] if isinstance(texts, str) else list(texts)
        if any(isinstance(row, str) for row in sequences):
            raise TypeError(
                f"texts must be a list of token texts for each sequence, got {texts!r:.80}: write [['a', 'b']] for one"
                " sequence of two tokens"
            )
        rows = [tuple(row) for row in sequences]
        for text in (text for row in rows for text in row):
            if not isinstance(text, str):
                raise TypeError(
                    f"texts must be texts, got {text!r:.80}: foci.Labels.from_ids(ids, tokenizer) decodes token ids"
                )
        length = max(map(len, rows), default=0)
        filled = tuple(row + ("",) * (length - len(row)) for row in rows)
        if words is None:
            return cls("tokens", filled)
        numbers = [tuple(row) for row in words]
        return cls("tokens", filled, tuple(row + (None,) * (length - len(row)) for row in numbers))

    @classmethod
    def patches(cls, rows: int, columns: int, *, image: Any = None, extra: int | Sequence[str] = 0) -> Labels:
        """Labels of an image's patches, row by row, after `extra` positions such as the class token.

        >>> labels = foci.Labels.patches(14, 14, extra=1)          # a ViT with 14 x 14 patches and a class token
        >>> len(labels), labels.texts[0][:3]
        (197, ('class token', '0,0', '0,1'))

        Args:
            rows, columns: the grid of patches.
            image: the picture to draw them on: a PIL image, an array or a tensor (height, width, 3) or (3, height,
                width), for a batch with one more axis first; None: none.
            extra: the number of positions before the first patch, or their names.
        """
        for name, number in (("rows", rows), ("columns", columns)):
            if not is_positive_int(number):
                raise ValueError(f"{name} must be an int of at least 1, got {number!r}")
        if isinstance(extra, int) and not isinstance(extra, bool) and extra >= 0:
            before = ("class token", *(f"register {i}" for i in range(1, extra)))[:extra]
        elif isinstance(extra, list | tuple) and all(isinstance(each, str) for each in extra):
            before = tuple(extra)
        else:
            raise ValueError(f"extra must be an int of at least 0 or a list of names, got {extra!r}")
        images = None if image is None else torch.stack([shrink_picture(each) for each in to_pictures(image)])
        texts = (*before, *Segment("patches", rows=rows, columns=columns).texts())
        batch = 1 if images is None else len(images)
        return cls("patches", (texts,) * batch, grid=(rows, columns), leading=len(before), images=images)

    @classmethod
    def from_offsets(
        cls,
        sources: Sequence[str],
        offsets: Sequence[Sequence[tuple[int, int]]],
        names: Sequence[Sequence[str]] | None = None,
        words: Sequence[Sequence[int | None]] | None = None,
    ) -> Labels:
        """Labels from character offsets into the source texts, which keeps split characters whole.

        >>> offsets = [(0, 0), (0, 2), (3, 4), (3, 4)]                       # [CLS], Hi, two halves of an emoji
        >>> foci.Labels.from_offsets(["Hi 🙂"], [offsets], [["[CLS]", "hi", "ð", "Ł"]]).texts
        (('[CLS]', 'Hi', ' 🙂', ''),)

        Args:
            sources: the texts that were tokenized.
            offsets: (start, end) of each token in its text, as tokenizers return them; (0, 0) for special tokens.
            names: the texts of special tokens ("[CLS]"); None: "".
            words: the word number of each token, as `word_ids` of a tokenizer returns it.
        """
        names = [[""] * len(row) for row in offsets] if names is None else names
        texts = [slice_by_offsets(source, row, name) for source, row, name in zip(sources, offsets, names, strict=True)]
        return cls.tokens(texts, words)

    @classmethod
    def from_ids(cls, ids: Any, decode: Any) -> Labels:
        """Labels from token ids; `decode` is a tokenizer, or a function from a list of ids to text.

        Neighbours are decoded together, which keeps characters that are split over tokens whole. Words begin at spaces.
        """
        listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        rows = listed if not listed or isinstance(listed[0], Iterable) else [listed]
        texts = [decode_each_token([int(number) for number in row], make_decoder(decode)) for row in rows]
        return cls.tokens(texts, [number_words_by_spaces(row) for row in texts])

    def text(self, batch: int) -> str:
        """The whole text of one sequence."""
        return "".join(self.texts[batch])

    def __len__(self) -> int:
        """The number of positions."""
        return len(self.texts[0]) if self.texts else 0

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.texts)

    def select(self, positions: Sequence[int]) -> Labels:
        """The labels of some positions; the grid is dropped unless all positions are selected.

        Segments are kept if the selected positions are the first ones and include them.
        """
        selected = list(positions)
        if selected == list(range(len(self))):
            return self
        texts = tuple(tuple(row[i] for i in selected) for row in self.texts)
        words = None if self.words is None else tuple(tuple(row[i] for i in selected) for row in self.words)
        are_first = selected == list(range(len(selected)))
        segments = tuple(segment for segment in self.segments if are_first and segment.stop <= len(selected))
        return replace(
            self, texts=texts, words=words, grid=None, leading=0, images=None, sounds=None, segments=segments
        )

    def select_sequence(self, batch: int) -> Labels:
        """The labels of one sequence, with a batch axis."""
        if self.batch == 1:
            return self
        part = slice(batch, batch + 1)
        return replace(
            self,
            texts=self.texts[part],
            words=None if self.words is None else self.words[part],
            images=None if self.images is None else self.images[part],
            sounds=None if self.sounds is None else self.sounds[part],
            segments=tuple(replace(each, sequence=0) for each in self.segments if each.sequence == batch),
        )

    def with_segments(self, segments: Iterable[Segment], pictures: Iterable[Tensor] = ()) -> Labels:
        """The labels with segments of patches and frames, whose positions get their texts.

        >>> text = foci.Labels.tokens([["What", " is", "<i>", "<i>", "<i>", "<i>", "?"]])
        >>> text.with_segments([foci.Segment("patches", start=2, rows=2, columns=2)]).texts
        (('What', ' is', '0,0', '0,1', '1,0', '1,1', '?'),)
        """
        placed = tuple(segments)
        texts = [list(row) for row in self.texts]
        words = None if self.words is None else [list(row) for row in self.words]
        for segment in placed:
            if segment.sequence < len(texts) and segment.stop <= len(texts[segment.sequence]):
                texts[segment.sequence][segment.start : segment.stop] = segment.texts()
                if words is not None:
                    words[segment.sequence][segment.start : segment.stop] = [None] * (segment.stop - segment.start)
        numbers = None if words is None else tuple(map(tuple, words))
        return replace(self, texts=tuple(map(tuple, texts)), words=numbers, segments=placed, pictures=tuple(pictures))

    def with_image(self, image: Any) -> Labels:
        """The labels of a grid of patches with another picture, which must have its proportions."""
        pictures = [shrink_picture(each) for each in to_pictures(image)]
        rows, columns = self.grid or (0, 0)
        if len(pictures) != self.batch:
            raise ValueError(f"image must have one picture for each of {self.batch} sequences, got {len(pictures)}")
        for height, width in (picture.shape[:2] for picture in pictures):
            if abs(height * columns / (width * rows) - 1) > 0.5 / max(rows, columns):
                raise ValueError(
                    f"image must have the proportions of {rows} x {columns} patches, got {height} x {width} pixels:"
                    " crop it as the model reads it"
                )
        return replace(self, images=torch.stack(pictures))

    def grids(self, batch: int = 0) -> list[list[Segment]]:
        """The segments of patches of each image of a sequence: a tile, a frame of a video or the whole image each."""
        if self.grid is not None:
            rows, columns = self.grid
            return [[Segment("patches", batch, self.leading, rows, columns, image=batch)]]
        images: dict[int, list[Segment]] = {}
        for segment in self.segments:
            if segment.kind == "patches" and segment.sequence == batch:
                images.setdefault(segment.image, []).append(segment)
        return list(images.values())

    def list_frames(self, batch: int = 0) -> list[int]:
        """The positions of the audio frames among the tokens of a sequence."""
        parts = [each for each in self.segments if each.kind == "frames" and each.sequence == batch]
        return [position for each in parts for position in range(each.start, each.stop)]

    def split_kinds(self, batch: int = 0) -> dict[str, list[int]]:
        """The positions of a sequence that are text, and those that are patches: {"text": [...], "image": [...]}."""
        patches = {
            position for grids in self.grids(batch) for each in grids for position in each.positions.flatten().tolist()
        }
        kinds = {"text": [], "image": sorted(patches)}
        if self.kind == "tokens":
            inside = {n for s in self.segments if s.sequence == batch for n in range(s.start, s.stop)}
            kinds["text"] = [position for position in range(len(self)) if position not in inside]
        return {kind: positions for kind, positions in kinds.items() if positions}

    def picture(self, batch: int = 0, image: int = 0, frame: int = 0) -> Tensor | None:
        """The picture of an image, or of a frame of a video, uint8 (height, width, 3); None if it was not kept."""
        if self.images is not None:
            return self.images[batch]
        segments = self.grids(batch)[image]
        number = next((each.picture for each in segments if each.frame in (None, frame)), None)
        return None if number is None else self.pictures[number]


def name_frames(numbers: Iterable[int], seconds: float | None) -> list[str]:
    """The texts of audio frames: the times at which they start, or their numbers."""
    return [f"{number * seconds:.2f}s" if seconds else str(number) for number in numbers]


def validate_labels(labels: Labels) -> None:
    if labels.kind not in LABEL_KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, LABEL_KINDS))}, got {labels.kind!r}")
    lengths = sorted({len(row) for row in labels.texts})
    if len(lengths) > 1:
        raise ValueError(f"all sequences must have the same number of positions, got {lengths}")
    if labels.words is not None and [len(row) for row in labels.words] != [len(row) for row in labels.texts]:
        raise ValueError("words must have one number per token, got lengths that differ from those of texts")
    if labels.grid is not None and labels.leading + labels.grid[0] * labels.grid[1] != len(labels):
        raise ValueError(
            f"labels with a grid of {labels.grid[0]} x {labels.grid[1]} patches after {labels.leading} positions must"
            f" have {labels.leading + labels.grid[0] * labels.grid[1]} positions, got {len(labels)}"
        )
    if labels.images is not None and (labels.images.dtype != torch.uint8 or labels.images.dim() != 4):
        got = f"{labels.images.dtype} {tuple(labels.images.shape)}"
        raise ValueError(f"images must be uint8 (B, height, width, 3), got {got}")
    if labels.sounds is not None and (labels.sounds.dtype != torch.int16 or labels.sounds.dim() != 2):
        raise ValueError(f"sounds must be int16 (B, samples), got {labels.sounds.dtype} {tuple(labels.sounds.shape)}")
    if labels.sounds is not None and not (labels.rate and labels.seconds):
        raise ValueError("rate and seconds must be given with sounds, got None")

    taken: set[tuple[int, int]] = set()
    for segment in labels.segments:
        if segment.sequence >= labels.batch or segment.stop > len(labels):
            raise ValueError(
                f"segments must lie within {labels.batch} sequences of {len(labels)} positions, got positions"
                f" {segment.start} to {segment.stop - 1} of sequence {segment.sequence}"
            )
        if segment.picture is not None and segment.picture >= len(labels.pictures):
            raise ValueError(f"picture must be below the {len(labels.pictures)} pictures, got {segment.picture}")
        own = {(segment.sequence, position) for position in segment.positions.flatten().tolist()}
        if own & taken:
            sequence, position = min(own & taken)
            raise ValueError(
                f"segments must have no position in common, got position {position} of sequence {sequence} twice"
            )
        taken |= own
    for picture in labels.pictures:
        if picture.dtype != torch.uint8 or picture.dim() != 3 or picture.shape[2] != 3:
            got = f"{picture.dtype} {tuple(picture.shape)}"
            raise ValueError(f"pictures must be uint8 (height, width, 3), got {got}")
