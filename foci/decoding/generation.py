"""Generation: a model writes token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from foci.decoding import beam
from foci.decoding.beam import Beam
from foci.decoding.sampling import Sampler, Sampling
from foci.decoding.static_cache import StaticSteps
from foci.decoding.steps import CachedSteps, PreparedPrompt, Prompt, UncachedSteps, prepare_prompt
from foci.decoding.stopping import Answer, AnswerBatch, DecodeFunction, StopConditions

GREEDY = Sampling(temperature=0.0)
# How many steps a GPU takes before the host looks whether all answers have ended: looking waits for the GPU.
GPU_STOP_CHECK_INTERVAL = 16


def generate(
    model: nn.Module,
    prompt: Prompt,
    *,
    new_tokens: int = 128,
    method: Sampling | Beam = GREEDY,
    start: int | Sequence[int] | None = None,
    stop: int | str | Sequence[int | str] = (),
    decode: DecodeFunction | None = None,
    cache: bool = True,
    capture: bool | None = None,
    compiled: bool = False,
) -> list[Answer]:
    """What a model writes to each prompt: the likeliest tokens, tokens drawn by chance, or the best of a beam.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> answers = foci.generate(model, [[5, 3, 8], [7]], new_tokens=4)            # prompts of any length
    >>> [len(answer.tokens) for answer in answers]
    [4, 4]
    >>> sampling = foci.decoding.Sampling(temperature=0.7, top_p=0.9, seed=1)
    >>> sampled = foci.generate(model, [5, 3, 8], method=sampling, stop=2)
    >>> best = foci.generate(model, [5, 3, 8], method=foci.decoding.Beam(4, best=2), new_tokens=4)
    >>> len(best[0].others)
    1

    A model that reads (`EncoderDecoder`, `Seq2SeqRNN`, `SpeechEncoder`) takes the prompt as its source and writes after
    `start`:

    >>> model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=100)
    >>> answer = foci.generate(model, [[5, 3, 8], [7, 4]], start=1, stop=2, new_tokens=4)[0]

    Where the model looked while it wrote: run it once more over prompt and answer with `return_weights=True`.

    Args:
        prompt: tokens (T,) or (B, T), a list of them of unequal length, or frames (F, features) of speech likewise.
        new_tokens: how many tokens an answer has at most.
        method: `Sampling(temperature=0.0)`, the likeliest token each time; `Sampling(...)`; or `Beam(...)`.
        start: the token or tokens that answers begin with, for a model that reads the prompt.
        stop: tokens and texts that end an answer. Texts need `decode`.
        decode: a function from tokens to a text, such as a tokenizer's.
        cache: False computes every step from the beginning: slow, for comparison.
        capture: None replays each step on a GPU as one captured CUDA graph; True insists on it, False never does.
            The last batch's buffers and graphs stay with the model, for the next batch of the same shape.
        compiled: also pass the step to torch.compile: takes a minute for every new shape, and is faster from then on.
    """
    endings = StopConditions(stop, decode)
    with torch.no_grad(), eval_mode(model):
        given = check_length(model, prepare_prompt(model, prompt, start), new_tokens)
        steps = choose_steps(model, given, new_tokens, cache, capture, compiled)
        every = GPU_STOP_CHECK_INTERVAL if given.tokens.is_cuda and not endings.words else 1
        if isinstance(method, Beam):
            return beam.search_beam(steps, method, endings, new_tokens, every)
        rows = AnswerBatch(len(given.tokens), endings)
        for tokens, scores in move_groups_to_host(
            sample_steps(steps, Sampler(method, given.tokens, given.real), new_tokens), every
        ):
            for column in zip(tokens, scores, strict=True):
                rows.add(*column)
            if all(rows.stopped):
                break
        return rows.answers()


def stream(
    model: nn.Module,
    prompt: Prompt,
    *,
    new_tokens: int = 128,
    method: Sampling = GREEDY,
    start: int | Sequence[int] | None = None,
    stop: int | str | Sequence[int | str] = (),
    decode: DecodeFunction | None = None,
    capture: bool | None = None,
    compiled: bool = False,
) -> Iterator[list[int | None]]:
    """The tokens as they are written: of each step one per prompt, None for answers that have ended.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> for token, in foci.decoding.stream(model, [5, 3, 8], new_tokens=3):
    ...     assert 0 <= token < 100

    The arguments are those of `generate`. The model is in eval mode until the last token or until the iterator is
    closed.
    """
    if isinstance(method, Beam):
        raise TypeError(f"stream takes a Sampling, because a beam decides at its end, but got {method!r}")
    endings = StopConditions(stop, decode)
    return stream_tokens(model, prompt, new_tokens, method, start, endings, capture, compiled)


@torch.no_grad()
def stream_tokens(
    model: nn.Module,
    prompt: Prompt,
    new_tokens: int,
    method: Sampling,
    start: int | Sequence[int] | None,
    endings: StopConditions,
    capture: bool | None,
    compiled: bool,
) -> Iterator[list[int | None]]:
    with eval_mode(model):
        given = check_length(model, prepare_prompt(model, prompt, start), new_tokens)
        steps = choose_steps(model, given, new_tokens, True, capture, compiled)
        rows = AnswerBatch(len(given.tokens), endings)
        for tokens, scores in move_groups_to_host(
            sample_steps(steps, Sampler(method, given.tokens, given.real), new_tokens), 1
        ):
            found = rows.add(tokens[0], scores[0])
            if any(token is not None for token in found):
                yield found
            if all(rows.stopped):
                return


def sample_steps(steps: CachedSteps, picker: Sampler, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Step after step: tokens (B,) and their log-probabilities (B,), on the model's device."""
    logits = steps.first()
    for number in range(limit):
        tokens, scores = picker(logits)
        yield tokens, scores
        if number + 1 < limit:
            logits = steps.next(tokens)


