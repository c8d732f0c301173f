"""Switches torch.compile off inside `foci.watch`: one setting for all threads.

The attention calls inside a compiled model are hidden, so a watched model runs eagerly. The functions that foci itself
compiles would build the whole matrix without a compiler: they switch it on again while they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

SWITCH_LOCK = Lock()


class CompileSwitch:
    """Off while there are blocks that disable it and no compiled call of foci is running."""

    def __init__(self) -> None:
        self.blocks = self.compiled_calls = 0
        # The stance that was set; leaving it restores the previous one.
        self.stance: Any = None

    def update(self, blocks: int = 0, compiled_calls: int = 0) -> None:
        """Adds to the two counters and sets the compiler stance."""
        with SWITCH_LOCK:
            self.blocks, self.compiled_calls = self.blocks + blocks, self.compiled_calls + compiled_calls
            off = self.blocks > 0 and self.compiled_calls == 0
            if off and self.stance is None:
                self.stance = torch.compiler.set_stance("force_eager")
            elif not off and self.stance is not None:
                self.stance.__exit__(None, None, None)
                self.stance = None


COMPILE_SWITCH = CompileSwitch()


@contextmanager
def disable_compile() -> Iterator[None]:
    """Compiled functions run eagerly inside the block, on all threads; does nothing if torch._dynamo is not loaded."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    try:
        COMPILE_SWITCH.update(blocks=1)
        yield
    finally:
        COMPILE_SWITCH.update(blocks=-1)


@contextmanager
def enable_compile() -> Iterator[None]:
    """Functions called inside the block are compiled even inside `disable_compile`; a stance set by the user stays."""
    try:
        COMPILE_SWITCH.update(compiled_calls=1)
        yield
    finally:
        COMPILE_SWITCH.update(compiled_calls=-1)
