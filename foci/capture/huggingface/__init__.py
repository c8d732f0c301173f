"""Prepares models of transformers for `foci.watch`: switches their attention, names their layers, reads their inputs.

Attention modules that call the attention interface of transformers are switched to `attn_implementation="foci"`.
Modules with their own attention code are left alone: their calls of PyTorch's attention are recorded, other code is
reported as unseen.

switch: changes `attn_implementation` for the duration of a block.
naming: layer names of the attention modules.
inputs: token ids, patches and frames that the model reads.
images: image patches among the tokens of a vision-language model.
sounds: frames of sound among tokens, and the times of audio encoders.
masks: masks of transformers as masks of foci.
attention: a call of the attention interface as a call of `foci.attention`.
trainer: the callback that monitors a Trainer's model.
interface: records calls of the attention interface, which run unchanged.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import nn

from foci.capture.huggingface.attention import IMPLEMENTATION, register
from foci.capture.huggingface.inputs import watch_inputs
from foci.capture.huggingface.interface import observe_interface
from foci.capture.huggingface.naming import find_encoder_and_decoder, find_owners, name_known_layers
from foci.capture.huggingface.switch import switch_implementation
from foci.capture.naming import LayerNames, is_inside

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# Where classes of modules get their attention from, cached: see `attention_source_of`.
ATTENTION_SOURCES: dict[type[nn.Module], str | None] = {}


@dataclass(frozen=True)
class TransformersModels:
    """The transformers models inside a model, outermost first, and their attention modules, each by name.

    calling: the attention modules that call the attention interface.
    """

    models: dict[str, nn.Module]
    attention_modules: dict[str, nn.Module]
    calling: tuple[str, ...] = ()


def find_transformers_models(names: LayerNames) -> TransformersModels:
    """The transformers models among the modules of a model."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return TransformersModels({}, {})
    modules = names.modules
    if names.layout.transformers_modules is None:
        models = [name for name, module in modules.items() if isinstance(module, modeling.PreTrainedModel)]
        attention_modules = [
            name
            for name, module in (modules.items() if models else ())
            if attention_source_of(type(module)) and any(is_same_or_inside(name, outer) for outer in models)
        ]
        calling = tuple(name for name in attention_modules if attention_source_of(type(modules[name])) == "interface")
        names.layout.transformers_modules = models, attention_modules, calling
    models, attention_modules, calling = names.layout.transformers_modules
    return TransformersModels(
        {name: modules[name] for name in models}, {name: modules[name] for name in attention_modules}, calling
    )


@contextmanager
def prepare_models(model: nn.Module, found: TransformersModels, recorder: Recorder) -> Iterator[None]:
    """Switches transformers models to foci for a block, reads their inputs, and reports unseen modules at the end."""
    register()
    models, modules = found.models, found.attention_modules
    with ExitStack() as stack:
        parts = find_encoder_and_decoder(models)
        recorder.name_layers(name_known_layers(recorder.layer_names.layout, models, modules, parts))
        for config in find_attention_configs(found):
            stack.enter_context(switch_implementation(config, IMPLEMENTATION))
        encoder_and_decoder = {part: model.get_submodule(name) for part, name in parts.items()}
        owners = [models[name] for name in find_owners(tuple(models), tuple(modules))]
        stack.enter_context(watch_inputs(models, owners, encoder_and_decoder, recorder))
        yield
        ran = {name: module for name, module in modules.items() if name in recorder.run_counts}
        report_unseen_modules(model, recorder, ran)


@contextmanager
def observe_models(found: TransformersModels, recorder: Recorder) -> Iterator[None]:
    """Records the calls of transformers models, which keep their attention implementation, for a block."""
    modules = found.attention_modules
    parts = find_encoder_and_decoder(found.models)
    recorder.name_layers(name_known_layers(recorder.layer_names.layout, found.models, modules, parts))
    with observe_interface():
        yield
        for name, module in modules.items():
            if name in recorder.run_counts and not recorder.has_attended(name):
                recorder.mark_unseen(name, describe_missed(module))


def describe_missed(module: nn.Module) -> str:
    """Why the attention of a module that ran was not recorded."""
    how = "has its own attention code" if attention_source_of(type(module)) == "own" else "made no attention call"
    return f"{type(module).__name__} {how}"


def attention_source_of(module_class: type[nn.Module]) -> str | None:
    """Where a class of modules gets its attention from: the "interface", its "own" code, or None for no attention."""
    if module_class not in ATTENTION_SOURCES:
        ATTENTION_SOURCES[module_class] = inspect_attention_source(module_class)
    return ATTENTION_SOURCES[module_class]


def inspect_attention_source(module_class: type[nn.Module]) -> str | None:
    if any(base.__module__ == "transformers.modeling_utils" for base in module_class.__mro__):
        # A whole model has no attention of its own, only its modules have.
        return None
    own = [base for base in module_class.__mro__ if base.__module__.partition(".")[0] not in {"torch", "builtins"}]
    source = "".join(map(get_source_code, own))
    if "ALL_ATTENTION_FUNCTIONS" in source:
        return "interface"
    has_attention_name = re.search(r"Attention|Attn", module_class.__name__)
    return "own" if has_attention_name and re.search(r"softmax\(|scaled_dot_product_attention\(", source) else None


def get_source_code(module_class: type) -> str:
    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):
        return ""


def is_same_or_inside(name: str, outer: str) -> bool:
    return name == outer or is_inside(name, outer)


def find_attention_configs(found: TransformersModels) -> list[Any]:
    """The configs that select the attention: those of modules that call the interface, and of the models around them.

    Other configs are left as they are: their modules may use them to choose PyTorch's own attention.
    """
    configs = [getattr(found.attention_modules[name], "config", None) for name in found.calling]
    # Any of the models around a module may build its masks, from a config that may be a copy.
    configs += [found.models[name].config for name in find_models_around(tuple(found.models), found.calling)]
    unique = {id(config): config for config in configs}
    return [config for config in unique.values() if hasattr(config, "_attn_implementation_internal")]


@lru_cache(64)
def find_models_around(models: tuple[str, ...], modules: tuple[str, ...]) -> list[str]:
    """The models that contain one of the modules, by name."""
    return [outer for outer in models if any(is_same_or_inside(name, outer) for name in modules)]


def report_unseen_modules(model: nn.Module, recorder: Recorder, ran: dict[str, nn.Module]) -> None:
    """Reports the attention modules that ran without a recorded call."""
    missed = {name: module for name, module in ran.items() if not recorder.has_attended(name)}
    for name, module in missed.items():
        recorder.mark_unseen(name, describe_missed(module))
    if missed:
        first, module = next(iter(missed.items()))
        warnings.warn(
            f"foci.watch could not record {len(missed)} of the {len(ran)} attention modules of {type(model).__name__}"
            f" that ran, such as {first} ({type(module).__name__}): they do not use the attention interface of"
            " transformers. `unseen` of the record lists them",
            stacklevel=2,
        )
