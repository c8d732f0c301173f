"""watch: records what was requested, under the names of its modules, and leaves nothing behind."""

import gc
import logging
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci
from foci.capture.recorder import active_recorders
from foci.record.labels import Labels
from foci.record.metrics import HEAD_SCORES
from foci.runtime.interception import KEY, is_key_included
from tests.capture.models import FusedAttention, Stack
from tests.tensors import randn

IDS = torch.tensor([[7, 3, 9, 3, 7, 3]])


def weights_of(model: Stack, x: Tensor) -> list[Tensor]:
    """Every layer's matrix, written out."""
    found, x = [], model.embed(x)
    for block in model.blocks:
        q, k, _ = block.split(x)
        found.append((q @ k.mT / 2).softmax(-1))
        x = x + block(x)
    return found


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def modes() -> int:
    """How many torch function modes are active, and whether attention calls are intercepted."""
    return torch._C._len_torch_function_stack() + int(is_key_included(KEY))


@pytest.mark.parametrize("gradients", [True, False])
def test_layers_heads_labels_and_calls(gradients: bool) -> None:
    model = Stack()
    with torch.set_grad_enabled(gradients), foci.watch(model) as seen:
        out = model(IDS)
    assert torch.equal(out, model(IDS))
    assert list(seen.layers) == ["blocks.0", "blocks.1", "blocks.2"]
    assert seen.heads == [f"L{i}H{h}" for i in range(3) for h in range(4)]
    for index, expected in enumerate(weights_of(model, IDS)):
        torch.testing.assert_close(seen[f"L{index}"].dense(), expected, atol=1e-6, rtol=1e-5)
    assert (seen.model, seen.calls, seen.unseen, seen.prompt, seen.notes) == ("Stack", 3, [], None, [])
    assert seen.labels["input"].texts == (("7", "3", "9", "3", "7", "3"),)
    assert "duplicate_token" in seen.scores()


def test_inference_mode() -> None:
    model = Stack()
    with torch.inference_mode(), foci.watch(model) as seen:
        model(IDS)
    torch.testing.assert_close(seen["L1"].dense(), weights_of(model, IDS)[1], atol=1e-6, rtol=1e-5)
    assert seen["L1"].entropy().shape == (1, 4, 6)


def test_labels_come_from_a_tokenizer_or_are_passed() -> None:
    model = Stack()
    with foci.watch(model, tokenizer=lambda ids: "".join(" abcdefghi"[i] for i in ids)) as seen:
        model(IDS)
    assert seen.labels["input"].text(0) == "gcicgc"
    with foci.watch(model, labels={"input": Labels.tokens([list("uvwxyz")])}) as seen:
        model(IDS)
    assert seen.labels_of(seen["L0"])[0].text(0) == "uvwxyz"


@pytest.mark.parametrize("asked", [[1], ["L1"], ["blocks.1"]])
def test_some_layers(asked: list[Any]) -> None:
    with foci.watch(Stack(), layers=asked) as seen:
        seen_model = Stack()
    assert seen.layers == {}
    assert seen_model
    model = Stack()
    with foci.watch(model, layers=asked) as seen:
        model(IDS)
    assert list(seen.layers) == ["blocks.1"]
    assert seen.heads[0] == "L1H0"
    assert (seen.calls, seen.unseen) == (3, [])


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ([0, 3], ["L0H0", "L0H3", "L1H0", "L1H3"]),
        (["L1H3", "L1H0"], ["L1H0", "L1H3"]),
        ([2, "L0H1"], ["L0H1", "L0H2", "L1H2"]),
    ],
)
@pytest.mark.parametrize("keep", ["lazy", foci.Keep(top=2, picture=2)])
def test_some_heads(asked: list[Any], names: list[str], keep: Any) -> None:
    model = Stack(2)
    with foci.watch(model, heads=asked, keep=keep) as seen:
        model(IDS)
    assert seen.heads == names
    dense = weights_of(model, IDS)
    for name in names:
        entropy = torch.special.entr(dense[int(name[1])][:, int(name[3])]).sum(-1)
        torch.testing.assert_close(seen[name].entropy(), entropy, atol=1e-5, rtol=1e-5)
    assert seen[names[0]].norms().shape == (1, 6)


