"""Writes the statistics of a monitored step to TensorBoard, Weights & Biases or a function."""

from __future__ import annotations

from typing import Any

from foci.record.head_totals import HISTOGRAM_EDGES
from foci.record.history import StepStatistics


def write_statistics(writer: Any, entry: StepStatistics, heads: bool) -> None:
    """Writes a step to a TensorBoard writer, to an object with `log`, or to a function."""
    values = flatten_statistics(entry, heads)
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, entry.step)
        write_histograms(writer, entry)
    elif hasattr(writer, "log"):
        writer.log(values, step=entry.step)
    elif callable(writer):
        writer(values, entry.step)
    else:
        raise TypeError(
            "writer must be a TensorBoard SummaryWriter, an object with log(values, step=) or a function of"
            f" (values, step), got {type(writer).__name__}"
        )


def write_histograms(writer: Any, entry: StepStatistics) -> None:
    """Writes the histograms of each layer to a TensorBoard writer."""
    for name, (edges, counts) in flatten_histograms(entry).items():
        add_tensorboard_histogram(writer, name, edges, counts, entry.step)


def flatten_statistics(entry: StepStatistics, heads: bool = False) -> dict[str, float]:
    """The numbers of a step by tag: attention/largest_logit/L5, with `heads` also attention/largest_logit/L5H3."""
    values = {
        f"attention/{name}/{layer}": value
        for layer, found in entry.reduce_heads().items()
        for name, value in found.items()
    }
    for layer, found in entry.layers.items() if heads else ():
        for name, of_heads in found.items():
            values |= {f"attention/{name}/{layer}H{head}": value for head, value in enumerate(of_heads.tolist())}
    return values


def flatten_histograms(entry: StepStatistics) -> dict[str, tuple[tuple[float, ...], list[int]]]:
    """The histograms of each layer, summed over its heads, by tag: the lower edges of the bins and their counts."""
    return {
        f"attention/{name}/{layer}": (HISTOGRAM_EDGES[name], counts.sum(0).tolist())
        for layer, found in entry.histograms.items()
        for name, counts in found.items()
        if counts.any()
    }


def add_tensorboard_histogram(writer: Any, tag: str, edges: tuple[float, ...], counts: list[int], step: int) -> None:
    uppers = [*edges[1:], 2 * edges[-1] - edges[-2]]
    centers = [(low + high) / 2 for low, high in zip(edges, uppers, strict=True)]
    writer.add_histogram_raw(
        tag,
        min=edges[0],
        max=uppers[-1],
        num=sum(counts),
        sum=sum(count * center for count, center in zip(counts, centers, strict=True)),
        sum_squares=sum(count * center**2 for count, center in zip(counts, centers, strict=True)),
        bucket_limits=uppers,
        bucket_counts=counts,
        global_step=step,
    )
