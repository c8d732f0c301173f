"""Statistics, slices and products as operators: compiled, exported, loaded in another process, and in CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import foci
from foci.arguments import prepare_call
from foci.runtime.saved_graphs import GRAPH_READERS
from foci.statistics import Request
from foci.weights import operators
from foci.weights.encoding import decode_call, encode_call, is_encodable
from foci.weights.parts_file import SAVED_CLASSES
from foci.weights.tensors import find_tensors, select_matrix_fields
from tests.tensors import qkv, randn

# PyTorch warns about its own code where it traces an autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")

ROOT = Path(__file__).parent.parent.parent
IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
LENGTHS = torch.tensor([4, 6])
POSITIONS = torch.tensor([5, 0, 3, 1, 4, 2])

# Tensors besides query, key and value, and the arguments that are built from them. The heads are grouped.
CASES: dict[str, tuple[list[Tensor], Callable[..., dict[str, Any]]]] = {
    "plain": ([], dict),
    "window": ([], lambda: {"mask": foci.causal & foci.window(2) | foci.prefix(1)}),
    "padding": ([LENGTHS], lambda lengths: {"mask": foci.causal & foci.padding(lengths)}),
    "documents": (
        [IDS, randn(4, seed=4)],
        lambda ids, slopes: {"mask": foci.documents(ids), "bias": foci.ALiBi(slopes)},
    ),
    "entries": ([torch.ones(6, 6).tril(1).bool()], lambda seen: {"mask": ~foci.causal | seen}),
    "additive": ([randn(4, 8, seed=4)], lambda weight: {"score": foci.Additive(weight), "mask": foci.causal}),
    "softcap": (
        [randn(4, seed=4)],
        lambda sink: {"score": foci.Dot(0.5, 2.0), "mask": foci.causal.at(1), "sink": sink},
    ),
    "general": ([randn(8, 8, seed=4)], lambda matrix: {"score": foci.General(matrix)}),
    "cosine": ([randn(4, seed=4)], lambda scale: {"score": foci.Cosine(scale)}),
    "buckets": ([randn(8, 4, seed=4)], lambda table: {"bias": foci.Buckets(table, True, 6)}),
    "relative": ([randn(5, 8, seed=4)], lambda keys: {"bias": foci.Relative(keys)}),
    "bias": ([randn(4, 6, 6, seed=4)], lambda bias: {"bias": bias}),
    "positions": ([POSITIONS], lambda positions: {"positions": (positions, positions), "mask": foci.causal}),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build_weights(case: str) -> foci.Weights:
    tensors, build = CASES[case]
    return foci.attention(*qkv(), return_weights=True, **build(*tensors))[1]


def differentiable_results(weights: foci.Weights, x: Tensor) -> dict[str, Tensor]:
    return {
        "entropy": weights.entropy(),
        "received": weights.received(),
        "received from some": weights.received(queries=slice(1, 4)),
        "received per key head": weights.received(per="kv_head"),
        "distance": weights.distance(),
        "rows": weights[..., 2, :],
        "some rows of one head": weights[1, 2, [0, -1]],
        "column": weights[..., 1],
        "product": weights @ x,
        "transposed product": weights.mT @ x,
        "left product": x.mT @ weights,
        "left transposed product": x.mT @ weights.T,
        "groups": weights.grouped([(0, 2), (2, 5)], [0, 0, 1, 1, None, 2]),
        "entropy of the mean": weights.mean("heads").entropy(),
        "row of the mean": weights.mean("heads")[:, 3],
        "product of the mean": weights.mean("heads") @ x[:, 0],
        "entropy of one sequence": weights[0].entropy(),
        "dense": weights.dense(),
    }


def other_results(weights: foci.Weights) -> dict[str, Tensor]:
    summary = weights.summary(top=2, picture=3)
    assert summary.top is not None
    assert summary.largest_logit is not None
    assert summary.picture is not None
    assert summary.distance is not None
    return {
        "top values": weights.top(2).values,
        "top keys": weights.top(2).keys,
        "top keys of two heads": weights[:, 1:3].top(1).keys,
        "picture": weights.picture(2, 3),
        "maxima": weights.picture(2, 3, "max"),
        "largest logit": weights.largest_logit(),
        "sink": weights.sink_mass(),
        "summary entropy": summary.entropy,
        "summary received": summary.received,
        "summary distance": summary.distance,
        "summary logit": summary.largest_logit,
        "summary picture": summary.picture,
        "summary keys": summary.top.keys,
    }


def all_results(weights: foci.Weights, x: Tensor) -> dict[str, Tensor]:
    return differentiable_results(weights, x) | {
        name: result.detach() for name, result in other_results(weights).items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, result in expected.items():
        torch.testing.assert_close(found[name], result, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", CASES)
def test_a_call_is_the_same_after_encoding(case: str) -> None:
    call = build_weights(case)[1, 1:3].call
    encoded = encode_call(call)
    decoded = decode_call(encoded)
    assert encode_call(decoded) == encoded
    for tensor, same in zip(
        find_tensors(select_matrix_fields(call)), find_tensors(select_matrix_fields(decoded)), strict=True
    ):
        assert tensor is same


def test_every_saved_class_is_encoded_in_a_case() -> None:
    texts = " ".join(encode_call(build_weights(case).call).text for case in CASES)
    assert [kind for kind in SAVED_CLASSES if f"{kind}(" not in texts] == []


def test_a_text_that_encodes_no_call_is_refused() -> None:
    encoded = encode_call(build_weights("plain").call)
    for text in ("(1,2)", "(print('x'),None,None,None,None,None,None)", "(t9,None,None,None,None,None,None)"):
        with pytest.raises((ValueError, IndexError), match=r"text must be an encoded call|malformed|out of range"):
            decode_call(encoded._replace(text=text))


def compute_results(case: str) -> tuple[Callable[..., dict[str, Tensor]], list[Tensor]]:
    """A function that computes all results, and its arguments, which need gradients."""
    tensors, build = CASES[case]

    def compute(x: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> dict[str, Tensor]:
        return all_results(foci.attention(q, k, v, return_weights=True, **build(*rest))[1], x)

    inputs = (randn(2, 4, 6, 3, seed=7), *qkv(), *tensors)
    return compute, [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], leaves: list[Tensor]) -> None:
    assert_same(found, expected)
    assert [found[name].requires_grad for name in expected] == [x.requires_grad for x in expected.values()]
    # Nothing depends on the values.
    wanted = [leaf for leaf in leaves if leaf.requires_grad and leaf is not leaves[3]]
    torch.testing.assert_close(*(gradients(results, wanted) for results in (found, expected)))


@pytest.mark.parametrize("case", CASES)
def test_operators_compute_what_eager_code_computes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, leaves = compute_results(case)
    expected = compute(*leaves)
    monkeypatch.setattr(operators, "is_operator_call", lambda call, lse: True)
    assert_same_gradients(compute(*leaves), expected, leaves)


@pytest.mark.parametrize("case", ["padding", pytest.param("additive", marks=pytest.mark.slow)])
def test_all_results_compile_as_one_graph(case: str) -> None:
    compute, leaves = compute_results(case)
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    assert_same_gradients(compiled(*leaves), compute(*leaves), leaves)


def gradients(results: dict[str, Tensor], wanted: list[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of all results together, each with its own slope."""
    differentiable = [result for result in results.values() if result.requires_grad]
    assert len(differentiable) > 10
    slopes = [randn(*result.shape, seed=9) for result in differentiable]
    return torch.autograd.grad(differentiable, wanted, slopes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_results_compile_with_inductor() -> None:
    def compute(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        out, weights = foci.attention(q.mT.contiguous().mT, k, v, mask=foci.causal, return_weights=True)
        return out, weights.entropy().sin(), weights[..., -1, :] + weights.mT @ x[..., 0, 0], weights.top(2).keys + 1

    leaves = [x.clone().requires_grad_() for x in (*qkv(), randn(6, 1, 2, seed=7).squeeze(1).unsqueeze(-1))]
    found, expected = (function(*leaves) for function in (torch.compile(compute, fullgraph=True), compute))
    torch.testing.assert_close(found, expected)
    totals = [sum(result.float().sum() for result in results if result.requires_grad) for results in (found, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(total, leaves) for total in totals))


def operator_inputs(case: str, permuted: bool, averaged: bool) -> tuple[Tensor, list[Any]]:
    """The log-sum-exp and the encoded call of a case, with gradients; `permuted`: with heads after the tokens."""
    tensors, build = CASES[case]
    q, k, v = qkv()
    if permuted:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    leaves = [x.requires_grad_(x.is_floating_point()) for x in (q, k, *(x.clone() for x in tensors))]
    arguments = build(*leaves[2:])
    with torch.no_grad():
        lse = foci.attention(*leaves[:2], v, return_weights=True, **arguments)[1].lse
    options = {"score": foci.Dot(), "mask": None, "bias": None, "sink": None, "positions": None} | arguments
    return lse, [*encode_call(prepare_call(*leaves[:2], v, **options, dropout=0.0, needs_lse=True)), averaged]


OPERANDS: dict[str, tuple[Callable[[], list[Tensor]], list[int]]] = {
    "entropy": (list, []),
    "distance": (list, []),
    "received": (list, []),
    "transposed_product": (lambda: [randn(2, 1, 6, 3, seed=8).requires_grad_()], []),
    "group_mass": (lambda: [torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 1, 1, 1, 1])], [2, 1]),
    "entries": (lambda: [torch.tensor([3, 0]), torch.tensor([5, 1, 1])], []),
}
CHECKED = [
    *(("entropy", "documents", False), ("distance", "positions", True), ("received", "relative", False)),
    *(("transposed_product", "additive", True), ("group_mass", "buckets", False), ("entries", "softcap", False)),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize(("name", "case", "averaged"), CHECKED, ids=[f"{name} {case}" for name, case, _ in CHECKED])
def test_operators_with_gradients_pass_opcheck(name: str, case: str, averaged: bool, permuted: bool) -> None:
    lse, encoded = operator_inputs(case, permuted, averaged and name != "transposed_product")
    operands, sizes = OPERANDS[name]
    torch.library.opcheck(operators.OPERATORS[name].overload, (lse, operands(), sizes, *encoded))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
def test_the_statistics_operator_passes_opcheck(permuted: bool) -> None:
    lse, (q, k, *encoded) = operator_inputs("padding", permuted, averaged=False)
    request = Request(True, True, (2, 3, "mean"), 2, True, True, int32_keys=True)
    inputs = (lse, *operators.encode_request(request), q.detach(), k.detach(), *encoded)
    torch.library.opcheck(operators.statistics_operator.overload, inputs)
    assert operators.decode_request(*operators.encode_request(request)) == request


@pytest.mark.parametrize("name", OPERANDS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    operands = [x.double()[:1] if x.is_floating_point() else x for x in OPERANDS[name][0]()]
    q, k = (x.double()[:1, :2].requires_grad_() for x in qkv()[:2])
    slopes = randn(2, seed=4, dtype=torch.float64).requires_grad_()

    def run(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
        mask, bias = foci.documents(IDS[:1]), foci.ALiBi(slopes)
        call = prepare_call(q, k[:, :1], k[:, :1], foci.Dot(), mask, bias, None, None, 0.0, True)
        lse = foci.attention(q, k[:, :1], k[:, :1], mask=mask, bias=bias, return_weights=True)[1].lse
        result: Tensor = operators.OPERATORS[name](lse.detach(), operands, OPERANDS[name][1], *encode_call(call), False)
        return result

    assert torch.autograd.gradcheck(run, (q, k, slopes))


def test_fake_tensors_have_the_shapes_and_dtypes_of_the_results() -> None:
    expected = all_results(build_weights("padding"), randn(2, 4, 6, 3))
    with FakeTensorMode() as mode:
        q, k, v, lengths, x = (mode.from_tensor(x) for x in (*qkv(), LENGTHS, randn(2, 4, 6, 3)))
        mask = foci.causal & foci.padding(lengths)
        found = all_results(foci.attention(q, k, v, mask=mask, return_weights=True)[1], x)
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
        name: (x.shape, x.dtype) for name, x in expected.items()
    }


def test_a_mask_function_is_traced_operation_by_operation() -> None:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        mask = foci.mask_function(lambda b, h, q, k: (q - k) % 2 == 0)
        _, weights = foci.attention(q, k, v, mask=mask, return_weights=True)
        return weights.entropy(), weights.received(), weights[..., 2, :], weights.top(2).keys, weights.mT @ v[:, :1]

    assert not is_encodable(foci.mask_function(lambda b, h, q, k: q == k))
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv()), compute(*qkv()))


