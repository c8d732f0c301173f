"""Summarization: the words after "about" are the summary, also words that no training had."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from foci.decoding import Answer, Beam
from foci.nn.pointer_generator import CopyingTransformer
from foci.tasks.summarization import Document, Summarization, SummarizationSettings
from tests.tasks.lessons import Lesson, lesson

SMALL = (
    *("task.size=tiny", "task.width=48", "task.layers=1", "task.heads=2", "task.hidden=96", "task.dropout=0.0"),
    *("task.tokenizer=words", "task.max_length=24", "task.max_summary=4", "task.beam=2"),
    *("train.batch_tokens=800", "train.steps=200", "train.rate=0.004"),
)
WORDS = [first + second for first in ("ba", "ke", "mi", "so", "tu") for second in ("la", "ne", "ri", "to", "vu")]


def document(chance: random.Random) -> dict[str, str]:
    """A letter that says what it is about, somewhere."""
    words = [chance.choice(WORDS) for _ in range(chance.randint(4, 10))]
    topic = [chance.choice(WORDS) for _ in range(2)]
    place = chance.randint(0, len(words))
    return {"document": " ".join([*words[:place], "about", *topic, *words[place:]]), "summary": " ".join(topic)}


def written(path: Path, count: int, seed: int) -> Path:
    chance = random.Random(seed)
    path.write_text("".join(json.dumps(document(chance)) + "\n" for _ in range(count)))
    return path


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Lesson:
    folder = tmp_path_factory.mktemp("letters")
    data, dev = written(folder / "train.jsonl", 600, 1), written(folder / "dev.jsonl", 60, 2)
    return lesson("summarization", folder, data, dev, *SMALL)


def test_letters_are_summarised(learned: Lesson) -> None:
    assert learned.before < 30.0
    assert learned.after > 85.0


def test_the_record_has_document_summary_and_copy_weights(learned: Lesson) -> None:
    task, model, _ = learned.trained
    example = learned.dev[0]
    record = task.record_attention(model, example)
    source = [text.strip() for text in record.labels["source"].texts[0]]
    assert source == [*example.text.split(), "<stop>"]
    written = [text.strip() for text in record.labels["summary"].texts[0]]
    assert written == [*(record.answer or "").split(), "<stop>"]
    assert record["copy.L0"].shape == (1, 1, len(written), len(source))
    assert record["cross.L0H0"].shape == (1, len(written), len(source))


def test_answers_keep_the_order_of_the_documents(learned: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    task, model, _ = learned.trained
    with torch.no_grad():
        together = task.decode(model, learned.dev[:10])
        monkeypatch.setattr("foci.tasks.summarization.DECODE_TOKENS", {"cpu": 1})
        assert task.decode(model, learned.dev[:10]) == together


def test_consensus_selects_by_minimum_bayes_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Summarization.from_examples(
        SummarizationSettings(tokenizer="words"), [Document("sale meeting on monday", "sale")]
    )
    proposed = [(["sale"], -1.0), (["meeting", "on"], -1.5), (["meeting", "on", "monday"], -1.6), (["meeting"], -1.7)]
    first, *others = (Answer(task.tokenizer.encode(" ".join(said)), score, True) for said, score in proposed)
    asked: list[Beam] = []

    def found(model: object, sources: list[list[int]], *, method: Beam, **options: object) -> list[Answer]:
        asked.append(method)
        return [first.with_others(others)]

    monkeypatch.setattr("foci.tasks.summarization.generate", found)
    assert task.tokenizer.decode(task.summarize(torch.nn.Identity(), [[5]])[0]) == "sale"
    task.settings = task.settings.replace(consensus=2.0)
    assert task.tokenizer.decode(task.summarize(torch.nn.Identity(), [[5]])[0]) == "meeting on"
    assert [method.best for method in asked] == [1, 4]


def test_rouge_has_known_values() -> None:
    task = Summarization.from_examples(SummarizationSettings(tokenizer="words"), [Document("a b c d", "a b")])
    examples = [Document("x", "the cats sat"), Document("x", "one two three four")]
    found = task.score(["the cat sat", "four three"], examples)
    # "cats" and "cat" have one stem; of two words in the wrong order one makes the longest common row.
    assert found["rouge1"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert found["rougeL"] == pytest.approx(100 * (1 + 1 / 3) / 2)
    assert next(iter(found)) == "rougeL"


def test_copying_can_be_off_and_a_document_is_truncated() -> None:
    settings = SummarizationSettings(tokenizer="words", size="tiny", copy=False, max_length=3, max_summary=2)
    example = Document("a b c d", "a b c")
    task = Summarization.from_examples(settings, [example])
    assert not isinstance(task.model(), CopyingTransformer)
    batch = task.batch([example], True, torch.Generator())
    assert batch["real"].sum() == 4
    assert int((batch["targets"] != 0).sum()) == 3


def test_tokens_are_dropped_in_training_but_not_the_last() -> None:
    text = " ".join(map(str, range(50)))
    task = Summarization.from_examples(SummarizationSettings(tokenizer="words", forget=0.5), [Document(text, "1")])
    whole = task.batch([Document(text, "1")], False, torch.Generator())
    some = task.batch([Document(text, "1")], True, torch.Generator().manual_seed(1))
    counts = [int(each["real"].sum()) for each in (whole, some)]
    assert counts[0] == 51
    assert 10 < counts[1] < 45
    assert int(some["source"][0, counts[1] - 1]) == 2


def test_all_problems_are_reported_line_by_line(tmp_path: Path) -> None:
    table = tmp_path / "letters.jsonl"
    rows = [{"document": "long text", "summary": "text"}, {"document": "x"}, {"document": "...", "summary": "x"}]
    rows.append({"document": "ab", "summary": "longer than it"})
    table.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    found = [str(each) for each in Summarization.check([table], SummarizationSettings())]
    wanted = ["2: error: a line must have the keys document, summary", "3: error: document must contain words"]
    wanted += ["4: warning: the summary is not shorter than the document", "5: error: a line must be valid JSON"]
    assert len(found) == 4
    assert all(each in told for each, told in zip(wanted, found, strict=True))
    with pytest.raises(ValueError, match=r"letters.jsonl:2: a line must have the keys"):
        Summarization.read([table], SummarizationSettings())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_rdrop_is_zero_only_without_dropout(dropout: float) -> None:
    example = Document("a b c d", "a b")
    settings = SummarizationSettings(tokenizer="words", size="tiny", dropout=dropout, smoothing=0.0)
    losses = []
    for agreement in (0.0, 1e-9, 50.0):
        task = Summarization.from_examples(settings.replace(agreement=agreement), [example])
        torch.manual_seed(1)
        model = task.model().train()
        torch.manual_seed(2)
        losses.append(task.loss(model, task.batch([example], True, torch.Generator()))[0].item())
    if dropout:
        assert losses[2] > losses[1] + 0.1
    else:
        assert losses[1:] == pytest.approx(losses[:2], rel=1e-5)


def test_a_left_out_sentence_becomes_the_target() -> None:
    example = Document("One is red. Two are blue. Three sleep!", "colours")
    settings = SummarizationSettings(tokenizer="words", left_out=1.0)
    task = Summarization.from_examples(settings, [example, Document("Short.", "x")])
    generator = torch.Generator().manual_seed(1)
    seen = [task.epoch_examples([example, Document("Short.", "x")], True, generator) for _ in range(8)]
    assert {len(each) for each in seen} == {3}
    made = {each[2].left_out: each[2] for each in seen}
    assert set(made) == {0, 1, 2}
    assert task.tokenizer.decode(task.source(made[1])) == "One is red. Three sleep!"
    assert task.tokenizer.decode(task.target(made[1])) == "Two are blue."
    inputs = task.batch([example, made[1]], True, torch.Generator())["inputs"]
    assert inputs[:, 0].tolist() == [1, 3]
    assert task.epoch_examples([example], False, torch.Generator()) == [example]
