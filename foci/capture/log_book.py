"""LogBook: the logs of one watch block, which call continues which of them, and the bytes that they keep."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torch import Tensor

from foci.capture.errors import CaptureError
from foci.capture.generation_steps import count_step_bytes
from foci.capture.host_copy import TEXT_BATCH_BYTES, HostCopier
from foci.capture.layer_log import LayerLog, RepeatedStep
from foci.capture.naming import LayerName
from foci.capture.pending_statistics import PendingStatistics
from foci.record.kept import Keep
from foci.runtime.printable import format_bytes
from foci.weights.weights import Weights

logger = logging.getLogger("foci.capture")


class LogBook:
    """The logs of a block by the names of their layers.

    Args:
        model: the name of the model.
        keep: statistics to keep; None keeps lazy weights.
        rows: the queries of each call to keep; None keeps all.
        limit: the largest number of bytes to keep.
    """

    def __init__(self, model: str, keep: Keep | None, rows: Any, limit: int) -> None:
        self.model, self.keep, self.rows, self.limit = model, keep, rows, limit
        self.host_copier = HostCopier(TEXT_BATCH_BYTES) if keep is not None and keep.keeps_text else HostCopier()
        self.pending = None if keep is None else PendingStatistics(keep, self.host_copier)
        self.by_layer: dict[str, LayerLog] = {}
        # The logs of a diffusion model by layer and denoising step.
        self.by_step: dict[str, dict[int, LayerLog | RepeatedStep]] = {}
        self.kept_bytes = 0
        # The logs that the next call of a module may continue, by module and the number of its call in a pass.
        self._open: dict[tuple[str, int], LayerLog] = {}
        self._counts: Counter[str] = Counter()
        self.has_estimate = False

    @property
    def are_open(self) -> bool:
        """Whether a call may continue an earlier one."""
        return bool(self._open)

    def make_log(self, name: str, layer_name: LayerName, heads: tuple[int, ...]) -> LayerLog:
        return LayerLog(name, layer_name, heads, self.keep, self.rows, self.host_copier, self.pending)

    def find_first(self, module: str) -> LayerLog | None:
        """The log of the calls that a module makes first in their passes, except cross-attention."""
        return self._open.get((module, 1))

    def find_or_open(
        self,
        module: str,
        number: int,
        pass_number: int,
        layer_name: LayerName,
        heads: tuple[int, ...],
        weights: Weights,
        k: Tensor,
    ) -> LayerLog:
        """The log that a call continues, the `number`-th one of a module in a pass, or a new log."""
        # Cross-attention calls of one module over the same keys belong together, however often it is called (an RNN
        # decoder that attends at every step). Any other module that is called twice in a pass gets two logs.
        key = module, 0 if layer_name.is_cross else number
        log = self._open.get(key)
        is_later = log is not None and (log.is_cross or log.passes[-1] < pass_number)
        if log is not None and is_later and log.is_continued_by(weights, k):
            return log
        self._counts[module] += 1
        count = self._counts[module]
        log = self.make_log((module or self.model) + (f"#{count}" if count > 1 else ""), layer_name, heads)
        self._open[key] = self.by_layer[log.name] = log
        return log

    def open_step(self, module: str, number: int, layer_name: LayerName, heads: tuple[int, ...], step: int) -> LayerLog:
        """The log of a call in a denoising step; a module that is called twice in a step is two layers."""
        log = self.make_log((module or self.model) + (f"#{number}" if number > 1 else ""), layer_name, heads)
        self.by_step.setdefault(log.name, {})[step] = self.by_layer[f"{log.name} at step {step}"] = log
        return log

    def repeat_step(self, first: LayerLog, kept: dict[str, Tensor], step: int) -> None:
        """Adds the weights on text of a call that is like the one of another denoising step."""
        self.by_step[first.name][step] = RepeatedStep(first, self.host_copier.copy(kept))
        self.kept_bytes += first.nbytes

    def add_first(self, module: str, log: LayerLog) -> None:
        """Adds the log of the first call of a module."""
        self._counts[module] += 1
        self._open[module, 1] = self.by_layer[log.name] = log

    def add_call(self, log: LayerLog, weights: Weights, k: Tensor, values: Tensor, pass_number: int) -> None:
        """Adds a call to a log."""
        before = log.nbytes
        log.add(weights, k, values, pass_number)
        self.kept_bytes += log.nbytes - before

    def has_room(self, nbytes: int) -> bool:
        """Whether as many bytes can be kept."""
        return self.kept_bytes + nbytes <= self.limit

    def count_bytes(self, log: LayerLog, weights: Weights, values: Tensor) -> int:
        """The bytes that a log will keep of its next call."""
        batch, heads, queries, keys = weights.shape
        if self.rows is not None:
            return batch * heads * keys * len(log.select_rows(queries)) * 4
        if self.keep is None:
            return count_step_bytes(weights) + (0 if log.passes else weights.tensors.call.k.nbytes + values.nbytes)
        return self.keep.nbytes(batch, heads, queries, keys, log.text)

    def estimate(self, nbytes: int, layers: int, steps: int) -> int:
        """The bytes of all layers and denoising steps, from those of the first call."""
        self.has_estimate = True
        logger.info("watching %s: about %s in %d layers", self.model, format_bytes(nbytes * layers * steps), layers)
        return nbytes * layers * steps

    def check_limit(self, nbytes: int) -> None:
        """Refuses a call with which more than `limit` bytes would be kept."""
        total = self.kept_bytes + nbytes
        if total > self.limit:
            raise CaptureError(
                f"watch would keep about {format_bytes(total)}, above limit={self.limit:,} bytes: choose layers=,"
                " heads= or queries='last', keep statistics only with keep=foci.Keep(), or pass a larger limit="
            )
