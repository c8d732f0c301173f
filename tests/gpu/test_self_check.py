"""Fast paths are checked once on a version of Triton that they were not run with; a failure is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import foci
from foci.arguments import prepare_call
from foci.backends import describe_chosen, triton
from foci.cli import doctor
from foci.gpu import self_check
from foci.runtime.device import major_capability
from foci.scores import Dot
from foci.statistics.cuda import hopper, hopper_check
from tests.tensors import qkv

Check = Callable[[], str | None]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the result is stored; this version of Triton was not tested."""
    path = tmp_path / "result.json"
    monkeypatch.setattr(self_check, "result_path", lambda name, index: path)
    monkeypatch.setattr(self_check, "TESTED_TRITON_VERSIONS", ())
    monkeypatch.delenv(self_check.CHECKING, raising=False)
    return path


class Counted:
    """A check that counts how often it runs."""

    def __init__(self, failure: str | None) -> None:
        self.failure, self.calls = failure, 0

    def __call__(self) -> str | None:
        self.calls += 1
        return self.failure


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("failure", [None, "wrong values of entropy"])
def test_a_check_runs_once_and_its_result_is_stored(failure: str | None) -> None:
    check = Counted(failure)
    assert [self_check.find_failure("gluon", 0, check) for _ in range(3)] == [failure] * 3
    assert check.calls == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"failure": 3}'])
def test_a_damaged_result_is_checked_again(path: Path, content: str) -> None:
    path.write_text(content)
    check = Counted(None)
    assert self_check.find_failure("gluon", 0, check) is None
    assert check.calls == 1


@pytest.mark.usefixtures("path")
def test_an_error_is_a_failure() -> None:
    def fail() -> str | None:
        raise RuntimeError("no such instruction\nand more")

    assert self_check.find_failure("gluon", 0, fail) == "RuntimeError: no such instruction"


def test_tested_versions_and_the_check_itself_are_not_checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Counted("broken")
    monkeypatch.setenv(self_check.CHECKING, "1")
    assert self_check.find_failure("gluon", 0, check) is None
    monkeypatch.delenv(self_check.CHECKING)
    monkeypatch.setattr(self_check, "TESTED_TRITON_VERSIONS", (self_check.triton_version(),))
    assert self_check.find_failure("gluon", 0, check) is None
    assert check.calls == 0
    assert not path.exists()


def test_each_version_and_gpu_has_its_own_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = set()
    for version, gpu in (("3.9.0", "H200"), ("3.9.1", "H200"), ("3.9.1", "B200")):
        monkeypatch.setattr("triton.__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, gpu=gpu: gpu)
        paths |= {self_check.result_path(name, 0) for name in ("gluon", "addresses")}
    assert len(paths) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert self_check.result_path("gluon", 0) is None


def test_a_check_in_a_process_of_its_own() -> None:
    assert self_check.run_in_process("operator", "neg", 0) is None
    assert self_check.run_in_process("operator", "neg", 7) == "-7"
    assert "cannot import name 'nothing'" in str(self_check.run_in_process("operator", "nothing", 0))


def test_a_failure_is_shown_by_plan_and_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "is_on_cpu", lambda call: False)
    monkeypatch.setattr(triton, "address_failure", lambda index: "TypeError: an int")
    monkeypatch.setattr(self_check, "address_failure", lambda index: "TypeError: an int")
    monkeypatch.setattr(hopper, "gluon_failure", lambda index: "wrong values of entropy")
    monkeypatch.setattr("foci.runtime.device.major_capability", lambda index: 9)
    call = prepare_call(*qkv(), Dot(), foci.window(3), None, None, None, 0.0, False)
    assert "the self-check failed (TypeError: an int)" in describe_chosen(call, triton)["launches"]
    assert doctor.describe_self_checks(0) == [
        "every launch goes through Triton: the self-check failed (TypeError: an int)",
        "statistics use the plain Triton kernel: the self-check failed (wrong values of entropy)",
    ]


def test_a_plan_says_where_batch_invariance_holds() -> None:
    q, k, v = qkv()
    weight = torch.ones(8)
    ours = foci.plan(q, k, v, mask=foci.window(3), backend="triton").notes["batch invariance"]
    assert ours == "batch invariance: a sequence gives bitwise the same result alone and in any batch"
    for arguments in (
        {"backend": "sdpa"},
        {"backend": "triton", "score": foci.Additive(weight)},
        {"backend": "blocked"},
    ):
        text = foci.plan(q, k, v, **arguments).notes["batch invariance"]
        assert text.startswith(f"batch invariance: not guaranteed by {arguments['backend']}")


def check_batch_invariance(device: str, queries: int, keys: int, arguments: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, 2, length, 16, generator=generator).to(device) for length in (queries, keys))
    out, weights = foci.attention(q, k, k, backend="triton", return_weights=True, **arguments)
    for index in (0, 2):
        one = slice(index, index + 1)
        alone, own = foci.attention(q[one], k[one], k[one], backend="triton", return_weights=True, **arguments)
        assert torch.equal(alone, out[one])
        assert torch.equal(own.lse, weights.lse[one])
        if device == "cuda":
            assert torch.equal(own.entropy(), weights.entropy()[one])


def test_a_sequence_alone_equals_itself_in_a_batch() -> None:
    check_batch_invariance("cpu", 17, 20, {"mask": foci.window(9)})


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys"), [(137, 137), (1, 50), (5, 1200), (300, 1000)])
@pytest.mark.parametrize(
    "arguments",
    [{"mask": foci.window(9)}, {"score": foci.Dot(softcap=5.0)}, {"bias": foci.ALiBi(), "mask": foci.causal}],
)
def test_on_a_gpu_a_sequence_alone_equals_itself_in_a_batch(queries: int, keys: int, arguments: dict[str, Any]) -> None:
    check_batch_invariance("cuda", queries, keys, arguments)


@pytest.mark.gpu
def test_on_a_gpu_the_fast_paths_pass_their_checks() -> None:
    assert self_check.check_addresses(0) is None
    if major_capability(0) == 9:
        assert hopper_check.check_kernel(0) is None
