import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import foci
import foci.tasks
from foci.cli import bench, main
from foci.training.config import TrainConfig, parse_value

ROOT = Path(__file__).parents[2]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"foci {foci.__version__}\n"


def test_help_shows_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    out = capsys.readouterr().out
    assert "examples:\n" in out
    assert main.build_parser().parse_args(["explain", "Jane is hungry.", "--word", "hungry"]).word == "hungry"
    assert main.build_parser().parse_args(["bench", "attention", "--help"]).rest == ["--help"]


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands, "data check" among them."""

    def below(parser: argparse.ArgumentParser, name: str) -> dict[str, argparse.ArgumentParser]:
        found = {name: parser}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each, inner in action.choices.items():
                    found |= below(inner, f"{name} {each}".strip())
        return found

    return below(main.build_parser(), "")


def examples(parser: argparse.ArgumentParser) -> list[str]:
    return [line.strip() for line in (parser.epilog or "").splitlines()[1:]]


@pytest.mark.parametrize("name", commands())
def test_every_command_shows_its_own_examples(name: str) -> None:
    shown = examples(commands()[name])
    assert shown
    for line in shown:
        words = shlex.split(line.partition(">")[0])
        # The example for torchrun runs foci as a module.
        arguments = words[words.index("foci") + 1 :]
        assert " ".join(arguments).startswith(name)
        assert main.parse_arguments(arguments).command == (name.split() or arguments)[0]


@pytest.mark.parametrize("task", foci.tasks.TASKS)
def test_every_setting_is_listed_with_its_default_and_a_comment(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", task, "--settings"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    for name, message, kind in (
        ("task", first, foci.tasks.find_task(task).settings_type),
        ("train", second, TrainConfig),
    ):
        heading, *lines = message.splitlines()
        assert heading == f"[{name}]"
        found = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
        assert list(found) == [f"{name}.{field.name}" for field in fields(kind)]
        assert all(len(rest) == 2 and len(rest[1]) > 3 for rest in found.values())
        values = {key.partition(".")[2]: parse_value(default) for key, (default, _) in found.items() if default != "-"}
        assert kind.from_dict(values) == kind()


def test_explain_joins_unquoted_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.main(["explain", "Jane", "is", "hungry."]) == 0
    out = capsys.readouterr().out
    assert "   Jane · is · hungry · .\n" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", ""], "foci explain: the text must have at least one word, got ''\n"),
        (["explain", "a b", "--word", "c"], "foci explain: --word must be one of a b, got 'c'\n"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(arguments) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("arguments", [["fly"], ["explain"], ["explain", "a", "--words", "b"], ["doctor", "now"]])
def test_bad_usage_is_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 2
    message = capsys.readouterr()
    assert message.out == ""
    assert message.err.count("\n") == 1
    assert message.err.endswith("--help)\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train translation --sise tiny", "foci train: unrecognized arguments: --sise: did you mean --size?"),
        ("train translation --epochs 3", "foci train: unrecognized arguments: --epochs: use --set train.epochs=3"),
        ("train vision --data x --lr=0.1", "foci train: unrecognized arguments: --lr=0.1: use --set train.rate=0.1"),
        ("train generation --new-tokens", "unrecognized arguments: --new-tokens: use --set task.new_tokens=..."),
        ("run runs/translation hi --beem 3", "foci run: unrecognized arguments: --beem: use --set task.beam=3"),
        ("data check vision --date x", "foci data check: unrecognized arguments: --date: did you mean --data?"),
        ("run translation hi --from de", "--from: a translator has the languages of its training pairs"),
        ("look hi --wrod hi", "foci look: unrecognized arguments: --wrod: did you mean --word?"),
        ("explore --nothing-like-it", "foci explore: unrecognized arguments: --nothing-like-it"),
        ("doctor now", "foci doctor: unrecognized arguments: now"),
    ],
)
def test_an_unknown_option_gets_the_nearest_name(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(arguments.split())
    assert stop.value.code == 2
    command = " ".join(arguments.split()[: 2 if arguments.startswith("data") else 1])
    error = capsys.readouterr().err
    assert message in error
    assert error.endswith(f" (see foci {command} --help)\n")


def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    """Create a checkout with these benchmarks and point `foci bench` to it."""
    (folder / "benchmarks").mkdir()
    for name in scripts:
        source = 'import sys\nif __name__ == "__main__":\n    sys.exit(len(sys.argv[1:]))\n'
        (folder / "benchmarks" / f"{name}.py").write_text(source)
    (folder / "benchmarks" / "timing.py").write_text("STARTED = 0\n")
    monkeypatch.setattr(bench, "BENCHMARKS", folder / "benchmarks")


def test_bench_runs_the_script_with_its_own_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout(tmp_path, monkeypatch, "attention", "weights")
    assert main.main(["bench", "weights", "--quick", "--help", "7"]) == 3
    assert main.main(["bench"]) == 0


def test_bench_lists_the_benchmarks_in_its_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout(tmp_path, monkeypatch, "attention", "weights")
    assert main.main(["bench", "speed"]) == 2
    message = "foci bench: the benchmark must be one of attention, weights, got 'speed'\n"
    assert capsys.readouterr().err == message


def test_bench_outside_a_checkout_says_where_benchmarks_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout(tmp_path, monkeypatch)
    assert main.main(["bench"]) == 2
    assert "they come with a source checkout, not with the wheel" in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m foci explain 'Jane is hungry.' | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert done.stdout == "Attention, step by step\n"
    assert done.stderr == ""


def test_help_is_printed_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main([])
    message = capsys.readouterr()
    assert message.out == ""
    assert "examples:\n  foci explain" in message.err


def test_ctrl_c_while_torch_is_imported_ends_without_a_traceback(tmp_path: Path) -> None:
    # A module that replaces torch and is interrupted while it is imported.
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "foci", "look", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
