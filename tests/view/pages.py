"""Records for the tests of the page, and the payload of a page read back in Python."""

import gzip
import json
import math
import re
import struct
from typing import Any

import torch
from torch import Tensor

import foci
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record

WORDS = "the fox jumps over lazy dogs and seven wizards brew strong potions near an old castle under pale moon light"


def lazy(
    length: int, layers: int = 2, heads: int = 4, kv_heads: int | None = None, width: int = 8, **options: Any
) -> Record:
    """A record that has everything: queries, keys, values, a causal mask."""
    generator = torch.Generator().manual_seed(length)
    shape = {"q": heads, "k": kv_heads or heads, "v": kv_heads or heads}
    made = {}
    for index in range(layers):
        q, k, v = (torch.randn(1, n, length, width, generator=generator) for n in shape.values())
        # A head of its own kind: its keys are looked at by the query that follows.
        q[:, 0, 1:] = 3 * k[:, 0, :-1]
        _, weights = foci.attention(q, k, v, mask=foci.causal, return_weights=True, **options)
        name = f"layers.{index}"
        made[name] = Layer(name, index=index, weights=weights, values=v, kv_heads=kv_heads or heads)
    words = WORDS.split()
    texts = [("" if i == 0 else " ") + words[i % len(words)] for i in range(length)]
    return Record(made, {"input": Labels.tokens([texts], [list(range(length))])}, model="Lazy", calls=layers)


def watched(length: int = 12) -> Record:
    """A small model of which `foci.watch` kept everything."""
    torch.manual_seed(0)
    model = foci.nn.Decoder.from_name("tiny", vocabulary=50).eval()
    with torch.no_grad(), foci.watch(model) as seen:
        model(torch.arange(length)[None] % 50)
    seen.label([[f" t{i}" for i in range(length)]])
    return seen


def output_of(record: Record, head: str, query: int) -> list[float]:
    """The weighted sum of the values, by the dense matrix."""
    name, _, number = head.partition("H")
    layer, place = record[name], int(number)
    assert isinstance(layer, Layer)
    assert layer.values is not None
    group = layer.shape[1] // layer.values.shape[1]
    found: list[float] = (layer.dense()[0, place, query] @ layer.values[0, place // group].float()).tolist()
    return found


def read_payload(page: str) -> tuple[dict[str, Any], bytes]:
    """Head and blob of a page."""
    found = re.search(r'<script type="text/plain" id="payload">(\d+) ([^<]*)</script>', page)
    assert found
    return opened(decoded(found[2])[: int(found[1])])


def decoded(text: str) -> bytes:
    """The other way round from `foci.view.page.encoding.text_of`, bit by bit."""
    digits = {chr(code): i for i, code in enumerate(code for code in range(33, 127) if chr(code) not in "<>&")}
    found = bytearray()
    for start in range(0, len(text), 16):
        bits = 0
        for i in range(start, start + 16, 2):
            bits = bits << 13 | digits[text[i]] * 91 + digits[text[i + 1]]
        found += bits.to_bytes(13, "big")
    return bytes(found)


def opened(packed: bytes) -> tuple[dict[str, Any], bytes]:
    data = gzip.decompress(packed)
    (length,) = struct.unpack("<I", data[:4])
    return json.loads(data[4 : 4 + length]), data[4 + length :]


def array(head: dict[str, Any], blob: bytes, name: str) -> Tensor:
    """An array of the blob, decoded as the page does."""
    entry = head["arrays"][name]
    count = math.prod(entry["shape"])
    width = {"f4": 4, "f2": 2, "u1": 1, "u2": 2, "u3": 3, "log16": 2, "log8": 1}[entry["kind"]]
    planes = [torch.tensor(list(blob[entry["at"] + i * count : entry["at"] + (i + 1) * count])) for i in range(width)]
    codes = sum(plane.long() << 8 * i for i, plane in enumerate(planes))
    assert isinstance(codes, Tensor)
    values = number(codes, entry["kind"]).view(entry["shape"])
    if entry["kind"] != "log8":
        return values
    return values * array(head, blob, f"{name}.peak").view(-1, *[1] * (values.dim() - 1))


def number(codes: Tensor, kind: str) -> Tensor:
    if kind == "f4":
        return codes.to(torch.int32).view(torch.float32)
    if kind == "f2":
        return codes.to(torch.int16).view(torch.float16).float()
    if kind.startswith("log"):
        steps, largest = {"log16": (2048, 65535), "log8": (16, 255)}[kind]
        return torch.where(codes > 0, torch.exp((codes - largest).double() / steps), 0.0)
    return codes
