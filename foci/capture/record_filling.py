"""Fills the Record at the end of a watch block: layers, labels, notes, and the modules that were not seen."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import nn

from foci.capture.cross_attention import ModuleInputs
from foci.capture.naming import strip_compile_wrapper
from foci.record.labels import Labels, name_frames
from foci.record.layer import Layer, join_steps
from foci.record.record import Record

if TYPE_CHECKING:
    from foci.capture.log_book import LogBook
    from foci.capture.recorder import Recorder

get_compiled_call = attrgetter("_compiled_call_impl")

LOST_REASON = "its queries, keys or values were changed in place after the call: pass clones to the call"


def fill_record(recorder: Recorder) -> None:
    """Fills the record; waits for copies from the GPU last.

    If the block recorded one pass of plain calls, the layers and labels are made when they are first read.
    """
    logs, record = recorder.logs, recorder.record
    if recorder.plain_calls and not logs.by_layer and recorder.patch_grid.images is None:
        fill_record_later(recorder)
        return
    recorder.open_plain_logs()
    for log in logs.by_layer.values():
        log.finish()
    recorder.check_requested_names()
    check_rows(logs)
    if logs.pending is not None:
        logs.pending.compute()
    logs.host_copier.start()
    if logs.pending is not None:
        logs.pending.split()
    drop_lost_layers(recorder)
    add_layers(recorder, record)
    add_counts(recorder)
    generated = [log for log in logs.by_layer.values() if len(log.passes) > 1 and not log.is_cross]
    record.prompt = generated[0].first_call[0] if generated else None
    logs.host_copier.wait()
    record.filling = False


def check_rows(logs: LogBook) -> None:
    """Refuses query numbers that no call had."""
    length = max((log.first_call[0] for log in logs.by_layer.values()), default=0)
    numbers = logs.rows if isinstance(logs.rows, list) and length else []
    outside = [number for number in numbers if not -length <= number < length]
    if outside:
        raise ValueError(f"queries must be from {-length} to {length - 1}, got {outside[0]}")


def fill_record_later(recorder: Recorder) -> None:
    """Computes what needs the model or would hold its memory, and leaves the rest to the record."""
    if recorder.logs.pending is not None:
        recorder.logs.pending.compute()
        recorder.logs.host_copier.wait()
        lost = [name for name, (_, pending) in recorder.plain_calls.items() if pending is not None and pending.is_lost]
        for name in lost:
            del recorder.plain_calls[name]
            recorder.mark_unseen(name, LOST_REASON)
    add_counts(recorder)
    record, recorder.record = recorder.record, Record(model=recorder.record.model)
    # The record must not keep the model.
    recorder.model, recorder.module_inputs = nn.Module(), ModuleInputs()
    recorder.forget_model()
    record.finish_later(partial(finish_record, recorder))
    record.filling = False


def finish_record(recorder: Recorder, record: Record) -> None:
    """Adds the layers and labels to a record that is read for the first time."""
    if recorder.logs.pending is not None:
        recorder.logs.pending.split()
    recorder.open_plain_logs()
    add_layers(recorder, record)


def drop_lost_layers(recorder: Recorder) -> None:
    """Reports layers without statistics as unseen."""
    for name, log in [*recorder.logs.by_layer.items()]:
        if log.is_lost:
            del recorder.logs.by_layer[name]
            recorder.mark_unseen(log.name, LOST_REASON)


def add_counts(recorder: Recorder) -> None:
    """Adds the number of calls, the unseen modules, and a note about compiled modules."""
    record = recorder.record
    record.calls, record.unseen = recorder.calls, recorder.list_unseen()
    compiled = find_compiled_modules(recorder) if recorder.calls else []
    if compiled:
        record.notes.append(f"ran uncompiled inside foci.watch: {', '.join(compiled)}")


def find_compiled_modules(recorder: Recorder) -> list[str]:
    """The modules that torch.compile or `module.compile()` compiled, by name; the model itself is "the model"."""
    if not recorder.structure.has_compile_wrappers and not any(map(get_compiled_call, recorder.modules)):
        return []
    names = [
        name
        for name, module in zip(recorder.structure.names, recorder.modules, strict=True)
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None
    ]
    return [strip_compile_wrapper(name) or "the model" for name in names]


def add_layers(recorder: Recorder, record: Record) -> None:
    """Adds the layers, with the labels of their sequences."""
    token_ids = recorder.token_ids
    for name, log in () if recorder.logs.by_step else recorder.logs.by_layer.items():
        layer = log.build_layer()
        layer.queries = token_ids.label_name_for(layer.queries, log.passes)
        layer.keys = token_ids.label_name_for(layer.keys, log.passes)
        layer.labels = record.labels
        record.layers[name] = layer
    record.labels.update(token_ids.build_labels())
    label_frames(recorder, record)
    add_step_layers(recorder, record)
    label_windows(recorder, record)
    label_patches(recorder, record)
    name_known_contexts(recorder, record)


def add_step_layers(recorder: Recorder, record: Record) -> None:
    """Adds the layers of a diffusion model, each with its denoising steps."""
    if recorder.denoising is None:
        return
    for name, logs in recorder.logs.by_step.items():
        steps = {step: log.build_layer() for step, log in logs.items()}
        # Latents may change their size between steps; the mean is over steps of one size.
        for number, shape in enumerate(dict.fromkeys(layer.shape for layer in steps.values())):
            same = {step: layer for step, layer in steps.items() if layer.shape == shape}
            recorded_name = name if not number else f"{name}#{number + 1}"
            for layer in same.values():
                layer.name = recorded_name
            layer = next(iter(same.values())) if recorder.denoising.step == 0 else join_steps(same)
            recorder.denoising.name_sequences(layer, record.labels)
            name_given_sequences(recorder, layer)
            for each in (layer, *layer.steps.values()):
                each.labels = record.labels
            record.layers[recorded_name] = layer
    record.notes += recorder.denoising.describe()


def name_given_sequences(recorder: Recorder, layer: Layer) -> None:
    """Names the patches of a layer after the labels given for a grid of as many patches."""
    batch, _, queries, _ = layer.sizes
    given = recorder.token_ids.ready_labels
    if len(given.get(layer.queries, ())) == queries or layer.queries != "input":
        return
    fitting = [n for n, each in given.items() if each.kind == "patches" and (each.batch, len(each)) == (batch, queries)]
    for each in (layer, *layer.steps.values()) if fitting else ():
        each.keys = fitting[0] if each.keys == each.queries else each.keys
        each.queries = fitting[0]


def label_windows(recorder: Recorder, record: Record) -> None:
    """Labels the grids of layers that attend in windows; they shrink from stage to stage."""
    for log in recorder.logs.by_layer.values():
        layer = record.layers.get(log.name)
        if log.windows is None or layer is None or layer.windows is None:
            continue
        rows, columns, batch = log.windows.rows, log.windows.columns, layer.shape[0]
        layer.queries = layer.keys = f"patches {rows}x{columns}"
        if layer.keys not in record.labels:
            record.labels[layer.keys] = recorder.patch_grid.label_grid(rows, columns, batch)


def label_frames(recorder: Recorder, record: Record) -> None:
    """Labels the states of audio encoders with their times.

    An encoder that attends in windows, whose layers are recorded window by window, has a sequence for each of them.
    """
    for name, seconds in recorder.frame_seconds.items():
        heard: dict[tuple[str, int], int] = {}
        known: dict[tuple[int, int], str] = {}
        for layer in record.layers.values():
            if name not in (layer.queries, layer.keys):
                continue
            batch, _, _, length = layer.shape
            is_self = layer.queries == layer.keys
            # The windows of a module are calls in the same pass.
            calls = (layer.name.partition("#")[0], recorder.logs.by_layer[layer.name].passes[0])
            first = heard.get(calls, 0) if is_self else 0
            heard[calls] = first + length
            window = f"{name} from {first}" if first else name
            if (first, length) not in known:
                others = sum(each.partition("#")[0] == window for each in known.values())
                known[first, length] = f"{window}#{others + 1}" if others else window
            layer.keys = known[first, length]
            if is_self:
                layer.queries = layer.keys
            if layer.keys not in record.labels:
                texts = tuple(name_frames(range(first, first + length), seconds))
                record.labels[layer.keys] = Labels("frames", (texts,) * batch, seconds=seconds)


def label_patches(recorder: Recorder, record: Record) -> None:
    """Labels the input of a model that reads no tokens if it has as many positions as the model has patches."""
    along = [layer for layer in record.layers.values() if layer.queries == "input"]
    labels = recorder.patch_grid.build_labels([layer for layer in along if layer.keys == "input"])
    if along and labels is not None and "input" not in record.labels:
        record.labels["input"] = labels


def name_known_contexts(recorder: Recorder, record: Record) -> None:
    """Names the keys of cross-attention after the model's sequence if it is them that its labels describe.

    The module's inputs tell that queries and keys differ, not which of them the labels belong to: a pooling head
    attends with learned queries to the patches.
    """
    for layer in record.layers.values():
        batch, _, queries, keys = layer.sizes
        known = {name: labels for name, labels in record.labels.items() if labels.batch == batch}
        is_unknown = layer.keys in recorder.context_names.values() and layer.keys not in known
        fitting = [name for name, labels in known.items() if len(labels) == keys != queries]
        if is_unknown and fitting and (layer.queries in fitting or layer.queries not in known):
            name = layer.queries if layer.queries in fitting else fitting[0]
            layer.queries, layer.keys = "queries", name
