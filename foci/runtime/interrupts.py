"""Delays Ctrl+C while something must not stop halfway."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class delay_interrupts:  # noqa: N801
    """Ctrl+C inside the block takes effect at its end. Python raises it in the main thread only.

    >>> with delay_interrupts():
    ...     pass
    """

    def __enter__(self) -> None:
        self.received: list[tuple[int, FrameType | None]] = []
        self.before: Any = None
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self.before = signal.signal(signal.SIGINT, lambda number, frame: self.received.append((number, frame)))

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
            if self.received:
                self.before(*self.received[0])
