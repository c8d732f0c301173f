"""look: a text, a model that reads it, and a Record of where it looked.

The model is one of Hugging Face, by folder or name, or one that foci trained, by its file or the folder of its run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foci.capture import watch
from foci.record.labels import Labels
from foci.record.record import Record

if TYPE_CHECKING:
    from foci.nn.model import Model
    from foci.tasks.task import Task

MAX_NEW_TOKENS = 128
# How many of the likeliest next tokens are named.
SHOWN_NEXT_TOKENS = 5
CAUSAL_LM_SUFFIXES = ("ForCausalLM", "LMHeadModel")
# Code that comes with a model is not run, and nobody is asked whether it may.
LOAD_OPTIONS: dict[str, Any] = {"trust_remote_code": False}
SHIPPED_MODELS = Path(__file__).parents[1] / "models"
# Of the models that ship, those that read a text, the one to begin with first.
TEXT_MODELS = ("translation", "generation", "sentiment", "summarization")
# So many seconds Hugging Face has to say whether it knows a name.
HUB_TIMEOUT = 10


def ignore_message(_message: str) -> None:
    """Says nothing."""


def look(
    text: str,
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    new_tokens: int = MAX_NEW_TOKENS,
    say: Callable[[str], None] = ignore_message,
) -> Record:
    """Where a model looks when it reads a text.

    A model that reads (BERT) reads it; one that writes (GPT-2) reads it and says how it would go on; one that reads and
    writes (Marian, T5) writes its answer, and the record has the alignment.

    Args:
        model: the folder or name of a Hugging Face model, a file or run of foci, or the name of one that ships with
            foci ("translation"); None: the first that ships.
        device: "cpu", "cuda", or "auto".
        new_tokens: how much a model that reads and writes may write.
        say: is told what takes a while.
    """
    if not text.strip():
        raise ValueError("expected a text with at least one word, received none")
    device = resolve_device(device)
    place = locate_model(model)
    if is_foci_model(Path(place)):
        from foci.tasks.model_file import load

        say(f"loading {model or Path(place).name}")
        task, own, _ = load(Path(place), device=device)
        record = record_example(task, own, task.given(text))
        for note in record.notes:
            say(note)
        return record
    return TextModel(place, device, say).look(text, new_tokens)


def record_example(task: Task[Any, Any], model: Model, example: Any) -> Record:
    """Where a model of a task looks, with a note where it did not read all that it was given."""
    record = task.show(model, example)
    if task.is_cut(example):
        what = "sound" if task.name == "speech" else "text"
        record.notes.append(f"the {what} is longer than the model reads: what is shown is a part of it")
    return record


def resolve_device(name: str) -> str:
    """The device by its name; "auto" is the GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("expected a GPU for the device cuda, but PyTorch finds none here")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def list_shipped_models() -> list[str]:
    """The models that ship with foci, the one to begin with first."""
    there = {file.parent.name for file in SHIPPED_MODELS.glob("*/*.safetensors")}
    return [*(name for name in TEXT_MODELS if name in there), *sorted(there - {*TEXT_MODELS})]


def locate_model(model: str | os.PathLike[str] | None) -> str:
    """Where a model is: a path, the name of one at Hugging Face, or one that ships."""
    there = list_shipped_models()
    if model is None and not {*there} & {*TEXT_MODELS}:
        raise ValueError(
            "expected a model, by the folder or name of one of Hugging Face or a run of foci (--model), because none"
            ' that reads texts ships with this foci; without one, foci explain "..." shows how attention works'
        )
    name = there[0] if model is None else os.path.expanduser(os.fspath(model))  # noqa: PTH111
    if not name:
        raise ValueError(f"expected {describe_model_choices()}, received none")
    if name in there and not path_exists(Path(name)):
        return str(SHIPPED_MODELS / name)
    check_path_exists(name)
    return name


def describe_model_choices() -> str:
    """What may be named, for whoever named something else."""
    return f"the folder or name of a Hugging Face model, a run of foci, or a model that ships ({', '.join(list_shipped_models())})"


def check_path_exists(name: str) -> None:
    """A path that is not there is no name of a model either; nobody needs to be asked over the network."""
    if name.startswith((".", "/", "~")) and not path_exists(Path(name)):
        raise ValueError(f"expected the folder of a Hugging Face model, or a model of foci, but {name} is not there")


def is_foci_model(path: Path) -> bool:
    """Whether a path is a model of foci: a file, or a folder without the config of a Hugging Face model."""
    return path_exists(path) and not (path / "config.json").is_file()


def path_exists(path: Path) -> bool:
    """Whether a path is there; what no path can be called is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


@contextmanager
def explain_loading_errors(wanted: str, name: str) -> Iterator[None]:
    """Whatever a stranger's files make of transformers, the reader gets one sentence."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = re.split(r"(?<=[.!]) +(?=[A-Z])", lines[0])[0].rstrip(" .:")
        raise ValueError(f"expected {wanted}, received {name!r}: {reason}") from error


