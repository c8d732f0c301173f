"""Damages files: bytes at random, numbers and values of texts, and fields of a header with everything else intact."""

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

NUMBERS = (0, 1, -1, 2, 255, 2**16, 2**22, 2**31, 2**32, 2**40, 2**63 - 1, 2**64, 10**18, 10**40, 1e-300, 1e308, 0.5)
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    False,
    "",
    "x" * 1000,
    "\x1b[2J\n",
    [],
    {},
    [[[]]],
    float("nan"),
    -1e308,
)
INTERESTING = (
    b"\x00",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"\x7f\xff\xff\xff",
    b"\n",
    b"\t",
    b'"',
    b"[" * 2000,
)


def flip_bits(content: bytearray, dice: random.Random) -> None:
    for _ in range(dice.choice((1, 1, 2, 8, 64))):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def truncate(content: bytearray, dice: random.Random) -> None:
    del content[dice.randrange(len(content)) :]


def overwrite(content: bytearray, dice: random.Random) -> None:
    place, piece = choose_place(content, dice), dice.choice(INTERESTING)
    content[place : place + len(piece)] = piece


def insert(content: bytearray, dice: random.Random) -> None:
    place = choose_place(content, dice)
    content[place:place] = dice.choice((dice.choice(INTERESTING), dice.randbytes(dice.randrange(1, 64))))


def delete_span(content: bytearray, dice: random.Random) -> None:
    place = choose_place(content, dice)
    del content[place : place + dice.randrange(1, 64)]


def repeat_span(content: bytearray, dice: random.Random) -> None:
    place = choose_place(content, dice)
    content[place:place] = content[place : place + dice.randrange(1, 256)] * dice.choice((1, 2, 50))


def change_number(content: bytearray, dice: random.Random) -> None:
    places = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", content)]
    if places:
        start, stop = dice.choice(places)
        content[start:stop] = str(dice.choice(NUMBERS)).encode()


def choose_place(content: bytearray, dice: random.Random) -> int:
    """A position; often in the first bytes, where headers are."""
    return dice.randrange(min(len(content), dice.choice((64, 512, len(content))))) if content else 0


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(flip_bits, truncate, overwrite, insert, delete_span, repeat_span, change_number),
)


def damage_bytes(content: bytes, dice: random.Random) -> bytes:
    """The content with one to three damages."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        if changed:
            dice.choice(DAMAGES)(changed, dice)
    return bytes(changed)


def damage_text(content: bytes, dice: random.Random) -> bytes:
    """A text with a number changed, or with damaged bytes."""
    changed = bytearray(content)
    change_number(changed, dice)
    return bytes(changed) if dice.random() < 0.6 else damage_bytes(content, dice)


def damage_safetensors(content: bytes, dice: random.Random) -> bytes:
    """A safetensors file with a value of its JSON metadata changed, or with damaged bytes."""
    if dice.random() < 0.3:
        return damage_bytes(content, dice)
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    metadata = header["__metadata__"]
    name = dice.choice(sorted(metadata))
    metadata[name] = json.dumps(damage_value(json.loads(metadata[name]), dice))
    changed = json.dumps(header).encode()
    return struct.pack("<Q", len(changed)) + changed + content[8 + size :]


def damage_value(value: Any, dice: random.Random) -> Any:
    """A JSON value with one value inside it replaced, removed or renamed; JSON texts inside are damaged as JSON."""
    if isinstance(value, dict) and value and dice.random() < 0.93:
        key = dice.choice(sorted(value))
        rest = {name: item for name, item in value.items() if name != key}
        action = dice.random()
        if action < 0.04:
            return rest
        return rest | {key if action > 0.06 else key + "x": damage_value(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.93:
        place = dice.randrange(len(value))
        return [*value[:place], damage_value(value[place], dice), *value[place + dice.choice((0, 1, 1, 1)) :]]
    if isinstance(value, str) and value.startswith(("{", "[")) and dice.random() < 0.93:
        return json.dumps(damage_value(json.loads(value), dice))
    return dice.choice(VALUES)
