"""watch: records the attention of any model while it runs.

`watch` checks its arguments, makes a Recorder, hands it the attention calls of the thread, and registers the few hooks
that report passes and token ids. When the block ends, the Recorder fills the Record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from foci.capture import huggingface
from foci.capture.compiled_watch import LearningRecorder, check_compiled, has_learned, learn_calls, watch_compiled
from foci.capture.cross_attention import find_sequence_parameters
from foci.capture.diffusion import Denoising, find_pipeline_denoisers, is_denoiser
from foci.capture.head_selection import HeadSelection, parse_ablate, parse_selection
from foci.capture.hooks import hook_runs
from foci.capture.multi_head_attention import intercept_multi_head_attention
from foci.capture.record_filling import fill_record
from foci.capture.recorder import Recorder
from foci.record.from_tensors import check_labels_fit_any
from foci.record.kept import Keep
from foci.record.labels import Labels
from foci.record.record import Record
from foci.runtime.checks import is_int
from foci.runtime.compile_switch import disable_compile
from foci.runtime.interception import add_interceptor
from foci.runtime.interrupts import delay_interrupts

# What a processor has, one of them at least: of images, of text or of both.
PROCESSOR_PARTS = ("tokenizer", "image_processor", "feature_extractor", "image_mean", "decode")


@contextmanager
def watch(
    model: nn.Module | Any,
    *,
    keep: Literal["lazy"] | Keep = "lazy",
    layers: Iterable[int | str] | int | str | None = None,
    heads: Iterable[int | str] | int | str | None = None,
    queries: Literal["all", "last"] | Sequence[int] | slice = "all",
    limit: int = 2**33,
    ablate: Iterable[str] = (),
    tokenizer: Any = None,
    processor: Any = None,
    labels: Labels | Mapping[str, Labels] | None = None,
    steps: bool | None = None,
    compiled: bool = False,
) -> Iterator[Record]:
    """Records the attention of a model while it runs; the record is filled when the block ends.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100).eval()
    >>> with foci.watch(model) as seen, torch.no_grad():
    ...     out = model(torch.randint(100, (1, 12)))
    >>> seen
    Record of Decoder: 2 layers, 8 heads, 2 attention calls
    >>> seen["L1H3"].top(2).keys.shape, list(seen.layers)
    (torch.Size([1, 12, 2]), ['blocks.0.attention', 'blocks.1.attention'])

    Recorded is every attention call that the model makes on this thread inside the block:
    F.scaled_dot_product_attention, nn.MultiheadAttention and nn.Transformer*, `foci.attention`, and Hugging Face
    transformers through its attention interface. The steps of a generation with a cache are joined into one matrix per
    layer. `seen.unseen` lists attention modules that ran but could not be recorded, with the reason; `seen.calls`
    counts the calls.

    The model's output does not change: it is identical where the kernel is the same (PyTorch's fused kernels on a CPU,
    every call with dropout, nn.MultiheadAttention that returns weights), and within rounding elsewhere (PyTorch's
    inference fast path is off inside the block; CUDA may choose another fused kernel). Compiled models run uncompiled
    inside the block, and `seen.notes` says so; with `compiled=True`, those whose attention is `foci.attention` run a
    second compiled graph, which also computes the statistics that `keep` names. Passes that activation checkpointing
    recomputes in the backward are not counted again.

    A pipeline of diffusers is watched like a model: recorded is its denoiser, and each denoising step is a step of the
    record: `seen.at(step=20)`, `seen.mean("steps")`, `seen.image_map("shoe")`.

    Args:
        model: any module; attention outside it is not recorded. Or a pipeline of diffusers.
        keep: "lazy" keeps queries, keys and values, from which any statistic can be computed later; `foci.Keep(...)`
            keeps statistics only, computed at each call and copied to the host in the background.
        layers: which layers to record: numbers, short names ("L5", "cross.L5") or module names; None: all.
        heads: which heads to record: numbers for all layers, or names ("L5H3"); None: all.
        queries: "all"; "last", the last query of each call; or query numbers. Other than "all", only the exact rows of
            these queries are kept, whatever `keep` says: no statistic of the others.
        limit: the largest number of bytes to keep; a call that would exceed it is refused.
        ablate: heads ("L5H3") or layers ("L5") whose outputs are zeroed, to measure what they contribute.
        tokenizer: decodes the token ids for the labels: an object with `decode`, or a function from ids to text.
        processor: the processor of a vision-language or vision model, whose tokenizer decodes the token ids and whose
            scaling of images is undone for the pictures of the record.
        labels: finished labels of the sequence that the model reads, or of several by their names, such as
            {"input": Labels.tokens(...)}.
        steps: whether the passes of the model are the denoising steps of one record; None: if it is one of diffusers.
        compiled: run a compiled model in a second compiled graph, with `keep=foci.Keep(...)`. The first block of a
            model runs uncompiled, to learn which module makes which call.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("foci.watch cannot be compiled: open the block outside the compiled model, not inside it")
    title = type(getattr(model, "_orig_mod", model)).__name__
    model, denoising = find_denoising(model, steps)
    check_model_and_limit(model, limit)
    check_decoders(tokenizer, processor)
    given, record = name_labels(labels), Record(model=title)
    tokenizer = getattr(processor, "tokenizer", None) if tokenizer is None else tokenizer
    if compiled:
        others = {"layers": layers is not None, "heads": heads is not None, "queries": queries != "all"}
        kept = check_compiled(model, keep, others | {"ablate": bool(ablate), "steps": denoising is not None})
        if has_learned(model):
            with watch_compiled(model, record, kept, limit, tokenizer):
                yield record
            record.labels.update(given)
            check_given_labels(record, given, denoising)
            return
    recorder = (LearningRecorder if compiled else Recorder)(
        model,
        record,
        keep=parse_keep(keep),
        selection=HeadSelection(
            parse_selection("layers", layers), parse_selection("heads", heads), parse_ablate(ablate)
        ),
        rows=parse_queries(queries, keep),
        limit=limit,
        tokenizer=tokenizer,
        processor=processor,
        denoising=denoising,
    )
    for name, finished in given.items():
        recorder.set_labels(name, finished)
        if denoising is not None and name == "prompt":
            denoising.set_prompt(finished)
    record.filling = True
    block = ExitStack()
    try:
        try:
            open_block(block, model, recorder)
            yield record
        finally:
            close_block(block, recorder)
    finally:
        # Ctrl+C may come before the first call delays it.
        close_block(block, recorder)
    fill_record(recorder)
    if isinstance(recorder, LearningRecorder):
        learn_calls(recorder, model, record)
    check_given_labels(record, given, denoising)


