"""Finds the image patches and the frames of sound among the tokens that a model of transformers reads.

The processor of such a model puts one image token into the text for each patch that the language model gets, and the
model replaces them in order. So the images, in the order of the batch, are laid over the image tokens: first the grids
of each image (whole image, tiles, frames of a video) are planned from the pixels, then they are placed.

rows x columns of patches; tiles are parts of an image that the vision tower reads one by one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.capture.hooks import hook_module
from foci.capture.huggingface.sounds import FEATURE_MASKS, FEATURES, find_sound_segments
from foci.record.labels import WHOLE, Segment
from foci.record.pictures import scale_to_bytes, shrink_picture

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# Models that cut an image into tiles and add the whole image as the last tile.
TILED_MODELS = frozenset({"internvl", "idefics3", "smolvlm", "llama4"})
PIXEL_INPUTS = ("pixel_values", "pixel_values_videos")
READ_ARGUMENTS = (*PIXEL_INPUTS, "image_grid_thw", "image_sizes", "video_grid_thw", *FEATURES, *FEATURE_MASKS)
# The arguments with images and recordings, of which a model has at least one if it reads them.
MEDIA_ARGUMENTS = frozenset({*PIXEL_INPUTS, *FEATURES})
FEATURE_METHODS = ("get_image_features", "get_video_features", "get_audio_features")
# The side to which tiles and the whole image are reduced to find how the tiles lie.
COMPARED_SIDE = 24


@dataclass
class TokenGrid:
    """A grid of patches in the order of its image tokens; `before` and `after` are tokens around it."""

    rows: int
    columns: int
    box: tuple[float, float, float, float] = WHOLE
    stride: int | None = None
    frame: int | None = None
    before: int = 0
    after: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * (self.stride or self.columns)


@dataclass
class Image:
    """The grids of an image or a video, and its pictures, (3, height, width) each: one, or one per frame."""

    grids: list[TokenGrid]
    pictures: list[Tensor] = field(default_factory=list)


def watch_media(
    block: ExitStack, label: str, model: nn.Module, recorder: Recorder, get_argument: Callable[..., Any]
) -> None:
    """Reports the patches and frames among the token ids of a model to the recorder, until the block closes.

    `get_argument` reads an argument of a forward call.
    """
    # `generate` encodes images and recordings first, and runs the model without them.
    encoded: dict[str, Any] = {}

    def find_media(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = get_argument(module, args, kwargs, "input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not recorder.is_counting():
            return
        given = {name: get_argument(module, args, kwargs, name) for name in READ_ARGUMENTS}
        inputs = {name: encoded.get(name) if value is None else value for name, value in given.items()}
        encoded.clear()
        if not any(isinstance(inputs[name], Tensor) for name in MEDIA_ARGUMENTS):
            return
        segments, pictures = find_segments(module.config, ids, inputs, recorder.processor)
        frames, spectrograms = find_sound_segments(module.config, ids, inputs)
        for each in frames:
            segments.append(each if each.picture is None else replace(each, picture=each.picture + len(pictures)))
        if segments:
            recorder.add_segments(label, segments, [*pictures, *spectrograms])

    hook_module(block, recorder, model, find_media, before=True, with_kwargs=True)
    inner = getattr(model, "base_model", model)
    for name in FEATURE_METHODS:
        if hasattr(inner, name):
            vars(inner)[name] = NotingMethod(inner, name, encoded, recorder)
            block.callback(vars(inner).pop, name, None)


class NotingMethod:
    """A method of a model, which also notes the media that it is called with outside of a forward pass."""

    def __init__(self, model: nn.Module, name: str, noted: dict[str, Any], recorder: Recorder) -> None:
        self.model, self.name, self.noted, self.recorder = model, name, noted, recorder
        self.method: Callable[..., Any] = getattr(model, name)
        # `generate` reads it to choose the arguments.
        self.__signature__ = inspect.signature(self.method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.is_open and recorder.is_counting() and next(recorder.running_modules(), None) is None:
            bound = self.__signature__.bind(*args, **kwargs).arguments
            self.noted.update({name: value for name, value in bound.items() if name in READ_ARGUMENTS})
        return self.method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Callable[..., Any]:
        """The plain method of the copied model."""
        copied = memo.get(id(self.model), self.model)
        return MethodType(getattr(type(self.model), self.name), copied)


def find_segments(
    config: Any, ids: Tensor, inputs: dict[str, Any], processor: Any
) -> tuple[list[Segment], list[Tensor]]:
    """The patches among the token ids (B, T), and the pictures; none if the inputs are laid out in an unknown way."""
    found: list[tuple[list[Segment], Image]] = []
    for token, plan in (("image_token_id", plan_images), ("video_token_id", plan_videos)):
        number = getattr(config, token, None)
        positions = (ids == number).nonzero().tolist() if isinstance(number, int) else []
        images = plan(config, inputs, ids, positions) if positions else []
        found += place_images(images, positions)
    # Images and videos count together, in the order of the text.
    found.sort(key=lambda pair: (pair[0][0].sequence, pair[0][0].start))
    segments: list[Segment] = []
    pictures: list[Tensor] = []
    for number, (placed, image) in enumerate(found):
        for segment in placed:
            own = min(segment.frame or 0, len(image.pictures) - 1)
            picture = len(pictures) + own if image.pictures else None
            segments.append(replace(segment, image=number, picture=picture))
        pictures += [shrink_picture(to_bytes(each, processor)) for each in image.pictures]
    return segments, pictures


def place_images(images: Sequence[Image], positions: Sequence[Sequence[int]]) -> list[tuple[list[Segment], Image]]:
    """Lays the grids of all images over the image tokens, given as (sequence, position); [] if they do not fit."""
    placed: list[tuple[list[Segment], Image]] = []
    done = 0
    for image in images:
        segments = []
        for grid in image.grids:
            done += grid.before
            part = positions[done : done + grid.tokens]
            if len(part) < grid.tokens or part[-1] != [part[0][0], part[0][1] + grid.tokens - 1]:
                return []
            sequence, start = part[0]
            place = Segment("patches", sequence, start, grid.rows, grid.columns, box=grid.box, stride=grid.stride)
            segments.append(replace(place, frame=grid.frame))
            done += grid.tokens + grid.after
        placed.append((segments, image))
    return placed if done == len(positions) else []


def plan_images(config: Any, inputs: dict[str, Any], ids: Tensor, positions: Sequence[Sequence[int]]) -> list[Image]:
    """The images of a batch in their order; [] if their layout is not known."""
    pixels, sizes = inputs["pixel_values"], inputs["image_sizes"]
    if not isinstance(pixels, Tensor):
        return []
    if isinstance(inputs["image_grid_thw"], Tensor):
        return plan_native_sizes(config.vision_config, pixels, inputs["image_grid_thw"], is_video=False)
    if config.model_type == "llava_next" and pixels.dim() == 5 and sizes is not None:
        return plan_llava_next(config, pixels, torch.as_tensor(sizes).tolist())
    if config.model_type in TILED_MODELS:
        return plan_tiles(pixels, ids, positions)
    return plan_whole_images(pixels, len(positions)) if pixels.dim() == 4 else []


def plan_videos(config: Any, inputs: dict[str, Any], ids: Tensor, positions: Sequence[Sequence[int]]) -> list[Image]:
    pixels, sizes = inputs["pixel_values_videos"], inputs["video_grid_thw"]
    if not isinstance(pixels, Tensor) or not isinstance(sizes, Tensor):
        return []
    return plan_native_sizes(config.vision_config, pixels, sizes, is_video=True)


def plan_whole_images(pixels: Tensor, tokens: int) -> list[Image]:
    """Images (n, 3, height, width) with as many patches each, in the proportion of height and width."""
    count, _, height, width = pixels.shape
    per_image = tokens // max(count, 1)
    # Some models keep the class token in front of the patches.
    for before in (0, 1):
        rows = round(math.sqrt((per_image - before) * height / width))
        columns = (per_image - before) // max(rows, 1)
        if rows and rows * columns + before == per_image and rows * width == columns * height:
            return [Image([TokenGrid(rows, columns, before=before)], [picture]) for picture in pixels]
    return []


def plan_native_sizes(config: Any, pixels: Tensor, sizes: Tensor, is_video: bool) -> list[Image]:
    """Qwen2-VL and its successors: patches (n, width) of images of any size, with sizes (time, rows, columns).

    Squares of `spatial_merge_size` patches become one token each.
    """
    merge, patch, time = config.spatial_merge_size, config.patch_size, config.temporal_patch_size
    images, done = [], 0
    for frames, rows, columns in sizes.tolist():
        grids = [TokenGrid(rows // merge, columns // merge, frame=i if is_video else None) for i in range(frames)]
        count = frames * rows * columns
        part = pixels[done : done + count]
        done += count
        shape = (frames, rows // merge, columns // merge, merge, merge, -1, time, patch, patch)
        # The first of the frames that are merged into one, with the patches back in rows and columns.
        pictures = part.reshape(shape)[:, :, :, :, :, :, 0].permute(0, 5, 1, 3, 6, 2, 4, 7)
        images.append(Image(grids, list(pictures.reshape(frames, -1, rows * patch, columns * patch))))
    return images


def plan_llava_next(config: Any, pixels: Tensor, sizes: Sequence[Sequence[int]]) -> list[Image]:
    """LLaVA-NeXT: the whole image, then its tiles joined into one grid without padding, with a token after each row."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    side = config.vision_config.image_size // config.vision_config.patch_size
    images = []
    for tiles, (height, width) in zip(pixels, sizes, strict=True):
        down, across = get_anyres_image_grid_shape(
            (height, width), config.image_grid_pinpoints, config.vision_config.image_size
        )
        rows, columns = remove_padding(down * side, across * side, height, width)
        grids = [TokenGrid(side, side), TokenGrid(rows, columns, stride=columns + 1)]
        scale = config.vision_config.image_size / max(height, width)
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        # The first tile is the whole image, made square.
        picture = F.interpolate(tiles[:1].float(), size, mode="bilinear", antialias=True)[0]
        images.append(Image(grids, [picture]))
    return images


