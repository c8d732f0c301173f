"""Where tokens stand: `positions=` moves everything that asks for it, and nothing that counts tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foci
from tests.tensors import qkv, randn

PLACED: dict[str, dict[str, Any]] = {
    "causal": {"mask": foci.causal},
    "window": {"mask": foci.window(2, 1)},
    "alibi": {"bias": foci.ALiBi(), "mask": foci.causal},
    "buckets": {"bias": foci.Buckets(randn(8, 4), True, 6)},
    "relative": {"bias": foci.Relative(randn(5, 8), randn(5, 8))},
    "function": {"mask": foci.mask_function(lambda b, h, q, k: (q - k) % 3 != 1)},
}


@pytest.mark.parametrize("backend", ["blocked", "reference"])
@pytest.mark.parametrize("case", PLACED)
def test_positions_allow_keys_in_any_order(case: str, backend: str) -> None:
    q, k, v = qkv(4, 7)
    orders = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(row)) for row in range(2)])
    index = orders[:, None, :, None].expand_as(k)
    moved = foci.attention(
        q, k.gather(2, index), v.gather(2, index), positions=(None, orders), backend=backend, **PLACED[case]
    )
    torch.testing.assert_close(moved, foci.attention(q, k, v, backend=backend, **PLACED[case]))


@pytest.mark.parametrize("case", PLACED)
def test_only_distances_count(case: str) -> None:
    q, k, v = qkv(4, 7)
    places = torch.arange(3, 7), torch.arange(7, dtype=torch.int32)
    here = foci.attention(q, k, v, positions=places, **PLACED[case])
    torch.testing.assert_close(here, foci.attention(q, k, v, **PLACED[case]))
    far = foci.attention(q, k, v, positions=(places[0] + 1000, places[1] + 1000), **PLACED[case])
    torch.testing.assert_close(far, here)


def test_positions_of_a_batch_with_several_dimensions() -> None:
    q, k, v = (randn(2, 3, 1, 5, 4, seed=seed) for seed in range(3))
    places = torch.arange(5) * torch.arange(1, 7).view(2, 3, 1)
    out = foci.attention(q, k, v, mask=foci.window(4), positions=(places, places))
    for i, j in ((0, 0), (1, 2)):
        own = places[i, j]
        one = foci.attention(q[i, j], k[i, j], v[i, j], mask=foci.window(4), positions=(own, own))
        torch.testing.assert_close(out[i, j], one)


@pytest.mark.parametrize(
    "mask",
    [foci.causal.at(1), foci.padding([3, 6]), foci.documents([0, 0, 1, 1, 2, 2])],
    ids=["at", "padding", "documents"],
)
def test_index_based_masks_ignore_positions(mask: foci.Mask) -> None:
    q, k, v = qkv()
    places = torch.tensor([5, 3, 1, 0, 2, 4])
    torch.testing.assert_close(
        foci.attention(q, k, v, mask=mask, positions=(places, places)), foci.attention(q, k, v, mask=mask)
    )
