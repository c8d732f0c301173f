"""FlexAttention: fused kernels, compiled for the masks, biases and softcaps that no ready-made kernel takes.

B batch, H heads, Tq queries, Tk keys, D width, Dv value width.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.arguments import Call
from foci.backends.flex import compiled_calls
from foci.backends.flex.block_masks import BLOCK_SIZE, BlockLists, build_block_lists
from foci.biases import Bias, Buckets, DenseBias
from foci.masks.base import DenseMask, Mask
from foci.masks.kinds import MaskFunction
from foci.masks.tile import Tile
from foci.runtime.checks import is_capturing_cuda_graph
from foci.scores import Dot, Score

NAME = "flex"

# Tables of blocks that are kept: at 131,072 tokens one takes 16 MiB.
MAX_CACHED_BLOCK_MASKS = 8

MIN_FLEX_WIDTH, MAX_FLEX_WIDTH = 16, 256


def refuses(call: Call) -> list[str]:
    if is_in_torch_func(call):
        return ["it does not run inside torch.func transforms: give the batch dimension to the call instead"]
    device = call.q.device.type
    if device not in {"cuda", "cpu"}:
        return [f"it has no kernels for {device}"]
    reasons = call_refusals(call) + bias_refusals(call)
    reasons += cuda_refusals(call) if device == "cuda" else cpu_refusals(call)
    # Whoever is compiling already has what that takes.
    lack = "" if torch.compiler.is_compiling() else missing_requirement(device)
    return [*reasons, lack] if lack else reasons


def is_in_torch_func(call: Call) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not torch.compiler.is_compiling() and any(wrapped(tensor) for tensor in (call.q, call.k, call.v))


def refuses_by_default(call: Call) -> list[str]:
    """Reasons not to be chosen unless it is named."""
    if call.q.device.type == "cpu":
        return ["compiling takes 10 s or more on a CPU: name backend='flex' to use it"]
    return []


def call_refusals(call: Call) -> list[str]:
    reasons = []
    if type(call.score).as_dot is Score.as_dot:
        reasons.append(f"the score {type(call.score).__name__} is not a dot product")
    if call.dropout:
        reasons.append("dropout is not part of it")
    if call.q.dtype == torch.float64:
        reasons.append("float64")
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        reasons.append("an empty tensor")
    return reasons


def bias_refusals(call: Call) -> list[str]:
    bias, reasons = call.bias, []
    if bias is not None:
        name = type(bias).__name__
        if type(bias).raw_term is not Bias.raw_term or type(bias).value_term is not Bias.value_term:
            reasons.append(f"the bias {name} is more than a number per entry")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in bias.tensors().values()):
            reasons.append(f"the bias {name} needs a gradient, which does not compile at larger sizes")
    if any(isinstance(part, DenseMask | DenseBias) and part.entries.numel() >= 2**31 for part in (call.mask, bias)):
        reasons.append("a mask or bias of 2³¹ or more entries is past its 32-bit indices")
    return reasons


def cuda_refusals(call: Call) -> list[str]:
    reasons = []
    width = max(call.q.shape[-1], call.k.shape[-1], call.v.shape[-1])
    if width > MAX_FLEX_WIDTH:
        reasons.append(f"a width of {width}, where it takes up to {MAX_FLEX_WIDTH}")
    if max(call.q.shape[:2]) > 65535:
        reasons.append("more than 65,535 sequences or heads")
    return reasons


def cpu_refusals(call: Call) -> list[str]:
    reasons = []
    if torch.compiler.is_compiling():
        reasons.append("on a CPU its masks do not compile as a part of a larger graph")
    if call.needs_grad:
        reasons.append("it has no backward on a CPU")
    if call.needs_lse:
        reasons.append("it gives no log-sum-exp on a CPU, which weights and sinks need")
    return reasons


def missing_requirement(device: str) -> str:
    """What this machine lacks for compiling; empty where nothing is missing."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1 switches torch.compile off"
    if device == "cuda":
        return "" if importlib.util.find_spec("triton") else "it needs Triton, which is not installed"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"it needs a C++ compiler, and {compiler} is not on the PATH"
    ready = torch.cpu._is_avx2_supported() and sys.platform != "darwin"
    return "" if ready else "on a CPU it needs x86 with AVX2, and not macOS"


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    score = Dot(dot.score.factor(dot.q.shape[-1]), dot.score.softcap)
    attend = compiled_calls.call_flex_attention if torch.compiler.is_compiling() else compiled_calls.run_program
    out, lse = attend(*pad_inputs(dot), build_flex_inputs(dot), score, choose_kernel_options(dot), call.needs_lse)
    return out[..., : call.v.shape[-1]], lse


