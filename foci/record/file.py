"""Saves and loads records: one safetensors file with a version, checked field by field; nothing in it is executed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foci.record.kept import STATISTIC_AXES, KeptStatistics
from foci.record.labels import Labels, Segment
from foci.record.layer import Layer, join_steps
from foci.record.metrics import HEAD_SCORES, ScoreTotals
from foci.record.window_weights import WindowWeights
from foci.weights import parts_file
from foci.weights.file import describe_shape, is_int_tuple, require
from foci.weights.weights import Weights

RECORD_FORMAT = "foci.record/1"
PLAIN_FIELDS = ("model", "calls", "unseen", "prompt", "answer", "sequences", "notes")
LABELS_FIELDS = ("kind", "texts", "words", "grid", "leading", "images", "seconds", "sounds", "rate", "pictures")
SEGMENT_NUMBERS = ("sequence", "start", "rows", "columns", "image", "frame", "picture", "stride")
SEGMENT_FIELDS = ("kind", *SEGMENT_NUMBERS, "box", "order", "seconds")
LAYER_FIELDS = ("name", "stack", "index", "heads", "queries", "keys", "rows", "kv_heads", "value_norms")
MAX_STACK_NAME_LENGTH = 64
# No grid of patches is larger: a file cannot make us allocate one.
MAX_GRID_SIDE = 1 << 16
# Nor has a layer more queries or keys of which only some weights were kept.
MAX_LENGTH = 1 << 20
# What files of earlier versions do not have.
LAYER_DEFAULTS: dict[str, Any] = {
    "kept_keys": (),
    "kept_queries": (),
    "averaged": False,
    "steps": None,
    "windows": None,
}
# The file calls the query positions of a layer "query_places".
LAYER_CONTENTS = ("weights", "kept", "matrix", "values", "query_places")


def save_record(
    path: str | os.PathLike[str],
    layers: dict[str, Layer],
    labels: dict[str, Labels],
    added: dict[str, ScoreTotals],
    plain: dict[str, Any],
) -> None:
    """Writes a record; lazy weights with their queries and keys. `plain` holds the fields in PLAIN_FIELDS."""
    fields: dict[str, Any] = {name: plain[name] for name in PLAIN_FIELDS}
    fields["layers"] = [encode_layer(layer) for layer in layers.values()]
    fields["labels"] = {name: encode_labels(each) for name, each in labels.items()}
    fields["added"] = {name: dict(total.sums) for name, total in added.items()}
    parts_file.save_parts(path, fields, RECORD_FORMAT)


def encode_layer(layer: Layer) -> dict[str, Any]:
    check_stack_name(layer.stack)
    fields = {name: getattr(layer, name) for name in LAYER_FIELDS}
    if layer.steps:
        # Its own data is the mean of the steps.
        nothing = dict.fromkeys(LAYER_CONTENTS)
        steps = {str(number): encode_layer(step) for number, step in layer.steps.items()}
        return (
            fields
            | nothing
            | {"kept_keys": (), "kept_queries": (), "averaged": layer.averaged, "steps": steps, "windows": None}
        )
    return fields | {
        "kept_keys": layer.kept_keys,
        "kept_queries": layer.kept_queries,
        "averaged": False,
        "steps": None,
        "windows": None if layer.windows is None else encode_windows(layer.windows),
        "weights": None if layer.weights is None else layer.weights.parts(),
        "kept": None if layer.kept is None else dict(layer.kept) | {"shape": layer.kept.shape},
        "matrix": layer.matrix,
        "values": layer.values,
        "query_places": layer.query_positions,
    }


def encode_windows(windows: WindowWeights) -> dict[str, Any]:
    return {"windows": windows.windows, "positions": windows.positions, "length": windows.length}


def parse_windows(part: Any) -> WindowWeights:
    names = {"windows", "positions", "length"}
    require(is_dict(part) and part.keys() == names, "windows", f"a dict of {sorted(names)}", str(part)[:80])
    windows, positions, length = part["windows"], part["positions"], part["length"]
    require(is_float_tensor(windows, 5), "windows", "a float tensor (B, H, W, n, n)", describe_shape(windows))
    fits = isinstance(positions, Tensor) and positions.dtype == torch.int64 and positions.dim() == 2
    require(fits, "the positions of windows", "int64 (W, n)", describe_shape(positions))
    expected = (*positions.shape, positions.shape[1])
    require(tuple(windows.shape[2:]) == expected, "windows", f"(B, H, {expected})", describe_shape(windows))
    require(type(length) is int and 0 < length <= positions.numel(), "length", "the number of patches", length)
    inside = positions[positions >= 0].sort().values
    require(torch.equal(inside, torch.arange(length)), "the positions of windows", "each patch once", "others")
    return WindowWeights(windows, positions, length)


def encode_labels(labels: Labels) -> dict[str, Any]:
    fields = {name: getattr(labels, name) for name in LABELS_FIELDS}
    return fields | {
        "segments": [{name: getattr(segment, name) for name in SEGMENT_FIELDS} for segment in labels.segments]
    }


def load_record_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a `Record`, from a file that `save_record` wrote."""
    with parts_file.explain_damage(path, "foci record"):
        return parse_record(parts_file.load_parts(path, RECORD_FORMAT))


