"""Decoding steps with a static cache, so that a GPU replays each step as one CUDA graph.

Launching the few hundred small kernels of a step one by one takes longer than running them. A captured graph launches
them at once, but always on the same memory. So keys and values lie in buffers with room for all tokens to come, the
slot of the next token is a tensor, and a mask hides the slots that are not written yet.

B sequences, V vocabulary size.
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

# A step attends to at least this many slots. When they are full it attends to twice as many, which needs a new graph.
MIN_VISIBLE_SLOTS = 256


class SlotPosition:
    """The slot of the next token, shared by all layers, as a tensor (1,), and how many slots a step attends to."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.current = torch.zeros(1, dtype=torch.long, device=device)
        self.slots = torch.arange(capacity, device=device)
        self.visible = capacity


class StaticCache(Cache):
    """The keys and values of one layer in buffers whose address and size never change."""

    def __init__(self, position: SlotPosition, source: Cache, room: int) -> None:
        super().__init__()
        assert source.keys is not None and source.values is not None
        self.position = position
        self.buffers = tuple(
            torch.zeros(*part.shape[:2], part.shape[2] + room, part.shape[3], dtype=part.dtype, device=part.device)
            for part in (source.keys, source.values)
        )
        self.copy_from(source)

    def copy_from(self, source: Cache) -> None:
        """Overwrite the first slots with the contents of another cache."""
        assert source.keys is not None and source.values is not None
        for buffer, part in zip(self.buffers, (source.keys, source.values), strict=True):
            buffer.narrow(2, 0, part.shape[2]).copy_(part)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token; returns all visible slots, including those not written yet."""
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer.index_copy_(2, self.position.current, new)
        visible = self.position.visible
        return self.buffers[0].narrow(2, 0, visible), self.buffers[1].narrow(2, 0, visible)

    def positions(self, count: int) -> tuple[Tensor, Tensor]:
        """Slot s holds position s; padding on the left shifts all positions of a sequence alike."""
        return self.position.current, self.position.slots[: self.position.visible]

    @property
    def keys(self) -> Tensor:
        return self.buffers[0]

    @property
    def values(self) -> Tensor:
        return self.buffers[1]

    def reorder(self, index: Tensor) -> None:
        """Reorder the visible slots in place."""
        for buffer in self.buffers:
            visible = buffer.narrow(2, 0, self.position.visible)
            visible.copy_(visible[index])


class StaticCaches(Caches):
    """Static caches for all layers: the keys and values of the decoder's own tokens, and those of the memory."""

    left_padding: Tensor

    def __init__(self, source: Caches, capacity: int, device: torch.device) -> None:
        self.position = SlotPosition(capacity, device)
        room = capacity - source.length
        self.layers: list[tuple[Cache, Cache]] = [
            (
                StaticCache(self.position, own, room),
                memory if memory.keys is None else StaticCache(self.position, memory, 0),
            )
            for own, memory in source.layers
        ]
        first = self.layers[0][0].keys
        assert first is not None
        self.left_padding = torch.zeros(len(first), dtype=torch.long, device=device)
        self.copy_from(source)

    def copy_from(self, source: Caches) -> None:
        """Start a new batch with the contents of other caches."""
        self.position.current.fill_(source.length)
        no_padding = torch.zeros_like(self.left_padding)
        self.left_padding.copy_(no_padding if source.left_padding is None else source.left_padding)
        for static_pair, source_pair in zip(self.layers, source.layers, strict=True):
            for static, other in zip(static_pair, source_pair, strict=True):
                if isinstance(static, StaticCache):
                    static.copy_from(other)

    @property
    def length(self) -> int:
        """Always 0: tensors hold the position, because a Python number would differ in each step."""
        return 0

    def set_padding(self, layout: Layout) -> None:
        """Does nothing: the prompt's caches already hold the padding."""

    def mask(self, count: int) -> Mask:
        slots = self.position.slots[: self.position.visible]
        visible = (slots <= self.position.current) & (slots >= self.left_padding[:, None])
        return as_mask(visible[:, None, None, :])

    def positions(self, count: int) -> Tensor:
        return (self.position.current - self.left_padding)[:, None]

    def step_state(self) -> list[Tensor]:
        """Tensors that a step advances; keys and values are not among them: writing a slot twice is harmless."""
        return [self.position.current]


