"""Diffusion models under `foci.watch`: steps, prompts, grids and word maps, compared with a stored softmax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci
from foci.capture.cross_attention import ModuleInputs
from foci.capture.errors import CaptureError
from foci.capture.torch_functions import SdpaCall
from tests.capture.diffusion_models import CASES, TEXT, Case, make_pipeline, make_tokenizer
from tests.tensors import randn

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: see CONTRIBUTING.md")

PROMPT = "a red shoe"
CALLS: dict[str, dict[str, Any]] = {
    "SD": {"height": 16, "width": 24, "guidance_scale": 4.0},
    "SDXL": {"height": 16, "width": 24, "guidance_scale": 4.0},
    "SD3": {"height": 8, "width": 12, "max_sequence_length": 8, "guidance_scale": 4.0},
    "Flux": {"height": 8, "width": 12, "max_sequence_length": 8},
    "PixArt": {
        "height": 8,
        "width": 24,
        "max_sequence_length": 8,
        "clean_caption": False,
        "use_resolution_binning": False,
    },
    "Wan": {"height": 32, "width": 48, "num_frames": 9, "max_sequence_length": 8},
    "CogVideoX": {"height": 32, "width": 48, "num_frames": 9, "max_sequence_length": TEXT},
}
GRIDS = {
    "SD": (8, 12),
    "SDXL": (8, 12),
    "SD3": (2, 3),
    "Flux": (2, 3),
    "PixArt": (2, 6),
    "Wan": (3, 2, 3),
    "CogVideoX": (3, 2, 3),
}


@contextmanager
def store_softmax() -> Iterator[list[Tensor]]:
    """The weights of every call of F.scaled_dot_product_attention, computed by an explicit softmax."""
    stored: list[Tensor] = []
    own = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        scores = query.double() @ key.double().mT * (kwargs.get("scale") or query.shape[-1] ** -0.5)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        stored.append(scores.softmax(-1).float())
        return own(query, key, value, attn_mask, *args, **kwargs)

    F.scaled_dot_product_attention = attend
    try:
        yield stored
    finally:
        F.scaled_dot_product_attention = own


def make_inputs(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(case.latents), torch.randn(1, TEXT, case.width)


def record(case: Case, model: nn.Module, latents: Tensor, text: Tensor, steps: int = 2, **options: Any) -> foci.Record:
    with torch.no_grad(), foci.watch(model, **options) as seen:
        for step in range(steps):
            case.run(model, latents * 0.9**step, text)
    return seen


@pytest.mark.parametrize("family", CASES)
def test_denoisers_equal_a_stored_softmax_at_every_step(family: str) -> None:
    case = CASES[family]
    model, (latents, text) = case.model(), make_inputs(case)
    with torch.no_grad(), store_softmax() as stored:
        plain = [case.run(model, latents * 0.9**step, text)[0] for step in range(2)]
    with torch.no_grad(), foci.watch(model) as seen:
        watched = [case.run(model, latents * 0.9**step, text)[0] for step in range(2)]
    assert all(map(torch.equal, plain, watched))
    assert seen.steps == 2
    assert len(seen.layers) * 2 == len(stored)
    for step in range(2):
        found = [layer.dense() for layer in seen.at(step=step).layers.values()]
        expected = stored[step * len(found) : (step + 1) * len(found)]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    if family == "Sana":
        assert all("linear attention" in line for line in seen.unseen)
    else:
        assert seen.unseen == []


@pytest.mark.parametrize("family", CASES)
def test_one_marked_patch_and_one_marked_word_lie_where_the_labels_say(family: str) -> None:
    """A changed patch or word changes the keys of its own position in the first layer that reads it."""
    case = CASES[family]
    model, (latents, text) = case.model(), make_inputs(case)
    frames, rows, columns = case.sizes
    words = [f" w{number}" for number in range(TEXT)]
    labels = {"prompt": foci.Labels.tokens([words])}
    before = record(case, model, latents, text, 1, labels=labels)
    other_text = text.clone()
    other_text[0, 4] += 1
    after = record(case, model, latents, other_text, 1, labels=labels)
    name = next(name for name, layer in before.layers.items() if layer.keys in {"prompt", "joint"})
    changed = find_changed_keys(before, after, name)
    # The text refiner of HunyuanVideo mixes the words.
    expected = words if family == "HunyuanVideo" else [" w4"]
    assert [before.labels_of(before.layers[name])[1].texts[0][n] for n in changed] == expected
    if family in {"UNet", "SDXL"}:
        # A convolution reads the latents first: its grid is tested with hand-made weights.
        return
    marked = latents.clone()
    marked[case.latent_patch(rows - 1, 1)] += 1
    after = record(case, model, marked, text, 1, labels=labels)
    if family == "Sana":
        queries = before.labels_of(before.layers[name])[0].texts[0]
        assert queries[(rows - 1) * columns + 1] == f"{rows - 1},1"
        return
    name = next(name for name, layer in before.layers.items() if layer.keys == layer.queries != "text")
    changed = find_changed_keys(before, after, name)
    where = f"{rows - 1},1" if case.grid.startswith("image") else f"{frames - 1}:{rows - 1},1"
    assert [before.labels_of(before.layers[name])[1].texts[0][n] for n in changed] == [where]


def find_changed_keys(before: foci.Record, after: foci.Record, name: str) -> list[int]:
    keys = [seen.layers[name].weights.call.k for seen in (before, after)]  # type: ignore[union-attr]
    return [*(keys[0] != keys[1]).any(-1).any(1)[0].nonzero().flatten().tolist()]


@pytest.mark.parametrize("family", [family for family, case in CASES.items() if case.joint])
def test_joint_attention_has_four_quadrants(family: str) -> None:
    case = CASES[family]
    model, (latents, text) = case.model(), make_inputs(case)
    seen = record(case, model, latents, text, labels={"prompt": foci.Labels.tokens([["a"] * TEXT])})
    layer = next(layer for layer in seen.layers.values() if layer.keys == "joint")
    dense, patches = layer.dense()[0], layer.shape[-1] - TEXT
    words = slice(patches, None) if case.joint == "last" else slice(0, TEXT)
    image = slice(0, patches) if case.joint == "last" else slice(TEXT, None)
    torch.testing.assert_close(layer.block("image", "text"), dense[:, image, words])
    torch.testing.assert_close(layer.block("text", "image"), dense[:, words, image])
    shares = layer.quadrants()
    torch.testing.assert_close(shares["image->text"], dense[:, image, words].sum(-1).mean(-1))
    torch.testing.assert_close(shares["text->text"] + shares["text->image"], torch.ones(2))
    forward = seen.image_map(0, direction="text->image")
    backward = seen.image_map(0, direction="image->text")
    assert forward.shape == backward.shape == case.sizes[3 - forward.dim() :]
    assert not torch.allclose(forward, backward)


@pytest.mark.parametrize("family", CALLS)
def test_a_pipeline_is_watched_in_one_line(family: str) -> None:
    pipe = make_pipeline(family)
    call = CALLS[family] | {"num_inference_steps": 3, "prompt": PROMPT}
    guided = {} if family == "Flux" else {"negative_prompt": "blurry"}
    before = pipe(**call, **guided, generator=torch.Generator().manual_seed(0), output_type="pt")[0]
    with foci.watch(pipe) as seen:
        after = pipe(**call, **guided, generator=torch.Generator().manual_seed(0), output_type="pt")[0]
    torch.testing.assert_close(torch.as_tensor(after), torch.as_tensor(before), atol=1e-5, rtol=1e-5)
    assert "encode_prompt" not in vars(pipe)
    assert {"step", "set_timesteps"}.isdisjoint(vars(pipe.scheduler))
    assert (seen.steps, seen.unseen) == (3, [])
    assert seen.model == type(pipe).__name__
    text = seen.labels.get("prompt", seen.labels.get("joint"))
    assert text is not None
    texts = [each for each in text.texts[0] if each and "," not in each]
    assert texts[:5] == ["<s>", " a", " red", " shoe", " </s>"]
    assert text.batch == 1
    assert seen.image_map("shoe").shape == GRIDS[family]
    assert seen.image_map("shoe", step="each").shape == (3, *GRIDS[family])
    words = [word for word, _ in seen.words_for((0, 0, 0.5, 0.5))]
    assert {"a", "red", "shoe"} <= {*words}
    shown = next(each for each in seen.labels.values() if each.grids(0))
    assert shown.picture(0, 0) is not None
    is_guided = any("classifier-free guidance" in note for note in seen.notes)
    assert is_guided == (family not in {"Flux", "Wan"})


def test_word_maps_are_those_of_the_conditional_half_averaged_as_daam_does() -> None:
    pipe = make_pipeline("SD")
    call = CALLS["SD"] | {"num_inference_steps": 2, "prompt": PROMPT}
    with store_softmax() as stored:
        pipe(**call, generator=torch.Generator().manual_seed(0))
    with foci.watch(pipe) as seen:
        pipe(**call, generator=torch.Generator().manual_seed(0))
    maps = []
    for weights in stored:
        queries, keys = weights.shape[-2:]
        if weights.shape[:2] == (2, 2) and keys == 8:
            rows = {96: 8, 24: 4}[queries]
            heat = weights[1, :, :, 3].mean(0).view(1, 1, rows, -1)
            maps.append(F.interpolate(heat, (8, 12), mode="bicubic").clamp(min=0) if rows == 4 else heat)
    assert len(maps) == 2 * 7
    expected = torch.cat(maps).mean((0, 1))
    torch.testing.assert_close(seen.image_map("shoe"), expected, atol=1e-5, rtol=1e-4)
    up = seen.image_map("shoe", layer="up_blocks")
    down, mid = seen.image_map("shoe", layer="down_blocks"), seen.image_map("shoe", layer="mid_block")
    assert up.shape == down.shape == (8, 12)
    assert mid.shape == (4, 6)


@pytest.mark.parametrize("family", ["SD", "SD3", "Wan"])
def test_keeping_the_weights_on_text_gives_the_same_maps(family: str, tmp_path: Path) -> None:
    pipe = make_pipeline(family)
    call = CALLS[family] | {"num_inference_steps": 2, "prompt": PROMPT}
    seen = {}
    for name, keep in {"lazy": "lazy", "text": foci.Keep(keys="text"), "rows": foci.Keep(queries="text")}.items():
        if name == "rows" and family != "SD3":
            continue
        with foci.watch(pipe, keep=keep) as seen[name]:  # type: ignore[arg-type]
            pipe(**call, generator=torch.Generator().manual_seed(0))
    backward = {"direction": "image->text"}
    for step in (None, 0, 1):
        kept = seen["text"].image_map("shoe", step=step, **backward)  # type: ignore[arg-type]
        lazy = seen["lazy"].image_map("shoe", step=step, **backward)  # type: ignore[arg-type]
        torch.testing.assert_close(kept, lazy, atol=1e-5, rtol=1e-4)
    if "rows" in seen:
        torch.testing.assert_close(seen["rows"].image_map("shoe"), seen["lazy"].image_map("shoe"))
    layer = next(iter(seen["text"].layers.values()))
    # Padding is left out, and so are layers that do not attend to text.
    assert len(layer.kept_keys) == {"SD": 5, "SD3": 10, "Wan": 5}[family]
    assert len(seen["text"].layers) == {"SD": 7, "SD3": 2, "Wan": 2}[family]
    assert seen["text"].nbytes < seen["lazy"].nbytes / 3
    seen["text"].save(tmp_path / "kept.foci")
    loaded = foci.load(tmp_path / "kept.foci")
    torch.testing.assert_close(loaded.image_map("shoe", **backward), seen["text"].image_map("shoe", **backward))
    seen["text"].show()
    seen["text"].save(tmp_path / "kept.html")


def test_several_prompts_and_images_per_prompt() -> None:
    pipe = make_pipeline("SD")
    call = CALLS["SD"] | {"num_inference_steps": 1, "num_images_per_prompt": 2}
    with foci.watch(pipe) as seen:
        pipe(["a red shoe", "the table"], **call)
    assert [row[1] for row in seen.labels["prompt"].texts] == [" a", " a", " the", " the"]
    assert seen.image_map("table", batch=3).shape == (8, 12)
    with pytest.raises(ValueError, match="query must be a word of the text"):
        seen.image_map("table", batch=0)


def test_a_denoiser_of_ones_own_is_watched_with_steps() -> None:
    """Blocks in plain PyTorch: labels by hand for the image and for the text that it attends to."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn1 = nn.MultiheadAttention(8, 2, batch_first=True)
            self.attn2 = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            x = x + self.attn1(x, x, x, need_weights=False)[0]
            return x + self.attn2(x, context, context, need_weights=False)[0]

    torch.manual_seed(0)
    model, text = Block().eval(), torch.randn(1, 5, 8)
    labels = {"input": foci.Labels.patches(2, 3), "context": foci.Labels.tokens([["a", " red", " shoe", "", ""]])}
    for keep in ("lazy", foci.Keep(keys="text")):
        with torch.no_grad(), foci.watch(model, steps=True, labels=labels, keep=keep) as seen:  # type: ignore[arg-type]
            x = torch.ones(1, 6, 8)
            for _ in range(4):
                x = model(x, text)
        assert seen.steps == 4
        assert seen.image_map("shoe", step="each").shape == (4, 2, 3)
    assert [layer.kept_keys for layer in seen.layers.values()] == [(0, 1, 2)]
    with torch.no_grad(), foci.watch(model) as plain:
        model(x, text), model(x, text)
    assert (plain.steps, len(plain.layers)) == (1, 4)


