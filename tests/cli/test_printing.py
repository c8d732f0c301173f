"""What commands print: text from files and models cannot control the terminal."""

import ast
import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

import foci.cli
from foci.cli import main, run

HARM = "\x1b]0;title\x07\x1b[2J\u202e\x9b1m\r"


def assert_harmless(text: str) -> None:
    assert text
    assert not {*text} & {*HARM, "\x1b", "\x07"} - {*"0;title12Jm]["}


def test_commands_print_through_the_functions_of_output() -> None:
    folder = Path(foci.cli.__file__).parent
    printing = {
        path.name
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == {"output.py"}


@pytest.mark.parametrize("name", ["a.jsonl", f"{HARM}.tsv", f"{HARM}.jsonl"])
def test_data_check_prints_keys_and_paths_harmlessly(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({HARM: HARM, "source": HARM}) + "\n" + json.dumps({"source": "a", "target": HARM}))
    assert main.main(["data", "check", "translation", "--data", str(path)]) == 2
    assert_harmless(capsys.readouterr().out)
    assert main.main(["train", "translation", "--data", str(path), "--out", str(tmp_path / "run")]) == 2
    assert_harmless(capsys.readouterr().err)


def test_errors_of_view_are_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"{HARM}.foci"
    for header in ({"format": HARM}, {"format": "foci.record/1", "content": {"dict": {HARM: 1}}}):
        save_file({}, path, metadata={"foci": json.dumps(header)})
        assert main.main(["view", str(path)]) == 2
        assert_harmless(capsys.readouterr().err)
    assert main.main(["view", str(tmp_path / f"missing{HARM}")]) == 2
    assert_harmless(capsys.readouterr().err)


def test_answers_are_printed_harmlessly_and_written_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = f"A  man\n\tsleeps.{HARM}"
    monkeypatch.setattr(run.InputRunner, "answer", lambda *_: {0: answer})
    assert main.main(["run", "translation", "x", "--model", "translation"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("A  man\n\tsleeps.␛]0;title␇")
    assert_harmless(out)
    assert main.main(["run", "translation", "x", "--model", "translation", "--out", str(tmp_path / "answers.txt")]) == 0
    assert (tmp_path / "answers.txt").read_bytes() == f"{answer}\n".encode()


def test_wrong_arguments_are_named_harmlessly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["explain", f"--{HARM}"])
    assert_harmless(capsys.readouterr().err)


@pytest.mark.filterwarnings("default")
def test_a_warning_about_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tb\none two\t12\n")
    options = ["train", "translation", "--data", str(path), "--dev", str(tmp_path / "none.tsv")]
    assert main.main([*options, "--out", str(tmp_path / "run")]) == 2
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == (
        f"foci train: {path}:2: line 1 (a, b) is read as a header; the columns in order are source and target"
    )
