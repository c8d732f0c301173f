"""Reads the inputs of transformers models under `foci.watch`: token ids, the grid of image patches, audio frames.

B batch, T length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foci.capture.hooks import hook_module
from foci.capture.huggingface.images import MEDIA_ARGUMENTS, watch_media
from foci.capture.huggingface.naming import SEQUENCE_NAMES, list_forward_parameters, modality_of_model
from foci.capture.huggingface.sounds import find_state_seconds
from foci.capture.naming import is_inside
from foci.record.labels import Labels, Segment
from foci.record.pictures import shrink_picture

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# A remark on the record of a model whose tower attends in windows.
WINDOWED_TOWER = (
    "the vision tower attends in windows: each window of such a layer is recorded on its own (#2, #3, ...), without its"
    " place in the image; layers that attend to the whole image have patches"
)


@contextmanager
def watch_inputs(
    models: dict[str, nn.Module],
    owners: Iterable[nn.Module],
    encoder_and_decoder: dict[str, nn.Module],
    recorder: Recorder,
) -> Iterator[None]:
    """Reports the inputs of the outermost models, or of an encoder and a decoder, to the recorder for a block.

    `owners` are the models that have attention modules of their own: the towers.
    """
    outermost = [model for name, model in models.items() if not any(is_inside(name, outer) for outer in models)]
    with ExitStack() as stack:
        named = {SEQUENCE_NAMES[part]: [module] for part, module in encoder_and_decoder.items()} or {"input": outermost}
        for label, modules in named.items():
            for module in modules:
                action = make_token_id_hook(label, recorder)
                hook_module(stack, recorder, module, action, before=True, with_kwargs=True)
                if MEDIA_ARGUMENTS.intersection(list_forward_parameters(type(module))):
                    watch_media(stack, label, module, recorder, get_forward_argument)
        for module in owners:
            tower = tower_label_of(module, encoder_and_decoder)
            if tower is not None:
                action = partial(record_tower_labels, tower, recorder)
                hook_module(stack, recorder, module, action, before=False, with_kwargs=True)
        yield


def make_token_id_hook(label: str, recorder: Recorder) -> Callable[..., None]:
    """A forward pre-hook that reads the token ids."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = get_forward_argument(module, args, kwargs, "input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and get_ident() == recorder.thread:
            recorder.add_token_ids(label, ids)

    return hook


def get_forward_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a forward call, passed by position or by name."""
    if name in kwargs or not args:
        return kwargs.get(name)
    names = list_forward_parameters(type(module))
    return args[names.index(name)] if name in names[: len(args)] else None


def tower_label_of(model: Any, encoder_and_decoder: dict[str, nn.Module]) -> str | None:
    """The label name of a tower that reads images or audio; None for text."""
    modality = modality_of_model(model)
    if modality == "text" or encoder_and_decoder.get("decoder") is model:
        return None
    return SEQUENCE_NAMES["encoder"] if encoder_and_decoder.get("encoder") is model else SEQUENCE_NAMES[modality]


def record_tower_labels(
    label: str, recorder: Recorder, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    """A forward hook that sets the labels of a tower's positions."""
    sizes = get_forward_argument(model, args, kwargs, "grid_thw")
    if isinstance(sizes, Tensor) and get_ident() == recorder.thread:
        native = build_native_patch_labels(model.config, sizes.tolist())
        if native is not None:
            recorder.set_labels(label, native)
        if hasattr(model.config, "window_size") and WINDOWED_TOWER not in recorder.record.notes:
            recorder.record.notes.append(WINDOWED_TOWER)
        return
    if get_ident() != recorder.thread:
        return
    if model.config.model_type == "audio-spectrogram-transformer":
        values = get_forward_argument(model, args, kwargs, "input_values")
        recorder.set_labels(label, build_spectrogram_labels(model.config, values))
        return
    if modality_of_model(model) == "audio":
        # Recordings that are not a batch lie one after the other.
        sizes = get_forward_argument(model, args, kwargs, "feature_lens")
        has_one = not isinstance(sizes, Tensor) or len(sizes) == 1
        recorder.frame_seconds[label] = find_state_seconds(model.config) if has_one else None
        return
    states = getattr(out, "last_hidden_state", None)
    if not isinstance(states, Tensor) or states.dim() != 3:
        return
    batch, length = states.shape[:2]
    images = get_forward_argument(model, args, kwargs, "pixel_values")
    # An encoder inside the vision model gets its states: the images are those that were cut into patches.
    images = recorder.patch_grid.images if images is None else images
    if model.config.model_type == "llama4_vision_model":
        labels = build_llama4_labels(model.config, images)
    else:
        labels = build_patch_labels(model.config, images, batch, length)
    if labels is not None:
        recorder.set_labels(label, labels)


