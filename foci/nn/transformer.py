"""Transformers: `Encoder`, `Decoder` and `EncoderDecoder`.

B batch, T tokens, S tokens of the source.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from foci.masks.base import Mask
from foci.masks.kinds import causal
from foci.nn.attention import Attention
from foci.nn.config import Config, EncoderDecoderConfig, TransformerConfig
from foci.nn.layer_caches import Caches
from foci.nn.layout import Layout
from foci.nn.model import Model
from foci.nn.stack import Memory, Output, Stack, prefix_layer_names


class Encoder(Stack):
    """A stack of blocks in which every token attends to every token.

    >>> encoder = foci.nn.Encoder.from_name("tiny", vocabulary=100)
    >>> out = encoder(torch.randint(100, (2, 10)), padding=torch.tensor([10, 7]), return_weights=True)
    >>> out.states.shape, out.weights["L0"].shape
    (torch.Size([2, 10, 128]), (2, 4, 10, 10))
    """

    sizes: ClassVar[dict[str, Config]] = {
        "tiny": TransformerConfig(width=128, layers=2, heads=4, dropout=0.1),
        "small": TransformerConfig(width=384, layers=6, heads=6, dropout=0.1),
        "base": TransformerConfig(width=768, layers=12, heads=12, dropout=0.1),
    }

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, causal=False)

    def forward(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        return_weights: bool = False,
    ) -> Output:
        """(B, T) -> states (B, T, width), and logits if the config has a head.

        Args:
            tokens: (B, T), or vectors (B, T, width) if the config has no vocabulary.
            padding: lengths (B,), or bool (B, T), True for real tokens. States at padding are undefined.
            documents: (T,) or (B, T), the document number of each token if several documents are packed into a row.
            segments: (B, T), the segment of each token if the config has segments.
            return_weights: also return every layer's weights, by name.
        """
        layout = Layout(padding, documents)
        positions = layout.positions()
        x = self.embedding(tokens, segments, positions)
        return self._run_blocks(x, None, (layout.build_mask(layout), None), positions, None, return_weights)


class Decoder(Stack):
    """A stack of blocks with causal attention and, with `cross`, cross-attention to a memory.

    >>> decoder = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> tokens = torch.randint(100, (2, 10))
    >>> logits = decoder(tokens[:, :-1]).logits                        # teacher forcing: predict tokens[:, 1:]
    >>> logits.shape
    torch.Size([2, 9, 100])
    """

    sizes: ClassVar[dict[str, Config]] = {name: size.replace(head="tied") for name, size in Encoder.sizes.items()}

    def __init__(self, config: TransformerConfig, *, cross: bool = False) -> None:
        super().__init__(config, causal=True, cross=cross)

    def caches(self, capacity: int | None = None) -> Caches:
        """Empty caches for generation; `capacity` reserves memory for that many tokens."""
        return Caches(len(self.blocks), capacity)

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        caches: Caches | None = None,
        only_last: bool = False,
        return_weights: bool = False,
    ) -> Output:
        """(B, T) -> states (B, T, width), and logits if the config has a head.

        Args:
            tokens: (B, T), or vectors (B, T, width) if the config has no vocabulary.
            memory: the encoded source for cross-attention.
            padding: lengths (B,), or bool (B, T), True for real tokens. States at padding are undefined.
            documents: (T,) or (B, T), the document number of each token if several documents are packed into a row.
            caches: the keys and values of earlier tokens during generation.
            only_last: compute logits (B, 1, vocabulary) of the last token only, as generation needs for a prompt.
            return_weights: also return every layer's weights, by name.
        """
        self.embedding.check_input(tokens)
        layout, count = Layout(padding, documents), tokens.shape[1]
        memory_mask = None if memory is None else memory.layout.build_mask(layout)
        if caches is None:
            mask, positions, start = self._build_self_mask(layout, return_weights), layout.positions(), 0
        else:
            caches.set_padding(layout)
            mask, positions, start = caches.mask(count), caches.positions(count), caches.length
        x = self.embedding(tokens, None, positions, start)
        states = None if memory is None else memory.states
        return self._run_blocks(x, states, (mask, memory_mask), positions, caches, return_weights, only_last)

    @staticmethod
    def _build_self_mask(layout: Layout, return_weights: bool) -> Mask:
        mask = layout.build_mask(layout)
        # Right padding comes after every real token, so `causal` alone masks it for them, and is faster.
        if mask is None or (layout.has_lengths and not return_weights):
            return causal
        return causal & mask


def build_vaswani_config(width: int, layers: int, heads: int) -> EncoderDecoderConfig:
    """The config of the Transformer of Vaswani et al., but with pre-norm."""
    encoder = TransformerConfig(
        width=width,
        layers=layers,
        heads=heads,
        activation="relu",
        positions="sinusoidal",
        scale_embedding=True,
        dropout=0.1,
    )
    return EncoderDecoderConfig(encoder, encoder.replace(head="tied"))


class EncoderDecoder(Model):
    """A Transformer that encodes a source and decodes a target with cross-attention to it.

    >>> model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=100)
    >>> source, target = torch.randint(100, (2, 12)), torch.randint(100, (2, 10))
    >>> out = model(source, target[:, :-1], source_padding=torch.tensor([12, 8]), return_weights=True)
    >>> out.logits.shape                                               # teacher forcing: predict target[:, 1:]
    torch.Size([2, 9, 100])
    >>> list(out.weights)
    ['encoder.L0', 'encoder.L1', 'decoder.L0', 'cross.L0', 'decoder.L1', 'cross.L1']
    """

    config_type = EncoderDecoderConfig
    config: EncoderDecoderConfig
    sizes: ClassVar[dict[str, Config]] = {
        "tiny": build_vaswani_config(128, 2, 4),
        "small": build_vaswani_config(256, 4, 4),
        "base": build_vaswani_config(512, 6, 8),
    }

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.encoder)
        self.decoder = Decoder(config.decoder, cross=True)
        if config.shared:
            self.decoder.embedding.tokens = self.encoder.embedding.tokens

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
        source_documents: Tensor | None = None,
        target_documents: Tensor | None = None,
        return_weights: bool = False,
    ) -> Output:
        """Logits (B, T, vocabulary) of the next token after each target token.

        Args:
            source: tokens (B, S).
            target: tokens (B, T).
            source_padding, source_documents: padding and documents of the source, as in `Encoder`.
            target_padding, target_documents: padding and documents of the target, as in `Decoder`.
            return_weights: also return every layer's weights, by name.
        """
        memory = self.encode(source, padding=source_padding, documents=source_documents, return_weights=return_weights)
        return self.decode(
            target, memory, padding=target_padding, documents=target_documents, return_weights=return_weights
        )

    def encode(
        self,
        source: Tensor,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        return_weights: bool = False,
    ) -> Memory:
        """Encode the source once; `decode` attends to the result."""
        out = self.encoder(source, padding=padding, documents=documents, return_weights=return_weights)
        return Memory(out.states, Layout(padding, documents), prefix_layer_names(out.weights, "encoder"))

    def decode(
        self,
        target: Tensor,
        memory: Memory,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        caches: Caches | None = None,
        return_weights: bool = False,
    ) -> Output:
        """Logits of the next token after each target token."""
        out = self.decoder(
            target, memory, padding=padding, documents=documents, caches=caches, return_weights=return_weights
        )
        return Output(out.states, out.logits, memory.weights | prefix_layer_names(out.weights, "decoder"))

    def caches(self, capacity: int | None = None) -> Caches:
        """Empty caches for generation."""
        return self.decoder.caches(capacity)

    def attentions(self) -> dict[str, Attention]:
        """Every attention module, under the name of its weights."""
        return prefix_layer_names(self.encoder.attentions(), "encoder") | prefix_layer_names(
            self.decoder.attentions(), "decoder"
        )
