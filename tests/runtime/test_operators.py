"""Operators are registered once, by whichever thread needs them first."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foci.runtime import operators

ROOT = Path(__file__).parents[2]


class Definition:
    """An operator that is registered slowly, or not at first."""

    name = "pretended"

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.is_registered = failures, False
        self.started, self.released = threading.Event(), threading.Event()

    def register(self) -> None:
        self.started.set()
        if self.failures:
            self.failures -= 1
            raise KeyboardInterrupt
        assert self.released.wait(60)
        self.is_registered = True


def test_a_second_thread_waits_until_the_operators_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = Definition()
    monkeypatch.setattr(operators, "UNREGISTERED", [definition])
    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(operators.register_operators)
        assert definition.started.wait(60)
        second = executor.submit(lambda: [operators.register_operators(), definition.is_registered][1])
        threading.Timer(0.1, definition.released.set).start()
        assert second.result(60)
        first.result(60)


def test_an_interrupted_registration_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = Definition(failures=1)
    definition.released.set()
    monkeypatch.setattr(operators, "UNREGISTERED", [definition])
    with pytest.raises(KeyboardInterrupt):
        operators.register_operators()
    operators.register_operators()
    assert definition.is_registered


@pytest.mark.parametrize("name", ["statistics", "entropy_backward"])
def test_programs_may_name_operators_before_any_is_traced(name: str) -> None:
    program = (
        "import torch, foci.call; from foci.runtime.operators import UNREGISTERED; assert UNREGISTERED;"
        "assert not hasattr(torch.ops.foci, 'unknown') and UNREGISTERED;"
        f"found = torch.ops.foci.{name}.default; assert not UNREGISTERED; print(found.name(), found.__module__)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.split() == [f"foci::{name}", "torch._ops.foci"], found.stderr[-2000:]
