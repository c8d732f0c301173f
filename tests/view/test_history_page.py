"""The page of a monitored training in Chromium: the map, the number under the pointer and the curve of a head."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foci.record.history import History, StepStatistics
from tests.view.browsing import opened, settle

pytestmark = pytest.mark.browser


def test_heads_over_the_steps(browser: Any, tmp_path: Path) -> None:
    entries = [
        StepStatistics(
            step,
            {
                f"L{layer}": {
                    "largest_logit": torch.tensor([1.0, 2.0, 143.0 if layer == 1 else 3.0]),
                    "entropy": torch.full((3,), float(step) / 1000),
                }
                for layer in range(2)
            },
        )
        for step in (1000, 2000)
    ]
    History(entries).save(tmp_path / "heads.html")
    with opened(browser, f"file://{tmp_path / 'heads.html'}") as tab:
        assert tab.inner_text("header p") == "6 heads, steps 1,000 to 2,000"
        # The page opens at the head with the largest logit.
        assert tab.inner_text(".history-curve h2").startswith("L1H2 over the steps")
        box = tab.locator("canvas").bounding_box()
        assert box is not None
        tab.hover("canvas", position={"x": box["width"] - 5, "y": box["height"] - 3})
        assert tab.inner_text(".history-tip") == "L1H2, step 2,000: 143"
        tab.click("button[data-value=entropy]")
        tab.click("canvas", position={"x": box["width"] - 5, "y": 3})
        settle(tab)
        assert tab.inner_text(".history-tip") == "L0H0, step 2,000: 2"
        assert tab.inner_text(".history-curve h2").startswith("L0H0 over the steps")
        assert tab.locator(".history-curve path.sibling").count() == 3
        tab.focus("canvas")
        tab.keyboard.press("ArrowDown")
        settle(tab)
        assert tab.inner_text(".history-curve h2").startswith("L0H1")
