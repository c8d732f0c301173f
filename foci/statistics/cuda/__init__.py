"""Statistics by our GPU kernels: one pass over the tiles of the attention matrix.

__init__: which calls the kernels support, and a call as their arguments.
arguments: checked tensors and scalars in the layout that the kernels take.
tiling: tile sizes, and how the pass is cut into launches that fit a memory budget.
hopper: what the faster kernel for Hopper supports, and its launch.
hopper_check: compares it with the plain kernel on a version of Triton that it was not run with.
launches: one function per kernel launch.
plan: the launches and outputs of a pass, planned once per kind of call.
passes: a planned pass, run for one call after another.
repeated_pass: the same for plain calls of a known layout, with less host time.
entries: a few rows of the matrix by one launch.
columns: columns of the matrix of a plain call, which has no log-sum-exp, by one launch.
divergence: the divergence of two matrices.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from foci.arguments import KERNEL_DTYPES, Call
from foci.biases import Buckets, DenseBias, Relative
from foci.gpu import attention
from foci.gpu.additive import MAX_ADDITIVE_WIDTH
from foci.gpu.attention import row_table
from foci.gpu.attention.arguments import HeadSlices
from foci.gpu.compilation import prepare_compiler
from foci.masks import kernel_inputs
from foci.runtime.device import has_triton, major_capability
from foci.scores import Additive, Dot
from foci.statistics.cuda.arguments import AFTER_SCALE, BEFORE_SCALE, MAX_WIDTH, common_arguments
from foci.statistics.request import MAX_TOP_KEYS, Request


def refuses(call: Call, request: Request | None = None, averaged: bool = False) -> list[str]:
    """Why the kernels do not compute statistics of this call; empty where they do."""
    if call.q.device.type != "cuda":
        return [f"the queries are on {call.q.device.type}, not on cuda"]
    if not has_triton():
        return ["Triton is not installed"]
    reasons = []
    is_additive = isinstance(call.score, Additive)
    if is_additive and call.bias is not None:
        reasons.append("an additive score together with a bias is not supported")
    if isinstance(call.bias, DenseBias):
        reasons.append("a float tensor as a bias is not supported")
    reasons += attention.distance_bias_refusals(call)
    if call.q.dtype not in KERNEL_DTYPES:
        reasons.append(f"{call.q.dtype} is not supported")
    if call.positions is not None:
        reasons.append("given positions are not supported")
    widest = MAX_ADDITIVE_WIDTH if is_additive else MAX_WIDTH
    if not 0 < max(call.q.shape[-1], call.k.shape[-1]) <= widest:
        reasons.append(f"widths from 1 to {widest} are supported")
    if request is not None and request.top > MAX_TOP_KEYS:
        reasons.append(f"at most {MAX_TOP_KEYS} top keys are supported")
    if averaged:
        reasons.append("the mean over heads is not supported")
    return reasons + kernel_inputs.refuses(call)


def describe_kernel(call: Call, request: Request | None = None) -> str:
    """Names the kernel that computes the statistics of a supported call; without a request, for any of them."""
    from foci.statistics.cuda import hopper

    # The cheap check first: the arguments of a call may have to be computed.
    if hopper.hopper_device_refusals(call.q.device):
        failure = hopper.gluon_failure(call.q.device.index or 0) if major_capability(call.q.device.index) == 9 else None
        return "triton, in one pass" + (f" (the Gluon kernel failed its self-check: {failure})" if failure else "")
    if isinstance(call.bias, Buckets | Relative) or isinstance(call.score, Additive):
        return "triton, in one pass"
    unused = torch.empty(call.q.shape[:3], device=call.q.device)
    if hopper.refuses(common_arguments(lse=unused, **statistics_arguments(call)), weighted=False, request=request):
        return "triton, in one pass"
    # Some requests are always left to the Triton kernel.
    return f"gluon{'' if request else ' or triton, depending on the statistic'}, in one pass"


def compute_statistics(call: Call, lse: Tensor, request: Request) -> dict[str, Tensor]:
    """Computes the requested statistics in one pass."""
    prepare_compiler()
    from foci.statistics.cuda.plan import launch_statistics

    parts = split_by_row_table(call) if isinstance(call.bias, Relative) else []
    if len(parts) < 2:
        return launch_statistics(lse=lse.float(), **statistics_arguments(call), request=request)
    results = [
        launch_statistics(lse=lse[part].float(), **statistics_arguments(call.select(*part)), request=request)
        for part in parts
    ]
    # Parts are in the order of the flattened (B, H).
    sizes = call.q.shape[:2]
    return {name: torch.cat([x[name].flatten(0, 1) for x in results]).unflatten(0, sizes) for name in results[0]}


def split_by_row_table(call: Call) -> list[HeadSlices]:
    """Parts of the call whose row tables of Relative keys fit into memory, as the forward has them."""
    assert isinstance(call.bias, Relative)
    return list(row_table.split_by_memory(call.q, call.group, 4 * call.bias.keys.shape[-2]))


def statistics_arguments(call: Call) -> dict[str, Any]:
    """The call as keyword arguments of `launch_statistics`."""
    masks = kernel_inputs.build_kernel_masks(call)
    visible = {field.name: getattr(masks, field.name) for field in fields(masks)}
    if isinstance(call.score, Additive):
        weight = call.score.weight.detach()
        return {"q": call.q, "k": call.k, "scale": 1.0, "softcap": None, "slopes": None, "weight": weight, **visible}
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    table, buckets, keys, _, slopes, _ = attention.bias_tensors(call)
    bias, bias_kind = None, 0
    if keys is not None:
        bias, bias_kind = dot.q.float() @ keys.mT, BEFORE_SCALE
    elif table is not None and buckets is not None:
        bias, bias_kind = table.T.index_select(1, buckets)[None, :, None], AFTER_SCALE
    return {
        "q": dot.q,
        "k": dot.k,
        "scale": dot.score.factor(dot.q.shape[-1]),
        "softcap": dot.score.softcap,
        "slopes": slopes,
        "bias": bias,
        "bias_kind": bias_kind,
        **visible,
    }
