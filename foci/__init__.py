"""foci: attention at the speed of fused kernels, with the attention matrix in reach."""

from foci.algebra import Mask
from foci.biases import ALiBi, Bias, Buckets, Relative
from foci.cache import Cache
from foci.call import attention, merge, plan
from foci.masks import causal, documents, from_function, padding, prefix, window
from foci.positions import rotary, sinusoidal
from foci.scores import Additive, Cosine, Dot, General, Score
from foci.weights import Weights

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Additive",
    "Bias",
    "Buckets",
    "Cache",
    "Cosine",
    "Dot",
    "General",
    "Mask",
    "Relative",
    "Score",
    "Weights",
    "attention",
    "causal",
    "documents",
    "from_function",
    "merge",
    "padding",
    "plan",
    "prefix",
    "rotary",
    "sinusoidal",
    "window",
]
