"""`import foci.hf` registers `attn_implementation="foci"` with transformers: the attention and its masks together.

model = AutoModel.from_pretrained(..., attn_implementation="foci")      # or model.set_attn_implementation("foci")
"""

from foci.capture.huggingface.attention import IMPLEMENTATION, attention_forward, register
from foci.capture.huggingface.masks import build_attention_mask

__all__ = ["NAME", "attend", "mask_of"]

register()
