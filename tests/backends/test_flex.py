"""FlexAttention: what it supports and refuses; it is compiled once per kind of call and never runs uncompiled.

On a CPU one program is compiled by default and more with -m slow; gradients and the log-sum-exp need -m gpu. Tests that
do not depend on compiled kernels use Dynamo with its eager backend, which takes one second instead of ten.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci import backends
from foci.arguments import Call, prepare_call
from foci.backends import flex
from foci.backends.flex import compiled_calls
from foci.masks.base import as_mask
from foci.runtime.cuda_graphs import capture_cuda_graph
from foci.scores import Dot
from tests.checker import Problem, Tensors, answers, check, eager_errors, truth

# PyTorch's compiler uses deprecated functions itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CASES: dict[str, dict[str, Any]] = {
    "window": {"mask": foci.causal & foci.window(50)},
    "prefix": {"mask": foci.causal | foci.prefix(40)},
    "empty_rows": {"mask": foci.causal, "queries": 300, "keys": 200},
    "one_query": {"mask": foci.window(30), "queries": 1},
    "few_queries": {"mask": foci.causal, "queries": 100, "heads": 4, "key_heads": 2},
    "whole_blocks": {"mask": foci.causal & foci.window(200), "queries": 256, "keys": 512},
    "padding": {"mask": foci.padding([100, 0])},
    "left_padding": {"mask": foci.padding([300, 7], side="left") & foci.causal},
    "documents": {"mask": foci.documents(torch.arange(300) // 70) & foci.causal, "queries": 300},
    "function": {"mask": foci.mask_function(lambda b, h, q, k: (q - k) % (h + 2) == b)},
    "entries": {"mask": torch.rand(2, 1, 200, 300, generator=torch.Generator().manual_seed(1)) > 0.7},
    "grouped": {"mask": foci.window(20, 20), "heads": 6, "key_heads": 2},
    "softcap": {"score": foci.Dot(0.3, softcap=2.0)},
    "softcap_window": {"score": foci.Dot(softcap=2.0), "mask": foci.causal & foci.window(70)},
    "alibi": {"bias": foci.ALiBi(), "mask": foci.causal},
    "buckets": {"bias": lambda t: foci.Buckets(t["table"], True, 128), "table": (32, 4)},
    "causal_buckets": {"bias": lambda t: foci.Buckets(t["table"], False, 20), "table": (8, 4), "mask": foci.causal},
    "added": {"bias": lambda t: t["entries"], "entries": (4, 200, 300)},
    "general": {"score": lambda t: foci.General(t["matrix"]), "matrix": (32, 32), "mask": foci.window(9)},
    "cosine": {"score": foci.Cosine(5.0), "mask": foci.causal},
    "positions": {"mask": foci.causal & foci.window(60), "positions": (torch.arange(200) * 2, torch.arange(300) + 5)},
    "narrow": {"mask": foci.causal, "width": 5, "value_width": 7},
    "odd": {"mask": foci.causal, "width": 72, "value_width": 40},
    "wider_values": {"mask": foci.causal, "width": 32, "value_width": 96},
}
INPUTS = ("query", "key", "value")
compiles_on_this_cpu = pytest.mark.skipif(
    flex.is_avx512_hidden(),
    reason="ATEN_CPU_CAPABILITY hides AVX-512: a compiled flex_attention of PyTorch alone is wrong under a causal mask",
)


def problem_of(name: str, dtype: torch.dtype = torch.float32) -> Problem:
    """A case as a problem of the checker: 2 sequences, 4 heads, 200 queries and 300 keys unless it says otherwise."""
    case = dict(CASES[name])
    heads, key_heads = case.pop("heads", 4), case.pop("key_heads", None)
    queries, keys, width = case.pop("queries", 200), case.pop("keys", 300), case.pop("width", 32)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (2, heads, queries, width),
        "key": (2, key_heads or heads, keys, width),
        "value": (2, key_heads or heads, keys, case.pop("value_width", width)),
    }
    shapes |= {key: case.pop(key) for key in ("table", "entries", "matrix") if key in case}
    generator = torch.Generator().manual_seed(len(name))
    tensors = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}

    def arguments(leaves: Tensors) -> dict[str, Any]:
        device = leaves["query"].device
        made = {
            key: value(leaves) if callable(value) and not isinstance(value, foci.Mask) else value
            for key, value in case.items()
        }
        if isinstance(made.get("mask"), Tensor):
            made["mask"] = made["mask"].to(device)
        return {key: leaves[key] for key in INPUTS} | made

    return Problem(tensors, arguments, dtype, fixed=frozenset({"table", "entries"}))


def check_output(problem: Problem) -> None:
    """Checks the output against the tolerance; on a CPU there are no gradients and no log-sum-exp."""
    with torch.no_grad():
        out = foci.attention(**problem.arguments(problem.leaves(problem.dtype, "cpu")), backend="flex")
    assert isinstance(out, Tensor)
    true = truth(problem, lse=False)
    eager = eager_errors(problem, true)
    check({"out": out}, {"out": true["out"]}, {"out": eager["out"]}, problem.dtype)


def call_of(queries: int = 20, keys: int = 30, width: int = 8, lse: bool = False, **arguments: Any) -> Call:
    q, k = torch.randn(2, 4, queries, width), torch.randn(2, 4, keys, width)
    given = {"score": Dot(), "mask": None, "bias": None, "sink": None, "positions": None, "dropout": 0.0} | arguments
    return prepare_call(q, k, k, needs_lse=lse, **given)


class Counter:
    """Dynamo's eager backend, which counts the graphs that it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Traces programs without compiling them, and supports everything that is supported on a GPU."""
    counter = Counter()
    compiling = torch.compile
    monkeypatch.setattr(flex, "cpu_refusals", lambda call: [])
    monkeypatch.setattr(
        compiled_calls.torch, "compile", lambda f, **options: compiling(f, **({"backend": counter} | options))
    )
    compiled_calls.get_program.cache_clear()
    yield counter
    compiled_calls.get_program.cache_clear()