def parse_record(found: dict[str, Any]) -> dict[str, Any]:
    # Files of earlier versions have no notes.
    found = {"notes": ()} | found
    parts = {*PLAIN_FIELDS, "layers", "labels", "added"}
    require(found.keys() == parts, "the parts", sorted(parts), sorted(found))
    check_plain_fields(found)
    require(isinstance(found["layers"], tuple), "layers", "a tuple", type(found["layers"]).__name__)
    layers = [parse_layer(part) for part in found["layers"]]
    require(
        len({layer.name for layer in layers}) == len(layers),
        "the names of layers",
        "unique",
        [x.name for x in layers][:8],
    )
    require(is_dict(found["labels"]), "labels", "a dict", type(found["labels"]).__name__)
    require(is_dict(found["added"]), "added", "a dict", type(found["added"]).__name__)
    return found | {
        "layers": {layer.name: layer for layer in layers},
        "labels": {name: parse_labels(part) for name, part in found["labels"].items()},
        "added": {name: parse_score_totals(part) for name, part in found["added"].items()},
    }


def check_plain_fields(found: dict[str, Any]) -> None:
    require(isinstance(found["model"], str), "model", "a string", type(found["model"]).__name__)
    require(
        is_int_tuple((found["calls"], found["sequences"])), "calls and sequences", "ints of at least 0", found["calls"]
    )
    for name in ("unseen", "notes"):
        require(is_tuple_of_strings(found[name]), name, "strings", type(found[name]).__name__)
    require(
        found["prompt"] is None or is_int_tuple((found["prompt"],)), "prompt", "an int of at least 0", found["prompt"]
    )
    require(
        found["answer"] is None or isinstance(found["answer"], str),
        "answer",
        "a string",
        type(found["answer"]).__name__,
    )


def parse_layer(part: Any, is_step: bool = False) -> Layer:
    part = LAYER_DEFAULTS | part if is_dict(part) else part
    names = {*LAYER_FIELDS, *LAYER_CONTENTS, *LAYER_DEFAULTS}
    require(is_dict(part) and part.keys() == names, "a layer", f"a dict of {sorted(names)}", str(part)[:80])
    for name in ("name", "stack", "queries", "keys"):
        require(isinstance(part[name], str), name, "a string", part[name])
    check_stack_name(part["stack"])
    require(is_int_tuple((part["index"], part["kv_heads"])), "index and kv_heads", "ints of at least 0", part["index"])
    require(is_int_tuple(part["heads"]), "heads", "ints of at least 0", part["heads"])
    require(part["rows"] is None or is_int_tuple(part["rows"]), "rows", "ints of at least 0", str(part["rows"])[:80])
    for name in ("kept_keys", "kept_queries"):
        require(is_int_tuple(part[name]), name, "ints of at least 0", str(part[name])[:80])
    require(isinstance(part["averaged"], bool), "averaged", "a bool", part["averaged"])
    if part["steps"] is not None:
        require(not is_step, "a step", "a layer without steps of its own", "one with steps")
        return parse_steps(part)
    sources = {"weights": None, "kept": None, "matrix": part["matrix"]}
    if part["weights"] is not None:
        sources["weights"] = Weights.from_parts(part["weights"])
    if part["windows"] is not None:
        sources["windows"] = parse_windows(part["windows"])
    if part["kept"] is not None:
        sources["kept"] = parse_kept_statistics(part["kept"])
    if part["matrix"] is not None:
        require(
            is_float_tensor(part["matrix"], 4), "matrix", "a float tensor (B, H, Tq, Tk)", type(part["matrix"]).__name__
        )
    fields = {name: part[name] for name in (*LAYER_FIELDS, "kept_keys", "kept_queries")}
    layer = Layer(**fields, query_positions=part["query_places"], values=part["values"], **sources)
    check_layer_tensors(layer)
    return layer


