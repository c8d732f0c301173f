"""Statistics, slices and products of the weights as operators of PyTorch, for compiled and exported functions.

A tracer sees one operator in place of the pass over the matrix: foci::statistics for those without gradients, and
foci::entropy, distance, received, transposed_product, group_mass and entries, each with its backward. Eager calls run
without them: dispatching an operator costs more than a small pass. So do masks, scores and biases of other libraries,
which have no text: their passes are traced operation by operation.

B batch, H heads (1 for the mean over heads), Tq queries, Tk keys, E width of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci import statistics
from foci.arguments import Call
from foci.runtime.operators import Operator, operator
from foci.runtime.tracing import enable_autograd_in_operator, is_traced
from foci.statistics import Request
from foci.weights import key_mass, slices
from foci.weights.encoding import ENCODED_FIELDS, EncodedCall, decode_call, encode_call, is_encodable

# How an encoded call is passed to an operator.
CALL_SCHEMA = "Tensor q, Tensor k, Tensor[] tensors, SymInt[] numbers, str text, bool averaged"
# What an operator with gradients takes: tensors such as the factor of a product, and sizes of its result.
INPUT_SCHEMA = f"Tensor lse, Tensor[] operands, SymInt[] sizes, {CALL_SCHEMA}"

Compute = Callable[[Call, Tensor, list[Tensor], list[int], bool], Tensor]


def is_operator_call(call: Call, lse: Tensor) -> bool:
    """Whether the statistics of this call are operators: while tracing, if the call has a text."""
    return is_traced(lse) and has_operators(call)


def has_operators(call: Call) -> bool:
    """Whether the call has a text, so that its statistics are operators while tracing."""
    return all(is_encodable(getattr(call, name)) for name in ENCODED_FIELDS)


def compute_statistics(call: Call, lse: Tensor, request: Request, averaged: bool) -> Mapping[str, Tensor]:
    """`statistics.compute_statistics`, as an operator while tracing; results may share memory."""
    repeated = None if averaged else statistics.run_repeated_pass(call, lse, request)
    if repeated is not None:
        return repeated
    if not is_operator_call(call, lse):
        return statistics.compute_statistics(call, lse, request, averaged)
    q, k, tensors, numbers, text = encode_call(call)
    # Not under no_grad, which an exported graph keeps as a graph of its own.
    encoded = EncodedCall(q.detach(), k.detach(), [tensor.detach() for tensor in tensors], numbers, text)
    results = statistics_operator(lse.detach(), *encode_request(request), *encoded, averaged)
    return dict(zip(result_names(request), results, strict=True))


def compute_entropy(call: Call, lse: Tensor, averaged: bool) -> Tensor:
    """Entropy of each query's weights in nats, differentiable: (B, H, Tq)."""
    return ENTROPY(call, lse, [], [], averaged)


def compute_distance(call: Call, lse: Tensor, averaged: bool) -> Tensor:
    """Mean distance between each query and its keys, differentiable: (B, H, Tq)."""
    return DISTANCE(call, lse, [], [], averaged)


def compute_received(call: Call, lse: Tensor, averaged: bool) -> Tensor:
    """The sum of weights of each key, differentiable: (B, H, Tk)."""
    return RECEIVED(call, lse, [], [], averaged)


def compute_transposed_product(call: Call, lse: Tensor, x: Tensor, averaged: bool) -> Tensor:
    """Wᵀ x, differentiable: x (B or 1, H or 1, Tq, E) or (Tq, E) -> (B, H, Tk, E)."""
    return TRANSPOSED_PRODUCT(call, lse, [x], [], averaged)


def compute_group_mass(
    call: Call, lse: Tensor, rows: tuple[Tensor, int], columns: tuple[Tensor, int], averaged: bool
) -> Tensor:
    """Mean weight of the keys of one group for queries of another, differentiable: (B, H, query groups, key groups)."""
    return GROUP_MASS(call, lse, [rows[0], columns[0]], [rows[1], columns[1]], averaged)


def compute_entries(call: Call, lse: Tensor, rows: Tensor, columns: Tensor, averaged: bool) -> Tensor:
    """The weights of some queries for some keys, differentiable: (B, H, rows, columns)."""
    return ENTRIES(call, lse, [rows, columns], [], averaged)


def compute_key_mass(call: Call, lse: Tensor, rows: Tensor, keys: Tensor, averaged: bool) -> Tensor:
    """ln of the weight that some queries put on given keys, (B or 1, rows, K), differentiable: (B, H, rows)."""
    return KEY_MASS(call, lse, [rows, keys], [], averaged)


def encode_request(request: Request) -> tuple[str, list[int]]:
    """The names of the statistics, and the rows and columns of the picture and the number of top keys."""
    names = [
        name for name in ("entropy", "received", "largest_logit", "distance", "int32_keys") if getattr(request, name)
    ]
    rows, columns, reduce = request.picture or (0, 0, "")
    return " ".join([*names, reduce]), [rows, columns, request.top]