def test_selected_heads_with_grouped_keys_score_sink_and_slopes() -> None:
    q, k, v = randn(2, 4, 5, 8), randn(2, 2, 5, 8, seed=1), randn(2, 2, 5, 8, seed=2)
    options: dict[str, Any] = {
        "score": foci.Additive(randn(4, 8, seed=3)),
        "sink": randn(4, seed=4),
        "bias": foci.ALiBi(torch.tensor([0.1, 0.2, 0.3, 0.4])),
        "mask": foci.causal & (randn(1, 4, 5, 5, seed=5) > -1),
    }
    _, whole = foci.attention(q, k, v, **options, return_weights=True)

    class Own(nn.Module):
        def forward(self) -> Tensor:
            return foci.attention(q, k, v, **options)

    model = Own()
    with foci.watch(model, heads=[3, 0]) as seen:
        model()
    layer = seen["L0"]
    torch.testing.assert_close(layer.dense(), whole.dense()[:, [0, 3]])
    torch.testing.assert_close(layer.sink_mass(), whole.sink_mass()[:, [0, 3]])
    torch.testing.assert_close(seen["L0H3"].entropy(), whole.entropy()[:, 3])
    torch.testing.assert_close(layer.norms(), v.norm(dim=-1)[:, [0, 1]])


