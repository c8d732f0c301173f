"""look: runs a model on a text and records its attention."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foci.capture.model_loading import (
    TextModel,
    auto_class_of,
    check_input_kind,
    find_model_for,
    find_task_for,
    ignore_message,
    is_foci_model,
    load_text_model,
    locate_model,
    names_file,
    resolve_device,
)
from foci.capture.watch import watch
from foci.inputs.audio import SOUND_FORMATS
from foci.inputs.bpe import explain_panics
from foci.inputs.files import MAGIC_BYTES, detect_format, find_format
from foci.inputs.image import IMAGE_FORMATS
from foci.inputs.tables import read_text_file
from foci.record.labels import Labels
from foci.record.record import Record
from foci.runtime.default_device import prepare_on_cpu

if TYPE_CHECKING:
    from foci.nn.model import Model
    from foci.tasks.task import Task

MAX_NEW_TOKENS = 128
# The number of likely next tokens in the answer of a causal model.
SHOWN_NEXT_TOKENS = 5
MEDIA_SUFFIX = re.compile(r"\.(png|jpe?g|webp|gif|bmp|tiff?|pgm|ppm|wav|flac|ogg)", re.IGNORECASE)
# A word that is meant as the name of a file, also if there is no such file.
INPUT_FILE_NAME = re.compile(rf"\S+({MEDIA_SUFFIX.pattern}|\.txt)", re.IGNORECASE)


@prepare_on_cpu
def look(
    text: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    new_tokens: int = MAX_NEW_TOKENS,
    report: Callable[[str], None] = ignore_message,
) -> Record:
    """Runs a model on a text and records its attention.

    >>> record = foci.look("Jane is hungry.", "translation", device="cpu")
    >>> record.answer, len(record.heads)
    ('Jane hat Hunger.', 68)

    An encoder (BERT) reads the text. A causal model (GPT-2) reads it, and `answer` lists the likely next tokens. An
    encoder-decoder (Marian, T5) generates its answer, and the record holds the cross-attention between the two.

    Args:
        text: the text to read, or the path of a text, image or sound file.
        model: the folder or name of a Hugging Face model, a file or run directory of foci, or the name of a
            pretrained model ("translation"); None: the pretrained model for a text, an image or a sound.
        device: "cpu", "cuda", or "auto" for the GPU if there is one.
        new_tokens: the largest number of tokens that an encoder-decoder may generate.
        report: is called with progress messages and with the notes of the record.
    """
    check_name(
        "text", text, "a text, or the path of a text, image or sound file", "give the text first, then the model"
    )
    if model is not None:
        check_name("model", model, "the name or path of a model", "record a model object with foci.watch")
    text, kind = read_input(os.fspath(text), report)
    if not text.strip():
        raise ValueError("text must have at least one word, got none")
    device = resolve_device(device)
    model = find_model_for(kind) if model is None else model
    path = locate_model(model)
    name = name_for_title(os.fspath(model or Path(path).name))
    if is_foci_model(Path(path)):
        record = record_with_foci_model(text, kind, path, device, report, shown_name=str(model or name))
    elif kind != "texts":
        raise ValueError(f"model must be a model of foci for {kind}, such as {find_task_for(kind)}, got {name}")
    else:
        record = record_text(load_text_model(path, device, report), text, new_tokens, report)
    record.model = name
    return record


def check_name(name: str, value: Any, expected: str, advice: str) -> None:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}: {advice}")


def name_for_title(model: str) -> str:
    """The name of a model in titles: a directory without the path to it, or the name that was given."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model


def read_input(text: str, report: Callable[[str], None]) -> tuple[str, str]:
    """The input of a model and its kind: a text, the text in a file, or the path of an image or a sound."""
    if not names_file(text):
        if INPUT_FILE_NAME.fullmatch(text):
            raise ValueError(f"text must be a text or the path of a file, got {text}: no such file")
        return text, "texts"
    if Path(text).suffix.lower() == ".foci":
        raise ValueError(
            f"text must be a text, or the path of a text, image or sound, got {text}, the name of a record:"
            f" foci view {text}"
        )
    with Path(text).open("rb") as file:
        found = find_format(file.read(MAGIC_BYTES))
    if found in IMAGE_FORMATS or found in SOUND_FORMATS:
        return text, "images" if found in IMAGE_FORMATS else "sounds"
    if found is None and MEDIA_SUFFIX.fullmatch(Path(text).suffix):
        detect_format(text, (*IMAGE_FORMATS, *SOUND_FORMATS))
    if found not in {None, "gzip"}:
        raise ValueError(f"text must be a text, or the path of a text, image or sound, got {text}, a {found} file")
    report(f"reading {text}")
    return read_text_file(Path(text)), "texts"


