"""Watching on a GPU: the same record, asynchronous copies to the host, no captured graphs."""

from typing import Any

import pytest
import torch

import foci
from foci.capture import pending_statistics
from foci.capture.host_copy import allocate_pinned
from tests.capture.models import CachedAttention, Stack
from tests.tensors import randn

pytestmark = pytest.mark.gpu

KEEP = foci.Keep(top=4, picture=16, shares=True)


def both(dtype: torch.dtype, **options: Any) -> tuple[foci.Record, foci.Record]:
    """The record of a model on a GPU, and of its copy on a CPU in float64."""
    torch.manual_seed(0)
    model, x = Stack(2), randn(2, 200, 16)
    with torch.no_grad():
        with foci.watch(model.double(), keep=KEEP) as truth:
            model(x.double(), is_causal=True)
        with foci.watch(model.to("cuda", dtype), **options) as seen:
            model(x.to("cuda", dtype), is_causal=True)
    return seen, truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", ["lazy", KEEP])
def test_statistics_equal_those_on_the_cpu(dtype: torch.dtype, keep: Any) -> None:
    seen, truth = both(dtype, keep=keep)
    close = {"atol": 1e-3, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 5e-2}
    for name in ("L0", "L1"):
        for question in ("entropy", "received", "distance"):
            found, expected = getattr(seen[name], question)().cpu(), getattr(truth[name], question)()
            torch.testing.assert_close(found.double(), expected, **close)
        torch.testing.assert_close(seen[name].picture(16, 16).cpu().double(), truth[name].picture(16, 16), **close)
        torch.testing.assert_close(seen[name].top(4).values.cpu().double(), truth[name].top(4).values, **close)


def test_kept_statistics_are_on_the_host() -> None:
    seen, _ = both(torch.bfloat16, keep=KEEP)
    kept = seen["L1"].kept
    assert kept is not None
    assert {tensor.device.type for tensor in kept.values()} == {"cpu"}
    assert seen["L1"].norms().device.type == "cpu"


def test_recording_does_not_synchronize() -> None:
    model, x = Stack(2).cuda(), randn(2, 200, 16).cuda()
    with torch.no_grad(), foci.watch(model, keep=foci.Keep(top=4, picture=16)):
        model(x, is_causal=True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x, is_causal=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_token_ids_are_read_without_synchronizing() -> None:
    model, ids = Stack(2).cuda(), torch.randint(50, (1, 300)).cuda()
    with torch.no_grad(), foci.watch(model, keep=foci.Keep(top=4, picture=16)) as seen:
        model(ids, is_causal=True)
    assert list(seen.labels["input"].texts[0]) == [str(number) for number in ids[0].tolist()]


@pytest.mark.parametrize("joined", [1, 3])
def test_device_memory_of_copied_statistics_is_reused(joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = foci.Keep(top=8, picture=256)
    nbytes = keep.nbytes(1, 4, 2048, 2048)
    # The statistics of so many layers wait to be computed together, with their queries and keys.
    monkeypatch.setattr(pending_statistics, "MAX_PENDING_STATISTICS", {"cuda": joined * nbytes})
    few, many = (most_memory(layers, keep) for layers in (6, 24))
    assert many - few < 4 * joined * nbytes


def most_memory(layers: int, keep: foci.Keep) -> int:
    """The peak memory of a watched pass over a model of some layers, without the model."""
    model, x = Stack(layers).cuda(), randn(1, 2048, 16).cuda()
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad(), foci.watch(model, keep=keep):
            # Python has issued all layers before the first one runs.
            torch.cuda._sleep(200_000_000)
            model(x, is_causal=True)
    return torch.cuda.max_memory_allocated() - before


def test_copies_to_the_host_are_complete() -> None:
    model, x = Stack(12).cuda(), randn(1, 1024, 16).cuda()
    with torch.no_grad():
        with foci.watch(model) as lazy:
            model(x, is_causal=True)
        with foci.watch(model, keep=foci.Keep(top=4, picture=64)) as seen:
            torch.cuda._sleep(200_000_000)
            model(x, is_causal=True)
    for name in lazy.layers:
        for question in ("entropy", "received", "distance"):
            torch.testing.assert_close(getattr(seen[name], question)(), getattr(lazy[name], question)().cpu())
        torch.testing.assert_close(seen[name].top(4).values, lazy[name].top(4).values.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_statistics_of_several_layers_take_one_copy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []

    def counted(like: torch.Tensor) -> torch.Tensor:
        made.append(allocate_pinned(like))
        return made[-1]

    monkeypatch.setattr("foci.capture.host_copy.allocate_pinned", counted)
    model, x = Stack(3).to("cuda", dtype), randn(1, 300, 16).to("cuda", dtype)
    with torch.no_grad(), foci.watch(model, keep=foci.Keep(top=4, picture=16, largest_logit=True)) as seen:
        model(x, is_causal=True)
    # In float64 the int32 keys have another element size, so they take a copy of their own.
    assert len(made) == (2 if dtype == torch.float64 else 1)
    with torch.no_grad(), foci.watch(model) as lazy:
        model(x, is_causal=True)
    assert torch.equal(seen["L2"].top(4).keys, lazy["L2"].top(4).keys.cpu())
    torch.testing.assert_close(seen["L2"].largest_logit(), lazy["L2"].largest_logit().cpu(), atol=1e-4, rtol=1e-5)


def test_a_reordered_cache_is_refused_when_the_block_ends() -> None:
    model, x = CachedAttention().cuda(), randn(2, 9, 16).cuda()
    with pytest.raises(ValueError, match="reordered"), torch.no_grad(), foci.watch(model):
        steps(model, x)


def steps(model: CachedAttention, x: torch.Tensor) -> None:
    model(x[:, :5])
    model.change(lambda t: t.flip(0))
    model(x[:, 5:6])


def test_a_generation_is_recorded_step_by_step() -> None:
    model = foci.nn.Decoder.from_name("tiny", vocabulary=50).eval().cuda()
    expected = foci.generate(model, [5, 3, 8], new_tokens=5)
    with foci.watch(model) as seen:
        answers = foci.generate(model, [5, 3, 8], new_tokens=5)
    assert answers[0].tokens == expected[0].tokens
    assert seen["L1"].shape == (1, 4, 7, 7)
    with pytest.raises(ValueError, match=r"capture must be None or False inside foci\.watch"), foci.watch(model):
        foci.generate(model, [5, 3, 8], new_tokens=5, capture=True)


def test_checkpointing_takes_the_same_path_on_autograd_threads() -> None:
    model, x = Stack(2).cuda(), randn(1, 40, 16).cuda().requires_grad_()

    def run(y: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            y = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False)
        return y

    with foci.watch(model, ablate=["L1H0"]) as seen:
        run(x).square().sum().backward()
    assert seen.calls == 2
    again = x.detach().clone().requires_grad_()
    with foci.watch(model, ablate=["L1H0"]):
        y = again
        for block in model.blocks:
            y = block(y)
        y.square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad, atol=1e-4, rtol=1e-3)
