"""The drawings of masks, their algebra, and who is asked for what."""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import foci
from foci.masks.base import Mask, as_mask
from foci.masks.kinds import Causal, Padding


def drawing(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


DRAWINGS: list[tuple[Mask, tuple[int, int], str]] = [
    (
        foci.causal,
        (2, 5),
        """
        ■ ■ ■ ■ ·
        ■ ■ ■ ■ ■
        """,
    ),
    (
        foci.causal,
        (5, 2),
        """
        · ·
        · ·
        · ·
        ■ ·
        ■ ■
        """,
    ),
    (
        foci.causal.at(1),
        (2, 5),
        """
        ■ ■ · · ·
        ■ ■ ■ · ·
        """,
    ),
    (
        foci.causal.at(-1),
        (3, 3),
        """
        · · ·
        ■ · ·
        ■ ■ ·
        """,
    ),
    (
        foci.window(1, 2),
        (3, 5),
        """
        · ■ ■ ■ ■
        · · ■ ■ ■
        · · · ■ ■
        """,
    ),
    (
        foci.window(None, 0),
        (2, 3),
        """
        ■ ■ ·
        ■ ■ ■
        """,
    ),
    (
        foci.window(0, None),
        (2, 3),
        """
        · ■ ■
        · · ■
        """,
    ),
    (
        foci.padding([2]),
        (2, 4),
        """
        ■ ■ · ·
        ■ ■ · ·
        """,
    ),
    (
        foci.padding([2], side="left"),
        (2, 4),
        """
        · · ■ ■
        · · ■ ■
        """,
    ),
    (
        foci.causal & foci.padding([3], side="left"),
        (3, 4),
        """
        · ■ · ·
        · ■ ■ ·
        · ■ ■ ■
        """,
    ),
    (
        foci.documents([0, 0, 1], [0, 1, 1, 0]),
        (3, 4),
        """
        ■ · · ■
        ■ · · ■
        · ■ ■ ·
        """,
    ),
    (
        foci.causal | foci.prefix(2),
        (3, 3),
        """
        ■ ■ ·
        ■ ■ ·
        ■ ■ ■
        """,
    ),
    (
        ~foci.causal | torch.eye(3).bool(),
        (3, 3),
        """
        ■ ■ ■
        · ■ ■
        · · ■
        """,
    ),
    (
        foci.mask_function(lambda b, h, q, k: k == q - 1),
        (2, 4),
        """
        · ■ · ·
        · · ■ ·
        """,
    ),
]


@pytest.mark.parametrize(("mask", "size", "expected"), DRAWINGS, ids=[repr(mask) for mask, _, _ in DRAWINGS])
def test_a_drawing_shows_the_visible_keys_of_the_call(mask: Mask, size: tuple[int, int], expected: str) -> None:
    assert mask.draw(*size) == drawing(expected)
    queries, keys = (torch.zeros(1, 1, n, 4) for n in size)
    _, weights = foci.attention(queries, keys, keys, mask=mask, return_weights=True)
    rows = [" ".join("■" if weight else "·" for weight in row) for row in weights.dense()[0, 0].tolist()]
    assert "\n".join(rows) == drawing(expected)


def test_a_mask_prints_its_name_and_a_drawing() -> None:
    assert str(foci.causal & foci.window(1)) == drawing(
        """
        causal & window(1), 6 queries and 6 keys
        ■ · · · · ·
        ■ ■ · · · ·
        · ■ ■ · · ·
        · · ■ ■ · ·
        · · · ■ ■ ·
        · · · · ■ ■
        """
    )
    assert str(foci.documents([4, 4, 7])) == drawing(
        """
        documents([4, 4, 7]), 3 queries and 3 keys
        ■ ■ ·
        ■ ■ ·
        · · ■
        """
    )
    assert str(foci.padding([2, 7], side="left")).splitlines()[:2] == [
        "padding([2, 7], side='left'), 7 queries and 7 keys",
        "· · · · · ■ ■",
    ]
    assert str(as_mask(torch.tensor([[True, False]]))) == "bool tensor (1, 2), 1 queries and 2 keys\n■ ·"


def test_drawings_in_docstrings_match_the_masks() -> None:
    described = inspect.getdoc(Causal)
    assert textwrap.indent(foci.causal.draw(2, 5), "    ") in described
    assert textwrap.indent(foci.causal.draw(5, 2), "    ") in described
    lines = inspect.getdoc(foci.attention).splitlines()
    header = next(number for number, line in enumerate(lines) if "causal, 2 queries and 5 keys" in line)
    column = lines[header].index("causal, 5 queries and 2 keys")
    drawn = lines[header + 1 : header + 6]
    assert [line[:column].strip() for line in drawn[:2]] == foci.causal.draw(2, 5).splitlines()
    assert [line[column : column + 3] for line in drawn] == foci.causal.draw(5, 2).splitlines()


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (foci.causal.at(3), "causal.at(3)"),
        (foci.window(2), "window(2)"),
        (foci.window(2, None), "window(2, None)"),
        (foci.padding([1, 2]), "padding([1, 2])"),
        (foci.documents([0, 1], [1]), "documents([0, 1], [1])"),
        (foci.prefix(4), "prefix(4)"),
        ((foci.causal | foci.prefix(2)) & foci.window(1), "(causal | prefix(2)) & window(1)"),
        (foci.causal & foci.window(1) | foci.prefix(2), "(causal & window(1)) | prefix(2)"),
        (~(foci.causal & foci.window(1)), "~(causal & window(1))"),
        (~foci.causal, "~causal"),
        (foci.causal & torch.ones(2, 3).bool(), "causal & bool tensor (2, 3)"),
    ],
    ids=str,
)
def test_the_repr_of_a_mask_is_its_expression(mask: Mask, name: str) -> None:
    assert repr(mask) == name


