"""foci.warmup compiles what a call needs and changes nothing else."""

from __future__ import annotations

import inspect
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import foci
from foci import kernel_warmup
from foci.backends import BACKEND_NAMES
from foci.cli import main
from foci.gpu import compilation, launcher
from foci.gpu.compilation import CollectedLaunch, collect_launches, tensor_layout
from tests.tensors import qkv, randn


def meta(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape, device="meta", **options)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mask": foci.causal},
        {"mask": foci.causal & foci.padding(meta(2, dtype=torch.int64))},
        {"score": foci.Additive(meta(8, requires_grad=True))},
        {"bias": foci.Relative(meta(5, 8)), "sink": meta(4)},
        {"bias": meta(4, 6, 6), "dropout": 0.1},
        {"positions": (meta(6, dtype=torch.int64), meta(6, dtype=torch.int64))},
    ],
)
def test_meta_tensors_stand_for_tensors_of_this_machine(arguments: dict[str, Any]) -> None:
    q, k, v = (meta(*x.shape) for x in qkv())
    report = foci.warmup(q, k, v, backward=True, statistics=kernel_warmup.STATISTICS, **arguments)
    assert report.backend in BACKEND_NAMES
    assert str(report).startswith(f"{report.backend}: ")


def test_the_call_of_the_user_is_not_changed() -> None:
    q, k, v = qkv()
    weight = randn(8, seed=5).requires_grad_()
    copies = [x.clone() for x in (q, k, v)]
    state = torch.get_rng_state()
    foci.warmup(q, k, v, score=foci.Additive(weight), dropout=0.5, backward=True, statistics=["entropy"])
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), copies, strict=True))
    assert weight.grad is None
    assert not q.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert launcher.LAUNCH_COLLECTOR.launches is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"statistics": ["entropi"]}, ValueError, "statistics must be among summary, entropy, .*, got 'entropi'"),
        ({"return_weights": True}, TypeError, "warmup has no argument return_weights"),
        ({"maks": foci.causal}, TypeError, "did you mean mask"),
        ({"backend": "fast"}, ValueError, "backend must be one of"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        foci.warmup(*qkv(), **arguments)


def collect(run: Any) -> list[CollectedLaunch]:
    with collect_launches() as collected, torch.autograd.set_multithreading_enabled(False):
        run()
    return collected


@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [
        (
            {"mask": foci.window(3)},
            ["attention_forward_kernel", "attention_query_gradients", "attention_key_gradients"],
        ),
        ({"score": "additive"}, ["additive_forward", "additive_one_pass_backward", "one_pass_epilogue"]),
        ({"bias": "buckets"}, ["distance_bias_forward", "distance_bias_key_gradients", "sum_bucket_gradients"]),
    ],
)
def test_launches_are_collected_and_not_run(arguments: dict[str, Any], kernels: list[str]) -> None:
    """Those of the backward, too, and those of the gradients of parameters."""
    learned = {
        "additive": foci.Additive(randn(8).requires_grad_()),
        "buckets": foci.Buckets(randn(8, 4).requires_grad_(), True, 6),
    }
    options = {
        name: learned.get(value, value) if isinstance(value, str) else value for name, value in arguments.items()
    }
    inputs = [x.requires_grad_() for x in qkv(queries=20, keys=20)]
    with mock.patch.object(launcher.LaunchPlan, "run") as run:
        collected = collect(lambda: kernel_warmup.run_call(inputs, options | {"backend": "triton"}, True, []))
    assert not run.called
    names = [each.launch.kernel.__name__ for each in collected]
    assert set(kernels) <= set(names)
    for each in collected:
        arguments_of_kernel = each.arguments()
        assert len(arguments_of_kernel) == len(each.launch.kernel.arg_names)
        assert all(x.device.type == "meta" for x in arguments_of_kernel if isinstance(x, Tensor))


def test_a_collected_tensor_keeps_dtype_and_alignment() -> None:
    x = torch.zeros(9, dtype=torch.float16)
    aligned, shifted = tensor_layout(x[:8]).stand_in(), tensor_layout(x[1:]).stand_in()
    assert (aligned.dtype, aligned.shape, aligned.data_ptr()) == (torch.float16, (8,), 0)
    assert (shifted.dtype, shifted.data_ptr() % 16) == (torch.float16, 1)


def test_nothing_is_compiled_for_the_interpreter() -> None:
    launch = launcher.KernelLaunch(mock.Mock(), (1,), (), (), {})
    with mock.patch.object(compilation, "is_triton_interpreted", return_value=True):
        compilation.compile_in_parallel([(launch, ())])
    assert not launch.kernel.warmup.called


def test_other_kernels_are_compiled_in_the_background() -> None:
    """A launch waits for those that compile its own kernels."""
    started, released = threading.Event(), threading.Event()
    compiled: list[Any] = []
    own, other = (launcher.KernelLaunch(mock.Mock(), (1,), (), (), {}) for _ in range(2))

    def compile_slowly(launches: Any, **options: Any) -> None:
        started.set()
        assert released.wait(60)
        assert options == {"loads": False}
        compiled.extend(launch for launch, _ in launches)

    with mock.patch.object(compilation, "compile_in_parallel", compile_slowly):
        compilation.compile_in_background(lambda: [CollectedLaunch(own, {}, {})], None)
        assert started.wait(60)
        compilation.wait_for_background([other])
        assert not compiled
        released.set()
        compilation.wait_for_background([other, own])
    assert compiled == [own]
    assert not compilation.BACKGROUND_COMPILATIONS
    compilation.compile_in_background(mock.Mock(side_effect=RuntimeError), None)


