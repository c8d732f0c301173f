"""Loads the models that the explorer runs, and records their attention for a text, an image or a sound."""

from __future__ import annotations

import io
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import foci
from foci.capture.look import INPUT_FILE_NAME, name_for_title, record_example, record_text
from foci.capture.model_loading import (
    LOAD_OPTIONS,
    check_input_kind,
    check_model_is_available,
    explain_loading_errors,
    import_transformers,
    is_foci_model,
    load_huggingface_config,
    load_text_model,
    locate_model,
)
from foci.explore.jobs import LOADED_FRACTION, RUN_FRACTION, Job
from foci.models.untrained import UntrainedSentence, split_heads, split_words
from foci.record.labels import Labels
from foci.record.layer import Layer
from foci.record.record import Record

UNTRAINED = "untrained vectors"
MAX_LOADED_MODELS = 2
MAX_UNTRAINED_WORDS = 512
MAX_TEXT_CHARACTERS = 400_000


@dataclass
class LoadedModel:
    """A model with its input processor, None until it is loaded; one job at a time runs it."""

    model: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ModelRunner:
    """Runs models and keeps the last used ones loaded."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._loaded: OrderedDict[tuple[str, str], LoadedModel] = OrderedDict()
        self._lock = threading.Lock()

    def record_text(self, model: str, text: str, job: Job) -> Record:
        """Run a model on a text."""
        if not text.strip():
            raise ValueError("text must have at least one word, got an empty text")
        if INPUT_FILE_NAME.fullmatch(text.strip()):
            raise ValueError(f"text must be a text, got the file name {text.strip()}: open or drop the file instead")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ValueError(f"text must have at most {MAX_TEXT_CHARACTERS:,} characters, got {len(text):,}")
        if model == UNTRAINED:
            return record_untrained(text)
        if is_foci_model(Path(locate_model(model))):
            return self._record_with_task(model, "texts", text, job)
        with self._open_model("text", model, job) as text_model, report_progress(text_model.model, job):
            return replace_title(record_text(text_model, text), model)

    def record_image(self, model: str, image: bytes, job: Job) -> Record:
        """Run a model on an image."""
        picture = decode_image(image)
        if model == UNTRAINED:
            raise ValueError("model must take images, got untrained vectors, which take texts")
        if is_foci_model(Path(locate_model(model))):
            return self._record_image_with_task(model, picture, job)
        with self._open_model("image", model, job) as (processor, own):
            pixels = processor(images=picture, return_tensors="pt").to(self.device)
            with report_progress(own, job), torch.no_grad(), foci.watch(own) as seen:
                own(**pixels)
        return replace_title(seen, model)

    def _record_image_with_task(self, model: str, picture: Any, job: Job) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            # The task reads images from files.
            path = Path(folder) / "image.png"
            picture.save(path)
            return self._record_with_task(model, "images", str(path), job)

    def record_sound(self, model: str, sound: bytes, job: Job) -> Record:
        """Run a model of foci on a sound."""
        if model == UNTRAINED or not is_foci_model(Path(locate_model(model))):
            raise ValueError(f"model must be a model of foci that takes sounds, such as speech, got {model!r}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sound"
            path.write_bytes(sound)
            try:
                return self._record_with_task(model, "sounds", str(path), job)
            except ValueError as problem:
                # The temporary path means nothing to the user.
                raise ValueError(str(problem).replace(str(path), "the file")) from problem

    def _record_with_task(self, model: str, kind: str, source: str, job: Job) -> Record:
        """Run a model of foci on a source of this kind: a text, or the path of an image or a sound."""
        with self._open_model("foci", model, job) as (task, own, _):
            check_input_kind(task.name, kind)
            with report_progress(own, job):
                return replace_title(record_example(task, own, task.parse_input(source)), model)

    @contextmanager
    def _open_model(self, kind: str, name: str, job: Job) -> Iterator[Any]:
        """Load a model with its input processor, run no other job with it, and drop the least recently used one."""
        key = kind, locate_model(name)
        with self._lock:
            loaded = self._loaded.setdefault(key, LoadedModel())
            self._loaded.move_to_end(key)
            while len(self._loaded) > MAX_LOADED_MODELS:
                self._loaded.popitem(last=False)
        with loaded.lock:
            if loaded.model is None:
                job.report(f"loading {name}", 0.02)
                loaded.model = LOADERS[kind](key[1], self.device)
            job.report(f"running {name}", LOADED_FRACTION)
            yield loaded.model


def replace_title(record: Record, model: str) -> Record:
    record.model = name_for_title(model)
    return record


def load_foci_model(name: str, device: str) -> Any:
    from foci.tasks.model_file import load_trained_model

    return load_trained_model(Path(name), device=device)


def load_image_model(name: str, device: str) -> Any:
    transformers = import_transformers()
    with explain_loading_errors("a model that takes images", name):
        check_model_is_available(name)
        processor = transformers.AutoImageProcessor.from_pretrained(name, **LOAD_OPTIONS)
        config = load_huggingface_config(name)
        model = transformers.AutoModel.from_pretrained(name, config=config, **LOAD_OPTIONS).eval().to(device)
    # Of a model for texts and images, only the vision part runs.
    return processor, getattr(model, "vision_model", model)


LOADERS: dict[str, Callable[[str, str], Any]] = {
    "foci": load_foci_model,
    "image": load_image_model,
    "text": load_text_model,
}


def decode_image(image: bytes) -> Any:
    """Decode an image as RGB."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("images need Pillow, which is not installed: pip install 'foci[view]'") from error
    try:
        return Image.open(io.BytesIO(image)).convert("RGB")
    except UnidentifiedImageError as error:
        # Pillow's message names an internal object.
        raise ValueError("image must be a file that Pillow can read, got another file") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image must be a file that Pillow can read: {error}") from error


@contextmanager
def report_progress(model: nn.Module, job: Job) -> Iterator[None]:
    """Report the progress of a forward by counting finished modules; generation runs them several times."""
    leaves = [module for module in model.modules() if not list(module.children())]
    done = 0

    def step(*_: Any) -> None:
        nonlocal done
        done += 1
        job.report(
            job.message, LOADED_FRACTION + (RUN_FRACTION - LOADED_FRACTION) * min(1.0, done / max(1, len(leaves)))
        )

    handles = [module.register_forward_hook(step) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_untrained(text: str) -> Record:
    """Record the untrained vectors of `foci explain`: they show how attention works, not what a text means."""
    given = split_words(text)
    words, notes = given[:MAX_UNTRAINED_WORDS], []
    if len(given) > len(words):
        notes = [f"the text is cut: the first {len(words):,} of {len(given):,} words are shown"]
    q, k, v = (split_heads(part) for part in UntrainedSentence(words).qkv)
    _, weights = foci.attention(q, k, v, return_weights=True)
    layer = Layer("attention", weights=weights, values=v)
    labels = Labels.tokens([[("" if i == 0 else " ") + word for i, word in enumerate(words)]])
    return Record({"attention": layer}, {"input": labels}, model="Untrained vectors", calls=1, notes=notes)
