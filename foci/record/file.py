"""A record as one file: safetensors inside, versioned, checked part by part when read. Nothing in it is executed."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from foci.record.kept import STATISTIC_AXES, KeptStatistics
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.metrics import HEAD_SCORES, ScoreTotals
from foci.runtime import safetensors_file
from foci.weights.file import is_int_tuple, require
from foci.weights.weights import Weights

RECORD_FORMAT = "foci.record/1"
PLAIN_FIELDS = ("model", "calls", "unseen", "prompt", "answer", "sequences", "notes")
LABELS_FIELDS = ("kind", "texts", "words", "grid", "leading", "images", "seconds")
LAYER_FIELDS = ("name", "stack", "index", "heads", "queries", "keys", "rows", "kv_heads", "query_places", "value_norms")
# So many letters a stack's name may have.
MAX_STACK_NAME_LENGTH = 64
LAYER_CONTENTS = ("weights", "kept", "matrix", "values")


def save_record(
    path: str | os.PathLike[str],
    layers: dict[str, Layer],
    labels: dict[str, Labels],
    added: dict[str, ScoreTotals],
    plain: dict[str, Any],
) -> None:
    """Everything of a record; lazy weights with their queries and keys. `plain` has what is named in PLAIN."""
    described: dict[str, Any] = {name: plain[name] for name in PLAIN_FIELDS}
    described["layers"] = [describe_layer(layer) for layer in layers.values()]
    described["labels"] = {name: describe_labels(each) for name, each in labels.items()}
    described["added"] = {name: dict(total.sums) for name, total in added.items()}
    safetensors_file.save_parts(path, described, RECORD_FORMAT)


def describe_layer(layer: Layer) -> dict[str, Any]:
    check_stack_name(layer.stack)
    found = {name: getattr(layer, name) for name in LAYER_FIELDS}
    return found | {
        "weights": None if layer.weights is None else layer.weights.parts(),
        "kept": None if layer.kept is None else dict(layer.kept) | {"shape": layer.kept.shape},
        "matrix": layer.matrix,
        "values": layer.values,
    }


def describe_labels(labels: Labels) -> dict[str, Any]:
    return {name: getattr(labels, name) for name in LABELS_FIELDS}


def load_record_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a `Record` is made of, from a file that `save` wrote."""
    try:
        return parse_record(safetensors_file.load_parts(path, RECORD_FORMAT))
    except (OSError, ImportError):
        raise
    except Exception as error:
        # Whatever a damaged or hostile file makes of the checks, its reader gets one answer.
        raise ValueError(f"{os.fspath(path)} is not a whole foci record: {error}") from error


def parse_record(found: dict[str, Any]) -> dict[str, Any]:
    # Files of earlier versions say nothing of notes.
    found = {"notes": ()} | found
    parts = {*PLAIN_FIELDS, "layers", "labels", "added"}
    require(found.keys() == parts, f"the parts {sorted(parts)}", sorted(found))
    check_plain_fields(found)
    require(isinstance(found["layers"], tuple), "a list of layers", type(found["layers"]).__name__)
    layers = [parse_layer(part) for part in found["layers"]]
    require(
        len({layer.name for layer in layers}) == len(layers), "layers of different names", [x.name for x in layers][:8]
    )
    require(is_dict(found["labels"]), "labels by name", type(found["labels"]).__name__)
    require(is_dict(found["added"]), "sums by layer", type(found["added"]).__name__)
    return found | {
        "layers": {layer.name: layer for layer in layers},
        "labels": {name: parse_labels(part) for name, part in found["labels"].items()},
        "added": {name: parse_score_totals(part) for name, part in found["added"].items()},
    }


def check_plain_fields(found: dict[str, Any]) -> None:
    require(isinstance(found["model"], str), "a text for model", type(found["model"]).__name__)
    require(is_int_tuple((found["calls"], found["sequences"])), "whole numbers for calls and sequences", found["calls"])
    for name in ("unseen", "notes"):
        require(is_tuple_of_strings(found[name]), f"texts for {name}", type(found[name]).__name__)
    require(found["prompt"] is None or is_int_tuple((found["prompt"],)), "a whole number for prompt", found["prompt"])
    require(
        found["answer"] is None or isinstance(found["answer"], str), "a text for answer", type(found["answer"]).__name__
    )


def parse_layer(part: Any) -> Layer:
    require(
        is_dict(part) and part.keys() == {*LAYER_FIELDS, *LAYER_CONTENTS},
        f"a layer with {[*LAYER_FIELDS, *LAYER_CONTENTS]}",
        str(part)[:80],
    )
    for name in ("name", "stack", "queries", "keys"):
        require(isinstance(part[name], str), f"a text for {name}", part[name])
    check_stack_name(part["stack"])
    require(is_int_tuple((part["index"], part["kv_heads"])), "whole numbers for index and kv_heads", part["index"])
    require(is_int_tuple(part["heads"]), "whole numbers for heads", part["heads"])
    require(part["rows"] is None or is_int_tuple(part["rows"]), "whole numbers for rows", str(part["rows"])[:80])
    behind = {"weights": None, "kept": None, "matrix": part["matrix"]}
    if part["weights"] is not None:
        behind["weights"] = Weights.from_parts(part["weights"])
    if part["kept"] is not None:
        behind["kept"] = parse_kept_statistics(part["kept"])
    if part["matrix"] is not None:
        require(is_float_tensor(part["matrix"], 4), "a float matrix (B, H, Tq, Tk)", type(part["matrix"]).__name__)
    layer = Layer(**{name: part[name] for name in LAYER_FIELDS}, values=part["values"], **behind)
    check_layer_tensors(layer)
    return layer