def watch_twice(pipe: Any, call: dict[str, Any]) -> None:
    with foci.watch(pipe):
        pipe(**call)
        pipe(**call)


def test_wrong_use_is_refused() -> None:
    pipe = make_pipeline("SD")
    call = CALLS["SD"] | {"num_inference_steps": 2, "prompt": PROMPT}
    with pytest.raises(CaptureError, match="must contain one call of the pipeline, got a second one"):
        watch_twice(pipe, call)
    assert {"step", "set_timesteps"}.isdisjoint(vars(pipe.scheduler))
    with foci.watch(pipe) as seen:
        pipe(**call)
    with pytest.raises(ValueError, match=r"step must be from -2 to 1, got 2"):
        seen.at(step=2)
    with pytest.raises(ValueError, match=r"query must be a word of the text \(<s> a red shoe </s>\) or a position"):
        seen.image_map("boot")
    with pytest.raises(CaptureError, match="above limit"), foci.watch(pipe, limit=100_000):
        pipe(**call)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module or a pipeline of diffusers, got Tokenizers"):
        foci.watch(make_tokenizer()).__enter__()


def test_given_prompt_embeddings_have_no_tokens() -> None:
    pipe = make_pipeline("SD")
    embeddings = pipe.encode_prompt(PROMPT, "cpu", 1, True)
    with foci.watch(pipe) as seen:
        pipe(
            prompt_embeds=embeddings[0],
            negative_prompt_embeds=embeddings[1],
            **CALLS["SD"] | {"num_inference_steps": 1},
        )
    assert any("tokens of the prompt are not known" in note for note in seen.notes)
    assert seen.image_map(2).shape == (8, 12)
    assert seen["cross.L0"].shape[0] == 1


