"""PyTorch's fused kernels: the fastest one of the device, chosen deliberately, with the log-sum-exp where it is wanted.

The private operators that return the log-sum-exp are touched here only, and what they leave to the caller is put right
here once: its shape, -inf for rows that see nothing, equal widths, contiguous rows, no empty tensors.

B batch, H heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.arguments import FLOAT_DTYPES, HALF_DTYPES, Call
from foci.backends.sdpa import cpu, cuda
from foci.biases import DenseBias
from foci.masks.base import DenseMask, Mask
from foci.masks.kinds import Causal, Padding, causal
from foci.runtime.checks import is_traced
from foci.scores import Additive, Dot

NAME = "sdpa"


def refuses(call: Call) -> list[str]:
    if is_plain_call(call):
        return []
    reasons = []
    if isinstance(call.score, Additive):
        reasons.append("an additive score is not a dot product")
    elif isinstance(call.score, Dot) and call.score.softcap is not None:
        reasons.append("a softcap is not part of these kernels")
    if call.mask is not None and causal_kind(call) is None and as_dense_mask(call) is None:
        reasons.append(f"the mask {call.mask!r} would have to be built as a dense tensor")
    reasons += bias_refusals(call)
    return reasons + device_refusals(call)


def run_plain_call(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor | None:
    """The call that everybody makes, (B, H, T, D) with or without `causal`, answered after a handful of comparisons.

    None where anything is out of the ordinary: the whole way then checks it, serves it or says what is wrong.
    """
    if not (mask is None or mask is causal) or not (type(q) is type(k) is type(v) is Tensor):
        return None
    shape, key_shape = q.shape, k.shape
    usual = (
        len(shape) == 4
        and key_shape == v.shape
        and (shape == key_shape or (mask is None and shape[:2] == key_shape[:2] and shape[3:] == key_shape[3:]))
        and q.dtype == k.dtype == v.dtype
        and q.dtype in FLOAT_DTYPES
        and 0 not in shape
        and 0 not in key_shape
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
    )
    if not usual or torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(q):
        return None
    if q.is_cuda:
        served = k.is_cuda and v.is_cuda and cuda.is_default_kernel_fastest(q, k, v, mask is not None)
    else:
        served = q.is_cpu and k.is_cpu and v.is_cpu
    return F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None) if served else None


def is_plain_call(call: Call) -> bool:
    """The everyday call, decided without a look at anything else: this runs at every step of a small model."""
    return (
        type(call.score) is Dot
        and call.score.softcap is None
        and call.bias is None
        and not call.dropout
        and (call.mask is None or causal_kind(call) is not None)
        and not device_refusals(call)
    )


def bias_refusals(call: Call) -> list[str]:
    if call.bias is None:
        return []
    if not isinstance(call.bias, DenseBias):
        return [f"the bias {type(call.bias).__name__} would have to be built as a dense tensor"]
    reasons = []
    if call.bias.entries.requires_grad and torch.is_grad_enabled():
        reasons.append("a bias that needs a gradient")
    if call.mask is not None:
        reasons.append("a bias together with a mask")
    if call.extent.device.type == "cuda" and bias_dtype(call, call.bias) != call.q.dtype:
        dtypes = (f"{dtype}".removeprefix("torch.") for dtype in (call.bias.entries.dtype, call.q.dtype))
        reasons.append("a bias in {} would be rounded to {}".format(*dtypes))
    return reasons


def device_refusals(call: Call) -> list[str]:
    if call.mapped:
        return ["these kernels have no batching rule for torch.func.vmap: give the batch dimension to the call instead"]
    if call.needs_lse and call.transformed:
        return ["a log-sum-exp inside a transform of torch.func"]
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        return ["an empty tensor"]
    device = call.extent.device.type
    if device == "cuda":
        masked = as_dense_mask(call) is not None or call.bias is not None
        return cuda.kernel_refusals(call, causal_kind(call) or "none", masked)
    if device != "cpu":
        return [f"there is no fused kernel for {device}"]
    return ["dropout: on a CPU it would build the matrix"] if call.dropout else []


def causal_kind(call: Call) -> str | None:
    """How the kernel's own causal flag serves the mask; None where it does not.

    "none": nothing is hidden. "equal": a square matrix. "last": the last query stands at the last key, which CUDA's
    flash kernel means by its flag, and which on a CPU is a part that everybody sees and a square one.
    """
    mask = call.mask
    if mask is None:
        return "none"
    if not isinstance(mask, Causal) or (mask.offset is None and call.positions is not None):
        return None
    queries, keys = call.extent.queries, call.extent.keys
    offset = keys - queries if mask.offset is None else mask.offset
    if offset >= keys - 1:
        return "none"
    if offset != keys - queries:
        return None
    if queries == keys:
        return "equal"
    return "last" if call.extent.device.type == "cuda" or queries < keys else None


def as_dense_mask(call: Call) -> Mask | None:
    """A mask that is a tensor already, or one row per sequence: handing it over builds nothing of size n x n.

    On CUDA the kernel that takes masks was measured four times as slow as FlexAttention on padding.
    """
    row = isinstance(call.mask, Padding) and call.extent.device.type != "cuda"
    return call.mask if row or isinstance(call.mask, DenseMask) else None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    scale, kind, mask = dot.score.factor(dot.q.shape[-1]), causal_kind(call) or "none", build_attn_mask(dot)
    if torch.compiler.is_compiling():
        # A compiler refuses one tensor as two inputs of an autograd function, so what is query and key becomes views.
        dot = replace(dot, q=dot.q.view_as(dot.q), k=dot.k.view_as(dot.k))
    if call.extent.device.type == "cuda":
        out, lse = cuda.run(dot, scale, kind, mask)
    else:
        out, lse = cpu.run(dot, scale, kind, mask)
        if mask is not None and may_have_nan(out):
            out, lse = cpu.run(zero_masked_keys(dot, mask), scale, kind, mask)
    return (out, lse) if mask is None else clear_masked_rows(out, lse, mask)


def may_have_nan(out: Tensor) -> bool:
    """Whether there may be one; a sum shows it, and is quickly taken."""
    if is_traced(out) or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return False
    return bool(out.detach().sum().isnan())


def zero_masked_keys(call: Call, mask: Tensor) -> Call:
    """Zeros for what nobody looks at, such as padding that nobody filled: the kernel adds -inf to its logits and takes
    0 of its values, and what is NaN or infinite stays so.
    """
    seen = (mask != -torch.inf).any(-2).expand(-1, -1, call.k.shape[2])
    if seen.shape[1] not in {1, call.k.shape[1]}:
        # Heads that share keys: what one of them sees stays.
        seen = seen.unflatten(1, (call.k.shape[1], call.group)).any(2)
    k, v = (torch.where(seen.unsqueeze(-1), t, 0.0) for t in (call.k, call.v))
    return replace(call, k=k, v=v)


def build_attn_mask(call: Call) -> Tensor | None:
    """The float tensor that is added to the logits."""
    if isinstance(call.bias, DenseBias):
        # Of a part of a call only these sequences and heads.
        return call.bias.term(call.everything()).to(bias_dtype(call, call.bias))
    mask = as_dense_mask(call)
    if mask is None:
        return None
    keys = call.k.shape[2]
    rows = slice(0, call.q.shape[2]) if isinstance(mask, DenseMask) else slice(0, 1)
    visible = mask.visible(call.where(rows, slice(0, keys)))
    return torch.where(visible, 0.0, -torch.inf).to(call.q.dtype)


def bias_dtype(call: Call, bias: DenseBias) -> torch.dtype:
    """What the kernels take without a loss: beside half precision another dtype is added in float32."""
    return torch.float32 if call.q.dtype in HALF_DTYPES and bias.entries.dtype != call.q.dtype else call.q.dtype


def clear_masked_rows(out: Tensor, lse: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows that see nothing: the kernels leave a log-sum-exp of 0, or worse, where it is -inf."""
    seen = (mask != -torch.inf).any(-1)  # NaN is not -inf: it must show in the output
    out = torch.where(seen.unsqueeze(-1), out, 0.0)
    return out, None if lse is None else torch.where(seen, lse, -torch.inf)
