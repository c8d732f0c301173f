"""Finds the windows that a vision model attends in, and puts its attention back on the grid of patches.

Swin (transformers, and timm with fused attention) pads its grid, rolls it by half a window in every second layer, and
cuts it into windows; MaxViT of timm attends in blocks, and in grids of patches that lie far apart. Hooks on these
layers note the grid; the windows follow from their sizes.

rows x columns of patches; n patches of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.capture.hooks import hook_module

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder


@dataclass(frozen=True)
class Windows:
    """How a layer cuts its grid into windows.

    Args:
        rows, columns: of the grid.
        window: rows and columns of a window; of a strided grid, the number of windows' patches along each axis.
        shift: how far the grid is rolled up and left.
        is_strided: whether the patches of a window are spread over the grid, as MaxViT's are.
        rolls_first: whether the grid is rolled before it is padded.
    """

    rows: int
    columns: int
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    is_strided: bool = False
    rolls_first: bool = False

    def find_positions(self) -> Tensor:
        """The patch at each position of each window, (windows, n); -1 for padding.

        >>> Windows(2, 4, (2, 2)).find_positions().tolist()
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        >>> Windows(2, 4, (2, 2), is_strided=True).find_positions().tolist()
        [[0, 2, 4, 6], [1, 3, 5, 7]]
        """
        grid = torch.arange(self.rows * self.columns).view(self.rows, self.columns)
        height, width = self.window
        down, across = self.shift
        if self.rolls_first:
            grid = grid.roll((-down, -across), (0, 1))
        grid = F.pad(grid, (0, -self.columns % width, 0, -self.rows % height), value=-1)
        if not self.rolls_first:
            grid = grid.roll((-down, -across), (0, 1))
        if self.is_strided:
            cells = grid.unflatten(1, (width, -1)).unflatten(0, (height, -1)).permute(1, 3, 0, 2)
        else:
            cells = grid.unflatten(1, (-1, width)).unflatten(0, (-1, height)).permute(0, 2, 1, 3)
        positions: Tensor = cells.reshape(-1, height * width)
        return positions


class WindowGrids:
    """The grids of the layers that attend in windows, by module name."""

    def __init__(self) -> None:
        self.grids: dict[str, tuple[nn.Module, int, int]] = {}

    def watch(self, block: ExitStack, recorder: Recorder) -> None:
        """Notes the grid of every layer that attends in windows, until the block closes."""
        layout, modules = recorder.layer_names.layout, recorder.layer_names.modules
        if layout.windowed_modules is None:
            layout.windowed_modules = [name for name, module in modules.items() if is_windowed(module)]
        for name in layout.windowed_modules:
            hook_module(block, recorder, modules[name], self._make_hook(name), before=True, with_kwargs=True)

    def _make_hook(self, name: str) -> Callable[..., None]:
        def note_grid(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
            size = args[1] if len(args) > 1 else kwargs.get("input_dimensions")
            if isinstance(states, Tensor) and states.dim() == 4:
                size = states.shape[1:3]
            if isinstance(size, tuple | list) and len(size) == 2:
                self.grids[name] = module, int(size[0]), int(size[1])

        return note_grid

    def find(self, running: Iterable[str], batch: int, length: int) -> Windows | None:
        """The windows of a call, by the innermost running layer that has any; None if they do not fit its sizes."""
        name = next((name for name in running if name in self.grids), None) if self.grids else None
        if name is None:
            return None
        # The layer may have changed the size of its windows in this pass.
        found = read_windows(*self.grids[name])
        count, size = found.find_positions().shape
        return found if size == length and batch % count == 0 else None


def is_windowed(module: nn.Module) -> bool:
    """Whether a module is a layer of Swin, or of MaxViT of timm."""
    return (hasattr(module, "shift_size") and hasattr(module, "window_size")) or hasattr(module, "partition_block")


def read_windows(module: Any, rows: int, columns: int) -> Windows:
    """How a layer cuts a grid into windows."""
    if hasattr(module, "partition_block"):
        return Windows(rows, columns, as_pair(module.partition_size), is_strided=not module.partition_block)
    rolls_first = type(module).__module__.startswith("timm.")
    return Windows(rows, columns, as_pair(module.window_size), as_pair(module.shift_size), rolls_first=rolls_first)


def as_pair(size: Any) -> tuple[int, int]:
    first, second = size if isinstance(size, tuple | list) else (size, size)
    return int(first), int(second)