def seen(mask: Mask | Tensor, batch: int = 2, heads: int = 3, queries: int = 4, keys: int = 5) -> Tensor:
    """(B, H, Tq, Tk), asked through the call."""
    q, k = torch.zeros(batch, heads, queries, 2), torch.zeros(batch, heads, keys, 2)
    return foci.attention(q, k, k, mask=mask, return_weights=True)[1].dense() > 0


def test_combined_masks_combine_their_entries() -> None:
    entries = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    left, right = foci.causal, foci.window(1, 1)
    assert torch.equal(seen(left & right), seen(left) & seen(right))
    assert torch.equal(seen(left | right), seen(left) | seen(right))
    assert torch.equal(seen(~left), ~seen(left))
    assert torch.equal(seen(left & entries), seen(left) & entries)
    # A tensor may stand on the left.
    assert torch.equal(seen(entries & left), seen(left) & entries)
    assert torch.equal(seen(entries | left), seen(left) | entries)
    assert torch.equal(seen(~(left & entries) & ~right), ~(seen(left) & entries) & ~seen(right))


@pytest.mark.parametrize(
    "shape", [(5,), (4, 1), (4, 5), (3, 4, 5), (3, 1, 5), (2, 1, 1, 5), (2, 3, 4, 5), (1, 1, 1, 1)]
)
def test_a_bool_tensor_is_broadcast(shape: tuple[int, ...]) -> None:
    entries = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.6
    assert torch.equal(seen(entries), entries.expand(2, 3, 4, 5))


def test_lengths_and_ids_are_per_sequence() -> None:
    lengths = torch.tensor([2, 4])
    assert torch.equal(seen(foci.padding(lengths)), (torch.arange(5) < lengths.view(2, 1, 1, 1)).expand(2, 3, 4, 5))
    query_ids, key_ids = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]), torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 2]])
    same = query_ids[:, None, :, None] == key_ids[:, None, None, :]
    assert torch.equal(seen(foci.documents(query_ids, key_ids)), same.expand(2, 3, 4, 5))
    # One row of ids on either side serves every sequence.
    assert torch.equal(
        seen(foci.documents(query_ids, key_ids[0])), (query_ids[:, None, :, None] == key_ids[0]).expand(2, 3, 4, 5)
    )
    assert torch.equal(seen(foci.documents(query_ids[0], key_ids))[0], seen(foci.documents(query_ids, key_ids))[0])


def test_a_batch_with_several_dimensions_has_a_length_for_each_sequence() -> None:
    q = torch.zeros(2, 2, 1, 3, 4)
    lengths = torch.tensor([[0, 1], [2, 3]])
    _, weights = foci.attention(q, q, q, mask=foci.padding(lengths), return_weights=True)
    assert torch.equal((weights.dense() > 0).sum(-1), lengths.view(2, 2, 1, 1).expand(2, 2, 1, 3))


