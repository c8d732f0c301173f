"""FlexAttention, compiled: the default on CUDA for masks of a function.

block_masks: which blocks of the matrix a mask hides, fills or cuts.
compiled_calls: FlexAttention compiled once per kind of call.

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
from foci.runtime.tensor_cache import current_stream_number
from foci.runtime.tracing import is_capturing_cuda_graph
from foci.scores import Dot

NAME = "flex"

# Block lists that are cached: at 131,072 tokens one takes 16 MiB.
MAX_CACHED_BLOCK_MASKS = 8

MIN_FLEX_WIDTH, MAX_FLEX_WIDTH = 16, 256


def refuses(call: Call) -> list[str]:
    if is_in_torch_func(call):
        return ["torch.func transforms are not supported: pass the batch dimension to the call instead"]
    device = call.q.device.type
    if device not in {"cuda", "cpu"}:
        return [f"FlexAttention has no kernels for {device}"]
    reasons = call_refusals(call) + bias_refusals(call)
    reasons += cuda_refusals(call) if device == "cuda" else cpu_refusals(call)
    # While torch.compile is tracing, its requirements are met.
    missing = "" if torch.compiler.is_compiling() else missing_requirement(device)
    return [*reasons, missing] if missing else reasons


def is_in_torch_func(call: Call) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not torch.compiler.is_compiling() and any(wrapped(tensor) for tensor in (call.q, call.k, call.v))


def refuses_by_default(call: Call) -> list[str]:
    """Why it is not chosen unless the caller names it."""
    if call.q.device.type == "cpu":
        return ["compiling takes 10 s or more on a CPU; use it with backend='flex'"]
    return []


def call_refusals(call: Call) -> list[str]:
    reasons = []
    if not call.score.is_dot_product:
        reasons.append(f"the score {type(call.score).__name__} is not a dot product")
    if call.dropout:
        reasons.append("FlexAttention does not support dropout")
    if call.q.dtype == torch.float64:
        reasons.append("FlexAttention does not support float64")
    if 0 in call.q.shape or 0 in call.k.shape or 0 in call.v.shape:
        reasons.append("query, key or value is empty")
    if call.positions is not None and torch.compiler.is_compiling():
        reasons.append("given positions do not compile inside a larger graph")
    return reasons


def bias_refusals(call: Call) -> list[str]:
    bias, reasons = call.bias, []
    if bias is not None:
        name = type(bias).__name__
        if type(bias).raw_term is not Bias.raw_term or type(bias).value_term is not Bias.value_term:
            reasons.append(f"the bias {name} adds more than one number per entry")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in bias.tensors().values()):
            reasons.append(f"the bias {name} needs a gradient, which does not compile at larger sizes")
        if isinstance(bias, DenseBias) and bias.entries.dtype != call.q.dtype and call.needs_grad:
            reasons.append(f"a bias of another dtype than {call.q.dtype} does not compile with gradients")
    if any(isinstance(part, DenseMask | DenseBias) and part.entries.numel() >= 2**31 for part in (call.mask, bias)):
        reasons.append("a mask or bias of 2³¹ or more entries exceeds the 32-bit indices of FlexAttention")
    return reasons


def cuda_refusals(call: Call) -> list[str]:
    reasons = []
    width = max(call.q.shape[-1], call.k.shape[-1], call.v.shape[-1])
    if width > MAX_FLEX_WIDTH:
        reasons.append(f"FlexAttention supports widths up to {MAX_FLEX_WIDTH}, got {width}")
    if max(call.q.shape[:2]) > 65535:
        reasons.append("FlexAttention supports at most 65,535 sequences or heads")
    return reasons


def cpu_refusals(call: Call) -> list[str]:
    reasons = []
    if torch.compiler.is_compiling():
        reasons.append("on a CPU its masks do not compile inside a larger graph")
    if call.needs_grad:
        reasons.append("FlexAttention has no backward on a CPU")
    if call.needs_lse:
        reasons.append("FlexAttention returns no log-sum-exp on a CPU, which weights and sinks need")
    if is_avx512_hidden():
        reasons.append("its compiled masks are wrong if ATEN_CPU_CAPABILITY hides the AVX-512 of the CPU")
    return reasons


def is_avx512_hidden() -> bool:
    """Whether PyTorch runs without the AVX-512 of this CPU, for which torch.compile generates code nevertheless."""
    return bool(torch.cpu._is_avx512_supported()) and torch.backends.cpu.get_cpu_capability() != "AVX512"


def missing_requirement(device: str) -> str:
    """What compiling needs and is missing here; empty where nothing is."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1 switches torch.compile off"
    if device == "cuda":
        return "" if importlib.util.find_spec("triton") else "Triton is not installed"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"a C++ compiler is needed, and {compiler} is not on the PATH"
    ready = torch.cpu._is_avx2_supported() and sys.platform != "darwin"
    return "" if ready else "on a CPU it needs x86 with AVX2 and does not run on macOS"


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    score = Dot(dot.score.factor(dot.q.shape[-1]), dot.score.softcap)
    attend = compiled_calls.call_flex_attention if torch.compiler.is_compiling() else compiled_calls.run_program
    out, lse = attend(*pad_inputs(dot), build_flex_inputs(dot), score, choose_kernel_options(dot), call.needs_lse)
    return out[..., : call.v.shape[-1]], lse


