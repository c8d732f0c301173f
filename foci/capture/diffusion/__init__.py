"""The denoising steps of a diffusion model: which pass is which step, and what the positions of its sequences are.

A denoiser (UNet or transformer of diffusers, or any model with `steps=True`) runs once per step. A pipeline runs its
text encoders first: the token ids that they read are the prompt. With classifier-free guidance the denoiser reads the
negative prompt in the first half of its batch and the prompt in the second, which is recorded; or in a second pass of
each step, which is not.

latents: what a denoiser is called with, and the grid of its patches.
prompt: the texts of the prompt's positions.

B batch, T tokens of the prompt, frames x rows x columns of latent patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foci.capture.diffusion.latents import DenoiserInput, LatentGrid, read_inputs
from foci.capture.diffusion.prompt import EncodedPrompt, PromptText, read_prompt
from foci.capture.errors import CaptureError
from foci.capture.hooks import hook_module
from foci.record.kept import TextPositions
from foci.record.labels import Labels, Segment
from foci.record.pictures import shrink_picture

if TYPE_CHECKING:
    from foci.capture.recorder import Recorder
    from foci.record.layer import Layer
    from foci.weights.weights import Weights

# The components of a pipeline that denoise, in the order in which they are looked for.
DENOISERS = ("unet", "transformer", "transformer_2", "prior")
# Where the classes of such models live.
DENOISER_MODULES = ("diffusers.models.unets.", "diffusers.models.transformers.")


class Denoising:
    """The steps of a diffusion model in a watch block.

    Args:
        denoisers: the watched models that denoise.
        pipeline: the pipeline that they are part of; None if a model is watched on its own.
    """

    def __init__(self, denoisers: Sequence[nn.Module], pipeline: Any = None) -> None:
        self.denoisers, self.pipeline = list(denoisers), pipeline
        self.step = -1
        # Whether the running pass is recorded: of several passes in one step only the first is.
        self.is_recorded = True
        self.inputs = DenoiserInput()
        # Whether the running pass is recorded and has the sizes of the step before.
        self.repeats_step = False
        # Whether the running pass is recorded and was given something else than the recorded pass before.
        self.has_other_inputs = False
        self.prompts: list[EncodedPrompt] = []
        # The rows of the prompt embeddings, without those of the negative prompt.
        self.rows: int | None = None
        self.pictures: Tensor | None = None
        self.text: PromptText | None = None
        self._is_encoding = False
        self._scheduler_steps = 0
        self._has_passed = False

    @property
    def expected_steps(self) -> int:
        """How many steps the pipeline will make, as far as known."""
        steps = getattr(self.pipeline, "num_timesteps", None)
        return steps if isinstance(steps, int) and steps > 0 else 1

    @property
    def is_guided(self) -> bool:
        """Whether the batch holds the prompt's half behind that of the negative prompt."""
        return self.rows is not None and self.inputs.batch in {2 * self.rows, 3 * self.rows}

    def set_prompt(self, labels: Labels) -> None:
        """Takes the texts of the prompt's positions from labels; empty ones are padding."""
        words: list[list[int | None]] = [[None] * len(labels) for _ in labels.texts]
        if labels.words is not None:
            words = [list(row) for row in labels.words]
        used = [[number for number, text in enumerate(row) if text] for row in labels.texts]
        self.text = PromptText([list(row) for row in labels.texts], words, used)

    def watch(self, block: ExitStack, recorder: Recorder) -> None:
        """Notes passes, prompts and pictures until the block closes."""

        def note_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if recorder.is_counting():
                self._begin_pass(module, args, kwargs)
                if self.repeats_step:
                    recorder.repeat_pass()
                if self.has_other_inputs and recorder.text_weights is not None:
                    # A call of the same sizes may have its text elsewhere.
                    recorder.text_weights.known_calls.clear()

        for denoiser in self.denoisers:
            hook_module(block, recorder, denoiser, note_pass, before=True, with_kwargs=True)
        if self.pipeline is not None:
            self._watch_pipeline(block, recorder)

    def _watch_pipeline(self, block: ExitStack, recorder: Recorder) -> None:
        pipeline = self.pipeline
        for name, encoder in pipeline.components.items():
            if name.startswith("text_encoder") and isinstance(encoder, nn.Module):
                tokenizer = getattr(pipeline, name.replace("text_encoder", "tokenizer"), None)
                hook_module(block, recorder, encoder, self._make_prompt_hook(tokenizer), before=True, with_kwargs=True)
        scheduler = getattr(pipeline, "scheduler", None)
        processors = [getattr(pipeline, name, None) for name in ("image_processor", "video_processor")]
        for owner, name, action in (
            (pipeline, "encode_prompt", self._note_prompt),
            (scheduler, "step", self._note_scheduler_step),
            (scheduler, "set_timesteps", self._note_start),
            *((processor, "postprocess", self._note_pictures) for processor in processors),
            *((processor, "postprocess_video", self._note_pictures) for processor in processors),
        ):
            replace_method(block, recorder, owner, name, action)

    def _make_prompt_hook(self, tokenizer: Any) -> Callable[..., None]:
        def note_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            if self._is_encoding and isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
                config = getattr(module, "config", None)
                width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
                self.prompts.append(EncodedPrompt(ids.detach().cpu(), tokenizer, width or 0))

        return note_ids

    def _note_prompt(self, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        self._is_encoding, self.prompts = True, []
        try:
            result = run()
        finally:
            self._is_encoding = False
        embeddings = result[0] if isinstance(result, tuple | list) and result else result
        self.rows = embeddings.shape[0] if isinstance(embeddings, Tensor) else None
        return result

    def _note_scheduler_step(self, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        self._scheduler_steps += 1
        return run()

    def _note_start(self, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        if self._has_passed:
            raise CaptureError("foci.watch of a pipeline must contain one call of the pipeline, got a second one")
        return run()

    def _note_pictures(self, run: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        # A video processor calls that of images for each video.
        is_first = self.pictures is None and bool(arguments)
        if is_first and isinstance(arguments[0], Tensor) and arguments[0].dim() in {4, 5}:
            self.pictures = arguments[0].detach()
        return run()

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_scheduler = getattr(self.pipeline, "scheduler", None) is not None
        step = self._scheduler_steps if has_scheduler else self.step + 1
        self.is_recorded, self.step = step != self.step, step
        self._has_passed = True
        self.repeats_step = self.has_other_inputs = False
        if self.is_recorded:
            before, self.inputs = self.inputs, read_inputs(module, args, kwargs)
            self.has_other_inputs = self.inputs != before
            self.repeats_step = self.inputs.has_all_sizes and not self.has_other_inputs
            if self.text is None and self.inputs.text_length and self.prompts:
                self.text = read_prompt(self.prompts, self.inputs, type(module).__name__)

    def select_conditional(self, weights: Weights, values: Tensor) -> tuple[Weights, Tensor]:
        """The weights and values of the rows of the batch that belong to the prompt."""
        rows = self.find_conditional_rows(weights.shape[0])
        if rows is None:
            return weights, values
        selected: Any = weights[rows]
        return selected, values[rows]

    def find_conditional_rows(self, batch: int) -> slice | None:
        """The rows of a batch that belong to the prompt; None for all of them."""
        if not self.is_guided or self.rows is None or batch != self.inputs.batch:
            return None
        return slice(self.rows, 2 * self.rows)

    def find_text(self, is_cross: bool, queries: int, keys: int) -> TextPositions:
        """The queries and keys of a call that are words of the prompt."""
        length = self.inputs.text_length
        used = range(length) if self.text is None else sorted({n for row in self.text.used for n in row})
        if is_cross:
            return TextPositions((), tuple(used)) if keys == length else TextPositions()
        start = self._joint_text_start(keys)
        if start is None or queries != keys:
            return TextPositions()
        shifted = tuple(start + number for number in used)
        return TextPositions(shifted, shifted)

    def _joint_text_start(self, length: int) -> int | None:
        """Where the text begins in a sequence of text and image; None if it is not one, or its order is not known."""
        patches = length - self.inputs.text_length
        if not self.inputs.text_length or self.inputs.is_text_last is None or self.inputs.find_grid(patches) is None:
            return None
        return patches if self.inputs.is_text_last else 0

    def name_sequences(self, layer: Layer, labels: dict[str, Labels]) -> None:
        """Names the sequences of a layer by what they are, and adds labels for them."""
        batch, _, queries, keys = layer.sizes
        is_cross = layer.queries != layer.keys
        if is_cross and keys == self.inputs.text_length:
            layer.keys = self._add_prompt(batch, labels) or layer.keys
        grid = self.inputs.find_grid(queries)
        if grid is not None and (is_cross or queries == keys):
            name = grid.name
            if name not in labels:
                labels[name] = self._label_grid(grid, batch)
            layer.queries = name
            layer.keys = layer.keys if is_cross else name
        elif not is_cross and queries == keys and self._joint_text_start(keys) is not None:
            layer.queries = layer.keys = self._add_joint(batch, keys, labels)
        for step in layer.steps.values():
            step.queries, step.keys = layer.queries, layer.keys

    def _prompt_texts(self, batch: int) -> tuple[list[list[str]], list[list[int | None]]] | None:
        """The texts of the prompt's positions for each sequence: several images of a prompt follow each other."""
        if self.text is None or not self.text.texts or batch % len(self.text.texts):
            return None
        repeated = batch // len(self.text.texts)
        return (
            [row for row in self.text.texts for _ in range(repeated)],
            [row for row in self.text.words for _ in range(repeated)],
        )

    def _add_prompt(self, batch: int, labels: dict[str, Labels]) -> str | None:
        texts = self._prompt_texts(batch)
        if texts is None:
            return None
        labels.setdefault("prompt", Labels.tokens(*texts))
        return "prompt"

    def _label_grid(self, grid: LatentGrid, batch: int) -> Labels:
        pictures = self._read_pictures(grid, batch)
        if grid.frames is None:
            labels = Labels.patches(grid.rows, grid.columns)
            images = torch.stack(pictures) if len(pictures) == batch else None
            return Labels("patches", labels.texts * batch, grid=labels.grid, images=images)
        segments = make_segments(grid, batch, 0, bool(pictures))
        blank = Labels("patches", (("",) * grid.tokens,) * batch)
        return blank.with_segments(segments, pictures)

    def _add_joint(self, batch: int, length: int, labels: dict[str, Labels]) -> str:
        """Labels of a sequence of text and image."""
        grid, start = self.inputs.find_grid(length - self.inputs.text_length), self._joint_text_start(length)
        assert grid is not None and start is not None
        if "joint" not in labels:
            count = self.inputs.text_length
            texts, words = self._prompt_texts(batch) or (
                [[str(i) for i in range(count)]] * batch,
                [[None] * count] * batch,
            )
            blank, none = [""] * grid.tokens, [None] * grid.tokens
            is_last = bool(start)
            rows = [[*blank, *row] if is_last else [*row, *blank] for row in texts]
            numbers = [[*none, *row] if is_last else [*row, *none] for row in words]
            pictures = self._read_pictures(grid, batch)
            segments = make_segments(grid, batch, 0 if is_last else count, bool(pictures))
            labels["joint"] = Labels.tokens(rows, numbers).with_segments(segments, pictures)
        return "joint"

    def _read_pictures(self, grid: LatentGrid, batch: int) -> list[Tensor]:
        """The pictures that the pipeline made, uint8: one per sequence, of a video one per frame of the latents."""
        pictures = self.pictures
        if pictures is None or pictures.shape[0] != batch:
            return []
        if (pictures.dim() == 5) != (grid.frames is not None):
            return []
        frames = pictures.unsqueeze(2) if pictures.dim() == 4 else pictures
        if frames.shape[1] != 3 and frames.shape[2] == 3:
            frames = frames.transpose(1, 2)
        count = grid.frames or 1
        picked = [round(index * (frames.shape[2] - 1) / max(count - 1, 1)) for index in range(count)]
        scaled = (frames[:, :, picked].float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).cpu()
        return [shrink_picture(picture.permute(1, 2, 0)) for video in scaled for picture in video.transpose(0, 1)]

    def describe(self) -> list[str]:
        """Remarks for the record."""
        notes = []
        if self.is_guided:
            notes.append("classifier-free guidance: recorded is the half of the batch with the prompt")
        if self.pipeline is not None and self.inputs.text_length and self.text is None:
            notes.append("the tokens of the prompt are not known: the pipeline encoded no prompt, or in an unknown way")
        return notes


def make_segments(grid: LatentGrid, batch: int, start: int, has_pictures: bool) -> list[Segment]:
    """The patches of one image or video per sequence, as segments from a position on."""
    frames = range(grid.frames or 1)
    return [
        Segment(
            "patches",
            sequence,
            start + frame * grid.rows * grid.columns,
            grid.rows,
            grid.columns,
            image=sequence,
            frame=None if grid.frames is None else frame,
            picture=sequence * len(frames) + frame if has_pictures else None,
        )
        for sequence in range(batch)
        for frame in frames
    ]


def replace_method(
    block: ExitStack,
    recorder: Recorder,
    owner: Any,
    name: str,
    action: Callable[[Callable[[], Any], Sequence[Any]], Any],
) -> None:
    """Runs `action` around a method of an object until the block closes; nothing if there is no such method."""
    method = getattr(owner, name, None)
    if not callable(method):
        return

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not recorder.is_open or not recorder.is_counting():
            return method(*args, **kwargs)
        return action(lambda: method(*args, **kwargs), [*args, *kwargs.values()])

    vars(owner)[name] = run
    block.callback(vars(owner).pop, name, None)


def find_pipeline_denoisers(pipeline: Any) -> dict[str, nn.Module]:
    """The models of a diffusers pipeline that denoise, by the name of the component."""
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        return {}
    return {name: components[name] for name in DENOISERS if isinstance(components.get(name), nn.Module)}


def is_denoiser(model: nn.Module) -> bool:
    """Whether a model is a UNet or a transformer of diffusers."""
    return any(each.__module__.startswith(DENOISER_MODULES) for each in type(model).__mro__)