@pytest.mark.parametrize("keep", ["lazy", foci.Keep()])
@pytest.mark.parametrize(("queries", "rows"), [("last", [5]), ([0, -2], [0, 4]), (slice(1, 4), [1, 2, 3])])
def test_some_queries(queries: Any, rows: list[int], keep: Any) -> None:
    model = Stack(2)
    with foci.watch(model, queries=queries, keep=keep) as seen:
        model(IDS)
    layer, expected = seen["L1"], weights_of(model, IDS)[1][:, :, rows]
    torch.testing.assert_close(layer.dense(), expected, atol=1e-6, rtol=1e-5)
    assert layer.rows == tuple(rows)
    assert layer.positions.tolist() == rows
    texts = [str(int(IDS[0, row])) for row in rows]
    assert list(seen.labels_of(layer)[0].texts[0]) == texts
    positions = torch.arange(6)
    distance = (expected * (positions - torch.tensor(rows)[:, None]).abs()).sum(-1)
    torch.testing.assert_close(layer.distance(), distance, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("number", [6, -7])
def test_query_numbers_that_no_call_has_are_refused(number: int) -> None:
    model = Stack()
    with (
        pytest.raises(ValueError, match=rf"^queries must be from -6 to 5, got {number}$"),
        foci.watch(model, queries=[0, number]),
    ):
        model(IDS)


def test_queries_with_the_weights_on_text_are_refused() -> None:
    with (
        pytest.raises(ValueError, match="queries must be 'all' with Keep"),
        foci.watch(Stack(), keep=foci.Keep(keys="text"), queries="last"),
    ):
        pass


def test_kept_statistics_equal_those_of_the_matrix_and_free_queries_and_keys() -> None:
    held: list[weakref.ref[Tensor]] = []

    class Noticing(FusedAttention):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            q, k, v = (part.clone() for part in self.split(x))
            held.extend(map(weakref.ref, (q, k, v)))
            return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    model, ids = Stack(2, Noticing), torch.arange(6)[None]
    with torch.no_grad(), foci.watch(model, keep=foci.Keep(top=3, picture=4, shares=True)) as seen:
        model(ids)
        gc.collect()
        assert len(held) == 6
        assert all(ref() is None for ref in held)
    layer, dense = seen["L1"], weights_of(model, ids)[1]
    assert layer.kept is not None
    assert layer.weights is None
    torch.testing.assert_close(layer.entropy(), torch.special.entr(dense).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.received(), dense.sum(-2), atol=1e-5, rtol=1e-5)
    assert torch.equal(layer.top(3).keys, dense.topk(3).indices)
    torch.testing.assert_close(layer.kept["first"], dense[..., 0], atol=1e-6, rtol=1e-5)
    assert not any(tensor.requires_grad for tensor in layer.kept.values())
    assert layer.norms().shape == (1, 4, 6)
    with foci.watch(model, keep=foci.Keep(values=False)) as seen:
        model(IDS)
    with pytest.raises(ValueError, match="the values of L0 were not recorded"):
        seen["L0"].norms()


@pytest.mark.parametrize("names", [["L0H1"], ["L1"], ["L0H0", "L0H3", "L2H2"], "L1H2"])
def test_ablated_heads_are_zeroed(names: Any) -> None:
    model = Stack()

    def by_hand(x: Tensor) -> Tensor:
        x = model.embed(x)
        for index, block in enumerate(model.blocks):
            q, k, v = block.split(x)
            out = F.scaled_dot_product_attention(q, k, v).clone()
            for name in [names] if isinstance(names, str) else names:
                if name.startswith(f"L{index}"):
                    out[:, int(name[3]) if "H" in name else slice(None)] = 0.0
            x = x + block.output(out.transpose(1, 2).flatten(2))
        return x

    with foci.watch(model, ablate=names) as seen:
        out = model(IDS)
    assert torch.equal(out, by_hand(IDS))
    assert not torch.equal(out, model(IDS))
    assert len(seen.layers) == 3
    with foci.watch(model, ablate=names, layers=[2]):
        assert torch.equal(model(IDS), out)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("module", [nn.MultiheadAttention, foci.nn.MultiheadAttention])
def test_heads_of_multihead_attention_are_ablated(module: type[nn.MultiheadAttention], need_weights: bool) -> None:
    torch.manual_seed(0)
    model, x = module(16, 4, batch_first=True), randn(2, 5, 16)
    with foci.watch(model, ablate=["L0H1"]):
        out, _ = model(x, x, x, need_weights=need_weights)
    with torch.no_grad():
        model.out_proj.weight[:, 4:8] = 0.0
    torch.testing.assert_close(out, model(x, x, x)[0], atol=1e-6, rtol=1e-5)


def test_names_of_layers_that_did_not_run_are_refused() -> None:
    model = Stack()
    for options, message in (
        ({"ablate": ["L9H0"]}, r"must name layers that ran \(L0, L1, L2\), got 'L9H0'"),
        ({"layers": [5]}, "must name layers that ran .*, got 5"),
        ({"heads": ["L7H1"]}, "must name layers that ran .*, got 'L7'"),
        ({"heads": [4]}, "heads must be below 4 for L0, got H4"),
        ({"ablate": ["L0H4"]}, "ablate must name heads below 4 of blocks.0, got H4"),
    ):
        with pytest.raises(ValueError, match=message), foci.watch(model, **options):  # type: ignore[arg-type]
            model(IDS)
        assert (hooks(model), modes(), active_recorders()) == (0, 0, ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "all"}, r"keep must be 'lazy' or foci.Keep\(...\), got 'all'"),
        ({"queries": "first"}, "queries must be 'all', 'last' or query numbers, got 'first'"),
        ({"queries": []}, "queries must be"),
        ({"queries": 99}, r"queries must be 'all', 'last' or query numbers, got 99: write \[99\]"),
        ({"labels": {"input": ["a"]}}, r"labels must be foci.Labels, .*: foci.Labels.tokens\(\[\['a', 'b'\]\]\) makes"),
        ({"heads": ["L1"]}, "heads must be numbers from 0 or names such as 'L5H3', got 'L1'"),
        ({"ablate": ["H3"]}, "ablate must be names such as 'L5H3'"),
        ({"limit": "1GB"}, r"limit must be a number of bytes, an int such as 2\*\*33, got '1GB'"),
        ({"layers": 0.5}, "layers must be numbers or names such as 'L5', got 0.5"),
        ({"tokenizer": "gpt2"}, "tokenizer must have a decode method or be a function, got 'gpt2'"),
        ({"processor": "llava"}, "processor must be a processor of transformers, got 'llava'"),
    ],
)
def test_invalid_options_are_refused_before_the_block(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message), foci.watch(Stack(), **options):
        pytest.fail("the block must not begin")