def check_given_labels(record: Record, given: dict[str, Labels], denoising: Denoising | None) -> None:
    """Refuses labels that fit no layer."""
    for name, finished in given.items():
        # The prompt of a diffusion model may be a part of another sequence.
        if denoising is None or name != "prompt":
            check_is_sequence(record, name)
        check_labels_fit_any(record.layers.values(), name, finished)


def check_is_sequence(record: Record, name: str) -> None:
    """Refuses labels of a sequence that no layer has."""
    known = dict.fromkeys(axis for layer in record.layers.values() for axis in (layer.queries, layer.keys))
    if known and name not in known:
        raise ValueError(f"labels must be those of a sequence of the model ({', '.join(known)}), got {name!r}")


def name_labels(labels: Any) -> dict[str, Labels]:
    """Labels by the names of their sequences; on their own they are those of "input"."""
    named = {"input": labels} if isinstance(labels, Labels) else {} if labels is None else labels
    if not isinstance(named, Mapping) or not all(isinstance(each, Labels) for each in named.values()):
        raise TypeError(
            f"labels must be foci.Labels, or a dict of them by the name of the sequence, got {labels!r:.80}:"
            " foci.Labels.tokens([['a', 'b']]) makes them from texts"
        )
    return dict(named)


def find_denoising(model: Any, steps: bool | None) -> tuple[Any, Denoising | None]:
    """The module to watch, and the steps of a diffusion model: that of a pipeline, one of diffusers, or as asked."""
    if isinstance(model, nn.Module):
        return model, Denoising([model]) if (is_denoiser(model) if steps is None else steps) else None
    denoisers = find_pipeline_denoisers(model)
    if not denoisers:
        return model, None
    if len(denoisers) == 1:
        (only,) = denoisers.values()
        return only, Denoising([only], model)
    return nn.ModuleDict(denoisers), Denoising(list(denoisers.values()), model)


