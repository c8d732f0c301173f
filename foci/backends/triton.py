"""Our own GPU kernels, for calls that no fused kernel of PyTorch supports: masks, softcaps, biases, additive scores."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from foci.arguments import Call
from foci.gpu import additive, attention
from foci.gpu.compilation import prepare_compiler
from foci.gpu.self_check import address_failure
from foci.runtime.device import has_triton, is_triton_interpreted
from foci.scores import Additive

NAME = "triton"


def refuses(call: Call) -> list[str]:
    launcher, reasons = find_launcher(call), triton_device_refusals(call)
    if launcher is None:
        return [*reasons, f"the score {type(call.score).__name__} is not a dot product or Additive"]
    return [*reasons, *launcher.refuses(call)]


def refuses_by_default(call: Call) -> list[str]:
    """Why it is not chosen unless the caller names it."""
    if is_on_cpu(call):
        return ["Triton's interpreter is for tests; use it with backend='triton'"]
    return []


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    prepare_compiler()
    launcher = find_launcher(call)
    assert launcher is not None
    return launcher.run(call)  # type: ignore[no-any-return]


def run_with_sink(call: Call) -> tuple[Tensor, Tensor | None] | None:
    """Output and log-sum-exp with the sink of the call; None if the kernels of this call have no sinks."""
    if find_launcher(call) is not attention or not attention.adds_sink(call):
        return None
    return attention.run_with_sink(call)


def is_batch_invariant(call: Call) -> bool:
    """Whether the result of a sequence does not depend on the others: additive scores split keys by the batch size."""
    return find_launcher(call) is attention


def describe_limits(call: Call) -> dict[str, str]:
    failure = None if is_on_cpu(call) else address_failure(call.sizes.device.index or 0)
    if failure is None:
        return {}
    return {"launches": f"every launch goes through Triton, which takes longer: the self-check failed ({failure})"}


def find_launcher(call: Call) -> ModuleType | None:
    """The kernels for the score of the call, with `refuses` and `run` like a backend; None if there are none."""
    if type(call.score) is Additive:
        return additive
    return attention if call.score.is_dot_product else None


def triton_device_refusals(call: Call) -> list[str]:
    if call.is_vmapped or call.is_transformed:
        return ["torch.func transforms are not supported: pass the batch dimension to the call instead"]
    if not has_triton():
        return ["Triton is not installed"]
    if call.sizes.device.type == "cuda" or (is_on_cpu(call) and is_triton_interpreted()):
        return []
    return [f"the queries are on {call.sizes.device.type}, not on cuda"]


def is_on_cpu(call: Call) -> bool:
    return call.sizes.device.type == "cpu"