def parse_steps(part: dict[str, Any]) -> Layer:
    """A layer of several denoising steps, which has no other data."""
    steps = part["steps"]
    numbers = is_dict(steps) and bool(steps) and all(name.isdecimal() and len(name) < 8 for name in steps)
    require(numbers, "steps", "a dict of layers by number", str(steps)[:80])
    contents = [name for name in LAYER_CONTENTS if part[name] is not None]
    require(not contents, "a layer with steps", "without other data", contents)
    layers = {int(number): parse_layer(step, is_step=True) for number, step in steps.items()}
    for layer in layers.values():
        fits = (layer.name, layer.heads, layer.rows) == (part["name"], part["heads"], part["rows"])
        require(fits, "a step", f"one of {part['name']}", layer.name)
    return replace(join_steps(layers), averaged=part["averaged"])


def check_stack_name(name: str) -> None:
    """Checks a stack name, which is a part of head names such as "cross.L0H1" that users type."""
    fits = len(name) <= MAX_STACK_NAME_LENGTH and name.isprintable() and not {" ", ".", "#"} & {*name}
    require(
        fits,
        "a stack name",
        f"at most {MAX_STACK_NAME_LENGTH} printable characters without a space, a dot or #",
        ascii(name[: MAX_STACK_NAME_LENGTH + 1]),
    )


def check_layer_tensors(layer: Layer) -> None:
    """Checks that values, norms, positions and the numbers of kept weights fit the shape of the layer."""
    batch, heads, queries, keys = layer.sizes
    kept: Mapping[str, Tensor] = {} if layer.kept is None else layer.kept
    for name, axis, numbers, size in (
        ("key_weights", -1, layer.kept_keys, keys),
        ("query_weights", -2, layer.kept_queries, queries),
    ):
        count = kept[name].shape[axis] if name in kept else 0
        fits = len(set(numbers)) == len(numbers) == count and max(numbers, default=0) < max(size, 1)
        require(fits, f"the numbers of {name}", f"{count} different ones below {size}", str(numbers)[:80])
    require(0 < layer.kv_heads <= max(heads, 1), "kv_heads", f"from 1 to {heads}", layer.kv_heads)
    for name, tensor, rest in (("value_norms", layer.value_norms, 0), ("values", layer.values, 1)):
        if tensor is not None:
            fits = is_float_tensor(tensor, 3 + rest) and tuple(tensor.shape[:3]) == (batch, layer.kv_heads, keys)
            require(fits, name, f"({batch}, {layer.kv_heads}, {keys}{', Dv' * rest})", describe_shape(tensor))
    positions = layer.query_positions
    if positions is not None:
        fits = isinstance(positions, Tensor) and positions.dtype == torch.int64 and positions.shape == (queries,)
        require(fits, "query_places", f"int64 ({queries},)", describe_shape(positions))


def parse_kept_statistics(part: Any) -> KeptStatistics:
    require(
        is_dict(part) and is_int_tuple(part.get("shape")), "kept statistics", "a dict with their shape", str(part)[:80]
    )
    shape = part["shape"]
    require(len(shape) == 4, "the shape of kept statistics", "(B, H, Tq, Tk)", shape)
    statistics = {name: tensor for name, tensor in part.items() if name != "shape"}
    # These tie the shape to tensors: a file cannot claim a size that it does not hold.
    is_text = bool({"key_weights", "query_weights"} & statistics.keys()) and max(shape[2:]) <= MAX_LENGTH
    require(
        is_text or {"entropy", "received"} <= statistics.keys(),
        "kept statistics",
        "entropy, received and others, or the weights of text",
        sorted(statistics),
    )
    sizes = {"q": shape[2], "k": shape[3]}
    for name, tensor in statistics.items():
        require(
            name in STATISTIC_AXES and isinstance(tensor, Tensor),
            "a kept statistic",
            f"one of {', '.join(STATISTIC_AXES)}",
            name,
        )
        expected = shape[:2] + tuple(sizes.get(axis, -1) for axis in STATISTIC_AXES[name])
        fits = tensor.dim() == len(expected) and all(
            want in {-1, size} for want, size in zip(expected, tensor.shape, strict=True)
        )
        require(fits, name, expected, describe_shape(tensor))
        integers = name == "top_keys"
        require(
            tensor.is_floating_point() != integers, name, f"of {'integers' if integers else 'floats'}", tensor.dtype
        )
    require(
        ("top_keys" in statistics) == ("top_values" in statistics),
        "top_values and top_keys",
        "both present or both absent",
        sorted(statistics),
    )
    if "top_keys" in statistics:
        keys = statistics["top_keys"]
        require(
            keys.shape == statistics["top_values"].shape,
            "top_values and top_keys",
            "of one shape",
            describe_shape(keys),
        )
        require(
            bool(((keys >= -1) & (keys < shape[3])).all()), "top_keys", f"from -1 to {shape[3] - 1}", "other numbers"
        )
    return KeptStatistics(statistics, shape)


