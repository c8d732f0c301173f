"""What models are made of, as small frozen dataclasses: a value that does not fit its field is refused at once."""

from __future__ import annotations

import types
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

ScoreName = Literal["dot", "additive", "general", "cosine"]
BiasName = Literal["alibi", "buckets", "relative"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu"]


@dataclass(frozen=True)
class Config:
    """Plain numbers, words and other configs; a value that does not fit its field is refused at once."""

    # The section of a run's TOML that it is, if any: then errors name a field as somebody types it, task.size.
    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if not matches_type(value, kinds[field.name]):
                raise ValueError(
                    f"{self.called(field.name)} must be {describe_type(kinds[field.name])}, but got {value!r}"
                )

    def called(self, name: str) -> str:
        """A field as errors name it."""
        return f"{self.section or type(self).__name__}.{name}"

    def changed(self, **changes: Any) -> Self:
        """The same config with some fields changed."""
        check_field_names(type(self), changes)
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """The config that `dataclasses.asdict` described."""
        if not isinstance(content, dict):
            raise ValueError(f"{cls.__name__} is made from a table of fields, but got {content!r}")
        check_field_names(cls, content)
        kinds = get_type_hints(cls)
        return cls(**{name: restore_value(value, kinds[name]) for name, value in content.items()})

    def at_least(self, low: float, *names: str) -> None:
        """Refuses fields below a number; None is let through."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ValueError(f"{self.called(name)} must be at least {low}, but got {value!r}")

    def shares(self, *names: str, whole: bool = True) -> None:
        """Refuses fields that do not lie between 0 and 1, where not the `whole` also 1 itself; None is let through."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not (0 <= value < 1 or (whole and value == 1)):
                wanted = "lie between 0 and 1" if whole else "be at least 0 and below 1"
                raise ValueError(f"{self.called(name)} must {wanted}, but got {value!r}")


@dataclass(frozen=True)
class BlockConfig(Config):
    """One block: attention and feed-forward, each with a norm and a residual."""

    width: int = 512  # of the tokens
    heads: int = 8  # how many queries each token asks
    kv_heads: int | None = None  # how many keys and values each token has; None: as many as heads
    head_width: int | None = None  # of each head; None: width / heads
    hidden: int | None = None  # the width inside the feed-forward; None: 4 width, with swiglu 8/3 width
    activation: Activation = "gelu"  # inside the feed-forward; gelu_tanh is the approximation that GPT-2 has
    norm: Literal["layer", "rms"] = "layer"  # LayerNorm or RMSNorm
    norm_first: bool = True  # the norm before each part (pre-norm), or after its residual (post-norm)
    eps: float = 1e-5  # of the norms
    biases: bool = True  # whether linear layers and LayerNorms have biases
    score: ScoreName = "dot"  # how a query is compared with a key
    bias: BiasName | None = None  # added to the scores for where two tokens stand
    rotary: float | None = None  # the base of rotary positions, usually 10000; None: no rotation
    dropout: float = 0.0  # the share dropped after each part and inside the feed-forward, while training
    attention_dropout: float = 0.0  # the share of attention weights dropped, while training
    depth_dropout: float = 0.0  # stochastic depth: how often the last layer is skipped, the first never

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "width", "heads", "kv_heads", "head_width", "hidden")
        self.at_least(0, "eps")
        self.shares("dropout", "attention_dropout", "depth_dropout", whole=False)

    @property
    def inner(self) -> int:
        """The width inside the feed-forward; for swiglu a multiple of 8, with as many parameters as the others."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 24) * 8 if self.activation == "swiglu" else 4 * self.width


@dataclass(frozen=True)
class TransformerConfig(BlockConfig):
    """A stack of blocks with its two ends: what `Encoder` and `Decoder` are made of."""

    vocabulary: int | None = None  # how many tokens there are; None: inputs and outputs are vectors of the width
    layers: int = 6  # how many blocks
    positions: Literal["learned", "sinusoidal"] | None = "learned"  # the table added to the inputs
    max_length: int = 1024  # how many positions that table has
    segments: int = 0  # how many kinds of segments there are, as BERT's two sentences; 0: none
    scale_embedding: bool = False  # whether embeddings are multiplied by √width
    embedding_norm: bool = False  # a norm after the embeddings
    final_norm: bool = True  # a norm after the last block
    head: Literal["linear", "tied", "masked"] | None = None  # makes logits; tied: by the embeddings; masked: BERT's
    head_bias: bool = False  # whether logits have a bias
    checkpoint: bool = False  # gradient checkpointing: recompute each block in the backward, for less memory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "vocabulary", "layers", "segments")
        self.at_least(1, "max_length")
        if self.head == "masked" and self.activation == "swiglu":
            raise ValueError(
                "a masked head has the block's activation, which must be one without a gate, but got 'swiglu'"
            )


@dataclass(frozen=True)
class EncoderDecoderConfig(Config):
    """Two stacks, the second of which also looks at the states of the first."""

    encoder: TransformerConfig  # reads the source
    decoder: TransformerConfig  # writes the target
    shared: bool = False  # whether both have the same embeddings

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder.width != self.decoder.width:
            raise ValueError(f"both stacks must have one width, but got {self.encoder.width} and {self.decoder.width}")
        if self.shared and self.encoder.vocabulary != self.decoder.vocabulary:
            sizes = f"{self.encoder.vocabulary} and {self.decoder.vocabulary}"
            raise ValueError(f"shared embeddings need one vocabulary, but got {sizes}")

    def changed(self, **changes: Any) -> Self:
        """The same config with `encoder`, `decoder` or `shared` changed; any other field is changed in both stacks."""
        own = {name: changes.pop(name) for name in ("encoder", "decoder", "shared") if name in changes}
        config = replace(self, **own)
        if not changes:
            return config
        return replace(config, encoder=config.encoder.changed(**changes), decoder=config.decoder.changed(**changes))


def matches_type(value: Any, kind: Any) -> bool:
    """Whether a value belongs to an annotation made of plain types, words, None and configs."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in {Union, types.UnionType}:
        return any(matches_type(value, each) for each in get_args(kind))
    if kind in {int, float}:
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def describe_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in {Union, types.UnionType}:
        return " or ".join(map(describe_type, get_args(kind)))
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
    return names.get(kind, f"a {getattr(kind, '__name__', kind)}")


def restore_value(value: Any, kind: Any) -> Any:
    """JSON knows neither configs nor tuples."""
    if isinstance(kind, type) and issubclass(kind, Config):
        return kind.from_dict(value)
    return tuple(value) if isinstance(value, list) else value


def check_field_names(kind: type[Config], names: dict[str, Any]) -> None:
    known = [field.name for field in fields(kind)]
    unknown = sorted(names.keys() - set(known))
    if unknown:
        raise ValueError(f"{kind.__name__} has the fields {', '.join(known)}, but got {', '.join(unknown)}")
