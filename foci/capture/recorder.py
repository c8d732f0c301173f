"""Recorder: collects the attention calls of one watch block, on the thread that opened it.

B batch, H heads, G key/value heads, T tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foci.backends import run_plain_call_with_lse
from foci.capture.cross_attention import ModuleInputs
from foci.capture.diffusion import Denoising
from foci.capture.errors import CaptureError
from foci.capture.generation_steps import take_heads
from foci.capture.head_selection import HeadSelection
from foci.capture.layer_log import LayerLog
from foci.capture.log_book import LogBook
from foci.capture.module_tracker import ModuleTracker
from foci.capture.naming import LayerName
from foci.capture.patches import PatchGrid
from foci.capture.pending_statistics import CallTensors, PendingCall, PlainCall, identify
from foci.capture.text_weights import KnownCall, TextWeights, is_short_call
from foci.capture.token_ids import TokenIds
from foci.capture.torch_functions import record_intercepted_call
from foci.capture.windows import WindowGrids
from foci.record.kept import Keep, as_index
from foci.record.labels import Labels, Segment
from foci.record.record import Record
from foci.runtime.interception import HANDLING, get_interceptors
from foci.runtime.tracing import is_inside_torch_func, is_recomputation
from foci.weights.weights import Weights

if TYPE_CHECKING:
    from foci.sharding.weights import ShardedWeights


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


class Recorder(ModuleTracker):
    """Collects the attention calls of one `foci.watch` block.

    Attention calls arrive in `intercept`, which `torch_functions` implements with `count_and_check` and `record_call`.
    `record_filling` makes the layers of the record when the block ends.

    Args:
        model: the watched model.
        record: the record to fill.
        keep: statistics to keep; None keeps lazy weights.
        selection: the recorded and the ablated heads; None records all.
        rows: the queries of each call to keep: a slice or numbers; None keeps all.
        limit: the largest number of bytes to keep.
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
        selection: HeadSelection | None = None,
        rows: Any = None,
        limit: int = 2**33,
        tokenizer: Any = None,
        processor: Any = None,
        denoising: Denoising | None = None,
    ) -> None:
        super().__init__(model)
        self.model, self.record = model, record
        self.keep = keep
        self.selection = selection or HeadSelection()
        self.processor, self.denoising = processor, denoising
        # Whether the block is open; hooks and interception do nothing afterwards.
        self.is_open = True
        # Whether everything that opening it did is undone.
        self.is_closed = False
        # Whether the model's own attention calls run unchanged and the weights are computed in addition.
        self.keeps_own_calls = False
        # How many of the calls are those of `foci.attention`, which a compiled graph can report.
        self.foci_calls = 0
        self.module_inputs = ModuleInputs()
        self.patch_grid, self.window_grids = PatchGrid(), WindowGrids()
        # The names of contexts, sequences that only cross-attention reads, by their length.
        self.context_names: dict[int, str] = {}
        # The seconds of a frame in the sequence of an audio encoder; None if they are not known.
        self.frame_seconds: dict[str, float | None] = {}
        self.token_ids = TokenIds(tokenizer)
        keeps_text = keep is not None and keep.keeps_text
        self.text_weights = TextWeights(keep, self.token_ids, denoising) if keep is not None and keeps_text else None
        self.logs = LogBook(record.model, keep, rows, limit)
        # Whether all calls are recorded in full, so that of plain ones only the tensors are noted.
        self._records_all = self.selection.is_empty and rows is None and denoising is None and not keeps_text
        # Plain calls, each the first one of its module, whose logs are made later.
        self.plain_calls: dict[str, tuple[PlainCall, PendingCall | None]] = {}
        # Whether the running pass is a denoising step like the one before, of which only weights on text are kept: then
        # nothing new is noted about its modules.
        self.repeats_pass = False
        # What the inputs told about the calls of a denoiser, by module and the number of the call in the pass.
        self._crossing_calls: dict[tuple[str, int], bool | None] = {}
        self._had_dynamo = "torch._dynamo" in sys.modules

    def add_token_ids(self, labels: str, ids: Tensor) -> None:
        """Adds token ids (B, T) that the model read under a label name; the steps of a generation are appended."""
        self.token_ids.add_explicit(labels, ids, self.pass_number)

    def add_segments(self, labels: str, segments: Sequence[Segment], pictures: Sequence[Tensor]) -> None:
        """Adds the patches or frames among the token ids of this pass."""
        self.token_ids.add_segments(labels, segments, pictures, self.pass_number)

    def set_labels(self, name: str, labels: Labels) -> None:
        """Sets finished labels, such as patches or frames."""
        self.token_ids.ready_labels[name] = labels

    def intercept(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an attention call of this thread, and records it if the watched model makes it."""
        return record_intercepted_call(self, function, args, kwargs)

    def begin_pass(self) -> None:
        self.open_plain_logs()

    def repeat_pass(self) -> None:
        """Notes that the running pass is a denoising step with the sizes of the one before."""
        self.repeats_pass = self.text_weights is not None and bool(self._entered)

    def end_pass(self) -> None:
        self.repeats_pass = False
        if self.logs.pending is not None:
            self.logs.pending.compute()

    def add_embedded_ids(self, ids: Tensor) -> None:
        """Adds the token ids that the running embedding looks up; called on its own, it is a pass."""
        if self.is_counting():
            self.enter_pass()
            stack = [*self.running_modules()][::-1]
            self.token_ids.add_embedded(stack, ids, self.pass_number, self.layer_names.is_encoder_decoder)

    def is_selected(self, name: str) -> bool:
        """Whether a module's attention is selected, and the running pass is recorded."""
        if self.denoising is not None and not self.denoising.is_recorded:
            return False
        # The name of a layer is not needed where all are selected.
        return self.selection.selects_all or self.selection.includes(name, self.layer_name_of(name))

    def layer_name_of(self, name: str) -> LayerName:
        """The layer name of the call that a module is making.

        A module that is the only one of its stack and is called several times in a pass (weights shared over layers)
        is a new layer at each call.
        """
        layer_name, number = self.layer_names.of(name), self.calls_in_pass[name]
        if number < 2 or layer_name.is_cross or self.layer_names.is_only_one_of_stack(name) is False:
            return layer_name
        if is_recomputation() and self.selection.ablate:
            raise CaptureError(
                f"ablate cannot be used with activation checkpointing on {name}: the module acts as several layers, and"
                " the recomputation does not say which of them it is"
            )
        return replace(layer_name, index=number - 1)

    def heads_to_ablate(self, name: str) -> list[int] | None:
        """The heads of a module whose outputs are zeroed: None for all of them, [] for none."""
        return self.selection.heads_to_ablate(self.layer_name_of(name)) if self.selection.ablate else []

    def check_requested_names(self) -> None:
        """Refuses layers and heads to record or ablate that no module has, if any module attended."""
        if not self.selection.is_empty:
            ran = [log.layer_name for log in self.logs.by_layer.values()]
            ran += [self.layer_names.of(name) for name in self.attending_modules]
            self.selection.check_names(ran, self.attending_modules)

    def fit_layer_name(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Fits the layer name of a module to the call that it makes: self-attention or cross-attention."""
        self.open_plain_logs()
        is_cross = self._tell_cross(name, q, k, v)
        context = "context"
        if is_cross:
            number = len(self.context_names) + 1
            context = self.context_names.setdefault(k.shape[-2], context if number == 1 else f"context#{number}")
        self.layer_names.fit_to_call(name, is_cross, context)

    def _tell_cross(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> bool | None:
        """Whether the inputs of the running modules show cross-attention; None if they do not tell."""
        if self.denoising is None:
            return self.module_inputs.tell_cross(self.running_modules(), q, k, v)
        call = name, self.calls_in_pass[name] + 1
        if not self.repeats_pass or call not in self._crossing_calls:
            self._crossing_calls[call] = self.module_inputs.tell_cross(self.running_modules(), q, k, v)
        return self._crossing_calls[call]

    def count_and_check(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Counts an attention call of a module; returns whether to record it."""
        self.fit_layer_name(name, q, k, v)
        if not is_recomputation():
            self.count_call(name)
        if not self.is_selected(name) or not self.keeps_part_of(name, q, k):
            return False
        if is_inside_torch_func():
            self.mark_unseen(name, "it ran inside a torch.func transform, whose tensors cannot be kept")
            return False
        return True

    def run_plain_call(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, is_sdpa: bool = False
    ) -> Tensor | None:
        """Runs and records a plain call of a module after a few comparisons; None for any other call.

        Only its tensors are noted. The rest is made of them later: statistics when the pass ends, the layer when the
        record is read. `is_sdpa`: without the block PyTorch's own function would run the call.
        """
        if not self._records_all or name not in self.run_counts or name in self.calls_in_pass:
            return None
        if self.keeps_own_calls or self.window_grids.grids or not self.is_counting() or self._must_hide_from_dynamo:
            return None
        is_known, is_cross = self.module_inputs.tell_plain(name)
        if not is_known or self.layer_names.of(name).is_cross:
            return None
        # Inference tensors have no version.
        if q.is_inference() or k.is_inference() or v.is_inference():
            return None
        if self.logs.are_open:
            return self._run_token(name, q, k, v) if mask is None else None
        if q.shape != k.shape:
            return None
        found = run_plain_call_with_lse(q, k, v, mask, is_sdpa)
        if found is None:
            return None
        out, lse = found
        batch, heads, length, _ = q.shape
        tensors = CallTensors(q, k, v, lse, (identify(q), identify(k), identify(v)))
        call = PlainCall(name, self.pass_number, (batch, heads, length, length), mask, is_cross, tensors)
        if self.keep is None or self.logs.pending is None:
            self._check_plain_limit(3 * q.nbytes + lse.nbytes)
            self.plain_calls[name] = call, None
        else:
            size = self.keep.nbytes(batch, heads, length, length)
            self._check_plain_limit(size)
            self.plain_calls[name] = call, self.logs.pending.add(call, v, size)
        self.count_call(name)
        return out

    def _run_token(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Runs and records the next step of a generation in the same way; None for any other call."""
        log = self.logs.find_first(name)
        if log is None or q.dim() != 4 or k.dim() != 4 or not log.is_continued_by_token(q, k):
            return None
        if log.passes[-1] == self.pass_number:
            return None
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        size = q.nbytes if self.keep is None else self.keep.nbytes(batch, heads, queries, keys)
        # The log-sum-exp takes less than the queries. At the limit the other path refuses the call in words.
        if not self.logs.has_room(2 * size):
            return None
        found = run_plain_call_with_lse(q, k, v, None)
        if found is None:
            return None
        out, lse = found
        before = log.nbytes
        self.count_call(name)
        log.add_token(q, k, v, lse, self.pass_number)
        self.logs.kept_bytes += log.nbytes - before
        return out

    @property
    def _must_hide_from_dynamo(self) -> bool:
        """Whether a compiler was first used inside the block, and would trace this code."""
        return not self._had_dynamo and "torch._dynamo" in sys.modules

    def _check_plain_limit(self, size: int) -> None:
        if not self.plain_calls or not self.logs.has_room(size):
            self._check_size(size)
        self.logs.kept_bytes += size

    def open_plain_logs(self) -> None:
        """Makes the logs of the calls of `run_plain_call`."""
        for call, pending in self.plain_calls.values():
            self.layer_names.fit_to_call(call.name, call.is_cross, "context")
            heads = tuple(range(call.shape[1]))
            log = self.logs.make_log(call.name or self.record.model, self.layer_names.of(call.name), heads)
            log.add_plain_call(call, pending)
            self.logs.add_first(call.name, log)
        self.plain_calls.clear()

    def repeat_call(self, q: Tensor, k: Tensor) -> bool:
        """Records a plain call of a denoiser like that of an earlier step; False for any other call, which is not.

        Only the weights on text are kept, and most of what is found out about a call is the same in every step. The
        caller runs the model's own call.
        """
        # Outside a pass, a call begins one.
        if self.text_weights is None or not self._entered or type(q) is not Tensor or type(k) is not Tensor:
            return False
        name = self.find_calling_module()
        if name is None or q.is_nested or not self.is_counting() or is_inside_torch_func():
            return False
        key = name, self.calls_in_pass.get(name, 0) + 1, q.shape, k.shape
        if key not in self.text_weights.known_calls or self._must_hide_from_dynamo:
            return False
        known = self.text_weights.known_calls[key]
        if known is not None and not self._repeat_known_call(known, q, k):
            return False
        self.count_call(name)
        return True

    def _repeat_known_call(self, known: KnownCall, q: Tensor, k: Tensor) -> bool:
        """Keeps the weights on text of a call, if the pass is recorded; False if the call is not plain enough."""
        assert self.denoising is not None and self.keep is not None
        if not self.denoising.is_recorded:
            return True
        is_plain = known.has_room_for(q, k) and not torch.is_autocast_enabled(q.device.type)
        if not is_plain or not self.logs.has_room(known.log.nbytes):
            return False
        rows = self.denoising.find_conditional_rows(q.shape[0])
        kept = self.keep.compute_text_of_plain_call(q, k, known.keys, rows)
        self.logs.repeat_step(known.log, kept, self.denoising.step)
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
        if self.text_weights is not None:
            text = self.text_weights.find(layer_name, weights.shape[2], weights.shape[3], self.pass_number)
            if not self.text_weights.keeps_part(text):
                return
        heads: Sequence[int] = range(weights.shape[1])
        if self.selection.heads is not None:
            heads = self.selection.heads_of(layer_name)
            if any(head >= weights.shape[1] for head in heads):
                raise CaptureError(f"heads must be below {weights.shape[1]} for {layer_name.short}, got H{heads[-1]}")
            group = weights.shape[1] // values.shape[1]
            weights, values = take_heads(weights, heads), values[:, [head // group for head in heads]]
        log = self._find_or_open_log(name, layer_name, tuple(heads), weights, k)
        log.text = text
        if self.keep is None and log.rows is None:
            log.windows = self.window_grids.find(self.running_modules(), weights.shape[0], weights.shape[2])
        self._check_limit(log, weights, values)
        self.logs.add_call(log, weights, k, values, self.pass_number)
        if text is not None and self.denoising is not None and self.selection.heads is None:
            self._note_known_call(name, log, whole_batch, weights)

    def _note_known_call(self, name: str, log: LayerLog, batch: int, weights: Weights) -> None:
        """Notes a call of a denoiser for `repeat_call`, if no rows of it are kept."""
        assert self.text_weights is not None and log.text is not None
        call = weights.tensors.call
        if self.text_weights.keeps_rows(log.text) or self.selection.ablate or call.q.shape[1] != call.k.shape[1]:
            return
        q_shape, k_shape = (torch.Size((batch, *each.shape[1:])) for each in (call.q, call.k))
        known = KnownCall(log, as_index(log.text.keys), is_short_call(weights.shape))
        self.text_weights.known_calls[name, self.calls_in_pass[name], q_shape, k_shape] = known

    def keeps_part_of(self, name: str, q: Tensor, k: Tensor) -> bool:
        """Whether something of a call is kept: without text there is nothing for `Keep(keys="text")`."""
        if self.text_weights is None:
            return True
        text = self.text_weights.find(self.layer_name_of(name), q.shape[-2], k.shape[-2], self.pass_number)
        is_kept = self.text_weights.keeps_part(text)
        if not is_kept and self.denoising is not None and not self.selection.ablate:
            self.text_weights.known_calls[name, self.calls_in_pass[name], q.shape, k.shape] = None
        return is_kept

    def _find_or_open_log(
        self, name: str, layer_name: LayerName, heads: tuple[int, ...], weights: Weights, k: Tensor
    ) -> LayerLog:
        """The log that a call continues, or a new one."""
        number = self.calls_in_pass[name]
        if self.denoising is not None:
            return self.logs.open_step(name, number, layer_name, heads, self.denoising.step)
        return self.logs.find_or_open(name, number, self.pass_number, layer_name, heads, weights, k)

    def _check_limit(self, log: LayerLog, weights: Weights, values: Tensor) -> None:
        """Refuses a call that would exceed `limit`; the estimate of the first call is scaled to all layers."""
        self._check_size(self.logs.count_bytes(log, weights, values))

    def _check_size(self, nbytes: int) -> None:
        if not self.logs.has_estimate:
            layers = max(1, sum(self.is_selected(name) for name in self.layer_names.attention_modules))
            nbytes = self.logs.estimate(nbytes, layers, 1 if self.denoising is None else self.denoising.expected_steps)
        self.logs.check_limit(nbytes)


@cache
def get_record_call_without_dynamo() -> Callable[[Recorder, str, Any, Tensor], None]:
    """`Recorder._record_call` with torch.compile disabled.

    The method is that of the class: a recorder that held a bound method of its own would be a reference cycle, and
    would keep its tensors until the garbage collector runs.
    """
    found: Callable[[Recorder, str, Any, Tensor], None] = sys.modules["torch._dynamo"].disable(Recorder._record_call)
    return found
