"""`foci samples`: generated files that the other commands read."""

import re
from pathlib import Path

import pytest

import foci
from foci.cli import main
from foci.cli.samples import number_pairs, reviews, spell_number
from foci.tasks import find_task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main.main(["samples", str(tmp_path / "samples")]) == 0
    return tmp_path / "samples"


def test_the_tables_are_valid_data(folder: Path) -> None:
    for task, name, count in (
        ("translation", "pairs.tsv", 2000),
        ("translation", "test.tsv", 200),
        ("sentiment", "reviews.tsv", 500),
    ):
        kind = find_task(task)
        assert len(kind.read([folder / name], kind.settings_type())) == count
        assert [each for each in kind.check([folder / name], kind.settings_type()) if each.severity == "error"] == []


def test_the_picture_and_the_sound_are_recognized(folder: Path) -> None:
    pytest.importorskip("PIL")
    assert str(foci.pretrained("vision")(str(folder / "shirt.png"))).startswith("t-shirt (9")
    assert re.fullmatch(r"seven \((9\d|100)%\)", foci.pretrained("speech")(str(folder / "seven.wav")))


def test_existing_files_are_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pairs.tsv").write_text("mine\n")
    assert main.main(["samples", str(folder)]) == 2
    assert "directory must not hold pairs.tsv yet, got " in capsys.readouterr().err
    assert (folder / "pairs.tsv").read_text() == "mine\n"


def test_a_file_in_place_of_the_directory_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["samples", str(folder / "pairs.tsv")]) == 2
    assert "directory must be a directory, got the file" in capsys.readouterr().err


def test_test_pairs_are_not_training_pairs(folder: Path) -> None:
    train, test = ((folder / name).read_text().splitlines()[1:] for name in ("pairs.tsv", "test.tsv"))
    assert not {*train} & {*test}


def test_numbers_in_words() -> None:
    assert spell_number(0) == "zero"
    assert spell_number(21) == "twenty one"
    assert spell_number(115) == "one hundred fifteen"
    assert spell_number(90_100) == "ninety thousand one hundred"
    assert len({digits for _, digits in number_pairs(300)}) == 300


def test_reviews_are_balanced() -> None:
    labels = [label for _, label in reviews(100)]
    assert labels.count("positive") == labels.count("negative") == 50
