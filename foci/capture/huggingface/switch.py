"""Another attention for the configs of a model while a block lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOCK = threading.Lock()
# By the id of a config: the config, what it said before the first block that switched it, and how many blocks hold it.
SWITCHED: dict[int, tuple[Any, str | None, int]] = {}


@contextmanager
def switched(config: Any, name: str) -> Iterator[None]:
    """Another attention for a block; the last of all blocks that hold the config, in any thread, switches it back."""
    with LOCK:
        _, before, holders = SWITCHED.get(id(config), (config, config._attn_implementation_internal, 0))
        SWITCHED[id(config)] = config, before, holders + 1
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        with LOCK:
            _, before, holders = SWITCHED.pop(id(config))
            if holders > 1:
                SWITCHED[id(config)] = config, before, holders - 1
            else:
                config._attn_implementation_internal = before


def said_before(config: Any) -> str | None:
    """The attention that a config names outside of the blocks that switched it; None where none did."""
    return SWITCHED.get(id(config), (config, None, 0))[1]
