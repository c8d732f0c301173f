"""`foci explain "a sentence"`: attention worked through in the terminal, every number computed there and then.

The vectors are not trained: they show how attention works, not what a sentence means. One row, that of the word in
focus, is worked out with plain Python arithmetic; the rest comes from `foci.attention`, and the two are compared.
"""

import hashlib
import math
import unicodedata
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import foci
from foci.runtime.console import TextPage, clip_text, pad_text, text_width

VECTOR_WIDTH = 8
HEAD_COUNT = 2
MAX_SHOWN_WORDS = 24
MAX_WORD_WIDTH = 24
MIN_CELL_WIDTH, MAX_CELL_WIDTH = 4, 8
# The library computes in float32, the arithmetic on this page in Python's double precision.
ROW_TOLERANCE = 1e-5


def split_words(text: str) -> list[str]:
    """Words and punctuation marks; where a script has no spaces, each character.

    >>> split("She's hungry, really.")
    ['She', "'s", 'hungry', ',', 'really', '.']
    """
    words: list[str] = []
    joins = False
    for character in unicodedata.normalize("NFC", text):
        kind = unicodedata.category(character)[0]
        letter = kind in "LN" or character == "_"
        wide = unicodedata.east_asian_width(character) in "WF"
        # A mark belongs to the character before it; the rest of what does not print separates words.
        if words and (kind == "M" or character == "\u200d" or words[-1].endswith("\u200d")):
            words[-1] += character
        elif kind in "ZC":
            joins = False
        elif joins and letter and not wide:
            words[-1] += character
        else:
            words.append(character)
            joins = (letter and not wide) or character in "'’"
    return words


def random_from_name(name: str, *shape: int) -> Tensor:
    """Normal random numbers that depend on nothing but the name: the same on every machine and in every run."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def apply_random_projection(x: Tensor, name: str) -> Tensor:
    """A linear map with random weights, scaled to keep the spread of the numbers."""
    # Of the first few seeds, 2 gives pictures that are neither flat nor all on one word.
    return x @ random_from_name(f"projection 2 {name}", VECTOR_WIDTH, VECTOR_WIDTH).div(VECTOR_WIDTH**0.5)


def split_heads(x: Tensor) -> Tensor:
    """(T, WIDTH) -> (1, HEADS, T, WIDTH / HEADS)."""
    return x.view(1, -1, HEAD_COUNT, VECTOR_WIDTH // HEAD_COUNT).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(1, HEADS, T, WIDTH / HEADS) -> (T, WIDTH): the way back from `fold`."""
    return x.transpose(1, 2).reshape(-1, VECTOR_WIDTH)


@dataclass(frozen=True)
class UntrainedSentence:
    """A sentence on its way through attention."""

    words: list[str]
    left_out: int = 0

    @cached_property
    def embedded(self) -> Tensor:
        """A vector per word; equal words have equal vectors."""
        return torch.stack([random_from_name(f"word {word.casefold()}", VECTOR_WIDTH) for word in self.words])

    @cached_property
    def placed(self) -> Tensor:
        """The vectors with their positions added."""
        return self.embedded + foci.sinusoidal(len(self.words), VECTOR_WIDTH)

    @cached_property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (T, WIDTH)."""
        return apply_random_projection(self.placed, "query"), apply_random_projection(self.placed, "key"), apply_random_projection(self.placed, "value")

    @cached_property
    def answer(self) -> tuple[Tensor, "foci.Weights"]:
        """What the library says."""
        out, weights = foci.attention(*self.qkv, return_weights=True)
        return out, weights

    def sharpest(self) -> int:
        """The word that spreads its attention least: punctuation only where there is nothing else."""
        entropy = self.answer[1].entropy().clone()
        spoken = torch.tensor([any(map(str.isalnum, word)) for word in self.words])
        if spoken.any():
            entropy[~spoken] = math.inf
        return int(entropy.argmin())


@dataclass(frozen=True)
class AttentionRow:
    """One word's attention by hand: the arithmetic that the page shows."""

    raw: list[float]
    scaled: list[float]
    powers: list[float]
    weights: list[float]
    shares: list[list[float]]
    out: list[float]

    @classmethod
    def of(cls, example: UntrainedSentence, word: int) -> "Row":
        """Works the row out with Python's own numbers."""
        queries, keys, values = (tensor.tolist() for tensor in example.qkv)
        raw = [sum(q * k for q, k in zip(queries[word], key, strict=True)) for key in keys]
        scaled = [score / math.sqrt(VECTOR_WIDTH) for score in raw]
        powers = [math.exp(score) for score in scaled]
        weights = [power / sum(powers) for power in powers]
        shares = [[weight * number for number in value] for weight, value in zip(weights, values, strict=True)]
        return cls(raw, scaled, powers, weights, shares, [sum(column) for column in zip(*shares, strict=True)])

    def error(self, example: UntrainedSentence, word: int) -> float:
        """The largest difference between this row and the library's: its weights and its output."""
        out, weights = example.answer
        theirs = torch.cat([weights.dense()[word], out[word]]).double()
        return float((theirs - torch.tensor([*self.weights, *self.out], dtype=torch.float64)).abs().max())


