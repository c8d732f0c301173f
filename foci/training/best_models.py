"""Which of a training's models is the best, and what becomes of the best ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foci.nn.model import iter_unique_tensors
from foci.runtime.safetensors_file import import_safetensors
from foci.tasks import model_file as files
from foci.training import checkpoint
from foci.training.evaluation import mean_loss, score_answers
from foci.training.learner import Learner
from foci.training.progress import Progress
from foci.training.run import Run
from foci.training.state import EvaluatedModel, State


class BestModels:
    """Measures models on the dev part, keeps the best, and makes the last one of them."""

    def __init__(self, run: Run, learner: Learner, progress: Progress) -> None:
        self.run, self.learner, self.progress = run, learner, progress
        config = run.config.train
        self.by: str = "loss" if learner.shared and config.select == "metric" else config.select
        if self.by != config.select:
            progress.say("a model that is shared out among processes is selected by its loss, not by its answers")
        self.examples = run.dev[: config.decoded] if config.decoded else run.dev
        self.folder = run.folder / "best"

    def judge(self, state: State) -> None:
        """Measures the model as it is now; keeps it where it is among the best."""
        with self.learner.averaged():
            found = self.measured()
            goodness = float(state.step) if self.by == "last" else self.goodness(found)
            state.judged = state.step
            own = EvaluatedModel(goodness, float(found["loss"]), state.step)
            better = not state.best or goodness > state.best[0].goodness
            state.waiting = 0 if better else state.waiting + 1
            # Of those that are the same in all the later one has learned from more.
            ranked = sorted([*state.best, own], key=lambda each: (each.rank, each.step), reverse=True)
            state.best = ranked[: self.run.config.train.average]
            first = state.best[0] is own
            if own in state.best:
                weights = gather_weights(self.learner)
                self.write(self.folder / model_file_name(state.step), weights, found)
                if first:
                    self.write(self.run.folder / "model.safetensors", weights, found)
        self.progress.log(state.step, {f"dev_{name}": value for name, value in found.items()})
        mark = "  best so far" if first else ""
        self.progress.say(f"step {state.step}  dev: {format_metrics(found)}{mark}")
        # Killed before the next checkpoint, the run goes on from one that names the best models of its own time.
        self.forget(state.best_steps | checkpoint.read_best_steps(self.run.folder / "checkpoints"))

    def finish(self, state: State) -> dict[str, float | str]:
        """The mean of the best models where it is better than the best alone, which it is then compared with."""
        # A run that was resumed where it is to end has nothing to do but this.
        if state.judged != state.step:
            self.judge(state)
        best = self.read(state.best[0].step)
        found = self.tried(best)
        if len(state.best) > 1:
            mean = average_weights([self.read(each.step) for each in state.best])
            averaged = self.tried(mean)
            better = self.by == "last" or self.rank(averaged) > self.rank(found)
            which = "is taken" if better else "is not better than the best alone"
            self.progress.say(f"the mean of the {len(state.best)} best models {which}: {format_metrics(averaged)}")
            best, found = (mean, averaged) if better else (best, found)
        self.write(self.run.folder / "model.safetensors", best, found)
        self.forget(state.best_steps)
        self.progress.log(state.step, {f"final_{name}": value for name, value in found.items()})
        self.progress.say(
            f"finished at step {state.step}  dev: {format_metrics(found)}  {self.run.folder / 'model.safetensors'}"
        )
        self.run.processes.wait()
        return found

    def measured(self) -> dict[str, float | str]:
        """The loss on the dev part, and the task's own figures where they decide."""
        run, learner = self.run, self.learner
        with learner.autocast():
            loss = mean_loss(run.task, learner.model, run.dev, run.config.train.batch_tokens, run.processes)
        found: dict[str, float | str] = {"loss": loss}
        if self.by == "metric":
            try:
                found = score_answers(run.task, learner.model, self.examples, run.processes) | found
            except ImportError as error:
                self.by = "loss"
                self.progress.say(f"{error}; until then the best model is the one with the lowest loss")
        return found

    def goodness(self, found: Mapping[str, float | str]) -> float:
        """A number that is higher for a better model."""
        if self.by != "metric":
            return -float(found["loss"])
        value = float(found[self.run.task.metric])
        return value if self.run.task.better == "higher" else -value

    def rank(self, found: Mapping[str, float | str]) -> tuple[float, float]:
        """Models that are equally good are told apart by their loss."""
        return self.goodness(found), -float(found["loss"])

    def tried(self, weights: dict[str, Tensor]) -> dict[str, float | str]:
        """What a model with these weights reaches."""
        load_full_weights(self.learner, weights)
        self.learner.model.eval()
        return self.measured()

    def write(self, path: Path, weights: dict[str, Tensor], found: Mapping[str, float | str]) -> None:
        if self.run.processes.first:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Names of files, not where they are: a model is given to others.
            data = [Path(each).name for each in self.run.config.data]
            about = {"dev": dict(found), "data": data, "seed": self.run.config.seed}
            files.save_trained_model(path, self.run.task, self.learner.model, about, weights=weights)

    def read(self, step: int) -> dict[str, Tensor]:
        self.run.processes.wait()
        loaded: dict[str, Tensor] = import_safetensors().load_file(self.folder / model_file_name(step))
        return loaded

    def forget(self, steps: set[int]) -> None:
        """Takes away all models but those of some steps."""
        kept = {model_file_name(step) for step in steps}
        for path in self.folder.glob("step-*.safetensors") if self.run.processes.first else ():
            # Those of later steps are from before a resume, and will be written anew.
            if path.name not in kept:
                path.unlink()


def model_file_name(step: int) -> str:
    return f"step-{step:08d}.safetensors"


def gather_weights(learner: Learner) -> dict[str, Tensor]:
    """Every weight as a whole, on the CPU; all processes take part."""
    found = {}
    for name, tensor in iter_unique_tensors(learner.model):
        value = tensor.detach()
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
    return found


@torch.no_grad()
def load_full_weights(learner: Learner, weights: dict[str, Tensor]) -> None:
    """Puts whole weights into the model, of which each process takes its part."""
    for name, tensor in iter_unique_tensors(learner.model):
        value: Any = weights[name].to(tensor.device)
        if isinstance(tensor, DTensor):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
        tensor.copy_(value)


def average_weights(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each weight; whole numbers, such as counters, are those of the first."""
    first = models[0]
    return {
        name: torch.stack([model[name].double() for model in models]).mean(0).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }


def format_metrics(found: Mapping[str, float | str]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in found.items() if isinstance(value, float))
