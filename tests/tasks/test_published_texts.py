"""The published datasets are read as they were published."""

from pathlib import Path

import pytest
import torch

from foci.tasks.generation import Generation, GenerationSettings, Passage
from foci.tasks.translation import Translation, TranslationSettings


@pytest.mark.data
def test_captions_are_read_from_parallel_files(data: Path) -> None:
    folder = data / "multi30k" / "tok"
    pairs = Translation.read(
        [folder / f"val.lc.norm.tok.{language}.gz" for language in ("en", "de")], TranslationSettings()
    )
    assert len(pairs) == 1014
    assert pairs[0].source.startswith("a group of men")
    assert not [
        problem
        for problem in Translation.check([data / "multi30k" / f"val.{side}.gz" for side in ("en", "de")], None)  # type: ignore[arg-type]
        if problem.severity == "error"
    ]


@pytest.mark.data
def test_everyday_sentences_are_read_from_a_packed_table(data: Path) -> None:
    for part, count in (("dev", 1722), ("test", 2577)):
        assert len(Translation.read([data / "tatoeba_en_de" / f"{part}.tsv.xz"], TranslationSettings())) == count


@pytest.mark.data
def test_the_last_tenth_of_shakespeare_is_held_out(data: Path) -> None:
    text = Generation.read([data / "tinyshakespeare" / "input.txt"], GenerationSettings())
    train, dev = Generation.split(text, 0.1, torch.Generator())
    assert [len(part[0].text) for part in (train, dev) if isinstance(part[0], Passage)] == [1_003_854, 111_540]
    assert Generation.from_examples(GenerationSettings(), train).tokenizer.vocabulary == 4 + 65