def parse_labels(part: Any) -> Labels:
    # Files of earlier versions have no segments.
    part = {"segments": (), "pictures": ()} | part if is_dict(part) else part
    names = {*LABELS_FIELDS, "segments"}
    require(is_dict(part) and part.keys() == names, "labels", f"a dict of {sorted(names)}", str(part)[:80])
    texts, words, grid = part["texts"], part["words"], part["grid"]
    require(
        isinstance(texts, tuple) and all(map(is_tuple_of_strings, texts)),
        "texts",
        "strings by sequence and position",
        type(texts).__name__,
    )
    require(isinstance(part["kind"], str), "kind", "a string", part["kind"])
    if words is not None:
        numbers = isinstance(words, tuple) and all(isinstance(row, tuple) for row in words)
        require(
            numbers and all(n is None or type(n) is int for row in words for n in row),
            "words",
            "ints or None by sequence and position",
            "other values",
        )
    require(grid is None or (is_int_tuple(grid) and len(grid) == 2), "grid", "a pair of ints", grid)
    require(is_int_tuple((part["leading"],)), "leading", "an int of at least 0", part["leading"])
    for name in ("images", "sounds"):
        require(part[name] is None or isinstance(part[name], Tensor), name, "a tensor", type(part[name]).__name__)
    rate = part["rate"]
    require(rate is None or (is_int_tuple((rate,)) and rate > 0), "rate", "an int above 0", rate)
    seconds = part["seconds"]
    require(
        seconds is None or (is_real_number(seconds) and 0 < seconds < math.inf),
        "seconds",
        "a finite number above 0",
        seconds,
    )
    pictures = part["pictures"]
    require(
        isinstance(pictures, tuple) and all(isinstance(each, Tensor) for each in pictures),
        "pictures",
        "a tuple of tensors",
        type(pictures).__name__,
    )
    require(isinstance(part["segments"], tuple), "segments", "a tuple", type(part["segments"]).__name__)
    return Labels(**part | {"segments": tuple(map(parse_segment, part["segments"]))})


def parse_segment(part: Any) -> Segment:
    fields = f"a dict of {list(SEGMENT_FIELDS)}"
    require(is_dict(part) and part.keys() == {*SEGMENT_FIELDS}, "a segment", fields, str(part)[:80])
    require(isinstance(part["kind"], str), "kind", "a string", part["kind"])
    optional = {name for name in ("frame", "picture", "stride") if part[name] is None}
    numbers = [part[name] for name in SEGMENT_NUMBERS if name not in optional]
    require(is_int_tuple(tuple(numbers)), "the numbers of a segment", "ints of at least 0", numbers)
    require(max(part["rows"], part["columns"]) <= MAX_GRID_SIDE, "rows and columns", f"up to {MAX_GRID_SIDE}", numbers)
    require(part["order"] is None or is_int_tuple(part["order"]), "order", "ints", str(part["order"])[:80])
    box = part["box"]
    fits = isinstance(box, tuple) and len(box) == 4 and all(map(is_real_number, box))
    require(fits, "box", "four numbers from 0 to 1", str(box)[:80])
    seconds = part["seconds"]
    require(seconds is None or (is_real_number(seconds) and 0 < seconds < math.inf), "seconds", "above 0", seconds)
    return Segment(**part)


def parse_score_totals(part: Any) -> ScoreTotals:
    require(
        is_dict(part) and part.keys() <= HEAD_SCORES.keys(),
        "added totals",
        f"a dict of {', '.join(HEAD_SCORES)}",
        str(part)[:80],
    )
    for name, pair in part.items():
        fits = isinstance(pair, tuple) and len(pair) == 2 and all(is_float_tensor(t, 1) for t in pair)
        require(
            fits and pair[0].shape == pair[1].shape,
            f"the totals of {name}",
            "a sum and a count for each head",
            str(pair)[:80],
        )
    return ScoreTotals(part)


def is_real_number(thing: Any) -> bool:
    return isinstance(thing, float | int) and not isinstance(thing, bool)


def is_dict(thing: Any) -> bool:
    return isinstance(thing, dict)


def is_tuple_of_strings(thing: Any) -> bool:
    return isinstance(thing, tuple) and all(isinstance(text, str) for text in thing)


def is_float_tensor(thing: Any, dimensions: int) -> bool:
    return isinstance(thing, Tensor) and thing.is_floating_point() and thing.dim() == dimensions
