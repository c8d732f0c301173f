"""The self-check of the kernel for Hopper, which `hopper` runs in a process of its own."""

from __future__ import annotations

import torch

from foci.statistics.cuda.hopper import hopper_config
from foci.statistics.cuda.plan import launch_statistics
from foci.statistics.cuda.tiling import TileConfig
from foci.statistics.request import Request


def check_kernel(index: int) -> str | None:
    """Compare the statistics of the Hopper kernel with those of the plain Triton kernel, at two lengths."""
    wrong = [f"{name} at {tokens} tokens" for tokens in (512, 600) for name in find_wrong_statistics(index, tokens)]
    return f"wrong values of {', '.join(wrong)}" if wrong else None


def find_wrong_statistics(index: int, tokens: int) -> list[str]:
    generator = torch.Generator(f"cuda:{index}").manual_seed(0)
    shape, device = (1, 2, tokens, 64), torch.device("cuda", index)
    q, k = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
    hidden = torch.ones(tokens, tokens, device=device).triu(1) > 0
    logits = (q.float() @ k.float().mT / 8).masked_fill(hidden, -torch.inf)
    request = Request(entropy=True, received=True, distance=True, largest_logit=True, top=8)
    plain = TileConfig(queries=64, keys=64, warps=4, stages=2, programs_per_sm=2)
    found, expected = (
        launch_statistics(q, k, logits.logsumexp(-1), scale=0.125, causal=True, request=request, config=config)
        for config in (hopper_config(request, tokens), plain)
    )
    return [
        name
        for name, values in expected.items()
        if name != "top_keys" and not torch.allclose(found[name], values, atol=1e-3, rtol=1e-3)
    ]