def test_a_mask_function_receives_batch_head_and_positions() -> None:
    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (batch * 8 + head * 2 + query) % 5 >= key

    batch, head, query, key = torch.meshgrid(*(torch.arange(n) for n in (2, 3, 4, 5)), indexing="ij")
    # Four queries and five keys: the first query stands at 1.
    assert torch.equal(seen(foci.mask_function(rule)), rule(batch, head, query + 1, key))


def test_a_mask_can_be_used_with_calls_of_any_size() -> None:
    mask = foci.causal & foci.window(2)
    for length in (1, 3, 8):
        assert seen(mask, queries=length, keys=length).shape[-1] == length
    lengths = foci.padding([1, 2])
    assert seen(lengths, keys=5).sum() == seen(lengths, keys=9).sum()


def test_a_mask_has_no_truth_value() -> None:
    """`causal and window(2)` would silently be the window alone."""
    with pytest.raises(TypeError, match="combine masks by &"):
        _ = foci.causal and foci.window(2)


def test_a_drawing_without_queries_is_refused() -> None:
    with pytest.raises(ValueError, match="queries and keys must be 1 or more, got -1 and -1"):
        foci.causal.draw(-1)


def test_a_mask_of_many_sequences_and_heads_draws_the_first() -> None:
    entries = torch.ones(2, 3, 2, 2, dtype=torch.bool)
    entries[0, 0, 1, 0] = False
    expected = "2 queries and 2 keys\n■ ·\n· ■"
    assert str(foci.causal & entries) == f"causal & bool tensor (2, 3, 2, 2), {expected}"
    assert str(~~as_mask(entries) & foci.causal).endswith(expected)
    assert (foci.causal & entries).draw(2, batch=1, head=2) == "■ ·\n■ ■"


def test_tensors_determine_the_size_of_a_drawing() -> None:
    ids = torch.tensor([[0, 0, 1], [0, 1, 1]])
    for mask in (foci.padding([2, 3]) & foci.documents(ids), foci.documents(ids) & foci.padding([2, 3])):
        assert str(mask).split("\n")[1:] == ["■ ■ ·", "■ ■ ·", "· · ·"]


@pytest.mark.parametrize("far", [sys.maxsize, 10**30])
def test_distances_beyond_all_keys_are_unlimited(far: int) -> None:
    q = torch.randn(1, 2, 5, 4)
    assert torch.equal(
        foci.attention(q, q, q, mask=foci.window(0, far)), foci.attention(q, q, q, mask=foci.window(0, None))
    )
    near = foci.attention(q, q, q, mask=foci.window(3))
    for mask in (foci.causal.at(far) & foci.window(3), foci.window(3, far) & foci.causal):
        torch.testing.assert_close(foci.attention(q, q, q, mask=mask), near)
    assert not foci.attention(q, q, q, mask=foci.causal.at(-far)).any()
    torch.testing.assert_close(foci.attention(q, q, q, mask=foci.prefix(far)), foci.attention(q, q, q))


@pytest.mark.parametrize("make", [lambda: foci.window(True), lambda: foci.causal.at(True), lambda: foci.prefix(True)])
def test_bools_are_refused_as_numbers(make: Callable[[], Mask]) -> None:
    with pytest.raises((TypeError, ValueError), match="True"):
        make()


def test_a_mask_function_without_four_arguments_is_refused() -> None:
    def near(q: Tensor, k: Tensor) -> Tensor:
        return q - k < 3

    with pytest.raises(TypeError, match=r"^function must take four arguments \(batch, head, .*, got near\(q: .*, k: "):
        foci.mask_function(near)  # type: ignore[arg-type]
    for four in (lambda *each: each[2] >= each[3], functools.partial(lambda n, b, h, q, k: q - k < n, 3)):
        assert foci.mask_function(four).draw(3)


def test_lengths_stay_on_their_device() -> None:
    with torch.device("meta"):
        mask = foci.padding(torch.tensor([3], device="cpu"))
    assert isinstance(mask, Padding)
    assert mask.lengths.device.type == "cpu"


def test_a_drawing_of_a_missing_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="batch must be below 2 and head 0 or more, got batch=2"):
        foci.padding([1, 2]).draw(3, batch=2)