def test_threads_that_start_late_or_not_at_all_fail_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launcher.KernelLaunch(mock.Mock(), (1,), (), (), {})
    true_start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "foci-compile":
            waiting.append(executor.submit(compilation.wait_for_background, [launch]))
            time.sleep(0.1)
        true_start(thread)

    waiting: list[Future[None]] = []
    monkeypatch.setattr(compilation, "compile_in_parallel", mock.Mock())
    monkeypatch.setattr(threading.Thread, "start", start_late)
    with ThreadPoolExecutor(1) as executor:
        compilation.compile_in_background(lambda: [CollectedLaunch(launch, {}, {})], None)
        waiting[0].result(60)
    assert not compilation.BACKGROUND_COMPILATIONS
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    compilation.compile_in_background(lambda: [CollectedLaunch(launch, {}, {})], None)
    compilation.wait_for_background([launch])
    monkeypatch.setattr(compilation, "is_triton_interpreted", lambda: False)
    monkeypatch.setattr(compilation, "PREPARING", [])
    compilation.start_preparing.__wrapped__()
    compilation.finish_preparing()


def test_ctrl_c_while_kernels_are_compiled_leaves_no_mode_on() -> None:
    """With Triton's mode on, every later launch would fail."""
    from triton import AsyncCompileMode

    launch = launcher.KernelLaunch(mock.Mock(), (1,), (), (), {})
    waiting = f"{AsyncCompileMode.__module__}.as_completed"
    with (
        mock.patch.object(compilation, "is_triton_interpreted", return_value=False),
        mock.patch(waiting, side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        compilation.compile_in_parallel([(launch, ())])
    # Raises if another one is active.
    with ThreadPoolExecutor(1) as executor, AsyncCompileMode(executor):
        pass


def test_a_forward_knows_the_launches_of_its_backward() -> None:
    inputs = [x.requires_grad_() for x in qkv(queries=20, keys=20)]
    later: list[Any] = []

    def run(plan: launcher.LaunchPlan, tensors: dict[str, Tensor], *rest: Any) -> None:
        later.extend(plan.collect_later(tensors))

    for options in ({"mask": foci.window(3)}, {"score": foci.Additive(randn(8).requires_grad_())}):
        with mock.patch.object(launcher.LaunchPlan, "run", run):
            foci.attention(*inputs, backend="triton", **options)
    assert compilation.LAUNCH_COLLECTOR.run_later is None
    assert compilation.LAUNCH_COLLECTOR.launches is None
    names = [each.launch.kernel.__name__ for each in later]
    assert {"attention_query_gradients", "attention_key_gradients", "one_pass_epilogue"} <= set(names)
    assert all(not isinstance(x, Tensor) or x.device.type == "meta" for each in later for x in each.arguments())


def test_the_command_prints_a_line_per_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["warmup", "--length", "8", "--width", "16", "--mask", "none", "documents", "--backward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("compiling for ")
    assert [line.split(": ")[0] for line in lines[1:]] == ["dot, none, width 16", "dot, documents, width 16"]
    assert main.main(["warmup", "--width", "0"]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [
        {"mask": foci.causal & foci.window(30)},
        {"score": "additive"},
        {"mask": foci.padding([100, 40]), "return_weights": True},
    ],
)
def test_on_a_gpu_a_warm_call_compiles_nothing(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[str] = []
    # Statistics may be compiled for multiples of 16.
    q = randn(2, 4, 300 if arguments.get("return_weights") else 200, 48, dtype=torch.bfloat16).cuda()
    weight = randn(48, dtype=torch.bfloat16).cuda().requires_grad_()
    options = {name: foci.Additive(weight) if value == "additive" else value for name, value in arguments.items()}
    summarized = options.pop("return_weights", False)
    report = foci.warmup(
        *[meta(2, 4, 300, 48, dtype=torch.bfloat16)] * 3, backward=True, statistics=["summary"] * summarized, **options
    )
    assert report.backend == "triton"
    assert report.kernels
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call["fn"].name) if call["fn"] else None
    )
    result: Any = foci.attention(*[q.requires_grad_()] * 3, return_weights=summarized, **options)
    if summarized:
        result[1].summary()
    (result[0] if summarized else result).sum().backward()
    assert compiled == []


def test_a_kernel_that_fails_in_a_thread_is_compiled_again_alone() -> None:
    from triton import AsyncCompileMode

    def fail() -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    finished: list[Any] = []
    more = [finished.append] * (len(inspect.signature(AsyncCompileMode.submit).parameters) - 4)
    with ThreadPoolExecutor(1) as executor, AsyncCompileMode(compilation.ForgivingExecutor(executor)) as mode:
        failed, done = (
            mode.submit(key, run, finished.append, *more) for key, run in enumerate((fail, lambda: "compiled"))
        )
    assert sorted(finished, key=str) == [None, "compiled"]
    launch = launcher.KernelLaunch(mock.Mock(), (1,), (), (), {"num_warps": 4})
    again = compilation.finish_compiling(failed, launch, (1, 2))
    launch.kernel.warmup.assert_called_once_with(1, 2, grid=(1,), num_warps=4)
    assert again is launch.kernel.warmup.return_value
    assert compilation.finish_compiling(done, launch, (1, 2)) == "compiled"
    assert compilation.finish_compiling("cached", launch, (1, 2)) == "cached"
    launch.kernel.warmup.side_effect = [SystemError("AST constructor recursion depth mismatch"), "alone"]
    assert compilation.finish_compiling(compilation.try_compiling(launch, (1, 2)), launch, (1, 2)) == "alone"
