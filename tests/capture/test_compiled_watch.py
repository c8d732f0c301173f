"""foci.watch(compiled=True): compiled models run a second graph, which computes the same statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foci
from foci.capture.alerts import AttentionWarning

IDS = torch.tensor([[4, 9, 2, 30, 7, 7, 1], [3, 3, 8, 21, 40, 5, 6]])
KEEP = foci.Keep(top=3, picture=4, largest_logit=True)
QUESTIONS = ("entropy", "received", "distance", "lse", "largest_logit", "top_values", "top_keys", "picture")


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_and_count(model: nn.Module) -> tuple[nn.Module, list[Any]]:
    """The compiled model, and the graphs that are compiled."""
    graphs = list[Any]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(model, backend=backend, fullgraph=True), graphs  # type: ignore[return-value]


def build_decoder() -> nn.Module:
    torch.manual_seed(0)
    return foci.nn.Decoder.from_name("tiny", vocabulary=50, dropout=0.0).eval()


def watch(model: nn.Module, ids: Tensor = IDS, **options: Any) -> tuple[foci.Record, Tensor]:
    with torch.no_grad(), foci.watch(model, **{"keep": KEEP, **options}) as seen:
        out = model(ids).logits
    return seen, out


def check_equal(found: foci.Record, expected: foci.Record) -> None:
    assert list(found.layers) == list(expected.layers)
    for name, layer in expected.layers.items():
        other = found.layers[name]
        assert (other.stack, other.index, other.queries, other.keys) == (
            layer.stack, layer.index, layer.queries, layer.keys,
        )  # fmt: skip
        assert other.kept is not None
        assert layer.kept is not None
        assert other.kept.keys() == layer.kept.keys()
        for question in QUESTIONS:
            torch.testing.assert_close(other.kept[question], layer.kept[question])
        torch.testing.assert_close(other.value_norms, layer.value_norms)
    assert {name: labels.texts for name, labels in found.labels.items()} == {
        name: labels.texts for name, labels in expected.labels.items()
    }


def test_the_second_block_runs_compiled_and_records_the_same() -> None:
    model = build_decoder()
    compiled, graphs = compile_and_count(model)
    with torch.no_grad():
        plain = compiled(IDS).logits
    assert len(graphs) == 1
    first, _ = watch(compiled, compiled=True)
    assert len(graphs) == 1
    assert "ran uncompiled inside foci.watch: the model" in first.notes
    second, out = watch(compiled, compiled=True)
    assert len(graphs) == 2
    assert second.notes == []
    expected, _ = watch(model)
    for record in (first, second):
        check_equal(record, expected)
    assert (second.calls, second.unseen) == (expected.calls, [])
    torch.testing.assert_close(out, plain)
    watch(compiled, IDS + 1, compiled=True)
    assert len(graphs) == 2
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits, plain)
    assert len(graphs) == 2


def test_several_passes_are_layers_of_their_own() -> None:
    model = build_decoder()
    compiled, _ = compile_and_count(model)
    watch(compiled, compiled=True)
    with torch.no_grad(), foci.watch(compiled, keep=KEEP, compiled=True) as seen:
        compiled(IDS)
        compiled(IDS[:, :5])
    others = [watch(model, ids)[0] for ids in (IDS, IDS[:, :5])]
    names = list(others[0].layers)
    assert list(seen.layers) == [*names, *(f"{name}#2" for name in names)]
    for record, suffix in zip(others, ("", "#2"), strict=True):
        for name, layer in record.layers.items():
            torch.testing.assert_close(seen.layers[name + suffix].entropy(), layer.entropy())
    assert seen.layers[f"{names[0]}#2"].queries == "input#2"
    assert seen.labels["input#2"].texts[0] == tuple(str(each) for each in IDS[0, :5].tolist())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_inductor_and_given_labels() -> None:
    model = build_decoder()
    compiled = torch.compile(model)
    labels = foci.Labels.tokens([list("abcdefg"), list("hijklmn")])
    for _ in range(2):
        seen, _ = watch(compiled, compiled=True, labels=labels)  # type: ignore[arg-type]
    assert seen.notes == []
    assert seen.labels["input"].texts == labels.texts
    torch.testing.assert_close(seen["L1"].entropy(), watch(model)[0]["L1"].entropy())


class Sdpa(nn.Module):
    """Attention that is not foci.attention."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_other_attention_runs_uncompiled_and_the_record_says_why() -> None:
    compiled, graphs = compile_and_count(Sdpa())
    for _ in range(2):
        with foci.watch(compiled, keep=KEEP, compiled=True) as seen:
            compiled(torch.randn(1, 2, 6, 8))
        assert len(seen.layers) == 1
        assert seen.notes[-1] == (
            "later blocks run uncompiled, too: not all attention calls are those of foci.attention, which compiled"
            " graphs report"
        )
    assert graphs == []


