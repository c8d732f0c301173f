"""Importing foci and its parts imports neither torch nor optional packages before they are needed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules_after(code: str) -> set[str]:
    """The modules that are imported after some code ran in a new process."""
    command = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


def test_the_first_call_imports_only_what_it_needs() -> None:
    modules = modules_after("import foci; foci.attention")
    rooms = {name.split(".")[1] for name in modules if name.startswith("foci.")}
    assert "call" in rooms
    assert not {"nn", "record", "capture", "view", "decoding"} & rooms
    assert "torch._dynamo" not in modules


def test_the_command_line_does_not_import_torch_before_a_command_runs() -> None:
    assert "torch" not in modules_after("import foci.cli.main; foci.cli.main.build_parser()")


@pytest.mark.parametrize("module", ["nn", "record", "capture", "decoding", "tasks", "training", "cli"])
def test_packages_import_neither_a_compiler_nor_optional_packages(module: str) -> None:
    assert not {"torch._dynamo", "triton", "transformers", "matplotlib"} & modules_after(f"import foci.{module}")
