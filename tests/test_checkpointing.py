"""Activation checkpointing: what a backward needs is computed again when it is read, and may be read only once."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import foci
from foci.backends.additive_cpu import AdditiveScores
from foci.backends.sdpa import cuda
from foci.backends.sdpa.cpu import cpu_flash, cpu_flash_backward
from foci.weights.dense_attention import attention_with_matrix
from tests.tensors import randn

Results = tuple[Tensor, ...]
Run = Callable[[Tensor, Tensor, Tensor], Results]


def with_lse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Results:
    out, weights = foci.attention(q, k, v, return_weights=True, **options)
    return out, weights.lse


def on_cuda(q: Tensor, k: Tensor, v: Tensor) -> Results:
    out, lse = cuda.FusedAttentionWithLse.apply(q, k, v, None, "flash", 0.5, True, 0.0)  # type: ignore[no-untyped-call]
    return out, lse


def loss(q: Tensor, k: Tensor, v: Tensor) -> Results:
    targets = torch.arange(q.shape[:-1].numel()).view(q.shape[:-1]) % 6
    return (foci.nn.token_loss(q, k[0, 0, :6] + v[0, 0, :6], targets, chunk=7),)


RUNS: dict[str, Run] = {
    "StripAttention": lambda q, k, v: with_lse(q, k, v, mask=foci.causal, backend="blocked"),
    "CpuFlashAttention": lambda q, k, v: with_lse(q, k, v, mask=foci.causal, backend="sdpa"),
    "AdditiveScores": lambda q, k, v: (AdditiveScores.apply(q, k, v[0, :, 0]),),  # type: ignore[no-untyped-call]
    "AttentionWithMatrix": lambda q, k, v: attention_with_matrix(q, k, v, bias=v[0, 0, :, :1].mT),
    "FusedAttentionWithLse": on_cuda,
    "TokenLossFunction": loss,
}


@pytest.fixture
def a_kernel_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of those that PyTorch has on CUDA."""

    def forward(*given: Any) -> Any:
        q, k, v = (x for x in given if isinstance(x, Tensor))
        return cpu_flash(q, k, v, 0.0, True, scale=0.5)

    def backward(name: str, ctx: Any, *given: Tensor) -> Any:
        d_out, q, k, v, out, lse, _ = given
        return cpu_flash_backward(d_out, q, k, v, out, lse, 0.0, True, scale=ctx.scale)

    monkeypatch.setattr(cuda, "run_forward", forward)
    monkeypatch.setattr(cuda, "run_backward", backward)


def gradients(run: Run, used: tuple[int, ...], again: bool) -> list[Tensor | None]:
    tensors = [randn(2, 2, 9, 8, seed=seed).requires_grad_() for seed in range(3)]
    # What is computed again is what comes before it too.
    q, k, v = (x * 1.5 for x in tensors)
    found = checkpoint(run, q, k, v, use_reentrant=False) if again else run(q, k, v)
    torch.stack([found[place].square().sum() for place in used]).sum().backward()
    return [tensor.grad for tensor in tensors]


def functions(result: Tensor) -> Iterator[str]:
    """The names of what made a result."""
    ahead, met = [result.grad_fn], set()
    while ahead:
        step = ahead.pop()
        if step is not None and step not in met:
            met.add(step)
            yield type(step).__name__
            ahead += [before for before, _ in step.next_functions]


@pytest.mark.usefixtures("a_kernel_of_the_cpu")
@pytest.mark.parametrize(
    ("name", "used"),
    [(name, (0,)) for name in RUNS]
    + [
        (name, used)
        for name in ("StripAttention", "CpuFlashAttention", "AttentionWithMatrix", "FusedAttentionWithLse")
        for used in ((1,), (0, 1))
    ],
)
def test_gradients_are_those_without_it(name: str, used: tuple[int, ...]) -> None:
    made = RUNS[name](*(randn(2, 2, 9, 8, seed=seed).requires_grad_() for seed in range(3)))
    assert f"{name}Backward" in set(functions(made[0]))
    for found, expected in zip(gradients(RUNS[name], used, True), gradients(RUNS[name], used, False), strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected)


def reads(function: ast.AST) -> int:
    """How often a function's text asks for what was saved."""
    return sum(isinstance(node, ast.Attribute) and node.attr == "saved_tensors" for node in ast.walk(function))


def test_every_backward_reads_what_was_saved_once() -> None:
    """The kernels of a GPU among them, whose functions do not run here."""
    found: dict[str, int] = {}
    for path in sorted(Path(foci.__file__).parent.rglob("*.py")):
        defined = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        found |= {f"{path.name}:{node.lineno}": reads(node) for node in defined if reads(node)}
    assert len(found) >= 8
    assert {place: times for place, times in found.items() if times > 1} == {}
