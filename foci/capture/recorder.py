"""Recorder: collects the attention calls of one watch block, on the thread that opened it, and fills the Record.

B batch, H heads, G key/value heads, T tokens.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foci.backends import run_plain_call_with_lse
from foci.capture.cross_attention import ModuleInputs
from foci.capture.diffusion import Denoising
from foci.capture.generation_steps import CaptureError, count_step_bytes, take_heads
from foci.capture.host_copy import TEXT_BATCH_BYTES, HostCopier
from foci.capture.layer_log import LayerLog
from foci.capture.naming import LayerName, LayerNames, is_inside, list_modules, strip_compile_wrapper
from foci.capture.patches import PatchGrid
from foci.capture.pending_statistics import PendingCall, PendingStatistics, PlainCall
from foci.capture.token_ids import TokenIds
from foci.capture.torch_functions import MODULE_CALL, record_intercepted_call
from foci.capture.windows import WindowGrids
from foci.record.kept import Keep, TextPositions
from foci.record.labels import Labels, Segment
from foci.record.layer import Layer, join_steps
from foci.record.record import Record
from foci.runtime.interception import HANDLING, get_interceptors
from foci.runtime.tracing import is_inside_torch_func, is_recomputation
from foci.weights.weights import Weights, format_bytes

if TYPE_CHECKING:
    from foci.sharding.weights import ShardedWeights

logger = logging.getLogger("foci.capture")
HEAD_NAME = re.compile(r"(?:(?P<stack>[^.]+)\.)?L(?P<layer>\d+)(?:H(?P<head>\d+))?")

# Weights on text are computed from whole rows up to this many entries, 64 MiB in float32.
MAX_SHORT_ENTRIES = 2**24

LOST_REASON = "its queries, keys or values were changed in place after the call: pass clones to the call"


def gather_whole(values: Any) -> Tensor:
    """All of a DTensor on every process."""
    return values.full_tensor()  # type: ignore[no-any-return]


def active_recorders() -> tuple[Recorder, ...]:
    """The recorders of the open watch blocks of this thread, outermost first."""
    return tuple(each for each in get_interceptors() if isinstance(each, Recorder))


def find_only_recorder() -> Recorder | None:
    """The recorder that gets the next call of this thread, if nothing else does."""
    interceptors = get_interceptors()
    if len(interceptors) != 1 or HANDLING.depth or torch._C._len_torch_function_stack():
        return None
    only = interceptors[0]
    return only if type(only) is Recorder and only.is_open else None


class Recorder:
    """Collects the attention calls of one `foci.watch` block.

    Attention calls arrive in `intercept`, which `torch_functions` implements with `count_call` and `record_call`. Hooks
    call `enter_module`, `leave_module`, `count_run` and `add_embedded_ids`: only modules where a pass may begin,
    attention modules and embeddings have them. `fill_record` runs when the block ends.

    Args:
        model: the watched model.
        record: the record to fill.
        keep: statistics to keep; None keeps lazy weights.
        layers, heads: the selected layers and heads; None selects all.
        rows: the queries of each call to keep: a slice or numbers; None keeps all.
        limit: the largest number of bytes to keep.
        ablate: names of heads or layers whose outputs are zeroed.
        tokenizer: decodes token ids for the labels.
        processor: undoes the scaling of images.
        denoising: the steps of a diffusion model; None for other models.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Record,
        *,
        keep: Keep | None = None,
        layers: Iterable[int | str] | None = None,
        heads: Iterable[int | str] | None = None,
        rows: Any = None,
        limit: int = 2**33,
        ablate: Iterable[str] = (),
        tokenizer: Any = None,
        processor: Any = None,
        denoising: Denoising | None = None,
    ) -> None:
        self.processor, self.denoising = processor, denoising
        self.model, self.record = model, record
        # Whether the block is open; hooks and interception do nothing afterwards.
        self.is_open = True
        # Whether the model's own attention calls run unchanged and the weights are computed in addition.
        self.keeps_own_calls = False
        # How many of the calls are those of `foci.attention`, which a compiled graph can report.
        self.foci_calls = 0
        self.modules = list_modules(model)
        self.layer_names = LayerNames(self.modules)
        self.keep, self.rows, self.limit = keep, rows, limit
        # Whether all calls are recorded in full, so that of common ones only the tensors are noted.
        self.records_all = all(each is None for each in (layers, heads, rows, denoising))
        self.records_all = self.records_all and (keep is None or not keep.keeps_text)
        # Common calls, each the first one of its module, whose logs are made later.
        self.plain_calls: dict[str, tuple[PlainCall, PendingCall | None]] = {}
        self.layers = None if layers is None else list(layers)
        self.heads = None if heads is None else group_heads_by_layer(heads)
        self.ablate = {name: HEAD_NAME.fullmatch(name) for name in ablate}
        self.records_all = self.records_all and not self.ablate
        self.thread = threading.get_ident()
        self.names_by_id = {id(self.layer_names.modules[name]): name for name in self.layer_names.layout.recorded}
        self._entered: list[str] = []
        self.run_counts: Counter[str] = Counter()
        self.softmax_modules: set[str] = set()
        self.unseen_reasons: dict[str, str] = {}
        self.module_inputs = ModuleInputs()
        self.patch_grid, self.window_grids = PatchGrid(), WindowGrids()
        # The names of contexts, sequences that only cross-attention reads, by their length.
        self.context_names: dict[int, str] = {}
        # The positions of text in labels, which are given once and asked for at every call; by the id of the labels.
        self._text_positions: dict[tuple[int, int], tuple[Labels | None, tuple[int, ...] | None]] = {}
        self.token_ids = TokenIds(tokenizer)
        self.host_copier = HostCopier(TEXT_BATCH_BYTES) if keep is not None and keep.keeps_text else HostCopier()
        self.pending = None if keep is None else PendingStatistics(keep, self.host_copier)
        self.layer_logs: dict[str, LayerLog] = {}
        # The logs of a diffusion model by layer and denoising step.
        self.step_logs: dict[str, dict[int, LayerLog]] = {}
        # Calls in the steps of a diffusion model, by module, number in the pass, queries and keys: the log, batch and
        # heads of the first one; None if nothing is kept of it.
        self._known_calls: dict[tuple[str, int, int, int], tuple[LayerLog, tuple[int, int]] | None] = {}
        self.calls = 0
        self.attending_modules: dict[str, None] = {}
        self.applied_ablations: set[str] = set()
        self._pass_number = 0
        self._calls_in_pass: Counter[str] = Counter()
        self._open_logs: dict[tuple[str, int], LayerLog] = {}
        self._log_counts: Counter[str] = Counter()
        self._kept_bytes, self._has_estimated = 0, False
        self._had_dynamo = "torch._dynamo" in sys.modules

    def name_layer(self, name: str, layer_name: LayerName) -> None:
        """Sets the layer name of an attention module, in place of the one derived from its module name."""
        self.layer_names.set(name, layer_name)

    def mark_unseen(self, name: str, reason: str) -> None:
        """Notes why an attention module cannot be recorded; `Record.unseen` lists it."""
        self.unseen_reasons.setdefault(name, reason)

    def add_token_ids(self, labels: str, ids: Tensor) -> None:
        """Adds token ids (B, T) that the model read under a label name; the steps of a generation are appended."""
        self.token_ids.add_explicit(labels, ids, self._pass_number)

    def add_segments(self, labels: str, segments: Sequence[Segment], pictures: Sequence[Tensor]) -> None:
        """Adds the patches or frames among the token ids of this pass."""
        self.token_ids.add_segments(labels, segments, pictures, self._pass_number)

    def set_labels(self, name: str, labels: Labels) -> None:
        """Sets finished labels, such as patches or frames."""
        self.token_ids.ready_labels[name] = labels

    def intercept(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an attention call of this thread, and records it if the watched model makes it."""
        return record_intercepted_call(self, function, args, kwargs)

    def running_modules(self) -> Iterator[str]:
        """The names of the watched modules that are running on this thread, innermost first.

        Read from the Python stack when it is needed: hooks would cost time at every module.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                module = frame.f_locals["self"]
                if id(module) in self.names_by_id:
                    yield self.names_by_id[id(module)]
                elif isinstance(module, torch.jit.ScriptModule):
                    return
            frame = frame.f_back

    def find_running_module(self) -> str | None:
        """The name of the innermost running module; None if it is not of the watched model, or is a scripted one."""
        name = next(self.running_modules(), None)
        if name is not None and name not in self.run_counts and self.is_counting():
            # It has no hooks.
            self.enter_pass()
        return name

    def is_counting(self) -> bool:
        """Whether what runs now counts: on the thread of the block, and not a recomputation."""
        return threading.get_ident() == self.thread and not is_recomputation()

    def enter_pass(self) -> None:
        """Begins a pass, unless one is running."""
        if not self._entered:
            self._record_plain_calls()
            self._pass_number += 1
            self._calls_in_pass.clear()

    def enter_module(self, name: str) -> None:
        """Notes that a module starts; the outermost one begins a new pass."""
        if self.is_counting():
            self.enter_pass()
            self.run_counts[name] += 1
            self._entered.append(name)

    def leave_module(self, name: str) -> None:
        """Notes that a module ends; one that was already running when the block began was never entered."""
        if self._entered and self.is_counting():
            if self._entered[-1] == name:
                self._entered.pop()
            elif name in self._entered:
                del self._entered[len(self._entered) - 1 - self._entered[::-1].index(name) :]
            if not self._entered and self.pending is not None:
                self.pending.compute()

    def count_run(self, name: str) -> None:
        """Notes that an attention module starts; called on its own, it is a pass."""
        if self.is_counting():
            self.enter_pass()
            self.run_counts[name] += 1

    def add_embedded_ids(self, ids: Tensor) -> None:
        """Adds the token ids that the running embedding looks up; called on its own, it is a pass."""
        if self.is_counting():
            self.enter_pass()
            stack = [*self.running_modules()][::-1]
            self.token_ids.add_embedded(stack, ids, self._pass_number, self.layer_names.is_encoder_decoder)

    def is_selected(self, name: str) -> bool:
        """Whether `layers` and `heads` select a module's attention, and the running pass is recorded."""
        if self.denoising is not None and not self.denoising.is_recorded:
            return False
        if self.layers is None and self.heads is None:
            return True
        layer_name = self.layer_name_of(name)
        names = (layer_name.index, layer_name.short, name)
        in_layers = self.layers is None or any(layer in names for layer in self.layers)
        return in_layers and (self.heads is None or bool(self._selected_heads(layer_name)))

    def layer_name_of(self, name: str) -> LayerName:
        """The layer name of the call that a module is making.

        A module that is the only one of its stack and is called several times in a pass (weights shared over layers)
        is a new layer at each call.
        """
        layer_name, number = self.layer_names.of(name), self._calls_in_pass[name]
        if number < 2 or layer_name.is_cross or self.layer_names.is_only_one_of_stack(name) is False:
            return layer_name
        if is_recomputation() and self.ablate:
            raise CaptureError(
                f"ablate cannot be used with activation checkpointing on {name}: the module acts as several layers, and"
                " the recomputation does not say which of them it is"
            )
        return replace(layer_name, index=number - 1)

    def _selected_heads(self, layer_name: LayerName) -> list[int]:
        assert self.heads is not None
        return sorted({*self.heads.get("", ()), *self.heads.get(layer_name.short, ())})

    def heads_to_ablate(self, name: str) -> list[int] | None:
        """The heads of a module whose outputs are zeroed: None for all of them, [] for none."""
        heads: list[int] = []
        for requested, match in self.ablate.items():
            assert match is not None
            layer_name = self.layer_name_of(name)
            if (layer_name.stack, str(layer_name.index)) == (match["stack"] or "", match["layer"]):
                self.applied_ablations.add(requested)
                if match["head"] is None:
                    return None
                heads.append(int(match["head"]))
        return heads

    def fit_layer_name(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Fits the layer name of a module to the call that it makes: self-attention or cross-attention."""
        self._record_plain_calls()
        is_cross = self.module_inputs.tell_cross(self.running_modules(), q, k, v)
        context = "context"
        if is_cross:
            number = len(self.context_names) + 1
            context = self.context_names.setdefault(k.shape[-2], context if number == 1 else f"context#{number}")
        self.layer_names.fit_to_call(name, is_cross, context)

    def count_call(self, name: str) -> None:
        """Counts an attention call of a module, recorded or not."""
        self.calls += 1
        self._calls_in_pass[name] += 1
        self.attending_modules[name] = None

    def has_attended(self, name: str) -> bool:
        """Whether a module, or one inside it, made an attention call, recorded or not."""
        return name in self.attending_modules or any(is_inside(each, name) for each in self.attending_modules)

    def run_plain_call(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, is_sdpa: bool = False
    ) -> Tensor | None:
        """Runs and records a common call of a module after a few comparisons; None for any other call.

        Only its tensors are noted. The rest is made of them later: statistics when the pass ends, the layer when the
        record is read. `is_sdpa`: without the block PyTorch's own function would run the call.
        """
        if not self.records_all or name not in self.run_counts or name in self._calls_in_pass:
            return None
        if self.keeps_own_calls or self.window_grids.has_any or not self.is_counting() or self._must_hide_from_dynamo:
            return None
        is_known, is_cross = self.module_inputs.tell_plain(name)
        if not is_known or self.layer_names.of(name).is_cross:
            return None
        # Inference tensors have no version.
        if q.is_inference() or k.is_inference() or v.is_inference():
            return None
        if self._open_logs:
            return self._run_token(name, q, k, v) if mask is None else None
        if q.shape != k.shape:
            return None
        found = run_plain_call_with_lse(q, k, v, mask, is_sdpa)
        if found is None:
            return None
        out, lse = found
        batch, heads, length, _ = q.shape
        shape = batch, heads, length, length
        # What `fingerprint` returns for these, without its checks.
        original = tuple((each._version, each.data_ptr(), each.shape, each.stride()) for each in (q, k, v))
        call = PlainCall(name, self._pass_number, shape, q, k, v, mask, lse, is_cross, original)
        self._check_plain_limit(call)
        self.count_call(name)
        if self.pending is None:
            self.plain_calls[name] = call, None
        else:
            self.plain_calls[name] = call.without_tensors(), self.pending.add(call, v)
        return out

    def _run_token(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Runs and records the next step of a generation in the same way; None for any other call."""
        log = self._open_logs.get((name, 1))
        if log is None or q.dim() != 4 or k.dim() != 4 or not log.is_continued_by_token(q, k):
            return None
        if log.passes[-1] == self._pass_number:
            return None
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        size = q.nbytes if self.keep is None else self.keep.nbytes(batch, heads, queries, keys)
        # The log-sum-exp takes less than the queries. At the limit the other path refuses the call in words.
        if self._kept_bytes + 2 * size > self.limit:
            return None
        found = run_plain_call_with_lse(q, k, v, None)
        if found is None:
            return None
        out, lse = found
        before = log.nbytes
        self.count_call(name)
        log.add_token(q, k, v, lse, self._pass_number)
        self._kept_bytes += log.nbytes - before
        return out

    @property
    def _must_hide_from_dynamo(self) -> bool:
        """Whether a compiler was first used inside the block, and would trace this code."""
        return not self._had_dynamo and "torch._dynamo" in sys.modules

    def _check_plain_limit(self, call: PlainCall) -> None:
        size = 3 * call.q.nbytes + call.lse.nbytes if self.keep is None else self.keep.nbytes(*call.shape)
        if not self.plain_calls or self._kept_bytes + size > self.limit:
            log = LayerLog(call.name, self.layer_names.of(call.name), (), self.keep, None, self.host_copier)
            self._check_limit(log, call.to_weights(), call.v)
        self._kept_bytes += size

    def _record_plain_calls(self) -> None:
        """Makes the logs of the calls of `run_plain_call`."""
        for call, pending in self.plain_calls.values():
            self._log_counts[call.name] += 1
            log = LayerLog.from_plain_call(self, call, pending)
            self._open_logs[call.name, 1] = self.layer_logs[log.name] = log
        self.plain_calls.clear()

    def repeat_call(self, name: str, q: Tensor, k: Tensor, mask: Any) -> bool:
        """Records a plain call of a denoiser like that of an earlier step; False for any other call, which is not.

        Only the weights on text are kept, and most of what is found out about a call is the same in every step. The
        caller runs the model's own call.
        """
        if self.denoising is None or self.keep is None or mask is not None or self.ablate or not self.is_counting():
            return False
        key = name, self._calls_in_pass[name] + 1, q.shape[-2], k.shape[-2]
        if key not in self._known_calls or is_inside_torch_func() or self._must_hide_from_dynamo:
            return False
        known = self._known_calls[key]
        if known is None or not self.denoising.is_recorded:
            self.count_call(name)
            return True
        log, batch_and_heads = known
        size = self.keep.nbytes(*log.shape[:2], *key[2:], log.text)
        if not is_short_call(q, k, batch_and_heads) or self._kept_bytes + size > self.limit:
            return False
        assert log.text is not None
        self.count_call(name)
        rows = self.denoising.find_conditional_rows(q.shape[0])
        computed = self.keep.compute_text_of_plain_call(*((q, k) if rows is None else (q[rows], k[rows])), log.text)
        step = self._open_step_log(name, log.layer_name, log.heads, self.denoising.step)
        step.add_columns(computed, log, self._pass_number)
        self._kept_bytes += step.nbytes
        return True

    def record_call(self, name: str, weights: Weights | ShardedWeights, values: Tensor) -> None:
        """Records one attention call: its weights, and its values (..., G, Tk, Dv) with the same leading axes."""
        if is_recomputation():
            return
        # A compiler that is first used inside the block would trace this code; it must not.
        record = get_record_call_without_dynamo() if self._must_hide_from_dynamo else Recorder._record_call
        record(self, name, weights, values)

    def _record_call(self, name: str, weights: Weights | ShardedWeights, values: Tensor) -> None:
        if not isinstance(weights, Weights):
            # Every process records the whole matrix; its queries and keys are gathered, not the matrix.
            weights, values = weights.full(), gather_whole(values)
        weights = weights.with_four_axes()
        if values.dim() != 4:
            values = values.reshape(weights.shape[0], -1, *values.shape[-2:])
        whole_batch = weights.shape[0]
        if self.denoising is not None:
            weights, values = self.denoising.select_conditional(weights, values)
        layer_name, k = self.layer_name_of(name), weights.tensors.call.k
        text = None
        if self.keep is not None and self.keep.keeps_text:
            text = self._find_text(layer_name, *weights.shape[2:])
            if not self._keeps_any(text):
                return
        heads: Sequence[int] = range(weights.shape[1])
        if self.heads is not None:
            heads = self._selected_heads(layer_name)
            if any(head >= weights.shape[1] for head in heads):
                raise CaptureError(f"heads must be below {weights.shape[1]} for {layer_name.short}, got H{heads[-1]}")
            group = weights.shape[1] // values.shape[1]
            weights, values = take_heads(weights, heads), values[:, [head // group for head in heads]]
        log = self._find_or_open_log(name, layer_name, weights, k, tuple(heads))
        log.text = text
        if self.keep is None and self.rows is None:
            log.windows = self.window_grids.find(self.running_modules(), weights.shape[0], weights.shape[2])
        before = log.nbytes
        self._check_limit(log, weights, values)
        log.add(weights, k, values, self._pass_number)
        self._kept_bytes += log.nbytes - before
        keeps_rows = text is None or (self.keep is not None and self.keep.queries and text.queries)
        if self.denoising is not None and self.heads is None and not keeps_rows:
            _, heads_of_call, count, length = weights.shape
            key = name, self._calls_in_pass[name], count, length
            self._known_calls[key] = log, (whole_batch, heads_of_call)

    def keeps_part_of(self, name: str, queries: int, keys: int) -> bool:
        """Whether something of a call is kept: without text there is nothing for `Keep(keys="text")`."""
        if self.keep is None or not self.keep.keeps_text:
            return True
        is_kept = self._keeps_any(self._find_text(self.layer_name_of(name), queries, keys))
        if not is_kept and self.denoising is not None:
            self._known_calls[name, self._calls_in_pass[name], queries, keys] = None
        return is_kept

    def _keeps_any(self, text: TextPositions) -> bool:
        assert self.keep is not None
        return bool((self.keep.keys and text.keys) or (self.keep.queries and text.queries))

    def _find_text(self, layer_name: LayerName, queries: int, keys: int) -> TextPositions:
        """The queries and keys of a call that are text."""
        if self.denoising is not None and self.denoising.inputs.text_length:
            found = self.denoising.find_text(layer_name.is_cross, queries, keys)
            given = self._find_text_of(self.token_ids.ready_labels.get(layer_name.keys), keys)
            return found if given is None or not found.keys else found._replace(keys=given)
        named = [self.token_ids.ready_labels.get(name) for name in (layer_name.queries, layer_name.keys)]
        if not layer_name.is_cross:
            given = self.token_ids.find_text(layer_name.keys, self._pass_number, keys)
            given = self._find_text_of(named[1], keys) if given is None else given
            return TextPositions() if given is None else TextPositions(*(2 * (given,)))
        # The sequence that an image attends to is text unless its labels say otherwise.
        texts = self._find_text_of(named[1], keys)
        return TextPositions(self._find_text_of(named[0], queries) or (), (*range(keys),) if texts is None else texts)

    def _find_text_of(self, labels: Labels | None, length: int) -> tuple[int, ...] | None:
        """`find_text_of`, once for each labels."""
        key = (id(labels), length)
        if key not in self._text_positions:
            # The labels are held, so that no others get their id.
            self._text_positions[key] = labels, find_text_of(labels, length)
        return self._text_positions[key][1]

    def _open_step_log(self, name: str, layer_name: LayerName, heads: tuple[int, ...], step: int) -> LayerLog:
        """The log of a call in a denoising step; a module that is called twice in a step is two layers."""
        count = self._calls_in_pass[name]
        recorded_name = (name or self.record.model) + (f"#{count}" if count > 1 else "")
        log = LayerLog(recorded_name, layer_name, heads, self.keep, self.rows, self.host_copier, self.pending)
        self.step_logs.setdefault(recorded_name, {})[step] = log
        self.layer_logs[f"{recorded_name} at step {step}"] = log
        return log

    def _find_or_open_log(
        self, name: str, layer_name: LayerName, weights: Weights, k: Tensor, heads: tuple[int, ...]
    ) -> LayerLog:
        """The log that a call continues, or a new one."""
        if self.denoising is not None:
            return self._open_step_log(name, layer_name, heads, self.denoising.step)
        # Cross-attention calls of one module over the same keys belong together, however often it is called (an RNN
        # decoder that attends at every step). Any other module that is called twice in a pass gets two logs.
        key = name, 0 if layer_name.is_cross else self._calls_in_pass[name]
        log = self._open_logs.get(key)
        is_later = log is not None and (log.is_cross or log.passes[-1] < self._pass_number)
        if log is not None and is_later and log.is_continued_by(weights, k):
            return log
        self._log_counts[name] += 1
        recorded_name = name or self.record.model
        recorded_name += f"#{self._log_counts[name]}" if self._log_counts[name] > 1 else ""
        log = LayerLog(recorded_name, layer_name, heads, self.keep, self.rows, self.host_copier, self.pending)
        self._open_logs[key] = self.layer_logs[recorded_name] = log
        return log

    def _check_limit(self, log: LayerLog, weights: Weights, values: Tensor) -> None:
        """Refuses a call that would exceed `limit`; the estimate of the first call is scaled to all layers."""
        batch, heads, queries, keys = weights.shape
        if self.rows is not None:
            size = batch * heads * keys * len(log.select_rows(queries)) * 4
        elif self.keep is None:
            size = count_step_bytes(weights) + (0 if log.passes else weights.tensors.call.k.nbytes + values.nbytes)
        else:
            size = self.keep.nbytes(batch, heads, queries, keys, log.text)
        expected = size
        if not self._has_estimated:
            self._has_estimated = True
            layers = max(1, sum(self.is_selected(name) for name in self.layer_names.attention_modules))
            expected = size * layers * (1 if self.denoising is None else self.denoising.expected_steps)
            logger.info("watching %s: about %s in %d layers", type(self.model).__name__, format_bytes(expected), layers)
        total = self._kept_bytes + expected
        if total > self.limit:
            raise CaptureError(
                f"watch would keep about {format_bytes(total)}, above limit={self.limit:,} bytes: choose layers=,"
                " heads= or queries='last', keep statistics only with keep=foci.Keep(), or pass a larger limit="
            )

    def fill_record(self) -> None:
        """Fills the record with layers, labels and unseen modules; waits for copies from the GPU last.

        If the block recorded one pass of common calls, the layers and labels are made when they are first read.
        """
        if self.plain_calls and not self.layer_logs and self.patch_grid.images is None:
            self._fill_later()
            return
        self._record_plain_calls()
        for log in self.layer_logs.values():
            log.finish()
        self._check_requested_names()
        if self.pending is not None:
            self.pending.compute()
        self.host_copier.start()
        if self.pending is not None:
            self.pending.split()
        self._drop_lost_layers()
        self._add_layers()
        self._add_counts()
        generated = [log for log in self.layer_logs.values() if len(log.passes) > 1 and not log.is_cross]
        self.record.prompt = generated[0].first_call[0] if generated else None
        self.host_copier.wait()
        self.record.filling = False

    def _add_layers(self) -> None:
        for name, log in () if self.step_logs else self.layer_logs.items():
            layer = log.build_layer()
            layer.queries = self.token_ids.label_name_for(layer.queries, log.passes)
            layer.keys = self.token_ids.label_name_for(layer.keys, log.passes)
            layer.labels = self.record.labels
            self.record.layers[name] = layer
        self.record.labels.update(self.token_ids.build_labels())
        self._add_step_layers()
        self._label_windows()
        self._label_patches()
        self._name_known_contexts()

    def _add_counts(self) -> None:
        self.record.calls, self.record.unseen = self.calls, self.list_unseen()
        compiled = find_compiled_modules(self.modules) if self.calls else []
        if compiled:
            self.record.notes.append(f"ran uncompiled inside foci.watch: {', '.join(compiled)}")

    def _fill_later(self) -> None:
        """Computes what needs the model or would hold its memory, and leaves the rest to the record."""
        if self.pending is not None:
            self.pending.compute()
            self.host_copier.wait()
            self.pending.split()
            lost = [name for name, (_, pending) in self.plain_calls.items() if pending is not None and pending.is_lost]
            for name in lost:
                del self.plain_calls[name]
                self.mark_unseen(name, LOST_REASON)
        self._add_counts()
        record, self.record = self.record, Record(model=self.record.model)
        # The record must not keep the model.
        self.model, self.modules = nn.Module(), []
        self.layer_names.forget_modules()
        self.module_inputs, self.names_by_id = ModuleInputs(), {}
        record.finish_later(self._finish_record)
        record.filling = False

    def _finish_record(self, record: Record) -> None:
        """Adds the layers and labels to a record that is read for the first time."""
        self.record = record
        self._record_plain_calls()
        self._add_layers()

    def _drop_lost_layers(self) -> None:
        """Reports layers without statistics as unseen."""
        for name, log in [*self.layer_logs.items()]:
            if log.is_lost:
                del self.layer_logs[name]
                self.mark_unseen(log.name, LOST_REASON)

    def _add_step_layers(self) -> None:
        """Adds the layers of a diffusion model, each with its denoising steps."""
        if self.denoising is None:
            return
        for name, logs in self.step_logs.items():
            steps = {step: log.build_layer() for step, log in logs.items()}
            # Latents may change their size between steps; the mean is over steps of one size.
            for number, shape in enumerate(dict.fromkeys(layer.shape for layer in steps.values())):
                same = {step: layer for step, layer in steps.items() if layer.shape == shape}
                recorded_name = name if not number else f"{name}#{number + 1}"
                for layer in same.values():
                    layer.name = recorded_name
                layer = next(iter(same.values())) if self.denoising.step == 0 else join_steps(same)
                self.denoising.name_sequences(layer, self.record.labels)
                self._name_given_sequences(layer)
                for each in (layer, *layer.steps.values()):
                    each.labels = self.record.labels
                self.record.layers[recorded_name] = layer
        self.record.notes += self.denoising.describe()

    def _name_given_sequences(self, layer: Layer) -> None:
        """Names the patches of a layer after the labels given for a grid of as many patches."""
        batch, _, queries, _ = layer.sizes
        given = self.token_ids.ready_labels
        if len(given.get(layer.queries, ())) == queries or layer.queries != "input":
            return
        fitting = [
            n for n, each in given.items() if each.kind == "patches" and (each.batch, len(each)) == (batch, queries)
        ]
        for each in (layer, *layer.steps.values()) if fitting else ():
            each.keys = fitting[0] if each.keys == each.queries else each.keys
            each.queries = fitting[0]

    def _label_windows(self) -> None:
        """Labels the grids of layers that attend in windows; they shrink from stage to stage."""
        for log in self.layer_logs.values():
            layer = self.record.layers.get(log.name)
            if log.windows is None or layer is None or layer.windows is None:
                continue
            rows, columns, batch = log.windows.rows, log.windows.columns, layer.shape[0]
            layer.queries = layer.keys = f"patches {rows}x{columns}"
            if layer.keys not in self.record.labels:
                self.record.labels[layer.keys] = self.patch_grid.label_grid(rows, columns, batch)

    def _label_patches(self) -> None:
        """Labels the input of a model that reads no tokens if it has as many positions as the model has patches."""
        along = [layer for layer in self.record.layers.values() if layer.queries == "input"]
        labels = self.patch_grid.build_labels([layer for layer in along if layer.keys == "input"])
        if along and labels is not None and "input" not in self.record.labels:
            self.record.labels["input"] = labels

    def _name_known_contexts(self) -> None:
        """Names the keys of cross-attention after the model's sequence if it is them that its labels describe.

        The module's inputs tell that queries and keys differ, not which of them the labels belong to: a pooling head
        attends with learned queries to the patches.
        """
        for layer in self.record.layers.values():
            batch, _, queries, keys = layer.sizes
            known = {name: labels for name, labels in self.record.labels.items() if labels.batch == batch}
            is_unknown = layer.keys in self.context_names.values() and layer.keys not in known
            fitting = [name for name, labels in known.items() if len(labels) == keys != queries]
            if is_unknown and fitting and (layer.queries in fitting or layer.queries not in known):
                name = layer.queries if layer.queries in fitting else fitting[0]
                layer.queries, layer.keys = "queries", name

    def _check_requested_names(self) -> None:
        """Refuses names in `layers`, `heads` or `ablate` that no module has, if any module attended."""
        if self.layers is None and self.heads is None and not self.ablate:
            return
        ran = [log.layer_name for log in self.layer_logs.values()]
        ran += [self.layer_names.of(name) for name in self.attending_modules]
        known = {*self.attending_modules, *(layer.short for layer in ran), *(layer.index for layer in ran)}
        unknown = [*(layer for layer in self.layers or () if layer not in known)]
        unknown += [layer for layer in self.heads or () if layer and layer not in known]
        unknown += [name for name in self.ablate if name not in self.applied_ablations]
        if unknown and self.attending_modules:
            names = ", ".join(dict.fromkeys(layer.short for layer in ran))
            raise CaptureError(
                f"layers, heads and ablate must name layers that ran ({names}), got {', '.join(map(repr, unknown))}"
            )

    def list_unseen(self) -> list[str]:
        """The attention modules that ran and were not recorded, each with the reason."""
        reasons = dict(self.unseen_reasons)
        for name, module in self.layer_names.attention_modules.items():
            seen = self.has_attended(name) or any(is_inside(name, each) for each in self.attending_modules)
            if isinstance(module, torch.jit.ScriptModule):
                reasons.setdefault(name, "it is a scripted module and runs outside Python")
            elif self.run_counts[name] and not seen:
                reasons.setdefault(name, self._unseen_reason(name))
        return [f"{name}: {reason}" for name, reason in reasons.items()]

    def _unseen_reason(self, name: str) -> str:
        if any(each == name or is_inside(each, name) for each in self.softmax_modules):
            return "it computes its own softmax (eager attention), so no call has its queries and keys"
        processor = getattr(self.layer_names.modules.get(name), "processor", None)
        if "Linear" in type(processor).__name__:
            return "it is linear attention, which has no softmax and no weights"
        return "it ran without an attention call that foci recognizes"


def is_short_call(q: Tensor, k: Tensor, batch_and_heads: tuple[int, int]) -> bool:
    """Whether a call has this batch and these heads, and so few entries that its rows are computed as a whole."""
    return (
        type(q) is type(k) is Tensor
        and q.dim() == k.dim() == 4
        and q.shape[:2] == k.shape[:2] == batch_and_heads
        and q.shape[:3].numel() * k.shape[2] <= MAX_SHORT_ENTRIES
        and not torch.is_autocast_enabled(q.device.type)
    )


@cache
def get_record_call_without_dynamo() -> Callable[[Recorder, str, Any, Tensor], None]:
    """`Recorder._record_call` with torch.compile disabled.

    The method is that of the class: a recorder that held a bound method of its own would be a reference cycle, and
    would keep its tensors until the garbage collector runs.
    """
    found: Callable[[Recorder, str, Any, Tensor], None] = sys.modules["torch._dynamo"].disable(Recorder._record_call)
    return found


def find_compiled_modules(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The modules that torch.compile or `module.compile()` compiled, by name; the model itself is "the model"."""
    names = [
        name for name, module in modules if "_orig_mod" in module._modules or module._compiled_call_impl is not None
    ]
    return [strip_compile_wrapper(name) or "the model" for name in names]


def find_text_of(labels: Labels | None, length: int) -> tuple[int, ...] | None:
    """The positions of text in labels that fit a length, without empty ones; None without such labels."""
    if labels is None or len(labels) != length:
        return None
    positions = {n for row in range(labels.batch) for n in labels.split_kinds(row).get("text", ())}
    return tuple(sorted(n for n in positions if any(row[n] for row in labels.texts)))


def group_heads_by_layer(heads: Iterable[int | str]) -> dict[str, list[int]]:
    """Head numbers by layer name; those for all layers are under ""."""
    groups: dict[str, list[int]] = {}
    for head in heads:
        match = HEAD_NAME.fullmatch(head) if isinstance(head, str) else None
        if isinstance(head, int) and not isinstance(head, bool) and head >= 0:
            groups.setdefault("", []).append(head)
        elif match is not None and match["head"] is not None:
            groups.setdefault(str(head).rpartition("H")[0], []).append(int(match["head"]))
        else:
            raise ValueError(f"heads must be numbers from 0 or names such as 'L5H3', got {head!r}")
    return groups
