"""What goes into a model of transformers while it is watched: token ids, the grid of patches, frames of sound.

B batch, T length.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foci.capture.huggingface.naming import SEQUENCE_NAMES, modality_of_model
from foci.capture.naming import is_inside
from foci.record.labels import Labels

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

SAMPLES_PER_SECOND = 16000


@contextmanager
def watch_inputs(
    parts: dict[str, nn.Module], owners: dict[int, nn.Module], halves: dict[str, nn.Module], recorder: Recorder
) -> Iterator[None]:
    """Tells the recorder, for a block, what goes into the outermost models, or into an encoder and a decoder.

    `owners` are the models that have attention modules of their own: the towers.
    """
    outermost = [part for name, part in parts.items() if not any(is_inside(name, outer) for outer in parts)]
    with ExitStack() as leaving:
        for half, module in halves.items():
            leaving.callback(
                module.register_forward_pre_hook(
                    make_token_id_hook(SEQUENCE_NAMES[half], recorder), with_kwargs=True
                ).remove
            )
        for module in () if halves else outermost:
            leaving.callback(
                module.register_forward_pre_hook(make_token_id_hook("input", recorder), with_kwargs=True).remove
            )
        for module in owners.values():
            label = tower_label_of(module, halves)
            if label is not None:
                shown = partial(record_tower_labels, label, recorder)
                leaving.callback(module.register_forward_hook(shown, with_kwargs=True).remove)
        yield


def make_token_id_hook(label: str, recorder: Recorder) -> Callable[..., None]:
    """A hook that reads the token ids of a forward."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = get_forward_argument(module, args, kwargs, "input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and get_ident() == recorder.thread:
            recorder.read(label, ids)

    return hook


def get_forward_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a forward, however it was passed."""
    if name in kwargs or not args:
        return kwargs.get(name)
    names = list(inspect.signature(module.forward).parameters)
    return args[names.index(name)] if name in names[: len(args)] else None


def tower_label_of(part: Any, halves: dict[str, nn.Module]) -> str | None:
    """What the positions of a tower are called, where it takes images or sound; None for text."""
    side = modality_of_model(part)
    if side == "text" or halves.get("decoder") is part:
        return None
    return SEQUENCE_NAMES["encoder"] if halves.get("encoder") is part else SEQUENCE_NAMES[side]


def record_tower_labels(
    label: str, recorder: Recorder, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """A hook that says what stands along the positions of a tower."""
    states = getattr(out, "last_hidden_state", None)
    if not isinstance(states, Tensor) or states.dim() != 3 or get_ident() != recorder.thread:
        return
    batch, length = states.shape[:2]
    if modality_of_model(part) == "vision":
        found = build_patch_labels(part.config, get_forward_argument(part, args, kwargs, "pixel_values"), batch, length)
    else:
        found = build_frame_labels(part.config, batch, length)
    if found is not None:
        recorder.say(label, found)


def build_patch_labels(config: Any, images: Any, batch: int, length: int) -> Labels | None:
    """The grid of patches, and the pictures from their darkest to their brightest; None where it is no plain grid."""
    size = getattr(config, "patch_size", None)
    if not isinstance(images, Tensor) or images.dim() != 4 or not isinstance(size, int):
        return None
    rows, columns = images.shape[2] // size, images.shape[3] // size
    leading = length - rows * columns
    # Images in one row are no batch, and tokens behind the patches (detection) would pass for tokens before them.
    if batch != images.shape[0] or not 0 <= leading <= 16 or hasattr(config, "num_detection_tokens"):
        return None
    places = [f"{row},{column}" for row in range(rows) for column in range(columns)]
    texts = tuple(f"[{i}]" for i in range(leading)) + tuple(places)
    shown = images_to_uint8(images) if images.shape[1] == 3 else None
    return Labels("patches", (texts,) * images.shape[0], grid=(rows, columns), leading=leading, images=shown)


def images_to_uint8(images: Tensor) -> Tensor:
    """(B, 3, height, width) of any scale as uint8 (B, height, width, 3)."""
    images = images.detach().float()
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    scaled = (images - low) / (high - low).clamp(min=1e-6) * 255
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


def build_frame_labels(config: Any, batch: int, length: int) -> Labels:
    """Frames of sound, with the time that each takes where the config tells."""
    seconds = seconds_per_frame(config)
    texts = [f"{i * seconds:.2f}s" if seconds else str(i) for i in range(length)]
    return Labels("frames", (tuple(texts),) * batch, seconds=seconds)


def seconds_per_frame(config: Any) -> float | None:
    if config.model_type == "whisper":
        # Frames of 10 ms, halved by a convolution.
        return 0.02
    strides = getattr(config, "conv_stride", None)
    return math.prod(strides) / SAMPLES_PER_SECOND if strides else None
