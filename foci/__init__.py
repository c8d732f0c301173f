"""foci: attention at the speed of fused kernels, with the attention matrix in reach."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foci import nn as nn
    from foci.bertviz import head_view, model_view
    from foci.biases import ALiBi, Bias, Buckets, Relative
    from foci.cache import Cache
    from foci.call import attention, merge, plan
    from foci.capture.watch import watch
    from foci.decoding import Answer, Beam, Sampling, generate, stream
    from foci.masks.base import Mask
    from foci.masks.kinds import causal, documents, mask_function, padding, prefix, window
    from foci.models.pretrained import pretrained
    from foci.positions import rotary, sinusoidal
    from foci.record.kept import Keep
    from foci.record.record import Record
    from foci.scores import Additive, Cosine, Dot, General, Score
    from foci.weights.weights import Weights

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
    "prefix",
    "pretrained",
    "rotary",
    "sinusoidal",
    "stream",
    "watch",
    "window",
]


# Where each name is; that is imported when one of its names is first used.
PARTS = {
    "foci.masks.base": ("Mask",),
    "foci.biases": ("ALiBi", "Bias", "Buckets", "Relative"),
    "foci.cache": ("Cache",),
    "foci.call": ("attention", "merge", "plan"),
    "foci.masks.kinds": ("causal", "documents", "from_function", "padding", "prefix", "window"),
    "foci.positions": ("rotary", "sinusoidal"),
    "foci.scores": ("Additive", "Cosine", "Dot", "General", "Score"),
    "foci.weights.weights": ("Weights",),
    "foci.decoding": ("Answer", "Beam", "Sampling", "generate", "stream"),
    "foci.record.kept": ("Keep",),
    "foci.record.record": ("Record",),
    "foci.capture.watch": ("watch",),
    "foci.models.pretrained": ("pretrained",),
    "foci.bertviz": ("head_view", "model_view"),
}
PLACES = {name: module for module, names in PARTS.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "nn"})


def __getattr__(name: str) -> Any:
    """A public name, or a module of foci, when it is first used: torch takes seconds to import, `foci --help` none."""
    if name in PLACES:
        found = getattr(import_module(PLACES[name]), name)
        # From here on it is found without asking.
        globals()[name] = found
        return found
    if not name.startswith("_") and find_spec(f"foci.{name}") is not None:
        return import_module(f"foci.{name}")
    raise AttributeError(f"module 'foci' has no attribute {name!r}")
