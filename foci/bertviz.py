"""`head_view` and `model_view` with the names and arguments of BertViz.

    foci.bertviz.head_view(outputs.attentions, tokens)

They build a Record from the tensors and show its page: with every entry up to 128 tokens, with the top keys beyond.
"""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record
from foci.record.token_texts import number_words_by_spaces
from foci.view.page import document
from foci.view.units import SPECIAL_TOKEN

__all__ = ["head_view", "model_view"]


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class HtmlPage:
    """A page: `data` is its HTML; a notebook shows it in an iframe."""

    data: str

    def _repr_html_(self) -> str:
        return document.wrap_in_frame(self.data, "attention")


@dataclass(frozen=True)
class EncoderDecoderAttention:
    """The attention tensors and tokens of an encoder-decoder; each may be missing."""

    encoder: Any = None
    decoder: Any = None
    cross: Any = None
    encoder_tokens: Sequence[str] | None = None
    decoder_tokens: Sequence[str] | None = None

    @property
    def has_attention(self) -> bool:
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
    """Show the heads of one layer as lines between tokens.

    >>> attention = [torch.rand(1, 4, 3, 3).softmax(-1) for _ in range(2)]
    >>> page = foci.bertviz.head_view(attention, ["[CLS]", "hun", "##gry"], layer=1, heads=[0, 3], html_action="return")
    >>> page.data[:15]
    '<!doctype html>'

    Args:
        attention: [layer] of (batch, heads, T, T), as returned by Hugging Face's `output_attentions`; or `Weights`.
        tokens: as returned by a tokenizer's `convert_ids_to_tokens`.
        sentence_b_start: index of the first token of the second sentence; adds the parts A→A, A→B, B→A and B→B.
        prettify_tokens: show "Ġhello", "▁hello" and "##ing" as plain text.
        layer, heads: the layer and heads to show first.
        encoder_attention, decoder_attention, cross_attention: those of an encoder-decoder, instead of `attention`.
        encoder_tokens, decoder_tokens: its tokens.
        include_layers: the layers on the page; None: all.
        html_action: "view" shows the page in a notebook or a browser; "return" returns it, with the HTML in `data`.
    """
    encoder_decoder = EncoderDecoderAttention(
        encoder_attention, decoder_attention, cross_attention, encoder_tokens, decoder_tokens
    )
    record = build_record(attention, tokens, sentence_b_start, encoder_decoder, prettify_tokens, include_layers)
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
    """Show all layers and heads as thumbnails; the other arguments are those of `head_view`.

    >>> attention = [torch.rand(1, 4, 3, 3).softmax(-1) for _ in range(2)]
    >>> page = foci.bertviz.model_view(attention, ["[CLS]", "hun", "##gry"], html_action="return")
    >>> page.data[:15]
    '<!doctype html>'

    Args:
        display_mode: "dark" or "light".
        include_heads: the heads of each layer on the page; None: all.
    """
    if display_mode not in ("dark", "light"):
        raise ValueError(f"display_mode must be 'dark' or 'light', got {display_mode!r}")
    encoder_decoder = EncoderDecoderAttention(
        encoder_attention, decoder_attention, cross_attention, encoder_tokens, decoder_tokens
    )
    record = build_record(attention, tokens, sentence_b_start, encoder_decoder, prettify_tokens, include_layers)
    if include_heads is not None:
        record.layers = {name: keep_heads(one, include_heads) for name, one in record.layers.items()}
    return finish_page(record, {"v": "heads", "e": display_mode}, html_action)


def build_record(
    attention: Any,
    tokens: Sequence[str] | None,
    sentence_b_start: int | None,
    encoder_decoder: EncoderDecoderAttention,
    prettify_tokens: bool,
    include_layers: Sequence[int] | None,
) -> Record:
    """Build a record of the tensors with the included layers."""
    if (attention is not None) == encoder_decoder.has_attention:
        received = "both" if encoder_decoder.has_attention else "neither"
        raise ValueError(f"attention must be given, or encoder_, decoder_ or cross_attention, got {received}")
    if encoder_decoder.has_attention:
        record = build_encoder_decoder_record(encoder_decoder, prettify_tokens)
    else:
        record = Record.from_tensors(attention, build_token_labels(tokens, "tokens", prettify_tokens))
    check_token_counts(record)
    if include_layers is not None:
        check_included_layers(record, include_layers)
        record.layers = {name: layer for name, layer in record.layers.items() if layer.index in include_layers}
    return record if sentence_b_start is None else add_sentence_parts(record, sentence_b_start)


def build_encoder_decoder_record(encoder_decoder: EncoderDecoderAttention, prettify_tokens: bool) -> Record:
    source = (
        None
        if encoder_decoder.encoder is encoder_decoder.cross is None
        else build_token_labels(encoder_decoder.encoder_tokens, "encoder_tokens", prettify_tokens)
    )
    target = (
        None
        if encoder_decoder.decoder is encoder_decoder.cross is None
        else build_token_labels(encoder_decoder.decoder_tokens, "decoder_tokens", prettify_tokens)
    )
    return Record.from_tensors(
        encoder_decoder.decoder, target, source=source, encoder=encoder_decoder.encoder, cross=encoder_decoder.cross
    )


