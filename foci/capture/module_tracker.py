"""ModuleTracker: which modules of a watched model run on the thread of the block, in which pass, and which attend."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FrameType

import torch
from torch import nn

from foci.capture.model_structure import read_structure
from foci.capture.naming import LayerName, LayerNames, is_inside
from foci.runtime.tracing import is_recomputation

# The code of a module's call: on the Python stack it shows which modules are running.
MODULE_CALL = nn.Module._call_impl.__code__


class ModuleTracker:
    """The running modules of a model, its passes, and the runs and attention calls of its modules.

    Hooks call `enter_module`, `leave_module` and `count_run`: only modules where a pass may begin and attention modules
    have them. A pass is a run of the outermost module; `begin_pass` and `end_pass` are called around it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.structure, self.modules = read_structure(model)
        named = zip(self.structure.layer_names, self.modules, strict=True)
        self.layer_names = LayerNames(named, self.structure.layout)
        self.names_by_id = self.structure.names_by_id
        self.thread = threading.get_ident()
        # The number of the running or last pass, and the attention calls that each module made in it.
        self.pass_number = 0
        self.calls_in_pass: Counter[str] = Counter()
        self.calls = 0
        self.run_counts: Counter[str] = Counter()
        self.attending_modules: dict[str, None] = {}
        self.softmax_modules: set[str] = set()
        self._unseen_reasons: dict[str, str] = {}
        self._entered: list[str] = []

    def running_modules(self) -> Iterator[str]:
        """The names of the watched modules that are running on this thread, innermost first.

        Read from the Python stack when it is needed: hooks would cost time at every module.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                module = frame.f_locals["self"]
                if id(module) in self.names_by_id:
                    yield self.names_by_id[id(module)]
                elif isinstance(module, torch.jit.ScriptModule):
                    return
            frame = frame.f_back

    def find_running_module(self) -> str | None:
        """The name of the innermost running module; None if it is not of the watched model, or is a scripted one."""
        name = next(self.running_modules(), None)
        if name is not None and name not in self.run_counts and self.is_counting():
            # It has no hooks.
            self.enter_pass()
        return name

    def find_calling_module(self) -> str | None:
        """What `find_running_module` returns for a call that a watched module makes itself, in fewer steps.

        None as well where a tensor subclass may make the call for another one.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            code = frame.f_code
            if code is MODULE_CALL:
                return self.names_by_id.get(id(frame.f_locals["self"]))
            if code.co_name == "__torch_function__":
                return None
            frame = frame.f_back
        return None

    def is_counting(self) -> bool:
        """Whether what runs now counts: on the thread of the block, and not a recomputation."""
        return threading.get_ident() == self.thread and not is_recomputation()

    def enter_pass(self) -> None:
        """Begins a pass, unless one is running."""
        if not self._entered:
            self.begin_pass()
            self.pass_number += 1
            self.calls_in_pass.clear()

    def begin_pass(self) -> None:
        """Called before a pass."""

    def end_pass(self) -> None:
        """Called after a pass."""

    def enter_module(self, name: str) -> None:
        """Notes that a module starts where it counts; the outermost one begins a new pass."""
        self.count_run(name)
        self._entered.append(name)

    def leave_module(self, name: str) -> None:
        """Notes that a module ends; one that was already running when the block began was never entered."""
        if self._entered and self.is_counting():
            if self._entered[-1] == name:
                self._entered.pop()
            elif name in self._entered:
                del self._entered[len(self._entered) - 1 - self._entered[::-1].index(name) :]
            if not self._entered:
                self.end_pass()

    def count_run(self, name: str) -> None:
        """Notes that an attention module starts where it counts; called on its own, it is a pass."""
        if not self._entered:
            self.enter_pass()
        # Faster than +=, which Counter implements in Python for new names.
        self.run_counts[name] = self.run_counts.get(name, 0) + 1

    def count_call(self, name: str) -> None:
        """Counts an attention call of a module, recorded or not."""
        self.calls += 1
        self.calls_in_pass[name] = self.calls_in_pass.get(name, 0) + 1
        self.attending_modules[name] = None

    def has_attended(self, name: str) -> bool:
        """Whether a module, or one inside it, made an attention call, recorded or not."""
        return name in self.attending_modules or any(is_inside(each, name) for each in self.attending_modules)

    def name_layers(self, layer_names: Mapping[str, LayerName]) -> None:
        """Sets layer names by module, in place of those derived from the module names."""
        self.layer_names.set(layer_names)

    def mark_unseen(self, name: str, reason: str) -> None:
        """Notes why an attention module cannot be recorded; `Record.unseen` lists it."""
        self._unseen_reasons.setdefault(name, reason)

    def list_unseen(self) -> list[str]:
        """The attention modules that ran and were not recorded, each with the reason."""
        reasons = dict(self._unseen_reasons)
        for name, module in self.layer_names.attention_modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                reasons.setdefault(name, "it is a scripted module and runs outside Python")
            elif name in self.run_counts and not self.has_attended(name) and not self._is_inside_attending(name):
                reasons.setdefault(name, self._unseen_reason(name))
        return [f"{name}: {reason}" for name, reason in reasons.items()]

    def _is_inside_attending(self, name: str) -> bool:
        return any(is_inside(name, each) for each in self.attending_modules)

    def _unseen_reason(self, name: str) -> str:
        if any(each == name or is_inside(each, name) for each in self.softmax_modules):
            return "it computes its own softmax (eager attention), so no call has its queries and keys"
        processor = getattr(self.layer_names.modules.get(name), "processor", None)
        if "Linear" in type(processor).__name__:
            return "it is linear attention, which has no softmax and no weights"
        return "it ran without an attention call that foci recognizes"

    def forget_model(self) -> None:
        """Keeps the names only, so that the model can be freed."""
        self.modules, self.names_by_id = [], {}
        self.layer_names.forget_modules()
