"""The page that `foci explain "a sentence"` prints: attention step by step, with computed numbers.

The vectors are untrained: they show how attention works, not what a sentence means. The row of one word, the focus, is
computed with plain Python arithmetic; the rest comes from `foci.attention`, and the two are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import foci
from foci.models.untrained import (
    HEAD_COUNT,
    VECTOR_WIDTH,
    UntrainedSentence,
    apply_random_projection,
    merge_heads,
    split_heads,
    split_words,
)
from foci.runtime.console import TextPage, clip_text, pad_text, text_width

MAX_SHOWN_WORDS = 24
MAX_WORD_WIDTH = 24
MIN_CELL_WIDTH, MAX_CELL_WIDTH = 4, 8
# The library computes in float32, the page's own arithmetic in float64.
ROW_TOLERANCE = 1e-5


@dataclass(frozen=True)
class AttentionRow:
    """The attention of one word, computed with plain Python numbers."""

    raw: list[float]
    scaled: list[float]
    exponentials: list[float]
    weights: list[float]
    weighted_values: list[list[float]]
    out: list[float]

    @classmethod
    def of(cls, sentence: UntrainedSentence, word: int) -> AttentionRow:
        """Compute the row of a word."""
        queries, keys, values = (tensor.tolist() for tensor in sentence.qkv)
        raw = [sum(q * k for q, k in zip(queries[word], key, strict=True)) for key in keys]
        scaled = [score / math.sqrt(VECTOR_WIDTH) for score in raw]
        exponentials = [math.exp(score) for score in scaled]
        weights = [exponential / sum(exponentials) for exponential in exponentials]
        weighted_values = [[weight * number for number in value] for weight, value in zip(weights, values, strict=True)]
        return cls(
            raw,
            scaled,
            exponentials,
            weights,
            weighted_values,
            [sum(column) for column in zip(*weighted_values, strict=True)],
        )

    def error(self, sentence: UntrainedSentence, word: int) -> float:
        """The largest difference from the library's weights and output for this word."""
        out, weights = sentence.output_and_weights
        library = torch.cat([weights.dense()[word], out[word]]).double()
        return float((library - torch.tensor([*self.weights, *self.out], dtype=torch.float64)).abs().max())


