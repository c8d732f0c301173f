"""Position modules and the layout of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foci
from foci.nn import BucketTable, Layout, LearnedPositions, RelativeTable, Rotary, SinusoidalPositions
from tests.tensors import randn

PACKED = torch.tensor([0, 0, 0, 4, 4, 1, 1, 1])
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2])


@pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])
def test_a_table_is_added(kind: type[nn.Module]) -> None:
    module, x = kind(10, 6), randn(2, 4, 6)
    table = module.table
    torch.testing.assert_close(module(x), x + table[:4])
    torch.testing.assert_close(module(x, start=3), x + table[3:7])
    positions = torch.tensor([[0, 1, 2, 3], [5, 5, 9, 0]])
    torch.testing.assert_close(module(x, positions), x + table[positions])
    torch.testing.assert_close(module(x, positions[1]), x + table[positions[1]])
    assert module(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])
def test_too_long_a_sequence_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="the sequence must have at most 10 positions, got 11"):
        kind(10, 6)(torch.zeros(1, 4, 6), start=7)


def test_only_learned_positions_are_learned_and_saved() -> None:
    sines = SinusoidalPositions(10, 6)
    assert not list(sines.parameters())
    assert not sines.state_dict()
    torch.testing.assert_close(sines.table, foci.sinusoidal(10, 6))
    assert [name for name, _ in LearnedPositions(10, 6).named_parameters()] == ["table"]


def test_rotary_equals_the_function() -> None:
    x, positions = randn(2, 3, 4, 8), torch.tensor([4, 0, 1, 2])
    assert torch.equal(
        Rotary(500.0, 4, True)(x, positions), foci.rotary(x, positions, base=500.0, width=4, interleaved=True)
    )


def test_relative_tables_return_biases_with_their_parameters() -> None:
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
    assert torch.equal(Layout(documents=PACKED).positions(), POSITIONS)
    assert torch.equal(Layout(documents=PACKED.expand(3, -1)).positions(), POSITIONS.expand(3, -1))
    left = torch.tensor([[False, False, True, True], [True] * 4])
    assert torch.equal(Layout(left).positions(), torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]]))
    assert Layout(torch.tensor([2, 4])).positions() is None
    assert Layout().positions() is None


def test_layout_masks() -> None:
    assert Layout().build_mask(Layout()) is None
    assert repr(Layout(torch.tensor([2, 4])).build_mask(Layout())) == "padding([2, 4])"
    memory = Layout(documents=torch.tensor([0, 1]))
    assert repr(memory.build_mask(Layout(documents=torch.tensor([1, 1, 0])))) == "documents([1, 1, 0], [0, 1])"


def test_invalid_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="padding and documents must not both be given"):
        Layout(torch.tensor([2]), PACKED)
    with pytest.raises(ValueError, match=r"padding must be lengths \(B,\), or bool .* got torch.int64 \(2, 3\)"):
        Layout(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="documents must be given for both sequences or for neither"):
        Layout(documents=PACKED).build_mask(Layout())