def choose_words(text: str, page: TextPage, word: str | None = None) -> UntrainedSentence:
    """The words of a text, as many as a matrix of the page's width can show: the first, or those around `word`."""
    words = [clip_text(one, MAX_WORD_WIDTH) for one in split_words(text)]
    if not words:
        raise ValueError(f"expected a sentence with at least one word, received {clip_text(repr(text), 20)}")
    label = min(max(map(text_width, words)), 7)
    shown = min(MAX_SHOWN_WORDS, (page.room - label) // MIN_CELL_WIDTH)
    followed = 0 if word is None else word_index(words, word)
    begin = max(0, min(followed - shown // 2, len(words) - shown)) if followed >= shown else 0
    return UntrainedSentence(words[begin : begin + shown], left_out=max(0, len(words) - shown))


def word_index(words: list[str], word: str) -> int:
    """Where the word first stands."""
    folded = [other.casefold() for other in words]
    if word.casefold() not in folded:
        raise ValueError(f"expected one of the words {clip_text(' '.join(words), 200)}, received {clip_text(word, 40)!r}")
    return folded.index(word.casefold())


def explain(text: str, word: str | None = None, page: TextPage | None = None) -> TextPage:
    """Attention worked through on a sentence; `word` is the one whose row is shown in full.

    >>> print(explain("Jane is hungry.").lines[-1].strip()[:8])
    weights[
    """
    page = page or TextPage()
    example = choose_words(text, page, word)
    focus = example.sharpest() if word is None else word_index(example.words, word)
    row = AttentionRow.of(example, focus)
    write_words(page, example, focus)
    write_vectors(page, example, focus)
    write_projections(page, example, focus)
    write_scores(page, example, focus, row)
    write_attention_matrix(page, example, focus)
    write_sum(page, example, focus, row)
    write_heads(page, example, focus)
    write_causal(page, example, focus)
    write_check(page, example, focus, row)
    return page


def write_words(page: TextPage, example: UntrainedSentence, focus: int) -> None:
    count = len(example.words)
    page.lines.append(page.bold("Attention, step by step"))
    page.heading("1  The sentence becomes words")
    page.wrapped([page.accent(word) if i == focus else word for i, word in enumerate(example.words)], " · ")
    if example.left_out:
        words = "1 more word is" if example.left_out == 1 else f"{example.left_out:,} more words are"
        page.prose(f"({words} left out, to keep the pictures readable.)")
    if count == 1:
        page.prose(f"Alone, “{example.words[focus]}” can look only at itself: give it company to see it choose.")
    else:
        page.prose(f"Every word may look at all {count}, itself included. We follow “{example.words[focus]}”.")


def write_vectors(page: TextPage, example: UntrainedSentence, focus: int) -> None:
    page.heading("2  Each word becomes a vector, and is told its place")
    page.prose(
        f"{VECTOR_WIDTH} numbers per word. A model learns them; here they are random, seeded with the word itself, so equal "
        "words have equal vectors. Sines and cosines of the position are added: without them attention could not tell "
        "one order of the words from another."
    )
    write_vector(page, f"  {example.words[focus]}", example.embedded[focus].tolist())
    write_vector(page, f"+ place {focus}", (example.placed - example.embedded)[focus].tolist())
    write_vector(page, "= input", example.placed[focus].tolist(), strong=True)


def write_projections(page: TextPage, example: UntrainedSentence, focus: int) -> None:
    page.heading("3  Each word asks, offers and carries")
    page.prose(
        f"Three {VECTOR_WIDTH}×{VECTOR_WIDTH} matrices, random too and the same for every word, turn the input into a query (what "
        "the word looks for), a key (what it can be found by) and a value (what it hands over)."
    )
    for name, tensor in zip(("query", "key", "value"), example.qkv, strict=True):
        write_vector(page, f"  {name}", tensor[focus].tolist())


def write_scores(page: TextPage, example: UntrainedSentence, focus: int, row: AttentionRow) -> None:
    words, best = example.words, row.weights.index(max(row.weights))
    queries, keys, _ = example.qkv
    page.heading("4  The query meets every key")
    page.prose(f"A score is a dot product: multiply number by number, add up. “{words[focus]}” asks “{words[best]}”:")
    pairs = list(zip(queries[focus].tolist(), keys[best].tolist(), strict=True))
    write_vector(page, f"  {words[focus]}", [q for q, _ in pairs])
    write_vector(page, f"× {words[best]}", [k for _, k in pairs])
    write_vector(page, "= products", [q * k for q, k in pairs], strong=True)
    page.line(f"  added up: {page.bold(f'{row.raw[best]:+.2f}')}")
    page.prose(
        f"A sum of {VECTOR_WIDTH} products spreads √{VECTOR_WIDTH} times as wide as a single one, so it is divided by √{VECTOR_WIDTH} = "
        f"{math.sqrt(VECTOR_WIDTH):.2f}. The softmax turns scores into shares: e to the power of each, divided by the total."
    )
    page.line()
    write_table(page, words, row)
    _, unscaled = foci.attention(*example.qkv, score=foci.Dot(scale=1.0), return_weights=True)
    would, does = f"{float(unscaled.dense()[focus, best]):.0%}", f"{row.weights[best]:.0%}"
    if would != does:
        page.prose(
            f"Without the division “{words[best]}” would take {would} instead of {does}: the wider the vectors, the "
            "more the winner would take all, and the less there would be to learn from the others."
        )


def write_table(page: TextPage, words: list[str], row: AttentionRow) -> None:
    label = min(max(*map(text_width, words), len("total")), 16)
    page.line(page.faint(f"{pad_text('key', label)}     q·k    ÷ √{VECTOR_WIDTH}  e to it   weight"))
    for word, raw, scaled, power, weight in zip(words, row.raw, row.scaled, row.powers, row.weights, strict=True):
        numbers = f"{pad_text(word, label)}  {raw:+6.2f}  {scaled:+6.2f}  {power:7.2f}  {weight:6.1%}"
        page.line(f"{numbers}  {page.bar(weight, page.room - text_width(numbers) - 2)}")
    page.line(page.faint(f"{pad_text('total', label)}  {'':6}  {'':6}  {sum(row.powers):7.2f}  {sum(row.weights):6.1%}"))


def write_attention_matrix(page: TextPage, example: UntrainedSentence, focus: int) -> None:
    page.heading("5  Everyone looks at once")
    page.prose("The same for every word is the attention matrix, in percent: a row looks, a column is looked at.")
    page.line()
    write_grid(page, example.words, focus, example.answer[1].dense().tolist())


def write_grid(page: TextPage, words: list[str], focus: int, weights: list[list[float]], causal: bool = False) -> None:
    longest = max(map(text_width, words))
    label = min(longest, max(7, page.room - MAX_CELL_WIDTH * len(words)), 12)
    cell = max(MIN_CELL_WIDTH, min(MAX_CELL_WIDTH, longest + 1, (page.room - label) // len(words)))
    label += page.room > label + cell * len(words)
    page.line(" " * label + "".join(page.cell(word, cell) for word in words))
    for i, (word, row) in enumerate(zip(words, weights, strict=True)):
        name = pad_text(word, label)
        hidden = page.faint(page.cell("·", cell))
        cells = [hidden if causal and j > i else page.shaded(weight, cell) for j, weight in enumerate(row)]
        page.line((page.accent(name) if i == focus else name) + "".join(cells))


def write_sum(page: TextPage, example: UntrainedSentence, focus: int, row: AttentionRow) -> None:
    page.heading("6  The values are mixed by these weights")
    page.prose(f"What “{example.words[focus]}” takes along: each value times its weight, added up.")
    order = sorted(range(len(row.weights)), key=lambda j: -row.weights[j])
    top, rest = order[:3], order[3:]
    for j in top:
        write_vector(page, f"{row.weights[j]:4.0%} {example.words[j]}", row.shares[j])
    if rest:
        share = sum(row.weights[j] for j in rest)
        numbers = [sum(row.shares[j][column] for j in rest) for column in range(VECTOR_WIDTH)]
        write_vector(page, f"{share:4.0%} rest", numbers)
    write_vector(page, " sum output", row.out, strong=True)


def write_heads(page: TextPage, example: UntrainedSentence, focus: int) -> None:
    page.heading("7  Two heads, two choices")
    page.prose(
        f"One softmax makes one choice. So the {VECTOR_WIDTH} numbers are folded into {HEAD_COUNT} heads of {VECTOR_WIDTH // HEAD_COUNT}, each "
        "attends on its own, and what they found is joined and mixed by one more matrix:"
    )
    out, weights = foci.attention(*map(split_heads, example.qkv), return_weights=True)
    joined = merge_heads(out)
    page.wrapped(
        [
            format_shape(example.qkv[0]),
            f"─fold→ {format_shape(split_heads(example.qkv[0])[0])}",
            f"─attend→ {format_shape(out[0])}",
            f"─join→ {format_shape(joined)}",
            f"─mix→ {format_shape(apply_random_projection(joined, 'output'))}",
        ]
    )
    for head in range(HEAD_COUNT):
        seen = format_heaviest(example.words, weights.dense()[0, head, focus])
        commas = [f"{one}," for one in seen[:-1]]
        page.wrapped([f"head {head}: “{example.words[focus]}” looks at", *commas, seen[-1]], hang=8)


def format_heaviest(words: list[str], weights: Tensor) -> list[str]:
    values, keys = weights.topk(min(3, len(words)))
    return [f"“{words[j]}” {value:.0%}" for value, j in zip(values.tolist(), keys.tolist(), strict=True)]


def format_shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


def write_causal(page: TextPage, example: UntrainedSentence, focus: int) -> None:
    page.heading("8  A writer may not look ahead")
    page.prose(
        "A model that writes word by word must not see what comes later. The causal mask hides it (·) before the "
        "softmax, so that each row shares its 100% among what is left:"
    )
    page.line()
    _, weights = foci.attention(*example.qkv, mask=foci.causal, return_weights=True)
    write_grid(page, example.words, focus, weights.dense().tolist(), causal=True)


def write_check(page: TextPage, example: UntrainedSentence, focus: int, row: AttentionRow) -> None:
    word, error = example.words[focus], row.error(example, focus)
    if error > ROW_TOLERANCE:
        raise ArithmeticError(
            f"expected foci.attention to equal the arithmetic shown, received a difference of {error}"
        )
    page.heading("What this shows, and what it does not")
    page.prose("These vectors were never trained: the pictures show how attention works, not what the sentence means.")
    page.prose(f"✓ Checked: foci.attention gives the row of “{word}” to within {error:.1e}. All of it in code:")
    page.line()
    page.wrapped(["out, weights =", "foci.attention(query, key, value, return_weights=True)"])
    page.line(f"weights[{focus}, :]   # the row of “{word}”")


def write_vector(page: TextPage, label: str, numbers: list[float], strong: bool = False) -> None:
    """A labelled vector on one line."""
    label = pad_text(label, min(page.room - 6 * len(numbers), 16))
    text = label + "".join(f" {number:+.2f}" if abs(number) < 9.995 else f" {number:+.1f}" for number in numbers)
    page.line(page.bold(text) if strong else text)
