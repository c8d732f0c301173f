"""Text classification: an Encoder reads the words, and a token of its own gathers what decides.

B texts, T tokens, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.nn.attention import Attention
from foci.nn.config import BlockConfig, Config, TransformerConfig
from foci.nn.embedding import check_tokens
from foci.nn.model import Model
from foci.nn.stack import Output
from foci.nn.transformer import Encoder

# Numbers without small common factors, one for each place in a sequence of tokens.
NGRAM_HASH_FACTORS = (1_000_003, 754_974_721, 167_772_161)
PRIME, SPREAD = 2_147_483_647, 1_597_334_677


@dataclass(frozen=True)
class ClassifierConfig(BlockConfig):
    """What `TextClassifier` is made of."""

    vocabulary: int = 30_000  # how many tokens there are; 0 is padding
    classes: int = 2  # how many classes the logits tell apart
    layers: int = 6  # how many blocks
    positions: Literal["learned", "sinusoidal"] | None = "learned"  # the table added to the tokens
    max_length: int = 512  # how many tokens a text may have
    grams: int = 1  # up to so many tokens in a row have a vector of their own, which is added to each token's; 1: none
    buckets: int = 2**18  # how many vectors there are for tokens in a row: some share one, by chance
    pool: Literal["class", "mean", "both"] = "class"  # the state that stands for the text: a token's own, or the mean
    head_dropout: float = 0.0  # the share of that state that is dropped, while training
    evidence: bool = False  # whether each token also speaks for itself: a number per class, summed over the text

    clues: int = 0  # how many clues there are, numbers that say what else is in a text; 0: none are read

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "vocabulary", "classes", "max_length", "grams", "buckets")
        self.at_least(0, "layers", "clues")
        self.shares("head_dropout", whole=False)
        if self.grams > 1 + len(NGRAM_HASH_FACTORS):
            raise ValueError(
                f"ClassifierConfig.grams must be at most {1 + len(NGRAM_HASH_FACTORS)}, but got {self.grams}"
            )

    def encoder(self) -> TransformerConfig:
        """The stack that reads; the token that gathers stands before the text."""
        block = {field.name: getattr(self, field.name) for field in fields(BlockConfig)}
        length = self.max_length + 1
        return TransformerConfig(**block, layers=self.layers, positions=self.positions, max_length=length)


class TextClassifier(Model):
    """Texts into the logits of their classes.

    >>> model = foci.nn.TextClassifier.from_name("tiny", vocabulary=100, classes=2)
    >>> out = model(torch.randint(100, (2, 10)), padding=torch.tensor([10, 7]), return_weights=True)
    >>> out.logits.shape, out.weights["L0"].shape                     # the first token gathers
    (torch.Size([2, 2]), (2, 4, 11, 11))
    """

    config_type = ClassifierConfig
    config: ClassifierConfig
    sizes: ClassVar[dict[str, Config]] = {
        "tiny": ClassifierConfig(width=128, layers=2, heads=4, dropout=0.1),
        "small": ClassifierConfig(width=256, layers=4, heads=4, dropout=0.1),
        "base": ClassifierConfig(width=512, layers=6, heads=8, dropout=0.1),
    }

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.grams = nn.Embedding(config.buckets, config.width) if config.grams > 1 else None
        self.extra = nn.Parameter(torch.zeros(config.width))
        self.encoder = Encoder(config.encoder())
        self.head = nn.Linear(config.width, config.classes)
        self.evidence = Evidence(config.vocabulary, config.classes) if config.evidence else None
        self.clues: Tensor | None
        # What they say is known before training, and not trained: see foci.tasks.clues.
        self.register_buffer("clues", torch.zeros(config.clues, config.classes) if config.clues else None)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if self.grams is not None:
            nn.init.zeros_(self.grams.weight)

    def forward(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        clues: Tensor | None = None,
        return_weights: bool = False,
    ) -> Output:
        """Tokens (B, T): states (B, 1 + T, width), the gathering token's first, and logits (B, C).

        Args:
            padding: how many tokens are real, (B,).
            clues: the clues of each text, (B, N); 0 says nothing. The logits are the mean of what they say and of what
                the encoder says; while training they do not count.
            return_weights: also give every layer's weights, by name.
        """
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] > self.config.max_length:
            given = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise ValueError(
                f"tokens must be whole numbers (B, T), T at most {self.config.max_length}, but got {given}"
            )
        check_tokens(tokens, self.tokens.num_embeddings)
        x: Tensor = self.tokens(tokens)
        if self.grams is not None:
            for count in range(2, self.config.grams + 1):
                x = x + self.grams(hash_ngrams(tokens, count, self.config.buckets))
        x = torch.cat([self.extra.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        lengths = None if padding is None else padding + 1
        out: Output = self.encoder(x, padding=lengths, return_weights=return_weights)
        gathered = F.dropout(self.pooled(out.states, lengths), self.config.head_dropout, self.training)
        logits: Tensor = self.head(gathered)
        if self.evidence is not None:
            logits = logits + self.evidence(tokens, padding)
        # Fitted to the texts that are trained on, they know their classes: a model would lean on them there.
        if self.clues is not None and clues is not None and not self.training:
            logits = (logits + self.clues[clues].sum(1)) / 2
        return Output(out.states, logits, out.weights)

    def pooled(self, states: Tensor, lengths: Tensor | None) -> Tensor:
        """What stands for the whole text: (B, width)."""
        if self.config.pool == "class":
            return states[:, 0]
        if lengths is None:
            mean = states[:, 1:].mean(1)
        else:
            real = torch.arange(1, states.shape[1], device=states.device) < lengths[:, None]
            mean = torch.where(real[..., None], states[:, 1:], 0.0).sum(1) / (lengths - 1).clamp(min=1)[:, None]
        return mean if self.config.pool == "mean" else mean + states[:, 0]

    def attentions(self) -> dict[str, Attention]:
        """Every attention module by the name that its weights have."""
        return self.encoder.attentions()


class Evidence(nn.Module):
    """What each token says by itself: (vocabulary, classes), zero until somebody fills it, such as with naive Bayes."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocabulary, classes))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Tokens (B, T) -> logits (B, C)."""
        said = self.table[tokens]
        if lengths is not None:
            real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
            said = torch.where(real[..., None], said, 0.0)
        return said.sum(1) * self.scale


def hash_ngrams(tokens: Tensor, count: int, buckets: int) -> Tensor:
    """A number from 0 to `buckets` - 1 for each token and those before it, `count` in all: (B, T)."""
    mixed = tokens.long() + 1
    for back in range(1, count):
        # What stands before the first token is padding.
        before = F.pad(tokens, (back, 0))[:, : tokens.shape[1]] if back <= tokens.shape[1] else torch.zeros_like(tokens)
        mixed = (mixed * NGRAM_HASH_FACTORS[back - 1] + before + 1) % PRIME
    # Neighbours are torn apart, because a factor may be nearly a multiple of the number of buckets.
    mixed = mixed * SPREAD % PRIME
    return (mixed ^ mixed >> 15) * SPREAD % PRIME % buckets