def check_model_and_limit(model: Any, limit: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module or a pipeline of diffusers, got {type(model).__name__}")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ValueError(f"limit must be a number of bytes, an int such as 2**33, got {limit!r}")


def check_decoders(tokenizer: Any, processor: Any) -> None:
    if tokenizer is not None and not hasattr(tokenizer, "decode") and not callable(tokenizer):
        raise TypeError(f"tokenizer must have a decode method or be a function, got {tokenizer!r:.80}")
    if processor is not None and not any(hasattr(processor, name) for name in PROCESSOR_PARTS):
        raise TypeError(f"processor must be a processor of transformers, got {processor!r:.80}")


def parse_keep(keep: Any) -> Keep | None:
    if isinstance(keep, Keep):
        return keep
    if keep != "lazy":
        raise ValueError(f"keep must be 'lazy' or foci.Keep(...), got {keep!r}")
    return None


def parse_queries(queries: Any, keep: Any) -> Any:
    """The query numbers to keep of each call, as a slice or a list; None keeps all."""
    if isinstance(keep, Keep) and keep.keeps_text and queries != "all":
        raise ValueError(f"queries must be 'all' with {keep}, which keeps the weights on text, got {queries!r}")
    if isinstance(queries, str):
        if queries not in {"all", "last"}:
            raise ValueError(f"queries must be 'all', 'last' or query numbers, got {queries!r}")
        return None if queries == "all" else slice(-1, None)
    if isinstance(queries, slice):
        return queries
    rows = list(queries) if isinstance(queries, Iterable) else []
    if not rows or not all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
        hint = f": write [{queries}]" if is_int(queries) else ""
        raise ValueError(f"queries must be 'all', 'last' or query numbers, got {queries!r}{hint}")
    return rows


def open_block(block: ExitStack, model: nn.Module, recorder: Recorder) -> None:
    with delay_interrupts():
        found = huggingface.find_transformers_models(recorder.layer_names)
        find_sequence_parameters(recorder.layer_names)
        layout = recorder.layer_names.layout
        attention_modules = *layout.attention_modules, *found.attention_modules
        hook_runs(block, recorder, layout.find_hooked_modules(attention_modules, found.calling))
        recorder.patch_grid.watch(block, recorder)
        recorder.window_grids.watch(block, recorder)
        if recorder.denoising is not None:
            recorder.denoising.watch(block, recorder)
        block.enter_context(disable_compile())
        if found.models and recorder.keeps_own_calls:
            block.enter_context(huggingface.observe_models(found, recorder))
        elif found.models:
            block.enter_context(huggingface.prepare_models(model, found, recorder))
        block.enter_context(intercept_multi_head_attention())
        block.enter_context(add_interceptor(recorder))


def close_block(block: ExitStack, recorder: Recorder) -> None:
    """Undoes what `open_block` did, in full even if Ctrl+C is pressed; a second call does nothing."""
    recorder.is_open = False
    if not recorder.is_closed:
        with delay_interrupts():
            block.__exit__(*sys.exc_info())
            recorder.is_closed = True
