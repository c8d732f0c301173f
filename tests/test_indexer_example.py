"""The example of an indexer learns the attention of a layer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import foci

EXAMPLE = Path(__file__).parent.parent / "examples" / "indexer.py"


def test_the_indexer_finds_more_of_the_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("indexer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    indexer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(indexer)
    monkeypatch.setattr(indexer, "LENGTH", 48)
    monkeypatch.setattr(indexer, "CHOSEN", 6)
    torch.manual_seed(0)
    model = foci.nn.Decoder.from_name("tiny", vocabulary=20, max_length=48, width=32, heads=2, layers=3).eval()
    with torch.no_grad():
        # Attention that is far from uniform.
        model.blocks[1].attention.project.weight.mul_(3.0)
    share = indexer.train(model, 1, torch.randint(20, (2000,)), steps=30, batch=4)
    printed = capsys.readouterr().out
    before = float(printed.split("training: ")[1].split("%")[0]) / 100
    assert len(printed.splitlines()) == 11
    assert before + 0.05 < share <= 1
