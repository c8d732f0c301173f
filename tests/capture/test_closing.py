"""A watch block leaves nothing on the model: after Ctrl+C at any moment, in copies of the model, in pickles."""

import copy
import gc
import io
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foci
from foci.capture.recorder import active_recorders
from foci.runtime.interception import KEY, is_key_included
from foci.runtime.interrupts import delay_interrupts
from tests.capture.models import Stack

IDS = torch.tensor([[7, 3, 9, 3, 7, 3]])
HOOK_DICTS = [name for name in nn.Module().__dict__ if "_forward" in name]
INTERRUPTED_FILES = ("capture/watch.py", "capture/hooks.py", "runtime/interrupts.py", "contextlib.py", "utils/hooks.py")


def state_left(model: nn.Module) -> tuple[int, int, int]:
    """The number of hooks on the model, whether attention calls are intercepted, and the number of active recorders."""
    hooks = sum(len(getattr(module, name)) for module in model.modules() for name in HOOK_DICTS)
    is_patched = F.has_torch_function is not torch.overrides.has_torch_function  # type: ignore[attr-defined]
    return hooks, is_key_included(KEY) + is_patched, len(active_recorders())


@contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """Press Ctrl+C at the nth line that runs in INTERRUPTED_FILES; counts the lines."""
    counted = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(
            ("capture/watch.py", "capture/hooks.py", "contextlib.py", "utils/hooks.py")
        ):
            return None
        if event == "line":
            counted[0] += 1
            if counted[0] == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)


def close_with_interrupt(model: nn.Module, line: int) -> tuple[bool, int]:
    """Whether closing a block raised KeyboardInterrupt, and the number of lines it ran."""
    opened = foci.watch(model)
    opened.__enter__()
    model(IDS)
    was_interrupted = False
    with interrupt_at(line) as counted:
        try:
            opened.__exit__(None, None, None)
        except KeyboardInterrupt:
            was_interrupted = True
    return was_interrupted, counted[0]


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_of_closing_leaves_nothing(step: int) -> None:
    model = Stack(1)
    expected = model(IDS)
    lines = close_with_interrupt(model, 0)[1]
    assert lines > 50
    for line in range(1, lines + 1, step):
        was_interrupted, _ = close_with_interrupt(model, line)
        assert was_interrupted, line
        assert state_left(model) == (0, 0, 0), line
        assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize("step", [67, pytest.param(3, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_of_a_block_leaves_nothing(step: int) -> None:
    model = Stack(1)
    with interrupt_at(0) as counted, foci.watch(model):
        model(IDS)
    for line in range(1, counted[0] + 1, step):
        with pytest.raises(KeyboardInterrupt), interrupt_at(line), foci.watch(model):
            model(IDS)
        # An interrupt after the block was opened and before it began: the traceback held it.
        if state_left(model) != (0, 0, 0):
            gc.collect()
        assert state_left(model) == (0, 0, 0), line


def test_the_interrupt_is_raised_after_the_delay_by_the_handler_of_the_caller() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with delay_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert received == []
        assert received == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt), delay_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_blocks_close_in_other_threads() -> None:
    model, left = Stack(1), []

    def run() -> None:
        with foci.watch(model):
            model(IDS)
        left.append(state_left(model))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert left == [(0, 0, 0)]


def test_a_hook_that_is_left_behind_does_nothing() -> None:
    model = Stack(2)
    with foci.watch(model) as seen:
        model(IDS)
        left = {module: {name: dict(getattr(module, name)) for name in HOOK_DICTS} for module in model.modules()}
    for module, dicts in left.items():
        for name, hooks in dicts.items():
            getattr(module, name).update(hooks)
    before = repr(seen), len(seen.labels["input"])
    expected = model(IDS)
    # Not all of them: an embedding's hook without that of its module.
    model._forward_pre_hooks.clear()
    model.embed._forward_pre_hooks.popitem(last=False)
    assert torch.equal(model(IDS), expected)
    assert (repr(seen), len(seen.labels["input"])) == before


def test_a_copy_made_inside_a_block_has_no_hooks() -> None:
    model = Stack(2)
    mine = model.blocks[0].register_forward_hook(lambda *_: None)
    with foci.watch(model) as seen:
        whole, part = copy.deepcopy(model), copy.deepcopy([model.blocks[1]])[0]
        whole(IDS)
        model(IDS)
    assert (seen.calls, len(seen.layers)) == (2, 2)
    assert state_left(whole)[0] == 1
    assert state_left(part)[0] == 0
    mine.remove()
    assert state_left(model) == (0, 0, 0)
    assert torch.equal(whole(IDS), model(IDS))
    with foci.watch(whole) as again:
        whole(IDS)
    assert len(again.layers) == 2


@pytest.mark.parametrize("write", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_pickling_inside_a_block_is_refused_in_words(write: Any) -> None:
    model = Stack(1)
    with foci.watch(model) as seen:
        model(IDS)
        with pytest.raises(
            TypeError, match=r"^model must be pickled before or after its foci.watch block, got one with"
        ):
            write(model)
        torch.save(model.state_dict(), io.BytesIO())
    assert len(seen.layers) == 1
    pickle.dumps(model)
