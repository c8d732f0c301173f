"""Decoding steps on a CPU, whose products and attention run in C.

A step of a small model takes as long as reading its weights, if little else is done. So keys and values stay where the
projection writes them: slot t of a buffer holds the projection of token t of every row. A beam search moves none of
them: a table says in which row of each slot a row finds its keys.

R rows, B sequences of the memory, S tokens of the memory, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from foci.decoding.step_c import Linear, TokenAttention
from foci.decoding.steps import CachedSteps, PreparedPrompt, compute_next_logits
from foci.nn.attention import Attention
from foci.nn.block import Block, FeedForward
from foci.nn.embedding import Head
from foci.nn.layer_caches import Caches
from foci.nn.speech import SpeechEncoder
from foci.nn.transformer import Decoder, EncoderDecoder
from foci.runtime import call_observer, native
from foci.runtime.tracing import is_traced
from foci.scores import Dot

# Slots are added by so many, or by half of those there are.
MIN_NEW_SLOTS = 64
# Attributes of a module that change what calling it does.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "forward")


class CpuSteps(CachedSteps):
    """Runs a Transformer decoder token by token; for models that `find_refusal` does not refuse."""

    def __init__(self, model: nn.Module, prepared: PreparedPrompt) -> None:
        super().__init__(model, prepared)
        decoder = find_decoder(model)
        assert decoder is not None and decoder.head is not None and decoder.embedding.tokens is not None
        self.decoder, self.length = decoder, 0
        self.layers = [LayerStep(block) for block in decoder.blocks if isinstance(block, Block)]
        tied = decoder.embedding.tokens.weight
        self.head = Linear(tied if decoder.head.kind == "tied" else decoder.head.weight, decoder.head.bias)
        self.rows = torch.arange(len(self.tokens), device=self.tokens.device)
        self.key_rows = self.rows.new_empty(0, len(self.rows))  # (slots, R)
        self.memory_rows, self.memory_lengths = self.rows, self._read_lengths()
        self.left_padding: Tensor | None = None

    def prefill(self) -> Tensor:
        """Run the prompt, or what the answers of a model with an encoder start with."""
        if self.memory is None:
            return self._prefill_prompt()
        for layer in self.layers:
            layer.project_memory(self.memory.states)
        for tokens in self.tokens.unbind(1):
            logits = self.advance(tokens)
        return logits

    def advance(self, tokens: Tensor) -> Tensor:
        self._reserve(self.length + 1)
        self.key_rows[self.length] = self.rows
        positions = None if self.left_padding is None else (self.length - self.left_padding)[:, None]
        x = self.decoder.embedding(tokens[:, None], None, positions, self.length).squeeze(1)
        for layer in self.layers:
            x = layer.attend_tokens(x, self.key_rows[: self.length + 1], self.left_padding, positions)
            x = layer.attend_memory(x, self.memory_rows, self.memory_lengths)
            x = layer.feed_forward(x)
        self.length += 1
        return self.head(x if self.decoder.norm is None else self.decoder.norm(x))

    def select_rows(self, index: Tensor) -> None:
        self.rows = torch.arange(len(index), device=index.device)
        self.key_rows, self.memory_rows = self.key_rows.index_select(1, index), self.memory_rows[index]
        self.memory_lengths = None if self.memory_lengths is None else self.memory_lengths[index]
        self.left_padding = None if self.left_padding is None else self.left_padding[index]

    def reorder(self, index: Tensor) -> None:
        self.select_rows(index)

    def _new_caches(self) -> None:
        return None

    def _read_lengths(self) -> Tensor | None:
        padding = None if self.memory is None else self.memory.layout.padding
        return None if padding is None else padding.long()

    def _prefill_prompt(self) -> Tensor:
        """Run the prompt through the model, and copy its keys and values."""
        caches: Caches = self.model.caches()
        logits = compute_next_logits(self.model, self.tokens, self.real, None, caches)
        self._reserve(caches.length)
        self.key_rows[: caches.length] = self.rows
        for layer, (own, _) in zip(self.layers, caches.layers, strict=True):
            assert own.keys is not None and own.values is not None
            layer.copy_keys(own.keys, own.values)
        self.length, self.left_padding = caches.length, caches.left_padding
        return logits

    def _reserve(self, slots: int) -> None:
        """Make room for that many slots of all rows."""
        if slots > len(self.key_rows):
            key_rows = self.key_rows.new_empty(max(slots + MIN_NEW_SLOTS, slots * 3 // 2), self.key_rows.shape[1])
            key_rows[: self.length] = self.key_rows[: self.length]
            self.key_rows = key_rows
        for layer in self.layers:
            layer.reserve(len(self.key_rows), len(self.rows), self.length)


class LayerStep:
    """One block of the decoder with its keys and values."""

    def __init__(self, block: Block) -> None:
        self.block, own = block, block.attention
        self.project, self.output, self.attend = Linear.of(own.project), Linear.of(own.output), TokenAttention(own)
        self.inner, self.outer = Linear.of(block.feed_forward.inner), Linear.of(block.feed_forward.outer)
        # Columns of a slot: queries, keys and values.
        self.sizes = [own.heads * own.head_width, *[own.kv_heads * own.head_width] * 2]
        self.slots = own.project.weight.new_empty(0, 0, sum(self.sizes))
        if block.cross is not None:
            split = [self.sizes[0], 2 * self.sizes[1]]
            biases = (None, None) if block.cross.project.bias is None else block.cross.project.bias.split(split)
            weights = block.cross.project.weight.split(split)
            self.project_query, self.project_keys = map(Linear, weights, biases)
            self.cross_output, self.attend_cross = Linear.of(block.cross.output), TokenAttention(block.cross)

    def reserve(self, slots: int, rows: int, used: int) -> None:
        """Make room; the first `used` slots are kept."""
        old = self.slots
        if slots > len(old) or rows > old.shape[1]:
            self.slots = old.new_empty(slots, max(rows, old.shape[1]), old.shape[2])
            self.slots[:used, : old.shape[1]] = old[:used]

    def copy_keys(self, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values (B, G, T, D) of the prompt to the first slots."""
        _, *parts = self.slots[: keys.shape[2], : len(keys)].split(self.sizes, dim=-1)
        for part, new in zip(parts, (keys, values), strict=True):
            part.unflatten(-1, (new.shape[1], -1)).copy_(new.permute(2, 0, 1, 3))

    def project_memory(self, states: Tensor) -> None:
        """Compute the keys and values of the memory (B, S, width)."""
        projected = self.project_keys(states.flatten(0, 1)).view(*states.shape[:2], -1)
        self.memory = projected.transpose(0, 1).chunk(2, dim=-1)  # (S, B, G D) each

    def attend_tokens(
        self, x: Tensor, key_rows: Tensor, left_padding: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Self-attention of one token per row: (R, width) -> (R, width)."""
        count, norm = len(key_rows), self.block.attention_norm
        slot = self.project(norm(x) if self.block.norm_first else x, out=self.slots[count - 1, : len(x)])
        if self.block.attention.rotary is not None:
            self._rotate(slot, torch.tensor([count - 1], device=x.device) if positions is None else positions)
        _, keys, values = self.slots[:count].split_with_sizes(self.sizes, dim=-1)
        x = self.output(self.attend(slot, keys, values, key_rows, left_padding), added=x)
        return x if self.block.norm_first else norm(x)

    def attend_memory(self, x: Tensor, rows: Tensor, lengths: Tensor | None) -> Tensor:
        """Cross-attention to the memory, if there is one."""
        norm = self.block.cross_norm
        if norm is None:
            return x
        query = self.project_query(norm(x) if self.block.norm_first else x)
        keys, values = self.memory
        x = self.cross_output(self.attend_cross(query, keys, values, rows, None, lengths), added=x)
        return x if self.block.norm_first else norm(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        norm, part = self.block.feed_forward_norm, self.block.feed_forward
        y = part.activate(self.inner(norm(x) if self.block.norm_first else x))
        x = self.outer(y, added=x)
        return x if self.block.norm_first else norm(x)

    def _rotate(self, slot: Tensor, positions: Tensor) -> None:
        """Rotate the queries and keys of a slot in place."""
        own = self.block.attention
        assert own.rotary is not None
        both = slot[:, : self.sizes[0] + self.sizes[1]].unflatten(-1, (-1, 1, own.head_width))  # (R, H + G, 1, D)
        both.copy_(own.rotary(both, positions))


def find_decoder(model: nn.Module) -> Decoder | None:
    """The decoder of a model of exactly these classes; None for others, whose steps may differ."""
    decoder = model.decoder if type(model) in {EncoderDecoder, SpeechEncoder} else model
    return decoder if type(decoder) is Decoder else None


def find_refusal(model: nn.Module, prepared: PreparedPrompt) -> str | None:
    """Why steps of this model cannot run in C; None if they can."""
    decoder = find_decoder(model)
    if decoder is None or type(decoder.head) is not Head or decoder.embedding.tokens is None or not decoder.blocks:
        return "the model must be a Transformer decoder with blocks, a vocabulary and a head"
    if decoder.head.kind == "masked" or decoder.shards is not None:
        return "the head must be linear or tied, and the model not sharded"
    if not is_plain_memory(prepared.memory) or is_traced(prepared.tokens) or call_observer.observe is not None:
        return "the memory must be padded on the right, and the call neither compiled nor monitored"
    if any(vars(module).get(name) for module in (model, *decoder.modules()) for name in HOOKS):
        return "the model must not have forward hooks, or a forward of a module set by hand"
    if torch_module._has_any_global_hook():
        return "modules must not have global hooks"
    parameters = (*decoder.parameters(), *decoder.buffers())
    if any(type(each) not in (Tensor, nn.Parameter) or not is_float32_on_cpu(each) for each in parameters):
        return "the weights must be float32 on a CPU"
    if torch.is_autocast_enabled("cpu"):
        return "autocast must be off"
    # Checked last: it may compile the library, which takes seconds.
    return native.why_unavailable("decoding") or next(filter(None, map(find_block_refusal, decoder.blocks)), None)


def is_plain_memory(memory: Any) -> bool:
    """Whether the memory, if any, has no padding but on the right."""
    if memory is None:
        return True
    plain = is_float32_on_cpu(memory.states) and memory.states.is_contiguous()
    return plain and memory.layout.documents is None and (memory.layout.padding is None or memory.layout.has_lengths)


def is_float32_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def find_block_refusal(block: nn.Module) -> str | None:
    library = native.load_library("decoding")
    if type(block) is not Block or type(block.feed_forward) is not FeedForward:
        return "the blocks must be foci.nn.Block"
    attentions = [each for each in (block.attention, block.cross) if each is not None]
    for each in attentions:
        if type(each) is not Attention or each.shards is not None or each.bias is not None or each.score != Dot():
            return "attention must be a dot product without a bias"
        if each.head_width % library.lanes() or each.head_width > library.max_width():
            return f"the head width must be a multiple of {library.lanes()}, at most {library.max_width()}"
    layers = [block.feed_forward.inner, block.feed_forward.outer]
    layers += [layer for each in attentions for layer in (each.project, each.output)]
    if any(type(layer) is not nn.Linear for layer in layers):
        return "the layers must be nn.Linear"
    widths = {layer.in_features for layer in layers}
    return "widths must be multiples of the vector size" if any(width % library.lanes() for width in widths) else None
