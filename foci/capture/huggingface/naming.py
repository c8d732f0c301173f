"""Names the attention modules of transformers models.

An encoder-decoder has the stacks encoder, decoder and cross; a model with towers for several modalities has a stack for
each; any other model has one unnamed stack.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from foci.capture.naming import CROSS_ATTENTION, LayerName, ModelLayout, is_inside, name_within_block

MODALITY_BY_INPUT = {
    "pixel_values": "vision",
    "pixel_values_videos": "vision",
    "input_features": "audio",
    "input_values": "audio",
    "audio_values": "audio",
}
# Cached results of `list_forward_parameters`.
FORWARD_PARAMETERS: dict[type[Any], tuple[str, ...]] = {}
SEQUENCE_NAMES = {"text": "input", "vision": "patches", "audio": "frames", "encoder": "source", "decoder": "target"}


def name_known_layers(
    layout: ModelLayout, models: dict[str, Any], modules: dict[str, Any], encoder_and_decoder: dict[str, str]
) -> dict[str, LayerName]:
    """What `name_layers` gives: the names follow from the layout, and from what the configs and modules say now."""
    key = (
        tuple(encoder_and_decoder.items()),
        tuple(map(modality_of_model, models.values())),
        tuple(models),
        tuple(modules),
        tuple((vars(each).get("layer_idx"), bool(vars(each).get("is_cross_attention"))) for each in modules.values()),
    )
    if key not in layout.transformers_layers:
        layout.transformers_layers[key] = dict(name_layers(models, modules, encoder_and_decoder))
    return layout.transformers_layers[key]


def name_layers(
    models: dict[str, Any], modules: dict[str, Any], encoder_and_decoder: dict[str, str]
) -> Iterator[tuple[str, LayerName]]:
    """The layer name of each attention module; `models` are the transformers models, outermost first."""
    modalities = {name: modality_of_model(models[find_owner(name, models)]) for name in modules}
    has_several = len(set(modalities.values())) > 1
    stacks: dict[tuple[str, bool], list[str]] = {}
    for name, module in modules.items():
        stack = part_containing(name, encoder_and_decoder) or (
            modalities[name] if has_several or not encoder_and_decoder else "text"
        )
        stacks.setdefault((stack, is_cross_attention_module(name, module)), []).append(name)
    for (stack, is_cross), names in stacks.items():
        axis = SEQUENCE_NAMES[stack]
        shown = "cross" if is_cross else stack if has_several or stack in {"encoder", "decoder"} else ""
        keys = {"target": "source", "input": "patches" if "vision" in modalities.values() else "source"}.get(axis, axis)
        for name, index in zip(names, number_modules([modules[name] for name in names]), strict=True):
            yield name, LayerName(shown, index, axis, keys if is_cross else axis)


def find_owner(name: str, models: Iterable[str]) -> str:
    """The innermost transformers model that a module belongs to, by name."""
    return max((outer for outer in models if outer == name or is_inside(name, outer)), key=len)


@lru_cache(64)
def find_owners(models: tuple[str, ...], modules: tuple[str, ...]) -> list[str]:
    """The models that have attention modules of their own."""
    return [*dict.fromkeys(find_owner(name, models) for name in modules)]


def list_forward_parameters(module_class: type[Any]) -> tuple[str, ...]:
    """The names of the arguments of a module's forward; inspecting them takes as long as opening a block."""
    if module_class not in FORWARD_PARAMETERS:
        FORWARD_PARAMETERS[module_class] = tuple(inspect.signature(module_class.forward).parameters)[1:]
    return FORWARD_PARAMETERS[module_class]


def modality_of_model(owner: Any) -> str:
    """The modality of a transformers model's input."""
    if "Vision" in type(owner.config).__name__:
        return "vision"
    # Some models do not say what their main input is.
    names = (getattr(owner, "main_input_name", "input_ids"), *list_forward_parameters(type(owner))[:1])
    return next((MODALITY_BY_INPUT[name] for name in names if name in MODALITY_BY_INPUT), "text")


def find_encoder_and_decoder(models: dict[str, Any]) -> dict[str, str]:
    """The module names of the encoder and the decoder, if the model has both."""
    for name, model in models.items():
        if getattr(model.config, "is_encoder_decoder", False):
            encoder_and_decoder = {"encoder": model.get_encoder(), "decoder": model.get_decoder()}
            inner = {id(module): inner_name for inner_name, module in model.named_modules(prefix=name)}
            return {part: inner[id(module)] for part, module in encoder_and_decoder.items() if id(module) in inner}
    return {}


def part_containing(name: str, encoder_and_decoder: dict[str, str]) -> str | None:
    return next((part for part, outer in encoder_and_decoder.items() if outer == name or is_inside(name, outer)), None)


def is_cross_attention_module(name: str, module: Any) -> bool:
    return bool(getattr(module, "is_cross_attention", False) or CROSS_ATTENTION.search(name_within_block(name)))


def number_modules(modules: Iterable[Any]) -> list[int]:
    """The `layer_idx` of the modules if they all differ; otherwise 0, 1, 2, ..."""
    indices = [getattr(module, "layer_idx", None) for module in modules]
    are_distinct = all(isinstance(index, int) for index in indices) and len(set(indices)) == len(indices)
    return [int(index) for index in indices if index is not None] if are_distinct else list(range(len(indices)))
