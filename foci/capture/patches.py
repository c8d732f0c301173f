"""Finds the grid of patches of a vision model from its first convolution, whatever library the model comes from.

A vision transformer cuts an image into patches with a convolution whose stride is its kernel size: the height and width
of its output are the rows and columns of patches. Those of `foci.nn` know their grid.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foci.capture.hooks import hook_module
from foci.record.labels import Labels
from foci.record.pictures import CHANNELS, shrink_picture, to_pictures

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder
    from foci.nn.vision import VisionTransformer
    from foci.record.layer import Layer

# The largest number of tokens before the first patch: a class token and registers.
MAX_EXTRA_TOKENS = 16


class PatchGrid:
    """The rows and columns of patches that the model cut its images into, and the images."""

    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None
        self.images: Tensor | None = None

    def watch(self, block: ExitStack, recorder: Recorder) -> None:
        """Notes the output of convolutions that cut images into patches, until the block closes."""

        def note_grid(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if recorder.is_counting() and args and isinstance(out, Tensor) and out.dim() == 4:
                self.size, self.images = (out.shape[2], out.shape[3]), args[0].detach()

        def note_own_grid(module: VisionTransformer, args: tuple[Any, ...], out: Any) -> None:
            if recorder.is_counting() and args and isinstance(args[0], Tensor) and args[0].dim() == 4:
                self.size, self.images = module.grid(*args[0].shape[2:]), args[0].detach()

        # A model of `foci.nn` has imported its module.
        own = getattr(sys.modules.get("foci.nn.vision"), "VisionTransformer", ())
        layout, modules = recorder.layer_names.layout, recorder.layer_names.modules
        if layout.vision_models is None:
            layout.vision_models = [name for name, module in modules.items() if own and isinstance(module, own)]
        for name in layout.convolutions:
            convolution = modules[name]
            if isinstance(convolution, nn.Conv2d) and cuts_patches(convolution):
                hook_module(block, recorder, convolution, note_grid, before=False)
        for name in layout.vision_models:
            hook_module(block, recorder, modules[name], note_own_grid, before=False)

    def label_grid(self, rows: int, columns: int, batch: int) -> Labels:
        """Labels of another grid over the same images."""
        texts, pictures = Labels.patches(rows, columns).texts * batch, None
        if self.images is not None and self.images.dim() == 4 and len(self.images) == batch:
            pictures = torch.stack([shrink_picture(picture) for picture in to_pictures(self.images.float())])
        return Labels("patches", texts, grid=(rows, columns), images=pictures)

    def build_labels(self, layers: Iterable[Layer]) -> Labels | None:
        """Labels for the sequence of some layers, if each of them reads the patches and a few tokens before them."""
        if self.size is None or self.images is None or self.images.dim() != 4:
            return None
        rows, columns = self.size
        extra = {layer.shape[-1] - rows * columns for layer in layers}
        if len(extra) != 1 or not 0 <= min(extra) <= MAX_EXTRA_TOKENS:
            return None
        if any(layer.shape[0] != len(self.images) or layer.queries != layer.keys for layer in layers):
            return None
        pictures = [shrink_picture(picture) for picture in to_pictures(self.images.float())]
        labels = Labels.patches(rows, columns, extra=min(extra))
        return Labels(
            "patches", labels.texts * len(pictures), grid=labels.grid, leading=min(extra), images=torch.stack(pictures)
        )


def cuts_patches(module: nn.Conv2d) -> bool:
    """Whether a convolution cuts images into patches that do not overlap."""
    return module.in_channels in CHANNELS and module.kernel_size == module.stride and min(module.kernel_size) > 1