def test_layers_without_text_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-attention has nothing to keep for `Keep(keys="text")`: its weights are not computed."""
    computed = count_full_recordings(monkeypatch)
    case = CASES["UNet"]
    model, (latents, text) = case.model(), make_inputs(case)
    with torch.no_grad():
        plain = case.run(model, latents, text)
        with foci.watch(model, keep=foci.Keep(keys="text")) as seen:
            watched = case.run(model, latents, text)
    assert set(computed) == {TEXT}
    assert len(computed) == len(seen.layers) == seen.calls // 2
    assert torch.equal(watched.sample, plain.sample)


def count_full_recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the keys of all calls that are recorded in full, not like those of an earlier step."""
    computed: list[int] = []
    own = SdpaCall.compute

    def compute(call: SdpaCall) -> Any:
        computed.append(call.k.shape[-2])
        return own(call)

    monkeypatch.setattr(SdpaCall, "compute", compute)
    return computed


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("UNet", "SD3", "Wan")),
        ("UNet", torch.bfloat16),
        ("Wan", torch.bfloat16),
    ],
)
def test_weights_on_text_equal_a_stored_softmax_at_every_step(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first step the calls are recorded in a few operations."""
    case = CASES[family]
    model, (latents, text) = case.model().to(dtype), (each.to(dtype) for each in make_inputs(case))
    with torch.no_grad(), store_softmax() as stored:
        plain = [case.run(model, latents * 0.9**step, text)[0] for step in range(3)]
    stored = [each for each in stored if each.shape[-1] != each.shape[-2] or case.joint]
    computed = count_full_recordings(monkeypatch)
    words = foci.Labels.tokens([["a", " red", " shoe", "", "", ""]])
    with torch.no_grad(), foci.watch(model, keep=foci.Keep(keys="text"), labels={"prompt": words}) as seen:
        watched = [case.run(model, latents * 0.9**step, text)[0] for step in range(3)]
    assert all(map(torch.equal, plain, watched))
    layers = list(seen.layers.values())
    assert (seen.steps, 3 * len(layers), len(computed)) == (3, len(stored), len(layers))
    for number, layer in enumerate(layers):
        start = layer.shape[-1] - TEXT if case.joint else 0
        assert layer.kept_keys == tuple(range(start, start + 3))
        for step in range(3):
            expected = stored[step * len(layers) + number][..., start : start + 3]
            kept, found = layer.at(step).kept, layer.at(step).columns([*layer.kept_keys])
            assert kept is not None
            assert kept["key_weights"].dtype == (torch.float16 if dtype == torch.bfloat16 else torch.float32)
            torch.testing.assert_close(
                found.float(), expected, atol=5e-4 if dtype == torch.bfloat16 else 1e-6, rtol=1e-3
            )


@pytest.mark.parametrize("family", ["SD", "SDXL"])
def test_only_the_conditional_half_is_computed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipeline(family)
    call = CALLS[family] | {"num_inference_steps": 4, "prompt": PROMPT, "num_images_per_prompt": 2}
    with foci.watch(pipe) as lazy:
        pipe(**call, generator=torch.Generator().manual_seed(0))
    computed, batches = count_full_recordings(monkeypatch), set()
    own = foci.Keep.compute_text_of_plain_call

    def compute(*arguments: Any) -> Any:
        kept = own(*arguments)
        batches.add(kept["key_weights"].shape[0])
        return kept

    monkeypatch.setattr(foci.Keep, "compute_text_of_plain_call", compute)
    with foci.watch(pipe, keep=foci.Keep(keys="text")) as seen:
        pipe(**call, generator=torch.Generator().manual_seed(0))
    assert batches == {2}
    assert len(computed) == len(seen.layers)
    assert seen.calls == lazy.calls
    for name, layer in seen.layers.items():
        for step in range(4):
            found, expected = (each.at(step).columns([*layer.kept_keys]) for each in (layer, lazy.layers[name]))
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_a_change_of_the_latents_between_steps_is_recorded() -> None:
    """A call of another length is not taken for one of an earlier step, nor is one beyond the limit."""
    case = CASES["UNet"]
    model, (latents, text) = case.model(), make_inputs(case)
    keep = foci.Keep(keys="text")
    with torch.no_grad(), foci.watch(model, keep=keep) as seen:
        for size in (6, 6, 4, 4):
            case.run(model, latents[..., :size], text)
    shapes = {layer.shape[2] for layer in seen.layers.values()}
    assert {48, 32} <= shapes
    assert {len(layer.steps) for layer in seen.layers.values()} == {2}
    limit = seen.nbytes // 2
    with pytest.raises(CaptureError, match="above limit"):
        record(case, model, latents, text, 4, keep=keep, limit=limit)


def test_text_of_another_length_in_a_sequence_of_the_same_length() -> None:
    """6 tokens of text behind 4 patches, then 4 tokens behind 6 patches."""
    case = CASES["SD3"]
    model = case.model()
    channels, side = case.latents[1], model.config.patch_size
    with torch.no_grad(), foci.watch(model, keep=foci.Keep(keys="text")) as seen:
        for columns, words in ((2, 6), (2, 6), (3, 4), (3, 4)):
            case.run(model, randn(1, channels, 2 * side, columns * side), randn(1, words, case.width))
    for layer in seen.layers.values():
        kept = [step.kept_keys for step in layer.steps.values()]
        assert kept == [tuple(range(4, 10))] * 2 + [tuple(range(6, 10))] * 2


class Attend(nn.Module):
    """An attention module whose name does not tell what it attends to."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, mask: Any = None) -> Tensor:
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in (hidden_states, keys))
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask).transpose(1, 2).flatten(2)


