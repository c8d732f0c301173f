"""The cases of the attention benchmark, and every public function that can compute them.

Dense masks, block masks and lengths are built once, before the timing, for every contestant.

B batch, H heads, R some of the queries, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import foci

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MaskPredicate = Callable[[Any, Any, Any, Any], Tensor]

PACKED = 8


@dataclass(frozen=True)
class Case:
    """One shape and one mask: full, causal, window, documents or padding."""

    kind: str
    batch: int
    heads: int
    queries: int
    width: int
    keys: int | None = None  # as many as queries
    kv_heads: int | None = None  # as many as heads
    window: int = 1024
    compiled: bool = False  # whether FlexAttention is compiled for it, which takes longer than everything else

    @property
    def name(self) -> str:
        heads = f"h{self.heads}" if self.kv_heads is None else f"h{self.heads}/{self.kv_heads}"
        length = f"n{self.queries}" if self.keys is None else f"n{self.queries}/{self.keys}"
        kind = f"window {self.window}" if self.kind == "window" else self.kind
        return f"{kind} b{self.batch} {heads} d{self.width} {length}"

    @property
    def tk(self) -> int:
        return self.keys or self.queries

    def inputs(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """New random queries, keys and values."""
        q = torch.randn(self.batch, self.heads, self.queries, self.width, device=device, dtype=dtype)
        shape = (self.batch, self.kv_heads or self.heads, self.tk, self.width)
        return q, torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)

    def starts(self) -> Tensor:
        """The boundaries of packed documents of uneven lengths: (PACKED + 1,)."""
        shares = torch.linspace(0.4, 1.6, PACKED).cumsum(0) / PACKED
        return torch.cat([torch.zeros(1), shares]).mul(self.queries).round().int()

    def ids(self, device: torch.device) -> Tensor:
        """The document of each token."""
        lengths = self.starts().diff().long()
        return torch.arange(PACKED).repeat_interleave(lengths).to(device)

    def lengths(self, device: torch.device) -> Tensor:
        """The tokens of each padded sequence, from a quarter to all."""
        return torch.linspace(self.tk / 4, self.tk, self.batch).round().long().to(device)

    def visibility(self, device: torch.device) -> MaskPredicate | None:
        """The mask as a function of batch, head, query and key index, as FlexAttention takes it."""
        if self.kind == "full":
            return None
        offset = self.tk - self.queries
        if self.kind == "causal":
            return lambda b, h, i, j: j <= i + offset
        if self.kind == "window":
            return lambda b, h, i, j: (j <= i + offset) & (i + offset - j < self.window)
        if self.kind == "documents":
            ids = self.ids(device)
            return lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)
        lengths = self.lengths(device)
        return lambda b, h, i, j: j < lengths[b]

    def visible(self, rows: Tensor) -> Tensor | None:
        """The mask of some queries, broadcastable to (B, H, R, Tk)."""
        visibility = self.visibility(rows.device)
        if visibility is None:
            return None
        batch = torch.arange(self.batch, device=rows.device).view(-1, 1, 1, 1)
        keys = torch.arange(self.tk, device=rows.device).view(1, 1, 1, -1)
        return visibility(batch, 0, rows.view(1, 1, -1, 1), keys)

    def pairs(self, device: torch.device) -> int:
        """The number of visible (query, key) pairs over all heads and sequences."""
        total = 0
        for rows in torch.arange(self.queries, device=device).split(1024):
            mask = self.visible(rows)
            part = len(rows) * self.tk * self.batch if mask is None else int(mask.sum()) * self.repeats(mask, len(rows))
            total += part * self.heads
        return total

    def repeats(self, mask: Tensor, rows: int) -> int:
        return (self.batch // mask.shape[0]) * (rows // mask.shape[2])

    def mask(self, device: torch.device) -> foci.Mask | None:
        """The same mask as a foci mask."""
        if self.kind == "full":
            return None
        if self.kind == "causal":
            return foci.causal
        if self.kind == "window":
            return foci.window(self.window - 1)
        if self.kind == "documents":
            return foci.causal & foci.documents(self.ids(device))
        return foci.padding(self.lengths(device))


@dataclass(frozen=True)
class Peer:
    """An attention function."""

    name: str
    attend: Attend
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def contestants(case: Case, device: torch.device) -> Iterator[Peer]:
    """foci, then every peer that supports the case."""
    yield Peer("foci", foci_attention(case, device))
    yield from sdpa(case, device)
    yield from flex(case, device)
    if device.type == "cuda" and case.batch == 1 and case.kind in {"window", "documents"}:
        yield Peer("varlen", varlen(case, device))


def foci_attention(case: Case, device: torch.device) -> Attend:
    return cast(Attend, partial(foci.attention, mask=case.mask(device)))


def sdpa(case: Case, device: torch.device) -> Iterator[Peer]:
    """The default path, and each backend by name; flash does not support a dense mask."""
    arguments: dict[str, Any] = {"enable_gqa": case.kv_heads is not None}
    flagged = case.kind == "full" or (case.kind == "causal" and case.tk == case.queries)
    if flagged:
        arguments["is_causal"] = case.kind == "causal"
    else:
        arguments["attn_mask"] = case.visible(torch.arange(case.queries, device=device))
    attend = cast(Attend, partial(F.scaled_dot_product_attention, **arguments))
    yield Peer("sdpa", attend)
    if case.kind == "causal" and not flagged:
        given = {**arguments, "attn_mask": causal_lower_right(case.queries, case.tk)}
        yield Peer("sdpa lower right", cast(Attend, partial(F.scaled_dot_product_attention, **given)))
    if device.type == "cuda":
        yield Peer("cudnn", attend, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION))
        yield Peer("efficient", attend, partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION))
        if flagged:
            yield Peer("flash", attend, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION))
    if is_small(case, device):
        yield Peer("math", attend, partial(sdpa_kernel, SDPBackend.MATH))


def flex(case: Case, device: torch.device) -> Iterator[Peer]:
    """FlexAttention compiled for this shape, and uncompiled if its matrix is small."""
    small = is_small(case, device)
    if not (case.compiled or small):
        return
    visibility = case.visibility(device)
    batch = case.batch if case.kind == "padding" else None
    blocks = (
        None
        if visibility is None
        else create_block_mask(visibility, batch, None, case.queries, case.tk, device=str(device))
    )
    arguments = {"block_mask": blocks, "enable_gqa": case.kv_heads is not None}
    if case.compiled:
        # After eight shapes Dynamo falls back to unfused code, so it is reset for every case.
        torch._dynamo.reset()
        yield Peer("flex compiled", cast(Attend, partial(torch.compile(flex_attention, dynamic=False), **arguments)))
    if small:
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield Peer("flex eager", cast(Attend, partial(flex_attention, **arguments)))


def is_small(case: Case, device: torch.device) -> bool:
    """Whether code that builds the matrix may join: a GiB of float32 on a GPU, a quarter of one elsewhere."""
    return case.batch * case.heads * case.queries * case.tk * 4 <= (2**30 if device.type == "cuda" else 2**28)


def varlen(case: Case, device: torch.device) -> Attend:
    """PyTorch's attention over packed sequences, for one row of them; it takes a window too."""
    from torch.nn.attention.varlen import varlen_attn

    ends = case.starts() if case.kind == "documents" else torch.tensor([0, case.queries], dtype=torch.int32)
    longest, ends = int(ends.diff().max()), ends.to(device)
    window = (case.window - 1, 0) if case.kind == "window" else (-1, 0)
    # Older versions know only a causal flag, and no window.
    takes_window = "window_size" in inspect.signature(varlen_attn).parameters
    masking: dict[str, Any] = {"window_size": window} if takes_window else {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        out = varlen_attn(q, k, v, ends, ends, longest, longest, **masking)
        return cast(Tensor, out).transpose(0, 1).unsqueeze(0)

    return attend


def cases(device: torch.device, quick: bool) -> list[Case]:
    """The important ones first: a run that is out of time leaves out the last."""
    gpu = device.type == "cuda"
    if quick:
        return small_cases(compiled=gpu)
    return gpu_cases() if gpu else cpu_cases()


def small_cases(compiled: bool) -> list[Case]:
    return [
        Case("full", 1, 4, 256, 64),
        Case("causal", 1, 4, 256, 64, compiled=compiled),
        Case("documents", 1, 4, 256, 64, compiled=compiled),
        Case("causal", 2, 4, 16, 64, keys=256),
        Case("causal", 1, 4, 256, 64, kv_heads=2),
        Case("window", 1, 4, 256, 64, window=64),
        Case("padding", 4, 4, 128, 64),
    ]


def gpu_cases() -> list[Case]:
    """16,384 tokens in all, width 2,048."""
    plain = [
        Case(kind, 16384 // length, 2048 // width, length, width, compiled=length in {4096, 16384})
        for length in (4096, 16384, 1024, 8192, 2048, 512)
        for width in (128, 64)
        for kind in ("causal", "full")
    ]
    masked = [
        Case("causal", 8, 16, 16, 128, keys=16384, compiled=True),
        Case("causal", 4, 32, 4096, 128, kv_heads=8, compiled=True),
        Case("window", 1, 16, 16384, 128, compiled=True),
        Case("documents", 1, 16, 16384, 128, compiled=True),
        Case("padding", 8, 16, 2048, 128, compiled=True),
    ]
    return plain[:8] + masked + plain[8:]


def cpu_cases() -> list[Case]:
    """8 heads of 64."""
    plain = [
        Case(kind, 1, 8, length, 64, compiled=length == 2048)
        for length in (4096, 2048, 1024, 512)
        for kind in ("causal", "full")
    ]
    masked = [
        Case("causal", 1, 8, 16, 64, keys=4096),
        Case("causal", 1, 8, 2048, 64, kv_heads=2),
        Case("window", 1, 8, 4096, 64, compiled=True),
        Case("documents", 1, 8, 4096, 64, compiled=True),
        Case("padding", 4, 8, 1024, 64),
    ]
    return plain[:2] + masked + plain[2:]
