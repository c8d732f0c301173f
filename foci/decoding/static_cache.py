"""Steps whose tensors stay where they are and keep their shapes, so that a GPU replays each step as one graph.

Launching the few hundred small kernels of a step one by one takes longer than running them. A captured graph launches
them at once, but always on the same memory: so keys and values lie in buffers with room for all that will come, where
the next token stands is a tensor, and slots that are not written yet are hidden by a mask.

B sequences, H heads, P tokens of the prompt, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from foci.cache import Cache
from foci.decoding.steps import CachedSteps, PreparedPrompt, compute_next_logits
from foci.masks.base import Mask, as_mask
from foci.nn.layer_caches import Caches
from foci.nn.layout import Layout
from foci.runtime.cuda_graphs import capture_cuda_graph

# The fewest slots that a step looks at. When they are full it looks at twice as many, which takes a graph of its own.
MIN_VISIBLE_SLOTS = 256


class SlotPosition:
    """Where the next token stands, for all layers: its slot as a tensor (1,), and how many slots are looked at."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.slots = torch.arange(capacity, device=device)
        self.visible = capacity


class StaticCache(Cache):
    """The keys and values of one layer in buffers that never move."""

    def __init__(self, place: SlotPosition, grown: Cache, room: int) -> None:
        super().__init__()
        assert grown.keys is not None and grown.values is not None
        self.place = place
        self.buffers = tuple(
            torch.zeros(*part.shape[:2], part.shape[2] + room, part.shape[3], dtype=part.dtype, device=part.device)
            for part in (grown.keys, grown.values)
        )
        self.take(grown)

    def take(self, grown: Cache) -> None:
        """Starts anew with what another cache holds."""
        assert grown.keys is not None and grown.values is not None
        for buffer, part in zip(self.buffers, (grown.keys, grown.values), strict=True):
            buffer.narrow(2, 0, part.shape[2]).copy_(part)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One token more; gives all slots that may be looked at, those not yet written among them."""
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer.index_copy_(2, self.place.at, new)
        visible = self.place.visible
        return self.buffers[0].narrow(2, 0, visible), self.buffers[1].narrow(2, 0, visible)

    def positions(self, count: int) -> tuple[Tensor, Tensor]:
        """Slot s holds position s; padding on the left moves all positions of a sequence alike."""
        return self.place.at, self.place.slots[: self.place.visible]

    @property
    def keys(self) -> Tensor:
        return self.buffers[0]

    @property
    def values(self) -> Tensor:
        return self.buffers[1]

    def reorder(self, index: Tensor) -> None:
        """In place, and only what is looked at."""
        for buffer in self.buffers:
            seen = buffer.narrow(2, 0, self.place.visible)
            seen.copy_(seen[index])


class StaticCaches(Caches):
    """Of each layer the keys and values of its own tokens, with room for more, and those of the memory."""

    skipped: Tensor

    def __init__(self, grown: Caches, capacity: int, device: torch.device) -> None:
        self.place = SlotPosition(capacity, device)
        room = capacity - grown.length
        self.layers: list[tuple[Cache, Cache]] = [
            (StaticCache(self.place, own, room), memory if memory.keys is None else StaticCache(self.place, memory, 0))
            for own, memory in grown.layers
        ]
        first = self.layers[0][0].keys
        assert first is not None
        self.skipped = torch.zeros(len(first), dtype=torch.long, device=device)
        self.take(grown)

    def take(self, grown: Caches) -> None:
        """Starts anew with what other caches hold."""
        self.place.at.fill_(grown.length)
        self.skipped.copy_(torch.zeros_like(self.skipped) if grown.skipped is None else grown.skipped)
        for fixed, others in zip(self.layers, grown.layers, strict=True):
            for kept, other in zip(fixed, others, strict=True):
                if isinstance(kept, StaticCache):
                    kept.take(other)

    @property
    def length(self) -> int:
        """Tensors say where the next token stands: a number would be another one in each step."""
        return 0

    def begin(self, layout: Layout) -> None:
        """Padding was told with the prompt."""

    def mask(self, count: int) -> Mask:
        slots = self.place.slots[: self.place.visible]
        seen = (slots <= self.place.at) & (slots >= self.skipped[:, None])
        return as_mask(seen[:, None, None, :])

    def positions(self, count: int) -> Tensor:
        return (self.place.at - self.skipped)[:, None]

    def changing(self) -> list[Tensor]:
        """What a step changes and the next one relies on; a slot that is written twice is as good as once."""
        return [self.place.at]


class StepBuffers:
    """The buffers and graphs of one batch's shape: a step, ready to run."""

    def __init__(self, key: tuple[Any, ...], memory: Any, caches: Any, rows: int, device: torch.device) -> None:
        self.key, self.memory, self.caches = key, memory, caches
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def run(self, model: nn.Module, compiled: bool) -> Tensor:
        """One step, without a graph."""
        call = compile_step(self.memory is None or hasattr(model, "decoder")) if compiled else run_step
        return call(model, self.tokens, self.memory, self.caches)

    def replay(self, model: nn.Module, compiled: bool) -> Tensor:
        """One step, captured when it is run for the first time."""
        visible = self.caches.place.visible if isinstance(self.caches, StaticCaches) else 0
        if visible not in self.graphs:
            self.graphs[visible] = capture_step(lambda: self.run(model, compiled), self.caches.changing())
        graph, logits = self.graphs[visible]
        graph.replay()
        return logits

    def take(self, memory: Any, grown: Any) -> None:
        """Starts anew with another batch of the same shape."""
        self.caches.take(grown)
        if memory is not None:
            self.memory.states.copy_(memory.states)
            if memory.layout.padding is not None:
                self.memory.layout.padding.copy_(memory.layout.padding)


