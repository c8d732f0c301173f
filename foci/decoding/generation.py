"""Generation of tokens with any model of `foci.nn`: the public functions `generate` and `stream`.

B sequences, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch import Tensor, nn

from foci.decoding.beam import Beam, search_beam
from foci.decoding.cpu_steps import CpuSteps, find_refusal
from foci.decoding.sampling import Sampler, Sampling
from foci.decoding.static_cache import StaticSteps
from foci.decoding.steps import CachedSteps, PreparedPrompt, Prompt, UncachedSteps, prepare_prompt
from foci.decoding.stopping import Answer, AnswerBatch, DecodeFunction, StopConditions
from foci.runtime.argument_names import hide_catch_all, refuse_arguments
from foci.runtime.interception import get_interceptors

GREEDY = Sampling(temperature=0.0)
# Steps between two checks on a GPU whether all answers have ended: each check waits for the GPU.
GPU_STOP_CHECK_INTERVAL = 16


@hide_catch_all
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
    **unknown: Never,
) -> list[Answer]:
    """Generate one answer per prompt by greedy decoding, sampling or beam search.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> answers = foci.generate(model, [[5, 3, 8], [7]], new_tokens=4)            # prompts of any length
    >>> [len(answer.tokens) for answer in answers]
    [4, 4]
    >>> sampling = foci.decoding.Sampling(temperature=0.7, top_p=0.9, seed=1)
    >>> sampled = foci.generate(model, [5, 3, 8], method=sampling, stop=2)
    >>> best = foci.generate(model, [5, 3, 8], method=foci.decoding.Beam(4, best=2), new_tokens=4)
    >>> len(best[0].others)
    1

    A model with an encoder (`EncoderDecoder`, `Seq2SeqRNN`, `SpeechEncoder`) encodes the prompt and generates after
    `start`:

    >>> model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=100)
    >>> answer = foci.generate(model, [[5, 3, 8], [7, 4]], start=1, stop=2, new_tokens=4)[0]

    For the attention weights of an answer, run the model once over prompt and answer with `return_weights=True`.

    Args:
        model: a model with logits.
        prompt: tokens (T,) or (B, T), a list of them of unequal length, or frames (F, features) of speech likewise.
        new_tokens: the maximum number of tokens per answer.
        method: `Sampling(temperature=0.0)` for greedy decoding, `Sampling(...)` or `Beam(...)`.
        start: the token or tokens that answers begin with; required for a model with an encoder.
        stop: tokens and strings that end an answer. Strings need `decode`.
        decode: a function from tokens to text, such as a tokenizer's.
        cache: False recomputes all tokens in every step: slow, for comparison.
        capture: None replays each step on a GPU as a captured CUDA graph; True requires it, False disables it.
            The buffers and graphs of the last batch are kept with the model for the next batch of the same shape.
        compiled: also compile the step with torch.compile: takes a minute for every new shape, then runs faster.
    """
    if unknown:
        refuse_arguments(generate, (), unknown)
    if cache and not callable(getattr(model, "caches", None)):
        raise TypeError(f"model must be a model of foci.nn with logits, got {type(model).__name__}")
    conditions = StopConditions(stop, decode)
    with torch.no_grad(), eval_mode(model):
        prepared = prepare_prompt(model, prompt, start)
        check_total_length(model, prepared, new_tokens)
        steps = choose_steps(model, prepared, new_tokens, cache, capture, compiled)
        check_every = GPU_STOP_CHECK_INTERVAL if prepared.tokens.is_cuda and not conditions.strings else 1
        if isinstance(method, Beam):
            return search_beam(steps, method, conditions, new_tokens, check_every)
        batch = AnswerBatch(len(prepared.tokens), conditions)
        sampled = sample_steps(steps, Sampler(method, prepared.tokens, prepared.real), new_tokens, batch)
        for tokens, scores in move_groups_to_host(sampled, check_every):
            for column in zip(tokens, scores, strict=True):
                batch.add(*column)
            if all(batch.stopped):
                break
        return batch.answers()


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
    """Yield the tokens of each step as they are generated: one per prompt, None for answers that have ended.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> for token, in foci.decoding.stream(model, [5, 3, 8], new_tokens=3):
    ...     assert 0 <= token < 100

    The arguments are those of `generate`. The model stays in eval mode until the last token, or until the iterator is
    closed.
    """
    if isinstance(method, Beam):
        raise TypeError(f"method must be a Sampling, because a beam decides only at its end, got {method!r}")
    conditions = StopConditions(stop, decode)
    return stream_tokens(model, prompt, new_tokens, method, start, conditions, capture, compiled)


@torch.no_grad()
def stream_tokens(
    model: nn.Module,
    prompt: Prompt,
    new_tokens: int,
    method: Sampling,
    start: int | Sequence[int] | None,
    conditions: StopConditions,
    capture: bool | None,
    compiled: bool,
) -> Iterator[list[int | None]]:
    """Generate for `stream`, whose arguments are checked before the first token is requested."""
    with eval_mode(model):
        prepared = prepare_prompt(model, prompt, start)
        check_total_length(model, prepared, new_tokens)
        steps = choose_steps(model, prepared, new_tokens, True, capture, compiled)
        batch = AnswerBatch(len(prepared.tokens), conditions)
        sampled = sample_steps(steps, Sampler(method, prepared.tokens, prepared.real), new_tokens, batch)
        for tokens, scores in move_groups_to_host(sampled, 1):
            added = batch.add(tokens[0], scores[0])
            if any(token is not None for token in added):
                yield added
            if all(batch.stopped):
                return


def sample_steps(
    steps: CachedSteps, sampler: Sampler, limit: int, batch: AnswerBatch
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of each step and their log-probabilities, both for `batch.rows`, on the model's device."""
    logits = steps.prefill()
    # Random numbers are drawn for the whole batch, so that an answer does not depend on the length of others.
    can_drop = isinstance(steps, CpuSteps) and sampler.is_greedy
    for number in range(limit):
        tokens, scores = sampler(logits)
        yield tokens, scores
        if number + 1 == limit:
            return
        if can_drop and len(places := batch.drop_ended()) < len(tokens):
            index = torch.tensor(places, device=tokens.device)
            steps.select_rows(index)
            tokens = tokens[index]
        logits = steps.advance(tokens)


