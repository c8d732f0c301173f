"""`head_view` and `model_view` with BertViz's names and arguments, for code that was written for it.

    foci.head_view(outputs.attentions, tokens)

They make a Record of the tensors and show its page: up to 128 tokens with every entry, beyond with the heaviest keys.
"""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from foci.record.labels import Labels, number_words_by_spaces
from foci.record.layer import Layer
from foci.record.record import Record
from foci.view.page import document
from foci.view.units import SPECIAL_TOKEN


@dataclass(frozen=True)
class HtmlPage:
    """A page of attention: `data` is all of its HTML; a notebook shows it in a frame of its own."""

    data: str

    def _repr_html_(self) -> str:
        return document.wrap_in_frame(self.data, "attention")


@dataclass(frozen=True)
class EncoderDecoderAttention:
    """The attention of an encoder-decoder and its tokens, what there is of them."""

    encoder: Any = None
    decoder: Any = None
    cross: Any = None
    encoder_tokens: Sequence[str] | None = None
    decoder_tokens: Sequence[str] | None = None

    @property
    def given(self) -> bool:
        return any(one is not None for one in (self.encoder, self.decoder, self.cross))


def head_view(
    attention: Any = None,
    tokens: Sequence[str] | None = None,
    sentence_b_start: int | None = None,
    prettify_tokens: bool = True,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    encoder_attention: Any = None,
    decoder_attention: Any = None,
    cross_attention: Any = None,
    encoder_tokens: Sequence[str] | None = None,
    decoder_tokens: Sequence[str] | None = None,
    include_layers: Sequence[int] | None = None,
    html_action: str = "view",
) -> HtmlPage | None:
    """Lines from the tokens that look to those that are looked at, of one layer's heads.

    >>> attention = [torch.rand(1, 4, 3, 3).softmax(-1) for _ in range(2)]
    >>> page = foci.head_view(attention, ["[CLS]", "hun", "##gry"], layer=1, heads=[0, 3], html_action="return")
    >>> page.data[:15]
    '<!doctype html>'

    Args:
        attention: [layer] of (batch, heads, T, T), as Hugging Face's `output_attentions` gives it.
        tokens: as a tokenizer's `convert_ids_to_tokens` gives them.
        sentence_b_start: where the second of two sentences begins; each part is then also there by itself, as A→B.
        prettify_tokens: show "Ġhello", "▁hello" and "##ing" as they read.
        layer, heads: what is shown first.
        encoder_attention, decoder_attention, cross_attention: those of an encoder-decoder, in place of `attention`.
        encoder_tokens, decoder_tokens: its tokens.
        include_layers: the layers that the page has; None: all.
        html_action: "view" shows it, in a notebook or a browser; "return" gives an object with the HTML in `data`.
    """
    paired = EncoderDecoderAttention(
        encoder_attention, decoder_attention, cross_attention, encoder_tokens, decoder_tokens
    )
    record = build_record(attention, tokens, sentence_b_start, paired, prettify_tokens, include_layers)
    names = name_initial_heads(record, layer, heads)
    return finish_page(record, {"v": "lines"} | ({"h": "~".join(names)} if names else {}), html_action)


def model_view(
    attention: Any = None,
    tokens: Sequence[str] | None = None,
    sentence_b_start: int | None = None,
    prettify_tokens: bool = True,
    display_mode: str = "dark",
    encoder_attention: Any = None,
    decoder_attention: Any = None,
    cross_attention: Any = None,
    encoder_tokens: Sequence[str] | None = None,
    decoder_tokens: Sequence[str] | None = None,
    include_layers: Sequence[int] | None = None,
    include_heads: Sequence[int] | None = None,
    html_action: str = "view",
) -> HtmlPage | None:
    """All layers and heads as thumbnails; arguments as of `head_view`.

    Args:
        display_mode: "dark" or "light".
        include_heads: the heads of each layer that the page has; None: all.
    """
    if display_mode not in ("dark", "light"):
        raise ValueError(f"expected display_mode 'dark' or 'light', received {display_mode!r}")
    paired = EncoderDecoderAttention(
        encoder_attention, decoder_attention, cross_attention, encoder_tokens, decoder_tokens
    )
    record = build_record(attention, tokens, sentence_b_start, paired, prettify_tokens, include_layers)
    if include_heads is not None:
        record.layers = {name: keep_heads(one, include_heads) for name, one in record.layers.items()}
    return finish_page(record, {"v": "heads", "e": display_mode}, html_action)


def build_record(
    attention: Any,
    tokens: Sequence[str] | None,
    second: int | None,
    paired: EncoderDecoderAttention,
    pretty: bool,
    included: Sequence[int] | None,
) -> Record:
    """The tensors as a record, with only the layers that were asked for."""
    if (attention is not None) == paired.given:
        received = "both" if paired.given else "neither"
        raise ValueError(f"expected attention, or encoder_, decoder_ and cross_attention, received {received}")
    if paired.given:
        record = build_encoder_decoder_record(paired, pretty)
    else:
        record = Record.from_tensors(attention, build_token_labels(tokens, "tokens", pretty))
    check_token_counts(record)
    if included is not None:
        check_included_layers(record, included)
        record.layers = {name: layer for name, layer in record.layers.items() if layer.index in included}
    return record if second is None else add_sentence_parts(record, second)


