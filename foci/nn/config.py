"""Model configs: small frozen dataclasses that check the type and range of every field when they are built."""

from __future__ import annotations

import reprlib
import types
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

ScoreName = Literal["dot", "additive", "general", "cosine"]
BiasName = Literal["alibi", "buckets", "relative"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu"]

# The largest sizes that a config may name. They are far above published models, and refuse the sizes of a damaged file
# or a typing error before anything is allocated.
WIDTH_LIMIT, HEADS_LIMIT, LAYERS_LIMIT = 2**16, 2**12, 2**10
POSITIONS_LIMIT = VOCABULARY_LIMIT = 2**24
# 2**16 frames or pixels become one.
HALVINGS_LIMIT = 16
SEED_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Config:
    """A frozen dataclass of numbers, strings and other configs, whose field types are checked.

    >>> config = foci.nn.BlockConfig(width=64, heads=4)
    >>> config.replace(heads=8).heads
    8
    """

    # The section of a run's TOML file that this config describes, if any: errors then name a field as the file does,
    # such as task.size.
    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if not matches_type(value, kinds[field.name]):
                # TOML has no None: a field that may be None is left out there.
                expected = describe_type(kinds[field.name]).removesuffix(" or None" if self.section else "")
                raise ValueError(f"{self.field_path(field.name)} must be {expected}, got {reprlib.repr(value)}")

    def field_path(self, name: str) -> str:
        """The name of a field in error messages."""
        return f"{self.section or type(self).__name__}.{name}"

    def replace(self, **changes: Any) -> Self:
        """A copy of the config with some fields changed."""
        check_field_names(type(self), changes)
        return replace(self, **changes)

    def fill(self, **values: Any) -> Self:
        """A copy in which the fields that are None take these values; the others keep theirs."""
        return self.replace(**{name: value for name, value in values.items() if getattr(self, name) is None})

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """Build the config from the result of `dataclasses.asdict`."""
        if not isinstance(content, dict):
            raise ValueError(f"{cls.__name__} must be a table of fields, got {reprlib.repr(content)}")
        check_field_names(cls, content)
        kinds = get_type_hints(cls)
        return cls(**{name: restore_value(value, kinds[name]) for name, value in content.items()})

    def check_range(self, low: float, high: float, *names: str) -> None:
        """Refuse fields outside [low, high]; None is allowed."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{self.field_path(name)} must be between {low} and {high}, got {reprlib.repr(value)}")

    def check_fractions(self, *names: str, include_one: bool = True) -> None:
        """Refuse fields outside [0, 1], or outside [0, 1) if not `include_one`; None is allowed."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not (0 <= value < 1 or (include_one and value == 1)):
                expected = "between 0 and 1" if include_one else "at least 0 and below 1"
                raise ValueError(f"{self.field_path(name)} must be {expected}, got {reprlib.repr(value)}")


@dataclass(frozen=True)
class BlockConfig(Config):
    """The config of `Block`: attention and feed-forward network, each with a norm and a residual connection.

    >>> foci.nn.Block(foci.nn.BlockConfig(width=64, heads=4))(torch.randn(1, 5, 64)).shape
    torch.Size([1, 5, 64])
    """

    width: int = 512  # the width of the tokens
    heads: int = 8  # the number of heads
    kv_heads: int | None = None  # the number of key/value heads; None: as many as heads
    head_width: int | None = None  # the width of each head; None: width / heads
    hidden: int | None = None  # the width inside the feed-forward network; None: 4 width, with swiglu 8/3 width
    activation: Activation = "gelu"  # of the feed-forward network; gelu_tanh is the approximation that GPT-2 uses
    norm: Literal["layer", "rms"] = "layer"  # LayerNorm or RMSNorm
    norm_first: bool = True  # True: norm before each part (pre-norm); False: after its residual (post-norm)
    eps: float = 1e-5  # epsilon of the norms
    biases: bool = True  # whether linear layers and LayerNorms have biases
    score: ScoreName = "dot"  # the score between a query and a key
    bias: BiasName | None = None  # position bias added to the scores
    rotary: float | None = None  # the base of the rotary position embedding, usually 10000; None: none
    dropout: float = 0.0  # dropout rate after each part and inside the feed-forward network
    attention_dropout: float = 0.0  # dropout rate of the attention weights
    depth_dropout: float = 0.0  # stochastic depth: the rate of the last layer; it grows linearly from 0 in the first

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(1, WIDTH_LIMIT, "width", "head_width", "hidden")
        self.check_range(1, HEADS_LIMIT, "heads", "kv_heads")
        self.check_range(0, 1, "eps")
        self.check_range(1, 10**12, "rotary")
        self.check_fractions("dropout", "attention_dropout", "depth_dropout", include_one=False)

    @property
    def hidden_width(self) -> int:
        """The width inside the feed-forward network; for swiglu a multiple of 8, with as many parameters as without."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 24) * 8 if self.activation == "swiglu" else 4 * self.width


@dataclass(frozen=True)
class TransformerConfig(BlockConfig):
    """The config of `Encoder` and `Decoder`: a stack of blocks with an embedding and a head.

    >>> config = foci.nn.TransformerConfig(width=64, heads=4, layers=2, vocabulary=100)
    >>> foci.nn.Encoder(config)(torch.randint(100, (2, 10))).states.shape
    torch.Size([2, 10, 64])
    """

    vocabulary: int | None = None  # the vocabulary size; None: inputs and outputs are vectors (B, T, width)
    layers: int = 6  # the number of blocks
    positions: Literal["learned", "sinusoidal"] | None = "learned"  # the position table added to the inputs
    max_length: int = 1024  # the number of positions in that table
    segments: int = 0  # the number of segment types, 2 for BERT's sentence pairs; 0: no segments
    scale_embedding: bool = False  # whether embeddings are multiplied by √width
    embedding_norm: bool = False  # a norm after the embeddings
    final_norm: bool = True  # a norm after the last block
    head: Literal["linear", "tied", "masked"] | None = None  # tied: shares the embedding's weights; masked: BERT's
    head_bias: bool = False  # whether the logits have a bias
    checkpoint: bool = False  # gradient checkpointing: recompute each block in the backward to save memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(0, VOCABULARY_LIMIT, "vocabulary", "segments")
        self.check_range(0, LAYERS_LIMIT, "layers")
        self.check_range(1, POSITIONS_LIMIT, "max_length")
        if self.head == "masked" and self.activation == "swiglu":
            raise ValueError("activation must be ungated for head='masked', which uses it too, got 'swiglu'")


@dataclass(frozen=True)
class EncoderDecoderConfig(Config):
    """The config of `EncoderDecoder`: a stack for the source, and one for the target with cross-attention to it.

    >>> foci.nn.EncoderDecoder.from_name("tiny", vocabulary=100).config.decoder.vocabulary
    100
    """

    encoder: TransformerConfig  # encodes the source
    decoder: TransformerConfig  # decodes the target
    shared: bool = False  # whether both share one embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder.width != self.decoder.width:
            widths = f"{self.encoder.width} and {self.decoder.width}"
            raise ValueError(f"encoder.width and decoder.width must be equal, got {widths}")
        if self.shared and self.encoder.vocabulary != self.decoder.vocabulary:
            sizes = f"{self.encoder.vocabulary} and {self.decoder.vocabulary}"
            raise ValueError(f"encoder.vocabulary and decoder.vocabulary must be equal with shared=True, got {sizes}")

    def replace(self, **changes: Any) -> Self:
        """A copy with `encoder`, `decoder` or `shared` changed; any other field is changed in both stacks."""
        own = {name: changes.pop(name) for name in ("encoder", "decoder", "shared") if name in changes}
        config = replace(self, **own)
        if not changes:
            return config
        return replace(config, encoder=config.encoder.replace(**changes), decoder=config.decoder.replace(**changes))


def matches_type(value: Any, kind: Any) -> bool:
    """Whether a value matches an annotation made of plain types, literals, None and configs."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in {Union, types.UnionType}:
        return any(matches_type(value, each) for each in get_args(kind))
    if kind in {int, float}:
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def describe_type(kind: Any) -> str:
    """An annotation in words, for error messages."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in {Union, types.UnionType}:
        return " or ".join(map(describe_type, get_args(kind)))
    names = {int: "an integer", float: "a number", bool: "True or False", str: "a string", type(None): "None"}
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")


def restore_value(value: Any, kind: Any) -> Any:
    """Restore configs and tuples, which JSON stores as objects and lists."""
    if isinstance(kind, type) and issubclass(kind, Config):
        return kind.from_dict(value)
    return tuple(value) if isinstance(value, list) else value


def check_field_names(kind: type[Config], names: dict[str, Any]) -> None:
    known = [field.name for field in fields(kind)]
    unknown = sorted(names.keys() - set(known))
    if unknown:
        raise ValueError(f"fields of {kind.__name__} must be among {', '.join(known)}, got {', '.join(unknown)}")
