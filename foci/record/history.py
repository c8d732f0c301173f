"""History: the statistics of every head over the steps of a training, in memory and as lines of a JSON file.

H heads.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foci.record.head_totals import HEAD_STATISTICS
from foci.runtime.checks import PICTURE_SUFFIXES, parse_suffix
from foci.runtime.json_text import parse_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTORY_SUFFIX = ".jsonl"
# Digits of the numbers in a file.
FILE_DIGITS = 6


@dataclass(frozen=True)
class StepStatistics:
    """The statistics of one monitored step.

    step: its number; layers: by layer name, then by statistic, (H,) each on the CPU; histograms: likewise, (H, bins),
    with the bins of HISTOGRAM_EDGES.
    """

    step: int
    layers: dict[str, dict[str, Tensor]]
    histograms: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Numbers in lists, as JSON; None for a number that is not finite."""
        layers = {
            layer: {name: [to_json_number(value) for value in values.tolist()] for name, values in found.items()}
            for layer, found in self.layers.items()
        }
        return {"step": self.step, "layers": layers}

    def reduce_heads(self) -> dict[str, dict[str, float]]:
        """The statistics of each layer: the largest logit and the least entropy of its heads, the mean of the rest."""
        return {
            layer: {name: reduce_over_heads(name, values) for name, values in found.items()}
            for layer, found in self.layers.items()
        }


def reduce_over_heads(name: str, values: Tensor) -> float:
    if name == "largest_logit":
        return float(values.max())
    return float(values.min() if name == "least_entropy" else values.mean())


def to_json_number(value: float) -> float | None:
    return float(f"{value:.{FILE_DIGITS}g}") if math.isfinite(value) else None


class History:
    """The statistics of the monitored steps of a training, in order of the steps.

    >>> history = History([StepStatistics(1, {"L0": {"entropy": torch.tensor([2.0, 3.0])}})])
    >>> history.heads, history.values("entropy")
    (['L0H0', 'L0H1'], tensor([[2., 3.]]))
    """

    def __init__(self, entries: list[StepStatistics] | None = None) -> None:
        self.entries = entries or []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[StepStatistics]:
        return iter(self.entries)

    def __repr__(self) -> str:
        span = f", steps {self.steps[0]:,} to {self.steps[-1]:,}" if self.entries else ""
        return f"History of {len(self.heads)} heads: {len(self)} monitored steps{span}"

    @property
    def steps(self) -> list[int]:
        return [entry.step for entry in self.entries]

    @property
    def layers(self) -> dict[str, int]:
        """The number of heads of each layer."""
        heads: dict[str, int] = {}
        for entry in self.entries:
            for layer, found in entry.layers.items():
                heads[layer] = max([heads.get(layer, 0), *map(len, found.values())])
        return heads

    @property
    def heads(self) -> list[str]:
        """The names of all heads, "L5H3"."""
        return [f"{layer}H{head}" for layer, heads in self.layers.items() for head in range(heads)]

    @property
    def statistics(self) -> list[str]:
        """The names of the statistics, in the order of HEAD_STATISTICS."""
        there = {name for entry in self.entries for found in entry.layers.values() for name in found}
        return [name for name in HEAD_STATISTICS if name in there]

    def values(self, statistic: str) -> Tensor:
        """One statistic of every head at every step, (steps, heads); NaN where it is missing."""
        if statistic not in HEAD_STATISTICS:
            raise ValueError(f"statistic must be one of {', '.join(HEAD_STATISTICS)}, got {statistic!r}")
        values = torch.full((len(self), len(self.heads)), math.nan, device="cpu")
        for row, entry in zip(values, self.entries, strict=True):
            start = 0
            for layer, heads in self.layers.items():
                found = entry.layers.get(layer, {}).get(statistic)
                if found is not None:
                    row[start : start + len(found)] = found
                start += heads
        return values

    def to_dict(self) -> dict[str, Any]:
        """{"steps": [...], "layers": {layer: {statistic: [[one number per head] per step]}}}; None: not finite."""
        dicts = [entry.to_dict()["layers"] for entry in self.entries]
        layers = {
            layer: {
                name: [entry.get(layer, {}).get(name) for entry in dicts]
                for name in self.statistics
                if any(name in entry.get(layer, {}) for entry in dicts)
            }
            for layer in self.layers
        }
        return {"steps": self.steps, "layers": layers}

    def plot(self, statistic: str | None = None) -> Figure:
        """Draws the heads over time, one panel per statistic; needs matplotlib.

        Args:
            statistic: only this one, such as "largest_logit"; None: all.
        """
        from foci.view.figures.history import plot_history

        return plot_history(self, statistic)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves by the suffix: .jsonl for `foci.load`, .html a page, .png, .svg or .pdf a figure."""
        suffix = parse_suffix(path, HISTORY_SUFFIX, *PICTURE_SUFFIXES)
        if suffix == HISTORY_SUFFIX:
            Path(path).write_text("".join(format_line(entry) for entry in self.entries), encoding="utf-8")
        elif suffix == ".html":
            from foci.view.page.history import render_history_page

            Path(path).write_text(render_history_page(self, Path(path).stem), encoding="utf-8")
        else:
            from foci.view.figures.history import write_history_figure

            write_history_figure(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Reads a file that `save`, `foci train` or `foci.hf.MonitorCallback` wrote; raises ValueError for others.

        A last line that was cut off, because the training was killed while it wrote, is left out.
        """
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        entries: list[StepStatistics] = []
        for number, line in enumerate(text.split("\n")[:-1], 1):
            entry = parse_line(line, f"line {number} of {Path(path).name}")
            # A resumed training repeats the steps after its checkpoint.
            while entries and entries[-1].step >= entry.step:
                entries.pop()
            entries.append(entry)
        if not entries:
            raise ValueError(f"path must be a file of a monitored training, got {path}, which holds no step")
        return cls(entries)


def format_line(entry: StepStatistics) -> str:
    """One line of a file; histograms are sums over the heads of a layer, which keeps the lines short."""
    histograms = {
        layer: {name: counts.sum(0).tolist() for name, counts in found.items() if counts.any()}
        for layer, found in entry.histograms.items()
    }
    return json.dumps(entry.to_dict() | ({"histograms": histograms} if histograms else {})) + "\n"


def parse_line(line: str, name: str) -> StepStatistics:
    content = parse_json(line, name)
    try:
        step = content["step"]
        layers = {
            str(layer): {str(key): parse_numbers(values) for key, values in found.items() if key in HEAD_STATISTICS}
            for layer, found in content["layers"].items()
        }
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{name} must hold the statistics of a monitored step, got another form") from error
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"the step in {name} must be an integer of at least 0, got {step!r}")
    return StepStatistics(step, layers)


def parse_numbers(values: Any) -> Tensor:
    """A list of numbers; None, and what float32 cannot hold, is NaN."""
    if not isinstance(values, list) or not all(value is None or type(value) in {int, float} for value in values):
        raise TypeError(f"values must be a list of numbers, got {reprlib.repr(values)}")
    numbers = [math.nan if value is None or abs(value) > torch.finfo().max else float(value) for value in values]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")
