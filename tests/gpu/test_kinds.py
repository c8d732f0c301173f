"""Kinds of call compile for GPUs that are not here; all of them with every version of Triton: see kinds.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kinds_compile_without_a_gpu(capability: int) -> None:
    names = ["window odd width", "additive one query", "additive padding", "causal summary 128", "buckets causal"]
    command = [sys.executable, "-m", "tests.kernels.kinds", str(capability), "--only", *names]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"sm_{capability}: 5 of 5 kinds" in done.stdout
