"""Tensor, context and weight parallel trainings are like those of one process; checkpoints load on another mesh."""

import shutil
from pathlib import Path

import pytest

from foci.nn import EncoderDecoder, Seq2SeqRNN
from foci.training import checkpoint, train
from foci.training.distributed import init_processes
from foci.training.parallel import Parallel, check_model, interleave_parts, parse_parallel
from tests.sharding.processes import run_processes
from tests.training.reversal import SMALL, config, logged, written
from tests.training.test_distributed import assert_same_curve

CHANGES = ("task.dropout=0", "train.steps=6", "train.checkpoint_every=3", "train.monitor=3", "train.ema=0.5")


def train_in_processes(data: Path, folder: Path, parallel: str, *more: str) -> list[tuple[int, str, str]]:
    count = parse_parallel(parallel).size
    changes = (
        *SMALL,
        *CHANGES,
        f"train.parallel={parallel}",
        f"train.batch_tokens={256 // parse_parallel(parallel).fsdp}",
    )
    options = [part for change in changes for part in ("--set", change)]
    source = ("train", "translation", "--data", str(data), *options) if not more else ("train", "translation", *more)
    return run_processes(count, "foci", *source, "--out", str(folder), folder=folder.parent)


def assert_finished(results: list[tuple[int, str, str]]) -> None:
    assert [status for status, _, _ in results] == [0] * len(results), results
    # Only the first process prints; PyTorch may warn of what gloo lacks.
    assert all(output == "" and "step" not in errors for _, output, errors in results[1:]), results


@pytest.mark.parametrize(
    ("text", "found"),
    [("fsdp=2,tp=4", Parallel(2, 4, 1)), ("cp=8", Parallel(cp=8)), (" tp = 2 , cp=3", Parallel(1, 2, 3))],
)
def test_sizes_are_parsed(text: str, found: Parallel) -> None:
    assert parse_parallel(text) == found


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=2,tp=2", "dp=2", "tp=2;cp=2", "tp=-1", ","])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^train.parallel must be sizes such as 'fsdp=2,tp=2,cp=2'"):
        parse_parallel(text)


def test_sizes_must_multiply_to_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"^train.parallel must multiply to the 4 processes .* which needs 2$"):
        init_processes("cpu", "tp=2")


@pytest.mark.parametrize("setting", ["graphs", "compile", "shard"])
def test_settings_that_exclude_each_other(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ValueError, match=f"^train.{setting} must be false with train.parallel, got both"):
        config(written(tmp_path / "pairs.tsv"), "train.parallel=tp=2", f"train.{setting}=true")


def test_models_that_cannot_be_split_are_refused() -> None:
    recurrent = Seq2SeqRNN.from_name("tiny", vocabulary=20)
    check_model(recurrent, Parallel(fsdp=2))
    with pytest.raises(ValueError, match=r"^train.parallel must be fsdp=N for Seq2SeqRNN, which has no Transformer"):
        check_model(recurrent, Parallel(cp=2))
    with pytest.raises(ValueError, match=r"^tp in train.parallel must divide the 4 heads of EncoderDecoder, got tp=3"):
        check_model(EncoderDecoder.from_name("tiny", vocabulary=20), Parallel(tp=3))


def test_each_shard_of_interleaved_parts_has_its_share_of_every_part() -> None:
    order = interleave_parts([8, 4, 4], 4)
    assert order.sort().values.tolist() == list(range(16))
    for shard in order.chunk(4):
        assert [int(((shard >= low) & (shard < high)).sum()) for low, high in ((0, 8), (8, 12), (12, 16))] == [2, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["tp=2", "cp=2", "tp=2,cp=2", "fsdp=2,tp=2", "fsdp=2,cp=2"])
def test_parallel_models_have_the_gradients_of_whole_ones(parallel: str) -> None:
    results = run_processes(parse_parallel(parallel).size, "tests.training.parallel_worker", parallel, timeout=400)
    assert [(status, output) for status, output, _ in results] == [(0, "passed\n")] * len(results), results


@pytest.mark.slow
def test_a_parallel_training_resumes_on_another_mesh(tmp_path: Path) -> None:
    data, folder = written(tmp_path / "pairs.tsv"), tmp_path / "four"
    assert_finished(train_in_processes(data, folder, "tp=2,cp=2"))
    changes = (*CHANGES, "train.batch_tokens=256")
    train(config(data, *changes), tmp_path / "one", quiet=True)
    assert_same_curve(tmp_path / "one", folder)
    seen, expected = (path.joinpath("attention.jsonl").read_text().count("\n") for path in (folder, tmp_path / "one"))
    assert seen == expected > 0
    shutil.rmtree(checkpoint.list_checkpoints(folder / "checkpoints")[0])
    shutil.copytree(folder, tmp_path / "two")
    # The checkpoint of the 2 x 2 mesh, in one process and on a mesh of two.
    train(config(data, *changes), folder, resume=True, quiet=True)
    assert_same_curve(tmp_path / "one", folder)
    resumed = train_in_processes(data, tmp_path / "two", "tp=2", "--resume", "--set", "train.parallel=tp=2")
    assert_finished(resumed)
    assert_same_curve(tmp_path / "one", tmp_path / "two")
    for path in (folder, tmp_path / "two"):
        found, whole = logged(path, "dev_loss")[6], logged(tmp_path / "one", "dev_loss")[6]
        assert found == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_training(tmp_path: Path) -> None:
    results = run_processes(
        2, "tests.training.dying_worker", str(written(tmp_path / "pairs.tsv")), str(tmp_path / "run")
    )
    (status, _, errors), (died, _, _) = results
    assert died == 3
    assert status == 1
    assert "the connection to another process was lost" in errors
    assert "Traceback" not in errors
