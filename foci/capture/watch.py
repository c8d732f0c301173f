"""watch: see where any model looks, while it runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foci.capture.naming import strip_compile_wrapper
from foci.capture.recorder import HEAD_NAME, Recorder, _active, is_recomputation
from foci.capture.torch_functions import AttentionMode
from foci.record.kept import Keep
from foci.record.labels import Labels
from foci.record.record import Record
from foci.runtime.compile_switch import disable_compile

# Embeddings that look up something else than tokens, by their names.
NON_TOKEN_EMBEDDINGS = re.compile(r"pos|type|segment|lang|time|relative|bucket|bias", re.IGNORECASE)


@contextmanager
def watch(
    model: nn.Module,
    *,
    keep: Literal["lazy"] | Keep = "lazy",
    layers: Iterable[int | str] | int | str | None = None,
    heads: Iterable[int | str] | int | str | None = None,
    queries: Literal["all", "last"] | Sequence[int] | slice = "all",
    limit: int = 2**33,
    silence: Iterable[str] = (),
    tokenizer: Any = None,
    labels: dict[str, Labels] | None = None,
) -> Iterator[Record]:
    """Records where a model looks while it runs; the record is filled when the block ends.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100).eval()
    >>> with foci.watch(model) as seen, torch.no_grad():
    ...     out = model(torch.randint(100, (1, 12)))
    >>> seen
    Record of Decoder: 2 layers, 8 heads, 2 attention calls
    >>> seen["L1H3"].top(2).keys.shape, list(seen.layers)
    (torch.Size([1, 12, 2]), ['blocks.0.attention', 'blocks.1.attention'])

    Seen is every attention of the model that runs on this thread inside the block: F.scaled_dot_product_attention,
    nn.MultiheadAttention and nn.Transformer*, `foci.attention`, and Hugging Face transformers through its attention
    interface. The steps of a generation with a cache join into one matrix per layer. `seen.unseen` names attention
    modules that ran and could not be seen, with the reason; `seen.calls` counts the calls.

    The model's output is what it is without: identical where the kernel is the same (PyTorch's fused kernels on a CPU,
    everything with dropout, nn.MultiheadAttention that returns weights), within rounding elsewhere (PyTorch's
    inference fast path is off inside the block; CUDA may choose another fused kernel). Compiled models run uncompiled
    inside the block. Passes that activation checkpointing repeats in the backward are not counted again.

    Args:
        model: any module; attention outside of it is not recorded.
        keep: "lazy" keeps queries, keys and values, and every question can be asked later; `foci.Keep(...)` keeps
            statistics only, computed on the fly and moved to the host as they come.
        layers: which to record: numbers, short names ("L5", "cross.L5") or module names; None: all.
        heads: which to record: numbers for all layers, or names ("L5H3"); None: all.
        queries: "all"; "last", the last query of each call; or the numbers of queries: their rows are kept, exactly.
        limit: bytes that may be kept; what would take more is refused, at the first call where it can be told.
        silence: heads ("L5H3") or layers ("L5") whose outputs are zeroed, to test what they are for.
        tokenizer: gives the tokens their texts: anything with `decode`, or a function from numbers to a text.
        labels: ready labels by name, such as {"input": Labels.tokens(...)}.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("foci.watch cannot be compiled: open the block around the compiled model, not inside of it")
    check_model_and_limit(model, limit)
    record = Record(model=type(getattr(model, "_orig_mod", model)).__name__)
    recorder = Recorder(
        model,
        record,
        keep=parse_keep(keep),
        layers=parse_selection("layers", layers),
        heads=parse_selection("heads", heads),
        rows=parse_queries(queries),
        limit=limit,
        silence=parse_ablate(silence),
        tokenizer=tokenizer,
    )
    for name, ready in (labels or {}).items():
        recorder.say(name, ready)
    record.filling = True
    with ExitStack() as stack:
        stack.enter_context(hook_modules(recorder))
        stack.enter_context(disable_compile())
        enter_adapters(stack, model, recorder)
        stack.enter_context(activate_recorder(recorder))
        stack.enter_context(AttentionMode(recorder))
        yield record
    recorder.finish()


