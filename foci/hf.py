"""Registers `attn_implementation="foci"` with transformers on import: the attention and its mask function.

import foci.hf
model = AutoModel.from_pretrained(..., attn_implementation="foci")      # or model.set_attn_implementation("foci")
"""

from foci.capture.huggingface.attention import IMPLEMENTATION, attention_forward, register
from foci.capture.huggingface.masks import build_attention_mask

__all__ = ["IMPLEMENTATION", "attention_forward", "build_attention_mask"]

register()
