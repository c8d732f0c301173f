"""Monitor: the health of every attention head while a model trains.

On a monitored step the model runs with the hooks of `foci.watch`, but its own attention calls run unchanged; the
statistics of each call are computed in addition and stay on the device until `log`. On other steps nothing is hooked.

H heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foci.capture.alerts import DEFAULT_ALERTS, Alert, AttentionWarning, find_alerts, warn_about
from foci.capture.compiled_statistics import (
    CompletePasses,
    Observer,
    find_device,
    is_compiled,
    make_observer,
    observe_compiled_calls,
)
from foci.capture.head_selection import HeadSelection, parse_selection
from foci.capture.recorder import Recorder
from foci.capture.statistics_writers import write_statistics
from foci.capture.watch import close_block, open_block
from foci.record.head_totals import (
    HEAD_STATISTICS,
    TOTAL_COLUMNS,
    compute_head_totals,
    compute_sharded_head_totals,
    head_histograms,
    head_statistics,
    merge_head_totals,
)
from foci.record.history import History, StepStatistics
from foci.record.record import Record
from foci.runtime.checks import is_positive_int
from foci.runtime.tracing import is_recomputation
from foci.weights.operators import has_operators
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from foci.sharding.weights import ShardedWeights


class Monitor:
    """Statistics of every attention head during training: largest logit, entropy, heaviest weight and more.

    >>> model = foci.nn.Decoder.from_name("tiny", vocabulary=100)
    >>> monitor = foci.Monitor(model, every=50)
    >>> for step in range(3):
    ...     with monitor:                                      # nothing is hooked unless it is this step's turn
    ...         loss = model(torch.randint(100, (2, 16))).logits.logsumexp(-1).mean()
    ...     loss.backward()
    ...     logged = monitor.log()                             # or monitor.log(writer)
    >>> monitor
    Monitor of Decoder: every 50 steps, at step 3, 1 logged
    >>> monitor.history.values("entropy").shape, monitor.history.heads[:2]
    (torch.Size([1, 8]), ['L0H0', 'L0H1'])

    Monitored are the first step and every step whose number is a multiple of `every`. A step is what the block wraps:
    with gradient accumulation, wrap all micro-batches of a step. The model's own attention calls run unchanged, so that
    a monitored training takes the same course as one without a monitor.

    A compiled model runs uncompiled on monitored steps, which changes its results within rounding; `uncompiled` says
    why. With `compiled=True`, a model whose attention is `foci.attention` runs a second compiled graph instead, which
    also computes the statistics; its first monitored step runs uncompiled, to learn which module makes which call.

    Nothing waits for the GPU until `log`. In a distributed training every process calls `log` at the same steps, and
    one collective merges the statistics over all processes.

    Args:
        model: any module; what `foci.watch` records is monitored, and `unseen` lists the rest.
        every: steps from one monitored step to the next.
        statistics: some of HEAD_STATISTICS; None: all.
        layers: which layers, as in `foci.watch`; None: all.
        alerts: thresholds by statistic, such as {"largest_logit": 100.0, "entropy": 0.1}: entropies raise an alert
            below theirs, other statistics above. None: largest_logit above 100. {}: only NaN and infinite logits.
        on_alert: called with each `Alert` in `log`; None: a warning, `AttentionWarning`.
        compiled: run monitored steps of a compiled model in a second compiled graph.
        group: the process group to merge over: the data-parallel one; None: all processes. False: no merging.
        step: the number of steps already taken, in a resumed training.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        statistics: Iterable[str] | None = None,
        layers: Iterable[int | str] | int | str | None = None,
        alerts: Mapping[str, float] | None = None,
        on_alert: Callable[[Alert], Any] | None = None,
        compiled: bool = False,
        group: Any = None,
        step: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if not is_positive_int(every):
            raise ValueError(f"every must be an int of at least 1, got {every!r}")
        self.model, self.every, self.step, self.group = model, every, step, group
        self.statistics = check_statistics("statistics", HEAD_STATISTICS if statistics is None else statistics)
        self.alerts = dict(DEFAULT_ALERTS if alerts is None else alerts)
        check_statistics("alerts", self.alerts)
        if alerts is None and "largest_logit" not in self.statistics:
            self.alerts = {}
        self.on_alert = warn_about if on_alert is None else on_alert
        self.layers = parse_selection("layers", layers)
        self.compiled = compiled
        # Why a compiled model runs uncompiled on monitored steps; None: it runs compiled, or is not a compiled model.
        self.uncompiled: str | None = None
        if compiled:
            self.uncompiled = "the first monitored step learns the order of the calls"
        elif is_compiled(model):
            self.uncompiled = "pass compiled=True for a second compiled graph"
        self.history = History()
        self.unseen: list[str] = []
        self._recorder: MonitorRecorder | None = None
        self._block = ExitStack()
        # The layers in the order of their calls in one pass, from the first monitored step of a compiled model.
        self._call_order: list[str] = []
        self._observer: Observer | None = None
        self._compiled_totals: list[list[Tensor]] | None = None
        # The totals of the monitored steps since the last `log`, by step, then by layer.
        self._pending: dict[int, dict[str, Tensor]] = {}
        # The heads of each layer that was ever seen: every process sends them all, in this order.
        self._heads: dict[str, int] = {}
        self._cross_layers: set[str] = set()

    def __repr__(self) -> str:
        done = f"at step {self.step:,}, {len(self.history)} logged"
        return f"Monitor of {self._model_name}: every {self.every} steps, {done}"

    @property
    def is_monitored(self) -> bool:
        """Whether the current step is monitored; outside the block, whether the last one was."""
        return self.step == 1 or self.step % self.every == 0

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            raise RuntimeError("foci.Monitor cannot be compiled: open the block outside the compiled function")
        if self._recorder is not None or self._compiled_totals is not None:
            raise RuntimeError("the block of a Monitor must not be opened inside itself")
        self.step += 1
        if self.is_monitored and self.compiled and self.uncompiled is None:
            self._observer = self._observer or make_totals_observer(self.statistics, find_device(self.model))
            self._compiled_totals = self._block.enter_context(observe_compiled_calls(self._observer))
            self._block.enter_context(CompletePasses(self._compiled_totals).watch(self.model))
        elif self.is_monitored:
            self._recorder = MonitorRecorder(self.model, self.statistics, self.layers)
            try:
                open_block(self._block, self.model, self._recorder)
            except BaseException:
                self._close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._compiled_totals is not None:
            totals, self._compiled_totals = self._compiled_totals, None
            self._block.close()
            if kind is None:
                self._add_compiled_totals([each for (each,) in totals])
            return
        recorder = self._close()
        if recorder is None or kind is not None:
            return
        self._set_unseen(recorder.list_unseen())
        self._cross_layers |= recorder.cross_layers
        self._add_step(recorder.totals)
        if self.compiled:
            self._learn_call_order(recorder)

    def _add_step(self, totals: dict[str, list[Tensor]]) -> None:
        """Adds the totals of the calls of each layer, merged, to those that `log` writes."""
        merged = {layer: merge_head_totals(torch.stack(calls)) for layer, calls in totals.items()}
        self._pending[self.step] = merged
        self._heads |= {layer: len(of_layer) for layer, of_layer in merged.items()}

    def _learn_call_order(self, recorder: MonitorRecorder) -> None:
        """Decides from an uncompiled step whether the next monitored steps can run compiled."""
        passes = list(recorder.order_by_pass.values())
        if recorder.untraceable is not None:
            self.uncompiled = recorder.untraceable
        elif recorder.foci_calls < recorder.calls:
            self.uncompiled = "not all attention calls are those of foci.attention, which compiled graphs report"
        elif not passes or any(order != passes[0] for order in passes):
            self.uncompiled = "the forward passes make different attention calls"
        elif self.layers is not None:
            self.uncompiled = "layers= selects some of the calls"
        else:
            self._call_order, self.uncompiled = passes[0], None

    def _add_compiled_totals(self, totals: list[Tensor]) -> None:
        """Adds the totals of a compiled step; its calls come in the order of the uncompiled step, pass by pass."""
        order = self._call_order
        by_layer: dict[str, list[Tensor]] = {}
        for index, of_call in enumerate(totals):
            by_layer.setdefault(order[index % len(order)], []).append(of_call)
        heads = {layer: {len(each) for each in calls} for layer, calls in by_layer.items()}
        if len(totals) % len(order) or heads != {layer: {self._heads[layer]} for layer in order}:
            self.uncompiled = f"a compiled step made {len(totals)} attention calls, not {len(order)} per pass"
            warnings.warn(
                AttentionWarning(
                    f"step {self.step:,} was not monitored: {self.uncompiled}; the next ones run uncompiled"
                ),
                stacklevel=3,
            )
            return
        self._add_step(by_layer)

    def _set_unseen(self, unseen: list[str]) -> None:
        """Notes which attention modules are not monitored, with one warning."""
        if unseen and not self.unseen:
            warnings.warn(
                AttentionWarning(
                    f"{len(unseen)} attention modules of {self._model_name} are not monitored, such as {unseen[0]};"
                    " `unseen` of the monitor lists them"
                ),
                stacklevel=3,
            )
        self.unseen = unseen

    @property
    def _model_name(self) -> str:
        return type(getattr(self.model, "_orig_mod", self.model)).__name__

    def _close(self) -> MonitorRecorder | None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            close_block(self._block, recorder)
        return recorder

    def log(self, writer: Any = None, *, heads: bool = False) -> list[StepStatistics]:
        """Merges the monitored steps since the last call over all processes, raises alerts, and writes the statistics.

        Returns immediately if no step was monitored since. All processes must call it; pass a writer in one of them.

        Args:
            writer: a TensorBoard SummaryWriter, a run of Weights & Biases or anything with `log(values, step=)`, or a
                function of (values, step) such as mlflow.log_metrics. None: the statistics are only kept in `history`.
            heads: also write the statistics of every head, not only of every layer.
        """
        logged = []
        for step in list(self._pending):
            totals = gather_totals(self._pending.pop(step), self._heads, self.group)
            entry = self._build_entry(step, totals)
            if self.history.entries:
                # Histograms are kept for the latest step only.
                self.history.entries[-1].histograms.clear()
            self.history.entries.append(entry)
            logged.append(entry)
            if writer is not None:
                write_statistics(writer, entry, heads)
        for entry in logged:
            for alert in find_alerts(entry, self.alerts):
                self.on_alert(alert)
        return logged

    def _build_entry(self, step: int, totals: dict[str, Tensor]) -> StepStatistics:
        layers, histograms = {}, {}
        for layer, of_layer in totals.items():
            # The distance between positions of two sequences has no meaning.
            skipped = {"distance"} if layer in self._cross_layers else set()
            names = [name for name in self.statistics if name not in skipped]
            found, counts = head_statistics(of_layer), head_histograms(of_layer)
            layers[layer] = {name: found[name].float() for name in names}
            histograms[layer] = {name: counts[name] for name in names if name in counts}
        return StepStatistics(step, layers, histograms)

    @property
    def latest(self) -> StepStatistics:
        """The statistics of the last logged step, with histograms."""
        if not self.history.entries:
            raise RuntimeError("latest needs a logged step: call monitor.log() after a monitored step")
        return self.history.entries[-1]

    @property
    def largest_logit(self) -> dict[str, Tensor]:
        """The largest logit of each head at the last logged step, (H,) by layer: the argument of `foci.clip_qk`."""
        return {layer: found["largest_logit"] for layer, found in self.latest.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        """All logged statistics as lists: {"steps": [...], "layers": {"L0": {"entropy": [[of each head], ...]}}}."""
        return self.history.to_dict()

    def plot(self, statistic: str | None = None) -> Figure:
        """Draws the heads over time, one panel per statistic, or one statistic; needs matplotlib."""
        return self.history.plot(statistic)


class MonitorRecorder(Recorder):
    """Computes the head totals of each attention call of one monitored step, and keeps nothing else."""

    def __init__(self, model: nn.Module, statistics: tuple[str, ...], layers: list[int | str] | None) -> None:
        super().__init__(model, Record(model=type(model).__name__), selection=HeadSelection(layers))
        self.statistics = statistics
        self.keeps_own_calls = True
        self.totals: dict[str, list[Tensor]] = {}
        self.order_by_pass: dict[int, list[str]] = {}
        # Why the statistics of a call cannot be part of a compiled graph.
        self.untraceable: str | None = None
        self.cross_layers: set[str] = set()

    def record_call(self, name: str, weights: Weights | ShardedWeights, values: Tensor) -> None:
        """Computes the totals of a call at once; its weights are not kept."""
        if is_recomputation():
            return
        layer_name = self.layer_name_of(name)
        if layer_name.is_cross:
            self.cross_layers.add(layer_name.short)
        if isinstance(weights, Weights):
            totals = compute_head_totals(weights.with_four_axes(), self.statistics)
        else:
            totals = compute_sharded_head_totals(weights, self.statistics)
        self.totals.setdefault(layer_name.short, []).append(totals)
        self.order_by_pass.setdefault(self.pass_number, []).append(layer_name.short)
        if not isinstance(weights, Weights):
            self.untraceable = f"the tensors of {layer_name.short} are DTensors"
        elif not has_operators(weights.tensors.call):
            self.untraceable = f"{layer_name.short} has a score, mask or bias whose statistics cannot be compiled"


def make_totals_observer(statistics: tuple[str, ...], device: torch.device) -> Observer:
    """The function that computes the totals of a call inside compiled graphs."""

    def compute(weights: Weights, values: Tensor) -> list[Tensor]:
        return [compute_head_totals(weights, statistics)]

    return make_observer(compute, device)


def check_statistics(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    given = [names] if isinstance(names, str) else list(names)
    for name in given:
        if name not in HEAD_STATISTICS:
            raise ValueError(f"{argument} must be among {', '.join(HEAD_STATISTICS)}, got {name!r}")
    return tuple(name for name in HEAD_STATISTICS if name in given)


def gather_totals(totals: dict[str, Tensor], heads: dict[str, int], group: Any) -> dict[str, Tensor]:
    """Merges the totals over the processes and copies them to the host: one collective, and one copy."""
    if not heads:
        return {}
    devices = [each.device for each in totals.values()]
    device = devices[0] if devices else torch.device("cpu")
    parts = [
        totals[layer].to(device)
        if layer in totals
        else torch.zeros(count, TOTAL_COLUMNS, dtype=torch.float64, device=device)
        for layer, count in heads.items()
    ]
    packed = torch.cat(parts)
    if group is not False and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        processes = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
        dist.all_gather(processes, packed, group=group)
        packed = merge_head_totals(torch.stack(processes))
    merged = packed.cpu().split(list(heads.values()))
    return dict(zip(heads, merged, strict=True))
