"""What a denoiser is called with: the length of its text, and the grid of patches that it cuts its latents into."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

# Where the text lies in joint attention: behind the image or before it.
TEXT_LAST = frozenset({"HunyuanVideoTransformer3DModel", "SD3Transformer2DModel"})
TEXT_FIRST = frozenset({"CogVideoXTransformer3DModel", "FluxTransformer2DModel", "QwenImageTransformer2DModel"})
# A UNet halves its latents at most this often.
MAX_HALVINGS = 6


class LatentGrid(NamedTuple):
    """The patches of the latents that a denoiser reads; `frames` is None for an image."""

    frames: int | None
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return (self.frames or 1) * self.rows * self.columns

    @property
    def name(self) -> str:
        """The name of its sequence in a record: "image 64x64", "video 4x8x8"."""
        if self.frames is None:
            return f"image {self.rows}x{self.columns}"
        return f"video {self.frames}x{self.rows}x{self.columns}"

    def halve(self, times: int) -> LatentGrid:
        """The grid after some convolutions of stride 2, which round up."""
        scale = 2**times
        return LatentGrid(self.frames, -(-self.rows // scale), -(-self.columns // scale))


@dataclass
class DenoiserInput:
    """What a denoiser was given in a pass: batch, length and width of the text, the grid of its latents."""

    batch: int = 0
    text_length: int = 0
    text_width: int = 0
    grid: LatentGrid | None = None
    # Whether the text follows the image in joint attention; None if the model is not known.
    is_text_last: bool | None = None
    is_unet: bool = False

    @property
    def has_all_sizes(self) -> bool:
        """Whether the sizes of all sequences of the model follow from this."""
        return self.batch > 0 and self.grid is not None

    def find_grid(self, length: int) -> LatentGrid | None:
        """The grid of a sequence of latent patches: that of the input, in a UNet also halved several times."""
        if self.grid is None:
            return None
        grids = [self.grid.halve(times) for times in range(MAX_HALVINGS if self.is_unet else 1)]
        return next((grid for grid in grids if grid.tokens == length), None)


def read_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DenoiserInput:
    """What a denoiser is called with."""
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return DenoiserInput()
    latents = given["sample"] if "sample" in given else given.get("hidden_states")
    text, name = given.get("encoder_hidden_states"), type(module).__name__
    if not isinstance(latents, Tensor):
        return DenoiserInput()
    found = DenoiserInput(batch=latents.shape[0], is_unet="sample" in given)
    if isinstance(text, Tensor) and text.dim() == 3:
        found.text_length, found.text_width = text.shape[1], text.shape[2]
    if name in TEXT_FIRST | TEXT_LAST:
        found.is_text_last = name in TEXT_LAST
    found.grid = find_grid(module, latents, given, found.is_unet)
    return found


def find_grid(module: nn.Module, latents: Tensor, given: dict[str, Any], is_unet: bool) -> LatentGrid | None:
    """The frames, rows and columns of patches that a denoiser cuts its latents into."""
    config = getattr(module, "config", None)
    if is_unet:
        return LatentGrid(None, latents.shape[-2], latents.shape[-1])
    time, down, across = read_patch_size(config)
    if latents.dim() == 4:
        return LatentGrid(None, latents.shape[2] // down, latents.shape[3] // across)
    if latents.dim() == 5:
        # CogVideoX has the frames before the channels.
        axis = 1 if type(module).__name__.startswith("CogVideoX") else 2
        return LatentGrid(latents.shape[axis] // time, latents.shape[3] // down, latents.shape[4] // across)
    return find_packed_grid(given)


def read_patch_size(config: Any) -> tuple[int, int, int]:
    """The frames, rows and columns of latents in a patch."""
    size: Any = getattr(config, "patch_size", None) or 1
    if isinstance(size, list | tuple):
        time, down, across = [1] * (3 - len(size)) + list(size)
        return time, down, across
    return getattr(config, "patch_size_t", None) or 1, size, size


def find_packed_grid(given: dict[str, Any]) -> LatentGrid | None:
    """The grid of latents (B, N, width) that are patches already, from the arguments that say how they lie."""
    ids, shapes = given.get("img_ids"), given.get("img_shapes")
    if isinstance(ids, Tensor) and ids.dim() in {2, 3} and ids.shape[-1] >= 3:
        last = ids.reshape(-1, ids.shape[-1])[: ids.shape[-2]].amax(0).long().tolist()
        return LatentGrid(None, last[1] + 1, last[2] + 1)
    if isinstance(shapes, list | tuple) and shapes:
        first = shapes[0][0] if isinstance(shapes[0], list) else shapes[0]
        frames, rows, columns = first
        return LatentGrid(None if frames == 1 else frames, rows, columns)
    numbers = [given.get(name) for name in ("num_frames", "height", "width")]
    if all(isinstance(number, int) for number in numbers):
        return LatentGrid(*numbers)  # type: ignore[arg-type]
    return None
