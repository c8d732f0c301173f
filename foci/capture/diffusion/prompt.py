"""The texts of a prompt's positions, from the token ids that the text encoders of a pipeline read.

B batch, T tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from foci.capture.diffusion.latents import DenoiserInput
from foci.record.labels import Labels


class EncodedPrompt(NamedTuple):
    """The token ids (B, T) that a text encoder of the pipeline read, and its tokenizer."""

    ids: Tensor
    tokenizer: Any
    width: int


@dataclass
class PromptText:
    """The texts of the prompt's positions, one row per prompt, and how many of them are not padding."""

    texts: list[list[str]]
    words: list[list[int | None]]
    used: list[list[int]] = field(default_factory=list)


def read_prompt(prompts: Sequence[EncodedPrompt], inputs: DenoiserInput, model: str) -> PromptText | None:
    """The texts at the positions that a denoiser reads, from the ids of the text encoders; None if they do not fit."""
    length = inputs.text_length
    # Each encoder reads the prompt first, then the negative prompt.
    first: dict[int, EncodedPrompt] = {}
    for prompt in prompts:
        first.setdefault(id(prompt.tokenizer), prompt)
    known = list(first.values())
    fitting = [prompt for prompt in known if prompt.ids.shape[1] == length]
    by_width = [prompt for prompt in fitting if prompt.width == inputs.text_width]
    if fitting:
        return decode_prompt((by_width or fitting)[0], range(length))
    for before in known:
        for after in known:
            if before is not after and before.ids.shape[1] + after.ids.shape[1] == length:
                return join_prompts(decode_prompt(before), decode_prompt(after))
    longer = [prompt for prompt in known if prompt.ids.shape[1] > length]
    if longer:
        # An instruction before the prompt is left out; Sana keeps its first token.
        total = longer[0].ids.shape[1]
        kept = [0, *range(total - length + 1, total)] if model.startswith("Sana") else range(total - length, total)
        return decode_prompt(longer[0], kept)
    if known:
        shorter = decode_prompt(known[0])
        missing = length - known[0].ids.shape[1]
        return PromptText(
            [row + [""] * missing for row in shorter.texts],
            [row + [None] * missing for row in shorter.words],
            shorter.used,
        )
    return None


def decode_prompt(prompt: EncodedPrompt, positions: Sequence[int] | None = None) -> PromptText:
    """The texts of some positions of a prompt; those of padding are empty."""
    rows = prompt.ids[:, list(positions)] if positions is not None else prompt.ids
    used = [find_used_positions(row, prompt.tokenizer) for row in rows.tolist()]
    if prompt.tokenizer is None:
        labels = Labels.tokens([[str(number) for number in row] for row in rows.tolist()])
    else:
        labels = Labels.from_ids(rows, prompt.tokenizer)
    texts = [
        [text if n in kept else "" for n, text in enumerate(row)] for row, kept in zip(labels.texts, used, strict=True)
    ]
    words: list[list[int | None]] = [[None] * len(row) for row in texts]
    if labels.words is not None:
        words = [
            [w if n in kept else None for n, w in enumerate(row)] for row, kept in zip(labels.words, used, strict=True)
        ]
    return PromptText(texts, words, used)


def join_prompts(before: PromptText, after: PromptText) -> PromptText:
    """The positions of two encoders one after the other."""
    count = len(before.texts[0])
    highest = max((number for row in before.words for number in row if number is not None), default=-1) + 1
    words = [
        [*a, *(None if n is None else n + highest for n in b)] for a, b in zip(before.words, after.words, strict=True)
    ]
    return PromptText(
        [[*a, *b] for a, b in zip(before.texts, after.texts, strict=True)],
        words,
        [[*a, *(count + n for n in b)] for a, b in zip(before.used, after.used, strict=True)],
    )


def find_used_positions(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """The positions before and after which there is only padding; the end token stays if it is the padding token."""
    padding = getattr(tokenizer, "pad_token_id", None)
    start, stop = 0, len(ids)
    while stop > start and ids[stop - 1] == padding:
        stop -= 1
    while start < stop and ids[start] == padding:
        start += 1
    if padding is not None and padding == getattr(tokenizer, "eos_token_id", None):
        stop = min(stop + 1, len(ids))
    return [*range(start, stop)]
