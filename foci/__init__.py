"""foci: attention at the speed of fused kernels, with the attention matrix in reach."""

from foci.algebra import Mask
from foci.biases import ALiBi, Bias, Buckets, Relative
from foci.cache import Cache
from foci.call import attention, merge, plan
from foci.decoding import Answer, Beam, Sampling, generate, stream
from foci.masks import causal, documents, from_function, padding, prefix, window
from foci.positions import rotary, sinusoidal
from foci.scores import Additive, Cosine, Dot, General, Score
from foci.weights import Weights

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "Additive",
    "Answer",
    "Beam",
    "Bias",
    "Buckets",
    "Cache",
    "Cosine",
    "Dot",
    "General",
    "Mask",
    "Relative",
    "Sampling",
    "Score",
    "Weights",
    "attention",
    "causal",
    "documents",
    "from_function",
    "generate",
    "merge",
    "padding",
    "plan",
    "prefix",
    "rotary",
    "sinusoidal",
    "stream",
    "window",
]
