"""Transformers models under `foci.watch`: the statistics of eager attention, and an unchanged output."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foci
from tests.nn.same import assert_same

transformers = pytest.importorskip("transformers")

from foci.capture.huggingface import attention_source_of  # noqa: E402
from foci.capture.huggingface.switch import SWITCHED_CONFIGS, switch_implementation  # noqa: E402
from tests.capture.architectures import (  # noqa: E402
    ARCHITECTURES,
    LEFT,
    OWN_ATTENTION,
    PARTLY_OWN,
    RIGHT,
    TARGET,
    TOKENS,
    made,
    main_output,
)

# Some models use a deprecated function of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

# Their default is eager code, or no fused kernel supports the width of their values: equal within rounding.
ANOTHER_KERNEL = {
    "gemma2",
    "gpt-oss",
    "deepseek-v3",
    "deepseek-v3.2",
    "t5",
    "umt5",
    "switch",
    "t5gemma",
    "speech-to-text",
}

# In some versions of transformers their SDPA and eager code differ (no softcap, no causality).
NOT_WITH_SDPA = {"gemma2", "t5gemma", "umt5"}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


@contextmanager
def eager_matrices(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The matrices of eager code, by the name of the attention module."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, list[Tensor]] = {}
    choose = transformers.AttentionInterface.get_interface

    def spying(self: Any, name: str, default: Any) -> Any:
        function = choose(self, name, default)

        def spied(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out, weights = function(module, *args, **kwargs)
            found.setdefault(names[id(module)], []).append(weights)
            return out, weights

        return spied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AttentionInterface, "get_interface", spying)
        yield found


def in_eager(model: Any, inputs: dict[str, Any]) -> dict[str, list[Tensor]]:
    with ExitStack() as eager, torch.no_grad():
        for config in {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values():
            eager.enter_context(switch_implementation(config, "eager"))
        found = eager.enter_context(eager_matrices(model))
        model(**inputs)
    return found


def implementations(model: nn.Module) -> list[str]:
    return [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]


# The windows of Swin, which eager code returns one by one, are put back on the image: see test_vision_models.py.
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "swin"])
def test_statistics_equal_those_of_eager_matrices(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, inputs = made(architecture), architecture.inputs()
    if name in NOT_WITH_SDPA:
        for part in model.modules():
            if hasattr(part, "config"):
                part.config._attn_implementation_internal = "eager"
    before = implementations(model)
    with torch.no_grad():
        expected = main_output(model(**inputs))
        with foci.watch(model) as seen:
            found = main_output(model(**inputs))
    assert implementations(model) == before
    assert torch.equal(found, expected) or name in ANOTHER_KERNEL
    assert_same(found, expected, slack=64)
    eager = in_eager(model, inputs)
    pooled = {place for place in seen.layers if place.endswith("head.attention")}
    assert {place.split("#")[0] for place in seen.layers.keys() - pooled} == eager.keys()
    assert seen.calls == sum(map(len, eager.values())) + len(pooled) == len(seen.layers)
    assert seen.unseen == []
    for place, matrices in eager.items():
        for number, matrix in enumerate(matrices):
            assert_same_statistics(seen.layers[f"{place}#{number + 1}" if number else place], matrix)


def assert_same_statistics(layer: Any, matrix: Tensor) -> None:
    """Rounding errors of the logits carry over to the weights, so the tolerance grows with the logits."""
    slack = 64.0 + 8.0 * float(layer.largest_logit().abs().max())
    assert layer.shape == tuple(matrix.shape)
    assert_same(layer.weights.dense(), matrix, layer.name, slack)
    assert_same(layer.received(), matrix.sum(-2), f"received of {layer.name}", slack)
    entropy = torch.special.entr(matrix).sum(-1)
    assert_same(layer.entropy(), entropy, f"entropy of {layer.name}", 4 * slack)
    assert_same(layer.top(2).values, matrix.topk(2).values, f"top of {layer.name}", slack)


@pytest.mark.parametrize("side", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "gpt2", "llama", "gemma2", "gpt-oss", "bart", "t5"])
def test_padded_sequences_and_kept_statistics(name: str, side: Tensor) -> None:
    """Padding rows are fully masked here and uniform in eager code: only real rows are compared."""
    architecture = ARCHITECTURES[name]
    model, inputs = made(architecture), architecture.inputs() | {"attention_mask": side.long()}
    if name in NOT_WITH_SDPA:
        for part in model.modules():
            if hasattr(part, "config"):
                part.config._attn_implementation_internal = "eager"
    with torch.no_grad(), foci.watch(model, keep=foci.Keep(top=2, picture=3)) as seen:
        model(**inputs)
    for place, matrices in in_eager(model, inputs).items():
        layer, matrix = seen.layers[place], matrices[0]
        real = side if layer.queries in {"input", "source"} else torch.ones(2, matrix.shape[2], dtype=torch.bool)
        kept, true = layer.entropy().transpose(1, 2)[real], torch.special.entr(matrix).sum(-1).transpose(1, 2)[real]
        assert_same(kept, true, f"entropy of {place}", slack=256)
        kept, true = (top.transpose(1, 2)[real] for top in (layer.top(2).values, matrix.topk(2).values))
        assert_same(kept, true, f"top of {place}", slack=64)
        assert layer.picture(3, 3).shape == (*matrix.shape[:2], 3, 3)


def test_the_output_of_a_long_padded_batch_is_identical() -> None:
    """`foci.attention` itself would run another kernel at this length, whose last digits differ."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, **sizes, attn_implementation="sdpa")
    model, tokens = transformers.BertModel(config).eval(), torch.arange(600).view(2, 300) % 50
    with torch.no_grad():
        for options in ({}, {"attention_mask": torch.arange(300) < torch.tensor([[300], [200]])}):
            expected = model(tokens, **options).last_hidden_state
            with foci.watch(model):
                assert torch.equal(model(tokens, **options).last_hidden_state, expected)