def build_token_labels(tokens: Sequence[str] | None, name: str, prettify_tokens: bool) -> Labels:
    if tokens is None:
        raise ValueError(f"{name} must be a list of strings, got None")
    texts = restore_spaces(tokens) if prettify_tokens else list(tokens)
    words = [
        None if SPECIAL_TOKEN.fullmatch(text.strip()) else word
        for text, word in zip(texts, number_words_by_spaces(texts), strict=True)
    ]
    return Labels.tokens([texts], [words] if prettify_tokens else None)


def restore_spaces(tokens: Sequence[str]) -> list[str]:
    r"""Replace the tokenizer's word markers by spaces.

    >>> restore_spaces(["ĠJane", "Ġis", "Ċ"]), restore_spaces(["[CLS]", "hun", "##gry", "!"])
    ([' Jane', ' is', '\n'], ['[CLS]', ' hun', 'gry', ' !'])
    >>> restore_spaces(["▁Ja", "ne"])
    [' Ja', 'ne']
    """
    if any(sign in token for token in tokens for sign in ("Ġ", "▁", "</w>")):
        return [token.replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ").replace("</w>", " ") for token in tokens]
    return [token[2:] if token[:2] == "##" else f" {token}" if i else token for i, token in enumerate(tokens)]


def check_token_counts(record: Record) -> None:
    """Check that there is one token per position, as BertViz does."""
    for layer in record.layers.values():
        for name, length in ((layer.queries, layer.shape[-2]), (layer.keys, layer.shape[-1])):
            if len(record.labels[name]) != length:
                raise ValueError(f"tokens must have {length} entries for {layer.label}, got {len(record.labels[name])}")


def check_included_layers(record: Record, include_layers: Sequence[int]) -> None:
    there = sorted({layer.index for layer in record.layers.values()})
    unknown = sorted(set(include_layers) - set(there))
    if unknown or not include_layers:
        raise ValueError(f"include_layers must be from 0 to {there[-1]}, got {unknown or 'none'}")


def check_shown_heads(layer: Layer, heads: Sequence[int]) -> None:
    unknown = sorted(set(heads) - set(layer.heads))
    if unknown or not heads:
        raise ValueError(f"heads must be from 0 to {layer.heads[-1]} in {layer.label}, got {unknown or 'none'}")


def keep_heads(layer: Layer, heads: Sequence[int]) -> Layer:
    """Return the layer with some of its heads."""
    check_shown_heads(layer, heads)
    matrix = layer.dense()[:, [layer.heads.index(head) for head in heads]]
    return replace(layer, heads=tuple(heads), kv_heads=0, weights=None, values=None, value_norms=None, matrix=matrix)


def add_sentence_parts(record: Record, sentence_b_start: int) -> Record:
    """Add four parts of each layer: from each of two sentences to each; weights are not renormalized."""
    labels = record.labels["input"]
    if not 0 < sentence_b_start < len(labels):
        raise ValueError(f"sentence_b_start must be from 1 to {len(labels) - 1}, got {sentence_b_start}")
    spans = {"A": slice(0, sentence_b_start), "B": slice(sentence_b_start, len(labels))}
    for name, span in spans.items():
        record.labels[name] = labels.select(range(len(labels))[span])
    for layer in list(record.layers.values()):
        matrix = layer.dense()
        for one, other in product(spans, spans):
            stack = f"{one}→{other}"
            part = matrix[:, :, spans[one], spans[other]]
            name = f"{layer.name} {stack}"
            record.layers[name] = Layer(name, stack, layer.index, layer.heads, one, other, matrix=part)
    return record


def name_initial_heads(record: Record, layer: int | None, heads: Sequence[int] | None) -> list[str]:
    """Return the names of the heads to show first; empty if neither layer nor heads are given."""
    if layer is None and heads is None:
        return []
    one = next((one for one in record.layers.values() if layer in (None, one.index)), None)
    if one is None:
        raise ValueError(f"layer must be one of {', '.join(map(record.name_of, record.layers.values()))}, got {layer}")
    if heads is not None:
        check_shown_heads(one, heads)
    return [record.name_of(one, head) for head in (one.heads if heads is None else heads)]


def finish_page(record: Record, state: dict[str, str], action: str) -> HtmlPage | None:
    """Return or show the page, opened at a view."""
    if action not in ("view", "return"):
        raise ValueError(f"html_action must be 'view' or 'return', got {action!r}")
    page = HtmlPage(document.render_html(record, "attention", urlencode(state, safe="~")))
    if action == "return":
        return page
    display_page(page)
    return None


def display_page(page: HtmlPage) -> None:
    """Show the page below the notebook cell, or in a browser."""
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        sys.modules["IPython"].display.display(page)
        return
    with tempfile.NamedTemporaryFile("w", prefix="foci-", suffix=".html", delete=False, encoding="utf-8") as file:
        file.write(page.data)
    print(f"page written to {file.name}", file=sys.stderr)
    webbrowser.open(Path(file.name).as_uri())