class StepBuffers:
    """The buffers and CUDA graphs of a step, for batches of one shape."""

    def __init__(self, key: tuple[Any, ...], memory: Any, caches: Any, rows: int, device: torch.device) -> None:
        self.key, self.memory, self.caches = key, memory, caches
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def run(self, model: nn.Module, compiled: bool) -> Tensor:
        """Run one step without a graph."""
        call = compile_step(self.memory is None or hasattr(model, "decoder")) if compiled else run_step
        return call(model, self.tokens, self.memory, self.caches)

    def replay(self, model: nn.Module, compiled: bool) -> Tensor:
        """Run one step as a graph, captured on its first run."""
        visible = self.caches.position.visible if isinstance(self.caches, StaticCaches) else 0
        if visible not in self.graphs:
            self.graphs[visible] = capture_step(lambda: self.run(model, compiled), self.caches.step_state())
        graph, logits = self.graphs[visible]
        graph.replay()
        return logits

    def copy_from(self, memory: Any, caches: Any) -> None:
        """Start another batch of the same shape."""
        self.caches.copy_from(caches)
        if memory is not None:
            self.memory.states.copy_(memory.states)
            if memory.layout.padding is not None:
                self.memory.layout.padding.copy_(memory.layout.padding)


# The buffers of each model's last batch.
STEP_BUFFERS: WeakKeyDictionary[nn.Module, StepBuffers] = WeakKeyDictionary()


class StaticSteps(CachedSteps):
    """Runs the prompt with growing caches, then each step in static buffers, as CUDA graphs where `graphs` is True."""

    def __init__(
        self, model: nn.Module, prepared: PreparedPrompt, new_tokens: int, graphs: bool, compiled: bool
    ) -> None:
        super().__init__(model, prepared)
        self.graphs, self.compiled = graphs, compiled
        self.length = prepared.tokens.shape[1]
        self.capacity = round_up_slots(self.length + new_tokens)
        self.buffers: StepBuffers | None = None

    def advance(self, tokens: Tensor) -> Tensor:
        buffers = self.buffers = self._get_buffers(len(tokens)) if self.buffers is None else self.buffers
        self.length += 1
        if isinstance(buffers.caches, StaticCaches):
            buffers.caches.position.visible = round_up_slots(self.length)
        buffers.tokens.copy_(tokens[:, None])
        return (buffers.replay if self.graphs else buffers.run)(self.model, self.compiled)

    def reorder(self, index: Tensor) -> None:
        if self.buffers is None:
            super().reorder(index)
        elif isinstance(self.buffers.caches, StaticCaches):
            for own, _ in self.buffers.caches.layers:
                own.reorder(index)
        else:
            self.buffers.caches.reorder(index)

    def _get_buffers(self, rows: int) -> StepBuffers:
        """The buffers of the last batch if it had the same shape, else new ones, filled from the prompt's caches."""
        key = (rows, self.capacity, self.compiled, *describe_memory(self.memory), *describe_model(self.model))
        buffers = STEP_BUFFERS.get(self.model)
        if buffers is not None and buffers.key == key:
            buffers.copy_from(self.memory, self.caches)
            return buffers
        device = self.tokens.device
        growing = isinstance(self.caches, Caches)
        caches = StaticCaches(self.caches, self.capacity, device) if growing else self.caches
        buffers = STEP_BUFFERS[self.model] = StepBuffers(key, self.memory, caches, rows, device)
        return buffers


def run_step(model: nn.Module, tokens: Tensor, memory: Any, caches: Any) -> Tensor:
    """Logits (B, V) after one more token (B, 1); advances the slot of the next token."""
    logits = compute_next_logits(model, tokens, None, memory, caches)
    if isinstance(caches, StaticCaches):
        caches.position.current.add_(1)
    return logits


@cache
def compile_step(fullgraph: bool) -> Callable[..., Tensor]:
    """The step through torch.compile; fullgraph, so that a graph break is an error, except for RNNs."""
    return torch.compile(run_step, dynamic=False, fullgraph=fullgraph)


def capture_step(run: Callable[[], Tensor], state: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a step as a graph; returns it with the logits that it writes. Warm-up runs restore `state`."""
    before = [tensor.clone() for tensor in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)
    torch.cuda.current_stream().wait_stream(stream)
    return capture_cuda_graph(run)


def round_up_slots(count: int) -> int:
    """How many slots a step attends to when `count` are in use: MIN_VISIBLE_SLOTS times a power of two."""
    visible = MIN_VISIBLE_SLOTS
    while visible < count:
        visible *= 2
    return visible


def describe_memory(memory: Any) -> tuple[Any, ...]:
    """The shape and dtype of the encoder's result."""
    if memory is None:
        return (None,)
    return (*memory.states.shape, memory.states.dtype, memory.layout.padding is None)


def describe_model(model: nn.Module) -> tuple[Any, ...]:
    """The state a captured graph depends on: autocast, and the addresses and dtypes of parameters and buffers."""
    device = next(model.parameters()).device.type
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (*autocast, *((each.data_ptr(), each.dtype) for each in (*model.parameters(), *model.buffers())))