def build_patch_labels(config: Any, images: Any, batch: int, length: int) -> Labels | None:
    """Labels with the grid of patches and the images; None if the positions are not a plain grid."""
    size = getattr(config, "patch_size", None)
    if isinstance(size, list | tuple) and len({*size}) == 1:
        size = size[0]
    if not isinstance(images, Tensor) or images.dim() != 4 or not isinstance(size, int):
        return None
    rows, columns = images.shape[2] // size, images.shape[3] // size
    leading = length - rows * columns
    # Images concatenated along the sequence are not a batch; detection tokens come after the patches, not before.
    if batch != images.shape[0] or not 0 <= leading <= 16 or hasattr(config, "num_detection_tokens"):
        return None
    coordinates = [f"{row},{column}" for row in range(rows) for column in range(columns)]
    extra = name_extra_tokens(config, leading)
    texts = (*extra, *coordinates)
    shown = images_to_uint8(images) if images.shape[1] == 3 else None
    return Labels("patches", (texts,) * images.shape[0], grid=(rows, columns), leading=leading, images=shown)


def build_spectrogram_labels(config: Any, values: Tensor) -> Labels:
    """Labels of the Audio Spectrogram Transformer: patches of spectrograms (B, time, bands), the lowest band first."""
    rows = (config.num_mel_bins - config.patch_size) // config.frequency_stride + 1
    columns = (config.max_length - config.patch_size) // config.time_stride + 1
    images = images_to_uint8(values.transpose(1, 2).unsqueeze(1)).expand(-1, -1, -1, 3)
    return Labels.patches(rows, columns, image=images, extra=["class token", "distillation token"])


def name_extra_tokens(config: Any, count: int) -> list[str]:
    """The names of the positions before the first patch."""
    registers = getattr(config, "num_register_tokens", 0) or 0
    others = count - 1 - registers
    named = ["distillation token"] if config.model_type == "deit" and others == 1 else []
    named = named or [f"extra token {i}" for i in range(1, others + 1)]
    return ["class token", *named, *(f"register {i}" for i in range(1, registers + 1))][:count]


def build_llama4_labels(config: Any, images: Any) -> Labels | None:
    """Labels of the tower of Llama 4: every tile is a sequence, with the class token behind its patches."""
    if not isinstance(images, Tensor) or images.dim() != 4:
        return None
    rows, columns = (size // config.patch_size for size in images.shape[2:])
    texts = (("",) * (rows * columns) + ("class token",),) * len(images)
    segments = [Segment("patches", tile, 0, rows, columns, image=tile, picture=tile) for tile in range(len(images))]
    return Labels("patches", texts).with_segments(segments, [shrink_picture(each) for each in images_to_uint8(images)])


def build_native_patch_labels(config: Any, sizes: list[list[int]]) -> Labels | None:
    """Labels of the tower of Qwen2-VL or its successors; None if it attends to several images apart.

    Its patches are in squares of `spatial_merge_size`, which become one token of the language model. A tower with
    windows sorts the squares by window; the labels are those of its layers that attend to the whole image.
    """
    if len(sizes) != 1 or sizes[0][0] != 1:
        return None
    (_, rows, columns), merge = sizes[0], config.spatial_merge_size
    numbers = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge).transpose(1, 2)
    squares = [(row, column) for row in range(rows // merge) for column in range(columns // merge)]
    if hasattr(config, "window_size"):
        side = config.window_size // merge // config.patch_size
        squares.sort(key=lambda place: (place[0] // side, place[1] // side))
    order = tuple(number for row, column in squares for number in numbers[row, column].flatten().tolist())
    segment = Segment("patches", rows=rows, columns=columns, order=order)
    return Labels("patches", (("",) * (rows * columns),)).with_segments([segment])


def images_to_uint8(images: Tensor) -> Tensor:
    """(B, 3, height, width) of any scale -> uint8 (B, height, width, 3), each image scaled to its full range."""
    images = images.detach().float()
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    scaled = (images - low) / (high - low).clamp(min=1e-6) * 255
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
