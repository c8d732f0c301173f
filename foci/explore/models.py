"""Models that the explorer runs: loaded once, told apart by what they are given, a text, an image or a sound."""

from __future__ import annotations

import io
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import foci
from foci.capture import watch
from foci.capture.look import (
    LOAD_OPTIONS,
    TextModel,
    check_model_is_available,
    explain_loading_errors,
    import_transformers,
    is_foci_model,
    locate_model,
    record_example,
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
# What the models of these tasks are given; those of all others are given texts.
TASK_INPUTS = {"vision": "images", "speech": "sounds"}


class ModelRunner:
    """The models that were used last."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._loaded: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def look(self, model: str, text: str, job: Job) -> Record:
        """A text, read by a model."""
        if not text.strip():
            raise ValueError("expected a text with at least one word, received none")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ValueError(f"expected at most {MAX_TEXT_CHARACTERS:,} characters, received {len(text):,}")
        if model == UNTRAINED:
            return record_untrained(text)
        model = locate_model(model)
        if is_foci_model(Path(model)):
            return self.shown_by_own(model, "texts", text, job)
        reader = self.loaded("text", model, job)
        with report_progress(reader.model, job):
            found: Record = reader.look(text)
        return found

    def view(self, model: str, image: bytes, job: Job) -> Record:
        """An image, looked at by a model."""
        picture = decode_image(image)
        if model == UNTRAINED:
            raise ValueError("expected a model that takes images: untrained vectors are made of words")
        model = locate_model(model)
        if is_foci_model(Path(model)):
            return self.viewed_by_own(model, picture, job)
        processor, own = self.loaded("image", model, job)
        pixels = processor(images=picture, return_tensors="pt").to(self.device)
        with report_progress(own, job), torch.no_grad(), watch(own) as seen:
            own(**pixels)
        return seen

    def viewed_by_own(self, model: str, picture: Any, job: Job) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            # The task reads its pictures from files, in a format of this side's choice.
            path = Path(folder) / "image.png"
            picture.save(path)
            return self.shown_by_own(model, "images", str(path), job)

    def hear(self, model: str, sound: bytes, job: Job) -> Record:
        """A sound, heard by a model of foci."""
        if model == UNTRAINED or not is_foci_model(Path(place := locate_model(model))):
            raise ValueError(f"expected a model of foci that takes sounds, such as speech, received {model!r}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sound"
            path.write_bytes(sound)
            try:
                return self.shown_by_own(place, "sounds", str(path), job)
            except ValueError as problem:
                # The path is this side's own and says nothing to who sent the sound.
                raise ValueError(str(problem).replace(str(path), "the file")) from problem

    def shown_by_own(self, model: str, what: str, given: str, job: Job) -> Record:
        """What a model of foci shows, where it takes what it is given: a text, or the path of an image or a sound."""
        task, own, _ = self.loaded("own", model, job)
        taken = TASK_INPUTS.get(task.name, "texts")
        if taken != what:
            fit = next((name for name, takes in TASK_INPUTS.items() if takes == what), "translation")
            raise ValueError(
                f"expected a model that takes {what}, such as {fit}, but the one for {task.name} takes {taken}"
            )
        with report_progress(own, job):
            return record_example(task, own, task.given(given))

    def loaded(self, kind: str, name: str, job: Job) -> Any:
        """A model with what reads its input; the ones that were not used for longest make room."""
        if (kind, name) not in self._loaded:
            job.say(f"loading {name}", 0.02)
            self._loaded[kind, name] = LOADERS[kind](name, self.device)
            while len(self._loaded) > MAX_LOADED_MODELS:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end((kind, name))
        job.say(f"running {name}", LOADED_FRACTION)
        return self._loaded[kind, name]


def load_foci_model(name: str, device: str) -> Any:
    from foci.tasks.model_file import load

    return load(Path(name), device=device)


def load_image_model(name: str, device: str) -> Any:
    transformers = import_transformers()
    with explain_loading_errors("a model that takes images", name):
        check_model_is_available(name)
        processor = transformers.AutoImageProcessor.from_pretrained(name, **LOAD_OPTIONS)
        model = transformers.AutoModel.from_pretrained(name, **LOAD_OPTIONS).eval().to(device)
    # What takes texts beside images is asked for what sees.
    return processor, getattr(model, "vision_model", model)


LOADERS: dict[str, Callable[[str, str], Any]] = {"own": load_foci_model, "image": load_image_model, "text": TextModel}


def decode_image(image: bytes) -> Any:
    """The image in some bytes, as RGB."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("images need Pillow, which is not installed: pip install 'foci[view]'") from error
    try:
        return Image.open(io.BytesIO(image)).convert("RGB")
    except UnidentifiedImageError as error:
        # What Pillow says names an object of this side.
        raise ValueError("expected an image that Pillow can read, received something else") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"expected an image that Pillow can read: {error}") from error


@contextmanager
def report_progress(model: nn.Module, job: Job) -> Iterator[None]:
    """How far a forward is, by the modules that are done; a generation goes through them again."""
    leaves = [module for module in model.modules() if not list(module.children())]
    done = 0

    def step(*_: Any) -> None:
        nonlocal done
        done += 1
        job.say(job.told, LOADED_FRACTION + (RUN_FRACTION - LOADED_FRACTION) * min(1.0, done / max(1, len(leaves))))

    handles = [module.register_forward_hook(step) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_untrained(text: str) -> Record:
    """The vectors of `foci explain`: they show how attention works, not what a text means."""
    words = split_words(text)[:MAX_UNTRAINED_WORDS]
    q, k, v = (split_heads(part) for part in UntrainedSentence(words).qkv)
    _, weights = foci.attention(q, k, v, return_weights=True)
    layer = Layer("attention", weights=weights, values=v)
    labels = Labels.tokens([[("" if i == 0 else " ") + word for i, word in enumerate(words)]])
    return Record({"attention": layer}, {"input": labels}, model="Untrained vectors", calls=1)
