"""Test configuration: tests that cannot run are skipped with a reason, or fail if FOCI_REQUIRE names their marker.

A test that fails leaves no global state behind. On a GPU, which brings its own versions of torch and Triton, warnings
of other packages are shown; everywhere else they are errors.
"""

import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when a kernel is defined, so it must be set before a kernel is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # There are as many workers as cores, so one thread each.
    torch.set_num_threads(1)

DESELECTED: Counter[str] = Counter()
# Warnings that PyTorch attributes to its caller: its own synchronization check, and its compiler that reads `.grad`.
TORCH_WARNINGS = ("Synchronization debug mode", "The .grad attribute of a Tensor that is not a leaf")
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium_path() -> str | None:
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


def data_folder() -> Path | None:
    named = os.environ.get("FOCI_DATA")
    return Path(named) if named and Path(named).is_dir() else None


def missing() -> dict[str, str]:
    """The markers whose tests cannot run here, each with the reason."""
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "no CUDA device"
    if data_folder() is None:
        reasons["data"] = "FOCI_DATA does not name a directory"
    if chromium_path() is None:
        reasons["browser"] = "no Chromium on the PATH"
    return reasons


def required() -> set[str]:
    """The markers that must run: FOCI_REQUIRE=browser,data turns their skips into failures."""
    return {name.strip() for name in os.environ.get("FOCI_REQUIRE", "").split(",") if name.strip()}


def deterministic_mode() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def global_state() -> Iterator[None]:
    """Restores what a test may change for the whole process, also where it fails halfway."""
    environment, dtype, deterministic = dict(os.environ), torch.get_default_dtype(), deterministic_mode()
    sync_mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0
    yield
    if torch.cuda.is_initialized() and torch.cuda.get_sync_debug_mode() != sync_mode:
        torch.cuda.set_sync_debug_mode(sync_mode)
    # Only where it changed: setting it imports torch's compiler.
    if deterministic_mode() != deterministic:
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.set_default_dtype(dtype)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def data() -> Path:
    """The data folder, for tests marked `data`."""
    folder = data_folder()
    assert folder is not None, "a test that uses the data fixture must be marked data"
    return folder


@pytest.fixture
def chromium() -> str:
    """The path of a Chromium, for tests marked `browser`."""
    path = chromium_path()
    assert path is not None, "a test that uses the chromium fixture must be marked browser"
    return path


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts commands in the background with Ctrl+C ignored, which the commands of the tests would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if torch.cuda.is_available():
        for warning in ("default:::(?!foci|tests|test_)", *(f"default:{text}" for text in TORCH_WARNINGS)):
            config.addinivalue_line("filterwarnings", warning)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = missing()
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"{name}: {reason}"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        for name in ("slow", "gpu"):
            if item.get_closest_marker(name):
                DESELECTED[name] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a worker to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = dict(DESELECTED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects everything, so their counts are the same."""
    DESELECTED.update({name: count - DESELECTED[name] for name, count in node.workeroutput["deselected"].items()})


def refuse_skip(report: pytest.TestReport | pytest.CollectReport, names: list[str]) -> None:
    """Turn a skip into a failure if FOCI_REQUIRE names one of these markers."""
    wanted = sorted(required().intersection(names))
    if report.skipped and wanted and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"FOCI_REQUIRE={','.join(wanted)} requires this test, but it was skipped: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(report, [mark.name for mark in item.iter_markers()])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    # A file that skips itself (pytest.importorskip) has no collected tests, so its markers are read from its text.
    if report.skipped:
        refuse_skip(report, re.findall(r"mark\.(\w+)", collector.path.read_text()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    hints = {"slow": "pytest -m slow", "gpu": "make gpu, on a machine with a CUDA device"}
    for name, count in sorted(DESELECTED.items()):
        terminalreporter.write_line(f"not run: {count} marked {name} (to run them: {hints[name]})")
