"""The function that sees the calls of `foci.attention` inside compiled models, on monitored steps only.

A compiler guards on `observe`: with a function it compiles a second graph, in which the statistics of each call are
computed; without one it runs the first graph again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Called with the lazy weights of each call, before dropout and without gradients, and its values (B, G, Tk, Dv); None:
# nothing is computed.
observe: Callable[[Any, Any], None] | None = None
