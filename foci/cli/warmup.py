"""`foci warmup`: compile the kernels of common calls before their first use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import foci
from foci.cli.output import print_lines

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES = """\
examples:
  foci warmup
  foci warmup --width 128 --mask causal window padding documents --backward
  foci warmup --score additive --statistics summary
"""
DTYPES = ("bfloat16", "float16", "float32")
MASKS = ("none", "causal", "window", "padding", "documents")
SCORES = ("dot", "softcap", "additive")
STATISTICS = ("summary", "entropy", "received", "distance", "largest_logit", "top", "picture")


def add(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "warmup",
        help="compile the kernels of common calls before their first use",
        description="Compile kernels for the GPU of this machine. Triton stores them on disk, in TRITON_CACHE_DIR or"
        " ~/.triton/cache, where later processes find them. Any length, batch size and number of heads uses them.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--width", type=int, nargs="+", default=[64], help="width of a head (default: 64)")
    parser.add_argument("--heads", type=int, default=8, help="query heads (default: 8)")
    parser.add_argument("--key-heads", type=int, help="key/value heads (default: as many as query heads)")
    parser.add_argument("--length", type=int, default=512, help="queries and keys (default: 512)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the inputs (default: bfloat16 on a GPU, else float32)"
    )
    parser.add_argument("--mask", choices=MASKS, nargs="+", default=["causal", "window", "padding"], help="masks")
    parser.add_argument("--score", choices=SCORES, nargs="+", default=["dot"], help="scores (default: dot)")
    parser.add_argument("--statistics", choices=STATISTICS, nargs="+", default=[], help="statistics of the weights")
    parser.add_argument("--backward", action="store_true", help="also compile the backward")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile each combination of width, mask and score, and print a line for it."""
    import torch

    for name in ("heads", "length"):
        check_positive(f"--{name}", getattr(options, name))
    for width in options.width:
        check_positive("--width", width)
    dtype = getattr(torch, options.dtype or ("bfloat16" if torch.cuda.is_available() else "float32"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print_lines(f"compiling for {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}")
    for width in options.width:
        q = torch.zeros(2, options.heads, options.length, width, dtype=dtype, device=device)
        k = torch.zeros(2, options.key_heads or options.heads, options.length, width, dtype=dtype, device=device)
        for score in options.score:
            for mask in options.mask:
                arguments = {"mask": build_mask(mask, q), "score": build_score(score, q)}
                report = foci.warmup(q, k, k, backward=options.backward, statistics=options.statistics, **arguments)
                print_lines(f"{score}, {mask}, width {width}: {report}")
    return 0


def check_positive(option: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{option} must be at least 1, got {number}")


def build_mask(name: str, q: Tensor) -> foci.Mask | None:
    import torch

    length = q.shape[2]
    if name == "window":
        return foci.causal & foci.window(max(length // 4, 1))
    if name == "padding":
        return foci.padding(torch.tensor([length, length // 2], device=q.device))
    if name == "documents":
        return foci.causal & foci.documents(torch.arange(length, device=q.device) * 4 // length)
    return foci.causal if name == "causal" else None


def build_score(name: str, q: Tensor) -> foci.Score:
    import torch

    if name == "additive":
        return foci.Additive(torch.ones(q.shape[-1], dtype=q.dtype, device=q.device, requires_grad=True))
    return foci.Dot(softcap=30.0 if name == "softcap" else None)
