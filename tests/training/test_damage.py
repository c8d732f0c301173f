"""Every file of a run directory is verified when it is read: a damaged one is refused, and the one before is used."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foci.cli import main
from foci.runtime.durable_files import read_checked_json, write_checked_json
from foci.training import best_models, checkpoint, train
from foci.training.run import read_dev_examples
from foci.training.state import State
from tests.training.reversal import SMALL, config, written

CHANGES = ("train.steps=20", "train.evaluate_every=5", "train.average=2", "train.ema=0.9")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data, a whole run, and one that died at its last checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    data = written(folder / "pairs.tsv")
    train(config(data, *CHANGES), folder / "whole", quiet=True)
    save = checkpoint.save_checkpoint

    def dying(folder: Path, tensors: Any, state: State, *others: Any) -> None:
        assert state.step < 20, "the run dies"
        save(folder, tensors, state, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_checkpoint", dying)
        with pytest.raises(AssertionError, match="dies"):
            train(config(data, *CHANGES), folder / "dead", quiet=True)
    return folder


@pytest.fixture
def dead(runs: Path, tmp_path: Path) -> Path:
    """A copy of the dead run: checkpoints of steps 10 and 15, each with two best models of its own."""
    shutil.copytree(runs / "dead", tmp_path / "dead")
    best = [
        checkpoint.Checkpoint(path).state.best_steps
        for path in checkpoint.list_checkpoints(tmp_path / "dead/checkpoints")
    ]
    assert best == [{10, 15}, {5, 10}]
    return tmp_path / "dead"


def resume(runs: Path, folder: Path) -> None:
    train(config(runs / "pairs.tsv", *CHANGES), folder, resume=True)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change_step(path: Path) -> None:
    content = json.loads(path.read_text())
    content["state"]["step"] -= 1
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("best/step-00000015.safetensors", flip_bit),
        ("best/step-00000015.safetensors", cut),
        ("best/step-00000015.safetensors", Path.unlink),
        ("checkpoints/step-00000015/state.json", change_step),
    ],
)
def test_a_damaged_file_is_refused_and_the_checkpoint_before_is_used(
    name: str, damage: Callable[[Path], None], runs: Path, dead: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(dead / name)
    resume(runs, dead)
    said = capsys.readouterr().err
    assert re.search(r"step-00000015.* is damaged.*; using the one before it\n", said)
    assert "resumed at step 10\n" in said
    assert (dead / "model.safetensors").read_bytes() == (runs / "whole" / "model.safetensors").read_bytes()


def test_an_undamaged_run_ends_with_the_same_bytes(runs: Path, dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume(runs, dead)
    assert "is damaged" not in capsys.readouterr().err
    assert (dead / "model.safetensors").read_bytes() == (runs / "whole" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("names", [["10"], ["10", "15"]], ids=str)
def test_a_best_model_that_no_checkpoint_restores_is_dropped(
    names: list[str], runs: Path, dead: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names:
        flip_bit(dead / "best" / f"step-000000{name}.safetensors")
    resume(runs, dead)
    said = capsys.readouterr().err
    assert "no checkpoint has all of its best models: using " in said
    assert "resumed at step 15\n" in said


def test_a_best_model_damaged_during_the_training_is_refused(
    runs: Path, dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = best_models.BestModels.finish

    def damage_first(self: best_models.BestModels, state: State) -> dict[str, float | str]:
        cut(state.best[0].path(dead))
        return plain(self, state)

    monkeypatch.setattr(best_models.BestModels, "finish", damage_first)
    with pytest.raises(ValueError, match=r"best/step-\d+\.safetensors is damaged: use --resume"):
        resume(runs, dead)


FILE = "rank-00000.safetensors"
HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a device": lambda content: content.update(files={"/dev/zero": 0}),
    "a file elsewhere": lambda content: content.update(files={f"../step-00000010/{FILE}": content["files"][FILE]}),
    "a list of files": lambda content: content.update(files=[FILE]),
    "a step that is a word": lambda content: content["state"].update(step="15"),
    "a negative step": lambda content: content["state"].update(step=-1),
    "a position that is a number": lambda content: content["state"].update(next_batch=3),
    "a position of words": lambda content: content["state"].update(next_batch=["0", "0"]),
    "an empty best model": lambda content: content["state"].update(best=[[]]),
    "an unknown field": lambda content: content["state"].update(code="print()"),
    "a list as state": lambda content: content.update(state=[]),
    "no tensors": lambda content: content.pop("tensors"),
    "tensors that are a number": lambda content: content.update(tensors=3),
    "a tensor in no file": lambda content: content["tensors"].update(other={"shape": [2], "shards": [[FILE, 0, 2]]}),
    "missing rows": lambda content: next(each for each in content["tensors"].values() if each["shape"])[
        "shards"
    ].clear(),
    "another format": lambda content: content.update(format="other"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_checkpoint_with_wrong_content_is_refused(case: str, dead: Path) -> None:
    path = dead / "checkpoints" / "step-00000015" / "state.json"
    content = read_checked_json(path)
    HOSTILE[case](content)
    write_checked_json(path, content)
    with pytest.raises(ValueError, match=r"^the checkpoint .*step-00000015 is damaged: ") as error:
        checkpoint.Checkpoint(path.parent)
    assert len(str(error.value).replace(str(path.parent), "")) < 200


def replace_seed(text: str) -> str:
    return text.replace('"seed": 1', '"seed": 2').replace("seed = 1", "seed = 2")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("run.json", lambda _: "{}", "run.json must be as the training wrote it, but it is damaged: the checksum"),
        ("run.json", lambda _: "[]", "but it is damaged: run.json must be a file with a JSON object, got list"),
        ("run.json", lambda text: text[:-10], "but it is damaged: run.json is not valid JSON"),
        ("run.json", replace_seed, "but it is damaged: the checksum of run.json does not match"),
        ("config.toml", replace_seed, "config.toml must be as the training wrote it, but it was changed or damaged"),
    ],
)
def test_changed_descriptions_of_a_run_are_refused_in_one_line(
    name: str, change: Callable[[str], str], said: str, dead: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (dead / name).write_text(change((dead / name).read_text()))
    assert main.main(["train", "translation", "--out", str(dead), "--resume"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match="must be as the training wrote it"):
        read_dev_examples(dead)


@pytest.mark.parametrize("name", ["run.json", "config.toml"])
def test_a_device_in_place_of_a_file_is_refused(name: str, dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dead / name).unlink()
    (dead / name).symlink_to("/dev/zero")
    assert main.main(["train", "translation", "--out", str(dead), "--resume"]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1


def test_another_seed_is_refused(runs: Path, dead: Path) -> None:
    with pytest.raises(ValueError, match=r"^seed must be 1 as at the start of .*dead, got 2$"):
        train(config(runs / "pairs.tsv", *CHANGES, "seed=2"), dead, resume=True, quiet=True)


def test_a_dev_loss_that_is_not_finite_is_never_the_best(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(best_models, "mean_loss", lambda *_: float("nan"))
    changes = [part for change in (*SMALL, *CHANGES) for part in ("--set", change)]
    arguments = ["train", "translation", "--data", str(runs / "pairs.tsv"), "--out", str(tmp_path / "r"), "--quiet"]
    assert main.main([*arguments, *changes]) == 1
    assert "the dev loss is nan: earlier checkpoints are intact, use --resume with a lower train.rate" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "r" / "model.safetensors").exists()
