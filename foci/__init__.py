"""foci: attention at the speed of fused kernels, with access to the attention matrix.

Public names are imported on first use: torch takes seconds to import, `foci --help` does not need it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from foci.runtime.saved_graphs import register_operators_on_load

if TYPE_CHECKING:
    from foci import bertviz as bertviz
    from foci import decoding as decoding
    from foci import hf as hf
    from foci import losses as losses
    from foci import nn as nn
    from foci import sharding as sharding
    from foci.biases import ALiBi, Bias, Buckets, Relative
    from foci.cache import Cache
    from foci.call import attention, merge, plan
    from foci.capture.look import look
    from foci.capture.monitor import Monitor
    from foci.capture.qk_clip import clip_qk
    from foci.capture.watch import watch
    from foci.decoding import generate
    from foci.files import load
    from foci.kernel_warmup import warmup
    from foci.masks.base import Mask
    from foci.masks.kinds import causal, documents, mask_function, padding, prefix, window
    from foci.models.pretrained import pretrained
    from foci.positions import rotary, sinusoidal
    from foci.record.kept import Keep
    from foci.record.labels import Labels, Segment
    from foci.record.record import Record
    from foci.scores import Additive, Cosine, Dot, General, Score
    from foci.view.widget import widget
    from foci.weights.weights import Weights

__version__ = "0.2.0"

__all__ = [
    "ALiBi",
    "Additive",
    "Bias",
    "Buckets",
    "Cache",
    "Cosine",
    "Dot",
    "General",
    "Keep",
    "Labels",
    "Mask",
    "Monitor",
    "Record",
    "Relative",
    "Score",
    "Segment",
    "Weights",
    "attention",
    "causal",
    "clip_qk",
    "compare",
    "documents",
    "generate",
    "load",
    "look",
    "mask_function",
    "merge",
    "padding",
    "plan",
    "prefix",
    "pretrained",
    "rotary",
    "sinusoidal",
    "warmup",
    "watch",
    "widget",
    "window",
]

# The module of each public name, imported on first use of the name.
EXPORTS = {
    "foci.biases": ("ALiBi", "Bias", "Buckets", "Relative"),
    "foci.cache": ("Cache",),
    "foci.call": ("attention", "merge", "plan"),
    "foci.capture.look": ("look",),
    "foci.capture.monitor": ("Monitor",),
    "foci.capture.qk_clip": ("clip_qk",),
    "foci.capture.watch": ("watch",),
    "foci.decoding": ("generate",),
    "foci.files": ("load",),
    "foci.kernel_warmup": ("warmup",),
    "foci.masks.base": ("Mask",),
    "foci.masks.kinds": ("causal", "documents", "mask_function", "padding", "prefix", "window"),
    "foci.models.pretrained": ("pretrained",),
    "foci.positions": ("rotary", "sinusoidal"),
    "foci.record.compare": ("compare",),
    "foci.record.kept": ("Keep",),
    "foci.record.labels": ("Labels", "Segment"),
    "foci.record.record": ("Record",),
    "foci.scores": ("Additive", "Cosine", "Dot", "General", "Score"),
    "foci.view.widget": ("widget",),
    "foci.weights.weights": ("Weights",),
}
MODULE_OF = {name: module for module, names in EXPORTS.items() for name in names}
# Public modules with names of their own, and the package that each of them needs.
NAMESPACES = dict.fromkeys(("bertviz", "decoding", "losses", "nn", "sharding"), "torch") | {"hf": "transformers"}


def __dir__() -> list[str]:
    namespaces = [name for name, package in NAMESPACES.items() if find_spec(package) is not None]
    return sorted([*__all__, *namespaces])


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of foci, on first use."""
    if name in MODULE_OF:
        value = getattr(import_module(MODULE_OF[name]), name)
        # Later uses find the name without this function.
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"foci.{name}") is not None:
        return import_module(f"foci.{name}")
    from foci.runtime.spelling import suggest_name

    raise AttributeError(f"module 'foci' has no attribute {name!r}{suggest_name(name, __dir__())}")


register_operators_on_load()
