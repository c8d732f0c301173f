"""foci: attention at the speed of fused kernels, with the attention matrix in reach."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foci.algebra import Mask
from foci.biases import ALiBi, Bias, Buckets, Relative
from foci.cache import Cache
from foci.call import attention, merge, plan
from foci.masks import causal, documents, from_function, padding, prefix, window
from foci.positions import rotary, sinusoidal
from foci.scores import Additive, Cosine, Dot, General, Score
from foci.weights import Weights

if TYPE_CHECKING:
    from foci import nn as nn
    from foci.capture.watch import watch
    from foci.decoding import Answer, Beam, Sampling, generate, stream
    from foci.keep import Keep
    from foci.record import Record
    from foci.shipped import pocket
    from foci.view.bertviz import head_view, model_view

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
    "Keep",
    "Mask",
    "Record",
    "Relative",
    "Sampling",
    "Score",
    "Weights",
    "attention",
    "causal",
    "documents",
    "from_function",
    "generate",
    "head_view",
    "merge",
    "model_view",
    "padding",
    "plan",
    "pocket",
    "prefix",
    "rotary",
    "sinusoidal",
    "stream",
    "watch",
    "window",
]


LATER = dict.fromkeys(("Answer", "Beam", "Sampling", "generate", "stream"), "foci.decoding")
LATER |= {"Keep": "foci.keep", "Record": "foci.record", "watch": "foci.capture"}
LATER |= {"pocket": "foci.shipped"}
LATER |= dict.fromkeys(("head_view", "model_view"), "foci.view.bertviz")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "nn"})


def __getattr__(name: str) -> Any:
    """What is not the call itself is imported when it is first named: the call alone is there at once."""
    if name == "nn":
        return import_module("foci.nn")
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    raise AttributeError(f"module 'foci' has no attribute {name!r}")
