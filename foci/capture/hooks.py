"""Forward hooks of a watch block: they do nothing after it, and are neither copied nor pickled with the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from foci.capture.naming import HookedModule
from foci.runtime.tracing import is_recomputation

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# Where a module keeps its forward hooks and their options, each by the number of the hook.
HOOK_DICTS = [name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))]


def hook_runs(block: ExitStack, recorder: Recorder, hooked: Iterable[HookedModule]) -> None:
    """Reports the runs, inputs and token ids of modules to the recorder until the block closes.

    The hooks are put into the dicts of the modules, all under one number: registering each of them takes as long as
    many of these modules run.
    """
    modules = recorder.layer_names.modules
    number = RemovableHandle(OrderedDict()).id
    found = [(modules[each.name], each) for each in hooked]
    found = [(module, each) for module, each in found if each.has_forward or "forward" in vars(module)]
    block.callback(remove_hooks, found, number)
    for module, each in found:
        module._forward_pre_hooks[number] = RunHook(recorder, module, each, block)
        module._forward_pre_hooks_with_kwargs[number] = True
        if each.is_outer:
            module._forward_hooks[number] = ModuleHook(recorder, module, make_leave_action(recorder, each.name))
            module._forward_hooks_always_called[number] = True


def make_leave_action(recorder: Recorder, name: str) -> Callable[..., None]:
    def leave(module: nn.Module, args: Any, out: Any) -> None:
        recorder.leave_module(name)

    return leave


def remove_hooks(found: Iterable[tuple[nn.Module, HookedModule]], number: int) -> None:
    for module, each in found:
        module._forward_pre_hooks.pop(number, None)
        module._forward_pre_hooks_with_kwargs.pop(number, None)
        if each.is_outer:
            module._forward_hooks.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)


def hook_module(
    block: ExitStack, recorder: Recorder, module: nn.Module, action: Callable[..., None], before: bool, **options: Any
) -> None:
    """Calls `action` before or after each forward of a module until the block closes."""
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    block.callback(register(ModuleHook(recorder, module, action), **options).remove)


class ModuleHook:
    """A forward hook that does nothing once its watch block is closed."""

    def __init__(self, recorder: Recorder, module: nn.Module, action: Callable[..., None]) -> None:
        # Not the module itself: the two would be a reference cycle.
        self.recorder, self.module_id, self.action = recorder, id(module), action

    def __call__(self, *call: Any) -> None:
        if self.recorder.is_open:
            self.action(*call)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Callable[..., None]:
        if self.module_id in memo:
            memo.setdefault(CopiedModules, CopiedModules()).modules.append(memo[self.module_id])
        return ignore_call

    def __reduce__(self) -> NoReturn:
        raise TypeError("model must be pickled before or after its foci.watch block, got one with the block's hooks")


class RunHook(ModuleHook):
    """The hook before the runs of a module; `block` closes hooks that are added meanwhile."""

    def __init__(self, recorder: Recorder, module: nn.Module, hooked: HookedModule, block: ExitStack) -> None:
        self.recorder, self.module_id, self.hooked, self.block = recorder, id(module), hooked, block
        self.has_run = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.recorder
        if not recorder.is_open or (recorder.repeats_pass and self.has_run):
            return
        if get_ident() != recorder.thread:
            return
        self.has_run = not self.hooked.is_embedding
        name, _, is_outer, is_attention, is_embedding, parameters = self.hooked
        if not is_recomputation():
            if is_outer:
                recorder.enter_module(name)
            elif is_attention:
                recorder.count_run(name)
            if is_embedding and args and isinstance(args[0], Tensor):
                recorder.add_embedded_ids(args[0])
        # The inputs of a recomputation are other tensors.
        if parameters:
            recorder.module_inputs.note(name, parameters, module, args, kwargs, self.block, recorder)


def ignore_call(*call: Any) -> None:
    """Stands for a hook in a copied module until the copy is complete."""


class CopiedModules:
    """Modules whose copies have placeholders for hooks.

    `copy.deepcopy` holds it in its memo, which ends when the copy is complete: then the placeholders are removed.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def __del__(self) -> None:
        for module in self.modules:
            dicts = [vars(module).get(name, {}) for name in HOOK_DICTS]
            numbers = [number for hooks in dicts for number, hook in hooks.items() if hook is ignore_call]
            for hooks in dicts:
                for number in numbers:
                    hooks.pop(number, None)