def decode_request(text: str, sizes: list[int]) -> Request:
    rows, columns, top = sizes
    names = text.split()
    reduce = next((name for name in names if name in {"mean", "max"}), None)
    flags = {name: True for name in names if name not in {"mean", "max"}}
    return Request(picture=None if reduce is None else (rows, columns, reduce), top=top, **flags)


def result_names(request: Request) -> list[str]:
    """The names of the results, in the order in which the operator returns them."""
    names = [name for name in ("entropy", "distance", "received", "largest_logit") if getattr(request, name)]
    names += ["picture"] if request.picture is not None else []
    return [*names, "top_values", "top_keys"] if request.top else names


def own_memory(result: Tensor) -> Tensor:
    """The result in dense memory of its own, as operators must return it."""
    dense = result.is_contiguous() and result.untyped_storage().nbytes() == result.numel() * result.element_size()
    return result if dense else result.clone(memory_format=torch.contiguous_format)


@operator("statistics", f"(Tensor lse, str names, SymInt[] sizes, {CALL_SCHEMA}) -> Tensor[]")
def statistics_operator(lse: Tensor, names: str, sizes: list[int], *inputs: Any) -> list[Tensor]:
    """Compute the requested statistics, without gradients."""
    *encoded, averaged = inputs
    request = decode_request(names, sizes)
    results = statistics.compute_statistics(decode_call(EncodedCall(*encoded)), lse, request, averaged)
    return [own_memory(results[name]) for name in result_names(request)]


@statistics_operator.register_fake
def _(lse: Tensor, names: str, sizes: list[int], q: Tensor, k: Tensor, *inputs: Any) -> list[Tensor]:
    request, averaged = decode_request(names, sizes), inputs[-1]
    lead = (q.shape[0], 1 if averaged else q.shape[1])
    shapes: dict[str, tuple[int, ...]] = {
        "entropy": (q.shape[2],),
        "distance": (q.shape[2],),
        "received": (k.shape[2],),
        "largest_logit": (),
        "picture": (sizes[0], sizes[1]),
        "top_values": (q.shape[2], sizes[2]),
        "top_keys": (q.shape[2], sizes[2]),
    }
    dtypes = {"top_keys": torch.int32 if request.int32_keys else torch.int64}
    return [
        q.new_empty((*lead, *shapes[name]), dtype=dtypes.get(name, softmax_dtype(q))) for name in result_names(request)
    ]


def softmax_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


@dataclass(frozen=True)
class Differentiable:
    """An operator with its backward: `forward` and `differentiable` compute the same, the second with a graph."""

    name: str
    forward: Compute
    differentiable: Compute
    shape: Callable[[Tensor, Tensor, list[Tensor], list[int]], tuple[int, ...]]

    def __call__(self, call: Call, lse: Tensor, operands: list[Tensor], sizes: list[int], averaged: bool) -> Tensor:
        if is_operator_call(call, lse):
            result: Tensor = OPERATORS[self.name](lse.detach(), operands, sizes, *encode_call(call), averaged)
            return result
        return (self.differentiable if call.needs_grad else self.forward)(call, lse, operands, sizes, averaged)


