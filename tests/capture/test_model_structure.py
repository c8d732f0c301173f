"""The modules of a model, which are found once: later blocks notice every change of the model."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import foci
from foci.capture.model_structure import STRUCTURES, list_modules, read_structure
from tests.capture.models import FusedAttention, Stack
from tests.tensors import randn


class Renamed(FusedAttention):
    pass


def replace_block(model: Stack) -> None:
    model.blocks[0] = FusedAttention()


def rename_part(model: Stack) -> None:
    model._modules["more"] = model._modules.pop("blocks")


def remove_part(model: Stack) -> None:
    model.blocks[0].register_module("output", None)


def add_to_leaf(model: Stack) -> None:
    model.embed.more = nn.Linear(2, 2)


def change_class(model: Stack) -> None:
    model.blocks[1].__class__ = Renamed


def move_part(model: Stack) -> None:
    part = model.blocks[0]._modules.pop("output")
    model.blocks[1]._modules = {"output": part, **model.blocks[1]._modules}


CHANGES: list[Callable[[Stack], None]] = [replace_block, rename_part, remove_part, add_to_leaf, change_class, move_part]


def test_the_modules_are_those_of_named_modules() -> None:
    model = Stack(2)
    model.shared = model.blocks[0]
    model.register_module("nothing", None)
    structure, modules = read_structure(model)
    assert [*zip(structure.names, modules, strict=True)] == list_modules(model) == [*model.named_modules()]
    assert read_structure(model)[0] is structure


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_a_new_structure(change: Callable[[Stack], None]) -> None:
    model = Stack(2)
    before, _ = read_structure(model)
    change(model)
    gc.collect()
    after, modules = read_structure(model)
    assert after is not before
    assert [*zip(after.names, modules, strict=True)] == [*model.named_modules()]


def test_the_structure_keeps_no_module_alive() -> None:
    model = Stack(2)
    # A part that refers to the whole model, as by a hook of it.
    model.blocks[0].register_forward_hook(lambda *call, of=model: None)
    with torch.no_grad(), foci.watch(model):
        model(randn(1, 9, 16))
    followed, known = weakref.ref(model), len(STRUCTURES)
    model.blocks[0]._forward_hooks.clear()
    del model
    gc.collect()
    assert followed() is None
    assert len(STRUCTURES) < known


def test_blocks_follow_a_model_that_changes_between_them() -> None:
    model, x = Stack(2), randn(1, 9, 16)
    for count in (2, 3, 1):
        model.blocks = nn.ModuleList(FusedAttention() for _ in range(count))
        with torch.no_grad(), foci.watch(model) as seen:
            model(x)
        assert list(seen.layers) == [f"blocks.{number}" for number in range(count)]


class Equal(FusedAttention):
    """Modules that are equal if their weights are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and all(map(torch.equal, self.parameters(), other.parameters()))

    __hash__ = nn.Module.__hash__


def test_a_part_may_be_replaced_by_an_equal_one() -> None:
    model, x = Stack(2, Equal), randn(1, 9, 16)
    with torch.no_grad(), foci.watch(model) as first:
        model(x)
    before, model.blocks[0] = model.blocks[0], copy.deepcopy(model.blocks[0])
    assert before == model.blocks[0]
    with torch.no_grad(), foci.watch(model) as second:
        assert model.blocks[0]._forward_pre_hooks
        model(x)
    assert list(first.layers) == list(second.layers) == ["blocks.0", "blocks.1"]


def test_containers_have_no_hooks_and_nothing_is_left() -> None:
    model = Stack(2)
    with foci.watch(model):
        assert model._forward_pre_hooks
        assert not model.blocks._forward_pre_hooks
    dicts = [name for name in vars(nn.Module()) if name.startswith(("_forward_hooks", "_forward_pre_hooks"))]
    assert not any(getattr(module, name) for module in model.modules() for name in dicts)


def test_layer_names_follow_the_modules_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=20, bos_token_id=0, eos_token_id=0)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.arange(6)[None]
    for first, implementation in ((0, "sdpa"), (3, "eager"), (0, "sdpa")):
        for number, block in enumerate(model.transformer.h):
            block.attn.layer_idx = first + number
        model.set_attn_implementation(implementation)
        with torch.no_grad(), foci.watch(model) as seen:
            model(ids, use_cache=False)
        assert [layer.index for layer in seen.layers.values()] == [first, first + 1]
        assert model.config._attn_implementation == implementation
