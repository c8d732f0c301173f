"""Whether PyTorch compiles: one setting for all threads, which blocks of `foci.watch` switch off.

A compiled model shows nothing of its calls, so inside of a block it runs as it was written. The programs that foci
compiles itself are no model's, and without a compiler they would build the matrix: they switch it on again for as long
as they are called.
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
    """Off while there are blocks that want it off and no program that is being called."""

    def __init__(self) -> None:
        self.blocks = self.programs = 0
        # The setting that was changed; leaving it puts back what the caller had.
        self.off: Any = None

    def count(self, blocks: int = 0, programs: int = 0) -> None:
        with SWITCH_LOCK:
            self.blocks, self.programs = self.blocks + blocks, self.programs + programs
            off = self.blocks > 0 and self.programs == 0
            if off and self.off is None:
                self.off = torch.compiler.set_stance("force_eager")
            elif not off and self.off is not None:
                self.off.__exit__(None, None, None)
                self.off = None


COMPILE_SWITCH = CompileSwitch()


@contextmanager
def disable_compile() -> Iterator[None]:
    """Compiled functions run as they were written, on all threads, where anything was compiled before."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    try:
        COMPILE_SWITCH.count(blocks=1)
        yield
    finally:
        COMPILE_SWITCH.count(blocks=-1)


@contextmanager
def enable_compile() -> Iterator[None]:
    """What is called here is compiled, whatever blocks are open; a caller who switched it off by hand has it off."""
    try:
        COMPILE_SWITCH.count(programs=1)
        yield
    finally:
        COMPILE_SWITCH.count(programs=-1)
