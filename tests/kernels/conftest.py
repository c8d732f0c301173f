"""Kernels are tested in Triton's interpreter, or by the same tests on a CUDA device if there is one."""

from pathlib import Path

import pytest
import torch

# Its kernels run on the CPU.
ELSEWHERE = "test_native.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a CUDA device, mark the tests of this folder as GPU tests, before markers are evaluated."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name != ELSEWHERE:
                item.add_marker(pytest.mark.gpu)
