"""Speech: frames of a spectrogram, made fewer by convolutions, read by an Encoder, and written down in two ways.

The CTC head says a token or a blank for every state; the attention decoder writes token by token and looks at the
states. A model may have either or both.

B batch, F frames, S states (a few frames each), T tokens of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.nn.attention import Attention
from foci.nn.config import BlockConfig, Config, TransformerConfig
from foci.nn.layer_caches import Caches
from foci.nn.layout import Layout
from foci.nn.model import Model
from foci.nn.stack import Memory, Output, prefix_layer_names
from foci.nn.transformer import Decoder, Encoder
from foci.weights.weights import Weights


@dataclass(frozen=True)
class SpeechConfig(BlockConfig):
    """What `SpeechEncoder` is made of."""

    features: int = 80  # numbers per frame, such as 80 mel bands
    halvings: int = 2  # convolutions that each make two frames one: 2 gives a state for every 4 frames
    local: int = 0  # how many blocks of convolution read before attention does
    reach: int = 15  # how many states each of these looks at, an odd number
    layers: int = 6  # how many blocks read
    decoder_layers: int = 0  # how many blocks write, where there is a vocabulary; 0: no attention decoder
    vocabulary: int | None = None  # how many tokens there are; None: states only
    ctc: bool = True  # whether there is a CTC head, where there is a vocabulary
    max_length: int = 4096  # how many states, and how many tokens, a sequence may have
    checkpoint: bool = False  # gradient checkpointing: recompute each block in the backward, for less memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "features", "layers", "vocabulary", "max_length", "reach")
        self.at_least(0, "halvings", "local", "decoder_layers")
        if self.reach % 2 == 0:
            raise ValueError(f"SpeechConfig.reach must be odd, as many states on either side, but got {self.reach}")

    def stack(self, layers: int, vocabulary: int | None) -> TransformerConfig:
        """The stack that reads (without a vocabulary) or writes."""
        block = {field.name: getattr(self, field.name) for field in fields(BlockConfig)}
        return TransformerConfig(
            **block,
            layers=layers,
            vocabulary=vocabulary,
            positions="sinusoidal",
            max_length=self.max_length,
            scale_embedding=vocabulary is not None,
            head=None if vocabulary is None else "tied",
            checkpoint=self.checkpoint,
        )


class SpeechOutput(NamedTuple):
    """What a speech model gives."""

    states: Tensor  # (B, S, width)
    lengths: Tensor | None  # (B,), how many states are real; None: all
    ctc: Tensor | None  # (B, S, vocabulary), where the model has a CTC head
    logits: Tensor | None  # (B, T, vocabulary), where a target was given
    weights: dict[str, Weights]


class SpeechEncoder(Model):
    """Spectrograms into states, and into text by CTC, by an attention decoder, or by both.

    >>> model = foci.nn.SpeechEncoder.from_name("tiny", vocabulary=30)
    >>> frames, target = torch.randn(2, 100, 80), torch.randint(30, (2, 12))
    >>> out = model(frames, target[:, :-1], padding=torch.tensor([100, 60]))
    >>> out.ctc.shape, out.logits.shape, out.lengths
    (torch.Size([2, 25, 30]), torch.Size([2, 11, 30]), tensor([25, 15]))
    >>> texts = foci.nn.read_ctc(out.ctc, out.lengths)                        # the likeliest tokens, blanks left out
    """

    config_type = SpeechConfig
    config: SpeechConfig
    sizes: ClassVar[dict[str, Config]] = {
        "tiny": SpeechConfig(width=128, heads=4, layers=2, decoder_layers=1, dropout=0.1),
        "small": SpeechConfig(width=256, heads=4, layers=8, decoder_layers=4, dropout=0.1),
        "base": SpeechConfig(width=512, heads=8, layers=12, decoder_layers=6, dropout=0.1),
    }

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.features, *[config.width] * max(config.halvings, 1)]
        stride = 2 if config.halvings else 1
        self.convolutions = nn.ModuleList(
            nn.Conv1d(inner, outer, kernel_size=3, stride=stride, padding=1) for inner, outer in pairwise(widths)
        )
        self.near = nn.ModuleList(ConvolutionBlock(config) for _ in range(config.local))
        self.encoder = Encoder(config.stack(config.layers, None))
        made = config.ctc and config.vocabulary is not None
        self.ctc = nn.Linear(config.width, config.vocabulary or 0) if made else None
        writes = config.decoder_layers > 0 and config.vocabulary is not None
        self.decoder = Decoder(config.stack(config.decoder_layers, config.vocabulary), cross=True) if writes else None

    def forward(
        self,
        frames: Tensor,
        target: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        return_weights: bool = False,
    ) -> SpeechOutput:
        """Frames (B, F, features), and the target (B, T) for the attention decoder.

        Args:
            padding: how many frames are real, (B,).
            return_weights: also give every layer's weights, by name: encoder.L0, decoder.L0, cross.L0.
        """
        memory = self.encode(frames, padding=padding, return_weights=return_weights)
        ctc = None if self.ctc is None else self.ctc(memory.states)
        logits, weights = None, memory.weights
        if target is not None:
            out = self.decode(target, memory, return_weights=return_weights)
            logits, weights = out.logits, out.weights
        return SpeechOutput(memory.states, memory.layout.padding, ctc, logits, weights)

    def encode(self, frames: Tensor, *, padding: Tensor | None = None, return_weights: bool = False) -> Memory:
        """The frames, read once: what `decode` looks at."""
        x, lengths = self._fewer(frames, padding)
        out = self.encoder(x, padding=lengths, return_weights=return_weights)
        return Memory(out.states, Layout(lengths), prefix_layer_names(out.weights, "encoder"))

    def decode(
        self, target: Tensor, memory: Memory, *, caches: Caches | None = None, return_weights: bool = False
    ) -> Output:
        """What comes after each token of the target; padding on its right needs no mask: no token looks ahead."""
        out = self._writer()(target, memory, caches=caches, return_weights=return_weights)
        return Output(out.states, out.logits, memory.weights | prefix_layer_names(out.weights, "decoder"))

    def caches(self, capacity: int | None = None) -> Caches:
        """Empty caches for generation."""
        return self._writer().caches(capacity)

    def attentions(self) -> dict[str, Attention]:
        """Every attention module by the name that its weights have."""
        written = {} if self.decoder is None else prefix_layer_names(self.decoder.attentions(), "decoder")
        return prefix_layer_names(self.encoder.attentions(), "encoder") | written

    def _writer(self) -> Decoder:
        if self.decoder is None:
            raise ValueError(
                "an attention decoder takes decoder_layers and a vocabulary, but this model's config says"
                f" {self.config.decoder_layers} and {self.config.vocabulary}"
            )
        return self.decoder

    def _fewer(self, frames: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, F, features) -> (B, S, width). What stands at padding is silenced before each convolution."""
        if frames.dim() != 3 or frames.shape[-1] != self.config.features:
            raise ValueError(f"frames must have shape (B, F, {self.config.features}), but got {tuple(frames.shape)}")
        if lengths is not None and (lengths.dim() != 1 or lengths.dtype == torch.bool):
            got = f"{lengths.dtype} {tuple(lengths.shape)}"
            raise ValueError(f"padding must be how many frames are real, (B,), but got {got}")
        x = frames.mT  # (B, features, F)
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv1d)
            if lengths is not None:
                x = torch.where(torch.arange(x.shape[-1], device=x.device) < lengths[:, None, None], x, 0.0)
                lengths = (lengths - 1) // convolution.stride[0] + 1
            x = F.gelu(convolution(x))
        x = x.mT
        real = None if lengths is None else torch.arange(x.shape[1], device=x.device)[:, None] < lengths[:, None, None]
        for block in self.near:
            x = block(x, real)
        return x, lengths


