"""Evaluates models during training, keeps the best ones, and makes the final model from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foci.nn.model import iter_unique_tensors
from foci.runtime.durable_files import checksum_file
from foci.runtime.safetensors_file import import_safetensors
from foci.tasks import model_file as files
from foci.training import checkpoint
from foci.training.advice import find_result_warnings
from foci.training.defaults import MAX_BATCH_TOKENS
from foci.training.evaluation import mean_loss, score_answers
from foci.training.learner import Learner
from foci.training.progress import Progress
from foci.training.run import Run
from foci.training.state import EvaluatedModel, State, best_model_path


class BestModels:
    """Evaluates the model on the dev set, keeps the best models, and writes the final one."""

    def __init__(self, run: Run, learner: Learner, progress: Progress) -> None:
        self.run, self.learner, self.progress = run, learner, progress
        config = run.config.train
        self.criterion: str = "loss" if learner.sharded and config.select == "metric" else config.select
        if self.criterion != config.select:
            progress.message("the model is sharded: the best model is selected by loss, not by the metric")
        self.examples = run.dev[: config.decoded] if config.decoded else run.dev
        self.losses: list[float] = []

    def evaluate(self, state: State) -> None:
        """Evaluates the current model, and saves it if it is among the best."""
        with self.learner.averaged_weights():
            metrics = self.measure()
            self.losses.append(float(metrics["loss"]))
            selection_score = float(state.step) if self.criterion == "last" else self.selection_score(metrics)
            state.evaluated_step = state.step
            current = EvaluatedModel(selection_score, float(metrics["loss"]), state.step)
            better = not state.best or selection_score > state.best[0].selection_score
            state.evaluations_without_improvement = 0 if better else state.evaluations_without_improvement + 1
            # Of equally good models the later one wins: it was trained on more data.
            ranked = sorted([*state.best, current], key=lambda each: (each.rank, each.step), reverse=True)
            state.best = ranked[: self.run.config.train.average]
            is_best = state.best[0] is current
            if current in state.best:
                weights = gather_weights(self.learner)
                checksum = self.write(current.path(self.run.folder), weights, metrics)
                state.best[state.best.index(current)] = current._replace(checksum=checksum)
                if is_best:
                    self.write(self.run.folder / "model.safetensors", weights, metrics)
        self.progress.log(state.step, {f"dev_{name}": value for name, value in metrics.items()})
        mark = "  best so far" if is_best else ""
        self.progress.message(f"step {state.step}  dev: {format_metrics(metrics)}{mark}")
        # A run that is killed now resumes from an older checkpoint, which needs the best models of its own step.
        self.delete_except(state.best_steps | checkpoint.read_best_steps(self.run.folder / "checkpoints"))

    def finish(self, state: State) -> dict[str, float | str]:
        """Writes the final model: the average of the best models if it beats the best one, else the best one."""
        # A run resumed at its last step has no evaluation of that step yet.
        if state.evaluated_step != state.step:
            self.evaluate(state)
        best = self.read(state.best[0])
        metrics = self.measure_weights(best)
        if len(state.best) > 1:
            mean = average_weights([self.read(each) for each in state.best])
            averaged = self.measure_weights(mean)
            better = self.criterion == "last" or self.rank(averaged) > self.rank(metrics)
            verdict = "is used" if better else "is not better than the best one"
            self.progress.message(
                f"the average of the {len(state.best)} best models {verdict}: {format_metrics(averaged)}"
            )
            best, metrics = (mean, averaged) if better else (best, metrics)
        self.write(self.run.folder / "model.safetensors", best, metrics)
        self.delete_except(state.best_steps)
        self.progress.log(state.step, {f"final_{name}": value for name, value in metrics.items()})
        self.progress.message(
            f"finished at step {state.step}  dev: {format_metrics(metrics)}  {self.run.folder / 'model.safetensors'}"
        )
        for warning in find_result_warnings(self.run.config.train, self.losses, state.best[0].step, state.step):
            self.progress.message(warning)
        self.run.processes.barrier()
        return metrics

    def measure(self) -> dict[str, float | str]:
        """Computes the loss on the dev set, and the task's metrics if they select the model."""
        run, learner = self.run, self.learner
        with learner.autocast():
            budget = run.config.train.batch_tokens or MAX_BATCH_TOKENS
            loss = mean_loss(run.task, learner.model, run.dev, budget, run.processes)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the dev loss is {loss:g}: earlier checkpoints are intact, use --resume with a lower train.rate"
            )
        metrics: dict[str, float | str] = {"loss": loss}
        if self.criterion == "metric":
            try:
                metrics = score_answers(run.task, learner.model, self.examples, run.processes) | metrics
            except ImportError as error:
                self.criterion = "loss"
                self.progress.message(f"{error}; until then the best model is the one with the lowest loss")
        return metrics

    def selection_score(self, metrics: Mapping[str, float | str]) -> float:
        """Returns the selection criterion with its sign chosen so that higher is better."""
        if self.criterion != "metric":
            return -float(metrics["loss"])
        value = float(metrics[self.run.task.metric])
        return value if self.run.task.better == "higher" else -value

    def rank(self, metrics: Mapping[str, float | str]) -> tuple[float, float]:
        """Returns a sort key; the lower loss breaks ties."""
        return self.selection_score(metrics), -float(metrics["loss"])

    def measure_weights(self, weights: dict[str, Tensor]) -> dict[str, float | str]:
        """Loads weights into the model and evaluates it."""
        load_full_weights(self.learner, weights)
        self.learner.model.eval()
        return self.measure()

    def write(self, path: Path, weights: dict[str, Tensor], metrics: Mapping[str, float | str]) -> int:
        """Saves weights with the task and the metrics, from the first process; returns the checksum of the file."""
        checksum = None
        if self.run.processes.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Only the file names: a model file is shared, and paths would reveal the machine's directories.
            data = [Path(each).name for each in self.run.config.data]
            about = {"dev": dict(metrics), "data": data, "seed": self.run.config.seed}
            files.save_trained_model(path, self.run.task, self.learner.model, about, weights=weights)
            checksum = checksum_file(path)
        return self.run.processes.broadcast(checksum)

    def read(self, model: EvaluatedModel) -> dict[str, Tensor]:
        """Reads the weights of one of the best models."""
        self.run.processes.barrier()
        path = model.path(self.run.folder)
        if not model.is_intact(self.run.folder):
            raise ValueError(f"{path} is damaged: use --resume, which goes back to a checkpoint before it")
        loaded: dict[str, Tensor] = import_safetensors().load_file(path)
        return loaded

    def delete_except(self, steps: set[int]) -> None:
        """Deletes all saved models except those of the given steps."""
        kept = {best_model_path(self.run.folder, step) for step in steps}
        folder = best_model_path(self.run.folder, 0).parent
        for path in folder.glob("step-*.safetensors") if self.run.processes.is_first else ():
            # Models of later steps date from before a resume and will be written again.
            if path not in kept:
                path.unlink()


def gather_weights(learner: Learner) -> dict[str, Tensor]:
    """Gathers every weight unsharded on the CPU; all processes must call it."""
    weights = {}
    for name, tensor in iter_unique_tensors(learner.model):
        value = tensor.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        weights[name] = (value[learner.orders[name].argsort()] if name in learner.orders else value).cpu()
    return weights


@torch.no_grad()
def load_full_weights(learner: Learner, weights: dict[str, Tensor]) -> None:
    """Copies unsharded weights into the model; each process takes its shard."""
    for name, tensor in iter_unique_tensors(learner.model):
        value: Any = weights[name].to(tensor.device)
        if name in learner.orders:
            value = value[learner.orders[name]]
        if isinstance(tensor, DTensor):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)


def average_weights(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Averages each weight over the models; integer tensors, such as counters, come from the first model."""
    first = models[0]
    return {
        name: torch.stack([model[name].double() for model in models]).mean(0).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }


def format_metrics(metrics: Mapping[str, float | str]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
