"""Kernels are tested in Triton's interpreter; where there is a CUDA device, by the same tests on it."""

from pathlib import Path

import pytest
import torch

# Its kernels are for CPUs.
ELSEWHERE = "test_native.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before the markers are looked at: on a device these are tests for a GPU."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name != ELSEWHERE:
                item.add_marker(pytest.mark.gpu)
