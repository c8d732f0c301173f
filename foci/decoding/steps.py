"""Decoding steps: batches the prompts, then runs any kind of model one token at a time, with or without a cache.

B sequences, T tokens, V vocabulary size.
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
    """A batch of prompts as the decoder needs it."""

    tokens: Tensor  # (B, T), padded on the left
    real: Tensor | None  # bool (B, T), False at padding; None: no padding
    memory: Any  # the result of `encode`; None for a model without an encoder


class CachedSteps:
    """Runs a model with caches, so that each step computes one token."""

    def __init__(self, model: nn.Module, prepared: PreparedPrompt) -> None:
        self.model: Any = model
        self.memory, self.tokens, self.real = prepared.memory, prepared.tokens, prepared.real
        self.caches = self._new_caches()

    def prefill(self) -> Tensor:
        """Run the prompt; returns the logits (B, V) of the first new token."""
        return compute_next_logits(self.model, self.tokens, self.real, self.memory, self.caches)

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token (B,) to each sequence; returns the logits (B, V) of the next."""
        return compute_next_logits(self.model, tokens[:, None], None, self.memory, self.caches)

    def select_rows(self, index: Tensor) -> None:
        """Replace the rows of the batch by the rows `index`, of any number."""
        if self.memory is not None:
            self.memory = self.memory.select_rows(index)
        self.caches.reorder(index)

    def reorder(self, index: Tensor) -> None:
        """Replace row i by row index[i], which belongs to the same prompt."""
        if not isinstance(self.caches, Caches):
            self.caches.reorder(index)
            return
        # Rows of one prompt have the same memory and padding: only their own keys and values differ.
        for own, _ in self.caches.layers:
            own.reorder(index)

    def _new_caches(self) -> Any:
        return self.model.caches()


class UncachedSteps(CachedSteps):
    """Runs a model without caches: each step recomputes all tokens. Slow; the reference for the other classes."""

    def advance(self, tokens: Tensor) -> Tensor:
        self.tokens = torch.cat([self.tokens, tokens[:, None]], dim=1)
        if self.real is not None:
            self.real = torch.cat([self.real, torch.ones_like(self.real[:, :1])], dim=1)
        return self.prefill()

    def select_rows(self, index: Tensor) -> None:
        if self.memory is not None:
            self.memory = self.memory.select_rows(index)
        self.reorder(index)

    def reorder(self, index: Tensor) -> None:
        self.tokens = self.tokens[index]
        self.real = None if self.real is None else self.real[index]

    def _new_caches(self) -> None:
        return None


def compute_next_logits(model: Any, tokens: Tensor, real: Tensor | None, memory: Any, caches: Any) -> Tensor:
    """The logits (B, V) after the last of these tokens."""
    if memory is None:
        options = {"only_last": True} if isinstance(model, Decoder) else {}
        out = model(tokens, padding=real, caches=caches, **options)
    else:
        out = model.decode(tokens, memory, caches=caches)
    if out.logits is None:
        raise ValueError(f"model must have logits, got a {type(model).__name__} without a head")
    logits: Tensor = out.logits[:, -1]
    return logits


def prepare_prompt(model: Any, prompt: Prompt, start: int | Sequence[int] | None) -> PreparedPrompt:
    """Batch the prompts: padded on the left for a decoder, run through the encoder if the model has one."""
    device = next(model.parameters()).device
    rows, name = split_prompts(prompt, device), type(model).__name__
    if not hasattr(model, "encode"):
        if start is not None:
            raise ValueError(f"start must be None for {name}, which continues the prompt itself, got {start!r}")
        tokens, lengths = pad_prompts(rows, left=True)
        columns = torch.arange(tokens.shape[1], device=device)
        real = None if lengths is None else columns >= tokens.shape[1] - lengths[:, None]
        return PreparedPrompt(tokens, real, None)
    if start is None:
        raise ValueError(f"start must be the token or tokens that the answers of {name} begin with, got None")
    source, lengths = pad_prompts(rows, left=False)
    first = torch.tensor([start] if isinstance(start, int) else list(start), device=device)
    return PreparedPrompt(first.expand(len(rows), -1), None, model.encode(source, padding=lengths))


def split_prompts(prompt: Prompt, device: torch.device) -> list[Tensor]:
    """One tensor per prompt: tokens (T,), or frames (T, features)."""
    untyped: Any = prompt
    if isinstance(untyped, str) or not isinstance(untyped, Tensor | Sequence):
        raise TypeError(f"prompt must be tokens, lists of tokens or tensors, got {type(prompt).__name__}")
    if isinstance(prompt, Tensor):
        single = prompt.dim() == (2 if prompt.is_floating_point() else 1)
        rows = [prompt] if single else list(prompt)
    else:
        single = len(prompt) > 0 and isinstance(prompt[0], int)
        rows = [
            each if isinstance(each, Tensor) else torch.as_tensor(each, device=device)
            for each in ([prompt] if single else prompt)
        ]
    if not rows or any(len(row) == 0 for row in rows):
        raise ValueError(f"prompt must hold at least one prompt of at least one token, got {prompt!r}")
    if len({(row.shape[1:], row.dtype) for row in rows}) > 1 or rows[0].dim() != 1 + rows[0].is_floating_point():
        kinds = sorted({f"{row.dtype} {tuple(row.shape)}" for row in rows})
        raise ValueError(f"prompt must be integers (T,) or frames (T, features), got {', '.join(kinds[:4])}")
    return [row.to(device) for row in rows]


def pad_prompts(rows: list[Tensor], *, left: bool) -> tuple[Tensor, Tensor | None]:
    """Stack rows with zeros as padding; returns also their lengths (B,), None if all are equal."""
    lengths = [len(row) for row in rows]
    if len(set(lengths)) == 1:
        return torch.stack(rows), None
    batch = rows[0].new_zeros(len(rows), max(lengths), *rows[0].shape[1:])
    for padded, row in zip(batch, rows, strict=True):
        first = len(padded) - len(row) if left else 0
        padded[first : first + len(row)] = row
    return batch, torch.tensor(lengths, device=batch.device)
