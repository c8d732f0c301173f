"""A model, one step after the other: the same few calls for every kind of model, with and without a cache.

B sequences, T tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foci.nn.layer_caches import Caches
from foci.nn.transformer import Decoder

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


class PreparedPrompt(NamedTuple):
    """What a model is to continue: the tokens so far, which of them are real, and what it has read."""

    tokens: Tensor  # (B, T), padded on the left
    real: Tensor | None  # bool (B, T); None: all
    memory: Any  # what `encode` gave; None for a model that reads nothing


class CachedSteps:
    """A model that keeps what it has computed, so that each step computes one token."""

    def __init__(self, model: nn.Module, begun: PreparedPrompt) -> None:
        self.model: Any = model
        self.memory, self.tokens, self.real = begun.memory, begun.tokens, begun.real
        self.caches = self._empty()

    def first(self) -> Tensor:
        """The logits (B, V) of what comes after the prompt."""
        return compute_next_logits(self.model, self.tokens, self.real, self.memory, self.caches)

    def next(self, tokens: Tensor) -> Tensor:
        """Takes one more token of each sequence (B,) and gives the logits (B, V) of the next."""
        return compute_next_logits(self.model, tokens[:, None], None, self.memory, self.caches)

    def spread(self, times: int) -> None:
        """Makes several rows of each sequence, one beside the other."""
        index = torch.arange(len(self.tokens), device=self.tokens.device).repeat_interleave(times)
        if self.memory is not None:
            self.memory = self.memory.at(index)
        self.caches.reorder(index)

    def reorder(self, index: Tensor) -> None:
        """Makes row i what row index[i] was, of the same sequence."""
        if not isinstance(self.caches, Caches):
            self.caches.reorder(index)
            return
        # Rows of one sequence have read the same, and are padded alike: only what they wrote differs.
        for own, _ in self.caches.layers:
            own.reorder(index)

    def _empty(self) -> Any:
        return self.model.caches()


class UncachedSteps(CachedSteps):
    """A model that keeps nothing: each step computes all tokens anew. Slow; it is what the others must equal."""

    def next(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat([self.tokens, tokens[:, None]], dim=1)
        if self.real is not None:
            self.real = torch.cat([self.real, torch.ones_like(self.real[:, :1])], dim=1)
        return self.first()

    def spread(self, times: int) -> None:
        index = torch.arange(len(self.tokens), device=self.tokens.device).repeat_interleave(times)
        if self.memory is not None:
            self.memory = self.memory.at(index)
        self.reorder(index)

    def reorder(self, index: Tensor) -> None:
        self.tokens = self.tokens[index]
        self.real = None if self.real is None else self.real[index]

    def _empty(self) -> None:
        return None


def compute_next_logits(model: Any, tokens: Tensor, real: Tensor | None, memory: Any, caches: Any) -> Tensor:
    """The logits (B, V) after the last of these tokens."""
    if memory is None:
        fewer = {"only_last": True} if isinstance(model, Decoder) else {}
        out = model(tokens, padding=real, caches=caches, **fewer)
    else:
        out = model.decode(tokens, memory, caches=caches)
    if out.logits is None:
        raise ValueError(f"generate needs a model with logits, but this {type(model).__name__} has no head")
    logits: Tensor = out.logits[:, -1]
    return logits


def prepare_prompt(model: Any, prompt: Prompt, start: int | Sequence[int] | None) -> PreparedPrompt:
    """The prompts as one batch: padded on the left for a model that continues them, else read by its encoder."""
    device = next(model.parameters()).device
    rows = split_prompts(prompt, device)
    if not hasattr(model, "encode"):
        if start is not None:
            raise ValueError(f"{type(model).__name__} continues the prompt itself, but start={start!r} was given")
        tokens, lengths = pad_prompts(rows, left=True)
        places = torch.arange(tokens.shape[1], device=device)
        real = None if lengths is None else places >= tokens.shape[1] - lengths[:, None]
        return PreparedPrompt(tokens, real, None)
    if start is None:
        raise ValueError(f"{type(model).__name__} writes after start=, the token its answers begin with, but got None")
    source, lengths = pad_prompts(rows, left=False)
    first = torch.tensor([start] if isinstance(start, int) else list(start), device=device)
    return PreparedPrompt(first.expand(len(rows), -1), None, model.encode(source, padding=lengths))


def split_prompts(prompt: Prompt, device: torch.device) -> list[Tensor]:
    """One tensor per prompt: (T,) of tokens, or (T, features) of frames."""
    given: Any = prompt
    if isinstance(given, str) or not isinstance(given, Tensor | Sequence):
        raise TypeError(f"a prompt must be tokens, lists of whole numbers or tensors, but got {type(prompt).__name__}")
    if isinstance(prompt, Tensor):
        single = prompt.dim() == (2 if prompt.is_floating_point() else 1)
        rows = [prompt] if single else list(prompt)
    else:
        single = len(prompt) > 0 and isinstance(prompt[0], int)
        rows = [torch.as_tensor(each) for each in ([prompt] if single else prompt)]
    if not rows or any(len(row) == 0 for row in rows):
        raise ValueError(f"expected at least one prompt of at least one token, but got {prompt!r}")
    if len({(row.shape[1:], row.dtype) for row in rows}) > 1 or rows[0].dim() != 1 + rows[0].is_floating_point():
        kinds = sorted({f"{row.dtype} {tuple(row.shape)}" for row in rows})
        raise ValueError(f"prompts are whole numbers (T,) or frames (T, features), but got {', '.join(kinds[:4])}")
    return [row.to(device) for row in rows]


def pad_prompts(rows: list[Tensor], *, left: bool) -> tuple[Tensor, Tensor | None]:
    """The rows as one tensor, and their lengths where these differ."""
    lengths = [len(row) for row in rows]
    if len(set(lengths)) == 1:
        return torch.stack(rows), None
    batch = rows[0].new_zeros(len(rows), max(lengths), *rows[0].shape[1:])
    for place, row in zip(batch, rows, strict=True):
        first = len(place) - len(row) if left else 0
        place[first : first + len(row)] = row
    return batch, torch.tensor(lengths, device=batch.device)