def move_groups_to_host(
    sampled: Iterator[tuple[Tensor, Tensor]], group_size: int
) -> Iterator[tuple[list[list[int]], list[list[float]]]]:
    """Copy the steps to the host in groups, so that the host waits for the device once per group."""
    group: list[tuple[Tensor, Tensor]] = []
    for step in sampled:
        group.append(step)
        if len(group) == group_size:
            yield move_group_to_host(group)
            group = []
    if group:
        yield move_group_to_host(group)


def move_group_to_host(group: list[tuple[Tensor, Tensor]]) -> tuple[list[list[int]], list[list[float]]]:
    tokens, scores = (torch.stack(each).tolist() for each in zip(*group, strict=True))
    return tokens, scores


def choose_steps(
    model: nn.Module, prepared: PreparedPrompt, new_tokens: int, cache: bool, capture: bool | None, compiled: bool
) -> CachedSteps:
    """Choose steps: uncached, with static caches for a CUDA graph or torch.compile, in C, or with growing caches."""
    on_gpu = prepared.tokens.is_cuda
    if capture and not on_gpu:
        device = prepared.tokens.device
        raise ValueError(f"capture must be None or False for a model that is not on CUDA, got True on {device}")
    if not cache:
        if capture or compiled:
            raise ValueError("cache must be True for a captured or compiled step, got False")
        return UncachedSteps(model, prepared)
    if capture and is_watched():
        raise ValueError("capture must be None or False inside foci.watch, which cannot record a CUDA graph, got True")
    captured = on_gpu and not is_watched() if capture is None else capture
    if captured or compiled:
        return StaticSteps(model, prepared, new_tokens, captured, compiled)
    if not is_watched() and find_refusal(model, prepared) is None:
        return CpuSteps(model, prepared)
    return CachedSteps(model, prepared)


def is_watched() -> bool:
    """Whether a recorder on this thread needs to see every call that the model makes."""
    return bool(get_interceptors())


def check_total_length(model: nn.Module, prepared: PreparedPrompt, new_tokens: int) -> None:
    """Refuse more tokens than the model has positions for."""
    if new_tokens < 1:
        raise ValueError(f"new_tokens must be at least 1, got {new_tokens}")
    config: Any = getattr(model, "config", None)
    config = getattr(getattr(model, "decoder", None), "config", config)
    # The last token is never an input, so it needs no position.
    length = prepared.tokens.shape[1]
    available = None if getattr(config, "positions", None) is None else config.max_length - length + 1
    if available is not None and new_tokens > available:
        raise ValueError(
            f"new_tokens must be at most {available} after a prompt of {length} tokens, because the model has"
            f" {config.max_length} positions, got {new_tokens}"
        )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch the model to eval mode, and restore the mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
