"""The published datasets themselves: every split is as large as it should be, and tasks can read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foci.tasks import find_task

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "datasets.py"
# Dataset, task, settings, ending of its files, and how many examples train, dev and test have.
PUBLISHED = [
    ("fsdd", "speech", {"rate": 8000}, ".tsv", (2400, 300, 300)),
    ("fsdd/without-theo", "speech", {"rate": 8000}, ".tsv", (2000, 500, 500)),
    ("an4_mfcc", "speech", {}, ".tsv", (848, 100, 130)),
    pytest.param(
        *("fashion_mnist", "vision", {"image": 28, "channels": 1}, "", (55_000, 5000, 10_000)), marks=pytest.mark.slow
    ),
    ("sst2", "sentiment", {}, ".tsv", (6920, 872, 1821)),
    pytest.param("imdb", "sentiment", {}, ".jsonl", (22_500, 2500, 25_000), marks=pytest.mark.slow),
    ("aeslc", "summarization", {}, ".jsonl", (14_430, 1958, 1906)),
    ("scitldr", "summarization", {}, ".jsonl", (1992, 619, 618)),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


def made(name: str, data: Path, plain: Path) -> Path:
    whole = name.split("/")[0]
    if not (plain / whole).exists():
        subprocess.run([sys.executable, SCRIPT, whole, "--data", data, "--out", plain / whole], check=True)
    return plain / name


@pytest.mark.data
@pytest.mark.parametrize(("name", "task", "changes", "ending", "counts"), PUBLISHED)
def test_every_split_is_whole_and_can_be_read(
    name: str, task: str, changes: dict[str, int], ending: str, counts: tuple[int, ...], data: Path, plain: Path
) -> None:
    folder, kind = made(name, data, plain), find_task(task)
    settings = kind.settings_type.from_dict(changes)
    found = [len(kind.read([folder / f"{split}{ending}"], settings)) for split in ("train", "dev", "test")]
    assert tuple(found) == counts


@pytest.mark.data
@pytest.mark.parametrize(("name", "task", "ending"), [("fsdd", "speech", ".tsv"), ("sst2", "sentiment", ".tsv")])
def test_nothing_is_wrong_with_the_test_part(name: str, task: str, ending: str, data: Path, plain: Path) -> None:
    kind = find_task(task)
    problems = kind.check([made(name, data, plain) / f"test{ending}"], kind.settings_type())
    assert [str(each) for each in problems if each.severity == "error"] == []