def check_model_is_available(name: str) -> None:
    """A name that is not known is told at once: transformers would ask for it again and again."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if path_exists(Path(name)) or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except HfHubHTTPError:
        raise
    except Exception as error:
        # Its client has a dozen kinds of errors for a network that is not there.
        raise OSError(f"it is not on this machine, and Hugging Face cannot be asked ({error})") from error


class TextModel:
    """A Hugging Face model with its tokenizer, loaded once."""

    def __init__(self, name: str, device: str = "cpu", say: Callable[[str], None] = ignore_message) -> None:
        transformers = import_transformers()
        self.say, self.device = say, device
        say(f"loading {name}")
        with explain_loading_errors(describe_model_choices(), name):
            check_model_is_available(name)
            self.config = transformers.AutoConfig.from_pretrained(name, **LOAD_OPTIONS)
        with explain_loading_errors("a model that reads texts", name):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(name, **LOAD_OPTIONS)
        with explain_loading_errors(describe_model_choices(), name):
            kind = getattr(transformers, auto_class_of(self.config))
            self.model = kind.from_pretrained(name, **LOAD_OPTIONS).eval().to(device)

    @torch.no_grad()
    def look(self, text: str, new_tokens: int = MAX_NEW_TOKENS) -> Record:
        """Runs the model on the text, and records."""
        encoded, labels, notes = self.read(text)
        if self.config.is_encoder_decoder:
            seen = self.answer(encoded, labels, new_tokens)
        else:
            with watch(self.model, tokenizer=self.tokenizer, labels={"input": labels}) as seen:
                out = self.model(**encoded)
            if auto_class_of(self.config) == "AutoModelForCausalLM":
                seen.answer = self.likeliest(out.logits[0, -1])
        seen.notes += notes
        return seen

    def read(self, text: str) -> tuple[dict[str, Any], Labels, list[str]]:
        """The numbers of a text's tokens, cut to what the model can take; the texts of these; and that it was cut."""
        longest = min(getattr(self.config, "max_position_embeddings", None) or 2**20, self.tokenizer.model_max_length)
        quick = self.tokenizer.is_fast
        encoded = self.tokenizer(
            text, return_tensors="pt", return_offsets_mapping=quick, truncation=True, max_length=longest
        )
        ids = encoded["input_ids"]
        notes = []
        if ids.shape[1] == longest and len(self.tokenizer(text)["input_ids"]) > longest:
            notes = [f"the model takes {longest:,} tokens: what is beyond them is cut off"]
            self.say(notes[0])
        if quick:
            offsets = [tuple(pair) for pair in encoded.pop("offset_mapping")[0].tolist()]
            names = self.tokenizer.convert_ids_to_tokens(ids[0])
            labels = Labels.by_offsets([text], [offsets], [names], [encoded.word_ids(0)])
        else:
            labels = Labels.decoded(ids, self.tokenizer)
        return {name: tensor.to(self.device) for name, tensor in encoded.items()}, labels, notes

    def answer(self, encoded: dict[str, Any], labels: Labels, new_tokens: int) -> Record:
        """What a model that reads and writes says; each row of the alignment is the word that was being written."""
        self.say("writing an answer")
        with watch(self.model, tokenizer=self.tokenizer, labels={"source": labels}) as seen:
            written = self.model.generate(**encoded, max_new_tokens=new_tokens, num_beams=1, do_sample=False)
        seen.answer = self.tokenizer.decode(written[0], skip_special_tokens=True)
        seen.labels["answer"] = Labels.decoded(written[:, 1:], self.tokenizer)
        for name, layer in seen.layers.items():
            if layer.stack == "cross":
                seen.layers[name] = replace(layer, queries="answer")
        return seen

    def likeliest(self, logits: torch.Tensor) -> str:
        """How a text would go on: “ pasta” 12%, “ pizza” 8%."""
        shares, tokens = logits.float().softmax(-1).topk(min(SHOWN_NEXT_TOKENS, logits.shape[-1]))
        texts = [self.tokenizer.decode([token]) for token in tokens.tolist()]
        return ", ".join(f"“{text}” {share:.0%}" for text, share in zip(texts, shares.tolist(), strict=True))


def auto_class_of(config: Any) -> str:
    """The class of transformers that loads a model with what it can do."""
    if config.is_encoder_decoder:
        return "AutoModelForSeq2SeqLM"
    writes = any(name.endswith(CAUSAL_LM_SUFFIXES) for name in config.architectures or [])
    return "AutoModelForCausalLM" if writes else "AutoModel"


def import_transformers() -> Any:
    """transformers, or how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "models of Hugging Face need transformers, which is not installed: pip install 'foci[hf]'"
        ) from error
    return transformers
