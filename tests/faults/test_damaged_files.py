"""Damaged files of every kind end in an answer or in one sentence, within 10 seconds and 1 GiB."""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.faults import hostile
from tests.faults.corpus import SEEDS, write_damaged_files, write_run
from tests.faults.runner import open_files

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does")


def check_damaged_files(count: int, folder: Path) -> None:
    paths = {kind: write_damaged_files(kind, folder / kind, count) for kind in SEEDS}
    outcomes = open_files([(kind, path) for kind, each in paths.items() for path in each], folder)
    faults = [each for each in outcomes if each.outcome == "fault"]
    report = "\n\n".join(f"{each.kind} {each.path.name}: {each.message}" for each in faults)
    if keep := os.environ.get("FOCI_FAULTS"):
        Path(keep).write_text(report)
    assert not faults, f"{len(faults)} faults\n{report[:20_000]}"
    counts = Counter((each.kind, each.outcome) for each in outcomes)
    for kind in SEEDS:
        intact = [each for each in outcomes if each.kind == kind and "damaged" not in each.path.name]
        assert {each.outcome for each in intact} == {"answered"}, intact
        assert counts[kind, "refused"] > count / 10


def test_damaged_files_are_answered_or_refused(tmp_path: Path) -> None:
    check_damaged_files(50, tmp_path)


@pytest.mark.slow
def test_many_damaged_files_are_answered_or_refused(tmp_path: Path) -> None:
    check_damaged_files(500, tmp_path)


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    seeds = {kind: tmp_path / f"{kind}-seeds" for kind in ("record", "model")}
    for folder in (*seeds.values(), tmp_path / "files"):
        folder.mkdir()
    folder = tmp_path / "files"
    files = {
        "record": hostile.write_hostile_records(next(SEEDS["record"](seeds["record"])), folder),
        "model": hostile.write_hostile_models(next(SEEDS["model"](seeds["model"])), folder),
        "config": hostile.write_hostile_configs(folder),
        "table": hostile.write_hostile_tables(folder),
        "sound": hostile.write_hostile_sounds(folder),
        "image": hostile.write_hostile_images(folder),
    }
    outcomes = open_files([(kind, path) for kind, each in files.items() for path in each], tmp_path)
    wrong = [each for each in outcomes if each.outcome != "refused"]
    assert not wrong, "\n\n".join(f"{each.kind} {each.path.name} {each.outcome}: {each.message}" for each in wrong)


@pytest.mark.slow
def test_damaged_run_directories_are_resumed_or_refused(tmp_path: Path) -> None:
    seed = write_run(tmp_path)
    (tmp_path / "runs").mkdir()
    paths = [seed, *hostile.write_hostile_runs(seed, tmp_path / "runs")]
    outcomes = open_files([("run", path) for path in paths], tmp_path)
    faults = [each for each in outcomes if each.outcome == "fault"]
    assert not faults, "\n\n".join(f"{each.path.name}: {each.message}" for each in faults)
    refused = {each.path.name: each.message for each in outcomes if each.outcome == "refused"}
    assert "run" not in refused
    assert len(refused) >= 5
    assert all(message.startswith("foci train: ") for message in refused.values())
