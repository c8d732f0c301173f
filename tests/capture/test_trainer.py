"""foci.hf.MonitorCallback: in the Trainer of transformers, and by its own protocol where accelerate is missing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foci
from foci.record.history import History
from foci.runtime.interception import KEY, is_key_included

transformers = pytest.importorskip("transformers")

import foci.hf  # noqa: E402


def build_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def examples(count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(50, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def read_history(folder: Path) -> History:
    history = foci.load(folder / "attention.jsonl")
    assert isinstance(history, History)
    return history


def test_protocol_of_the_trainer(tmp_path: Path) -> None:
    model, written = build_model(), list[int]()
    callback = foci.hf.MonitorCallback(every=2, writer=lambda values, step: written.append(step), alerts={})
    assert isinstance(callback, transformers.TrainerCallback)
    args = SimpleNamespace(output_dir=str(tmp_path / "out"))
    state, control = SimpleNamespace(global_step=4, is_world_process_zero=True), None
    callback.on_train_begin(args, state, control, model=model)
    for _ in range(4):
        callback.on_step_begin(args, state, control)
        for example in examples(2):
            model(**{name: tensor.unsqueeze(0) for name, tensor in example.items()}).loss.backward()
        callback.on_pre_optimizer_step(args, state, control)
        callback.on_step_end(args, state, control)
    history = read_history(tmp_path / "out")
    assert history.steps == written == [6, 8]
    assert history.heads == ["L0H0", "L0H1", "L1H0", "L1H1"]
    assert callback.monitor is not None
    assert callback.monitor.latest.histograms["L0"]["entropy"].sum(-1).tolist() == [16, 16]


def test_a_training_after_one_that_was_interrupted() -> None:
    model = build_model()
    callback = foci.hf.MonitorCallback(every=1)
    args, state = SimpleNamespace(output_dir=""), SimpleNamespace(global_step=0, is_world_process_zero=False)
    for _ in range(2):
        callback.on_train_begin(args, state, None, model=model)
        assert not any(part._forward_pre_hooks for part in model.modules())
        # Without the end of the step.
        callback.on_step_begin(args, state, None)
        model(torch.arange(6)[None])
    callback.on_pre_optimizer_step(args, state, None)
    callback.on_step_end(args, state, None)
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert not is_key_included(KEY)
    assert callback.monitor is not None
    assert callback.monitor.latest.histograms["L0"]["entropy"].sum(-1).tolist() == [6, 6]


def test_trainer_writes_the_history(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    callback = foci.hf.MonitorCallback(every=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    model = build_model()
    transformers.Trainer(model, arguments, train_dataset=examples(32), callbacks=[callback]).train()
    history = read_history(tmp_path)
    assert history.steps == [1, 2, 4]
    # Two micro-batches of two sequences of eight tokens.
    assert callback.monitor.latest.histograms["L0"]["entropy"].sum(-1).tolist() == [32, 32]
    assert all(not part._forward_hooks for part in model.modules())