@pytest.mark.slow
@compiles_on_this_cpu
def test_a_compiled_program_equals_the_reference() -> None:
    check_output(problem_of("empty_rows"))


@pytest.mark.parametrize("name", CASES)
def test_a_traced_program_equals_the_reference(name: str, counter: Counter) -> None:
    problem = problem_of(name)
    check_output(problem)
    assert counter.graphs == 1


def test_the_log_sum_exp_is_natural_and_minus_infinity_for_fully_masked_rows(counter: Counter) -> None:
    q, k = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 5, 4)
    out, weights = foci.attention(q, k, k, mask=foci.causal, backend="flex", return_weights=True)
    _, expected = foci.attention(q, k, k, mask=foci.causal, backend="reference", return_weights=True)
    assert torch.equal(weights.lse.isneginf(), expected.lse.isneginf())
    assert weights.lse[..., :2].isneginf().all()
    torch.testing.assert_close(weights.lse, expected.lse)
    assert bool((out[..., :2, :] == 0).all())


SHAPES = [(200 + 7 * i, 300 + 13 * i) for i in range(12)]


def test_twelve_shapes_compile_twice(counter: Counter) -> None:
    """Once for the first lengths, once for dynamic lengths."""
    for queries, keys in SHAPES:
        q, k = torch.randn(2, 2, queries, 8), torch.randn(2, 2, keys, 8)
        out = foci.attention(q, k, k, mask=foci.causal & foci.window(20), backend="flex")
        torch.testing.assert_close(out, foci.attention(q, k, k, mask=foci.causal & foci.window(20)))
    assert counter.graphs == 2
    assert compiled_calls.get_program.cache_info().currsize == 1