def pad_inputs(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Pads query, key and value to widths that the kernels support; zeros add nothing to a dot product."""
    q, k, v = call.q, call.k, call.v
    if q.device.type == "cpu":
        # Tensors with requires_grad are rejected on a CPU even under no_grad.
        return make_strides_dense(q.detach()), make_strides_dense(k.detach()), make_strides_dense(v.detach())
    wide = kernel_width(v.shape[-1], v.dtype)
    # Tile sizes follow from the width of the queries alone: wider values would not fit in shared memory.
    both = max(kernel_width(q.shape[-1], q.dtype), wide)
    return pad_to_kernel_width(q, both), pad_to_kernel_width(k, both), pad_to_kernel_width(v, wide)


def kernel_width(width: int, dtype: torch.dtype) -> int:
    """At least 16; in float32 a power of two, because only these have tiles that fit."""
    return max(1 << (width - 1).bit_length() if dtype == torch.float32 else width, MIN_FLEX_WIDTH)


def pad_to_kernel_width(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else make_strides_dense(x)


def make_strides_dense(x: Tensor) -> Tensor:
    """Copies a tensor whose rows are not contiguous or that is expanded; torch.compile handles such strides itself."""
    is_dense = torch.compiler.is_compiling() or (x.stride(-1) == 1 and 0 not in x.stride())
    return x if is_dense else x.contiguous()


def choose_kernel_options(call: Call) -> dict[str, bool]:
    """Options for divisibility, which the compiler cannot see in dynamic lengths, and against a kernel that fails."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    if call.q.device.type == "cpu":
        return {}
    if queries % BLOCK_SIZE == 0 and keys % BLOCK_SIZE == 0:
        return {"IS_DIVISIBLE": True}
    # The kernel for short queries fails to compile for some lengths of grouped heads; a single query is safe.
    return {"FORCE_USE_FLEX_ATTENTION": True} if 1 < queries < BLOCK_SIZE or call.group > BLOCK_SIZE else {}


def build_flex_inputs(call: Call) -> compiled_calls.FlexInputs:
    mask, blocks = get_block_lists(call)
    return compiled_calls.FlexInputs(
        mask=mask,
        bias=tabulate_buckets(call.bias) if isinstance(call.bias, Buckets) else call.bias,
        blocks=blocks,
        query_offset=int_tensor(call.k.shape[2] - call.q.shape[2], call.q.device),
        positions=call.positions,
        batch_ids=call.batch_ids,
        head_ids=call.head_ids,
    )


@dataclass(frozen=True, slots=True)
class DistanceTableBias(Bias):
    """A bias by distance as a table (H, 2 reach + 1); larger distances use the last entry."""

    table: Tensor
    reach: Tensor

    def term(self, tile: Tile) -> Tensor:
        distance = (tile.key_position - tile.query_position).clamp(-self.reach, self.reach)
        return self.table[tile.head, distance + self.reach]


def tabulate_buckets(bias: Buckets) -> DistanceTableBias:
    """Computes the buckets once here: the logarithms in a kernel may round to another bucket."""
    reach, device = bias.max_distance, bias.table.device
    distance = torch.arange(-reach, reach + 1, device=device)
    head = torch.arange(bias.table.shape[1], device=device).unsqueeze(-1)
    zero = torch.zeros_like(distance)
    return DistanceTableBias(bias.term(Tile(zero, head, zero, zero, zero, distance)), int_tensor(reach, device))


_block_lists_cache: OrderedDict[Hashable, tuple[Mask, BlockLists]] = OrderedDict()


def get_block_lists(call: Call) -> tuple[Mask | None, BlockLists | None]:
    """Returns the mask with tensors for its numbers, and its block lists; cached for calls with the same mask."""
    if call.mask is None:
        return None, None
    if torch.compiler.is_compiling():
        return call.mask, build_block_lists(call)
    # A captured CUDA graph is replayed with other lengths or ids in the same tensors.
    captured = is_capturing_cuda_graph(call.q)
    mask_key = None if captured and not call.mask.is_static else block_lists_key(call.mask)
    if mask_key is None or call.positions is not None or call.batch_ids is not None:
        return numbers_to_tensors(call.mask, call.q.device), build_block_lists(call)
    # Another stream would not wait until the lists are computed.
    stream = current_stream_number(call.q.device)
    key = (mask_key, call.q.shape[2], call.k.shape[2], call.q.device, stream, call.needs_grad)
    cached = _block_lists_cache.pop(key, None)
    if cached is None:
        # A tensor created in inference mode could not be used in a later training step.
        with torch.inference_mode(False):
            cached = numbers_to_tensors(call.mask, call.q.device), build_block_lists(call)
        if captured:
            # The tensors hold values only after the graph has run.
            return cached
    _block_lists_cache[key] = cached
    while len(_block_lists_cache) > MAX_CACHED_BLOCK_MASKS:
        _block_lists_cache.popitem(last=False)
    return cached


def block_lists_key(mask: Mask) -> Hashable | None:
    """Key by which equal masks share block lists: types, numbers, and memory and version of the tensors.

    A cached mask holds its tensors, so that their memory is not reused. None where equal keys could mean different
    masks (functions, tensors without a version) and for dense tensors, which are large.
    """
    if isinstance(mask, MaskFunction | DenseMask):
        return None
    parts: list[Hashable] = [type(mask).__name__]
    names: list[str] = [field.name for field in fields(mask)] if is_dataclass(mask) else []
    for part in (getattr(mask, name) for name in names):
        known: Hashable | None = (part,)
        if isinstance(part, Mask | Tensor):
            known = block_lists_key(part) if isinstance(part, Mask) else tensor_cache_key(part)
        if known is None:
            return None
        parts.append(known)
    return tuple(parts)


def tensor_cache_key(tensor: Tensor) -> Hashable | None:
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype


def numbers_to_tensors(part: Any, device: torch.device) -> Any:
    """The mask with tensors for its numbers, so that another window or prefix runs the same program."""
    if isinstance(part, int) and not isinstance(part, bool):
        return int_tensor(part, device)
    names = getattr(part, "__dataclass_fields__", None)
    if names is None or not isinstance(part, Mask) or isinstance(part, MaskFunction):
        return part
    copy: Any = object.__new__(type(part))
    for name in names:
        # The constructor would reject a tensor where it expects a number.
        object.__setattr__(copy, name, numbers_to_tensors(getattr(part, name), device))
    return copy


def int_tensor(value: int, device: torch.device) -> Tensor:
    """A scalar tensor filled on the device, without a copy; int32, like indices, where it fits."""
    return torch.full((), value, dtype=torch.int32 if abs(value) < 2**30 else torch.int64, device=device)
