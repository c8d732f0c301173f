"""Which calls our GPU kernel measures, and the call in the form that its launcher takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.arguments import Call
from foci.biases import ALiBi
from foci.gpu import mask_inputs
from foci.runtime.device import has_triton
from foci.scores import Additive, Dot
from foci.statistics.cuda.arguments import DTYPES, MAX_WIDTH, MOST_TOP, common_arguments
from foci.statistics.request import Request


def refuses(call: Call, wanted: Request | None = None, averaged: bool = False) -> list[str]:
    """Why the kernel does not measure this call; empty where it does."""
    if call.q.device.type != "cuda":
        return [f"the queries are on {call.q.device.type}, not on cuda"]
    if not has_triton():
        return ["triton is not installed"]
    reasons = []
    if isinstance(call.score, Additive):
        reasons.append("an additive score is not a dot product")
    if call.bias is not None and not isinstance(call.bias, ALiBi):
        reasons.append(f"the bias {type(call.bias).__name__}")
    if call.q.dtype not in DTYPES:
        reasons.append(f"{call.q.dtype}")
    if call.positions is not None:
        reasons.append("positions of your own")
    if not 0 < max(call.q.shape[-1], call.k.shape[-1]) <= MAX_WIDTH:
        reasons.append(f"widths that are 0 or above {MAX_WIDTH}")
    if wanted is not None and wanted.top > MOST_TOP:
        reasons.append(f"more than the {MOST_TOP} heaviest keys")
    if averaged:
        reasons.append("a mean over the heads")
    return reasons + mask_inputs.refuses(call)


def describe_kernel(call: Call, wanted: Request | None = None) -> str:
    """Which of our kernels measures a call that none refuses; without wanted, whatever they leave open."""
    from foci.statistics.cuda import hopper

    # First what costs nothing to ask: the terms of a call may have to be computed.
    if hopper.device_refusals(call.q.device):
        return "triton, in one pass"
    unused = torch.empty(call.q.shape[:3], device=call.q.device)
    if hopper.refuses(common_arguments(lse=unused, **statistics_arguments(call)), weighted=False, wanted=wanted):
        return "triton, in one pass"
    # Without wanted, there is always something that it leaves to the other.
    return f"gluon{'' if wanted else ', or triton where it refuses what is wanted'}, in one pass"


def compute_statistics(call: Call, lse: Tensor, wanted: Request) -> dict[str, Tensor]:
    """The wanted statistics by one pass of the kernel."""
    from foci.statistics.cuda.plan import launch_statistics

    return launch_statistics(lse=lse.float(), **statistics_arguments(call), wanted=wanted)


def statistics_arguments(call: Call) -> dict[str, Any]:
    """A call in the form that the launcher takes."""
    dot = call.with_dot()
    assert dot is not None and isinstance(dot.score, Dot)
    masks = mask_inputs.build_kernel_masks(call)
    slopes = call.bias.slopes if isinstance(call.bias, ALiBi) else None
    if slopes is not None:
        slopes = slopes[call.heads.flatten()].float()
    return {
        "q": dot.q,
        "k": dot.k,
        "scale": dot.score.factor(dot.q.shape[-1]),
        "softcap": dot.score.softcap,
        "slopes": slopes,
        "causal": masks.causal,
        "spans": masks.spans,
        "query_ids": masks.query_ids,
        "key_ids": masks.key_ids,
        "dense": masks.dense,
    }
