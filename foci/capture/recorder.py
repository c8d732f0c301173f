"""Recorder: what one watch block collects, on the thread that opened it.

B batch, H heads, G key heads, T tokens.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from foci.capture.generation import CaptureError, count_step_bytes, select_heads, with_four_axes
from foci.capture.host_copy import HostCopier
from foci.capture.layer_log import LayerLog
from foci.capture.naming import LayerName, LayerNames, is_inside
from foci.capture.token_ids import TokenIds
from foci.record.kept import Keep
from foci.record.labels import Labels
from foci.record.record import Record
from foci.weights.weights import Weights, in_bytes

log = logging.getLogger("foci.capture")
HEAD_NAME = re.compile(r"(?:(?P<stack>[^.]+)\.)?L(?P<layer>\d+)(?:H(?P<head>\d+))?")
_active = threading.local()


def active_recorders() -> tuple[Recorder, ...]:
    """The recorders of this thread, outermost first; () outside of any block."""
    return tuple(getattr(_active, "stack", ()))


def is_recomputation() -> bool:
    """Whether activation checkpointing repeats a pass in the backward: it goes the way of the first one, which was
    seen, and must save the same tensors, so it is let through and not recorded.
    """
    return torch._C._current_graph_task_id() != -1


class Recorder:
    """What one `foci.watch` block collects; the torch function mode in `torch_functions` reports every call to it."""

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        *,
        keep: Keep | None = None,
        layers: Iterable[int | str] | None = None,
        heads: Iterable[int | str] | None = None,
        rows: Any = None,
        limit: int = 2**33,
        silence: Iterable[str] = (),
        tokenizer: Any = None,
    ) -> None:
        self.model, self.record = model, record
        self.modules = list(model.named_modules())
        self.places = LayerNames(self.modules)
        self.keep, self.rows, self.limit = keep, rows, limit
        self.layers = None if layers is None else list(layers)
        self.heads = None if heads is None else group_heads_by_layer(heads)
        self.silence = {name: HEAD_NAME.fullmatch(name) for name in silence}
        self.thread = threading.get_ident()
        self._local = threading.local()
        self.ran: Counter[str] = Counter()
        self.own_softmax: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.reading = TokenIds(tokenizer)
        self.host = HostCopier()
        self.tracks: dict[str, LayerLog] = {}
        self.calls = 0
        self.attended: dict[str, None] = {}
        self.silenced: set[str] = set()
        self._passes = 0
        self._in_pass: Counter[str] = Counter()
        self._open: dict[tuple[str, int], LayerLog] = {}
        self._named: Counter[str] = Counter()
        self._total, self._estimated = 0, False

    def place(self, name: str, stack: str = "", index: int = 0, queries: str = "input", keys: str = "input") -> None:
        """Says where a module's attention stands: its stack, its number there, and the labels along its axes."""
        self.places.set(name, LayerName(stack, index, queries, keys))

    def cannot(self, name: str, reason: str) -> None:
        """An attention module that cannot be seen, with the reason; it ends up in `Record.unseen`."""
        self.reasons.setdefault(name, reason)

    def read(self, labels: str, ids: Tensor) -> None:
        """Token numbers (B, T) that went into the model under a name of labels; later ones of a generation go on."""
        self.reading.told(labels, ids, self._passes)

    def say(self, labels: str, ready: Labels) -> None:
        """Labels that are ready: patches, frames."""
        self.reading.ready[labels] = ready

    @property
    def stack(self) -> list[str]:
        """The modules that are running on this thread, outermost first.

        Other threads that run the same model have stacks of their own, and no mode that asks for them; a thread on
        which autograd repeats a pass for the block has both.
        """
        found: list[str] = self._local.__dict__.setdefault("stack", [])
        return found

    def enter(self, name: str) -> None:
        """A module begins; the outermost one begins a pass."""
        stack = self.stack
        if threading.get_ident() == self.thread and not is_recomputation():
            if not stack:
                self._passes += 1
                self._in_pass.clear()
            self.ran[name] += 1
        stack.append(name)

    def leave(self, name: str) -> None:
        """A module ends; one that was running on another thread when the block began was never entered."""
        stack = self.stack
        if stack and stack[-1] == name:
            stack.pop()
        elif name in stack:
            del stack[len(stack) - 1 - stack[::-1].index(name) :]

    @property
    def here(self) -> str:
        """The name of the module that is running."""
        return self.stack[-1]

    def embedded(self, ids: Tensor) -> None:
        """Token numbers that an embedding was given."""
        self.reading.seen(self.stack, ids, self._passes, self.places.paired)

    def wants(self, name: str) -> bool:
        """Whether a module's attention is to be recorded."""
        if self.layers is None and self.heads is None:
            return True
        place = self.place_of(name)
        listed = self.layers is None or any(asked in (place.index, place.name, name) for asked in self.layers)
        return listed and (self.heads is None or bool(self._heads(place)))

    def place_of(self, name: str) -> LayerName:
        """The place of the call that a module is making: one that is all layers of its stack is a layer each time."""
        place, number = self.places.of(name), self._in_pass[name]
        if number < 2 or place.cross or self.places.alone(name) is False:
            return place
        if is_recomputation() and self.silence:
            raise CaptureError(
                f"{name} is several layers, and checkpointing repeats them: silence cannot tell them apart"
            )
        return replace(place, index=number - 1)

    def _heads(self, place: LayerName) -> list[int]:
        assert self.heads is not None
        return sorted({*self.heads.get("", ()), *self.heads.get(place.name, ())})

    def silent(self, name: str) -> list[int] | None:
        """Heads of a module whose outputs are to be zeroed; None stands for all of them, [] for none."""
        found: list[int] = []
        for asked, match in self.silence.items():
            assert match is not None
            place = self.place_of(name)
            if (place.stack, str(place.index)) == (match["stack"] or "", match["layer"]):
                self.silenced.add(asked)
                if match["head"] is None:
                    return None
                found.append(int(match["head"]))
        return found

    def met(self, name: str) -> None:
        """An attention call of a module, recorded or not."""
        self.calls += 1
        self._in_pass[name] += 1
        self.attended[name] = None

    def called(self, name: str) -> bool:
        """Whether a module, or one inside of it, made an attention call, recorded or not."""
        return name in self.attended or any(is_inside(each, name) for each in self.attended)

    def saw(self, name: str, weights: Weights, values: Tensor) -> None:
        """One attention call: its weights, and its values (..., G, Tk, Dv) with the same leading axes."""
        if is_recomputation():
            return
        # A compiler that is first used inside of a block looks at all that runs, and this is nothing for it.
        record = get_record_call_without_dynamo() if "torch._dynamo" in sys.modules else Recorder._record
        record(self, name, weights, values)

    def _record(self, name: str, weights: Weights, values: Tensor) -> None:
        weights = with_four_axes(weights)
        if values.dim() != 4:
            values = values.reshape(weights.shape[0], -1, *values.shape[-2:])
        place, k = self.place_of(name), weights._held.call.k
        heads: Sequence[int] = range(weights.shape[1])
        if self.heads is not None:
            heads = self._heads(place)
            if any(head >= weights.shape[1] for head in heads):
                raise CaptureError(f"{place.name} has {weights.shape[1]} heads, but heads= names H{heads[-1]}")
            group = weights.shape[1] // values.shape[1]
            weights, values = select_heads(weights, heads), values[:, [head // group for head in heads]]
        track = self._track(name, place, weights, k, tuple(heads))
        before = track.nbytes
        self._refuse_above_limit(track, weights, values)
        track.add(weights, k, values, self._passes)
        self._total += track.nbytes - before

    def _track(self, name: str, place: LayerName, weights: Weights, k: Tensor, heads: tuple[int, ...]) -> LayerLog:
        """The track that a call goes on with, or a new one."""
        # Rows of one module over the very same keys belong together, however often it is called (an RNN that looks
        # back at every word); otherwise a module that is called twice in a pass attends twice.
        key = name, 0 if place.cross else self._in_pass[name]
        track = self._open.get(key)
        if track is not None and (track.cross or track.passes[-1] < self._passes) and track.continues(weights, k):
            return track
        self._named[name] += 1
        full = name or self.record.model
        full += f"#{self._named[name]}" if self._named[name] > 1 else ""
        track = self._open[key] = self.tracks[full] = LayerLog(full, place, heads, self.keep, self.rows, self.host)
        return track

    def _refuse_above_limit(self, track: LayerLog, weights: Weights, values: Tensor) -> None:
        """Estimates before anything is kept: at the first call for all layers, later for this one."""
        batch, heads, queries, keys = weights.shape
        if self.rows is not None:
            size = batch * heads * keys * len(track.chosen_rows(queries)) * 4
        elif self.keep is None:
            size = count_step_bytes(weights) + (0 if track.passes else weights._held.call.k.nbytes + values.nbytes)
        else:
            size = self.keep.nbytes(batch, heads, queries, keys)
        have, expected = self._total, size
        if not self._estimated:
            self._estimated = True
            layers = max(1, sum(self.wants(name) for name in self.places.known))
            expected = size * layers
            log.info("watching %s: about %s of %d layers", type(self.model).__name__, in_bytes(expected), layers)
        if have + expected > self.limit:
            raise CaptureError(
                f"watch would keep about {in_bytes(have + expected)}, above limit={self.limit:,} bytes: choose layers=,"
                " heads= or queries='last', keep statistics only with keep=foci.Keep(), or pass a larger limit="
            )

    def finish(self) -> None:
        """Fills the record: layers, labels, and what could not be seen. A GPU is waited for last."""
        for track in self.tracks.values():
            track.check()
        self._refuse_unknown()
        for name, track in self.tracks.items():
            layer = track.layer()
            layer.queries = self.reading.name_for(layer.queries, track.passes)
            layer.keys = self.reading.name_for(layer.keys, track.passes)
            self.record.layers[name] = layer
        self.record.labels.update(self.reading.labels())
        self.record.calls, self.record.unseen = self.calls, self.unseen()
        several = [t for t in self.tracks.values() if len(t.passes) > 1 and not t.cross]
        self.record.prompt = several[0].first[0] if several else None
        self.host.wait()
        self.record.filling = False

    def _refuse_unknown(self) -> None:
        """Names of heads that no module has, in a block in which modules attended."""
        places = [track.place for track in self.tracks.values()] + [self.places.of(name) for name in self.attended]
        known = {*self.attended, *(place.name for place in places), *(place.index for place in places)}
        asked = [*(layer for layer in self.layers or () if layer not in known)]
        asked += [layer for layer in self.heads or () if layer and layer not in known]
        asked += [name for name in self.silence if name not in self.silenced]
        if asked and self.attended:
            ran = ", ".join(dict.fromkeys(place.name for place in places))
            raise CaptureError(f"{', '.join(map(repr, asked))} was asked for, but the layers that ran are {ran}")

    def unseen(self) -> list[str]:
        """Attention modules that ran and whose attention was not seen, each with the reason."""
        found = dict(self.reasons)
        for name, module in self.places.known.items():
            seen = self.called(name) or any(is_inside(name, each) for each in self.attended)
            if isinstance(module, torch.jit.ScriptModule):
                found.setdefault(name, "it is scripted, and runs outside of Python")
            elif self.ran[name] and not seen:
                found.setdefault(name, self._reason(name))
        return [f"{name}: {reason}" for name, reason in found.items()]

    def _reason(self, name: str) -> str:
        if any(each == name or is_inside(each, name) for each in self.own_softmax):
            return "it computes its softmax itself (eager attention), where no call shows queries and keys"
        return "it ran without a call that foci knows"


@cache
def get_record_call_without_dynamo() -> Callable[[Recorder, str, Weights, Tensor], None]:
    """How a call is recorded where there is a compiler, which does not look inside.

    Of the class, not of a recorder: one that holds a method of its own would stay, and all that it kept with it, until
    Python looks for cycles.
    """
    found: Callable[[Recorder, str, Weights, Tensor], None] = sys.modules["torch._dynamo"].disable(Recorder._record)
    return found


def group_heads_by_layer(heads: Iterable[int | str]) -> dict[str, list[int]]:
    """Head numbers by layer name, those for all layers under ""."""
    found: dict[str, list[int]] = {}
    for asked in heads:
        match = HEAD_NAME.fullmatch(asked) if isinstance(asked, str) else None
        if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
            found.setdefault("", []).append(asked)
        elif match is not None and match["head"] is not None:
            found.setdefault(str(asked).rpartition("H")[0], []).append(int(match["head"]))
        else:
            raise ValueError(f"heads takes numbers from 0 or names such as 'L5H3', but got {asked!r}")
    return found
