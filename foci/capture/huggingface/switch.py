"""Changes the attention implementation in the configs of a model for the duration of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CONFIG_LOCK = threading.Lock()
# By the id of a config: the config, its implementation before the first block, and the number of blocks that hold it.
SWITCHED_CONFIGS: dict[int, tuple[Any, str | None, int]] = {}


@contextmanager
def switch_implementation(config: Any, name: str) -> Iterator[None]:
    """Sets the implementation for a block; the last block that holds the config, in any thread, restores it."""
    with CONFIG_LOCK:
        _, before, holders = SWITCHED_CONFIGS.get(id(config), (config, config._attn_implementation_internal, 0))
        SWITCHED_CONFIGS[id(config)] = config, before, holders + 1
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        with CONFIG_LOCK:
            _, before, holders = SWITCHED_CONFIGS.pop(id(config))
            if holders > 1:
                SWITCHED_CONFIGS[id(config)] = config, before, holders - 1
            else:
                config._attn_implementation_internal = before


def implementation_before_watch(config: Any) -> str | None:
    """The implementation that a config had before `foci.watch` switched it; None if it is not switched."""
    return SWITCHED_CONFIGS.get(id(config), (config, None, 0))[1]
