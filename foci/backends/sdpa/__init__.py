"""PyTorch's fused kernels: the fastest one of the device, with the log-sum-exp where it is needed.

padding: pads tensors to the widths that the kernels take, and passes gradients of the log-sum-exp through them.
cpu: the flash kernel for the CPU.
cuda: the cuDNN, flash and efficient kernels.

Only this package calls the private operators that return the log-sum-exp. It also corrects what they leave to the
caller: the shape of the log-sum-exp, -inf for fully masked rows, equal widths, contiguous rows, no empty tensors.

B batch, H heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.arguments import FLOAT_DTYPES, HALF_DTYPES, Call
from foci.backends import cpu_c, triton
from foci.backends.sdpa import cpu, cuda
from foci.backends.sdpa.padding import needs_backward
from foci.biases import DenseBias
from foci.masks.base import DenseMask, Mask
from foci.masks.kinds import Causal, Padding, causal
from foci.runtime.tracing import is_forward_differentiated, is_inside_torch_func, is_traced, is_vmapped
from foci.scores import Dot

NAME = "sdpa"


def refuses(call: Call) -> list[str]:
    if is_supported_at_once(call):
        return []
    reasons = []
    if not call.score.is_dot_product:
        reasons.append(f"the score {type(call.score).__name__} is not a dot product")
    elif isinstance(call.score, Dot) and call.score.softcap is not None:
        reasons.append("the fused kernels do not support softcap")
    if call.mask is not None and causal_alignment(call) is None and mask_without_expansion(call) is None:
        reasons.append(f"the mask {call.mask!r} would have to be built as a dense tensor")
    reasons += bias_refusals(call)
    return reasons + sdpa_device_refusals(call)


def refuses_by_default(call: Call) -> list[str]:
    """Why it is not chosen unless the caller names it."""
    if call.sizes.device.type == "cpu" and cpu_c.is_faster_than_sdpa(call):
        return ["our C kernel is faster for this call; use it with backend='sdpa'"]
    if is_slower_than_triton(call) and not triton.refuses(call):
        return ["our kernels are faster with a dense mask or bias or a sink; use it with backend='sdpa'"]
    return []


def is_slower_than_triton(call: Call) -> bool:
    """Whether the fused kernels would read an expanded mask or bias, or leave a sink to more operations."""
    is_dense = isinstance(call.mask, DenseMask) or isinstance(call.bias, DenseBias)
    is_half = call.sizes.device.type == "cuda" and call.q.dtype in HALF_DTYPES
    return is_half and (is_dense or call.sink is not None)


def run_plain_call(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor | None:
    """Runs the most common call, (B, H, T, D) with or without `causal`, after a few comparisons.

    Returns None for any other call, which then takes the full path: checks, choice of a backend, errors.
    """
    if not is_plain_call(q, k, v, mask):
        return None
    if q.is_cuda:
        is_fast = k.is_cuda and v.is_cuda and cuda.is_default_kernel_fastest(q, k, v, mask is not None)
    else:
        is_fast = q.is_cpu and k.is_cpu and v.is_cpu and not cpu_c.is_large(q, k)
    return F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None) if is_fast else None


def run_plain_call_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, takes_large: bool = False
) -> tuple[Tensor, Tensor] | None:
    """The same with the log-sum-exp and without gradients, on a CPU or by cuDNN; None for any other call.

    `takes_large`: also run calls on a CPU that our own kernel runs faster.
    """
    if not is_plain_call(q, k, v, mask) or needs_backward(q, k, v) or is_inside_torch_func():
        return None
    if q.is_cuda and k.is_cuda and v.is_cuda:
        if torch.is_autocast_enabled("cuda") or not cuda.is_default_kernel_fastest(q, k, v, mask is not None):
            return None
        return cuda.run_cudnn(q, k, v, mask is not None)
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or torch.is_autocast_enabled("cpu"):
        return None
    if not takes_large and cpu_c.is_large(q, k):
        return None
    return cpu.run_plain(q, k, v, mask is not None)


def is_plain_call(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> bool:
    """Whether the call is one of equal widths, without or with a square causal mask, and not traced."""
    if not (mask is None or mask is causal) or not (type(q) is type(k) is type(v) is Tensor):
        return False
    shape, key_shape = q.shape, k.shape
    return (
        len(shape) == 4
        and key_shape == v.shape
        and (shape == key_shape or (mask is None and shape[:2] == key_shape[:2] and shape[3:] == key_shape[3:]))
        and q.dtype == k.dtype == v.dtype
        and q.dtype in FLOAT_DTYPES
        and 0 not in shape
        and 0 not in key_shape
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and not torch.compiler.is_compiling()
        and not is_vmapped(q)
        and not is_forward_differentiated()
    )


def is_supported_at_once(call: Call) -> bool:
    """Whether the fused kernels surely support the call.

    Decided first and cheaply, because small models make it at every step.
    """
    return (
        type(call.score) is Dot
        and call.score.softcap is None
        and call.bias is None
        and not call.dropout
        and (call.mask is None or causal_alignment(call) is not None)
        and not sdpa_device_refusals(call)
    )


def bias_refusals(call: Call) -> list[str]:
    if call.bias is None:
        return []
    if not isinstance(call.bias, DenseBias):
        return [f"the bias {type(call.bias).__name__} would have to be built as a dense tensor"]
    reasons = []
    if call.bias.entries.requires_grad and torch.is_grad_enabled():
        reasons.append("the bias needs a gradient")
    if call.mask is not None:
        reasons.append("a bias together with a mask is not supported")
    if call.sizes.device.type == "cuda" and bias_dtype(call, call.bias) != call.q.dtype:
        dtypes = (f"{dtype}".removeprefix("torch.") for dtype in (call.bias.entries.dtype, call.q.dtype))
        reasons.append("the bias would be rounded from {} to {}".format(*dtypes))
    return reasons


def sdpa_device_refusals(call: Call) -> list[str]:
    if call.is_vmapped:
        return ["torch.func.vmap is not supported: pass the batch dimension to the call instead"]
    if not torch.compiler.is_compiling() and is_forward_differentiated():
        return ["the fused kernels do not support forward-mode differentiation"]
    if call.needs_lse and call.is_transformed:
        return ["the log-sum-exp is not available inside torch.func transforms"]
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return ["query, key or value is empty"]
    if isinstance(call.score, Dot) and call.score.scale is not None and call.score.scale <= 0:
        # They multiply the -inf of masked entries, or the largest product, by the scale.
        return [f"the fused kernels need a positive scale, got {call.score.scale}"]
    device = call.sizes.device.type
    if device == "cuda":
        masked = mask_without_expansion(call) is not None or call.bias is not None
        return cuda.kernel_refusals(call, causal_alignment(call) or "unmasked", masked)
    if device != "cpu":
        return [f"there is no fused kernel for {device}"]
    return ["dropout on a CPU would build the whole matrix"] if call.dropout else []


def causal_alignment(call: Call) -> str | None:
    """How the kernel's causal flag expresses the mask; None where it cannot.

    "unmasked": no key is masked. "square": causal on a square matrix. "bottom_right": causal with the last query at the
    last key; CUDA's flash kernel defines its flag this way, and on a CPU the keys are split into a fully visible part
    and a square causal part.
    """
    mask = call.mask
    if mask is None:
        return "unmasked"
    if not isinstance(mask, Causal) or (mask.offset is None and call.positions is not None):
        return None
    queries, keys = call.sizes.queries, call.sizes.keys
    offset = keys - queries if mask.offset is None else mask.offset
    if offset >= keys - 1:
        return "unmasked"
    if offset != keys - queries:
        return None
    if queries == keys:
        return "square"
    return "bottom_right" if call.sizes.device.type == "cuda" or queries < keys else None


def mask_without_expansion(call: Call) -> Mask | None:
    """Returns the mask if it is a dense tensor or has one row per sequence, so that it need not be expanded to n x n.

    Padding on CUDA is left to our own kernels, which skip the padded keys.
    """
    row = isinstance(call.mask, Padding) and call.sizes.device.type != "cuda"
    return call.mask if row or isinstance(call.mask, DenseMask) else None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    scale, alignment, mask = (
        dot.score.factor(dot.q.shape[-1]),
        causal_alignment(call) or "unmasked",
        build_attn_mask(dot),
    )
    if torch.compiler.is_compiling():
        # torch.compile does not accept one tensor as two inputs of an autograd function, as where query is key.
        dot = replace(dot, q=dot.q.view_as(dot.q), k=dot.k.view_as(dot.k))
    if call.sizes.device.type == "cuda":
        out, lse = cuda.run(dot, scale, alignment, mask)
    else:
        out, lse = cpu.run(dot, scale, alignment, mask)
        if mask is not None and may_have_nan(out):
            out, lse = cpu.run(zero_masked_keys(dot, mask), scale, alignment, mask)
    return (out, lse) if mask is None else clear_masked_rows(out, lse, mask)


def may_have_nan(out: Tensor) -> bool:
    """Whether the output may hold NaN, judged by its sum, which is cheap."""
    if is_traced(out) or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return False
    return bool(out.detach().sum().isnan())


def zero_masked_keys(call: Call, mask: Tensor) -> Call:
    """Sets fully masked keys and values, such as uninitialized padding, to zero.

    The kernel adds -inf to their logits and multiplies their values by 0, which leaves NaN and infinity as they are.
    """
    seen = (mask != -torch.inf).any(-2).expand(-1, -1, call.k.shape[2])
    if seen.shape[1] not in {1, call.k.shape[1]}:
        # Heads that share a key/value head: a key that one of them sees stays.
        seen = seen.unflatten(1, (call.k.shape[1], call.group)).any(2)
    k, v = (torch.where(seen.unsqueeze(-1), t, 0.0) for t in (call.k, call.v))
    return replace(call, k=k, v=v)


def build_attn_mask(call: Call) -> Tensor | None:
    """Builds the float tensor that is added to the logits; None without bias and mask."""
    if isinstance(call.bias, DenseBias):
        # A part of a call takes the bias of its own sequences and heads.
        return call.bias.term(call.full_tile()).to(bias_dtype(call, call.bias))
    mask = mask_without_expansion(call)
    if mask is None:
        return None
    keys = call.k.shape[2]
    rows = slice(0, call.q.shape[2]) if isinstance(mask, DenseMask) else slice(0, 1)
    visible = mask.visible(call.tile(rows, slice(0, keys)))
    return torch.where(visible, 0.0, -torch.inf).to(call.q.dtype)


def bias_dtype(call: Call, bias: DenseBias) -> torch.dtype:
    """The dtype in which the kernels add the bias without rounding it: float32 if the inputs have half precision."""
    return torch.float32 if call.q.dtype in HALF_DTYPES and bias.entries.dtype != call.q.dtype else call.q.dtype


def clear_masked_rows(out: Tensor, lse: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Sets fully masked rows to output 0 and log-sum-exp -inf; the kernels leave other values there."""
    seen = (mask != -torch.inf).any(-1)  # NaN is not -inf: it must reach the output
    out = torch.where(seen.unsqueeze(-1), out, 0.0)
    return out, None if lse is None else torch.where(seen, lse, -torch.inf)
