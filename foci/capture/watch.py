"""watch: records the attention of any model while it runs.

`watch` checks its arguments, makes a Recorder, registers hooks that report which module is running, and enters the
torch function mode that reports attention calls. When the block ends, the Recorder fills the Record.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foci.capture.hooks import hook_module
from foci.capture.naming import strip_compile_wrapper
from foci.capture.recorder import HEAD_NAME, Recorder, _active, is_recomputation
from foci.capture.torch_functions import AttentionMode
from foci.record.kept import Keep
from foci.record.labels import Labels
from foci.record.record import Record
from foci.runtime.compile_switch import disable_compile
from foci.runtime.interrupts import delay_interrupts

# Names of embeddings that look up something other than tokens.
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
    ablate: Iterable[str] = (),
    tokenizer: Any = None,
    labels: dict[str, Labels] | None = None,
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
    inside the block. Passes that activation checkpointing recomputes in the backward are not counted again.

    Args:
        model: any module; attention outside it is not recorded.
        keep: "lazy" keeps queries, keys and values, from which any statistic can be computed later; `foci.Keep(...)`
            keeps statistics only, computed at each call and copied to the host in the background.
        layers: which layers to record: numbers, short names ("L5", "cross.L5") or module names; None: all.
        heads: which heads to record: numbers for all layers, or names ("L5H3"); None: all.
        queries: "all"; "last", the last query of each call; or query numbers, whose exact rows are kept.
        limit: the largest number of bytes to keep; a call that would exceed it is refused.
        ablate: heads ("L5H3") or layers ("L5") whose outputs are zeroed, to measure what they contribute.
        tokenizer: decodes the token ids for the labels: an object with `decode`, or a function from ids to text.
        labels: finished labels by name, such as {"input": Labels.tokens(...)}.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("foci.watch cannot be compiled: open the block outside the compiled model, not inside it")
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
        ablate=parse_ablate(ablate),
        tokenizer=tokenizer,
    )
    for name, finished in (labels or {}).items():
        recorder.set_labels(name, finished)
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
    recorder.fill_record()


def check_model_and_limit(model: Any, limit: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ValueError(f"limit must be a number of bytes, an int such as 2**33, got {limit!r}")


def parse_selection(name: str, selection: Any) -> list[int | str] | None:
    """Layers or heads as a list; None selects all of them."""
    if selection is None:
        return None
    if isinstance(selection, int | str) and not isinstance(selection, bool):
        return [selection]
    try:
        return list(selection)
    except TypeError:
        example = "L5H3" if name == "heads" else "L5"
        raise TypeError(f"{name} must be numbers or names such as {example!r}, got {selection!r}") from None


def parse_keep(keep: Any) -> Keep | None:
    if isinstance(keep, Keep):
        return keep
    if keep != "lazy":
        raise ValueError(f"keep must be 'lazy' or foci.Keep(...), got {keep!r}")
    return None


def parse_queries(queries: Any) -> Any:
    """The query numbers to keep of each call, as a slice or a list; None keeps all."""
    if isinstance(queries, str):
        if queries not in {"all", "last"}:
            raise ValueError(f"queries must be 'all', 'last' or query numbers, got {queries!r}")
        return None if queries == "all" else slice(-1, None)
    if isinstance(queries, slice):
        return queries
    rows = list(queries)
    if not rows or not all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
        raise ValueError(f"queries must be 'all', 'last' or query numbers, got {queries!r}")
    return rows


def parse_ablate(ablate: Any) -> list[str]:
    names = [ablate] if isinstance(ablate, str) else list(ablate)
    for name in names:
        if not isinstance(name, str) or HEAD_NAME.fullmatch(name) is None:
            raise ValueError(f"ablate must be names such as 'L5H3', 'cross.L0H2' or 'L5', got {name!r}")
    return names


def open_block(block: ExitStack, model: nn.Module, recorder: Recorder) -> None:
    with delay_interrupts():
        hook_modules(block, recorder)
        block.enter_context(disable_compile())
        enter_adapters(block, model, recorder)
        block.enter_context(activate_recorder(recorder))
        block.enter_context(AttentionMode(recorder))


def close_block(block: ExitStack, recorder: Recorder) -> None:
    """Undoes what `open_block` did, in full even if Ctrl+C is pressed; a second call does nothing."""
    recorder.is_open = False
    with delay_interrupts():
        block.__exit__(*sys.exc_info())


@contextmanager
def activate_recorder(recorder: Recorder) -> Iterator[None]:
    """Lists the recorder among the active ones of this thread."""
    stack = _active.__dict__.setdefault("stack", [])
    stack.append(recorder)
    try:
        yield
    finally:
        stack.remove(recorder)


def hook_modules(block: ExitStack, recorder: Recorder) -> None:
    """Registers hooks that report the running module and the token ids to the recorder."""
    for full_name, module in recorder.modules:
        name = strip_compile_wrapper(full_name)
        if isinstance(module, torch.jit.ScriptModule) or needs_no_hooks(module):
            continue
        enter, leave = make_module_hooks(recorder, name)
        hook_module(block, recorder, module, enter, before=True)
        hook_module(block, recorder, module, leave, before=False, always_call=True)
        if isinstance(module, nn.Embedding) and not NON_TOKEN_EMBEDDINGS.search(name.rpartition(".")[2]):
            hook_module(block, recorder, module, make_embedding_hook(recorder), before=True)


def needs_no_hooks(module: nn.Module) -> bool:
    """Whether a module is a leaf of torch.nn such as Linear or Dropout, which never attends; hooks cost time."""
    # Not `children()`, which creates a generator and a set for each of hundreds of modules.
    if module._modules or isinstance(module, (nn.MultiheadAttention, nn.Embedding)):
        return False
    return type(module).__module__.startswith("torch.nn.modules.")


def make_module_hooks(recorder: Recorder, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(module: nn.Module, args: Any) -> None:
        recorder.enter_module(name)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        recorder.leave_module(name)

    return enter, leave


def make_embedding_hook(recorder: Recorder) -> Callable[..., None]:
    def read_token_ids(module: nn.Module, args: Any) -> None:
        is_counted = get_ident() == recorder.thread and not is_recomputation()
        if is_counted and args and isinstance(args[0], Tensor):
            recorder.add_embedded_ids(args[0])

    return read_token_ids


def enter_adapters(stack: ExitStack, model: nn.Module, recorder: Recorder) -> None:
    """Enters the context that a library's models need: today transformers."""
    if "transformers" in sys.modules:
        from foci.capture import huggingface

        models = huggingface.find_pretrained_models(recorder.modules)
        if models and recorder.keeps_own_calls:
            stack.enter_context(huggingface.observe_models(models, recorder))
        elif models:
            stack.enter_context(huggingface.prepare_models(model, models, recorder))
