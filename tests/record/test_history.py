"""The history of a monitored training: its numbers, its file, its figure and its page."""

import base64
import json
import math
import re
from pathlib import Path

import pytest
import torch

import foci
from foci.record.history import History, StepStatistics, format_line


def entry(step: int, offset: float = 0.0) -> StepStatistics:
    layers = {
        "L0": {"largest_logit": torch.tensor([1.0, 2.0]) + offset, "entropy": torch.tensor([0.5, math.nan])},
        "cross.L0": {"largest_logit": torch.tensor([3.0, 4.0, 5.0]) + offset},
    }
    return StepStatistics(step, layers, {"L0": {"entropy": torch.tensor([[1, 0], [2, 3]])}})


@pytest.fixture
def history() -> History:
    return History([entry(1), entry(50, 1.0), entry(100, 2.0)])


def test_values_of_all_heads(history: History) -> None:
    assert history.heads == ["L0H0", "L0H1", "cross.L0H0", "cross.L0H1", "cross.L0H2"]
    assert history.steps == [1, 50, 100]
    assert history.statistics == ["largest_logit", "entropy"]
    assert history.values("largest_logit")[1].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert history.values("entropy").isnan().tolist() == [[False, True, True, True, True]] * 3
    with pytest.raises(ValueError, match=r"statistic must be one of largest_logit, .* got 'logit'"):
        history.values("logit")
    assert repr(history) == "History of 5 heads: 3 monitored steps, steps 1 to 100"
    assert repr(History()) == "History of 0 heads: 0 monitored steps"
    assert history.to_dict()["layers"]["L0"]["entropy"] == [[0.5, None]] * 3


def test_layers_are_reduced_by_the_meaning_of_the_statistic() -> None:
    values = {name: torch.tensor([1.0, 3.0]) for name in ("largest_logit", "least_entropy", "distance")}
    found = StepStatistics(1, {"L0": values}).reduce_heads()
    assert found == {"L0": {"largest_logit": 3.0, "least_entropy": 1.0, "distance": 2.0}}


def test_file_gives_the_same_history(history: History, tmp_path: Path) -> None:
    path = tmp_path / "attention.jsonl"
    history.save(path)
    loaded = foci.load(path)
    assert isinstance(loaded, History)
    assert loaded.to_dict() == history.to_dict()
    assert json.loads(path.read_text().splitlines()[0])["histograms"] == {"L0": {"entropy": [3, 3]}}


def test_file_of_a_killed_and_resumed_training(history: History, tmp_path: Path) -> None:
    path = tmp_path / "attention.jsonl"
    again = format_line(entry(50, 7.0))
    path.write_text("".join(map(format_line, history)) + again + again[: len(again) // 2])
    loaded = History.load(path)
    assert loaded.steps == [1, 50]
    assert loaded.values("largest_logit")[1, 0] == 8.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "which holds no step"),
        ("{}\n", "line 1 of attention.jsonl must hold the statistics of a monitored step"),
        ("not json\n", "line 1 of attention.jsonl must be valid JSON"),
        (
            '{"step": -1, "layers": {}}\n',
            "the step in line 1 of attention.jsonl must be an integer of at least 0, got -1",
        ),
        ('{"step": 1, "layers": {"L0": {"entropy": ["a"]}}}\n', "line 1 of attention.jsonl must hold the statistics"),
        ('{"step": 1, "layers": {"L0": {"entropy": "12"}}}\n', "line 1 of attention.jsonl must hold the statistics"),
        ('{"step": 1, "layers": {"L0": {"entropy": [[1.0]]}}}\n', "line 1 of attention.jsonl must hold the statistics"),
        ('{"step": 1, "loss": 2.0}\n', "line 1 of attention.jsonl must hold the statistics"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "attention.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        foci.load(path)


def test_figure_has_a_panel_per_statistic(history: History, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = history.plot()
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.get_title(loc="left")]
    assert titles == ["largest logit", "entropy"]
    mesh = figure.axes[0].collections[0]
    assert mesh.get_array().shape == (5, 3)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["L0", "cross.L0"]
    history.save(tmp_path / "heads.svg")
    assert "largest logit" in (tmp_path / "heads.svg").read_text()
    with pytest.raises(ValueError, match="statistic must be one of largest_logit, entropy, got 'distance'"):
        history.plot("distance")
    with pytest.raises(ValueError, match="history must hold a logged step"):
        History().plot()


def test_page_holds_the_numbers_and_no_address(history: History, tmp_path: Path) -> None:
    history.save(tmp_path / "heads.html")
    page = (tmp_path / "heads.html").read_text()
    payload = json.loads(base64.b64decode(re.findall(r'id="payload">([^<]*)<', page)[0]))
    assert payload["steps"] == [1, 50, 100]
    assert payload["layers"] == [["L0", 2], ["cross.L0", 3]]
    assert payload["values"]["entropy"] == [[0.5] * 3, [None] * 3, [None] * 3, [None] * 3, [None] * 3]
    assert "default-src 'none'" in page
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
    with pytest.raises(ValueError, match=r"path must end with one of .jsonl, .html"):
        history.save(tmp_path / "heads.txt")


def test_numbers_that_are_not_finite_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "attention.jsonl"
    path.write_text(f'{{"step": 1, "layers": {{"L0": {{"entropy": [1.0, Infinity, NaN, {10**400}]}}}}}}\n')
    assert History.load(path).values("entropy").isnan().tolist() == [[False, True, True, True]]
