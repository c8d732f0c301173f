"""Finds and loads the model that `foci.look` and the explorer run.

A model is a Hugging Face model, by folder or name; a model that foci trained, by its file or run directory; or a
pretrained model of foci, by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foci import models
from foci.inputs.bpe import explain_panics

CAUSAL_LM_SUFFIXES = ("ForCausalLM", "LMHeadModel")
# Code that comes with a model is never run, and permission is never requested.
LOAD_OPTIONS: dict[str, Any] = {"trust_remote_code": False}
# The pretrained models that read text, the default first.
TEXT_MODELS = ("translation", "generation", "sentiment", "summarization")
# The input of models for these tasks; models for all other tasks take texts.
TASK_INPUTS = {"vision": "images", "speech": "sounds"}
# Seconds to wait for Hugging Face to say whether a model exists.
HUB_TIMEOUT = 10


@dataclass
class TextModel:
    """A Hugging Face model with its config and tokenizer, in eval mode on one device."""

    config: Any
    tokenizer: Any
    model: Any
    device: str


class MissingModelError(ValueError):
    """No model was given, and no pretrained model takes the input."""


def ignore_message(_message: str) -> None:
    """Drops a progress message."""


def load_text_model(name: str, device: str = "cpu", report: Callable[[str], None] = ignore_message) -> TextModel:
    """Loads a Hugging Face model and its tokenizer, by folder or name."""
    transformers = import_transformers()
    report(f"loading {name}")
    with explain_loading_errors(describe_model_choices(), name):
        check_model_is_available(name)
        config = load_huggingface_config(name)
    with explain_loading_errors("a model that reads text", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **LOAD_OPTIONS)
    with explain_loading_errors(describe_model_choices(), name):
        auto_class = getattr(transformers, auto_class_of(config))
        model = auto_class.from_pretrained(name, config=config, **LOAD_OPTIONS).eval().to(device)
    return TextModel(config, tokenizer, model, device)


def load_huggingface_config(name: str) -> Any:
    """Loads the config of a Hugging Face model, without the attention implementation that it names.

    A config can name an implementation on the hub, whose code transformers would download and run.
    """
    config = import_transformers().AutoConfig.from_pretrained(name, **LOAD_OPTIONS)
    # Transformers then chooses between its own implementations; the setters also change the configs inside.
    config._attn_implementation = None
    config._experts_implementation = None
    return config


def import_transformers() -> Any:
    """The transformers package, or an error that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "Hugging Face models need transformers, which is not installed: pip install 'foci[hf]'"
        ) from error
    return transformers


def auto_class_of(config: Any) -> str:
    """The auto class of transformers that loads a model with its output head."""
    if config.is_encoder_decoder:
        return "AutoModelForSeq2SeqLM"
    is_causal = any(name.endswith(CAUSAL_LM_SUFFIXES) for name in config.architectures or [])
    return "AutoModelForCausalLM" if is_causal else "AutoModel"


@contextmanager
def explain_loading_errors(expected: str, name: str) -> Iterator[None]:
    """Turns any error that transformers raises for a model's files into one sentence."""
    try:
        with explain_panics("what its files hold"):
            yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = re.split(r"(?<=[.!]) +(?=[A-Z])", lines[0])[0].rstrip(" .:")
        raise ValueError(f"model must be {expected}, got {name!r}: {reason}") from error


def check_model_is_available(name: str) -> None:
    """Refuses an unknown model name at once; transformers would retry the download."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if path_exists(Path(name)) or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except HfHubHTTPError:
        raise
    except Exception as error:
        # The client of the hub has a dozen kinds of errors for a missing network.
        raise OSError(f"it is not on this machine, and Hugging Face cannot be reached ({error})") from error


def locate_model(model: str | os.PathLike[str] | None) -> str:
    """The path of a model, or its Hugging Face name; None is the first pretrained model that reads text."""
    pretrained = list_pretrained_by_input()
    if model is None and not {*pretrained} & {*TEXT_MODELS}:
        raise MissingModelError(
            "model must be given, because no pretrained model that reads text is installed, got None"
        )
    name = pretrained[0] if model is None else os.path.expanduser(os.fspath(model))  # noqa: PTH111
    if not name:
        raise ValueError(f"model must be {describe_model_choices()}, got an empty name")
    if name in pretrained and not path_exists(Path(name)):
        return str(models.MODELS_DIRECTORY / name)
    if name in models.TRAINING_DATA and not path_exists(Path(name)):
        raise ValueError(models.describe_missing_model(name))
    check_path_exists(name)
    return name


def find_model_for(kind: str) -> str | None:
    """The pretrained model that takes images or sounds; None for texts, where `locate_model` knows the default."""
    name = find_task_for(kind)
    if name is not None and name not in models.list_pretrained():
        raise MissingModelError(f"model must be given, because no pretrained model for {kind} is installed, got None")
    return name


def find_task_for(kind: str) -> str | None:
    """The task whose models take images or sounds; None for texts, which several take."""
    return next((task for task, takes in TASK_INPUTS.items() if takes == kind), None)


def check_input_kind(task: str, kind: str) -> None:
    """Refuses an input of another kind than a task's model takes: texts, images or sounds."""
    taken = TASK_INPUTS.get(task, "texts")
    if taken != kind:
        fit = find_task_for(kind) or "translation"
        raise ValueError(f"model must take {kind}, as {fit} does, got a model for {task}, which takes {taken}")


def list_pretrained_by_input() -> list[str]:
    """The names of the pretrained models that are installed: those that read text first, the default before all."""
    names = models.list_pretrained()
    return [*(name for name in TEXT_MODELS if name in names), *(name for name in names if name not in TEXT_MODELS)]


def describe_model_choices() -> str:
    """What `model` may be, for error messages."""
    pretrained = ", ".join(list_pretrained_by_input())
    return f"the folder or name of a Hugging Face model, a foci run, or a pretrained model ({pretrained})"


def check_path_exists(name: str) -> None:
    """Refuses a missing path before it is looked up as a model name over the network."""
    if name.startswith((".", "/", "~")) and not path_exists(Path(name)):
        raise ValueError(f"model must be the folder of a Hugging Face model or a foci model, got {name}: no such path")


def is_foci_model(path: Path) -> bool:
    """Whether a path is a model of foci: a file, or a folder without the config of a Hugging Face model."""
    return path_exists(path) and not (path / "config.json").is_file()


def names_file(text: str) -> bool:
    """Whether a text is the path of a file; a word without a dot or a slash is a text, also if a file has that name."""
    return bool({".", os.sep} & {*text}) and path_exists(Path(text)) and Path(text).is_file()


def path_exists(path: Path) -> bool:
    """Whether a path exists; False for names that are not valid paths."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def resolve_device(name: str) -> str:
    """The name of a device; "auto" is the GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be 'cpu' or 'auto' where PyTorch finds no GPU, got 'cuda'")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
