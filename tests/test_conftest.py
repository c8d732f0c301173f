"""Tests that cannot run are skipped with a reason, or fail if FOCI_REQUIRE names their marker."""

import shutil
from pathlib import Path

import pytest

MARKED = """
import pytest

@pytest.mark.data
def test_reads(data): assert data.is_dir()

@pytest.mark.browser
def test_drives(chromium): assert chromium

@pytest.mark.gpu
def test_on_gpu(): pass

def test_plain(): pass
"""

SKIPS_ITSELF = """
import pytest
pytest.importorskip("no_such_package")

@pytest.mark.data
def test_reads(data): pass
"""


CHANGES_STATE = """
import os, torch

def test_changes():
    os.environ |= {"FOCI_LEFT_BEHIND": "1", "HOME": "/elsewhere"}
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    assert False

def test_finds_nothing_changed():
    assert "FOCI_LEFT_BEHIND" not in os.environ
    assert os.environ["HOME"] != "/elsewhere"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32
"""

WARNS = """
import warnings

def test_own(): warnings.warn("ours")

def test_other():
    warnings.warn_explicit("theirs", FutureWarning, "x.py", 1, module="torch.jit")
    warnings.warn("Synchronization debug mode is a prototype feature")
"""


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with these settings, no data, and a PATH on which nothing is found."""
    tests = Path(__file__).parent
    for file in (tests / "conftest.py", tests.parent / "pyproject.toml"):
        shutil.copy(file, pytester.path)
    monkeypatch.delenv("FOCI_DATA", raising=False)
    monkeypatch.setenv("PATH", str(pytester.path))
    return pytester.path


def run(pytester: pytest.Pytester, source: str, required: str = "") -> str:
    """What pytest says about one file."""
    pytester.makepyfile(test_it=source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOCI_REQUIRE", required)
        return pytester.runpytest_inprocess("test_it.py").stdout.str()


def test_tests_that_cannot_run_are_skipped_with_a_reason(pytester: pytest.Pytester, folder: Path) -> None:
    out = run(pytester, MARKED)
    assert "data: FOCI_DATA does not name a directory" in out
    assert "browser: no Chromium on the PATH" in out
    assert "not run: 1 marked gpu (to run them: make gpu, on a machine with a CUDA device)" in out
    assert "1 passed, 2 skipped, 1 deselected" in out


def test_tests_that_can_run_do_run(pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "chromium").touch(mode=0o755)
    monkeypatch.setenv("FOCI_DATA", str(folder))
    assert "3 passed, 1 deselected" in run(pytester, MARKED, required="browser,data")


def test_required_tests_fail_instead_of_being_skipped(pytester: pytest.Pytester, folder: Path) -> None:
    out = run(pytester, MARKED, required="browser,data")
    assert "FOCI_REQUIRE=data requires this test, but it was skipped" in out
    assert "1 passed, 1 deselected, 2 errors" in out


@pytest.mark.parametrize(("required", "closing"), [("data", "1 error"), ("browser", "1 skipped")])
@pytest.mark.usefixtures("folder")
def test_a_required_file_that_skips_itself_fails(pytester: pytest.Pytester, required: str, closing: str) -> None:
    assert closing in run(pytester, SKIPS_ITSELF, required).splitlines()[-1]


def test_kernel_tests_count_as_gpu_tests_with_a_device(
    pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parent / "kernels" / "conftest.py", folder)
    pytester.makepyfile(test_it="def test_a_kernel(): pass", test_native="def test_on_a_cpu(): pass")
    for there, run in ((False, "test_a_kernel"), (True, "test_on_a_cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        out = pytester.runpytest_inprocess("-v", "test_it.py", "test_native.py").stdout.str()
        assert f"::{run} PASSED" in out
        assert ("1 passed, 1 deselected" if there else "2 passed") in out


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_failing_test_leaves_no_global_state(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=CHANGES_STATE)
    # In a process of its own: the deterministic mode loads torch's compiler, which a process can load only once.
    assert "1 failed, 1 passed" in pytester.runpytest_subprocess("test_it.py").stdout.str()


@pytest.mark.parametrize(("there", "closing"), [(False, "2 failed"), (True, "1 failed, 1 passed, 2 warnings")])
@pytest.mark.usefixtures("folder")
def test_warnings_of_other_packages_are_shown_with_a_device(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, there: bool, closing: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert closing in run(pytester, WARNS).splitlines()[-1]
