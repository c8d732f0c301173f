"""Records for the tests of the page, and a decoder of the payload of a page."""

import base64
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
    """A record of lazy weights, with queries, keys, values and a causal mask."""
    generator = torch.Generator().manual_seed(length)
    shape = {"q": heads, "k": kv_heads or heads, "v": kv_heads or heads}
    made = {}
    for index in range(layers):
        q, k, v = (torch.randn(1, n, length, width, generator=generator) for n in shape.values())
        # In head 0 each query attends to the key before it.
        q[:, 0, 1:] = 3 * k[:, 0, :-1]
        _, weights = foci.attention(q, k, v, mask=foci.causal, return_weights=True, **options)
        name = f"layers.{index}"
        made[name] = Layer(name, index=index, weights=weights, values=v, kv_heads=kv_heads or heads)
    words = WORDS.split()
    texts = [("" if i == 0 else " ") + words[i % len(words)] for i in range(length)]
    return Record(made, {"input": Labels.tokens([texts], [list(range(length))])}, model="Lazy", calls=layers)


def record_small_model(length: int = 12) -> Record:
    """A small model recorded by `foci.watch`."""
    torch.manual_seed(0)
    model = foci.nn.Decoder.from_name("tiny", vocabulary=50).eval()
    with torch.no_grad(), foci.watch(model) as seen:
        model(torch.arange(length)[None] % 50)
    seen.label([[f" t{i}" for i in range(length)]])
    return seen


def output_of(record: Record, head: str, query: int) -> list[float]:
    """The weighted sum of the values, from the dense matrix."""
    name, _, number = head.partition("H")
    layer, place = record[name], int(number)
    assert isinstance(layer, Layer)
    assert layer.values is not None
    group = layer.shape[1] // layer.values.shape[1]
    found: list[float] = (layer.dense()[0, place, query] @ layer.values[0, place // group].float()).tolist()
    return found


def read_payload(page: str) -> tuple[dict[str, Any], bytes]:
    """The header and the arrays of a page."""
    found = re.search(r'<script type="text/plain" id="payload">([^<]*)</script>', page)
    assert found
    return decode_payload(base64.b64decode(found[1], validate=True))


def decode_payload(payload: bytes) -> tuple[dict[str, Any], bytes]:
    data = gzip.decompress(payload)
    (length,) = struct.unpack("<I", data[:4])
    return json.loads(data[4 : 4 + length]), data[4 + length :]


def decode_array(header: dict[str, Any], data: bytes, name: str) -> Tensor:
    """Decode an array as the page does."""
    entry = header["arrays"][name]
    count = math.prod(entry["shape"])
    width = {"f4": 4, "f2": 2, "u1": 1, "u2": 2, "u3": 3, "log16": 2, "log8": 1}[entry["kind"]]
    planes = [torch.tensor(list(data[entry["at"] + i * count : entry["at"] + (i + 1) * count])) for i in range(width)]
    codes = sum(plane.long() << 8 * i for i, plane in enumerate(planes))
    assert isinstance(codes, Tensor)
    values = decode_numbers(codes, entry["kind"]).view(entry["shape"])
    if entry["kind"] != "log8":
        return values
    return values * decode_array(header, data, f"{name}.peak").view(-1, *[1] * (values.dim() - 1))


def decode_numbers(codes: Tensor, kind: str) -> Tensor:
    if kind == "f4":
        return codes.to(torch.int32).view(torch.float32)
    if kind == "f2":
        return codes.to(torch.int16).view(torch.float16).float()
    if kind.startswith("log"):
        steps, largest = {"log16": (2048, 65535), "log8": (16, 255)}[kind]
        return torch.where(codes > 0, torch.exp((codes - largest).double() / steps), 0.0)
    return codes
