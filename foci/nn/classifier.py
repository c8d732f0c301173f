"""A text classifier: an Encoder with n-gram embeddings, pooled by a class token, by the mean or by both.

B texts, T tokens, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.nn.attention import Attention
from foci.nn.config import (
    LAYERS_LIMIT,
    POSITIONS_LIMIT,
    VOCABULARY_LIMIT,
    BlockConfig,
    Config,
    TransformerConfig,
)
from foci.nn.embedding import check_tokens
from foci.nn.model import Model
from foci.nn.stack import Output
from foci.nn.transformer import Encoder

# The constants of the n-gram hash: a factor without small divisors for each earlier token, the modulus 2**31 - 1, and
# the multiplier that separates neighboring values.
NGRAM_HASH_FACTORS = (1_000_003, 754_974_721, 167_772_161)
NGRAM_HASH_MODULUS, NGRAM_HASH_MULTIPLIER = 2_147_483_647, 1_597_334_677


@dataclass(frozen=True)
class ClassifierConfig(BlockConfig):
    """The config of `TextClassifier`.

    >>> foci.nn.TextClassifier.from_name("tiny", vocabulary=100, classes=3).config.classes
    3
    """

    vocabulary: int = 30_000  # the vocabulary size; token 0 is padding
    classes: int = 2  # the number of classes
    layers: int = 6  # the number of blocks
    positions: Literal["learned", "sinusoidal"] | None = "learned"  # the position table added to the tokens
    max_length: int = 512  # the maximum number of tokens per text
    grams: int = 1  # n-grams of up to this many tokens have embeddings, added to those of the tokens; 1: none
    buckets: int = 2**18  # the number of n-gram embeddings; n-grams whose hashes collide share one
    pool: Literal["class", "mean", "both"] = "class"  # the state used for classification: a class token's, or the mean
    head_dropout: float = 0.0  # dropout rate of that state
    evidence: bool = False  # whether each token adds class logits of its own, summed over the text
    evidence_pairs: int = 0  # the number of such logits for pairs of tokens, chosen by a hash; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, VOCABULARY_LIMIT, "vocabulary", "classes", "buckets")
        self.check_range(1, POSITIONS_LIMIT - 1, "max_length")
        self.check_range(1, 1 + len(NGRAM_HASH_FACTORS), "grams")
        self.check_range(0, LAYERS_LIMIT, "layers")
        self.check_range(0, VOCABULARY_LIMIT, "evidence_pairs")
        self.check_fractions("head_dropout", include_one=False)

    def encoder(self) -> TransformerConfig:
        """The config of the encoder; the class token comes before the text."""
        block = {field.name: getattr(self, field.name) for field in fields(BlockConfig)}
        length = self.max_length + 1
        return TransformerConfig(**block, layers=self.layers, positions=self.positions, max_length=length)


class TextClassifier(Model):
    """Classify texts.

    >>> model = foci.nn.TextClassifier.from_name("tiny", vocabulary=100, classes=2)
    >>> out = model(torch.randint(100, (2, 10)), padding=torch.tensor([10, 7]), return_weights=True)
    >>> out.logits.shape, out.weights["L0"].shape                     # the class token comes first
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
        self.evidence = Evidence(config.vocabulary, config.classes, config.evidence_pairs) if config.evidence else None
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if self.grams is not None:
            nn.init.zeros_(self.grams.weight)

    def forward(self, tokens: Tensor, *, padding: Tensor | None = None, return_weights: bool = False) -> Output:
        """(B, T) -> states (B, 1 + T, width), the class token's first, and logits (B, C).

        Args:
            tokens: (B, T).
            padding: the number of real tokens, (B,).
            return_weights: also return every layer's weights, by name.
        """
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] > self.config.max_length:
            got = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise ValueError(f"tokens must be integers (B, T), T at most {self.config.max_length}, got {got}")
        check_tokens(tokens, self.tokens.num_embeddings)
        x: Tensor = self.tokens(tokens)
        if self.grams is not None:
            for count in range(2, self.config.grams + 1):
                x = x + self.grams(hash_ngrams(tokens, count, self.config.buckets))
        x = torch.cat([self.extra.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        lengths = None if padding is None else padding + 1
        out: Output = self.encoder(x, padding=lengths, return_weights=return_weights)
        pooled = F.dropout(self.pool_states(out.states, lengths), self.config.head_dropout, self.training)
        logits: Tensor = self.head(pooled)
        if self.evidence is not None:
            logits = logits + self.evidence(tokens, padding)
        return Output(out.states, logits, out.weights)

    def pool_states(self, states: Tensor, lengths: Tensor | None) -> Tensor:
        """The state of the whole text: (B, width)."""
        if self.config.pool == "class":
            return states[:, 0]
        if lengths is None:
            mean = states[:, 1:].mean(1)
        else:
            real = torch.arange(1, states.shape[1], device=states.device) < lengths[:, None]
            mean = torch.where(real[..., None], states[:, 1:], 0.0).sum(1) / (lengths - 1).clamp(min=1)[:, None]
        return mean if self.config.pool == "mean" else mean + states[:, 0]

    def attentions(self) -> dict[str, Attention]:
        """Every attention module, under the name of its weights."""
        return self.encoder.attentions()


class Evidence(nn.Module):
    """Class logits per token, and per pair of tokens if `pairs` is above 0, summed over the text.

    The tables start at zero and may be set, such as by naive Bayes.
    """

    def __init__(self, vocabulary: int, classes: int, pairs: int = 0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocabulary, classes))
        # Classes first: where each row of a matrix is stored with its own scale, these are few.
        self.pairs = nn.Parameter(torch.zeros(classes, pairs)) if pairs else None
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, lengths: Tensor | None) -> Tensor:
        """Tokens (B, T) -> logits (B, C)."""
        logits = self.table[tokens]  # (B, T, C)
        if self.pairs is not None:
            logits = logits + self.pairs.mT[hash_ngrams(tokens, 2, self.pairs.shape[1])]
        if lengths is not None:
            real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
            logits = torch.where(real[..., None], logits, 0.0)
        return logits.sum(1) * self.scale


def hash_ngrams(tokens: Tensor, count: int, buckets: int) -> Tensor:
    """Hash each token with the `count` - 1 tokens before it to a bucket from 0 to `buckets` - 1: (B, T)."""
    hashed = tokens.long() + 1
    for back in range(1, count):
        # The tokens before the first one count as padding.
        before = F.pad(tokens, (back, 0))[:, : tokens.shape[1]] if back <= tokens.shape[1] else torch.zeros_like(tokens)
        hashed = (hashed * NGRAM_HASH_FACTORS[back - 1] + before + 1) % NGRAM_HASH_MODULUS
    # Separate neighboring values, because a factor may be nearly a multiple of the number of buckets.
    hashed = hashed * NGRAM_HASH_MULTIPLIER % NGRAM_HASH_MODULUS
    return (hashed ^ hashed >> 15) * NGRAM_HASH_MULTIPLIER % NGRAM_HASH_MODULUS % buckets