def move_groups_to_host(
    walked: Iterator[tuple[Tensor, Tensor]], every: int
) -> Iterator[tuple[list[list[int]], list[list[float]]]]:
    """The steps on the host, so many at a time: one wait for the device per group."""
    group: list[tuple[Tensor, Tensor]] = []
    for step in walked:
        group.append(step)
        if len(group) == every:
            yield move_group_to_host(group)
            group = []
    if group:
        yield move_group_to_host(group)


def move_group_to_host(group: list[tuple[Tensor, Tensor]]) -> tuple[list[list[int]], list[list[float]]]:
    tokens, scores = (torch.stack(each).tolist() for each in zip(*group, strict=True))
    return tokens, scores


def choose_steps(
    model: nn.Module, given: PreparedPrompt, new_tokens: int, cache: bool, capture: bool | None, compiled: bool
) -> CachedSteps:
    """How the steps are taken: anew each time, with caches that grow, or with fixed ones that a graph finds again."""
    on_gpu = given.tokens.is_cuda
    if capture and not on_gpu:
        raise ValueError(f"capture=True needs a model on a CUDA device, but it is on {given.tokens.device}")
    if not cache:
        if capture or compiled:
            raise ValueError("a captured or compiled step needs the cache, but got cache=False")
        return UncachedSteps(model, given)
    if capture and is_watched():
        raise ValueError("a captured step shows nothing to foci.watch, but got capture=True inside of a block")
    captured = on_gpu and not is_watched() if capture is None else capture
    return (
        StaticSteps(model, given, new_tokens, captured, compiled) if captured or compiled else CachedSteps(model, given)
    )


def is_watched() -> bool:
    """Whether somebody on this thread wants to see every call that the model makes."""
    return any(getattr(mode, "sees_every_call", False) for mode in _get_current_function_mode_stack())


def check_length(model: nn.Module, given: PreparedPrompt, new_tokens: int) -> PreparedPrompt:
    """Refuses more tokens than the model has positions for."""
    if new_tokens < 1:
        raise ValueError(f"new_tokens must be at least 1, but got {new_tokens}")
    config: Any = getattr(model, "config", None)
    config = getattr(getattr(model, "decoder", None), "config", config)
    # The last token is not read again, so it needs no position.
    needed = given.tokens.shape[1] + new_tokens - 1
    if getattr(config, "positions", None) is not None and needed > config.max_length:
        raise ValueError(
            f"the model has {config.max_length} positions, but a prompt of {given.tokens.shape[1]} tokens and"
            f" new_tokens={new_tokens} take {needed}"
        )
    return given


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout, and afterwards as it was."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
