"""The commands from a dataset to an answer with its attention."""

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

import foci
from foci.cli import doctor, main
from foci.models import list_pretrained
from foci.training import loop
from tests.training.reversal import SMALL, written

RUN_USED = "foci run: using the model in runs/translation; use --model translation for the pretrained model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data and a trained model in runs/translation."""
    place = tmp_path_factory.mktemp("commands")
    data = written(place / "pairs.tsv", 300, longest=3)
    options = [part for change in (*SMALL, "train.steps=12") for part in ("--set", change)]
    out = str(place / "runs" / "translation")
    assert main.main(["train", "translation", "--data", str(data), "--out", out, "--quiet", *options]) == 0
    return place


def test_run_answers_arguments_stdin_and_files_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main.main(["run", "translation", "ab cd", "ef"]) == 0
    typed = capsys.readouterr().out
    assert len(typed.splitlines()) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("ab cd\nef\n"))
    assert main.main(["run", "translation"]) == 0
    assert capsys.readouterr().out == typed
    (folder / "lines.txt").write_text("ab cd\nef\n")
    assert main.main(["run", "translation", "--file", "lines.txt", "--out", "answers.txt"]) == 0
    assert (folder / "answers.txt").read_text() == typed


def test_inputs_may_follow_options_and_empty_lines_give_empty_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main.main(["run", "translation", "ab cd", "ef"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    options = ["--set", "task.beam=1", "--set", "task.alignment=[0]"]
    assert main.main(["run", "translation", "ab cd", *options, "ef"]) == 0
    assert capsys.readouterr().out.splitlines() == [first, second]
    assert main.main(["run", "translation", "--model", "runs/translation", "ef"]) == 0
    assert capsys.readouterr().out.splitlines() == [second]
    monkeypatch.setattr("sys.stdin", io.StringIO("ab cd\n\nef\n \n"))
    assert main.main(["run", "translation"]) == 0
    assert capsys.readouterr().out.splitlines() == [first, "", second, ""]
    for wrong in (["run", "translation", "ef", "--sohw"], ["doctor", "ef"]):
        with pytest.raises(SystemExit, match="2"):
            main.main(wrong)
        assert "unrecognized arguments: " in capsys.readouterr().err


def test_each_line_typed_in_a_terminal_is_answered_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message, status = [], []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def __next__(self) -> str:  # type: ignore[override]
            printed = capsys.readouterr()
            message.append(printed.out.count("\n"))
            status.append(printed.err)
            return super().__next__()

    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", Terminal("ab cd\nef\n"))
    assert main.main(["run", "translation"]) == 0
    assert message == [0, 1, 1]
    assert "one input each, Ctrl+D to end" in status[0]
    assert status[1:] == ["", ""]


def test_closed_streams_end_without_a_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with monkeypatch.context() as closed:
        closed.setattr("sys.stdin", None)
        assert main.main(["run", "translation"]) == 2
        assert "stdin is closed" in capsys.readouterr().err
    for name in ("stdout", "stderr"):
        with monkeypatch.context() as closed:
            closed.setattr(f"sys.{name}", None)
            assert main.main(["run", "translation", "ab " * 300]) == 0
    assert "truncated" not in capsys.readouterr().out


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main.main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


def test_a_finished_run_is_resumed_with_its_original_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, data = str(folder / "runs" / "translation"), str(folder / "pairs.tsv")
    assert main.main(["train", "translation", "--data", data, "--out", out, "--resume", "--quiet"]) == 0
    # The original command, with settings that the run already has.
    options = [part for change in (*SMALL, "train.steps=12") for part in ("--set", change)]
    assert main.main(["train", "translation", "--data", data, "--out", out, *options, "--resume", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("loss ")


def test_a_stopped_training_exits_with_status_130(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = loop.run_training_step

    def asking(*arguments: Any) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        return plain(*arguments)

    monkeypatch.setattr(loop, "run_training_step", asking)
    options = [part for change in SMALL for part in ("--set", change)]
    data, out = str(folder / "pairs.tsv"), str(tmp_path / "run")
    assert main.main(["train", "translation", "--data", data, "--out", out, *options]) == 130
    message = capsys.readouterr()
    assert message.out == "stopped_at_step 1\n"
    assert message.err.endswith("stopped at step 1; checkpoint saved: --resume continues from here\n")


def test_a_run_used_instead_of_the_pretrained_model_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, more, message in (
        (folder, [], f"{RUN_USED}\n"),
        (folder, ["--model", "runs/translation"], ""),
        (tmp_path, [], ""),
    ):
        monkeypatch.chdir(place)
        assert main.main(["run", "translation", "ab", *more]) == 0
        assert capsys.readouterr().err == message


def test_run_shows_and_saves_the_attention(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main.main(["run", "translation", "ab cd ef", "--show"]) == 0
    out = capsys.readouterr().out
    assert "cross" in out
    assert "ab cd ef <stop>" in out
    assert main.main(["run", "translation", "ab cd ef", "--show", "--out", "shown.txt"]) == 0
    answer, _, view = out.partition("\n")
    assert (folder / "shown.txt").read_text() == f"{answer}\n"
    assert capsys.readouterr().out == view
    assert main.main(["run", "translation", "ab cd ef", "--out", "page.html"]) == 0
    assert "<html" in (folder / "page.html").read_text()


def test_a_record_of_a_truncated_input_has_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert main.main(["run", "translation", "ab " * 300, "--out", "long.foci"]) == 0
    note = "the text is cut: the model reads the first 256 of 300 tokens"
    assert foci.Record.load(folder / "long.foci").notes == [note]


@pytest.mark.parametrize("command", ["run", "evaluate"])
def test_truncated_inputs_are_reported_in_one_line(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data, lines = folder / "runs" / "translation", tmp_path / "long.tsv", tmp_path / "long.txt"
    sentences = ["ab cd", "ab " * 300, "ef"]
    lines.write_text("".join(f"{each}\n" for each in sentences))
    data.write_text("".join(f"{each}\tab\n" for each in sentences))
    answers = tmp_path / "answers.txt"
    if command == "run":
        arguments = ["run", "translation", "--model", str(model), "--file", str(lines), "--out", str(answers)]
    else:
        arguments = ["evaluate", str(model), "--data", str(data), "--answers", str(answers)]
    assert main.main(arguments) == 0
    part = "it read the first 256 of 300 tokens" if command == "run" else "truncated"
    message = f"foci {command}: 1 of 3 inputs is longer than the model can read: {part}\n"
    wrote = f"foci run: written: {answers}\n" if command == "run" else ""
    assert capsys.readouterr().err == message + wrote
    assert len(answers.read_text().splitlines()) == 3


def test_no_input_of_generation_is_said_to_be_cut_where_all_of_it_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is the city but the people? " * 10)
    assert main.main(["evaluate", "generation", "--data", str(text)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "characters 330" in shown.out


def test_a_run_is_used_from_another_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = written(tmp_path / "pairs.tsv", 40)
    options = [part for change in (*SMALL, "train.steps=2") for part in ("--set", change)]
    assert main.main(["train", "translation", "--data", "pairs.tsv", "--quiet", *options]) == 0
    monkeypatch.chdir(folder)
    run = str(tmp_path / "runs" / "translation")
    resume = ["train", "translation", "--out", run, "--resume", "--quiet", "--set"]
    assert main.main([*resume, "train.steps=3"]) == 0
    assert main.main(["evaluate", run]) == 0
    capsys.readouterr()
    moved = data.rename(tmp_path / "moved.tsv")
    for arguments in ([*resume, "train.steps=4"], ["evaluate", run]):
        assert main.main(arguments) == 2
        message = f": the data of {run} must be at {data}, but it does not exist: use --data if it has moved\n"
        assert capsys.readouterr().err.endswith(message)
    assert main.main([*resume, "train.steps=4", "--data", str(moved)]) == 0
    assert main.main([*resume, "train.steps=5", "--data", str(folder / "pairs.tsv")]) == 2
    assert "must not change, but these files differ from the start" in capsys.readouterr().err


def test_files_follow_the_umask(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(folder / "pairs.tsv")
    options = [part for change in (*SMALL, "train.steps=2", "train.average=2") for part in ("--set", change)]
    before = os.umask(0o027)
    try:
        out = tmp_path / "run"
        assert main.main(["train", "translation", "--data", data, "--out", str(out), "--quiet", *options]) == 0
        assert main.main(["run", "translation", "ab", "--model", str(out), "--out", str(out / "x.foci")]) == 0
    finally:
        os.umask(before)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {"model.safetensors", "x.foci", "state.json", "rank-00000.safetensors"} <= {path.name for path in files}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: "0o640" for path in files}


def test_evaluate_prints_scores_and_writes_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = folder / "runs" / "translation", folder / "pairs.tsv"
    answers = folder / "out.txt"
    assert main.main(["evaluate", str(model), "--data", str(data), "--json", "--answers", str(answers)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["bleu", "chrf", "signature"]
    # The references are single words, which BLEU compares by their characters.
    assert "tok:char" in found["signature"]
    assert len(answers.read_text().splitlines()) == 300
    assert main.main(["evaluate", str(model), "--data", str(data), "--set", "task.tokenized=true"]) == 0
    assert "tok:none" in capsys.readouterr().out


def test_data_is_checked_line_by_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = folder / "bad.tsv"
    bad.write_text("a\tb\nonly one\na\tb\n")
    assert main.main(["data", "check", "translation", "--data", str(bad)]) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"{bad}:2: error: a line must have 2 tab-separated columns (source, target), got 1",
        f"{bad}:3: warning: duplicate of {bad}:1",
        "1 error, 1 warning",
    ]
    bad.write_text("a\tb\n" * 300)
    assert main.main(["data", "check", "translation", "--data", str(bad)]) == 0
    *shown, more, total = capsys.readouterr().out.splitlines()
    assert shown == [f"{bad}:{line}: warning: duplicate of {bad}:1" for line in (2, 3, 4)]
    assert more == f"and 296 more warnings like this: duplicate of {bad}:1 (--all prints them)"
    assert total == "0 errors, 299 warnings"
    assert main.main(["data", "check", "translation", "--data", str(bad), "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 300


def test_a_path_takes_the_place_of_the_task(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main.main(["run", "translation", "ab cd", "--model", "runs/translation"]) == 0
    answer = capsys.readouterr()
    for path in ("runs/translation", "runs/translation/model.safetensors"):
        assert main.main(["run", path, "ab cd"]) == 0
        assert capsys.readouterr() == answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "runs/none", "x"], "summarization, or the path of a model, got 'runs/none'"),
        (["run", "runs/translation", "x", "--model", "y"], "--model must be left out where a model takes the place of"),
        (["run", "translatoin", "x"], "got 'translatoin': did you mean translation?"),
        (["data", "check", "translation"], "--data must name the data to check, got none"),
        (
            ["run", "translation", "pairs.tsv"],
            "inputs of translation must be texts, got the file pairs.tsv: --file reads",
        ),
        (["run", "translation", ""], "the input must be a sentence to translate, got an empty text"),
        (["run", "generation", "x", "--model", "runs/translation"], "--model must be a model for generation, got"),
        (["run", "summarization", "x"], "no model for summarization ships: train one on a table of documents"),
        (["look", "x", "--model", "summarization"], "(foci train summarization --data documents.tsv) and name it"),
        (["evaluate", "summarization", "--data", "pairs.tsv"], f"models ship for {', '.join(list_pretrained())}"),
        (["run", "translation", "a", "\udcff"], r"the text must be valid UTF-8, got '\udcff'"),
        (["look", "\udcff", "--model", "runs/translation"], r"the text must be valid UTF-8, got '\udcff'"),
        (["run", "translation", "a", "--device", "cuda"], "device must be 'cpu' or 'auto' where PyTorch finds no GPU"),
        (
            ["evaluate", "runs/translation", "--device", "cuda"],
            "device must be 'cpu' or 'auto' where PyTorch finds no GPU",
        ),
        (
            ["train", "translation", "--data", "pairs.tsv", "--out", "pairs.tsv"],
            "pairs.tsv must be a run directory, got a file",
        ),
        (
            ["train", "translation", "--data", "/dev/null", "--out", "new"],
            "/dev/null must be a file, got something else",
        ),
        (
            ["run", "translation", "a", "--set", "train.rate=1"],
            "--set must change [task] settings of a",
        ),
        (["run", "translation", "a", "b", "--out", "page.html"], "--out page.html needs exactly one input, got 2"),
        (["train", "translation", "--out", "new"], "--data must name the training data, got none"),
        (
            ["train", "translation", "--resume", "--seed", "3"],
            "run and cannot be combined with --seed",
        ),
        (
            ["train", "translation", "--resume", "--data", "x"],
            "must be at x, but it does not exist: use --data if it has moved",
        ),
        (
            ["train", "translation", "--resume", "--set", "task.width=8"],
            "settings when resuming, got task",
        ),
        (
            ["train", "translation", "--resume", "--out", "none"],
            "--resume needs a run directory, got none",
        ),
        (
            ["run", "translation", "a", "--out", "x.docx"],
            ".foci, .html, .png, .svg, .pdf, .jpg, .webp or .txt, got",
        ),
        (["run", "translation", "a", "--out", "none/x.txt"], "--out must be in an existing directory, got none/x.txt"),
        (["run", "translation", "a", "--out", "folder.txt"], "--out must be a file, got the directory folder.txt"),
        (["view", "pairs.tsv", "--out", "x.docx"], "--out must end with .foci, .html"),
        (["view", "runs"], "file must be a .foci file or an attention.jsonl, got runs, which is a directory"),
        (["evaluate", "runs/translation/model.safetensors"], "--data must name the evaluation data, because"),
        (["evaluate", "runs/translation", "--answers", "runs"], "--answers must be a file, got the directory runs"),
        (["evaluate", "none", "--data", "pairs.tsv"], "model must be a run directory, a model file or a pretrained"),
        (["run", "translation", "a", "--model", "speach"], "got speach: no such path; did you mean speech?"),
        (["run", "translation", "a", "--model", "speech"], "must be a model for translation, got speech, a model for"),
        (["run", "translation", "letter.txt"], "inputs of translation must be texts, got letter.txt: no such file"),
        (["run", "translation", "a", "--set", "beam=3"], "of a trained model, got beam: did you mean task.beam?"),
        (["look", "runs/translation"], "text must be a text, or the path of a text, image or sound file, got the dir"),
        (["view", "pairs.tsv"], "file must be a .foci file or an attention.jsonl, got pairs.tsv"),
        (["evaluate", "vision"], "--data is required to evaluate vision: pretrained models come without data"),
        (["run", "vision", "runs"], "inputs of vision must be files, got the directory runs: name the files in it"),
        (["run", "speech", "runs"], "inputs of speech must be files, got the directory runs: name the files in it"),
        (["run", "translation", "a", "--set", "task.bean=1"], "not a setting of translation: did you mean task.beam? "),
        (["run", "translation", "a", "--set", "task=1"], "[task] in the changes must be a table, got 1"),
        (["train", "visoin", "--data", "none"], "got 'visoin': did you mean vision?"),
        (["train", "vision", "--data", "none"], "none must be a folder with one subfolder per class"),
        (["evaluate", "runs/translation", "--data", "none.tsv"], "none.tsv must be a file, got no such file"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (folder / "folder.txt").mkdir(exist_ok=True)
    if "speech" in arguments:
        monkeypatch.setattr("foci.__file__", str(folder / "foci" / "__init__.py"))
    assert main.main(arguments) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert message in error
    assert before in ([], [RUN_USED])


def test_a_pretrained_model_is_run_and_evaluated_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.tsv").write_text("A man sleeps.\tEin Mann schläft.\n")
    assert main.main(["run", "translation", "A man sleeps."]) == 0
    assert capsys.readouterr().out == "Ein Mann schläft.\n"
    assert main.main(["evaluate", "translation", "--data", "test.tsv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"] == pytest.approx(100)
    with pytest.raises(SystemExit, match="0"):
        main.main(["run", "--help"])
    assert "pretrained models: " + ", ".join(list_pretrained()) in " ".join(capsys.readouterr().out.split())


def test_evaluate_scores_a_long_text_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "The cat looked out of the window. " * 12
    (tmp_path / "long.txt").write_text(text)
    assert main.main(["evaluate", "generation", "--data", str(tmp_path / "long.txt"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["characters"] == len(text)
    assert printed.err == ""


def test_a_pretrained_model_is_available_by_name_beside_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main.main(["run", "translation", "A man sleeps.", "--model", "translation"]) == 0
    assert capsys.readouterr() == ("Ein Mann schläft.\n", "")


def test_a_generated_text_is_streamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Pipe(io.StringIO):
        parts: ClassVar[list[str]] = []

        def flush(self) -> None:
            self.parts.append(self.getvalue())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout", pipe := Pipe())
    arguments = ["run", "generation", "ROMEO:", "--set", "task.new_tokens=8"]
    assert main.main(arguments) == 0
    lengths = [len(part) for part in dict.fromkeys(pipe.parts)]
    assert lengths == [*range(6, 15), 15]
    assert main.main([*arguments, "--out", "answer.txt"]) == 0
    assert (tmp_path / "answer.txt").read_text() == pipe.getvalue()


def test_a_damaged_file_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good, broken = b"P5 28 28 255\n" + bytes(28 * 28), b"P5 28 28 255\n" + bytes(9)
    for name, content in (("a.pgm", good), ("broken.pgm", broken), ("c.pgm", good)):
        (tmp_path / name).write_bytes(content)
    assert main.main(["run", "vision", "a.pgm", "broken.pgm", "none.pgm", "c.pgm"]) == 2
    message = capsys.readouterr()
    first, *failed, last = message.out.splitlines()
    assert first == last != ""
    assert failed == ["", ""]
    assert message.err.splitlines() == [
        "foci run: broken.pgm must hold 784 bytes of 28 x 28 pixels, got 9",
        "foci run: none.pgm must be an image file, got no such file",
    ]


def test_written_files_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    model = ["--model", "runs/translation"]
    for out in ("x.foci", "x.txt"):
        assert main.main(["run", "translation", "ab", *model, "--out", out]) == 0
        assert capsys.readouterr().err == f"foci run: written: {out}\n"


def test_evaluate_shows_a_progress_bar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert main.main(["evaluate", str(folder / "runs" / "translation"), "--data", str(folder / "pairs.tsv")]) == 0
    assert "300/300" in terminal.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ["look", "ab", "--model", "runs/translation"],
        ["run", "translation", "ab", "--model", "runs/translation"],
        ["evaluate", "runs/translation", "--data", "pairs.tsv"],
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main.main(arguments) == 1
    message = "model.safetensors needs safetensors, which is not installed: pip install 'foci[tasks]'\n"
    assert capsys.readouterr().err.endswith(message)


def test_a_record_without_the_package_names_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "some.foci").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main.main(["view", "some.foci", "--out", "z.html"]) == 1
    message = "foci view: some.foci needs safetensors, which is not installed: pip install 'foci[view]'\n"
    assert capsys.readouterr().err == message