def test_stacks_and_labels() -> None:
    model = made(ARCHITECTURES["bart"])
    with torch.no_grad(), foci.watch(model, tokenizer=lambda ids: "".join(f" {number}" for number in ids)) as seen:
        model(**ARCHITECTURES["bart"].inputs())
    assert seen.heads[0] == "encoder.L0H0"
    assert seen["cross.L1H1"].name == "model.decoder.layers.1.encoder_attn"
    assert (seen["cross.L0"].queries, seen["cross.L0"].keys) == ("target", "source")
    assert seen.labels["target"].texts[1] == tuple(f" {number}" for number in TARGET[1].tolist())
    assert len(seen.labels["source"]) == TOKENS.shape[1]


def test_each_tower_has_its_own_stack() -> None:
    model = made(ARCHITECTURES["llava"])
    with torch.no_grad(), foci.watch(model) as seen:
        model(**ARCHITECTURES["llava"].inputs())
    assert (seen["vision.L0"].queries, seen["text.L1"].keys) == ("patches", "input")
    patches = seen.labels["patches"]
    assert (patches.kind, patches.grid, patches.leading) == ("patches", (2, 2), 1)
    assert patches.texts[0][:2] == ("class token", "0,0")
    assert patches.images is not None
    assert patches.images.shape == (2, 8, 8, 3)


def test_audio_frames_have_a_duration() -> None:
    for name, label, seconds in (("whisper", "source", 0.02), ("wav2vec2", "frames", 0.001)):
        model = made(ARCHITECTURES[name])
        with torch.no_grad(), foci.watch(model) as seen:
            model(**ARCHITECTURES[name].inputs())
        assert (seen.labels[label].kind, seen.labels[label].seconds) == ("frames", seconds)