def define_operators(kind: Differentiable) -> Operator:
    """Defines foci::<name> and foci::<name>_backward, and returns the first."""

    @operator(kind.name, f"({INPUT_SCHEMA}) -> Tensor")
    def forward(lse: Tensor, operands: list[Tensor], sizes: list[int], *inputs: Any) -> Tensor:
        *encoded, averaged = inputs
        return own_memory(kind.forward(decode_call(EncodedCall(*encoded)), lse, operands, sizes, averaged))

    @forward.register_fake
    def _(lse: Tensor, operands: list[Tensor], sizes: list[int], q: Tensor, k: Tensor, *inputs: Any) -> Tensor:
        lead = (q.shape[0], 1 if inputs[-1] else q.shape[1])
        return q.new_empty((*lead, *kind.shape(q, k, operands, sizes)), dtype=softmax_dtype(q))

    @operator(f"{kind.name}_backward", f"(Tensor slope, bool[] needed, {INPUT_SCHEMA}) -> Tensor[]")
    def backward(slope: Tensor, needed: list[bool], *inputs: Any) -> list[Tensor]:
        return compute_gradients(kind, slope, needed, *inputs)

    @backward.register_fake
    def _(slope: Tensor, needed: list[bool], *inputs: Any) -> list[Tensor]:
        tensors = zip(gradient_inputs(*inputs), needed, strict=True)
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in tensors if need]

    def differentiate(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        return place_gradients(ctx, backward, slope)

    forward.register_autograd(differentiate, setup_context=save_inputs)
    return forward


def gradient_inputs(
    lse: Tensor, operands: list[Tensor], sizes: list[int], q: Tensor, k: Tensor, tensors: list[Tensor], *rest: Any
) -> list[Tensor]:
    """The inputs that may need a gradient; not the log-sum-exp, which the backward computes from query and key."""
    return [q, k, *operands, *tensors]


def compute_gradients(kind: Differentiable, slope: Tensor, needed: list[bool], *inputs: Any) -> list[Tensor]:
    """The gradients of the inputs that need one; each strip is recomputed, so that no matrix is kept."""
    lse, operands, sizes, q, k, tensors, numbers, text, averaged = inputs
    with enable_autograd_in_operator():
        pairs = zip((q, k, *operands, *tensors), needed, strict=True)
        leaves = [x.detach().requires_grad_(need) for x, need in pairs]
        others = 2 + len(operands)
        call = decode_call(EncodedCall(leaves[0], leaves[1], leaves[others:], numbers, text))
        result = kind.differentiable(call, lse, leaves[2:others], sizes, averaged)
        chosen = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(result, chosen, slope, materialize_grads=True)
    return [own_memory(gradient) for gradient in gradients]


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    lse, operands, ctx.sizes, q, k, tensors, ctx.numbers, ctx.text, ctx.averaged = inputs
    ctx.operand_count = len(operands)
    ctx.save_for_backward(lse, q, k, *operands, *tensors)


def place_gradients(ctx: Any, backward: Any, slope: Tensor) -> tuple[Any, ...]:
    """Runs the backward and arranges the gradients in the order of the inputs."""
    lse, q, k, *others = ctx.saved_tensors
    operands, tensors = others[: ctx.operand_count], others[ctx.operand_count :]
    needs = ctx.needs_input_grad
    needed = [bool(need) for need in (needs[3], needs[4], *(needs[1] or []), *(needs[5] or []))]
    found = iter(backward(slope, needed, lse, operands, ctx.sizes, q, k, tensors, ctx.numbers, ctx.text, ctx.averaged))
    placed = [next(found) if need else None for need in needed]
    d_operands, d_tensors = placed[2 : 2 + ctx.operand_count], placed[2 + ctx.operand_count :]
    # An empty list of sizes counts as a list of tensors.
    return None, d_operands, None if ctx.sizes else [], placed[0], placed[1], d_tensors, None, None, None


def compute_one(name: str, request: Request) -> Compute:
    """The forward of a statistic that the fast passes compute."""

    def compute(call: Call, lse: Tensor, operands: list[Tensor], sizes: list[int], averaged: bool) -> Tensor:
        repeated = None if averaged else statistics.run_repeated_pass(call, lse, request)
        results = statistics.compute_statistics(call, lse, request, averaged) if repeated is None else repeated
        return results[name]

    return compute


def differentiable_received(
    call: Call, lse: Tensor, operands: list[Tensor], sizes: list[int], averaged: bool
) -> Tensor:
    counted = torch.ones(call.q.shape[2], 1, device=call.device, dtype=call.softmax_dtype)
    return statistics.compute_transposed_product(call, counted, averaged).squeeze(-1)


def transposed_product(call: Call, lse: Tensor, operands: list[Tensor], sizes: list[int], averaged: bool) -> Tensor:
    return statistics.compute_transposed_product(call, operands[0], averaged)


def group_mass(call: Call, lse: Tensor, operands: list[Tensor], sizes: list[int], averaged: bool) -> Tensor:
    rows, columns = zip(operands, sizes, strict=True)
    return statistics.compute_group_mass(call, rows, columns, averaged)


def entries(call: Call, lse: Tensor, operands: list[Tensor], sizes: list[int], averaged: bool) -> Tensor:
    rows, columns = operands
    return slices.compute_entries(call, lse, rows, columns, averaged)


def mass_of_keys(call: Call, lse: Tensor, operands: list[Tensor], sizes: list[int], averaged: bool) -> Tensor:
    rows, keys = operands
    return key_mass.compute_key_mass(call, rows, keys, averaged)


ENTROPY = Differentiable(
    "entropy",
    compute_one("entropy", Request(entropy=True)),
    lambda call, lse, operands, sizes, averaged: statistics.compute_entropy(call, averaged),
    lambda q, k, operands, sizes: (q.shape[2],),
)
DISTANCE = Differentiable(
    "distance",
    compute_one("distance", Request(distance=True)),
    lambda call, lse, operands, sizes, averaged: statistics.compute_distance(call, averaged),
    lambda q, k, operands, sizes: (q.shape[2],),
)
RECEIVED = Differentiable(
    "received",
    compute_one("received", Request(received=True)),
    differentiable_received,
    lambda q, k, operands, sizes: (k.shape[2],),
)
TRANSPOSED_PRODUCT = Differentiable(
    "transposed_product",
    transposed_product,
    transposed_product,
    lambda q, k, operands, sizes: (k.shape[2], operands[0].shape[-1]),
)
GROUP_MASS = Differentiable("group_mass", group_mass, group_mass, lambda q, k, operands, sizes: (sizes[0], sizes[1]))
ENTRIES = Differentiable(
    "entries", entries, entries, lambda q, k, operands, sizes: (operands[0].shape[0], operands[1].shape[0])
)
KEY_MASS = Differentiable("key_mass", mass_of_keys, mass_of_keys, lambda q, k, operands, sizes: (operands[0].shape[0],))
OPERATORS = {
    kind.name: define_operators(kind)
    for kind in (ENTROPY, DISTANCE, RECEIVED, TRANSPOSED_PRODUCT, GROUP_MASS, ENTRIES, KEY_MASS)
}
