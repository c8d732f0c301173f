"""A speech recognizer: downsamples the frames of a spectrogram, encodes them, and transcribes by CTC or attention.

The CTC head predicts a token or a blank for every state. The attention decoder generates token by token and attends to
the states. A model may have either or both.

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
from foci.nn.config import (
    HALVINGS_LIMIT,
    LAYERS_LIMIT,
    POSITIONS_LIMIT,
    VOCABULARY_LIMIT,
    WIDTH_LIMIT,
    BlockConfig,
    Config,
    TransformerConfig,
)
from foci.nn.layer_caches import Caches
from foci.nn.layout import Layout
from foci.nn.model import Model
from foci.nn.stack import Memory, Output, prefix_layer_names
from foci.nn.transformer import Decoder, Encoder
from foci.weights.weights import Weights


@dataclass(frozen=True)
class SpeechConfig(BlockConfig):
    """The config of `SpeechEncoder`.

    >>> foci.nn.SpeechEncoder.from_name("tiny", features=40, vocabulary=30).config.features
    40
    """

    features: int = 80  # the number of features per frame, such as 80 mel bands
    halvings: int = 2  # the number of convolutions with stride 2: 2 gives one state per 4 frames
    local: int = 0  # the number of convolution blocks before the encoder
    reach: int = 15  # the kernel size of these blocks in states, an odd number
    layers: int = 6  # the number of encoder blocks
    decoder_layers: int = 0  # the number of decoder blocks, if there is a vocabulary; 0: no attention decoder
    vocabulary: int | None = None  # the vocabulary size; None: states only
    ctc: bool = True  # whether there is a CTC head, if there is a vocabulary
    max_length: int = 4096  # the maximum number of states, and of tokens, per sequence
    checkpoint: bool = False  # gradient checkpointing: recompute each block in the backward to save memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, WIDTH_LIMIT, "features", "reach")
        self.check_range(1, VOCABULARY_LIMIT, "vocabulary")
        self.check_range(1, POSITIONS_LIMIT, "max_length")
        self.check_range(1, LAYERS_LIMIT, "layers")
        self.check_range(0, LAYERS_LIMIT, "local", "decoder_layers")
        self.check_range(0, HALVINGS_LIMIT, "halvings")
        if self.reach % 2 == 0:
            raise ValueError(f"SpeechConfig.reach must be odd, to be symmetric around each state, got {self.reach}")

    def stack(self, layers: int, vocabulary: int | None) -> TransformerConfig:
        """The config of the encoder (without a vocabulary) or of the decoder."""
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
    """The output of `SpeechEncoder`."""

    states: Tensor  # (B, S, width)
    lengths: Tensor | None  # (B,), the number of real states; None: all
    ctc: Tensor | None  # (B, S, vocabulary), if the model has a CTC head
    logits: Tensor | None  # (B, T, vocabulary), if a target was given
    weights: dict[str, Weights]


class SpeechEncoder(Model):
    """Encode spectrograms, and transcribe them by CTC, by an attention decoder, or by both.

    >>> model = foci.nn.SpeechEncoder.from_name("tiny", vocabulary=30)
    >>> frames, target = torch.randn(2, 100, 80), torch.randint(30, (2, 12))
    >>> out = model(frames, target[:, :-1], padding=torch.tensor([100, 60]))
    >>> out.ctc.shape, out.logits.shape, out.lengths
    (torch.Size([2, 25, 30]), torch.Size([2, 11, 30]), tensor([25, 15]))
    >>> transcripts = foci.nn.read_ctc(out.ctc, out.lengths)                  # greedy CTC decoding
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
        has_ctc = config.ctc and config.vocabulary is not None
        self.ctc = nn.Linear(config.width, config.vocabulary or 0) if has_ctc else None
        decoder = config.stack(config.decoder_layers, config.vocabulary)
        has_decoder = config.decoder_layers > 0 and config.vocabulary is not None
        self.decoder = Decoder(decoder, cross=True) if has_decoder else None

    def forward(
        self,
        frames: Tensor,
        target: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        return_weights: bool = False,
    ) -> SpeechOutput:
        """Encode the frames, and decode the target if there is one.

        Args:
            frames: (B, F, features).
            target: tokens (B, T) for the attention decoder; None: only the encoder and the CTC head run.
            padding: the number of real frames, (B,).
            return_weights: also return every layer's weights, by name: encoder.L0, decoder.L0, cross.L0.
        """
        memory = self.encode(frames, padding=padding, return_weights=return_weights)
        ctc = None if self.ctc is None else self.ctc(memory.states)
        logits, weights = None, memory.weights
        if target is not None:
            out = self.decode(target, memory, return_weights=return_weights)
            logits, weights = out.logits, out.weights
        return SpeechOutput(memory.states, memory.layout.padding, ctc, logits, weights)

    def encode(self, frames: Tensor, *, padding: Tensor | None = None, return_weights: bool = False) -> Memory:
        """Encode the frames once; `decode` attends to the result."""
        x, lengths = self._downsample(frames, padding)
        out = self.encoder(x, padding=lengths, return_weights=return_weights)
        return Memory(out.states, Layout(lengths), prefix_layer_names(out.weights, "encoder"))

    def decode(
        self, target: Tensor, memory: Memory, *, caches: Caches | None = None, return_weights: bool = False
    ) -> Output:
        """Logits of the next token after each target token; right padding needs no mask: the decoder is causal."""
        out = self._require_decoder()(target, memory, caches=caches, return_weights=return_weights)
        return Output(out.states, out.logits, memory.weights | prefix_layer_names(out.weights, "decoder"))

    def caches(self, capacity: int | None = None) -> Caches:
        """Empty caches for generation."""
        return self._require_decoder().caches(capacity)

    def attentions(self) -> dict[str, Attention]:
        """Every attention module, under the name of its weights."""
        decoder = {} if self.decoder is None else prefix_layer_names(self.decoder.attentions(), "decoder")
        return prefix_layer_names(self.encoder.attentions(), "encoder") | decoder

    def _require_decoder(self) -> Decoder:
        if self.decoder is None:
            raise ValueError(
                "the config must have decoder_layers of at least 1 and a vocabulary for the attention decoder, got"
                f" decoder_layers={self.config.decoder_layers}, vocabulary={self.config.vocabulary}"
            )
        return self.decoder

    def _downsample(self, frames: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, F, features) -> (B, S, width). Padding is set to zero before each convolution."""
        if frames.dim() != 3 or frames.shape[-1] != self.config.features:
            raise ValueError(f"frames must have shape (B, F, {self.config.features}), got {tuple(frames.shape)}")
        if lengths is not None and (lengths.dim() != 1 or lengths.dtype == torch.bool):
            got = f"{lengths.dtype} {tuple(lengths.shape)}"
            raise ValueError(f"padding must be the number of real frames, (B,), got {got}")
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
    """The Conformer's convolution module: a gate and a depthwise convolution, with a residual connection.

    Locality is built in here; attention would have to learn it from much data.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        width, self.dropout = config.width, config.dropout
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.convolution = nn.Conv1d(width, width, config.reach, padding=config.reach // 2, groups=width)
        self.middle, self.outer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """(B, S, width) -> (B, S, width); real is (B, S, 1), False at padding."""
        y = F.glu(self.inner(self.norm(x)))
        if real is not None:
            y = torch.where(real, y, 0.0)
        y = self.outer(F.silu(self.middle(self.convolution(y.mT).mT)))
        return x + F.dropout(y, self.dropout, self.training)


def read_ctc(logits: Tensor, lengths: Tensor | None = None, blank: int = 0) -> list[list[int]]:
    """Greedy CTC decoding: the likeliest token of every state, with repetitions merged and blanks removed.

    >>> logits = torch.nn.functional.one_hot(torch.tensor([[1, 1, 0, 1, 2]]), 3).float()
    >>> foci.nn.read_ctc(logits)
    [[1, 1, 2]]

    Args:
        logits: (B, S, vocabulary).
        lengths: the number of real states, (B,); None: all.
        blank: the blank token.
    """
    best = logits.argmax(-1)
    counts = [best.shape[1]] * len(best) if lengths is None else lengths.tolist()
    merged = [row[:count].unique_consecutive().tolist() for row, count in zip(best.cpu(), counts, strict=True)]
    return [[token for token in row if token != blank] for row in merged]