def check_model_and_limit(model: Any, limit: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"foci.watch takes a model, an nn.Module, but got {type(model).__name__}")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ValueError(f"limit must be a whole number of bytes, such as 2**33, but got {limit!r}")


def parse_selection(name: str, chosen: Any) -> list[int | str] | None:
    """Some layers or heads: None for all of them, a single one as a list."""
    if chosen is None:
        return None
    if isinstance(chosen, int | str) and not isinstance(chosen, bool):
        return [chosen]
    try:
        return list(chosen)
    except TypeError:
        example = "L5H3" if name == "heads" else "L5"
        raise TypeError(f"{name} takes numbers and names such as {example!r}, but got {chosen!r}") from None


def parse_keep(keep: Any) -> Keep | None:
    if isinstance(keep, Keep):
        return keep
    if keep != "lazy":
        raise ValueError(f"keep must be 'lazy' or foci.Keep(...), but got {keep!r}")
    return None


def parse_queries(queries: Any) -> Any:
    """None for all of them, else what is asked of each call."""
    if isinstance(queries, str):
        if queries not in {"all", "last"}:
            raise ValueError(f"queries must be 'all', 'last' or numbers of queries, but got {queries!r}")
        return None if queries == "all" else slice(-1, None)
    if isinstance(queries, slice):
        return queries
    rows = list(queries)
    if not rows or not all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
        raise ValueError(f"queries must be 'all', 'last' or numbers of queries, but got {queries!r}")
    return rows


def parse_ablate(silence: Any) -> list[str]:
    names = [silence] if isinstance(silence, str) else list(silence)
    for name in names:
        if not isinstance(name, str) or HEAD_NAME.fullmatch(name) is None:
            raise ValueError(f"silence takes names such as 'L5H3', 'cross.L0H2' or 'L5', but got {name!r}")
    return names


@contextmanager
def activate_recorder(recorder: Recorder) -> Iterator[None]:
    """The recorder among those of this thread."""
    stack = _active.__dict__.setdefault("stack", [])
    stack.append(recorder)
    try:
        yield
    finally:
        stack.remove(recorder)


@contextmanager
def hook_modules(recorder: Recorder) -> Iterator[None]:
    """Hooks on the modules, which tell the recorder where the model is; they are taken off again in any case."""
    handles: list[Any] = []
    try:
        for full, module in recorder.modules:
            name = strip_compile_wrapper(full)
            if isinstance(module, torch.jit.ScriptModule) or needs_no_hooks(module):
                continue
            begins, ends = make_module_hooks(recorder, name)
            handles.append(module.register_forward_pre_hook(begins))
            handles.append(module.register_forward_hook(ends, always_call=True))
            if isinstance(module, nn.Embedding) and not NON_TOKEN_EMBEDDINGS.search(name.rpartition(".")[2]):
                handles.append(module.register_forward_pre_hook(make_embedding_hook(recorder)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def needs_no_hooks(module: nn.Module) -> bool:
    """Whether it is one of PyTorch's small parts, such as Linear or Dropout: most modules are, and hooks cost time."""
    # Not `children()`, which makes a generator and a set for each of hundreds of modules.
    if module._modules or isinstance(module, (nn.MultiheadAttention, nn.Embedding)):
        return False
    return type(module).__module__.startswith("torch.nn.modules.")


def make_module_hooks(recorder: Recorder, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    def begins(module: nn.Module, args: Any) -> None:
        recorder.enter(name)

    def ends(module: nn.Module, args: Any, out: Any) -> None:
        recorder.leave(name)

    return begins, ends


def make_embedding_hook(recorder: Recorder) -> Callable[..., None]:
    def embeds(module: nn.Module, args: Any) -> None:
        mine = get_ident() == recorder.thread and not is_recomputation()
        if mine and args and isinstance(args[0], Tensor):
            recorder.embedded(args[0])

    return embeds


def enter_adapters(stack: ExitStack, model: nn.Module, recorder: Recorder) -> None:
    """What an ecosystem needs to have done before and after."""
    if "transformers" in sys.modules:
        from foci.capture import huggingface

        parts = huggingface.find_pretrained_models(recorder.modules)
        if parts:
            stack.enter_context(huggingface.prepare_models(model, parts, recorder))
