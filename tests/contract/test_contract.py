"""The contract: every backend equals the reference within the tolerance, or refuses with a reason.

Every pair of choices (shape, mask, bias, score, dtype, sink, with or without the log-sum-exp) is run by default, every
combination of shape, mask, bias and score with -m slow, and the same cells on a GPU with -m gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle, islice, product
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import foci
from foci import backends
from foci.backends import BACKEND_NAMES, BACKENDS, blocked, strips
from tests.checker import Problem, Tensors, answers, check, eager_errors, taken_off, truth
from tests.contract.cells import CHOICES, SHAPES, Cell, name_of, possible, problem_of
from tests.contract.pairwise import pairs_of
from tests.contract.table import NAMED, all_cells, matches, must_refuse, refused_lines, supported_cells

MODULES = dict(zip(BACKEND_NAMES, BACKENDS, strict=True))
FREE = ("dtype", "sink", "lse")
EMPTY_ROWS = ("causal", "padding", "left_padding", "documents", "entries", "outside")


@cache
def expected(name: str, device: str = "cpu") -> tuple[Tensors, Tensors]:
    """The exact results of a cell, and the errors of eager code on the device."""
    cell = dict(zip(CHOICES, name.split("-"), strict=True))
    problem = problem_of(cell)
    true = truth(problem, lse=cell["lse"] == "lse")
    return true, eager_errors(problem, true, device)


@contextmanager
def count_runs(module: ModuleType) -> Iterator[list[str]]:
    """The calls that a backend runs, with their sinks where it has them."""
    runs: list[str] = []

    def counted(name: str, call: Any) -> Any:
        result = originals[name](call)
        if result is not None:
            runs.append(name)
        return result

    originals = {name: getattr(module, name) for name in ("run", "run_with_sink") if hasattr(module, name)}
    with mock.patch.multiple(module, **{name: partial(counted, name) for name in originals}):
        yield runs


def run_and_check(cell: Cell, backend: str, device: str = "cpu", cancels: bool = False) -> None:
    """Runs a cell on a backend and checks it; `cancels`: gradients may cancel to rounding errors."""
    problem = problem_of(cell)
    module = MODULES[backend]
    with count_runs(module) as runs:
        found = answers(problem, backend, device=device, lse=cell["lse"] == "lse")
    assert len(runs) == 1
    true, eager = expected(name_of(cell), device)
    check(found, true, eager, problem.dtype, [taken_off(true, problem.dtype)] if cancels else [])


def plan_of(problem: Problem, cell: Cell, device: str = "cpu", backend: str | None = None) -> backends.Plan:
    arguments = problem.arguments(problem.leaves(problem.dtype, device))
    return foci.plan(**arguments, backend=backend, return_weights=cell["lse"] == "lse")


def cells_of(*names: str) -> list[object]:
    return [
        pytest.param(backend, cell, id=f"{backend}-{name_of(cell)}")
        for backend in names
        for cell in supported_cells("cpu", backend)
    ]


@pytest.mark.parametrize(("backend", "cell"), cells_of(*BACKEND_NAMES))
def test_a_backend_equals_the_reference(backend: str, cell: Cell) -> None:
    assert plan_of(problem_of(cell), cell, backend=backend).chosen == backend
    run_and_check(cell, backend)


@pytest.mark.parametrize("cell", all_cells(), ids=name_of)
def test_the_default_choice_equals_the_reference(cell: Cell) -> None:
    """Calls without backend=; only these take the shortcut for plain calls."""
    found = answers(problem_of(cell), None, lse=cell["lse"] == "lse")
    check(found, *expected(name_of(cell)), problem_of(cell).dtype)


@pytest.mark.parametrize(("backend", "cell"), cells_of("blocked"))
def test_small_strips_equal_the_reference(backend: str, cell: Cell) -> None:
    with mock.patch.object(strips, "MAX_CPU_STRIP_ENTRIES", 48 // torch.get_num_threads()):
        run_and_check(cell, backend)


def test_small_strips_give_many_strips() -> None:
    q = torch.zeros(2, 4, 13, 8)
    with (
        mock.patch.object(strips, "MAX_CPU_STRIP_ENTRIES", 48 // torch.get_num_threads()),
        mock.patch.object(blocked, "attend_strip", wraps=blocked.attend_strip) as attend,
    ):
        foci.attention(q, q, q, mask=foci.window(3), backend="blocked")
    assert attend.call_count > 16


@pytest.mark.parametrize("cell", all_cells(), ids=name_of)
def test_the_table_lists_every_refusal(cell: Cell) -> None:
    problem = problem_of(cell)
    plan = plan_of(problem, cell)
    assert set(plan.refusals) == {name for name in BACKEND_NAMES if must_refuse("cpu", name, cell)}
    assert all(reason for reasons in plan.refusals.values() for reason in reasons)
    supporting = [name for name in BACKEND_NAMES if name not in plan.refusals and name != "reference"]
    assert plan.chosen == supporting[0]
    for name, reasons in plan.refusals.items():
        with pytest.raises(ValueError, match=f"backend '{name}' refuses this call") as caught:
            answers(problem, name)
        assert all(reason in str(caught.value) for reason in reasons)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_every_line_of_the_table_is_needed(backend: str) -> None:
    lines = refused_lines("cpu", backend)
    cells = [dict(zip(NAMED, values, strict=True)) for values in product(*(CHOICES[name] for name in NAMED))]
    deciding = [[matches(line, cell) for line in lines] for cell in cells]
    for index, line in enumerate(lines):
        assert len(line) <= 2
        assert all(values <= set(CHOICES[name]) for name, values in line.items())
        assert any(row[index] and sum(row) == 1 for row in deciding), f"line {index} of {backend} is not needed"


@pytest.mark.parametrize("backend", [name for name in BACKEND_NAMES if supported_cells("cpu", name)])
def test_the_default_run_covers_every_pair(backend: str) -> None:
    met = {pair for cell in supported_cells("cpu", backend) for pair in pairs_of(cell, CHOICES)}
    for shape, mask in product(CHOICES["shape"], CHOICES["mask"]):
        cell = dict.fromkeys(CHOICES, "none") | {"shape": shape, "mask": mask, "score": "dot"}
        assert ((("shape", shape), ("mask", mask)) in met) != must_refuse("cpu", backend, cell)


def empty_row_cells() -> list[object]:
    """Calls with fully masked rows, for every backend that supports them."""
    plain = dict.fromkeys(CHOICES, "none") | {"dtype": "f32", "lse": "lse"}
    choices = product(["dot", "additive"], ["more_queries", "square"], EMPTY_ROWS)
    cells = [plain | {"score": score, "shape": shape, "mask": mask} for score, shape, mask in choices]
    return [
        pytest.param(backend, cell, id=f"{backend}-{name_of(cell)}")
        for backend, cell in product(BACKEND_NAMES, cells)
        if not must_refuse("cpu", backend, cell) and (cell["mask"], cell["shape"]) != ("causal", "square")
    ]


@pytest.mark.parametrize(("backend", "cell"), empty_row_cells())
def test_fully_masked_rows_give_zeros(backend: str, cell: Cell) -> None:
    found = answers(problem_of(cell), backend)
    empty = truth(problem_of(cell))["lse"].isneginf()
    assert bool(empty.any())
    assert bool((found["out"][empty] == 0).all())
    assert torch.equal(found["lse"].isneginf(), empty)
    assert bool((found["gradient of query"][empty] == 0).all())
    assert all(bool(tensor.isfinite().all()) for name, tensor in found.items() if name != "lse")


@pytest.mark.gpu
@pytest.mark.parametrize("cell", all_cells(), ids=name_of)
@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("device", ["cuda"])
def test_on_a_gpu_a_backend_equals_the_reference_or_refuses(device: str, backend: str, cell: Cell) -> None:
    problem = problem_of(cell)
    reasons = plan_of(problem, cell, device).refusals.get(backend)
    if reasons is None:
        # PyTorch's backward of FlexAttention rounds a little more where a gradient cancels.
        run_and_check(cell, backend, device, cancels=backend == "flex")
        return
    assert all(reasons)
    with pytest.raises(ValueError, match=f"backend '{backend}' refuses this call"):
        answers(problem, backend, device=device)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", CHOICES["shape"])
def test_kernels_equal_the_reference_in_the_interpreter(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # The interpreter has no bfloat16 products, and warns where an unused lane overflows.
    cells = [cell for cell in all_cells() if cell["shape"] == shape and cell["dtype"] in {"f16", "f32"}]
    supported = [cell for cell in cells if "triton" not in plan_of(problem_of(cell), cell).refusals]
    if not supported:
        pytest.skip(f"no cell of the shape {shape} is for these kernels")
    for cell in supported:
        run_and_check(cell, "triton")


def every_cell(shape: str, mask: str) -> list[Cell]:
    """Every bias and score; dtype, sink and log-sum-exp alternate, so that all of their combinations occur."""
    turns = cycle(product(*(CHOICES[name] for name in FREE)))
    combinations = list(product(CHOICES["bias"], CHOICES["score"]))
    cells = []
    for (bias, score), free in zip(combinations, islice(turns, len(combinations)), strict=True):
        cell = {"shape": shape, "mask": mask, "bias": bias, "score": score} | dict(zip(FREE, free, strict=True))
        if SHAPES[shape].heads is None:
            cell["sink"] = "none"
        if all(possible(*pair) for pair in pairs_of(cell, CHOICES)):
            cells.append(cell)
    return cells


@pytest.mark.slow
@pytest.mark.parametrize("shape", CHOICES["shape"])
@pytest.mark.parametrize("mask", CHOICES["mask"])
def test_every_combination_equals_the_reference_or_is_refused(shape: str, mask: str) -> None:
    for cell in every_cell(shape, mask):
        refusals = plan_of(problem_of(cell), cell).refusals
        assert set(refusals) == {name for name in BACKEND_NAMES if must_refuse("cpu", name, cell)}, name_of(cell)
        for backend in BACKEND_NAMES:
            if backend not in refusals:
                run_and_check(cell, backend, cancels=True)


def test_the_table_and_the_cells_have_the_same_choices() -> None:
    assert set(NAMED) | set(FREE) == set(CHOICES)


def test_new_memory_is_filled_with_nan() -> None:
    assert bool(torch.empty(3).isnan().all())
    assert bool(torch.zeros(3).new_empty(2).isnan().all())
    assert bool(torch.empty_like(torch.zeros(2)).isnan().all())
    # Inside PyTorch's own kernels too.
    assert bool(torch.ops.aten.empty.memory_format([3]).isnan().all())
