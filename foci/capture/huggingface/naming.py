"""Where the attention modules of a model of transformers stand, and what runs along their axes.

An encoder-decoder has the stacks encoder, decoder and cross; a model with towers for several kinds of input has a
stack for each; any other model has one stack without a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from foci.capture.naming import CROSS_ATTENTION, is_inside, name_within_block

MODALITY_BY_INPUT = {
    "pixel_values": "vision",
    "pixel_values_videos": "vision",
    "input_features": "audio",
    "input_values": "audio",
    "audio_values": "audio",
}
SEQUENCE_NAMES = {"text": "input", "vision": "patches", "audio": "frames", "encoder": "source", "decoder": "target"}


# The arguments of `Recorder.place`: name, stack, number, and the labels along queries and keys.
Told = tuple[str, str, int, str, str]


def name_layers(parts: dict[str, Any], modules: dict[str, Any]) -> Iterator[Told]:
    """The place of each attention module; `parts` are the models of transformers in the model, outermost first."""
    sides = {name: modality_of_model(find_owner(name, parts)) for name in modules}
    halves = find_encoder_and_decoder(parts)
    several = len(set(sides.values())) > 1
    stacks: dict[tuple[str, bool], list[str]] = {}
    for name, module in modules.items():
        stack = half_containing(name, halves) or (sides[name] if several or not halves else "text")
        stacks.setdefault((stack, is_cross_attention_module(name, module)), []).append(name)
    for (stack, crosses), names in stacks.items():
        axis = SEQUENCE_NAMES[stack]
        shown = "cross" if crosses else stack if several or stack in {"encoder", "decoder"} else ""
        keys = {"target": "source", "input": "patches" if "vision" in sides.values() else "source"}.get(axis, axis)
        for name, index in zip(names, number_modules([modules[name] for name in names]), strict=True):
            yield name, shown, index, axis, keys if crosses else axis


def find_owner(name: str, parts: dict[str, Any]) -> Any:
    """The innermost model of transformers that a module belongs to."""
    return parts[max((outer for outer in parts if outer == name or is_inside(name, outer)), key=len)]


def modality_of_model(owner: Any) -> str:
    """What kind of input a model of transformers takes."""
    if "Vision" in type(owner.config).__name__:
        return "vision"
    return MODALITY_BY_INPUT.get(getattr(owner, "main_input_name", "input_ids"), "text")


def find_encoder_and_decoder(parts: dict[str, Any]) -> dict[str, str]:
    """The names of the encoder and of the decoder, where the model has both."""
    for name, part in parts.items():
        if getattr(part.config, "is_encoder_decoder", False):
            halves = {"encoder": part.get_encoder(), "decoder": part.get_decoder()}
            inner = {id(module): inner_name for inner_name, module in part.named_modules(prefix=name)}
            return {half: inner[id(module)] for half, module in halves.items() if id(module) in inner}
    return {}


def half_containing(name: str, halves: dict[str, str]) -> str | None:
    return next((half for half, outer in halves.items() if outer == name or is_inside(name, outer)), None)


def is_cross_attention_module(name: str, module: Any) -> bool:
    return bool(getattr(module, "is_cross_attention", False) or CROSS_ATTENTION.search(name_within_block(name)))


def number_modules(modules: Iterable[Any]) -> list[int]:
    """The number that the model gave its layers, where it tells them apart; else they are counted."""
    given = [getattr(module, "layer_idx", None) for module in modules]
    told_apart = all(isinstance(number, int) for number in given) and len(set(given)) == len(given)
    return [int(number) for number in given if number is not None] if told_apart else list(range(len(given)))
