"""The training loop: stopping, model selection, averaging, messages."""

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foci.cli import main
from foci.runtime.safetensors_file import import_safetensors
from foci.tasks.model_file import load_trained_model
from foci.tasks.translation import Translation
from foci.training import loop, progress, train
from foci.training.batches import BatchPosition
from foci.training.best_models import BestModels
from foci.training.state import EvaluatedModel, State
from tests.training.reversal import SMALL, config, logged, written


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path / "pairs.tsv")


def test_a_non_finite_loss_stops_and_names_step_batch_and_norm(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(100))
    plain = Translation.loss

    def breaking(self: Translation, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss, count = plain(self, model, batch)
        return (loss * float("nan") if next(calls) == 6 else loss), count

    monkeypatch.setattr(Translation, "loss", breaking)
    changes = [part for change in (*SMALL, "train.steps=20") for part in ("--set", change)]
    assert (
        main.main(["train", "translation", "--data", str(data), "--out", str(tmp_path / "r"), "--quiet", *changes]) == 1
    )
    said = capsys.readouterr().err
    assert "the loss at step 7 is nan and the gradient norm nan (batch 0 of epoch 1 with" in said
    assert said.count("\n") == 1
    assert [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()] == ["step-00000005"]


def test_training_stops_after_patience_evaluations(data: Path, tmp_path: Path) -> None:
    still = config(data, "train.rate=0", "train.steps=200", "train.evaluate_every=2", "train.patience=3")
    train(still, tmp_path / "run", quiet=True)
    # The first evaluation is the best, and three more do not improve on it.
    assert max(logged(tmp_path / "run", "loss")) == 8


def test_the_final_model_averages_the_best_models(data: Path, tmp_path: Path) -> None:
    train(config(data, "train.steps=30", "train.average=2", "train.evaluate_every=10"), tmp_path / "run", quiet=True)
    kept = sorted((tmp_path / "run" / "best").iterdir())
    assert [path.name for path in kept] == ["step-00000020.safetensors", "step-00000030.safetensors"]
    first, second, last = (
        import_safetensors().load_file(path) for path in (*kept, tmp_path / "run" / "model.safetensors")
    )
    about = load_trained_model(tmp_path / "run").about
    final, alone = about["dev"]["loss"], logged(tmp_path / "run", "dev_loss")
    name = "encoder.blocks.0.attention.project.weight"
    mean = (first[name] + second[name]) / 2
    taken = mean if final not in alone.values() else {alone[20]: first, alone[30]: second}[final][name]
    torch.testing.assert_close(last[name], taken)
    assert final <= min(alone.values())


def test_the_moving_average_is_evaluated(data: Path, tmp_path: Path) -> None:
    for decay in ("0", "0.99"):
        train(config(data, "train.steps=20", f"train.ema={decay}"), tmp_path / decay, quiet=True)
    assert logged(tmp_path / "0", "loss") == logged(tmp_path / "0.99", "loss")
    assert logged(tmp_path / "0", "dev_loss")[20] < logged(tmp_path / "0.99", "dev_loss")[20]


def test_a_missing_metric_package_is_reported_and_the_loss_selects(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    found = train(config(data, "train.steps=10", "train.select=metric", "train.decoded=2"), tmp_path / "run")
    assert list(found) == ["loss"]
    said = capsys.readouterr().err
    assert said.count("pip install 'foci[tasks]'; until then the best model is the one with the lowest loss") == 1


def test_a_stop_signal_saves_a_checkpoint_that_resumes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = loop.run_training_step

    def interrupted(run: Any, learner: Any, batch: Any, step: int, monitor: Any) -> Tensor:
        if step == 6:
            signal.raise_signal(signal.SIGTERM)
        return plain(run, learner, batch, step, monitor)

    monkeypatch.setattr(loop, "run_training_step", interrupted)
    assert train(config(data, "train.steps=12"), tmp_path / "run") == {"stopped_at_step": 7}
    assert "stopped at step 7; checkpoint saved: --resume continues from here" in capsys.readouterr().err
    monkeypatch.undo()
    train(config(data, "train.steps=12"), tmp_path / "run", resume=True, quiet=True)
    train(config(data, "train.steps=12"), tmp_path / "whole", quiet=True)
    assert logged(tmp_path / "run", "loss") == logged(tmp_path / "whole", "loss")


@pytest.mark.parametrize(("steps", "warns"), [(2, True), (3, True), (4, False)])
def test_a_warm_up_longer_than_the_training_is_reported(
    steps: int, warns: bool, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(data, f"train.steps={steps}", "train.warmup=3"), tmp_path / "run")
    said = f"train.warmup is 3 steps of {steps}: the learning rate never decays"
    assert (said in capsys.readouterr().err) is warns


def test_one_step_per_epoch_is_singular(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(data, "train.steps=1", "train.batch_tokens=1000000"), tmp_path / "run")
    assert "; 1 step per epoch, 1 in all\n" in capsys.readouterr().err


def test_a_time_limit_ends_with_a_finished_model(data: Path, tmp_path: Path) -> None:
    train(config(data, "train.steps=100000", "train.minutes=0.005"), tmp_path / "run", quiet=True)
    assert load_trained_model(tmp_path / "run").about["dev"]["loss"] > 0


def test_log_lines_show_speed_and_time_left(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(data, "train.steps=3", "train.warmup=2"), tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("190 examples for training, 10 for dev; ")
    first = next(line for line in lines if line.startswith("step 1/3  loss "))
    assert first.endswith(" left")
    assert " targets/s  0:0" in first


def test_the_run_directory_describes_the_run(data: Path, tmp_path: Path) -> None:
    train(config(data, "train.steps=3"), tmp_path / "run", quiet=True)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["versions"]["torch"] == torch.__version__
    assert about["seed"] == 1
    assert len(about["data"][str(data)]) == 64
    assert "[train]\n" in (tmp_path / "run" / "config.toml").read_text()


def test_a_progress_bar_needs_rich(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Progress(tmp_path, 10, is_first=True) as shown:
        shown.report(4, {"loss": 1.0, "rate": 0.1, "norm": 2.0}, 100.0)
        assert shown.bar.tasks[0].completed == 4
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress.Progress(tmp_path, 10, is_first=True) as plain:
        assert plain.bar is None


def test_workers_make_the_same_batches(data: Path, tmp_path: Path) -> None:
    for name, changes in (("alone", ()), ("workers", ("train.workers=2",))):
        train(config(data, "train.steps=12", *changes), tmp_path / name, quiet=True)
    assert logged(tmp_path / "alone", "loss") == logged(tmp_path / "workers", "loss")


def test_an_error_in_a_worker_is_raised_unchanged(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Translation.batch

    def breaking(self: Translation, examples: Any, training: bool, generator: torch.Generator) -> dict[str, Tensor]:
        if training:
            raise ValueError("no such sound")
        return plain(self, examples, training, generator)

    monkeypatch.setattr(Translation, "batch", breaking)
    with pytest.raises(ValueError, match=r"^no such sound$"):
        train(config(data, "train.steps=4", "train.workers=1"), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(("wrong", "said"), [("task.heads=7", "7"), ("train.steps=2", "no such sound")])
def test_a_failed_start_leaves_no_run_behind(
    wrong: str, said: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(*_: object) -> dict[str, Tensor]:
        raise ValueError("no such sound")

    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with monkeypatch.context() as broken:
        broken.setattr(Translation, "batch", breaking)
        with pytest.raises(ValueError, match=said):
            train(config(data, wrong), folder, quiet=True)
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["notes.txt"]
    train(config(data, "train.steps=1"), folder, quiet=True)
    assert {"notes.txt", "config.toml", "run.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}


def test_training_without_safetensors_fails_at_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ImportError, match=r"^a training run needs safetensors, which is not installed: pip install 'foci"
    ):
        train(config(data, "train.steps=1"), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(("losses", "best"), [((3.0, 2.0, 2.5), 2), ((2.0, 2.0, 2.0), 3), ((1.0, 2.0, 3.0), 1)])
def test_ties_are_broken_by_loss_then_by_the_later_step(
    losses: tuple[float, ...], best: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(losses)

    def same(self: BestModels) -> dict[str, float | str]:
        loss = next(found, losses[best - 1])
        return {"bleu": 0.0, "loss": loss}

    monkeypatch.setattr(BestModels, "measure", same)
    often = ("train.select=metric", "train.evaluate_every=1", "train.steps=3", "train.patience=0")
    train(config(data, *often), tmp_path / "run", quiet=True)
    assert [path.name for path in (tmp_path / "run" / "best").iterdir()] == [f"step-{best:08d}.safetensors"]


def test_patience_counts_the_metric_not_the_loss(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter(range(100, 0, -1))
    monkeypatch.setattr(BestModels, "measure", lambda self: {"bleu": 0.0, "loss": float(next(losses))})
    often = ("train.select=metric", "train.evaluate_every=1", "train.steps=20", "train.patience=3")
    train(config(data, *often), tmp_path / "run", quiet=True)
    assert max(logged(tmp_path / "run", "loss")) == 4


def test_a_state_survives_json() -> None:
    state = State(
        step=4, next_batch=BatchPosition(0, 4), best=[EvaluatedModel(0.5, 1.0, 4), EvaluatedModel(0.25, 2.0, 2)]
    )
    assert State.from_json(json.loads(json.dumps(asdict(state)))) == state
    assert state.best_steps == {2, 4}
