"""Where tokens stand: tables that are added, rotations, relative tables, and the layout of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foci
from foci.nn import BucketTable, Layout, LearnedPositions, RelativeTable, Rotary, SinusoidalPositions
from tests.tensors import randn

PACKED = torch.tensor([0, 0, 0, 4, 4, 1, 1, 1])
PLACES = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2])


@pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])
def test_a_table_is_added(kind: type[nn.Module]) -> None:
    module, x = kind(10, 6), randn(2, 4, 6)
    table = module.table
    torch.testing.assert_close(module(x), x + table[:4])
    torch.testing.assert_close(module(x, start=3), x + table[3:7])
    places = torch.tensor([[0, 1, 2, 3], [5, 5, 9, 0]])
    torch.testing.assert_close(module(x, places), x + table[places])
    torch.testing.assert_close(module(x, places[1]), x + table[places[1]])
    assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])
def test_too_long_a_sequence_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="the table has 10 positions, but the sequence takes 11"):
        kind(10, 6)(torch.zeros(1, 4, 6), start=7)


def test_only_learned_positions_are_learned_and_saved() -> None:
    sines = SinusoidalPositions(10, 6)
    assert not list(sines.parameters())
    assert not sines.state_dict()
    torch.testing.assert_close(sines.table, foci.sinusoidal(10, 6))
    assert [name for name, _ in LearnedPositions(10, 6).named_parameters()] == ["table"]


def test_rotary_is_that_of_the_package() -> None:
    x, places = randn(2, 3, 4, 8), torch.tensor([4, 0, 1, 2])
    assert torch.equal(Rotary(500.0, 4, True)(x, places), foci.rotary(x, places, base=500.0, width=4, interleaved=True))


def test_relative_tables_give_biases_that_own_their_parameters() -> None:
    buckets = BucketTable(heads=2, buckets=8, max_distance=16, bidirectional=False)
    bias = buckets()
    assert isinstance(bias, foci.Buckets)
    assert bias.table is buckets.table
    assert (bias.bidirectional, bias.max_distance) == (False, 16)
    table = RelativeTable(head_width=4, clip=3)
    relative = table()
    assert isinstance(relative, foci.Relative)
    assert relative.keys is table.keys
    assert relative.values is table.values
    assert tuple(relative.keys.shape) == (7, 4)
    assert RelativeTable(4, values=False)().values is None


def test_positions_of_packed_and_padded_tokens() -> None:
    assert torch.equal(Layout(documents=PACKED).positions(), PLACES)
    assert torch.equal(Layout(documents=PACKED.expand(3, -1)).positions(), PLACES.expand(3, -1))
    left = torch.tensor([[False, False, True, True], [True] * 4])
    assert torch.equal(Layout(left).positions(), torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]]))
    assert Layout(torch.tensor([2, 4])).positions() is None
    assert Layout().positions() is None


def test_who_sees_whom() -> None:
    assert Layout().seen_by(Layout()) is None
    assert repr(Layout(torch.tensor([2, 4])).seen_by(Layout())) == "padding([2, 4])"
    memory = Layout(documents=torch.tensor([0, 1]))
    assert repr(memory.seen_by(Layout(documents=torch.tensor([1, 1, 0])))) == "documents([1, 1, 0], [0, 1])"


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="expected padding or documents, but got both"):
        Layout(torch.tensor([2]), PACKED)
    with pytest.raises(ValueError, match=r"padding must be lengths \(B,\), or bool .* but got torch.int64 \(2, 3\)"):
        Layout(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="documents must be given for both sequences or for none"):
        Layout(documents=PACKED).seen_by(Layout())