def check_stack_name(name: str) -> None:
    """A stack is a part of the names of heads, "cross.L0H1", which people read and type."""
    fits = len(name) <= MAX_STACK_NAME_LENGTH and name.isprintable() and not {" ", ".", "#"} & {*name}
    require(
        fits,
        f"a stack's name of at most {MAX_STACK_NAME_LENGTH} letters without a space, a dot or #",
        ascii(name[: MAX_STACK_NAME_LENGTH + 1]),
    )


def check_layer_tensors(layer: Layer) -> None:
    """What stands beside the matrix fits it."""
    batch, heads, queries, keys = layer.shape
    require(0 < layer.kv_heads <= max(heads, 1), f"1 to {heads} key heads", layer.kv_heads)
    for name, tensor, rest in (("value_norms", layer.value_norms, 0), ("values", layer.values, 1)):
        if tensor is not None:
            fits = is_float_tensor(tensor, 3 + rest) and tuple(tensor.shape[:3]) == (batch, layer.kv_heads, keys)
            require(fits, f"{name} ({batch}, {layer.kv_heads}, {keys}{', Dv' * rest})", shape_or_type_of(tensor))
    places = layer.query_positions
    if places is not None:
        fits = isinstance(places, Tensor) and places.dtype == torch.int64 and places.shape == (queries,)
        require(fits, f"query_places int64 ({queries},)", shape_or_type_of(places))


def parse_kept_statistics(part: Any) -> KeptStatistics:
    require(is_dict(part) and is_int_tuple(part.get("shape")), "kept statistics with their shape", str(part)[:80])
    shape = part["shape"]
    require(len(shape) == 4, "a shape (B, H, Tq, Tk)", shape)
    statistics = {name: tensor for name, tensor in part.items() if name != "shape"}
    # These are always kept, and tie the shape to tensors: a file cannot name a size that it does not hold.
    require(
        {"entropy", "received"} <= statistics.keys(), "entropy and received among what was kept", sorted(statistics)
    )
    sizes = {"q": shape[2], "k": shape[3]}
    for name, tensor in statistics.items():
        require(
            name in STATISTIC_AXES and isinstance(tensor, Tensor),
            f"one of the statistics {', '.join(STATISTIC_AXES)}",
            name,
        )
        expected = shape[:2] + tuple(sizes.get(axis, -1) for axis in STATISTIC_AXES[name])
        fits = tensor.dim() == len(expected) and all(
            want in {-1, size} for want, size in zip(expected, tensor.shape, strict=True)
        )
        require(fits, f"{name} {expected}", shape_or_type_of(tensor))
        integers = name == "top_keys"
        require(
            tensor.is_floating_point() != integers, f"{name} of {'whole' if integers else 'real'} numbers", tensor.dtype
        )
    require(("top_keys" in statistics) == ("top_values" in statistics), "top_values with top_keys", sorted(statistics))
    if "top_keys" in statistics:
        keys = statistics["top_keys"]
        require(
            keys.shape == statistics["top_values"].shape, "top_values and top_keys of one shape", shape_or_type_of(keys)
        )
        require(bool(((keys >= -1) & (keys < shape[3])).all()), f"top_keys from -1 to {shape[3] - 1}", "others")
    return KeptStatistics(statistics, shape)


def parse_labels(part: Any) -> Labels:
    require(is_dict(part) and part.keys() == {*LABELS_FIELDS}, f"labels with {list(LABELS_FIELDS)}", str(part)[:80])
    texts, words, grid = part["texts"], part["words"], part["grid"]
    require(
        isinstance(texts, tuple) and all(map(is_tuple_of_strings, texts)),
        "texts by sequence and position",
        type(texts).__name__,
    )
    require(isinstance(part["kind"], str), "a kind of labels", part["kind"])
    if words is not None:
        numbers = isinstance(words, tuple) and all(isinstance(row, tuple) for row in words)
        require(numbers and all(n is None or type(n) is int for row in words for n in row), "words by number", "others")
    require(grid is None or (is_int_tuple(grid) and len(grid) == 2), "a grid of rows and columns", grid)
    require(is_int_tuple((part["leading"],)), "a whole number for leading", part["leading"])
    require(
        part["images"] is None or isinstance(part["images"], Tensor),
        "images as a tensor",
        type(part["images"]).__name__,
    )
    seconds = part["seconds"]
    require(seconds is None or (is_real_number(seconds) and 0 < seconds < math.inf), "seconds above 0", seconds)
    return Labels(**part)


def parse_score_totals(part: Any) -> ScoreTotals:
    require(is_dict(part) and part.keys() <= HEAD_SCORES.keys(), f"sums of {', '.join(HEAD_SCORES)}", str(part)[:80])
    for name, pair in part.items():
        fits = isinstance(pair, tuple) and len(pair) == 2 and all(is_float_tensor(t, 1) for t in pair)
        require(fits and pair[0].shape == pair[1].shape, f"sum and count of {name} for each head", str(pair)[:80])
    return ScoreTotals(part)


def is_real_number(thing: Any) -> bool:
    return isinstance(thing, float | int) and not isinstance(thing, bool)


def is_dict(thing: Any) -> bool:
    return isinstance(thing, dict)


def is_tuple_of_strings(thing: Any) -> bool:
    return isinstance(thing, tuple) and all(isinstance(text, str) for text in thing)


def is_float_tensor(thing: Any, dimensions: int) -> bool:
    return isinstance(thing, Tensor) and thing.is_floating_point() and thing.dim() == dimensions


def shape_or_type_of(thing: Any) -> Any:
    return tuple(thing.shape) if isinstance(thing, Tensor) else type(thing).__name__