@pytest.mark.parametrize("name", [name for name in OWN_ATTENTION if name != "falcon"])
def test_unseen_attention_raises_a_warning(name: str) -> None:
    architecture = OWN_ATTENTION[name]
    model = made(architecture)
    with torch.no_grad():
        expected = main_output(model(**architecture.inputs()))
        with (
            pytest.warns(UserWarning, match="could not record 2 of the 2 attention modules"),
            foci.watch(model) as seen,
        ):
            found = main_output(model(**architecture.inputs()))
    assert torch.equal(found, expected)
    assert (seen.calls, seen.layers, len(seen.unseen)) == (0, {}, 2)
    assert all("has its own attention code" in reason for reason in seen.unseen)


@pytest.mark.parametrize("name", PARTLY_OWN)
def test_other_modules_are_recorded_beside_unseen_ones(name: str) -> None:
    architecture = PARTLY_OWN[name]
    model = made(architecture)
    with torch.no_grad():
        expected = main_output(model(**architecture.inputs()))
        with pytest.warns(UserWarning, match="could not record 2 of the"), foci.watch(model) as seen:
            found = main_output(model(**architecture.inputs()))
    assert_same(found, expected, slack=64)
    assert len(seen.unseen) == 2
    assert seen.calls > 0


def test_falcon_is_recorded_where_it_calls_sdpa() -> None:
    model = made(OWN_ATTENTION["falcon"])
    with torch.no_grad(), foci.watch(model) as seen:
        model(TOKENS)
    assert list(seen.layers) == [f"transformer.h.{i}.self_attention" for i in range(2)]


def test_attention_sources_of_classes() -> None:
    model = made(PARTLY_OWN["bigbird-pegasus"])
    kinds = {type(module).__name__: attention_source_of(type(module)) for module in model.modules()}
    assert kinds["BigBirdPegasusDecoderAttention"] == "interface"
    assert kinds["BigBirdPegasusSelfAttention"] == "own"
    assert kinds["BigBirdPegasusEncoderAttention"] is kinds["BigBirdPegasusModel"] is kinds["Linear"] is None


def test_a_model_with_inconsistent_causality_keeps_its_output() -> None:
    """PaliGemma without token types is causal in eager code and bidirectional in SDPA: both keep their output."""
    architecture = ARCHITECTURES["paligemma"]
    model = made(architecture)
    inputs = {name: given for name, given in architecture.inputs().items() if name != "token_type_ids"}
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        with torch.no_grad():
            expected = main_output(model(**inputs))
            with foci.watch(model):
                assert_same(main_output(model(**inputs)), expected, slack=64)


