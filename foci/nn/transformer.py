"""Encoder, Decoder and EncoderDecoder.

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
    """Every token looks at every token.

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
        """Tokens (B, T), or vectors (B, T, width) where the config has no vocabulary.

        Args:
            padding: lengths (B,), or bool (B, T), True where a token is real. What stands at padding is of no meaning.
            documents: (T,) or (B, T), the number of each token's document, where several are packed into a row.
            segments: (B, T), the segment of each token, where the config has segments.
            return_weights: also give every layer's weights, by name.
        """
        layout = Layout(padding, documents)
        positions = layout.positions()
        x = self.embedding(tokens, segments, positions)
        return self._finished(x, None, (layout.seen_by(layout), None), positions, None, return_weights)


class Decoder(Stack):
    """Every token looks at those before it, and with `cross` at a memory.

    >>> decoder = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> tokens = torch.randint(100, (2, 10))
    >>> logits = decoder(tokens[:, :-1]).logits                        # teacher forcing: predict tokens[:, 1:]
    >>> logits.shape
    torch.Size([2, 9, 100])
    """

    sizes: ClassVar[dict[str, Config]] = {name: size.changed(head="tied") for name, size in Encoder.sizes.items()}

    def __init__(self, config: TransformerConfig, *, cross: bool = False) -> None:
        super().__init__(config, causal=True, cross=cross)

    def caches(self, capacity: int | None = None) -> Caches:
        """Empty caches for generation; `capacity` sets memory aside for so many tokens at once."""
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
        """Tokens (B, T), or vectors (B, T, width) where the config has no vocabulary.

        Args:
            memory: what `cross` looks at.
            padding: lengths (B,), or bool (B, T), True where a token is real. What stands at padding is of no meaning.
            documents: (T,) or (B, T), the number of each token's document, where several are packed into a row.
            caches: what was kept of the tokens before these, while generating.
            only_last: logits (B, 1, vocabulary) of the last token alone: all that generation needs of a long prompt.
            return_weights: also give every layer's weights, by name.
        """
        layout, count = Layout(padding, documents), tokens.shape[1]
        across = None if memory is None else memory.layout.seen_by(layout)
        if caches is None:
            own, positions, start = self._own_mask(layout, return_weights), layout.positions(), 0
        else:
            caches.begin(layout)
            own, positions, start = caches.mask(count), caches.positions(count), caches.length
        x = self.embedding(tokens, None, positions, start)
        states = None if memory is None else memory.states
        return self._finished(x, states, (own, across), positions, caches, return_weights, only_last)

    @staticmethod
    def _own_mask(layout: Layout, return_weights: bool) -> Mask:
        hidden = layout.seen_by(layout)
        # Padding on the right comes after every real token, so `causal` alone hides it from them, and is faster.
        if hidden is None or (layout.by_lengths and not return_weights):
            return causal
        return causal & hidden


def build_vaswani_config(width: int, layers: int, heads: int) -> EncoderDecoderConfig:
    """The Transformer of Vaswani et al., with the norms first."""
    encoder = TransformerConfig(
        width=width,
        layers=layers,
        heads=heads,
        activation="relu",
        positions="sinusoidal",
        scale_embedding=True,
        dropout=0.1,
    )
    return EncoderDecoderConfig(encoder, encoder.changed(head="tied"))


class EncoderDecoder(Model):
    """Reads a source and writes a target.

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
        """Source (B, S) and target (B, T); padding and documents of each as in Encoder and Decoder."""
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
        """The source, read once: what `decode` looks at."""
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
        """What comes after each token of the target."""
        out = self.decoder(
            target, memory, padding=padding, documents=documents, caches=caches, return_weights=return_weights
        )
        return Output(out.states, out.logits, memory.weights | prefix_layer_names(out.weights, "decoder"))

    def caches(self, capacity: int | None = None) -> Caches:
        """Empty caches for generation."""
        return self.decoder.caches(capacity)

    def attentions(self) -> dict[str, Attention]:
        """Every attention module by the name that its weights have."""
        return prefix_layer_names(self.encoder.attentions(), "encoder") | prefix_layer_names(
            self.decoder.attentions(), "decoder"
        )
