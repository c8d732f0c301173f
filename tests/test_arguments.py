"""What a caller can get wrong: each is refused at once, in one sentence that says what was expected and received."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foci
from foci.backends import BACKENDS, reference, sdpa

Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 6)
GOOD = {"query": Q, "key": K, "value": V}
HEADLESS = {"query": Q[:, 0], "key": K[:, 0], "value": V[:, 0]}
ones = torch.ones


def elsewhere(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# What is wrong, the arguments that are, and what the error says; the rest of the call is good.
INPUTS: list[tuple[str, dict[str, Any], str]] = [
    ("a list", {"query": [1.0]}, "query must be a tensor, got list: use torch.as_tensor"),
    ("an array", {"query": Q.numpy()}, "query must be a tensor, got ndarray: use torch.as_tensor"),
    ("an array as mask", {"mask": np.ones((5, 7), bool)}, r"must be a Mask or .*, got ndarray: use torch.as_tensor"),
    ("a row per sequence", {"mask": ones(2, 7).bool()}, r"got shape \(2, 7\): .* by \[\.\.\., None, None, :\]"),
    ("a matrix per sequence", {"bias": ones(2, 5, 7)}, r"got shape \(2, 5, 7\): .* by \[\.\.\., None, :, :\]"),
    ("no tensor", {"value": None}, "value must be a tensor, got NoneType"),
    (
        "one dimension",
        {"query": ones(8), "key": ones(8), "value": ones(8)},
        r"at least \(T, D\), got \(8,\), \(8,\)",
    ),
    ("ranks", {"key": K[0], "value": V[0]}, r"same number of dimensions, .*, got \(2, 4, 5, 8\), \(2, 7, 8\)"),
    ("whole numbers", {"value": V.int()}, r"value must be float16, .* or float64, got torch.int32"),
    ("complex", {"query": Q.cfloat()}, r"query must be float16, .*, got torch.complex64"),
    ("dtypes", {"key": K.double()}, r"one dtype, got torch.float32, torch.float64, torch.float32"),
    ("devices", {"key": elsewhere(K)}, "on one device, got cpu, meta, cpu"),
    ("lengths", {"value": V[:, :, :6]}, "key and value must have the same length, got 7 and 6"),
    (
        "heads",
        {"query": Q[:, :3]},
        "the number of query heads must be a multiple of the number of key/value heads, got 3 and 2",
    ),
    (
        "fewer heads",
        {"query": Q[:, :1]},
        "the number of query heads must be a multiple of the number of key/value heads, got 1 and 2",
    ),
    ("value heads", {"value": V[:, :1]}, "key and value must have the same number of heads, got 2 and 1"),
    ("batches", {"query": ones(3, 4, 5, 8)}, r"must broadcast, got \(3, 4, 5, 8\), \(2, 2, 7, 8\), \(2, 2, 7, 6\)"),
    ("widths", {"key": K[..., :5]}, "query and key must have one width for Dot, got 8 and 5"),
    ("dropout 1", {"dropout": 1.0}, r"dropout must be a number >= 0 and < 1, got 1.0"),
    ("negative dropout", {"dropout": -0.1}, r"dropout must be a number >= 0 and < 1, got -0.1"),
    ("dropout NaN", {"dropout": float("nan")}, "dropout must be a number >= 0 and < 1, got nan"),
    ("dropout words", {"dropout": "0.1"}, r"dropout must be a number >= 0 and < 1, got '0.1'"),
    ("no dropout", {"dropout": None}, "dropout must be a number >= 0 and < 1, got None"),
    ("backend", {"backend": "flash"}, "backend must be one of sdpa, .*reference, got 'flash'"),
    ("backend number", {"backend": 3}, "backend must be one of sdpa, .*reference, got 3"),
    (
        "sink shape",
        {"sink": ones(3)},
        r"float tensor of shape \(4,\), one logit per head, got torch.float32 \(3,\)",
    ),
    ("sink dtype", {"sink": ints(4)}, r"float tensor of shape \(4,\), one logit per head, got torch.int64 \(4,\)"),
    ("sink number", {"sink": 0.0}, r"float tensor of shape \(4,\), one logit per head, got float"),
    ("sink device", {"sink": elsewhere(ones(4))}, "sink must be on cpu like the query, got meta"),
    (
        "sink headless",
        HEADLESS | {"sink": ones(1)},
        r"query must be \(..., H, T, D\) for a sink, which is per head, got 3-D",
    ),
    ("one position", {"positions": ints(5)}, r"must be a pair \(query positions, key positions\), got Tensor"),
    ("three positions", {"positions": (ints(5),) * 3}, r"must be a pair .*, got 3 items"),
    (
        "float positions",
        {"positions": (ones(5), ints(7))},
        r"query positions must be an int tensor, got torch.float32",
    ),
    ("bool positions", {"positions": (ones(5).bool(), None)}, r"must be an int tensor, got torch.bool"),
    ("listed positions", {"positions": (None, [0] * 7)}, "key positions must be an int tensor, got list"),
    ("positions shape", {"positions": (ints(4), None)}, r"must have shape \(5,\) or \(1, 5\) or \(2, 5\), got \(4,\)"),
    (
        "positions batch",
        {"positions": (None, ints(3, 7))},
        r"must have shape \(7,\) or \(1, 7\) or \(2, 7\), got \(3, 7\)",
    ),
    ("positions device", {"positions": (elsewhere(ints(5)), None)}, "query positions must be on cpu .* got meta"),
]

MASKS: list[tuple[str, Callable[[], Any], str]] = [
    ("float", lambda: ones(5, 7), r"a bool tensor \(True = visible\), got a torch.float32 tensor"),
    ("whole numbers", lambda: ints(5, 7), r"a bool tensor \(True = visible\), got a torch.int64 tensor"),
    ("list", lambda: [[True]], "mask must be a Mask or a bool tensor .*, got list"),
    ("word", lambda: "causal", "mask must be a Mask or a bool tensor .*, got 'causal': use foci.causal$"),
    ("factory", lambda: foci.window, r"bool tensor .*, got the function window: use foci.window\(left\)$"),
    ("transposed", lambda: ones(7, 5).bool(), r"mask must broadcast to \(2, 4, 5, 7\), got shape \(7, 5\)"),
    (
        "dimensions",
        lambda: ones(1, 2, 4, 5, 7).bool(),
        r"must broadcast to \(2, 4, 5, 7\), got shape \(1, 2, 4, 5, 7\)",
    ),
    ("device", lambda: elsewhere(ones(5, 7).bool()), "mask must be on cpu like the query, got meta"),
    ("joined list", lambda: foci.causal & [True], "mask must be a Mask or a bool tensor .*, got list"),
    ("joined float", lambda: ones(5, 7) | foci.causal, r"mask must be .*, got a torch.float32 tensor"),
    ("left", lambda: foci.window(-1), "left must be an int >= 0 or None, got -1"),
    ("right", lambda: foci.window(1, -2), "right must be an int >= 0 or None, got -2"),
    ("half", lambda: foci.window(1.5), r"left must be an int >= 0 or None, got 1.5"),
    ("offset", lambda: foci.causal.at(0.5), r"offset must be an int, got 0.5"),
    ("prefix", lambda: foci.prefix(-1), "length must be an int >= 0, got -1"),
    ("prefix word", lambda: foci.prefix("2"), "length must be an int >= 0, got '2'"),
    ("negative", lambda: foci.padding([-1, 3]), r"must be from 0 to the 7 keys, got \[-1, 3\]"),
    ("too long", lambda: foci.padding([8, 3]), r"must be from 0 to the 7 keys, got \[8, 3\]"),
    ("count", lambda: foci.padding([1, 2, 3]), r"one entry per sequence, shape \(2,\), got \(3,\)"),
    ("float lengths", lambda: foci.padding([1.0, 2.0]), r"lengths must be integers, got torch.float32"),
    ("no lengths", lambda: foci.padding(None), "lengths must be integers, got None"),
    ("side", lambda: foci.padding([1, 2], side="top"), "side must be 'right' or 'left', got 'top'"),
    ("ids", lambda: foci.documents([0, 1]), r"query_ids must have shape \(5,\) or \(2, 5\), got \(2,\)"),
    ("one of two ids", lambda: foci.documents([0] * 5), r"ids must have shape \(7,\) or \(2, 7\), got \(5,\)"),
    ("key ids", lambda: foci.documents([0] * 5, [0]), r"key_ids must have shape \(7,\) or \(2, 7\), got \(1,\)"),
    ("float ids", lambda: foci.documents([0.5] * 5), r"query_ids must be integers, got torch.float32"),
    ("no function", lambda: foci.mask_function(3), "function must be a function of four index tensors, got int"),
    (
        "function",
        lambda: foci.mask_function(lambda b, h, q, k: q - k),
        r"must return a bool tensor, got a torch.int64 tensor",
    ),
    ("function word", lambda: foci.mask_function(lambda b, h, q, k: True), "must return a bool tensor, got bool"),
    (
        "function shape",
        lambda: foci.mask_function(lambda b, h, q, k: ones(3).bool()),
        r"must return a tensor that broadcasts to \(2, 4, 5, 7\), got \(3,\)",
    ),
]

SCORES: list[tuple[str, Callable[[], Any], str]] = [
    ("a class", lambda: foci.Dot, "score must be a Score such as .*, got <class"),
    ("a word", lambda: "dot", "score must be a Score such as .*, got 'dot'"),
    ("none", lambda: None, "score must be a Score such as .*, got None"),
    ("scale", lambda: foci.Dot(scale=float("nan")), "scale must be a finite number or None, got nan"),
    ("scale word", lambda: foci.Dot(scale="1"), "scale must be a finite number or None, got '1'"),
    ("softcap", lambda: foci.Dot(softcap=0), "softcap must be a finite number above 0 or None, got 0"),
    ("weight", lambda: foci.Additive(ones(7)), r"of shape \(8,\) or \(4, 8\), got torch.float32 \(7,\)"),
    ("weight dtype", lambda: foci.Additive(ints(8)), r"of shape \(8,\) or \(4, 8\), got torch.int64 \(8,\)"),
    ("weight list", lambda: foci.Additive([1.0] * 8), r"of shape \(8,\) or \(4, 8\), got list"),
    ("weight device", lambda: foci.Additive(elsewhere(ones(8))), "weight must be on cpu .* got meta"),
    ("matrix", lambda: foci.General(ones(8, 7)), r"of shape \(8, 8\) or \(4, 8, 8\), got torch.float32 \(8, 7\)"),
    ("no matrix", lambda: foci.General(None), r"of shape \(8, 8\) or \(4, 8, 8\), got NoneType"),
    ("cosine", lambda: foci.Cosine(ones(3)), r"of shape \(\) or \(4,\), got torch.float32 \(3,\)"),
    ("cosine word", lambda: foci.Cosine("3"), "scale must be a finite number or a tensor .*, got '3'"),
]

BIASES: list[tuple[str, Callable[[], Any], str]] = [
    ("bool", lambda: ones(5, 7).bool(), r"float tensor, got a torch.bool tensor \(a bool tensor goes to mask=\)"),
    ("whole numbers", lambda: ints(5, 7), r"or a float tensor, got a torch.int64 tensor"),
    ("a number", lambda: 1.0, r"bias must be a Bias such as foci.ALiBi\(\) or a float tensor, got float"),
    ("a class", lambda: foci.ALiBi, r"bias must be a Bias such as foci.ALiBi\(\) or a float tensor, got type"),
    ("shape", lambda: ones(7, 5), r"bias must broadcast to \(2, 4, 5, 7\), got shape \(7, 5\)"),
    ("device", lambda: elsewhere(ones(5, 7)), "bias must be on cpu like the query, got meta"),
    ("slopes", lambda: foci.ALiBi(ones(3)), r"slopes must be .* shape \(4,\), got torch.float32 \(3,\)"),
    ("slopes list", lambda: foci.ALiBi([1, 2, 3, 4]), r"slopes must be .* shape \(4,\), got list"),
    ("table", lambda: foci.Buckets(ones(8), True, 9), r"a tensor \(buckets, H\), got torch.float32 \(8,\)"),
    ("table list", lambda: foci.Buckets([[1.0]], True, 9), r"a tensor \(buckets, H\), got list"),
    ("table heads", lambda: foci.Buckets(ones(8, 3), True, 9), r"shape \(8, 4\), got torch.float32 \(8, 3\)"),
    ("buckets", lambda: foci.Buckets(ones(3, 4), True, 9), r"at least 4 buckets, got torch.float32 \(3, 4\)"),
    ("near", lambda: foci.Buckets(ones(8, 4), True, 2), "max_distance must be an int above 2, .*, got 2"),
    ("broken", lambda: foci.Buckets(ones(8, 4), False, 9.5), r"max_distance must be an int above 4, .*, got 9.5"),
    ("even", lambda: foci.Relative(ones(4, 8)), r"a table of 2 clip \+ 1 rows, got torch.float32 \(4, 8\)"),
    ("keys list", lambda: foci.Relative([[1.0]]), r"a table of 2 clip \+ 1 rows, got list"),
    (
        "keys width",
        lambda: foci.Relative(ones(5, 7)),
        r"of shape \(5, 8\) or \(4, 5, 8\), got torch.float32 \(5, 7\)",
    ),
    ("values rows", lambda: foci.Relative(ones(5, 8), ones(3, 6)), r"\(5, 6\) or \(4, 5, 6\), got .* \(3, 6\)"),
    ("values width", lambda: foci.Relative(ones(5, 8), ones(5, 8)), r"\(5, 6\) or \(4, 5, 6\), got .* \(5, 8\)"),
]


def refused(arguments: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        foci.attention(**(GOOD | arguments()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in INPUTS], ids=[case[0] for case in INPUTS])
def test_a_wrong_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    refused(lambda: arguments, message)


@pytest.mark.parametrize(("build", "message"), [case[1:] for case in MASKS], ids=[case[0] for case in MASKS])
def test_a_wrong_mask_is_refused(build: Callable[[], Any], message: str) -> None:
    refused(lambda: {"mask": build()}, message)


@pytest.mark.parametrize(("build", "message"), [case[1:] for case in SCORES], ids=[case[0] for case in SCORES])
def test_a_wrong_score_is_refused(build: Callable[[], Any], message: str) -> None:
    refused(lambda: {"score": build()}, message)


@pytest.mark.parametrize(("build", "message"), [case[1:] for case in BIASES], ids=[case[0] for case in BIASES])
def test_a_wrong_bias_is_refused(build: Callable[[], Any], message: str) -> None:
    refused(lambda: {"bias": build()}, message)


@pytest.mark.parametrize(
    "headless", [HEADLESS, {name: tensor[0] for name, tensor in HEADLESS.items()}], ids=["3d", "2d"]
)
@pytest.mark.parametrize(
    "arguments",
    [
        {"bias": foci.ALiBi()},
        {"bias": foci.Buckets(ones(8, 1), True, 9)},
        {"bias": foci.Relative(ones(1, 5, 8))},
        {"score": foci.Additive(ones(1, 8))},
        {"score": foci.General(ones(1, 8, 8))},
        {"sink": ones(1)},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_per_head_arguments_need_heads(headless: dict[str, Tensor], arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"which is per head, got [23]-D|must be a float tensor of shape"):
        foci.attention(**headless, **arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dropout": None},
        {"key": Q.double()},
        {"query": Q.int(), "key": Q.int(), "value": Q.int()},
        {"value": elsewhere(Q)},
        {"key": Q[:, :3], "value": Q[:, :3]},
        {"key": Q[..., :5]},
        {"value": Q[:, :, :4]},
        {"query": Q.tolist()},
        {"mask": "causal"},
        {"backend": ""},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_the_plain_call_path_refuses_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"must|expected|compares"):
        foci.attention(**({"query": Q, "key": Q, "value": Q} | wrong))


def test_a_named_backend_is_used_or_refuses_with_every_reason() -> None:
    with pytest.raises(ValueError, match=r"backend 'sdpa' refuses this call: .*softcap.*; .*window\(1\)"):
        foci.attention(Q, K, V, mask=foci.window(1), score=foci.Dot(softcap=1.0), backend="sdpa")


def test_without_a_backend_the_error_shows_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        if backend is not reference and backend is not sdpa:
            monkeypatch.setattr(backend, "refuses", lambda call: ["not today"])
    with pytest.raises(ValueError, match="no backend supports this call") as caught:
        foci.attention(Q, K, V, mask=foci.window(1))
    reasons = dict(line.split(maxsplit=1) for line in str(caught.value).splitlines()[1:])
    assert "the mask window(1) would have to be built" in reasons["sdpa"]
    assert reasons["blocked"] == "not today"


@pytest.mark.parametrize("wrong", [{"key": K[..., :5]}, {"mask": ones(7, 5).bool()}, {"sink": ones(3)}, {"dropout": 2}])
def test_plan_refuses_the_same_arguments_as_attention(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got") as of_call:
        foci.attention(**(GOOD | wrong))
    with pytest.raises(ValueError, match="got") as of_plan:
        foci.plan(**(GOOD | wrong))
    assert str(of_call.value) == str(of_plan.value)


def test_merge_refuses_parts_of_different_shapes() -> None:
    with pytest.raises(ValueError, match=r"a list of one or more \(out, lse\) pairs, got list"):
        foci.merge([])
    with pytest.raises(ValueError, match=r"got \(2, 3\) with \(3,\) after \(2, 3\)"):
        foci.merge([(ones(2, 3), ones(3))])
    with pytest.raises(ValueError, match=r"got \(2, 4\) with \(2,\) after \(2, 3\)"):
        foci.merge([(ones(2, 3), ones(2)), (ones(2, 4), ones(2))])
