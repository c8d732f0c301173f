"""Another attention for the configs of a model while a block lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SWITCH_LOCK = threading.Lock()
# By the id of a config: the config, what it said before the first block that switched it, and how many blocks hold it.
SWITCHED_CONFIGS: dict[int, tuple[Any, str | None, int]] = {}


@contextmanager
def switch_implementation(config: Any, name: str) -> Iterator[None]:
    """Another attention for a block; the last of all blocks that hold the config, in any thread, switches it back."""
    with SWITCH_LOCK:
        _, before, holders = SWITCHED_CONFIGS.get(id(config), (config, config._attn_implementation_internal, 0))
        SWITCHED_CONFIGS[id(config)] = config, before, holders + 1
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        with SWITCH_LOCK:
            _, before, holders = SWITCHED_CONFIGS.pop(id(config))
            if holders > 1:
                SWITCHED_CONFIGS[id(config)] = config, before, holders - 1
            else:
                config._attn_implementation_internal = before


def implementation_before_watch(config: Any) -> str | None:
    """The attention that a config names outside of the blocks that switched it; None where none did."""
    return SWITCHED_CONFIGS.get(id(config), (config, None, 0))[1]
