"""Forward hooks of a watch block: they do nothing after it, and are neither copied nor pickled with the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder

# Where a module keeps its forward hooks and their options, each by the number of the hook.
HOOK_DICTS = [name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))]


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
