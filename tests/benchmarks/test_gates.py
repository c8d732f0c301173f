"""The gates of the benchmarks are fed wrong answers: each must be stopped."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import foci

FOLDER = str(Path(__file__).parent.parent.parent / "benchmarks")
CPU = torch.device("cpu")


def module(name: str) -> ModuleType:
    """A script of the benchmarks; they import each other from their own folder."""
    sys.path.insert(0, FOLDER)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(FOLDER)


gates, peers, dense, timing, table = (module(name) for name in ("gates", "peers", "dense", "timing", "table"))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def late_row_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    right = causal(q, k, v)
    return torch.cat([right[:, :, :-1], right[:, :, -1:] * 1.01], dim=2)


def not_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k, v) * torch.tensor([1.0] * 15 + [torch.nan])


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "no mask": F.scaled_dot_product_attention,
    "another scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.251),
    "bfloat16 inside": lambda q, k, v: causal(q.bfloat16(), k.bfloat16(), v.bfloat16()).float(),
    "one row": late_row_off,
    "nan": not_a_number,
}


@pytest.fixture
def gate() -> object:
    case = peers.Case("causal", 1, 2, 96, 16)
    return gates.Gate.of(case, *case.inputs(CPU, torch.float32))


def test_gate_passes_what_is_right(gate):
    gate.check_forward(causal)
    gate.check_backward(causal)


@pytest.mark.parametrize("name", WRONG)
def test_gate_stops_wrong_outputs(gate, name):
    with pytest.raises(gates.GateError, match="out is off"):
        gate.check_forward(WRONG[name])


@pytest.mark.parametrize("name", WRONG)
def test_gate_stops_wrong_gradients(gate, name):
    with pytest.raises(gates.GateError, match=r"d[qkv] is off"):
        gate.check_backward(WRONG[name])


def test_gate_stops_detached_keys(gate):
    with pytest.raises(gates.GateError, match="dk is off"):
        gate.check_backward(lambda q, k, v: causal(q, k.detach() + 0 * k, v))


@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents", "padding"])
def test_masks_of_all_contestants_agree(kind):
    case = peers.Case(kind, 2, 2, 64, 16, window=8)
    q, k, v = case.inputs(CPU, torch.float32)
    visible = case.visible(torch.arange(64))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(foci.attention(q, k, v, mask=case.mask(CPU)), expected)
    count = 64 * 64 if visible is None else visible.expand(2, 2, 64, 64).sum().item() // 4
    assert case.pairs(CPU) == 4 * count


@pytest.fixture(scope="module")
def truth() -> object:
    case = peers.Case("causal", 1, 4, 64, 16, kv_heads=2)
    return dense.Truth(case, *case.inputs(CPU, torch.float32))


def statistics_of(truth) -> dict[str, Tensor]:
    q, k = truth.q, truth.k
    return dense.eager(q, k, torch.zeros_like(k), truth.case.visible(torch.arange(64)), top=True)


def test_truth_passes_what_is_right(truth):
    found = statistics_of(truth)
    del found["out"]
    truth.check(found)


@pytest.mark.parametrize("name", ["entropy", "received", "picture", "top_values"])
def test_truth_stops_one_wrong_entry(truth, name):
    found = statistics_of(truth)
    wrong = found[name].clone()
    wrong.view(-1)[wrong.abs().argmax()] *= 1.001
    with pytest.raises(gates.GateError, match=name):
        truth.check({name: wrong})


def test_truth_stops_wrong_keys(truth):
    found = statistics_of(truth)
    values, keys = found["top_values"], found["top_keys"]
    with pytest.raises(gates.GateError, match="weight of a top key"):
        truth.check_keys((keys + 1) % 64, values)
    with pytest.raises(gates.GateError, match="twice"):
        truth.check_keys(keys[..., :1].expand(keys.shape), values)


def test_everybody_takes_turns():
    order: list[str] = []
    contestants = [timing.Contestant(name, lambda name=name: order.append(name)) for name in "abc"]
    samples = timing.take_turns(contestants, {"a": 4, "b": 4, "c": 2}, timing.CpuClock())
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4, "c": 2}
    assert "".join(order) == "ab" + "bca" + "ab" + "abc"


def test_an_error_is_a_result():
    def broken() -> None:
        raise RuntimeError("no kernel\nand a long story")

    contestants = [timing.Contestant("broken", broken), timing.Contestant("fine", lambda: torch.ones(2**18))]
    found = timing.compare(contestants, timing.CpuClock(), seconds=0.001)
    assert found["broken"] == "RuntimeError: no kernel"
    assert found["fine"].mib == pytest.approx(1.0)
    assert found["fine"].rounds >= 5


def test_table_keeps_losing_rows(tmp_path, capsys):
    rows = table.Table(CPU, ("case", "contestant", "ms", "note"), tmp_path / "new" / "rows.csv")
    rows.add(case="x", contestant="foci", ms=None, note="GATE FAILED: out is off")
    rows.add(case="x", contestant="sdpa", ms=1.23456)
    rows.print_table("times", ("case",), "ms", {})
    assert capsys.readouterr().out == "\ntimes\ncase    foci   sdpa\nx     failed  1.235\n"
    lines = (tmp_path / "new" / "rows.csv").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "case,contestant,ms,note",
        "x,foci,,GATE FAILED: out is off",
        "x,sdpa,1.235,",
    ]
    assert rows.has_failed_gate()
    with pytest.raises(ValueError, match="columns must be among"):
        rows.add(case="x", contestant="sdpa", seconds=1.0)