def record_with_foci_model(
    text: str, kind: str, path: str, device: str, report: Callable[[str], None], shown_name: str
) -> Record:
    """Loads a model that foci trained and records its attention on a text, an image or a sound."""
    from foci.tasks.model_file import load_trained_model

    report(f"loading {shown_name}")
    task, model, _ = load_trained_model(Path(path), device=device)
    check_input_kind(task.name, kind)
    record = record_example(task, model, task.parse_input(text))
    for note in record.notes:
        report(note)
    return record


def record_example(task: Task[Any, Any], model: Model, example: Any) -> Record:
    """Records the attention of a task's model on one example; a note says if the input was truncated."""
    record = task.record_attention(model, example)
    if task.is_truncated(example):
        kind = "sound" if task.name == "speech" else "text"
        record.notes.append(f"the {kind} is cut: the model reads {task.describe_read_part(example)}")
    return record


@torch.no_grad()
def record_text(
    text_model: TextModel,
    text: str,
    new_tokens: int = MAX_NEW_TOKENS,
    report: Callable[[str], None] = ignore_message,
) -> Record:
    """Runs a Hugging Face model on a text and records its attention."""
    encoded, labels, notes = encode_text(text_model, text)
    for note in notes:
        report(note)
    if text_model.config.is_encoder_decoder:
        report("generating an answer")
        record = record_answer(text_model, encoded, labels, new_tokens)
    else:
        with watch(text_model.model, tokenizer=text_model.tokenizer, labels={"input": labels}) as record:
            out = text_model.model(**encoded)
        if auto_class_of(text_model.config) == "AutoModelForCausalLM":
            record.answer = describe_next_tokens(text_model.tokenizer, out.logits[0, -1])
    record.notes += notes
    return record


def encode_text(text_model: TextModel, text: str) -> tuple[dict[str, Any], Labels, list[str]]:
    """The model's inputs for a text, truncated to its maximum length; their labels; and a note if it was truncated."""
    config, tokenizer = text_model.config, text_model.tokenizer
    longest = min(getattr(config, "max_position_embeddings", None) or 2**20, tokenizer.model_max_length)
    with explain_panics("the text"):
        encoded = tokenizer(
            text, return_tensors="pt", return_offsets_mapping=tokenizer.is_fast, truncation=True, max_length=longest
        )
    ids = encoded["input_ids"]
    notes = []
    if ids.shape[1] == longest and (whole := len(tokenizer(text)["input_ids"])) > longest:
        notes = [f"the text is cut: the model reads the first {longest:,} of {whole:,} tokens"]
    if tokenizer.is_fast:
        offsets = [tuple(pair) for pair in encoded.pop("offset_mapping")[0].tolist()]
        names = tokenizer.convert_ids_to_tokens(ids[0])
        labels = Labels.from_offsets([text], [offsets], [names], [encoded.word_ids(0)])
    else:
        labels = Labels.from_ids(ids, tokenizer)
    return {name: tensor.to(text_model.device) for name, tensor in encoded.items()}, labels, notes


def record_answer(text_model: TextModel, encoded: dict[str, Any], labels: Labels, new_tokens: int) -> Record:
    """Generates the answer of an encoder-decoder; each cross-attention row is labelled with the token it produced."""
    tokenizer = text_model.tokenizer
    with watch(text_model.model, tokenizer=tokenizer, labels={"source": labels}) as record:
        written = text_model.model.generate(**encoded, max_new_tokens=new_tokens, num_beams=1, do_sample=False)
    record.answer = tokenizer.decode(written[0], skip_special_tokens=True)
    record.labels["answer"] = Labels.from_ids(written[:, 1:], tokenizer)
    for name, layer in record.layers.items():
        if layer.stack == "cross":
            record.layers[name] = replace(layer, queries="answer")
    return record


def describe_next_tokens(tokenizer: Any, logits: torch.Tensor) -> str:
    """The likely next tokens with their probabilities: “ pasta” 12%, “ pizza” 8%."""
    probabilities, tokens = logits.float().softmax(-1).topk(min(SHOWN_NEXT_TOKENS, logits.shape[-1]))
    texts = [tokenizer.decode([token]) for token in tokens.tolist()]
    return ", ".join(f"“{text}” {share:.0%}" for text, share in zip(texts, probabilities.tolist(), strict=True))
