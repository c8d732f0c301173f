"""Calls of a kind that our kernels ran before: a few comparisons, then the launch.

A kind is the layout of the inputs, the numbers of the score and of the mask, and the layout of the mask's tensors. The
checks of a call depend on nothing else, so they run for its first call only. What the tensors of a mask hold is checked
by the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call, prepare_call
from foci.backends import triton
from foci.gpu import attention
from foci.gpu.attention.repeated_call import RepeatedCall
from foci.gpu.compilation import prepare_compiler
from foci.masks.kernel_inputs import describe_mask
from foci.runtime.tracing import is_autocast_enabled, is_inside_torch_func, is_vmapped
from foci.scores import Dot

ChooseBackend = Callable[[Call, str | None], ModuleType]

# A full cache is cleared, so that lengths that never recur do not stay in it.
MAX_REPEATED_CALLS = 1024

# None for kinds that another backend runs.
REPEATED_CALLS: dict[Hashable, RepeatedCall | None] = {}


def run_repeated_call(q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any, choose: ChooseBackend) -> Tensor | None:
    """Runs a call without gradients if its kind is known to run in our kernels; None leaves it to the full path.

    The first call of a kind asks `choose` for the backend.
    """
    if type(score) is not Dot or not is_eager_inference(q, k, v):
        return None
    masks: dict[str, Tensor] = {}
    structure = None if mask is None else describe_mask(mask, masks)
    if mask is not None and structure is None:
        return None
    device = q.device
    kind: list[Hashable] = [
        structure, score.scale, score.softcap, device, q.dtype, k.dtype, v.dtype,
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
    ]  # fmt: skip
    for x in masks.values():
        if x.device != device or not x.is_contiguous():
            return None
        kind += [x.shape, x.dtype]
    key = tuple(kind)
    try:
        known = REPEATED_CALLS[key]
    except KeyError:
        return run_first_call(key, q, k, v, score, mask, masks, choose)
    if known is None or (device.type == "cuda" and device.index != torch.cuda.current_device()):
        return None
    return known.run(q, k, v, masks)


def is_eager_inference(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing but the forward on plain CUDA tensors is wanted: no gradients, transforms, modes or compilers."""
    return (
        type(q) is type(k) is type(v) is Tensor
        and q.is_cuda
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and not torch.compiler.is_compiling()
        and not is_inside_torch_func()
        and not is_vmapped(q)
        and not torch._C._len_torch_dispatch_stack()
        and not is_autocast_enabled("cuda")
    )


def run_first_call(
    key: Hashable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Dot,
    mask: Any,
    masks: dict[str, Tensor],
    choose: ChooseBackend,
) -> Tensor | None:
    """Checks and runs the first call of a kind, and remembers how. `masks`: the tensors of the mask."""
    if len(REPEATED_CALLS) >= MAX_REPEATED_CALLS:
        REPEATED_CALLS.clear()
    call = prepare_call(q, k, v, score, mask, None, None, None, 0.0, needs_lse=False)
    is_ours = choose(call, None) is triton and triton.find_launcher(call) is attention
    if not is_ours or not attention.is_repeatable(call):
        REPEATED_CALLS[key] = None
        return None
    prepare_compiler()
    repeated = RepeatedCall(call)
    if not repeated.mask_tensors <= masks.keys():
        # The mask was converted to other tensors, which a later call would have to compute.
        REPEATED_CALLS[key] = None
    elif repeated.launches:
        REPEATED_CALLS[key] = repeated
    return call.restore_shape(repeated.first_output())
