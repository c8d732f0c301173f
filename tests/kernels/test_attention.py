"""The attention kernels without a row table: masks, softcap and ALiBi against the reference in float64.

The problems are those of test_distance_bias. In the interpreter tiles have 16 queries and 16 keys.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import foci
from foci.arguments import prepare_call
from foci.backends import triton
from foci.gpu.attention import launch
from foci.gpu.attention.launch import AttentionTiling
from foci.gpu.launcher import CACHED_PLANS
from foci.scores import Dot
from tests.kernels.test_distance_bias import DEVICE, MASKS, check_problem, problem_of
from tests.kernels.test_distance_bias import _nan_in_fresh_memory as _nan_in_fresh_memory


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_equals_the_reference(mask: str) -> None:
    check_problem(problem_of("none", mask))


@pytest.mark.parametrize("mask", ["causal", "padding", "entries"])
def test_half_precision_equals_the_reference(mask: str) -> None:
    check_problem(problem_of("none", mask, torch.float16))


@pytest.mark.parametrize("tiles", [AttentionTiling(32, 16, 4, 1), AttentionTiling(16, 32, 4, 1)], ids=["tall", "wide"])
@pytest.mark.parametrize("mask", ["full", "window", "two_runs", "left_padding"])
def test_tiles_of_any_shape_equal_the_reference(
    mask: str, tiles: AttentionTiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "choose_tiling", lambda name, part: tiles)
    check_problem(problem_of("none", mask))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 17), (16, 16), (32, 16), (33, 48)])
def test_lengths_at_and_beside_a_tile_edge(lengths: tuple[int, int]) -> None:
    queries, keys = lengths
    check_problem(problem_of("none", "causal", queries=queries, keys=keys))


def test_no_row_table_is_planned_without_one() -> None:
    CACHED_PLANS.clear()
    q = torch.randn(1, 2, 20, 16, device=DEVICE)
    foci.attention(q, q, q, mask=foci.window(3), backend="triton")
    (plan,) = CACHED_PLANS.values()
    assert [launched.kernel.__name__ for launched in plan.launches] == ["attention_forward_kernel"]


def test_a_sequence_gives_the_same_bits_in_any_batch() -> None:
    q, k, v = (torch.randn(3, 2, 37, 16, device=DEVICE) for _ in range(3))
    lengths = torch.tensor([37, 20, 5], device=DEVICE)
    together = foci.attention(q, k, v, mask=foci.padding(lengths), backend="triton")
    for b in range(3):
        part = slice(b, b + 1)
        alone = foci.attention(q[part], k[part], v[part], mask=foci.padding(lengths[part]), backend="triton")
        assert torch.equal(alone[0], together[b])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [foci.window(64), foci.causal | foci.prefix(9), foci.padding([50])], ids=repr)
def test_masks_run_in_our_kernels_on_a_gpu(mask: foci.Mask) -> None:
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    assert foci.plan(q, q, q, mask=mask).chosen == triton.NAME


@pytest.mark.parametrize(
    ("mask", "length", "faster"),
    [
        (foci.causal & foci.window(64), 4096, False),
        (foci.padding([4000]), 4096, True),
        (foci.padding([2000]), 2048, False),
        (foci.causal | foci.prefix(9), 4096, True),
        (None, 4096, False),
    ],
    ids=["window", "padding", "short", "prefix", "none"],
)
def test_long_inputs_under_other_masks_are_left_to_flex(mask: foci.Mask | None, length: int, faster: bool) -> None:
    q = torch.empty(1, 1, length, 16, device="meta")
    assert (
        triton.is_faster_in_flex(prepare_call(q, q, q, Dot(), mask, None, None, None, 0.0, needs_lse=False)) == faster
    )


@pytest.mark.gpu
def test_a_new_length_compiles_nothing() -> None:
    from foci.kernels.attention.forward import attention_forward_kernel

    def count_kernels() -> int:
        return sum(len(cache[0]) for cache in attention_forward_kernel.device_caches.values())

    for length in (257, 1000, 1024, 16, 1, 333):
        q = torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16)
        foci.attention(q, q, q, mask=foci.causal & foci.window(100), backend="triton")
        if length == 1000:
            compiled = count_kernels()
    # Few queries have smaller tiles, which are a kernel of their own per power of two below 64.
    assert count_kernels() <= compiled + 1


@pytest.mark.parametrize("mask", ["causal", "padding", "left_padding", "prefix", "entries", "keys", "softcap", "sink"])
def test_split_keys_equal_the_reference(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MIN_SPLIT_KEYS", 10)
    case = {"entries": {}}.get(mask, {"queries": 5})
    monkeypatch.setattr(launch, "FEW_QUERIES", 64)
    planned = []
    whole = launch.plan_split_forward
    monkeypatch.setattr(launch, "plan_split_forward", lambda *given: planned.append(given[-1]) or whole(*given))
    CACHED_PLANS.clear()
    check_problem(problem_of("none", mask, **case))
    CACHED_PLANS.clear()
    assert planned
    assert min(planned) > 1