def test_new_numbers_do_not_recompile(counter: Counter) -> None:
    q = torch.randn(1, 2, 150, 8)
    for number in (3, 50, 149):
        mask = (foci.causal & foci.window(number)) | foci.prefix(number // 2) | foci.causal.at(-number)
        out = foci.attention(q, q, q, mask=mask, backend="flex")
        torch.testing.assert_close(out, foci.attention(q, q, q, mask=mask))
    assert counter.graphs == 1


def test_each_kind_of_call_has_its_own_function(counter: Counter) -> None:
    """There are more kinds than Dynamo would recompile one function for."""
    q = torch.randn(1, 2, 30, 8)
    with torch._dynamo.config.patch(recompile_limit=2):
        for softcap in (1.0, 2.0, 3.0, 4.0):
            foci.attention(q, q, q, score=foci.Dot(softcap=softcap), backend="flex")
    assert counter.graphs == compiled_calls.get_program.cache_info().currsize == 4


def test_raises_at_the_recompile_limit(counter: Counter) -> None:
    q = torch.randn(1, 1, 10, 4)

    def attend(word: str) -> None:
        mask = foci.mask_function(lambda b, h, i, j: (i >= j) & (word != ""))
        foci.attention(q, q, q, mask=mask, backend="flex")

    with torch._dynamo.config.patch(recompile_limit=2):
        attend("one")
        attend("two")
        with pytest.raises(RuntimeError, match=r"as often as .*recompile_limit allows; use backend='blocked'"):
            attend("three")


def test_a_mask_function_that_does_not_compile_raises(counter: Counter) -> None:
    q = torch.randn(1, 1, 10, 4)

    def untraceable(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return i >= j

    mask = foci.mask_function(untraceable)
    with pytest.raises(RuntimeError, match=r"does not compile for this call \(.*backend='blocked'"):
        foci.attention(q, q, q, mask=mask, backend="flex")


def test_raises_where_torch_compile_is_switched_off(counter: Counter) -> None:
    q = torch.randn(1, 1, 10, 4)
    off = pytest.raises(RuntimeError, match=r"torch\.compile is switched off")
    with torch.compiler.set_stance("force_eager"), off:
        foci.attention(q, q, q, mask=foci.window(2), backend="flex")


class FlexModel(torch.nn.Module):
    """Two layers whose attention runs as a compiled program."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.attend = torch.nn.ModuleList(FlexLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, attend in zip(self.layers, self.attend, strict=True):
            x = x + attend(layer(x))
        return x


class FlexLayer(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        out = foci.attention(q, q, q, mask=foci.causal & foci.window(3), backend="flex")
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("options", [{}, {"keep": foci.Keep(top=2)}, {"layers": [1]}], ids=["lazy", "kept", "one"])
def test_a_watched_model_runs_compiled_programs(options: Any, counter: Counter) -> None:
    """`watch` switches torch.compile off for models but not for the programs of foci."""
    model, x = FlexModel(), torch.randn(2, 12, 8)
    with torch.no_grad():
        expected = model(x)
        with foci.watch(model, **options) as seen, foci.watch(model):
            found = model(x)
    torch.testing.assert_close(found, expected)
    assert (seen.calls, len(seen.layers)) == (2, 1 if options.get("layers") else 2)
    # One program returns the log-sum-exp, the other does not.
    assert counter.graphs == 2


def test_another_thread_runs_compiled_programs_during_watch(counter: Counter) -> None:
    model, x = FlexModel(), torch.randn(2, 12, 8)
    with torch.no_grad():
        expected = model(x)

    def run() -> Tensor:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    with foci.watch(FlexModel()), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(run).result(), expected)
    assert counter.graphs == 1


@pytest.mark.parametrize("name", ["window", "documents", "causal_buckets", "entries", "function"])
def test_runs_inside_a_larger_compiled_graph(name: str, counter: Counter) -> None:
    compiled = torch.compile(foci.attention, fullgraph=True, backend="eager")
    leaves = problem_of(name).leaves(torch.float32, "cpu")
    arguments = problem_of(name).arguments({key: leaf.detach() for key, leaf in leaves.items()})
    out = compiled(**arguments, backend="flex")
    torch.testing.assert_close(out, foci.attention(**arguments, backend="reference"))


def test_block_lists_of_a_mask_without_tensors_are_cached_and_bounded() -> None:
    flex._block_lists_cache.clear()
    first, again = (flex.get_block_lists(call_of(mask=foci.causal & foci.window(5))) for _ in range(2))
    assert again[1] is first[1]
    with torch.inference_mode():
        _, inside = flex.get_block_lists(call_of(mask=foci.window(7)))
    assert inside is not None
    assert not inside.partial.order.is_inference()
    for length in range(2 * flex.MAX_CACHED_BLOCK_MASKS):
        flex.get_block_lists(call_of(mask=foci.causal, keys=40 + length))
    assert len(flex._block_lists_cache) == flex.MAX_CACHED_BLOCK_MASKS


def test_block_lists_are_cached_until_the_ids_change() -> None:
    flex._block_lists_cache.clear()
    ids = torch.arange(20) // 7
    first, again = (flex.get_block_lists(call_of(keys=20, mask=foci.documents(ids) & foci.causal)) for _ in range(2))
    assert again[1] is first[1]
    ids += 1
    assert flex.get_block_lists(call_of(keys=20, mask=foci.documents(ids) & foci.causal))[1] is not first[1]
    assert flex.get_block_lists(call_of(keys=20, mask=foci.documents(ids.clone()) & foci.causal))[1] is not first[1]


def test_each_stream_has_its_own_block_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream would not wait until the lists are computed."""
    flex._block_lists_cache.clear()
    found = []
    for stream in (1, 2, 1):
        monkeypatch.setattr(flex, "current_stream_number", lambda device, stream=stream: stream)
        found.append(flex.get_block_lists(call_of(mask=foci.window(4)))[1])
    assert found[0] is found[2] is not found[1]


def test_block_lists_are_not_cached_during_cuda_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured CUDA graph computes nothing until it is replayed, and then the lengths may differ."""
    lengths = torch.tensor([30, 12])
    flex._block_lists_cache.clear()
    before = [flex.get_block_lists(call_of(mask=mask))[1] for mask in (foci.window(4), foci.padding(lengths))]
    monkeypatch.setattr(flex, "is_capturing_cuda_graph", lambda tensor: True)
    after = [
        flex.get_block_lists(call_of(mask=mask))[1] for mask in (foci.window(4), foci.padding(lengths), foci.window(5))
    ]
    assert after[0] is before[0]
    assert after[1] is not before[1]
    assert len(flex._block_lists_cache) == 2


@pytest.mark.parametrize("mask", [torch.ones(20, 30).bool(), lambda b, h, q, k: q >= k], ids=["entries", "function"])
def test_block_lists_of_functions_and_dense_masks_are_not_cached(mask: Any) -> None:
    flex._block_lists_cache.clear()
    mask = as_mask(mask) if isinstance(mask, torch.Tensor) else foci.mask_function(mask)
    flex.get_block_lists(call_of(mask=mask))
    flex.get_block_lists(call_of(mask=mask & foci.causal))
    flex.get_block_lists(call_of(mask=foci.causal, positions=(torch.arange(20), None)))
    assert not flex._block_lists_cache


def test_inputs_are_released_after_a_call(counter: Counter) -> None:
    q, k, ids = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8), torch.arange(40) // 9
    foci.attention(q, k, k, mask=foci.documents(ids) & foci.causal, bias=foci.ALiBi(), backend="flex")
    references = [weakref.ref(tensor) for tensor in (q, k)]
    del q, k, ids
    gc.collect()
    assert not any(reference() is not None for reference in references)


def test_tabulated_buckets_equal_the_bias() -> None:
    """Also beyond the largest distance, where all distances share a bucket."""
    for both, reach in ((True, 128), (False, 50), (True, 9)):
        bias = foci.Buckets(torch.randn(32 if reach > 9 else 8, 3), both, reach)
        table = flex.tabulate_buckets(bias)
        distance = torch.arange(-3 * reach, 3 * reach + 1)
        zero = torch.zeros_like(distance)
        where = foci.masks.tile.Tile(zero, torch.arange(3).unsqueeze(-1), zero, zero, zero, distance)
        assert torch.equal(table.term(where), bias.term(where))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"score": foci.Additive(torch.ones(8))}, "Additive is not a dot product"),
        ({"dropout": 0.5}, "dropout"),
        ({"bias": foci.Relative(torch.ones(5, 8))}, "Relative adds more than one number per entry"),
        ({"bias": foci.ALiBi(torch.ones(4, requires_grad=True))}, "ALiBi needs a gradient"),
        ({"bias": torch.zeros(20, 30, requires_grad=True)}, "DenseBias needs a gradient"),
        ({"lse": True}, "no log-sum-exp on a CPU"),
        ({"queries": 0}, "is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_unsupported_calls(arguments: dict[str, Any], reason: str) -> None:
    reasons = flex.refuses(call_of(**arguments))
    assert any(reason in one for one in reasons), reasons


def test_refuses_gradients_on_a_cpu() -> None:
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="no backward on a CPU"):
        foci.attention(q, q, q, backend="flex")


def test_refuses_float64_and_torch_func() -> None:
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        foci.attention(q, q, q, backend="flex")
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda k: foci.attention(x, k, x, backend="flex").sum())(x)
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vmap(lambda x: foci.attention(x, x, x, backend="flex"))(torch.randn(2, 3, 4))


def test_reports_missing_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert any("no-such-compiler is not on the PATH" in reason for reason in flex.refuses(call_of()))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert any("TORCHDYNAMO_DISABLE" in reason for reason in flex.refuses(call_of()))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: None)
    assert flex.missing_requirement("cuda") == "Triton is not installed"


def test_wide_heads_and_large_grids_are_refused_on_a_gpu() -> None:
    assert flex.cuda_refusals(call_of(width=257)) == ["FlexAttention supports widths up to 256, got 257"]
    assert flex.cuda_refusals(call_of(width=256)) == []
    many = torch.zeros(65536, 1, 1, 1)
    reasons = flex.cuda_refusals(prepare_call(many, many, many, Dot(), None, None, None, None, 0.0, False))
    assert reasons == ["FlexAttention supports at most 65,535 sequences or heads"]


def test_kernel_widths() -> None:
    assert [flex.kernel_width(width, torch.bfloat16) for width in (1, 16, 72, 256)] == [16, 16, 72, 256]
    assert [flex.kernel_width(width, torch.float32) for width in (1, 16, 72, 256)] == [16, 16, 128, 256]


@compiles_on_this_cpu
def test_is_used_on_a_cpu_only_when_named() -> None:
    q = torch.randn(1, 2, 10, 8)
    plan = foci.plan(q, q, q, mask=foci.window(3))
    assert plan.chosen in {"cpu_c", "blocked"}
    assert "flex       compiling takes 10 s or more on a CPU; use it with backend='flex'" in str(plan)
    assert "reference  it builds the whole matrix; use it with backend='reference'" in str(plan)
    assert foci.plan(q, q, q, mask=foci.window(3), backend="flex").chosen == "flex"


def test_is_refused_on_a_cpu_whose_avx512_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert "ATEN_CPU_CAPABILITY hides the AVX-512" in "; ".join(flex.refuses(call_of()))


def test_a_backend_that_refuses_by_default_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (backends.sdpa, backends.cpu_c, backends.blocked):
        monkeypatch.setattr(backend, "refuses", lambda call: ["no"])
    with pytest.raises(ValueError, match="no backend supports this call"):
        backends.choose_backend(call_of(), None)
    assert backends.choose_backend(call_of(), "reference") is backends.reference


@compiles_on_this_cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "empty_rows"])
def test_every_compiled_program_equals_the_reference(name: str) -> None:
    check_output(problem_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["window", "softcap_window", "alibi"])
def test_half_precision_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    check_output(problem_of(name, dtype))


@pytest.mark.slow
def test_twelve_compiled_shapes_equal_the_reference() -> None:
    """Dynamo's limit is eight recompilations; a program that ran uncompiled would raise."""
    mask = foci.causal & foci.window(20)
    for queries, keys in SHAPES:
        q, k = torch.randn(2, 2, queries, 16), torch.randn(2, 2, keys, 16)
        torch.testing.assert_close(
            foci.attention(q, k, k, mask=mask, backend="flex"), foci.attention(q, k, k, mask=mask)
        )


GPU_CASES = [(name, torch.bfloat16) for name in CASES]
GPU_CASES += [(name, torch.float32) for name in ("window", "softcap_window", "narrow", "odd", "wider_values")]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), GPU_CASES)
def test_on_a_gpu_it_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    """The output, the log-sum-exp and the gradients of both."""
    problem = problem_of(name, dtype)
    true = truth(problem)
    check(answers(problem, "flex", device="cuda"), true, eager_errors(problem, true), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("needs_grad", [False, True], ids=["forward", "backward"])
def test_on_a_gpu_twelve_shapes_stay_compiled(needs_grad: bool) -> None:
    mask = foci.causal & foci.window(20)
    compiled_calls.get_program.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for queries, keys in SHAPES:
        q, k = (torch.randn(2, 2, n, 64, device="cuda", requires_grad=needs_grad) for n in (queries, keys))
        out = foci.attention(q, k, k, mask=mask, backend="flex")
        expected = foci.attention(q, k, k, mask=mask, backend="blocked")
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        if needs_grad:
            found, true = (torch.autograd.grad(result.sum(), (q, k)) for result in (out, expected))
            torch.testing.assert_close(found, true, atol=1e-3, rtol=1e-3)
    assert compiled_calls.get_program.cache_info().currsize == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.gpu
def test_on_a_gpu_a_watched_model_has_gradients() -> None:
    model, x = FlexModel().cuda(), torch.randn(2, 150, 8, device="cuda")
    model(x).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with foci.watch(model) as seen:
        model(x).square().sum().backward()
    assert seen.calls == 2
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-3, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["static", "lengths"])
def test_on_a_gpu_each_replay_of_a_cuda_graph_uses_the_current_lengths(mask: str) -> None:
    """Cached block lists would be those of other lengths."""
    q, lengths = torch.randn(2, 2, 300, 16, device="cuda"), torch.tensor([300, 20], device="cuda")

    def run() -> Tensor:
        rule = foci.causal & foci.window(40) if mask == "static" else foci.causal & foci.padding(lengths)
        out = foci.attention(q, q, q, mask=rule, backend="flex")
        assert isinstance(out, Tensor)
        return out

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph, out = capture_cuda_graph(run)
        for some in ([300, 20], [20, 300], [150, 0]):
            lengths.copy_(torch.tensor(some))
            graph.replay()
            torch.testing.assert_close(out, run())