STEP_BUFFERS: WeakKeyDictionary[nn.Module, StepBuffers] = WeakKeyDictionary()


class StaticSteps(CachedSteps):
    """The prompt as always; after it, steps in fixed buffers, captured where they run on a GPU."""

    def __init__(self, model: nn.Module, begun: PreparedPrompt, new_tokens: int, graphs: bool, compiled: bool) -> None:
        super().__init__(model, begun)
        self.graphs, self.compiled = graphs, compiled
        self.length = begun.tokens.shape[1]
        self.capacity = round_up_slots(self.length + new_tokens)
        self.kept: StepBuffers | None = None

    def next(self, tokens: Tensor) -> Tensor:
        kept = self.kept = self._ready(len(tokens)) if self.kept is None else self.kept
        self.length += 1
        if isinstance(kept.caches, StaticCaches):
            kept.caches.place.visible = round_up_slots(self.length)
        kept.tokens.copy_(tokens[:, None])
        return (kept.replay if self.graphs else kept.run)(self.model, self.compiled)

    def reorder(self, index: Tensor) -> None:
        if self.kept is None:
            super().reorder(index)
        elif isinstance(self.kept.caches, StaticCaches):
            for own, _ in self.kept.caches.layers:
                own.reorder(index)
        else:
            self.kept.caches.reorder(index)

    def _ready(self, rows: int) -> StepBuffers:
        """The buffers of the last batch where it had the same shape, else new ones; filled from the prompt's."""
        key = (rows, self.capacity, self.compiled, *describe_memory(self.memory), *describe_model(self.model))
        kept = STEP_BUFFERS.get(self.model)
        if kept is not None and kept.key == key:
            kept.take(self.memory, self.caches)
            return kept
        device = self.tokens.device
        growing = isinstance(self.caches, Caches)
        caches = StaticCaches(self.caches, self.capacity, device) if growing else self.caches
        kept = STEP_BUFFERS[self.model] = StepBuffers(key, self.memory, caches, rows, device)
        return kept


def run_step(model: nn.Module, tokens: Tensor, memory: Any, caches: Any) -> Tensor:
    """Logits (B, V) after one more token (B, 1); the place of the next token moves on."""
    logits = compute_next_logits(model, tokens, None, memory, caches)
    if isinstance(caches, StaticCaches):
        caches.place.at.add_(1)
    return logits


@cache
def compile_step(whole: bool) -> Callable[..., Tensor]:
    """The step through torch.compile; as a whole, so that it says so where it would fall back, but for RNNs."""
    return torch.compile(run_step, dynamic=False, fullgraph=whole)


def capture_step(run: Callable[[], Tensor], changed: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph of a step, and the logits that it writes. Runs that warm it up leave nothing behind."""
    before = [tensor.clone() for tensor in changed]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
    torch.cuda.current_stream().wait_stream(stream)
    return capture_cuda_graph(run)


def round_up_slots(count: int) -> int:
    """How many slots are looked at when `count` are in use."""
    visible = MIN_VISIBLE_SLOTS
    while visible < count:
        visible *= 2
    return visible


def describe_memory(memory: Any) -> tuple[Any, ...]:
    """The shape of what was read."""
    if memory is None:
        return (None,)
    return (*memory.states.shape, memory.states.dtype, memory.layout.padding is None)


def describe_model(model: nn.Module) -> tuple[Any, ...]:
    """What a captured graph relies on: where the parameters lie, their dtype, and autocast."""
    device = next(model.parameters()).device.type
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (*autocast, *((each.data_ptr(), each.dtype) for each in (*model.parameters(), *model.buffers())))