class ConvolutionBlock(nn.Module):
    """What the states nearby say: the Conformer's gate and convolution, feature by feature, with a residual.

    Attention has to learn what is near from much data; here it is given.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        width, self.dropout = config.width, config.dropout
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.convolution = nn.Conv1d(width, width, config.reach, padding=config.reach // 2, groups=width)
        self.middle, self.outer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """(B, S, width); real is (B, S, 1), True where a state is no padding."""
        y = F.glu(self.inner(self.norm(x)))
        if real is not None:
            y = torch.where(real, y, 0.0)
        y = self.outer(F.silu(self.middle(self.convolution(y.mT).mT)))
        return x + F.dropout(y, self.dropout, self.training)


def read_ctc(logits: Tensor, lengths: Tensor | None = None, blank: int = 0) -> list[list[int]]:
    """The likeliest token of every state, repetitions joined and blanks left out.

    >>> logits = torch.nn.functional.one_hot(torch.tensor([[1, 1, 0, 1, 2]]), 3).float()
    >>> foci.nn.read_ctc(logits)
    [[1, 1, 2]]

    Args:
        logits: (B, S, vocabulary).
        lengths: how many states are real, (B,).
        blank: the token that says nothing.
    """
    best = logits.argmax(-1)
    counts = [best.shape[1]] * len(best) if lengths is None else lengths.tolist()
    joined = [row[:count].unique_consecutive().tolist() for row, count in zip(best.cpu(), counts, strict=True)]
    return [[token for token in row if token != blank] for row in joined]