def pad_inputs(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values in a width that the kernels take; zeros add nothing to a dot product."""
    q, k, v = call.q, call.k, call.v
    if q.device.type == "cpu":
        # Tensors that could need a gradient are refused there even where none is taken.
        return make_strides_dense(q.detach()), make_strides_dense(k.detach()), make_strides_dense(v.detach())
    wide = kernel_width(v.shape[-1], v.dtype)
    # The size of the tiles follows from the width of the queries alone: wider values would not fit beside them.
    both = max(kernel_width(q.shape[-1], q.dtype), wide)
    return pad_to_kernel_width(q, both), pad_to_kernel_width(k, both), pad_to_kernel_width(v, wide)


def kernel_width(width: int, dtype: torch.dtype) -> int:
    """At least 16; in float32 a power of two, for which there are tiles that fit."""
    return max(1 << (width - 1).bit_length() if dtype == torch.float32 else width, MIN_FLEX_WIDTH)


def pad_to_kernel_width(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else make_strides_dense(x)


def make_strides_dense(x: Tensor) -> Tensor:
    """Rows that are contiguous, and no dimension that is one row repeated; a compiler sees to that by itself."""
    plain = torch.compiler.is_compiling() or (x.stride(-1) == 1 and 0 not in x.stride())
    return x if plain else x.contiguous()


def choose_kernel_options(call: Call) -> dict[str, bool]:
    """What the compiler cannot see in lengths that it takes as variable, and a kernel that it should not take."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    if call.q.device.type == "cpu":
        return {}
    if queries % BLOCK_SIZE == 0 and keys % BLOCK_SIZE == 0:
        return {"IS_DIVISIBLE": True}
    # The kernel for short queries fails to compile for some lengths of grouped queries; a single query is safe.
    return {"FORCE_USE_FLEX_ATTENTION": True} if 1 < queries < BLOCK_SIZE or call.group > BLOCK_SIZE else {}


def build_flex_inputs(call: Call) -> compiled_calls.FlexInputs:
    mask, blocks = get_block_lists(call)
    return compiled_calls.FlexInputs(
        mask=mask,
        bias=tabulate_buckets(call.bias) if isinstance(call.bias, Buckets) else call.bias,
        blocks=blocks,
        shift=int_tensor(call.k.shape[2] - call.q.shape[2], call.q.device),
        positions=call.positions,
        batch_ids=call.batch_ids,
        head_ids=call.head_ids,
    )


@dataclass(frozen=True, slots=True)
class DistanceTableBias(Bias):
    """A bias that depends on the distance alone, as a table (H, 2 reach + 1); beyond the reach nothing changes."""

    table: Tensor
    reach: Tensor

    def term(self, where: Tile) -> Tensor:
        distance = (where.key_position - where.query_position).clamp(-self.reach, self.reach)
        return self.table[where.head, distance + self.reach]


def tabulate_buckets(bias: Buckets) -> DistanceTableBias:
    """The logarithms that make the buckets are taken here, once: in a kernel they may round to another bucket."""
    reach, device = bias.max_distance, bias.table.device
    distance = torch.arange(-reach, reach + 1, device=device)
    head = torch.arange(bias.table.shape[1], device=device).unsqueeze(-1)
    zero = torch.zeros_like(distance)
    return DistanceTableBias(bias.term(Tile(zero, head, zero, zero, zero, distance)), int_tensor(reach, device))


_block_lists_cache: OrderedDict[Hashable, tuple[Mask, BlockLists]] = OrderedDict()


def get_block_lists(call: Call) -> tuple[Mask | None, BlockLists | None]:
    """The mask with tensors for its numbers, and its blocks; both are kept for the next call with the same mask."""
    if call.mask is None:
        return None, None
    if torch.compiler.is_compiling():
        return call.mask, build_block_lists(call)
    # A captured graph runs again with other lengths or ids in the same tensors.
    captured = is_capturing_cuda_graph(call.q)
    known = None if captured and not call.mask.static else mask_cache_key(call.mask)
    if known is None or call.positions is not None or call.batch_ids is not None:
        return numbers_to_tensors(call.mask, call.q.device), build_block_lists(call)
    key = (known, call.q.shape[2], call.k.shape[2], call.q.device, call.needs_grad)
    found = _block_lists_cache.pop(key, None)
    if found is None:
        # A tensor that is made in inference mode could not be used in a later training step.
        with torch.inference_mode(False):
            found = numbers_to_tensors(call.mask, call.q.device), build_block_lists(call)
        if captured:
            # It is there only once the graph has run.
            return found
    _block_lists_cache[key] = found
    while len(_block_lists_cache) > MAX_CACHED_BLOCK_MASKS:
        _block_lists_cache.popitem(last=False)
    return found


def mask_cache_key(mask: Mask) -> Hashable | None:
    """What makes two masks the same: their kinds, their numbers, and their tensors' memory and version.

    A mask that is kept holds its tensors, so that their memory belongs to nobody else meanwhile. None where the same
    signature could mean another mask (functions, tensors that have no version) and for dense tensors, which are large.
    """
    if isinstance(mask, MaskFunction | DenseMask):
        return None
    parts: list[Hashable] = [type(mask).__name__]
    names: list[str] = [field.name for field in fields(mask)] if is_dataclass(mask) else []
    for part in (getattr(mask, name) for name in names):
        known: Hashable | None = (part,)
        if isinstance(part, Mask | Tensor):
            known = mask_cache_key(part) if isinstance(part, Mask) else tensor_cache_key(part)
        if known is None:
            return None
        parts.append(known)
    return tuple(parts)


def tensor_cache_key(tensor: Tensor) -> Hashable | None:
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype


def numbers_to_tensors(part: Any, device: torch.device) -> Any:
    """The same mask with tensors for its numbers: with another window or prefix it is still the same program."""
    if isinstance(part, int) and not isinstance(part, bool):
        return int_tensor(part, device)
    names = getattr(part, "__dataclass_fields__", None)
    if names is None or not isinstance(part, Mask) or isinstance(part, MaskFunction):
        return part
    copy: Any = object.__new__(type(part))
    for name in names:
        # The constructor would refuse a tensor where it expects a number.
        object.__setattr__(copy, name, numbers_to_tensors(getattr(part, name), device))
    return copy


def int_tensor(value: int, device: torch.device) -> Tensor:
    """A number as a tensor that is filled on the device, without a copy; in 32 bits, like indices, where they do."""
    return torch.full((), value, dtype=torch.int32 if abs(value) < 2**30 else torch.int64, device=device)
