"""Top keys: selection, ties, and doubtful queries. Runs in Triton's interpreter on a CPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from foci.kernels.statistics.topk import refine_topk
from foci.statistics.cuda import plan as triton_statistics
from foci.statistics.cuda.tiling import choose_key_classes
from foci.statistics.request import Request
from tests.cases import mark_most_slow
from tests.kernels.statistics_cases import DEVICE, KEPT, SMALL, Case, causal, check_top, close
from tests.kernels.statistics_cases import nan_in_fresh_memory as nan_in_fresh_memory
from tests.kernels.statistics_cases import nothing_kept as nothing_kept


@pytest.mark.parametrize(
    ("top", "sharp"), [(1, 0.0), (1, 1.0), (1, 20.0), (5, 1.0), (8, 0.0), (8, 1.0), (8, 20.0), (33, 1.0)]
)
def test_all_values_of_k(top: int, sharp: float) -> None:
    case = causal(heads=(1, 1), queries=5 if sharp else 2, keys=130, sharp=sharp)
    # Logits of 100 have a rounding error of 1e-5.
    check_top(case.run(Request(top=top)), case, top, 4e-5 if sharp > 1 else 3e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("top", "keys", "classes"), [(33, 20, 512), (12, 300, 128)])
def test_fewer_classes_than_k_and_more_than_one_iteration(
    top: int, keys: int, classes: int, dtype: torch.dtype
) -> None:
    assert choose_key_classes(top, keys, SMALL, 7).number == classes
    case = causal(heads=(1, 1), queries=5, keys=keys, dtype=dtype)
    check_top(case.run(Request(top=top)), case, top, KEPT if dtype == torch.float16 else 3e-6)


def ascending(queries: int, keys: int) -> Case:
    case = causal(heads=(1, 1), queries=queries, keys=keys, width=16)
    case.q.fill_(1.0)
    case.k.copy_(torch.arange(keys, device=DEVICE)[None, None, :, None] / keys * 4)
    return case


def test_ascending_scores() -> None:
    case = ascending(8, 150)
    got = case.run(Request(top=8))
    check_top(got, case, 8)
    newest = torch.arange(142, 150, device=DEVICE)[:, None] - torch.arange(8, device=DEVICE)
    assert torch.equal(got["top_keys"][0, 0].long(), newest)


@pytest.mark.parametrize("stride", [1, 8, 16, 32, 64, 128])
def test_large_keys_of_one_class_are_all_found(stride: int) -> None:
    case = causal(heads=(1, 1), queries=8, keys=900 if stride > 64 else 320, width=16)
    heavy = torch.arange(5, 290 if stride < 128 else 890, stride, device=DEVICE)[:7]
    case.k[:, :, heavy] = case.q.mean(2, keepdim=True)[:, : case.k.shape[1]] + 1.0
    case.q += 1.0
    check_top(case.run(Request(top=7)), case, 7)


class Recorded:
    """Wraps the refine kernel and records the number of flagged classes of each query."""

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names, self.flagged = arg_names, torch.empty(0)

    def __getitem__(self, grid: object) -> "Recorded":
        return self

    def __call__(self, *arguments: Any, **options: object) -> None:
        given = dict(zip(self.arg_names, arguments, strict=True))
        # Workspace arrays are padded: only 8 queries are real.
        words = given["flags"][: 8 * given["CLASSES"] // 16].view(8, -1)
        rows = given["listed"][: int(given["counter"][0])].long()
        self.flagged = torch.zeros(8, dtype=words.dtype, device=words.device)
        self.flagged[rows] = sum((words[rows] >> bit) & 1 for bit in range(16)).sum(-1, dtype=words.dtype)


@pytest.mark.parametrize(("together", "flagged"), [(1, 0), (2, 0), (3, 1), (5, 1)])
def test_classes_with_three_top_keys_are_read_again(
    together: int, flagged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = causal(heads=(1, 1), queries=8, keys=320, width=16)
    case.q.abs_()
    # Tiles have 32 keys and four segments: keys 8 and 128 apart are in one class, the others in classes of their own.
    heavy = [5, 13, 133, 141, 261][:together] + list(range(6, 6 + 7 - together))
    case.k[:, :, heavy] = 2 + torch.arange(7.0, device=DEVICE).unsqueeze(-1) / 16
    recorded = Recorded(refine_topk.arg_names)
    monkeypatch.setattr("foci.kernels.statistics.topk.refine_topk", recorded)
    case.run(Request(top=7))
    assert recorded.flagged.tolist() == [flagged] * 8


def test_exact_ties_go_to_the_lower_key() -> None:
    case = causal(heads=(1, 1), queries=3, keys=150)
    case.q.zero_()
    got = case.run(Request(top=12))["top_keys"]
    assert torch.equal(got, torch.arange(12, device=DEVICE).expand_as(got))


@pytest.mark.parametrize("top", mark_most_slow([3, 1, 8], 3))
def test_half_precision_ties_and_hidden_keys(top: int) -> None:
    case = causal(heads=(2, 1), queries=4, keys=150, dtype=torch.float16)
    case.q[:, 1] = 0
    case.k[:, :, 80:130] = case.k[:, :, :50]
    got = case.run(Request(top=top, largest_logit=True))
    check_top(got, case, top, KEPT)
    close(got["largest_logit"], case.logits().amax((-1, -2)), 5e-5)
    assert torch.equal(got["top_keys"][0, 1], torch.arange(top, device=DEVICE).expand(4, top))
    keys = got["top_keys"][0, 0].tolist()
    assert all(key - 80 in row[:place] for row in keys for place, key in enumerate(row) if 80 <= key < 130)


def nearly_level(keys: int, dtype: torch.dtype, heavier: int) -> Case:
    """Logits of 0, and one that is larger by less than the precision of a candidate."""
    case = Case(heads=(1, 1), queries=8, keys=keys, width=16, dtype=dtype)
    case.q.zero_()
    case.k.zero_()
    case.q[..., :2] = 1
    case.k[..., heavier, 1] = 2.0**-18
    case.scale = 1.0
    return case


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("top", [3, 4])
def test_last_key_is_the_larger_of_two_near_ties(top: int, dtype: torch.dtype) -> None:
    """Key 64 is in the first class: an apparent tie with a lower key must not replace it without being read again."""
    case = nearly_level(96, dtype, heavier=64)
    heavy = [6, 5, 7][: top - 1]
    case.k[0, 0, heavy, 0] = torch.tensor([4.0, 3.0, 2.0][: top - 1], dtype=dtype, device=DEVICE)
    case.k[0, 0, [1, 64], 0] = 1
    got = case.run(Request(top=top))["top_keys"]
    assert got[0, 0].tolist() == [[*heavy, 64]] * 8


@pytest.mark.parametrize(
    ("top", "dtype"),
    mark_most_slow([(1, torch.float16), (1, torch.float32), (2, torch.float16), (2, torch.float32)], 3),
)
def test_largest_logit_of_near_ties(top: int, dtype: torch.dtype) -> None:
    case = nearly_level(80, dtype, heavier=50)
    got = case.run(Request(top=top, largest_logit=True))
    assert got["top_keys"][0, 0, :, 0].tolist() == [50] * 8
    close(got["largest_logit"], case.logits().amax((-1, -2)), 6e-7)


def test_many_tag_bits_recompute_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_statistics, "MIN_TAG_BITS", 12)
    case = causal(heads=(1, 1), queries=7, keys=100, dtype=torch.float16)
    check_top(case.run(Request(top=5)), case, 5)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nan_queries_have_nan_weights(dtype: torch.dtype) -> None:
    case = causal(heads=(2, 1), queries=9, keys=40, dtype=dtype)
    case.q[0, 1, 3] = torch.nan
    values, keys = (case.run(Request(top=3))[name] for name in ("top_values", "top_keys"))
    assert values[0, 1, 3].isnan().all()
    assert (keys[0, 1, 3] == -1).all()
    assert values.isnan().sum() == 3
    assert (keys == -1).sum() == 3


@pytest.mark.slow
def test_doubtful_queries_of_all_heads_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = causal(heads=(2, 1), queries=17, keys=40, batch=2, width=16)
    # Tied keys make every query of one head doubtful; the other head has almost none.
    case.q[:, 1] = 0
    monkeypatch.setattr("foci.statistics.cuda.plan.MAX_CANDIDATE_BYTES", 1)
    got = case.run(Request(top=3))
    check_top(got, case, 3)
    expected = torch.arange(3, device=DEVICE).expand(2, 17, 3)
    assert torch.equal(got["top_keys"][:, 1], expected)


def test_repeated_keys_are_reported_at_their_first_index() -> None:
    case = causal(heads=(1, 1), queries=8, keys=150)
    case.k[:, :, 80:130] = case.k[:, :, :50]
    got = case.run(Request(top=6))
    check_top(got, case, 6)
    keys = got["top_keys"]
    twin = torch.where((keys >= 80) & (keys < 130), keys - 80, -2)
    both = zip(keys.flatten(0, 2).tolist(), twin.flatten(0, 2).tolist(), strict=True)
    earlier = [[key in row[:place] for place, key in enumerate(twins) if key >= 0] for row, twins in both]
    assert sum(len(row) for row in earlier) > 0
    assert all(all(row) for row in earlier)


@pytest.mark.parametrize("bits", [12, 18])
def test_apparent_ties_are_resolved(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In long sequences the position takes so many bits that many logits appear equal without them."""
    monkeypatch.setattr(triton_statistics, "MIN_TAG_BITS", bits)
    case = causal(heads=(1, 1), queries=7, keys=200, sharp=1.0)
    check_top(case.run(Request(top=8)), case, 8)