class Repeating(nn.Module):
    """A decoder that runs its blocks a number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.times = build_decoder(), 1

    def forward(self, ids: Tensor) -> Any:
        for _ in range(self.times - 1):
            self.decoder.blocks[0].attention(torch.ones(1, 4, 128))
        return self.decoder(ids)


def test_a_pass_with_other_calls_is_not_recorded() -> None:
    model = Repeating()
    compiled, _ = compile_and_count(model)
    watch(compiled, compiled=True)
    model.times = 2
    with pytest.warns(AttentionWarning, match="nothing was recorded: a compiled pass made 3 attention calls, not 2"):
        assert not watch(compiled, compiled=True)[0].layers
    assert "ran uncompiled inside foci.watch: the model" in watch(compiled, compiled=True)[0].notes
    seen, _ = watch(compiled, compiled=True)
    assert list(seen.layers) == [f"decoder.blocks.{name}" for name in ("0.attention", "0.attention#2", "1.attention")]


def test_calls_outside_of_the_model_and_of_passes_that_fail_are_not_recorded() -> None:
    compiled, _ = compile_and_count(build_decoder())
    other = build_decoder()
    first, _ = watch(compiled, compiled=True)
    with torch.no_grad(), foci.watch(compiled, keep=KEEP, compiled=True) as seen:
        other(IDS)
        compiled(IDS)
        foci.attention(*torch.randn(3, 1, 4, 8, 16))
        with pytest.raises(IndexError):
            compiled(IDS + 100)
        compiled(IDS[:, :5])
        other(IDS)
    assert list(seen.layers) == [*first.layers, *(f"{name}#2" for name in first.layers)]
    assert seen.labels["input#2"].texts[0] == tuple(str(each) for each in IDS[0, :5].tolist())
    assert seen.notes == ["not recorded: 5 attention calls outside of complete passes of the compiled model"]


def test_a_block_of_two_passes_learns_the_calls_of_one() -> None:
    compiled, _ = compile_and_count(build_decoder())
    for _ in range(2):
        with torch.no_grad(), foci.watch(compiled, keep=KEEP, compiled=True) as seen:
            compiled(IDS)
            compiled(IDS[:, :5])
        assert {"input", "input#2"} <= seen.labels.keys()
    both = list(seen.layers)
    record, _ = watch(compiled, compiled=True)
    assert record.notes == []
    assert both == [*record.layers, *(f"{name}#2" for name in record.layers)]


def test_a_changed_model_is_learned_again() -> None:
    model = build_decoder()
    compiled, _ = compile_and_count(model)
    watch(compiled, compiled=True)
    # Twice the calls: two passes of the model as it was.
    model.blocks = nn.ModuleList([*model.blocks, *build_decoder().blocks])
    for note in ("this block learned the order of the calls: later blocks with compiled=True run compiled", None):
        seen, _ = watch(compiled, compiled=True)
        assert list(seen.layers) == [f"blocks.{number}.attention" for number in range(4)]
        assert (seen.notes or [None])[-1] == note


def test_the_record_cannot_be_read_inside_the_block_or_after_an_error() -> None:
    compiled, _ = compile_and_count(build_decoder())
    watch(compiled, compiled=True)
    with torch.no_grad(), foci.watch(compiled, keep=KEEP, compiled=True) as seen:
        compiled(IDS)
        with pytest.raises(RuntimeError, match="a record is filled when its block ends"):
            seen["L0"]
    assert seen["L0"].entropy().shape == (2, 4, 7)
    with pytest.raises(KeyboardInterrupt), foci.watch(compiled, keep=KEEP, compiled=True) as lost:
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="a record is filled when its block ends"):
        lost["L0"]
    assert watch(compiled, compiled=True)[0].notes == []


def test_blocks_in_and_outside_of_inference_mode() -> None:
    compiled, _ = compile_and_count(build_decoder())
    keep = foci.Keep(top=5, picture=2)
    for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode(), foci.watch(compiled, keep=keep, compiled=True) as seen:
            compiled(IDS)
        assert len(seen.layers) == 2
    assert seen.notes == []


def test_a_model_with_compiled_blocks_has_labels() -> None:
    model = build_decoder()
    for block in model.blocks:
        block.compile(backend="eager")
    for _ in range(2):
        seen, _ = watch(model, compiled=True)
    assert seen.notes == []
    assert seen.labels["input"].texts[0] == tuple(str(each) for each in IDS[0].tolist())


def test_limits_and_wrong_arguments() -> None:
    model = build_decoder()
    compiled, _ = compile_and_count(model)
    with pytest.raises(ValueError, match="model must be compiled with compiled=True, got a Decoder that is not"):
        watch(model, compiled=True)
    for options, message in (
        ({"keep": "lazy"}, r"keep must be foci.Keep\(...\) without .* with compiled=True, got lazy"),
        ({"keep": foci.Keep(shares=True)}, r"keep must be foci.Keep\(...\) without keys, queries and shares"),
        ({"layers": [0]}, "layers must not be given with compiled=True, which records all heads and queries"),
        ({"ablate": ["L0H1"]}, "ablate must not be given with compiled=True"),
    ):
        with pytest.raises(ValueError, match=message):
            watch(compiled, compiled=True, **options)
    watch(compiled, compiled=True)
    with pytest.raises(ValueError, match=r"watch would keep [\d,]+ bytes, above limit=100: pass a larger limit="):
        watch(compiled, compiled=True, limit=100)
