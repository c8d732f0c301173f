"""Models of transformers under `foci.watch`: switched over and back, their attention named, their inputs read.

Attention modules that ask transformers' interface for their attention are switched to `foci`. Those that compute it
themselves are left alone: where they call PyTorch's own attention they are seen there, else they are named.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from foci.capture.huggingface.attention import IMPLEMENTATION, register
from foci.capture.huggingface.inputs import watch_inputs
from foci.capture.huggingface.naming import find_encoder_and_decoder, find_owner, name_layers
from foci.capture.huggingface.switch import switch_implementation
from foci.capture.naming import is_inside

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# How classes of modules come by their attention, as far as they were met.
ATTENTION_SOURCES: dict[type[nn.Module], str | None] = {}


def find_pretrained_models(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """The models of transformers among the modules of a model, by name, outermost first."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return {}
    return {name: part for name, part in modules if isinstance(part, modeling.PreTrainedModel)}


@contextmanager
def prepare_models(model: nn.Module, parts: dict[str, nn.Module], recorder: Recorder) -> Iterator[None]:
    """Switches the parts of a model over for a block, reads what goes in, and says afterwards what was not seen."""
    register()
    modules = {
        name: module
        for name, module in recorder.modules
        if attention_source_of(type(module)) and any(is_same_or_inside(name, outer) for outer in parts)
    }
    with ExitStack() as leaving:
        for place in name_layers(parts, modules):
            recorder.place(*place)
        for config in find_attention_configs(parts, modules):
            leaving.enter_context(switch_implementation(config, IMPLEMENTATION))
        halves = {half: model.get_submodule(name) for half, name in find_encoder_and_decoder(parts).items()}
        owners = {id(owner): owner for owner in (find_owner(name, parts) for name in modules)}
        leaving.enter_context(watch_inputs(parts, owners, halves, recorder))
        yield
        report_unseen_modules(model, recorder, {name: module for name, module in modules.items() if recorder.ran[name]})


def attention_source_of(kind: type[nn.Module]) -> str | None:
    """How a class of modules comes by its attention: it "asks" the interface, "computes" it itself, or has none."""
    if kind not in ATTENTION_SOURCES:
        ATTENTION_SOURCES[kind] = inspect_attention_source(kind)
    return ATTENTION_SOURCES[kind]


def inspect_attention_source(kind: type[nn.Module]) -> str | None:
    if any(base.__module__ == "transformers.modeling_utils" for base in kind.__mro__):
        # A whole model: its attention is that of its modules.
        return None
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in {"torch", "builtins"}]
    source = "".join(map(get_source_code, own))
    if "ALL_ATTENTION_FUNCTIONS" in source:
        return "asks"
    named = re.search(r"Attention|Attn", kind.__name__)
    return "computes" if named and re.search(r"softmax\(|scaled_dot_product_attention\(", source) else None


def get_source_code(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def is_same_or_inside(name: str, outer: str) -> bool:
    return name == outer or is_inside(name, outer)


def find_attention_configs(parts: dict[str, nn.Module], modules: dict[str, nn.Module]) -> list[Any]:
    """The configs that decide which attention is taken: of every module that asks, and of the models they belong to.

    One that no module asks is left as it is: its modules may choose PyTorch's own attention by it.
    """
    asking = {name: module for name, module in modules.items() if attention_source_of(type(module)) == "asks"}
    found = [getattr(module, "config", None) for module in asking.values()]
    # Masks are made by any of the models around a module, from a config that may be a copy.
    found += [part.config for outer, part in parts.items() if any(is_same_or_inside(name, outer) for name in asking)]
    unique = {id(config): config for config in found if hasattr(config, "_attn_implementation_internal")}
    return list(unique.values())


def report_unseen_modules(model: nn.Module, recorder: Recorder, ran: dict[str, nn.Module]) -> None:
    """Names the attention modules that ran without a call that could be seen."""
    missed = {name: module for name, module in ran.items() if not recorder.called(name)}
    for name, module in missed.items():
        how = (
            "computes its attention itself"
            if attention_source_of(type(module)) == "computes"
            else "made no attention call"
        )
        recorder.cannot(name, f"{type(module).__name__} {how}")
    if missed:
        first, module = next(iter(missed.items()))
        warnings.warn(
            f"foci.watch could not see {len(missed)} of the {len(ran)} attention modules of {type(model).__name__} that"
            f" ran, {first} ({type(module).__name__}) first: they do not ask transformers for their attention."
            " The record's `unseen` names them",
            stacklevel=2,
        )
