"""`attn_implementation="foci"`: the logits, gradients and weights of eager code, in every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.same import assert_same

transformers = pytest.importorskip("transformers")

import foci.hf  # noqa: E402
from foci.capture.huggingface import masks  # noqa: E402
from tests.capture.architectures import (  # noqa: E402
    ARCHITECTURES,
    LEFT,
    OWN_ATTENTION,
    PARTLY_OWN,
    RIGHT,
    TOKENS,
    made,
    main_output,
    matrices,
    run,
)
from tests.cases import mark_most_slow  # noqa: E402

# Two of the models use a deprecated function of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

TEXT = [name for name, architecture in ARCHITECTURES.items() if architecture.pads]
DECODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "decoder"]


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def assert_equal_runs(model: Any, inputs: dict[str, Any], rows: Tensor | None = None) -> None:
    """Eager and foci agree in the output and in the gradient of every parameter; of `rows` only, where given."""
    expected, expected_gradients = run(model, "eager", inputs, rows)
    found, gradients = run(model, "foci", inputs, rows)
    assert_same(found, expected, slack=128)
    assert gradients.keys() == expected_gradients.keys()
    # A gradient that is 0 up to rounding (that of a key bias) is compared on the scale of the others.
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert_same(gradients[name] / largest, gradient / largest, f"gradient of {name}", slack=64)


def test_enough_architectures_of_each_kind() -> None:
    kinds = [architecture.kind for architecture in ARCHITECTURES.values()]
    least = {"encoder": 5, "decoder": 5, "encoder-decoder": 5, "vision": 5, "speech": 3, "vision-language": 3}
    assert len(kinds) >= 35
    assert {kind: kinds.count(kind) >= number for kind, number in least.items()} == dict.fromkeys(least, True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_gradients_equal_those_of_eager_attention(name: str) -> None:
    architecture = ARCHITECTURES[name]
    assert_equal_runs(made(architecture), architecture.inputs())


@pytest.mark.parametrize("side", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", TEXT)
def test_padded_sequences(name: str, side: Tensor) -> None:
    architecture = ARCHITECTURES[name]
    inputs = architecture.inputs() | {"attention_mask": side.long()}
    # Every output row of an encoder-decoder is real: the padding is in the source.
    assert_equal_runs(made(architecture), inputs, None if architecture.kind == "encoder-decoder" else side)


@pytest.mark.parametrize("side", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2", "gemma2", "gpt-oss", "llama4", "t5", "t5gemma"])
def test_padded_sequences_by_rules(name: str, side: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, but the masks count as large: nothing of size n x n is built for them."""
    monkeypatch.setattr(masks, "MAX_SMALL_MASK_ENTRIES", 0)
    test_padded_sequences(name, side)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_output_attentions_equals_eager(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, inputs = made(architecture), architecture.inputs()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = matrices(model(**inputs, output_attentions=True))
        model.set_attn_implementation("foci")
        found = matrices(model(**inputs, output_attentions=True))
        plain = matrices(model(**inputs))
    assert found.keys() == expected.keys()
    assert plain == {}
    for place, matrix in expected.items():
        assert_same(found[place], matrix, place, slack=64)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_packed_sequences(name: str) -> None:
    """Restarting positions mark packed sequences if there is neither a mask nor a cache."""
    architecture = ARCHITECTURES[name]
    model = made(architecture)
    inputs: dict[str, Any] = {"input_ids": TOKENS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)}
    if architecture.kind == "decoder":
        inputs["use_cache"] = False
    assert_equal_runs(model, inputs)


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_step_by_step(name: str) -> None:
    """Three tokens, then two, then one and one: the logits of one pass over all."""
    model = made(ARCHITECTURES[name])
    inputs = {"input_ids": TOKENS, "attention_mask": LEFT.long()}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = stepped(model, inputs)
        model.set_attn_implementation("foci")
        assert_same(stepped(model, inputs)[LEFT], expected[LEFT], slack=128)


def stepped(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    logits, past, start = [], None, 0
    for count in (3, 2, 1, 1):
        stop = start + count
        mask = inputs["attention_mask"][:, :stop]
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
        out = model(
            inputs["input_ids"][:, start:stop],
            attention_mask=mask,
            past_key_values=past,
            position_ids=positions,
            use_cache=True,
        )
        logits.append(out.logits)
        past, start = out.past_key_values, stop
    return torch.cat(logits, 1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "t5", "bart"])