class ChangingDenoiser(nn.Module):
    """A denoiser with a module that first runs at step 2, and one with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.words, self.masked, self.later = (Attend() for _ in range(4))
        self.step = -1

    def forward(self, sample: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        self.step += 1
        x = sample.flatten(2).mT
        x = x + self.own(x) + self.words(x, encoder_hidden_states)
        x = x + self.masked(x, encoder_hidden_states, torch.zeros(x.shape[1], encoder_hidden_states.shape[1]))
        if self.step > 1:
            x = x + self.later(x, encoder_hidden_states)
        return x.mT.unflatten(2, sample.shape[2:])


@pytest.mark.parametrize("words", [6, 3])
def test_modules_are_told_apart_at_all_steps(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is noted of a module after its first step; with 6 words the lengths of text and image are the same."""
    noted: list[str] = []
    own = ModuleInputs.note

    def note(self: ModuleInputs, name: str, *arguments: Any) -> None:
        noted.append(name)
        own(self, name, *arguments)

    monkeypatch.setattr(ModuleInputs, "note", note)
    torch.manual_seed(0)
    model, latents, text = ChangingDenoiser().eval(), torch.randn(1, 8, 2, 3), torch.randn(1, words, 8)
    with torch.no_grad(), store_softmax() as stored:
        plain = [model(latents * 0.9**step, text) for step in range(4)]
    model.step = -1
    keep = foci.Keep(keys="text")
    with torch.no_grad(), foci.watch(model, keep=keep, steps=True) as seen:
        watched = [model(latents * 0.9**step, text) for step in range(4)]
    torch.testing.assert_close(watched, plain)
    assert [noted.count(name) for name in ("", "own", "words", "masked", "later")] == [4, 1, 1, 1, 1]
    assert {name: [*layer.steps] for name, layer in seen.layers.items()} == {
        "words": [0, 1, 2, 3],
        "masked": [0, 1, 2, 3],
        "later": [2, 3],
    }
    own_calls = {"words": 1, "masked": 2, "later": 3}
    for name, layer in seen.layers.items():
        assert layer.queries != layer.keys
        for step, at in layer.steps.items():
            expected = stored[3 * step + max(step - 2, 0) + own_calls[name]]
            torch.testing.assert_close(at.columns(range(words)), expected, atol=1e-5, rtol=1e-4)
    assert (seen.calls, seen.unseen) == (14, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs in Triton's interpreter")
@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_calls_with_many_entries_need_the_kernel(is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it they are recorded in full at every step."""
    pytest.importorskip("triton")
    pipe = make_pipeline("SDXL")
    call = CALLS["SDXL"] | {"num_inference_steps": 2, "prompt": PROMPT}
    with foci.watch(pipe) as lazy:
        pipe(**call, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("foci.capture.text_weights.MAX_SHORT_ENTRIES", 10)
    monkeypatch.setattr("foci.statistics.cuda.arguments.is_on_gpu", lambda x: is_on_gpu)
    monkeypatch.setattr("foci.statistics.cuda.columns.COLUMNS_LAUNCHES", {})
    computed = count_full_recordings(monkeypatch)
    with foci.watch(pipe, keep=foci.Keep(keys="text")) as seen:
        pipe(**call, generator=torch.Generator().manual_seed(0))
    assert len(computed) == len(seen.layers) * (1 if is_on_gpu else 2)
    for name, layer in seen.layers.items():
        for step in range(2):
            found, expected = (each.at(step).columns([*layer.kept_keys]) for each in (layer, lazy.layers[name]))
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