def choose_words(text: str, page: TextPage, word: str | None = None) -> UntrainedSentence:
    """The words of a text that fit a matrix of the page's width: the first ones, or those around `word`."""
    words = [clip_text(one, MAX_WORD_WIDTH) for one in split_words(text)]
    if not words:
        raise ValueError(f"the text must have at least one word, got {clip_text(repr(text), 20)}")
    label = min(max(map(text_width, words)), 7)
    shown = min(MAX_SHOWN_WORDS, (page.room - label) // MIN_CELL_WIDTH)
    focus = 0 if word is None else word_index(words, word)
    begin = max(0, min(focus - shown // 2, len(words) - shown)) if focus >= shown else 0
    return UntrainedSentence(words[begin : begin + shown], omitted=max(0, len(words) - shown))


def word_index(words: list[str], word: str) -> int:
    """The index of the first occurrence of a word."""
    folded = [other.casefold() for other in words]
    if word.casefold() not in folded:
        raise ValueError(f"--word must be one of {clip_text(' '.join(words), 200)}, got {clip_text(word, 40)!r}")
    return folded.index(word.casefold())


def explain(text: str, word: str | None = None, page: TextPage | None = None) -> TextPage:
    """Write the page for a sentence; `word` is the one whose row is shown in full.

    >>> print(explain("Jane is hungry.").lines[-1].strip()[:8])
    weights[
    """
    page = page or TextPage()
    sentence = choose_words(text, page, word)
    focus = sentence.most_focused_word() if word is None else word_index(sentence.words, word)
    row = AttentionRow.of(sentence, focus)
    write_words(page, sentence, focus)
    write_vectors(page, sentence, focus)
    write_projections(page, sentence, focus)
    write_scores(page, sentence, focus, row)
    write_attention_matrix(page, sentence, focus)
    write_sum(page, sentence, focus, row)
    write_heads(page, sentence, focus)
    write_causal(page, sentence, focus)
    write_check(page, sentence, focus, row)
    return page


def write_words(page: TextPage, sentence: UntrainedSentence, focus: int) -> None:
    count = len(sentence.words)
    page.lines.append(page.bold("Attention, step by step"))
    page.heading("1  The sentence becomes words")
    page.wrapped([page.accent(word) if i == focus else word for i, word in enumerate(sentence.words)], " · ")
    if sentence.omitted:
        words = "1 more word is" if sentence.omitted == 1 else f"{sentence.omitted:,} more words are"
        page.prose(f"({words} omitted so that the matrix fits the terminal.)")
    if count == 1:
        page.prose(f"“{sentence.words[focus]}” is the only word and attends to itself: add more words.")
    else:
        page.prose(f"Each word attends to all {count} words, itself included. We follow “{sentence.words[focus]}”.")


def write_vectors(page: TextPage, sentence: UntrainedSentence, focus: int) -> None:
    page.heading("2  Each word becomes a vector with its position added")
    page.prose(
        f"{VECTOR_WIDTH} numbers per word. A model learns them; here they are random, seeded with the word, so equal "
        "words have equal vectors. Sines and cosines of the position are added: without them attention would ignore "
        "the order of the words."
    )
    write_vector(page, f"  {sentence.words[focus]}", sentence.embeddings[focus].tolist())
    write_vector(page, f"+ position {focus}", (sentence.inputs - sentence.embeddings)[focus].tolist())
    write_vector(page, "= input", sentence.inputs[focus].tolist(), strong=True)


def write_projections(page: TextPage, sentence: UntrainedSentence, focus: int) -> None:
    page.heading("3  Each word gets a query, a key and a value")
    page.prose(
        f"Three {VECTOR_WIDTH}×{VECTOR_WIDTH} matrices, also random and the same for every word, turn the input into "
        "a query (what the word looks for), a key (what queries are compared with) and a value (what it "
        "contributes to the output)."
    )
    for name, tensor in zip(("query", "key", "value"), sentence.qkv, strict=True):
        write_vector(page, f"  {name}", tensor[focus].tolist())


def write_scores(page: TextPage, sentence: UntrainedSentence, focus: int, row: AttentionRow) -> None:
    words, best = sentence.words, row.weights.index(max(row.weights))
    queries, keys, _ = sentence.qkv
    page.heading("4  The query is compared with every key")
    page.prose(f"A score is a dot product. The query of “{words[focus]}” times the key of “{words[best]}”:")
    pairs = list(zip(queries[focus].tolist(), keys[best].tolist(), strict=True))
    write_vector(page, f"  {words[focus]}", [q for q, _ in pairs])
    write_vector(page, f"× {words[best]}", [k for _, k in pairs])
    write_vector(page, "= products", [q * k for q, k in pairs], strong=True)
    page.line(f"  sum: {page.bold(f'{row.raw[best]:+.2f}')}")
    page.prose(
        f"A sum of {VECTOR_WIDTH} products has √{VECTOR_WIDTH} times the spread of a single one, so it is divided "
        f"by √{VECTOR_WIDTH} = {math.sqrt(VECTOR_WIDTH):.2f}. The softmax turns scores into weights: e to the power of "
        "each, divided by their sum."
    )
    page.line()
    write_table(page, words, row)
    _, unscaled = foci.attention(*sentence.qkv, score=foci.Dot(scale=1.0), return_weights=True)
    would, does = f"{float(unscaled.dense()[focus, best]):.0%}", f"{row.weights[best]:.0%}"
    if would != does:
        page.prose(
            f"Without the division “{words[best]}” would get {would} instead of {does}: the wider the vectors, the "
            "more the largest score would dominate, and the smaller the gradients of the others."
        )


def write_table(page: TextPage, words: list[str], row: AttentionRow) -> None:
    label = min(max(*map(text_width, words), len("total")), 16)
    page.line(page.faint(f"{pad_text('key', label)}     q·k    ÷ √{VECTOR_WIDTH}   exp(·)   weight"))
    for word, raw, scaled, exponential, weight in zip(
        words, row.raw, row.scaled, row.exponentials, row.weights, strict=True
    ):
        numbers = f"{pad_text(word, label)}  {raw:+6.2f}  {scaled:+6.2f}  {exponential:7.2f}  {weight:6.1%}"
        page.line(f"{numbers}  {page.bar(weight, page.room - text_width(numbers) - 2)}")
    page.line(
        page.faint(f"{pad_text('total', label)}  {'':6}  {'':6}  {sum(row.exponentials):7.2f}  {sum(row.weights):6.1%}")
    )


def write_attention_matrix(page: TextPage, sentence: UntrainedSentence, focus: int) -> None:
    page.heading("5  The rows of all words: the attention matrix")
    page.prose("The same for every word, in percent: one row per query, one column per key.")
    page.line()
    write_grid(page, sentence.words, focus, sentence.output_and_weights[1].dense().tolist())


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


def write_sum(page: TextPage, sentence: UntrainedSentence, focus: int, row: AttentionRow) -> None:
    page.heading("6  The output is the weighted sum of the values")
    page.prose(f"The output of “{sentence.words[focus]}”: each value times its weight, summed.")
    order = sorted(range(len(row.weights)), key=lambda j: -row.weights[j])
    heaviest, rest = order[:3], order[3:]
    for j in heaviest:
        write_vector(page, f"{row.weights[j]:4.0%} {sentence.words[j]}", row.weighted_values[j])
    if rest:
        share = sum(row.weights[j] for j in rest)
        numbers = [sum(row.weighted_values[j][column] for j in rest) for column in range(VECTOR_WIDTH)]
        write_vector(page, f"{share:4.0%} rest", numbers)
    write_vector(page, " sum output", row.out, strong=True)


def write_heads(page: TextPage, sentence: UntrainedSentence, focus: int) -> None:
    page.heading("7  Two heads attend independently")
    page.prose(
        f"The {VECTOR_WIDTH} numbers are split into {HEAD_COUNT} heads of {VECTOR_WIDTH // HEAD_COUNT}. "
        "Each head has its own softmax; their outputs are concatenated and multiplied by one more matrix:"
    )
    out, weights = foci.attention(*map(split_heads, sentence.qkv), return_weights=True)
    merged = merge_heads(out)
    page.wrapped(
        [
            format_shape(sentence.qkv[0]),
            f"─split→ {format_shape(split_heads(sentence.qkv[0])[0])}",
            f"─attend→ {format_shape(out[0])}",
            f"─merge→ {format_shape(merged)}",
            f"─mix→ {format_shape(apply_random_projection(merged, 'output'))}",
        ]
    )
    for head in range(HEAD_COUNT):
        keys = format_heaviest(sentence.words, weights.dense()[0, head, focus])
        commas = [f"{one}," for one in keys[:-1]]
        page.wrapped([f"head {head}: “{sentence.words[focus]}” attends to", *commas, keys[-1]], hang=8)


def format_heaviest(words: list[str], weights: Tensor) -> list[str]:
    values, keys = weights.topk(min(3, len(words)))
    return [f"“{words[j]}” {value:.0%}" for value, j in zip(values.tolist(), keys.tolist(), strict=True)]


def format_shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


def write_causal(page: TextPage, sentence: UntrainedSentence, focus: int) -> None:
    page.heading("8  The causal mask hides later words")
    page.prose(
        "A model that generates text word by word cannot attend to later words. The causal mask hides them (·) before "
        "the softmax, so each row still sums to 100%:"
    )
    page.line()
    _, weights = foci.attention(*sentence.qkv, mask=foci.causal, return_weights=True)
    write_grid(page, sentence.words, focus, weights.dense().tolist(), causal=True)


def write_check(page: TextPage, sentence: UntrainedSentence, focus: int, row: AttentionRow) -> None:
    word, error = sentence.words[focus], row.error(sentence, focus)
    if error > ROW_TOLERANCE:
        raise ArithmeticError(
            f"foci.attention must equal the arithmetic shown to within {ROW_TOLERANCE}, got a difference of {error}"
        )
    page.heading("What this shows")
    page.prose("The vectors are untrained: the numbers show how attention works, not what the sentence means.")
    page.prose(f"✓ Checked: foci.attention gives the row of “{word}” to within {error:.1e}. The same in code:")
    page.line()
    page.wrapped(["out, weights =", "foci.attention(query, key, value, return_weights=True)"])
    page.line(f"weights[{focus}, :]   # the row of “{word}”")


def write_vector(page: TextPage, label: str, numbers: list[float], strong: bool = False) -> None:
    """Write a labelled vector on one line."""
    label = pad_text(label, min(page.room - 6 * len(numbers), 16))
    text = label + "".join(f" {number:+.2f}" if abs(number) < 9.995 else f" {number:+.1f}" for number in numbers)
    page.line(page.bold(text) if strong else text)