def test_generation_equals_eager_generation(name: str, cache: str) -> None:
    architecture = ARCHITECTURES[name]
    model = made(architecture)
    inputs = {"input_ids": TOKENS, "attention_mask": LEFT.long() if architecture.kind == "decoder" else RIGHT.long()}
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    options |= {"eos_token_id": None, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    said = {}
    for kind in ("eager", "foci"):
        model.set_attn_implementation(kind)
        said[kind] = model.generate(**inputs, **options)
    assert torch.equal(said["foci"].sequences, said["eager"].sequences)
    for found, expected in zip(said["foci"].scores, said["eager"].scores, strict=True):
        assert_same(found, expected, slack=128)


def test_dropout_is_used_only_in_training() -> None:
    model = made(ARCHITECTURES["llama"], attention_dropout=0.5)
    model.set_attn_implementation("foci")
    with torch.no_grad():
        still = [model(TOKENS).logits for _ in range(2)]
        model.train()
        torch.manual_seed(0)
        moving = [model(TOKENS).logits for _ in range(2)]
        torch.manual_seed(0)
        again = model(TOKENS).logits
    assert torch.equal(*still)
    assert not torch.equal(*moving)
    assert torch.equal(again, moving[0])


def test_a_custom_mask() -> None:
    """A 4-D mask is handed on as it is: bool, or what eager code adds."""
    model = made(ARCHITECTURES["llama"])
    allowed = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.5
    allowed |= torch.eye(7, dtype=torch.bool)
    floats = torch.zeros(2, 1, 7, 7).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(TOKENS, attention_mask=floats).logits
        model.set_attn_implementation("foci")
        assert_same(model(TOKENS, attention_mask=floats).logits, expected, slack=128)
        assert_same(model(TOKENS, attention_mask=allowed).logits, expected, slack=128)


def test_half_precision() -> None:
    model = made(ARCHITECTURES["gpt-oss"]).bfloat16()
    with torch.no_grad():
        model.set_attn_implementation("foci")
        out = model(TOKENS, output_attentions=True)
    assert out.logits.dtype == out.attentions[0].dtype == torch.bfloat16


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_their_own_attention_stay_correct_and_warn(name: str, padded: bool) -> None:
    """bloom and mpt accept any implementation and never call it, others reject it: their masks still work."""
    architecture = OWN_ATTENTION[name]
    model = made(architecture)
    inputs = architecture.inputs() | ({"attention_mask": RIGHT.long()} if padded else {})
    rows = RIGHT if padded else slice(None)
    with torch.no_grad():
        model.config._attn_implementation_internal = "eager"
        expected = main_output(model(**inputs))
        model.config._attn_implementation_internal = "foci"
        if architecture.kind == "decoder":
            with pytest.warns(UserWarning, match="'foci' is not used by a module of this model"):
                found = main_output(model(**inputs))
        else:
            found = main_output(model(**inputs))
    assert_same(found[rows], expected[rows], slack=64)


@pytest.mark.parametrize("name", PARTLY_OWN)
def test_models_with_partly_their_own_attention_stay_correct_and_warn(name: str) -> None:
    architecture = PARTLY_OWN[name]
    padding = {"attention_mask": RIGHT.long()} if architecture.pads else {}
    with pytest.warns(UserWarning, match="'foci' is not used by a module of this model"):
        assert_equal_runs(made(architecture), architecture.inputs() | padding)


@pytest.mark.parametrize("name", ["falcon", "gptj", "gpt-neo"])
def test_models_that_reject_the_implementation(name: str) -> None:
    architecture = OWN_ATTENTION[name]
    config = getattr(transformers, architecture.config)(**architecture.sizes)
    config._attn_implementation = "foci"
    with pytest.raises(KeyError, match="foci"):
        getattr(transformers, architecture.model)(config)


def test_unsupported_options_are_refused() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="block_indices must be None, got blocks chosen by index"):
        foci.hf.attention_forward(torch.nn.Module(), q, q, q, None, block_indices=torch.zeros(1))


@pytest.mark.parametrize("queries", [1, 5])
def test_without_a_mask_the_module_decides_causality(queries: int) -> None:
    """Without a mask, `is_causal` decides, the argument before the module's own; a window is cut out of it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 4, generator=generator) for n in (queries, 5, 5))
    module = torch.nn.Module()

    def attended(**options: Any) -> Tensor:
        return foci.hf.attention_forward(module, q, k, v, None, **options)[0].transpose(1, 2)

    assert torch.equal(attended(is_causal=False), foci.attention(q, k, v))
    assert torch.equal(attended(), foci.attention(q, k, v, mask=foci.causal))
    module.is_causal = False  # type: ignore[assignment]
    assert torch.equal(attended(), foci.attention(q, k, v))
    expected = foci.attention(q, k, v, mask=foci.causal & foci.window(1))
    torch.testing.assert_close(attended(is_causal=True, sliding_window=2), expected)


def test_without_a_mask_empty_slots_of_a_static_cache_are_dropped() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4, generator=generator) for n in (3, 8, 8))
    out, _ = foci.hf.attention_forward(torch.nn.Module(), q, k, v, None)
    expected = foci.attention(q, k[:, :, :3], v[:, :, :3], mask=foci.causal)
    assert torch.equal(out.transpose(1, 2), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gpt-oss", "t5", "bart"])
def test_on_a_gpu_masks_stay_rules(name: str, side: Tensor) -> None:
    """As on a CPU, with the kernels of the device; padding and windows are not built there, however small."""
    architecture = ARCHITECTURES[name]
    model = made(architecture).cuda()
    inputs = {key: given.cuda() for key, given in (architecture.inputs() | {"attention_mask": side.long()}).items()}
    rows = slice(None) if architecture.kind == "encoder-decoder" else side
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = main_output(model(**inputs)).cpu()
        model.set_attn_implementation("foci")
        found = main_output(model(**inputs)).cpu()
        with foci.watch(model, keep=foci.Keep(top=2, picture=3)) as seen:
            watched = main_output(model(**inputs)).cpu()
    # float32 products on a GPU, which eager code takes otherwise than fused kernels.
    assert_same(found[rows], expected[rows], slack=2**14)
    assert_same(watched[rows], expected[rows], slack=2**14)
    assert seen.calls == len(seen.layers) > 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("padded", mark_most_slow([True, False], 2))
def test_compiled_in_one_graph(padded: bool) -> None:
    architecture = ARCHITECTURES["llama"]
    model = made(architecture)
    model.set_attn_implementation("foci")
    inputs = architecture.inputs() | ({"attention_mask": LEFT.long()} if padded else {})
    rows = LEFT if padded else slice(None)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = main_output(model(**inputs))
        found = main_output(torch.compile(model, backend="eager", fullgraph=True)(**inputs))
    assert_same(found[rows], expected[rows], slack=64)