def remove_padding(rows: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """The rows and columns of a grid that are left without the padding of an image of this height and width."""
    if width / height > columns / rows:
        return rows - 2 * ((rows - int(round(height * columns / width, 7))) // 2), columns
    return rows, columns - 2 * ((columns - int(round(width * rows / height, 7))) // 2)


def plan_tiles(pixels: Tensor, ids: Tensor, positions: Sequence[Sequence[int]]) -> list[Image]:
    """Models whose images are tiles and, as the last tile, the whole image."""
    if pixels.dim() == 5:
        # Sequences with fewer tiles are filled with zeros, which the model drops.
        flat = pixels.flatten(0, 1)
        pixels = flat[(flat != 0).flatten(1).any(1)]
    per_tile = len(positions) // max(len(pixels), 1)
    side = math.isqrt(per_tile)
    if pixels.dim() != 4 or not side or side * side != per_tile or per_tile * len(pixels) != len(positions):
        return []
    images, done = [], 0
    for count in count_tiles(ids, positions, per_tile):
        images.append(arrange_tiles(pixels[done : done + count], side))
        done += count
    return images if done == len(pixels) else []


def count_tiles(ids: Tensor, positions: Sequence[Sequence[int]], per_tile: int) -> Iterator[int]:
    """The number of tiles of each image.

    Either all tiles of an image are neighbors, or each follows a token of its own, and the whole image, the last tile,
    always follows the same token.
    """
    starts = [at for index, at in enumerate(positions) if index == 0 or positions[index - 1] != [at[0], at[1] - 1]]
    ends = [positions.index(start) for start in starts[1:]] + [len(positions)]
    lengths = [end - positions.index(start) for start, end in zip(starts, ends, strict=True)]
    lasts = {row: int(ids[row, start - 1]) if start else -1 for row, start in starts}
    waiting = 0
    for (row, start), length in zip(starts, lengths, strict=True):
        waiting += length // per_tile
        if length > per_tile or not start or int(ids[row, start - 1]) == lasts[row]:
            yield waiting
            waiting = 0
    if waiting:
        yield waiting


def arrange_tiles(tiles: Tensor, side: int) -> Image:
    """The image of some tiles (n, 3, h, w), the last of which is the whole image.

    How many tiles lie side by side is not among the inputs: the arrangement that looks most like the whole image is it.
    """
    count = len(tiles) - 1
    if not count:
        return Image([TokenGrid(side, side)], [tiles[0]])
    choices = [(down, count // down) for down in range(1, count + 1) if count % down == 0]
    joined = {choice: join_tiles(tiles[:-1], *choice) for choice in choices}
    whole = reduce_picture(tiles[-1])
    down, across = min(choices, key=lambda choice: float((reduce_picture(joined[choice]) - whole).square().mean()))
    boxes = [
        (row / down, column / across, (row + 1) / down, (column + 1) / across)
        for row in range(down)
        for column in range(across)
    ]
    return Image([*(TokenGrid(side, side, box=box) for box in boxes), TokenGrid(side, side)], [joined[down, across]])


def join_tiles(tiles: Tensor, down: int, across: int) -> Tensor:
    """(down * across, 3, h, w) -> (3, down * h, across * w)."""
    joined: Tensor = tiles.unflatten(0, (down, across)).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    return joined


def reduce_picture(picture: Tensor) -> Tensor:
    reduced: Tensor = F.adaptive_avg_pool2d(picture.float(), COMPARED_SIDE)
    return reduced


def to_bytes(picture: Tensor, processor: Any) -> Tensor:
    """(3, height, width) as a model reads it -> uint8 (height, width, 3); the processor knows the original scale."""
    picture = picture.detach().float().cpu()
    if picture.shape[0] != 3:
        picture = picture[:1].expand(3, -1, -1)
    images = getattr(processor, "image_processor", processor)
    mean, deviation = getattr(images, "image_mean", None), getattr(images, "image_std", None)
    if mean is not None and deviation is not None and getattr(images, "do_normalize", True):
        picture = picture * torch.tensor(deviation).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
        return (picture.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    return scale_to_bytes(picture).permute(1, 2, 0)
