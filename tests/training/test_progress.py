import io
import sys
import types
from pathlib import Path

import pytest

from foci.training.progress import Progress, decoding_progress, format_duration


def test_metrics_go_to_tensorboard_if_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:
        def __init__(self, folder: str) -> None:
            self.folder, self.seen, self.closed = folder, [], False  # type: ignore[var-annotated]

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen.append((name, value, step))

        def close(self) -> None:
            self.closed = True

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)  # type: ignore[arg-type]
    with Progress(tmp_path, 5, is_first=True, quiet=True) as progress:
        progress.log(3, {"loss": 1.5, "signature": "x"})
    assert progress.board.folder == str(tmp_path / "tensorboard")
    assert progress.board.seen == [("loss", 1.5, 3)]
    assert progress.board.closed


def test_only_the_first_process_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(tmp_path, 5, is_first=False) as progress:
        progress.log(3, {"loss": 1.5})
        progress.message("something")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_durations_are_formatted_as_a_clock() -> None:
    assert [format_duration(seconds) for seconds in (0.4, 59.6, 3600)] == ["0:00", "1:00", "1:00:00"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_evaluation_shows_progress_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    with decoding_progress(4) as done:
        done(4)
    assert file.getvalue() == ""
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with decoding_progress(4) as done:
        for _ in range(10):
            done(0.3)
    assert "3/4" in terminal.getvalue()
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr("foci.training.progress.LINE_SECONDS", -1.0)
    monkeypatch.setattr("sys.stderr", plain := Terminal())
    with decoding_progress(4) as done:
        done(1)
    assert plain.getvalue() == "1/4 answered\n"
