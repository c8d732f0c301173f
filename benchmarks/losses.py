"""The loss of a sparse-attention indexer: foci.losses.divergence, eager code, and torch.compile of it.

    python benchmarks/losses.py                        8,192 tokens, 16 heads of 128, an indexer of one head of 64
    python benchmarks/losses.py --quick                tiny sizes, to check that it runs

The teacher is the mean of all heads and has no gradients; the loss is the divergence of the student, forward and
backward. The row `attention` is SDPA's own forward and backward of the teacher's layer (cuDNN on a GPU), the measure of
all others; its weights take no part in the loss. Nobody gets a figure whose loss or gradients are further from float64,
summed over blocks of queries, than twice the error of eager code and a floor.

B batch, H heads, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gates import GateError
from table import Options, Table, dtype_name, parse_options
from timing import Contestant, Measured, compare, format_error, free_memory, log, make_clock
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import foci

COLUMNS = ("case", "dtype", "contestant", "ms", "spread", "rounds", "mib", "over_attention", "error", "note")
# Of the loss and of the gradients, relative to the largest: products of rounded numbers.
ALLOWED = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
ROWS = 256

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One shape."""

    batch: int
    heads: int
    length: int
    width: int
    student_width: int

    @property
    def name(self) -> str:
        return f"causal b{self.batch} h{self.heads} n{self.length} d{self.width} indexer d{self.student_width}"


def cases(options: Options) -> list[Case]:
    if options.quick or options.device.type != "cuda":
        return [Case(1, 4, 300, 32, 16)]
    return [Case(1, 16, 8192, 128, 64), Case(1, 16, 8000, 128, 64), Case(4, 16, 2048, 128, 64)]


def foci_loss(q: Tensor, k: Tensor, student_q: Tensor, student_k: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = foci.attention(q, k, k, mask=foci.causal, return_weights=True)[1].mean("heads")
    student = foci.attention(student_q, student_k, student_k, mask=foci.causal, return_weights=True)[1]
    return foci.losses.divergence(teacher, student)


def eager_loss(q: Tensor, k: Tensor, student_q: Tensor, student_k: Tensor) -> Tensor:
    """The formula on whole matrices, with the softmax in float32 (float64 for inputs in it)."""
    return rows_loss(q, k, student_q, student_k, slice(0, q.shape[2])) / (q.shape[0] * q.shape[2])


def rows_loss(q: Tensor, k: Tensor, student_q: Tensor, student_k: Tensor, rows: slice) -> Tensor:
    """The sum over some queries."""
    keys = torch.arange(k.shape[2], device=q.device)
    hidden = keys > keys[rows].unsqueeze(-1)
    dtype = torch.promote_types(q.dtype, torch.float32)

    def logits(q: Tensor, k: Tensor) -> Tensor:
        found = (q[:, :, rows] @ k.mT).to(dtype) * q.shape[-1] ** -0.5
        return found.masked_fill(hidden, -torch.inf)

    with torch.no_grad():
        teacher = logits(q, k).softmax(-1).mean(1, keepdim=True)
    difference = teacher.clamp(min=1e-300 if dtype == torch.float64 else 1e-37).log()
    difference = difference - logits(student_q, student_k).log_softmax(-1)
    return (teacher * difference.masked_fill(hidden, 0.0)).sum()


def truth(tensors: list[Tensor]) -> list[Tensor]:
    """The loss and the student's gradients in float64, a block of queries after the other."""
    q, k, *student = (x.detach().double() for x in tensors)
    student = [x.requires_grad_() for x in student]
    total = torch.zeros((), dtype=torch.float64, device=q.device)
    count = q.shape[0] * q.shape[2]
    for start in range(0, q.shape[2], ROWS):
        part = rows_loss(q, k, *student, slice(start, start + ROWS)) / count
        part.backward()
        total += part.detach()
    return [total, *(x.grad for x in student if x.grad is not None)]


def error_against(found: list[Tensor], true: list[Tensor]) -> float:
    """The largest error of the loss and of the gradients, relative to their largest entry."""
    pairs = zip(found, true, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def step(loss: Loss, tensors: list[Tensor]) -> list[Tensor]:
    found = loss(*tensors)
    return [found.detach(), *torch.autograd.grad(found, tensors[2:])]


def attention_step(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Any:
    backends = [SDPBackend.CUDNN_ATTENTION] if q.is_cuda else [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), d_out)


def run_case(case: Case, options: Options, table: Table, dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        return torch.randn(case.batch, heads, case.length, width, device=options.device, dtype=dtype)

    tensors = [draw(case.heads, case.width) for _ in range(2)]
    tensors += [draw(1, case.student_width).requires_grad_() for _ in range(2)]
    layer = [x.clone().requires_grad_() for x in (*tensors[:2], tensors[0])]
    d_out = draw(case.heads, case.width)
    true = truth(tensors)
    losses: dict[str, Loss] = {
        "foci": foci_loss,
        "eager": eager_loss,
        "torch.compile of eager": torch.compile(eager_loss, dynamic=False),
    }
    contestants = [Contestant("attention", lambda: attention_step(*layer, d_out))]
    errors: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, loss in losses.items():
        try:
            errors[name] = error_against(step(loss, tensors), true)
            if not errors[name] <= ALLOWED[dtype]:
                raise GateError(f"GATE: off by {errors[name]:.2g} of the largest")
            contestants.append(Contestant(name, lambda loss=loss: step(loss, tensors)))
        except Exception as error:  # noqa: BLE001 - an error is the result of a contestant
            notes[name] = format_error(error)
        free_memory()
    found = compare(contestants, make_clock(options.device), options.seconds)
    base = found["attention"]
    for name in ("attention", *losses):
        measured = notes.get(name, found.get(name))
        row: dict[str, Any] = {"case": case.name, "dtype": dtype_name(dtype), "contestant": name}
        if isinstance(measured, Measured):
            row |= {"ms": measured.ms, "spread": measured.spread, "rounds": measured.rounds, "mib": measured.mib}
            row |= {"over_attention": measured.ms / base.ms if isinstance(base, Measured) else None}
            row |= {"error": errors.get(name)}
            log(f"{case.name} {name}: {measured.ms:.3f} ms, {measured.mib:.0f} MiB")
        else:
            row["note"] = measured
            log(f"{case.name} {name}: {measured}")
        table.add(**row)


def main() -> None:
    options = parse_options("losses", __doc__ or "", (torch.float32,))
    table = Table(options.device, COLUMNS, options.path)
    for case in cases(options):
        if options.wants(case.name) and not options.out_of_time:
            for dtype in options.dtypes:
                run_case(case, options, table, dtype)
    title = "forward and backward, times SDPA's forward and backward of the teacher's layer"
    table.print_table(title, ("case", "dtype"), "over_attention", {})
    table.print_table("MiB beyond the inputs", ("case", "dtype"), "mib", {})
    table.print_failures()
    table.print_footer()


if __name__ == "__main__":
    main()
