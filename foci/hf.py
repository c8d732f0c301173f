"""Registers `attn_implementation="foci"` with transformers on import: the attention and its mask function.

import foci.hf
model = AutoModel.from_pretrained(..., attn_implementation="foci")      # or model.set_attn_implementation("foci")

`foci.hf.MonitorCallback` monitors the attention of the model that a Trainer trains.
"""

from typing import TYPE_CHECKING, Any

from foci.capture.huggingface.attention import IMPLEMENTATION, attention_forward, register
from foci.capture.huggingface.masks import build_attention_mask

if TYPE_CHECKING:
    from foci.capture.huggingface.trainer import MonitorCallback as MonitorCallback

__all__ = ["IMPLEMENTATION", "MonitorCallback", "attention_forward", "build_attention_mask"]

register()


def __getattr__(name: str) -> Any:
    """Imports the callback, whose base class imports the Trainer's modules, on first use."""
    if name == "MonitorCallback":
        from foci.capture.huggingface.trainer import MonitorCallback

        return MonitorCallback
    raise AttributeError(f"module 'foci.hf' has no attribute {name!r}")
