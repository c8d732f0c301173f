"""Layer names derived from module names."""

import pytest
from torch import nn

import foci
from foci.capture.naming import LayerName, LayerNames, find_distinct_numbers


class SelfAttention(nn.Module):
    pass


class Attention(nn.Module):
    """A module that contains the attention module, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.self = SelfAttention()


def tree(*paths: str, kind: type[nn.Module] = SelfAttention) -> nn.Module:
    """A module with attention at each of the paths."""
    root = nn.Module()
    for path in paths:
        *outer, last = path.split(".")
        at = root
        for part in outer:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.add_module(last, kind())
    return root


def modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())


NAMED = {
    "bert": (["encoder.layer.0.attention", "encoder.layer.1.attention"], ["L0", "L1"]),
    "llama": (["model.layers.3.self_attn", "model.layers.10.self_attn"], ["L3", "L10"]),
    "t5": (
        [
            "encoder.block.1.layer.0.SelfAttention",
            "decoder.block.1.layer.0.SelfAttention",
            "decoder.block.1.layer.1.EncDecAttention",
        ],
        ["encoder.L1", "decoder.L1", "cross.L1"],
    ),
    "bart": (
        ["model.encoder.layers.0.self_attn", "model.decoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"],
        ["encoder.L0", "decoder.L0", "cross.L0"],
    ),
    "swin": (["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"], ["L0", "L1", "L2"]),
    "clip": (
        ["text_model.encoder.layers.0.self_attn", "vision_model.encoder.layers.0.self_attn"],
        ["text.L0", "vision.L0"],
    ),
    "diffusion": (["blocks.0.attn1", "blocks.0.cross_attn"], ["L0", "cross.L0"]),
    "a cross-encoder": (["cross_encoder.layer.0.attention", "cross_encoder.layer.1.attention"], ["L0", "L1"]),
}


@pytest.mark.parametrize("case", NAMED)
def test_names(case: str) -> None:
    paths, expected = NAMED[case]
    names = LayerNames(modules(tree(*paths)))
    assert [names.of(path).short for path in paths] == expected


def test_the_innermost_attention_module_is_found() -> None:
    assert list(LayerNames(modules(tree("layer.0.attention", kind=Attention))).attention_modules) == [
        "layer.0.attention.self"
    ]


def test_pytorchs_own_transformer() -> None:
    names = LayerNames(modules(nn.Transformer(8, 2, 1, 1, 8, batch_first=True)))
    assert [layer.short for layer in names.layer_names.values()] == ["encoder.L0", "decoder.L0", "cross.L0"]
    cross = names.of("decoder.layers.0.multihead_attn")
    assert (cross.queries, cross.keys, cross.is_cross) == ("target", "source", True)
    alone = LayerNames(modules(nn.MultiheadAttention(8, 2)))
    assert alone.of("") == LayerName()


def test_layer_names_of_foci_models() -> None:
    model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=9)
    module_names = {id(module): name for name, module in model.named_modules()}
    names = LayerNames(modules(model))
    assert {names.of(module_names[id(each)]).short: name for name, each in model.attentions().items()} == {
        name: name for name in model.attentions()
    }


def test_modules_without_attention_in_their_class_name() -> None:
    names = LayerNames(modules(nn.Module()))
    assert [names.of(name).short for name in ("h.4.mix", "h.2.mix", "h.2.other", "free")] == ["L4", "L2", "L5", "L3"]
    names.set({"x": LayerName("vision", 7)})
    assert names.of("x").short == "vision.L7"
    inner = LayerNames(modules(tree("layers.3.self_attn")))
    assert inner.of("layers.3.self_attn.core").short == "L3"


def test_layer_numbers() -> None:
    assert find_distinct_numbers(["a.1.b.0", "a.1.b.5"]) == [0, 5]
    assert find_distinct_numbers(["a", "b"]) is None
    assert find_distinct_numbers([]) is None


def test_modules_without_numbers_are_numbered_in_the_order_of_their_calls() -> None:
    names = LayerNames(modules(tree("down.attn1", "down.attn2", "up.attn1", "up.attn2", "mid.attn1", "mid.attn2")))
    for part in ("down", "mid", "up"):
        names.fit_to_call(f"{part}.attn1", False, "context")
        names.fit_to_call(f"{part}.attn2", True, "context")
    found = [names.of(f"{part}.{kind}").short for part in ("down", "mid", "up") for kind in ("attn1", "attn2")]
    assert found == ["L0", "cross.L0", "L1", "cross.L1", "L2", "cross.L2"]
    assert names.of("mid.attn2") == LayerName("cross", 1, "input", "context")


def test_inputs_overrule_the_name_of_a_class_but_not_of_a_module() -> None:
    class CrossAttention(nn.Module):
        """As in latent diffusion: without a context it is self-attention."""

    names = LayerNames(modules(tree("blocks.0.attn1", "blocks.1.cross_attn", kind=CrossAttention)))
    assert names.of("blocks.0.attn1").short == "cross.L0"
    names.fit_to_call("blocks.0.attn1", False, "context")
    names.fit_to_call("blocks.1.cross_attn", False, "context")
    assert [names.of(name).short for name in ("blocks.0.attn1", "blocks.1.cross_attn")] == ["L0", "cross.L1"]


def test_layouts_are_cached_and_layer_names_are_per_model() -> None:
    one, other = (tree("layers.0.attention", "layers.1.attention", kind=Attention) for _ in range(2))
    first = LayerNames(modules(one))
    first.set({"layers.0.attention.self": first.of("layers.1.attention.self")})
    assert first.of("layers.0.attention.self").index == 1
    second = LayerNames(modules(other))
    assert second.layout is first.layout
    assert second.of("layers.0.attention.self").index == 0
    assert second.attention_modules["layers.1.attention.self"] is other.get_submodule("layers.1.attention.self")
    del other.get_submodule("layers.1.attention").self
    assert list(LayerNames(modules(other)).attention_modules) == ["layers.0.attention.self", "layers.1.attention"]
