"""Watches compiled models at compiled speed: they run a second graph, which also computes the kept statistics.

A compiled graph does not say which module makes which call. So the first block of a model runs uncompiled and learns
the order of the calls; in later blocks the calls come in this order, pass by pass.

B batch, H heads, G key/value heads, Tq queries, Tk keys, Dv value width.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from foci.capture.alerts import AttentionWarning
from foci.capture.compiled_statistics import (
    CompletePasses,
    Observer,
    find_device,
    is_compiled,
    make_observer,
    observe_compiled_calls,
)
from foci.capture.errors import CaptureError
from foci.capture.host_copy import HostCopier
from foci.capture.model_structure import ModelStructure, read_structure
from foci.capture.pending_statistics import compute_norms
from foci.capture.recorder import Recorder
from foci.capture.token_ids import TokenIds
from foci.record.kept import STATISTIC_AXES, Keep, KeptStatistics
from foci.record.layer import Layer
from foci.record.record import Record
from foci.weights.operators import has_operators
from foci.weights.weights import Weights


@dataclass(frozen=True)
class CallSite:
    """What the layer of a call has in every pass: the fields of `Layer` with these names."""

    name: str
    stack: str
    index: int
    queries: str
    keys: str
    kv_heads: int


class LearnedCalls(NamedTuple):
    """The calls of a pass in their order, the attention modules that are not among them, and the model's modules."""

    sites: list[CallSite]
    unseen: list[str]
    structure: ModelStructure


# By compiled model, what its last uncompiled block has learned.
LEARNED: WeakKeyDictionary[nn.Module, LearnedCalls] = WeakKeyDictionary()


class LearningRecorder(Recorder):
    """Records an uncompiled pass of a compiled model, and notes why its calls could not be part of a graph."""

    untraceable: str | None = None

    def record_call(self, name: str, weights: Any, values: Tensor) -> None:
        if not isinstance(weights, Weights):
            self.untraceable = f"the tensors of {name} are DTensors"
        elif not has_operators(weights.tensors.call):
            self.untraceable = f"{name} has a score, mask or bias whose statistics cannot be compiled"
        super().record_call(name, weights, values)


def learn_calls(recorder: LearningRecorder, model: nn.Module, record: Record) -> None:
    """Learns the order of the calls from a filled record, or notes why later blocks run uncompiled, too."""
    LEARNED.pop(model, None)
    passes: dict[int, list[Layer]] = {}
    for name, layer in record.layers.items():
        passes.setdefault(recorder.logs.by_layer[name].passes[0], []).append(layer)
    orders = [[module_of(layer) for layer in layers] for layers in passes.values()]
    if recorder.untraceable is not None:
        reason = recorder.untraceable
    elif recorder.foci_calls < recorder.calls:
        reason = "not all attention calls are those of foci.attention, which compiled graphs report"
    elif not recorder.calls or recorder.calls != len(record.layers):
        reason = f"{recorder.calls} attention calls are {len(record.layers)} layers; record one forward pass first"
    elif any(order != orders[0] for order in orders):
        reason = "the forward passes make different attention calls"
    else:
        names = [field.name for field in fields(CallSite)]
        first = next(iter(passes.values()))
        sites = [CallSite(*(getattr(layer, name) for name in names)) for layer in first]
        LEARNED[model] = LearnedCalls(sites, record.unseen, recorder.structure)
        record.notes.append("this block learned the order of the calls: later blocks with compiled=True run compiled")
        return
    record.notes.append(f"later blocks run uncompiled, too: {reason}")


def module_of(layer: Layer | CallSite) -> str:
    """The name of the module whose call a layer is: that of a later call has a number."""
    return layer.name.partition("#")[0]


def has_learned(model: nn.Module) -> bool:
    """Whether the order of a model's calls is known; not if its modules changed since."""
    return model in LEARNED and LEARNED[model].structure is read_structure(model)[0]


@contextmanager
def watch_compiled(model: nn.Module, record: Record, keep: Keep, limit: int, tokenizer: Any) -> Iterator[None]:
    """Fills a record with the statistics of the calls that a compiled model makes inside the block."""
    token_ids = TokenIds(tokenizer)
    record.filling = True
    with observe_compiled_calls(make_statistics_observer(keep, find_device(model))) as computed:
        passes = ReadPasses(computed, token_ids)
        with passes.watch(model):
            yield
    record.notes += passes.describe()
    fill_compiled_record(record, keep, computed, limit, model, token_ids)
    record.labels.update(token_ids.build_labels())
    record.filling = False


