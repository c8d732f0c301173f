"""Configs: wrong values are refused, and every field is documented."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from foci.nn import BlockConfig, EncoderDecoderConfig, TransformerConfig

SMALL = TransformerConfig(width=16, layers=1, heads=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": "16"}, "TransformerConfig.width must be an integer, got '16'"),
        ({"width": True}, "TransformerConfig.width must be an integer, got True"),
        ({"width": 0}, "TransformerConfig.width must be between 1 and 65536, got 0"),
        ({"layers": -1}, "TransformerConfig.layers must be between 0 and 1024, got -1"),
        ({"kv_heads": 1.5}, "TransformerConfig.kv_heads must be an integer or None, got 1.5"),
        ({"dropout": float("nan")}, "TransformerConfig.dropout must be at least 0 and below 1, got nan"),
        ({"norm": "batch"}, "TransformerConfig.norm must be 'layer' or 'rms', got 'batch'"),
        ({"positions": "rotary"}, "TransformerConfig.positions must be 'learned' or 'sinusoidal' or None"),
        ({"norm_first": 1}, "TransformerConfig.norm_first must be True or False, got 1"),
        ({"head": "masked", "activation": "swiglu"}, "must be ungated for head=.masked., .* got 'swiglu'"),
        ({"depth": 3}, "fields of TransformerConfig must be among width, .*, got depth"),
    ],
)
def test_wrong_fields_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SMALL.replace(**changes)


def test_integers_are_accepted_as_floats() -> None:
    assert SMALL.replace(dropout=0).dropout == 0


def test_incompatible_stacks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"encoder.width and decoder.width must be equal, got 16 and 8"):
        EncoderDecoderConfig(SMALL, SMALL.replace(width=8))
    with pytest.raises(
        ValueError, match=r"encoder.vocabulary and decoder.vocabulary must be equal with shared=True, got 3 and 4"
    ):
        EncoderDecoderConfig(SMALL.replace(vocabulary=3), SMALL.replace(vocabulary=4), shared=True)


def test_replace_changes_both_stacks() -> None:
    both = EncoderDecoderConfig(SMALL, SMALL).replace(vocabulary=9, shared=True)
    assert (both.encoder.vocabulary, both.decoder.vocabulary, both.shared) == (9, 9, True)
    assert EncoderDecoderConfig(SMALL, SMALL).replace(decoder=SMALL.replace(layers=3)).decoder.layers == 3


@pytest.mark.parametrize("config", [SMALL, EncoderDecoderConfig(SMALL, SMALL.replace(bias="alibi"), shared=True)])
def test_config_round_trips_through_a_dict(config: TransformerConfig | EncoderDecoderConfig) -> None:
    assert type(config).from_dict(asdict(config)) == config


@pytest.mark.parametrize("content", [None, [1], {"width": "x"}, {"widths": 3}])
def test_invalid_dicts_are_refused(content: object) -> None:
    with pytest.raises(ValueError, match="TransformerConfig"):
        TransformerConfig.from_dict(content)


def test_configs_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SMALL.width = 3  # type: ignore[misc]


@pytest.mark.parametrize("kind", [BlockConfig, TransformerConfig, EncoderDecoderConfig])
def test_every_field_has_a_line_of_documentation(kind: type) -> None:
    source = inspect.getsource(kind)
    own = [field.name for field in fields(kind) if field.name in kind.__annotations__]
    assert own == re.findall(r"^    (\w+): [^#\n]+  # .{8,}$", source, re.MULTILINE)


def test_hidden_width() -> None:
    assert SMALL.hidden_width == 64
    assert SMALL.replace(hidden=5).hidden_width == 5
    gated = BlockConfig(width=768, activation="swiglu")
    assert gated.hidden_width % 8 == 0
    assert abs(3 * gated.hidden_width * 768 / (8 * 768 * 768) - 1) < 0.01