@pytest.mark.parametrize("keep", ["lazy", foci.Keep()])
@pytest.mark.parametrize("texts", [[["a"]], [list("uvwxyz")] * 3], ids=["length", "batch"])
def test_labels_that_fit_no_layer_are_refused_when_the_block_ends(texts: list[list[str]], keep: Any) -> None:
    model = Stack()
    with (
        pytest.raises(ValueError, match=r"^the labels 'input' must have \d sequences of \d positions, as .*, got"),
        foci.watch(model, keep=keep, labels=Labels.tokens(texts)) as seen,
    ):
        model(IDS)
    # The record is filled: the right labels can be set afterwards.
    assert seen.label([list("uvwxyz")]).labels["input"].text(0) == "uvwxyz"


def test_labels_of_a_sequence_that_no_layer_has_are_refused_when_the_block_ends() -> None:
    model = Stack()
    message = r"^labels must be those of a sequence of the model \(input\), got 'nosuch'$"
    with (
        pytest.raises(ValueError, match=message),
        foci.watch(model, labels={"nosuch": Labels.tokens([list("uvwxyz")])}),
    ):
        model(IDS)


def test_a_model_that_is_not_a_module_is_refused() -> None:
    message = r"model must be an nn\.Module or a pipeline of diffusers, got str"
    with pytest.raises(TypeError, match=message), foci.watch("model"):
        pytest.fail("the block must not begin")


@pytest.mark.parametrize("options", [{"layers": "L1"}, {"layers": 1}, {"layers": "blocks.1"}, {"heads": "L1H2"}])
def test_a_single_layer_or_head_needs_no_list(options: dict[str, Any]) -> None:
    model = Stack()
    with foci.watch(model, **options) as seen:
        model(IDS)
    assert seen.heads == (["L1H2"] if "heads" in options else [f"L1H{h}" for h in range(4)])