def test_indices_out_of_range_are_refused_while_tracing() -> None:
    def compute(q: Tensor, index: Tensor) -> Tensor:
        return foci.attention(q, q, q, return_weights=True)[1][..., index, :]

    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    q = qkv()[0]
    torch.testing.assert_close(compiled(q, torch.tensor([1, -1])), compute(q, torch.tensor([1, -1])))
    with pytest.raises(RuntimeError, match="out of range"):
        compiled(q, torch.tensor([1, 6]))


class Statistics(torch.nn.Module):
    """All results of one call, as a module, which is what export takes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, x: Tensor) -> dict[str, Tensor]:
        mask = foci.causal & foci.padding(lengths)
        out, weights = foci.attention(q, k, v, mask=mask, return_weights=True)
        return {"out": out, **all_results(weights, x)}


LOADING = """
import foci, sys, torch
inputs, expected = torch.load(sys.argv[2])
assert not any(name.startswith("foci.weights") for name in sys.modules)
found = torch.export.load(sys.argv[1]).module()(*inputs)
torch.testing.assert_close(found, expected)
print(len(found))
"""


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["export", "strict"])
def test_exported_results_load_in_a_process_that_only_imported_foci(strict: bool, tmp_path: Path) -> None:
    inputs = (*qkv(), LENGTHS, randn(2, 4, 6, 3, seed=7))
    exported = torch.export.export(Statistics(), inputs, strict=strict)
    nodes = [node for graph in exported.graph_module.modules() for node in graph.graph.nodes]
    expected = Statistics()(*inputs)
    assert_same(exported.module()(*inputs), expected)
    named = {node.target._opname for node in nodes if getattr(node.target, "namespace", "") == "foci"}
    assert named == {"statistics", *OPERANDS}
    if strict:
        return
    torch.export.save(exported, tmp_path / "statistics.pt2")
    torch.save((inputs, expected), tmp_path / "expected.pt")
    command = [sys.executable, "-c", LOADING, str(tmp_path / "statistics.pt2"), str(tmp_path / "expected.pt")]
    loaded = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert loaded.stdout.strip() == str(len(expected)), loaded.stderr[-2000:]


def test_an_eager_call_registers_no_operators() -> None:
    program = (
        "import torch, foci; from foci.runtime.operators import UNREGISTERED; x = torch.randn(1, 2, 4, 8);"
        "foci.attention(x, x, x, return_weights=True)[1].entropy(); assert len(UNREGISTERED) > 10;"
        "import torch._export.serde.serialize; assert not UNREGISTERED; assert torch.ops.foci.entropy.default"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_readers_of_saved_graphs_exist_in_this_pytorch() -> None:
    for name in GRAPH_READERS:
        assert find_spec(name) is not None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", ["window", "padding", "additive", "bias"])
def test_results_run_in_cuda_graphs(case: str) -> None:
    """Once captured by hand around the compiled function, once by the compiler."""
    compute, leaves = compute_results(case)
    inputs = [x.detach().cuda() for x in leaves]
    expected = compute(*inputs)
    by_compiler = torch.compile(compute, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(by_compiler(*inputs), expected)
    compiled = torch.compile(compute, fullgraph=True)
    compiled(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*inputs)
    changed = [x.add_(0.25) if x.is_floating_point() else x for x in inputs]
    graph.replay()
    assert_same(captured, compute(*changed))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_results_compile_with_gradients(dtype: torch.dtype) -> None:
    compute, leaves = compute_results("window")
    leaves = [x.detach().to("cuda", dtype).requires_grad_() for x in leaves]
    close = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    found, expected = (function(*leaves) for function in (torch.compile(compute, fullgraph=True), compute))
    torch.testing.assert_close(found, expected, **close)
    totals = [
        sum(x.float().square().sum() for x in results.values() if x.requires_grad) for results in (found, expected)
    ]
    torch.testing.assert_close(*(torch.autograd.grad(total, leaves[:3]) for total in totals), **close)