def build_encoder_decoder_record(paired: EncoderDecoderAttention, pretty: bool) -> Record:
    source = (
        None
        if paired.encoder is paired.cross is None
        else build_token_labels(paired.encoder_tokens, "encoder_tokens", pretty)
    )
    target = (
        None
        if paired.decoder is paired.cross is None
        else build_token_labels(paired.decoder_tokens, "decoder_tokens", pretty)
    )
    return Record.from_tensors(paired.decoder, target, source=source, encoder=paired.encoder, cross=paired.cross)


def build_token_labels(tokens: Sequence[str] | None, name: str, pretty: bool) -> Labels:
    if tokens is None:
        raise ValueError(f"expected {name}, a list of texts, beside the attention, received none")
    texts = restore_spaces(tokens) if pretty else list(tokens)
    words = [
        None if SPECIAL_TOKEN.fullmatch(text.strip()) else word
        for text, word in zip(texts, number_words_by_spaces(texts), strict=True)
    ]
    return Labels.tokens([texts], [words] if pretty else None)


def restore_spaces(tokens: Sequence[str]) -> list[str]:
    r"""Tokens as they read: a space where a word begins.

    >>> prettified(["ĠJane", "Ġis", "Ċ"]), prettified(["[CLS]", "hun", "##gry", "!"]), prettified(["▁Ja", "ne"])
    ([' Jane', ' is', '\n'], ['[CLS]', ' hun', 'gry', ' !'], [' Ja', 'ne'])
    """
    if any(sign in token for token in tokens for sign in ("Ġ", "▁", "</w>")):
        return [token.replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ").replace("</w>", " ") for token in tokens]
    return [token[2:] if token[:2] == "##" else f" {token}" if i else token for i, token in enumerate(tokens)]


def check_token_counts(record: Record) -> None:
    """BertViz refuses tokens that are more than the attention, and so do we: they would be other tokens."""
    for layer in record.layers.values():
        for name, length in ((layer.queries, layer.shape[2]), (layer.keys, layer.shape[3])):
            if len(record.labels[name]) != length:
                raise ValueError(f"expected {length} tokens for {layer.label}, received {len(record.labels[name])}")


def check_included_layers(record: Record, included: Sequence[int]) -> None:
    there = sorted({layer.index for layer in record.layers.values()})
    unknown = sorted(set(included) - set(there))
    if unknown or not included:
        raise ValueError(f"expected include_layers from 0 to {there[-1]}, received {unknown or 'none'}")


def keep_heads(layer: Layer, heads: Sequence[int]) -> Layer:
    """The layer with some of its heads only."""
    unknown = sorted(set(heads) - set(layer.heads))
    if unknown or not heads:
        raise ValueError(f"expected heads from 0 to {layer.heads[-1]} in {layer.label}, received {unknown or 'none'}")
    assert layer.matrix is not None
    places = [layer.heads.index(head) for head in heads]
    return replace(layer, heads=tuple(heads), kv_heads=0, matrix=layer.matrix[:, places])


def add_sentence_parts(record: Record, second: int) -> Record:
    """Beside each layer its four parts: from each of two sentences to each, with numbers as they are in the whole."""
    labels = record.labels["input"]
    if not 0 < second < len(labels):
        raise ValueError(f"expected sentence_b_start from 1 to {len(labels) - 1}, received {second}")
    spans = {"A": range(second), "B": range(second, len(labels))}
    for name, span in spans.items():
        record.labels[name] = labels.select(span)
    for layer in list(record.layers.values()):
        for one, other in ((one, other) for one in spans for other in spans):
            assert layer.matrix is not None
            matrix = layer.matrix[:, :, spans[one].start : spans[one].stop, spans[other].start : spans[other].stop]
            part = replace(layer, stack=f"{one}→{other}", queries=one, keys=other, matrix=matrix)
            part.name = f"{layer.name} {one}→{other}"
            record.layers[part.name] = part
    return record


def name_initial_heads(record: Record, layer: int | None, heads: Sequence[int] | None) -> list[str]:
    """The names of the heads that a page begins with; none where nothing was asked."""
    if layer is None and heads is None:
        return []
    one = next((one for one in record.layers.values() if layer in (None, one.index)), None)
    if one is None:
        raise ValueError(
            f"expected a layer of {', '.join(map(record.name_of, record.layers.values()))}, received {layer}"
        )
    asked = one if heads is None else keep_heads(one, heads)
    return [record.name_of(one, head) for head in asked.heads]


def finish_page(record: Record, state: dict[str, str], action: str) -> HtmlPage | None:
    """The page, opened at a view: given back or shown."""
    if action not in ("view", "return"):
        raise ValueError(f"expected html_action 'view' or 'return', received {action!r}")
    made = HtmlPage(document.render_html(record, "attention", urlencode(state, safe="~")))
    if action == "return":
        return made
    display_page(made)
    return None


def display_page(made: HtmlPage) -> None:
    """In a notebook below the cell, otherwise in a browser."""
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        sys.modules["IPython"].display.display(made)
        return
    with tempfile.NamedTemporaryFile("w", prefix="foci-", suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(made.data)
    print(f"the page is {file.name}", file=sys.stderr)
    webbrowser.open(Path(file.name).as_uri())