def test_the_estimate_is_logged_and_the_limit_holds(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    with caplog.at_level(logging.INFO, "foci.capture"), foci.watch(model) as seen:
        model(IDS)
    held = [(layer.weights, layer.values) for layer in seen.layers.values()]
    estimate = sum(weights.nbytes + values.nbytes for weights, values in held)  # type: ignore[union-attr]
    assert caplog.messages == [f"watching Stack: about {estimate:,} bytes in 3 layers"]
    with foci.watch(model, limit=estimate):
        model(IDS)
    for options in ({"limit": estimate - 1}, {"limit": 100, "keep": foci.Keep()}, {"limit": 50, "queries": "last"}):
        above = pytest.raises(ValueError, match=r"watch would keep about [\d,]+ bytes, above limit=[\d,]+ bytes")
        with above, foci.watch(model, **options):  # type: ignore[arg-type]
            model(IDS)
        assert (hooks(model), modes()) == (0, 0)
    # More calls than estimated: each counts.
    thrice = nn.Sequential(*[FusedAttention()] * 3)
    with pytest.raises(ValueError, match="above limit"), foci.watch(thrice, limit=2 * estimate // 3):
        thrice(randn(1, 6, 16))


def test_weights_and_values_give_the_output_of_the_attention() -> None:
    q, k, v = (randn(2, 4, 6, 8, seed=seed) for seed in range(3))

    class Attends(nn.Module):
        def forward(self) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    model = Attends()
    with foci.watch(model) as seen:
        out = model()
    layer = next(iter(seen.layers.values()))
    assert layer.weights is not None
    assert layer.values is not None
    torch.testing.assert_close(layer.weights @ layer.values, out)


def test_an_exception_removes_hooks_and_modes() -> None:
    model = Stack()

    def fails(*_: Any) -> None:
        raise KeyError("mine")

    handle = model.blocks[1].register_forward_hook(fails)
    with pytest.raises(KeyError, match="mine"), foci.watch(model):
        model(IDS)
    handle.remove()
    assert (hooks(model), modes(), active_recorders()) == (0, 0, ())
    with foci.watch(model) as seen:
        assert active_recorders()[0].model is model
        model(IDS)
    assert len(seen.layers) == 3
    assert (hooks(model), modes(), active_recorders()) == (0, 0, ())


def test_a_record_cannot_be_read_inside_its_block(tmp_path: Path) -> None:
    model = Stack(1)
    with foci.watch(model) as seen:
        model(IDS)
        assert repr(seen) == "Record of Stack: filled when its watch block ends"
        for ask in (lambda: seen["L0"], lambda: seen.save(tmp_path / "x.foci"), seen.scores, lambda: seen.add(seen)):
            with pytest.raises(RuntimeError, match="filled when its block ends"):
                ask()
    seen.save(tmp_path / "x.foci")
    assert foci.Record.load(tmp_path / "x.foci")["L0"].shape == (1, 4, 6, 6)


def test_an_exception_caught_inside_the_model_keeps_module_names_right() -> None:
    model = Stack()
    with foci.watch(model) as seen:
        with pytest.raises(RuntimeError):
            model(torch.rand(1, 3, 7))
        model(IDS)
    assert list(seen.layers) == ["blocks.0", "blocks.1", "blocks.2"]


def test_attention_outside_the_model_is_not_recorded() -> None:
    model, other = Stack(1), Stack(1)
    with foci.watch(model) as seen:
        other(IDS)
        F.scaled_dot_product_attention(*torch.rand(3, 1, 2, 4, 8))
        foci.attention(*torch.rand(3, 1, 2, 4, 8))
        assert seen.layers == {}
        model(IDS)
        other(IDS)
    assert (seen.calls, list(seen.layers)) == (1, ["blocks.0"])


def test_nested_blocks_and_two_models_at_once() -> None:
    one, two = Stack(1), Stack(2)
    with foci.watch(one) as first, foci.watch(two, keep=foci.Keep()) as second:
        one(IDS)
        two(IDS)
    assert (first.calls, second.calls) == (1, 2)
    both = nn.ModuleList([one, two])
    with foci.watch(both) as outer:
        with foci.watch(two, ablate=["L1H0"]) as inner:
            ablated = two(IDS)
        plain = two(IDS)
        one(IDS)
    assert (outer.calls, inner.calls) == (5, 2)
    assert list(outer.layers) == ["1.blocks.0", "1.blocks.1", "1.blocks.0#2", "1.blocks.1#2", "0.blocks.0"]
    assert not torch.equal(ablated, plain)
    torch.testing.assert_close(outer.layers["1.blocks.1#2"].dense(), weights_of(two, IDS)[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(inner["L1"].dense(), weights_of(two, IDS)[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("module", [nn.MultiheadAttention, foci.nn.MultiheadAttention])
def test_a_call_inside_two_blocks_is_counted_once_in_each(
    module: type[nn.MultiheadAttention], need_weights: bool
) -> None:
    torch.manual_seed(0)
    model, x = module(16, 4), randn(5, 2, 16)
    with foci.watch(model, ablate=["L0H0"]):
        expected, _ = model(x, x, x, need_weights=need_weights)
    with foci.watch(model, ablate=["L0H0"]) as outer, foci.watch(model) as inner:
        out, _ = model(x, x, x, need_weights=need_weights)
    assert (outer.calls, inner.calls, len(outer.layers), len(inner.layers)) == (1, 1, 1, 1)
    torch.testing.assert_close(outer["L0"].dense(), inner["L0"].dense())
    torch.testing.assert_close(out, expected)


def test_other_threads_are_not_recorded() -> None:
    model, barrier, found = Stack(2), threading.Barrier(3), {}

    def run(name: str, length: int, watched: bool) -> None:
        barrier.wait()
        for _ in range(5):
            if not watched:
                model(IDS[:, :length])
                continue
            with foci.watch(model) as seen:
                model(IDS[:, :length])
            found.setdefault(name, []).append(seen)

    threads = [threading.Thread(target=run, args=each) for each in (("a", 4, True), ("b", 6, True), ("c", 5, False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, length in (("a", 4), ("b", 6)):
        assert [seen.calls for seen in found[name]] == [2] * 5
        assert {layer.shape for seen in found[name] for layer in seen.layers.values()} == {(1, 4, length, length)}
    assert hooks(model) == 0


def test_another_thread_in_the_middle_of_a_pass_changes_nothing() -> None:
    shared, x = FusedAttention(), randn(1, 4, 16)

    class Aside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=shared, args=(x,))
            thread.start()
            thread.join()
            return x

    model = nn.Sequential(shared, Aside(), shared)
    with foci.watch(model) as seen:
        model(x)
    assert seen.calls == 2
    assert seen.heads[::4] == ["L0H0", "L1H0"]


def test_a_module_called_twice_gets_two_layers() -> None:
    shared = FusedAttention()
    model = nn.Sequential(shared, shared)
    with foci.watch(model) as seen:
        model(randn(1, 4, 16))
        model(randn(1, 5, 16, seed=1))
    assert list(seen.layers) == ["0", "0#2", "0#3", "0#4"]
    assert [layer.shape[2] for layer in seen.layers.values()] == [4, 4, 5, 5]
    # The module is shared by all layers, so each of its calls is a layer.
    assert seen.heads[::4] == ["L0H0", "L1H0", "L0H0#2", "L1H0#2"]
    assert seen["L1H1#2"].shape == (1, 5, 5)
    x = randn(1, 4, 16)
    with foci.watch(model, ablate=["L1H0"], layers=[1]) as some:
        out = model(x)
    assert list(some.layers) == ["0"]
    assert some["L1"].shape == (1, 4, 4, 4)
    first = shared(x)
    with foci.watch(shared, ablate=["L0H0"]):
        assert torch.equal(out, shared(first))


def test_two_texts_in_one_block_have_separate_labels() -> None:
    model = Stack(1)
    with foci.watch(model) as seen:
        model(IDS)
        model(IDS + 1)
    assert [seen.labels_of(layer)[0].texts[0][0] for layer in seen.layers.values()] == ["7", "8"]


def test_the_examples_of_the_watch_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the page runs, and its table of scores equals HEAD_SCORES."""
    page = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(code, "watch.md", "exec"), names)
    assert foci.Record.load(tmp_path / "run.foci").heads == names["seen"].heads
    rows = dict(re.findall(r"^\| ([a-z_ ]+) \| (.+) \|$", page.partition("| score |")[2], re.MULTILINE))
    assert rows == HEAD_SCORES


class TestCompiled:
    """Compiled models run uncompiled inside the block, and compiled again after it."""

    def test_a_compiled_model(self) -> None:
        model = Stack(2)
        compiled = torch.compile(model, backend="eager")
        expected = compiled(IDS)
        with foci.watch(compiled) as seen:
            out = compiled(IDS)
        assert torch.equal(out, expected)
        assert (list(seen.layers), seen.model) == (["blocks.0", "blocks.1"], "Stack")
        assert seen.notes == ["ran uncompiled inside foci.watch: the model"]
        with foci.watch(model) as seen:
            compiled(IDS)
        assert seen.calls == 2
        assert torch._dynamo.eval_frame._stance.stance == "default"

    def test_a_compiled_part(self) -> None:
        model = Stack(2)
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        with torch.no_grad():
            model(IDS)
        with foci.watch(model) as seen:
            model(IDS)
        assert list(seen.layers) == ["blocks.0", "blocks.1"]
        assert seen.notes == ["ran uncompiled inside foci.watch: blocks.1"]
        model.blocks[1] = model.blocks[1]._orig_mod
        model.blocks[0].compile(backend="eager")
        with foci.watch(model) as seen:
            model(IDS)
        assert (seen.calls, seen.notes) == (2, ["ran uncompiled inside foci.watch: blocks.0"])

    @pytest.mark.slow
    def test_a_first_compilation_inside_the_block(self) -> None:
        code = """
import torch, foci
from tests.capture.models import Stack
model, ids = Stack(2), torch.tensor([[1, 2, 3]])
with foci.watch(model) as seen:
    out = torch.compile(model, backend="eager")(ids)
print(list(seen.layers), torch.equal(out, model(ids)))
"""
        root = Path(__file__).parents[2]
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
        assert run.stdout == "['blocks.0', 'blocks.1'] True\n"
        assert "Exception ignored" not in run.stderr

    def test_a_block_inside_compiled_code_is_refused(self) -> None:
        model = Stack(1)

        @torch.compile(backend="eager", fullgraph=True)
        def run(x: Tensor) -> Tensor:
            with foci.watch(model):
                return model(x)  # type: ignore[no-any-return]

        with pytest.raises(Exception, match=r"foci.watch|generator|context|Unsupported"):
            run(IDS)
        torch.compiler.reset()
        assert hooks(model) == 0
