"""Calls of the attention interface of transformers are intercepted once, also under other torch function modes."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import foci
from foci.capture.recorder import Recorder
from foci.capture.torch_functions import record_intercepted_call

transformers = pytest.importorskip("transformers")

import foci.hf  # noqa: E402

IDS = torch.arange(12).view(1, 12)


def llama(layers: int = 3) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config).eval()


class Onlooker(TorchFunctionMode):
    """Another torch function mode, which counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.told.append(func)
        return func(*args, **(kwargs or {}))


def test_only_attention_calls_are_intercepted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def counted(self: Recorder, function: Any, args: Any, kwargs: Any) -> Any:
        told.append(function)
        return record_intercepted_call(self, function, args, kwargs)

    monkeypatch.setattr(Recorder, "intercept", counted)
    # Common calls of a model of transformers would not be handed over.
    monkeypatch.setattr(Recorder, "run_plain_call", lambda *call: None)
    model = llama()
    with foci.watch(model) as seen, torch.no_grad():
        assert torch._C._len_torch_function_stack() == 0
        model(IDS)
    assert told == [foci.attention] * 3
    assert seen.calls == 3


@pytest.mark.parametrize("outer", [True, False])
def test_nested_blocks_and_modes(outer: bool) -> None:
    model, onlooker = llama(), Onlooker()
    with torch.no_grad():
        expected = model(IDS).logits
        with ExitStack() as stack:
            if outer:
                stack.enter_context(onlooker)
            first = stack.enter_context(foci.watch(model))
            second = stack.enter_context(foci.watch(model, keep=foci.Keep(top=2, picture=4)))
            if not outer:
                stack.enter_context(onlooker)
            assert torch.equal(model(IDS).logits, expected)
    assert first.calls == second.calls == 3
    torch.testing.assert_close(first["L2"].entropy(), second["L2"].entropy())
    assert torch.equal(first["L1"].top(2).keys, second["L1"].top(2).keys)
    # The blocks come first, wherever the mode is: it gets the call that the last of them makes.
    assert onlooker.told.count(foci.attention) == 3


def test_output_attentions_under_watch() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        with foci.watch(model) as seen:
            given = model(IDS, output_attentions=True).attentions
    for number, (found, matrix) in enumerate(zip(given, expected, strict=True)):
        torch.testing.assert_close(found, matrix)
        torch.testing.assert_close(seen[f"L{number}"].dense(), matrix)


def test_attention_outside_the_interface_is_recorded() -> None:
    model = llama()

    def attends(module: nn.Module, args: Any, out: Tensor) -> None:
        q, k, v = torch.randn(3, 1, 2, 5, 8)
        F.scaled_dot_product_attention(q, k, v)

    model.model.layers[1].mlp.register_forward_hook(attends)
    with foci.watch(model) as seen, torch.no_grad():
        model(IDS)
    assert seen.calls == 4
    assert seen.layers["model.layers.1.mlp"].shape == (1, 2, 5, 5)


def test_a_model_that_is_not_watched_is_not_recorded() -> None:
    watched, other = llama(1), llama(2)
    other.set_attn_implementation("foci")
    with torch.no_grad():
        expected = other(IDS).logits
        with foci.watch(watched) as seen:
            assert torch.equal(other(IDS).logits, expected)
    assert seen.calls == 0
