"""Configs: what does not fit its field is refused, and every field says what it is."""

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
        ({"width": "16"}, "TransformerConfig.width must be a whole number, but got '16'"),
        ({"width": True}, "TransformerConfig.width must be a whole number, but got True"),
        ({"width": 0}, "TransformerConfig.width must be at least 1, but got 0"),
        ({"layers": -1}, "TransformerConfig.layers must be at least 0, but got -1"),
        ({"kv_heads": 1.5}, "TransformerConfig.kv_heads must be a whole number or None, but got 1.5"),
        ({"dropout": float("nan")}, "TransformerConfig.dropout must be at least 0 and below 1, but got nan"),
        ({"norm": "batch"}, "TransformerConfig.norm must be 'layer' or 'rms', but got 'batch'"),
        ({"positions": "rotary"}, "TransformerConfig.positions must be 'learned' or 'sinusoidal' or None"),
        ({"norm_first": 1}, "TransformerConfig.norm_first must be True or False, but got 1"),
        ({"head": "masked", "activation": "swiglu"}, "must be one without a gate, but got 'swiglu'"),
        ({"depth": 3}, "TransformerConfig has the fields width, .*, but got depth"),
    ],
)
def test_wrong_fields_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SMALL.changed(**changes)


def test_whole_numbers_are_numbers() -> None:
    assert SMALL.changed(dropout=0).dropout == 0


def test_two_stacks_must_fit() -> None:
    with pytest.raises(ValueError, match="both stacks must have one width, but got 16 and 8"):
        EncoderDecoderConfig(SMALL, SMALL.changed(width=8))
    with pytest.raises(ValueError, match="shared embeddings need one vocabulary, but got 3 and 4"):
        EncoderDecoderConfig(SMALL.changed(vocabulary=3), SMALL.changed(vocabulary=4), shared=True)


def test_a_change_of_both_stacks() -> None:
    both = EncoderDecoderConfig(SMALL, SMALL).changed(vocabulary=9, shared=True)
    assert (both.encoder.vocabulary, both.decoder.vocabulary, both.shared) == (9, 9, True)
    assert EncoderDecoderConfig(SMALL, SMALL).changed(decoder=SMALL.changed(layers=3)).decoder.layers == 3


@pytest.mark.parametrize("config", [SMALL, EncoderDecoderConfig(SMALL, SMALL.changed(bias="alibi"), shared=True)])
def test_a_config_comes_back_from_its_table(config: TransformerConfig | EncoderDecoderConfig) -> None:
    assert type(config).from_dict(asdict(config)) == config


@pytest.mark.parametrize("content", [None, [1], {"width": "x"}, {"widths": 3}])
def test_other_tables_are_refused(content: object) -> None:
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


def test_the_inner_width() -> None:
    assert SMALL.inner == 64
    assert SMALL.changed(hidden=5).inner == 5
    gated = BlockConfig(width=768, activation="swiglu")
    assert gated.inner % 8 == 0
    assert abs(3 * gated.inner * 768 / (8 * 768 * 768) - 1) < 0.01