def test_a_training_step() -> None:
    model = made(ARCHITECTURES["llama"])
    gradients = []
    for watched in (False, True):
        model.zero_grad()
        if watched:
            with foci.watch(model) as seen:
                model(TOKENS, labels=TOKENS).loss.backward()
        else:
            model(TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_same(gradients[1][name], gradient, name, slack=16)
    # The weights keep the graph, so their statistics have gradients.
    assert seen["L0H1"].entropy().requires_grad


def test_checkpointed_modules_are_recorded_once() -> None:
    model = made(ARCHITECTURES["llama"]).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with foci.watch(model) as seen:
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert (seen.calls, len(seen.layers)) == (2, 2)


def test_the_implementation_is_restored_after_the_block() -> None:
    model = made(ARCHITECTURES["t5"])
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    before = implementations(model)
    with pytest.raises(IndexError), foci.watch(model), foci.watch(model):
        model(TOKENS + 1000, decoder_input_ids=TARGET)
    assert implementations(model) == before
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert SWITCHED_CONFIGS == {}


@pytest.mark.parametrize("name", ["llava", "whisper"])
def test_a_copy_made_inside_a_block_has_no_hooks(name: str) -> None:
    model, inputs = made(ARCHITECTURES[name]), ARCHITECTURES[name].inputs()
    with torch.no_grad(), foci.watch(model) as seen:
        copied = copy.deepcopy(model)
        copied(**inputs)
        model(**inputs)
    # transformers adds hooks of its own at the first call.
    hooks, of_copy = ([len(m._forward_hooks) + len(m._forward_pre_hooks) for m in x.modules()] for x in (model, copied))
    assert hooks == of_copy
    assert seen.calls == len(seen.layers)


def test_two_threads_watch_one_model() -> None:
    model = made(ARCHITECTURES["gpt2"])
    model.set_attn_implementation("eager")
    entered, left = threading.Event(), threading.Event()
    records: list[foci.Record] = []

    def second() -> None:
        with torch.no_grad(), foci.watch(model) as seen:
            entered.set()
            left.wait(10)
            # The first block has ended: this one still holds the model.
            model(TOKENS[:, :3])
        records.append(seen)

    thread = threading.Thread(target=second)
    with torch.no_grad(), foci.watch(model) as seen:
        thread.start()
        entered.wait(10)
        model(TOKENS)
    left.set()
    thread.join()
    assert [layer.shape[2] for layer in seen.layers.values()] == [7, 7]
    assert [layer.shape[2] for layer in records[0].layers.values()] == [3, 3]
    assert implementations(model)[0] == "eager"


def test_ablated_heads_are_zeroed() -> None:
    model = made(ARCHITECTURES["llama"])

    def without(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        heads = args[0].unflatten(-1, (4, 4)).clone()
        heads[..., 2, :] = 0
        return (heads.flatten(-2),)

    with torch.no_grad():
        with foci.watch(model, ablate=["L1H2"]) as seen:
            found = model(TOKENS).logits
        hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(without)
        expected = model(TOKENS).logits
        hook.remove()
        assert not torch.equal(model(TOKENS).logits, expected)
    assert torch.equal(found, expected)
    assert seen["L1H2"].entropy().shape == (2, 7)


def test_some_layers_heads_and_queries() -> None:
    model = made(ARCHITECTURES["t5"])
    inputs = ARCHITECTURES["t5"].inputs()
    eager = in_eager(model, inputs)
    with torch.no_grad(), foci.watch(model, layers=["cross.L1"], heads=[3]) as seen:
        model(**inputs)
    assert (seen.heads, seen.calls) == (["cross.L1H3"], 6)
    place = "decoder.block.1.layer.1.EncDecAttention"
    assert_same(seen["cross.L1H3"].received(), eager[place][0][:, 3].sum(-2), slack=64)
    with torch.no_grad(), foci.watch(model, queries="last") as seen:
        model(**inputs)
    assert_same(seen.layers[place].matrix, eager[place][0][:, :, -1:], slack=64)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_a_quantised_model() -> None:
    model = torch.ao.quantization.quantize_dynamic(made(ARCHITECTURES["bert"]), {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad(), foci.watch(model) as seen:
        model(TOKENS)
    for place, matrices in in_eager(model, {"input_ids": TOKENS}).items():
        assert_same_statistics(seen.layers[place], matrices[0])


def test_a_model_inside_another_module() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = made(ARCHITECTURES["distilbert"]), nn.Linear(16, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(input_ids=ids).last_hidden_state[:, 0])

    model = Classifier().eval()
    with torch.no_grad(), foci.watch(model) as seen:
        model(TOKENS)
    assert list(seen.layers) == [f"body.transformer.layer.{i}.attention" for i in range(2)]
    assert seen.labels["input"].texts[0][0] == str(int(TOKENS[0, 0]))


def test_lora_and_offloading() -> None:
    peft = pytest.importorskip("peft")
    accelerate = pytest.importorskip("accelerate")
    model = made(ARCHITECTURES["llama"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    with torch.no_grad(), foci.watch(adapted.eval()) as seen:
        adapted(input_ids=TOKENS)
    assert seen["L1"].name == "base_model.model.model.layers.1.self_attn"
    assert_same(seen["L1"].weights.dense(), list(in_eager(model, {"input_ids": TOKENS}).values())[1][0], slack=64)
    spread = accelerate.cpu_offload(made(ARCHITECTURES["llama"]), execution_device="cpu")
    with torch.no_grad(), foci.watch(spread) as seen:
        spread(TOKENS, attention_mask=LEFT.long())
    assert (seen.calls, seen.unseen) == (2, [])