class ReadPasses(CompletePasses):
    """The complete passes of a compiled model, of which the token ids are read."""

    def __init__(self, computed: list[list[Tensor]], token_ids: TokenIds) -> None:
        super().__init__(computed)
        self.token_ids = token_ids
        self.count = 0
        self.ids: Tensor | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds the token ids, the only integers (B, T) that the model is given."""
        super().begin(model, args, kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim() == 2]
        ids = [each for each in given if each.dtype in (torch.int32, torch.int64)]
        self.ids = ids[0] if len(ids) == 1 else None

    def end(self, model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        super().end(model, args, out)
        self.count += 1
        if self.ids is not None:
            self.token_ids.add_explicit("input", self.ids, self.count)

    def describe(self) -> list[str]:
        """Remarks for the record."""
        calls = f"{self.dropped} attention calls" if self.dropped > 1 else "1 attention call"
        return [f"not recorded: {calls} outside of complete passes of the compiled model"] if self.dropped else []


@cache
def make_statistics_observer(keep: Keep, device: torch.device) -> Observer:
    """The function that computes what `keep` keeps of a call inside compiled graphs, in the order of STATISTIC_AXES."""

    def compute(weights: Weights, values: Tensor) -> list[Tensor]:
        kept = keep.compute(weights)
        found = [kept[name] for name in STATISTIC_AXES if name in kept]
        return [*found, compute_norms(values)] if keep.values else found

    return make_observer(compute, device)


def fill_compiled_record(
    record: Record, keep: Keep, computed: list[list[Tensor]], limit: int, model: nn.Module, token_ids: TokenIds
) -> None:
    """Makes the layers of a record from the tensors that the graph computed, copied to the host together."""
    sites, unseen, _ = LEARNED[model]
    if len(computed) % len(sites):
        del LEARNED[model]
        reason = f"a compiled pass made {len(computed)} attention calls, not {len(sites)}"
        record.notes.append(f"nothing was recorded: {reason}; the next block runs uncompiled and learns the calls")
        warnings.warn(AttentionWarning(record.notes[-1]), stacklevel=5)
        return
    nbytes = sum(tensor.nbytes for tensors in computed for tensor in tensors)
    if nbytes > limit:
        raise CaptureError(f"watch would keep {nbytes:,} bytes, above limit={limit:,}: pass a larger limit=")
    copier = HostCopier()
    copies = [copier.copy(name_statistics(keep, tensors)) for tensors in computed]
    copier.wait()
    counts: Counter[str] = Counter()
    for number, statistics in enumerate(copies):
        site, earlier = sites[number % len(sites)], number // len(sites)
        module = module_of(site)
        counts[module] += 1
        (batch, heads, queries), keys = statistics["entropy"].shape, statistics["received"].shape[-1]
        layer = Layer(
            **asdict(site) | {"name": module + (f"#{counts[module]}" if counts[module] > 1 else "")},
            value_norms=statistics.pop("norms", None),
            kept=KeptStatistics(statistics, (batch, heads, queries, keys)),
            labels=record.labels,
        )
        layer.queries, layer.keys = (
            token_ids.label_name_for(each, [earlier + 1]) for each in (layer.queries, layer.keys)
        )
        record.layers[layer.name] = layer
    record.calls, record.unseen = len(computed), list(unseen)


def name_statistics(keep: Keep, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The tensors of a call by name, as `make_statistics_observer` orders them; with sinks there is one more."""
    absent = {"first", "previous", "key_weights", "query_weights"}
    absent |= {"top_values", "top_keys"} if not keep.top else set()
    absent |= {"picture"} if not keep.picture else set()
    absent |= set() if keep.largest_logit else {"largest_logit"}
    names = [name for name in STATISTIC_AXES if name not in absent] + ["norms"] * keep.values
    if len(names) > len(tensors):
        names.remove("sink_mass")
    return dict(zip(names, tensors, strict=True))


def check_compiled(model: nn.Module, keep: Any, others: dict[str, bool]) -> Keep:
    """`keep`, if blocks with compiled=True support it; `others`: which other arguments were given."""
    if not is_compiled(model):
        raise ValueError(f"model must be compiled with compiled=True, got a {type(model).__name__} that is not")
    if not isinstance(keep, Keep) or keep.keeps_text or keep.shares:
        raise ValueError(f"keep must be foci.Keep(...) without keys, queries and shares with compiled=True, got {keep}")
    for name in (name for name, is_given in others.items() if is_given):
        raise ValueError(f"{name} must not be given with compiled=True, which records all heads and queries")
    return keep