@pytest.mark.gpu
def test_on_a_gpu_only_masks_of_a_function_use_it_by_default() -> None:
    q = torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    mask = foci.mask_function(lambda batch, head, query, key: (query + key) % 2 == 0)
    assert foci.plan(q, q, q, mask=mask).chosen == "flex"
    for arguments in ({"mask": foci.causal & foci.window(9)}, {"score": foci.Dot(softcap=5.0)}):
        assert foci.plan(q, q, q, **arguments).chosen == "triton"


@pytest.mark.gpu
def test_on_a_gpu_a_window_over_a_long_sequence_takes_linear_memory() -> None:
    q = torch.randn(1, 1, 131072, 64, device="cuda", dtype=torch.bfloat16)
    mask = foci.causal & foci.window(1024)
    foci.attention(q, q, q, mask=mask, backend="flex")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    foci.attention(q, q, q, mask=mask, backend="flex")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["window", "documents", "causal_buckets", "function"])
def test_on_a_gpu_it_runs_inside_a_larger_compiled_graph(name: str) -> None:
    problem = problem_of(name)
    leaves = {key: leaf.detach() for key, leaf in problem.leaves(torch.float32, "cuda").items()}
    arguments = problem.arguments(leaves)
    out = torch.compile(foci.attention, fullgraph=True)(**arguments, backend="flex")
    expected = foci.attention(**arguments, backend="blocked")
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
