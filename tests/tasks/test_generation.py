"""A language model learns the sentences of a small world, and measures every character of a text once."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

import foci
from foci.tasks.generation import Generation, GenerationSettings, Passage, cut_windows
from foci.tasks.model_file import load_trained_model
from foci.training import read_config, train

SENTENCES = ("the cat sat. ", "a dog ran far. ", "she sings well. ")
TINY = ("task.size=tiny", "task.width=32", "task.heads=2", "task.layers=1", "task.context=32", "task.dropout=0")
QUICK = ("train.device=cpu", "train.batch_tokens=512", "train.rate=0.006", "train.warmup=10", "train.steps=160")


def test_a_small_model_learns_the_sentences(tmp_path: Path) -> None:
    chance = random.Random(1)
    data = tmp_path / "text.txt"
    data.write_text("".join(chance.choice(SENTENCES) for _ in range(2000)))
    config = read_config("generation", None, [*TINY, *QUICK], data=[str(data)])
    found = train(config, tmp_path / "run", quiet=True)
    # Nobody can know which sentence comes next: ln 3 nats for each, of about 14 characters.
    floor = math.log(3) / 14
    assert floor < float(found["nats_per_character"]) < 3 * floor
    task, model, _ = load_trained_model(tmp_path / "run")
    assert float(task.score(task.decode(task.model().eval(), [Passage("the cat sat. ")]), [])["nats_per_character"]) > 2
    calm = type(task).from_learned_state(task.settings.replace(temperature=0.0, new_tokens=12), task.learned_state())
    written = calm.answer(model, [calm.parse_input("a dog ran")])[0]
    assert written.startswith("a dog ran far. ")
    record = calm.record_attention(model, calm.parse_input("a dog ran"))
    assert record.prompt == len("a dog ran") + 1
    assert record["L0H1"].shape[-1] == len(record.labels["input"])


@pytest.mark.parametrize(("length", "context", "stride"), [(1, 4, 4), (4, 4, 4), (5, 4, 4), (23, 4, 4), (23, 8, 3)])
def test_every_token_is_predicted_once(length: int, context: int, stride: int) -> None:
    tokens = torch.arange(length + 1)
    found = cut_windows(tokens, context, stride)
    fresh = [token for window in found for token in window.tokens[-window.counted :].tolist()]
    assert fresh == list(range(1, length + 1))
    assert all(len(window.tokens) <= context + 1 for window in found)


@torch.no_grad()
def test_scoring_agrees_with_the_model_token_by_token() -> None:
    settings = GenerationSettings(size="tiny", context=8, stride=3)
    text = "to be or not to be"
    task = Generation.from_examples(settings, [Passage(text)])
    model = task.model().eval()
    tokens = [1, *task.tokenizer.encode(text)]
    expected = 0.0
    for window in cut_windows(torch.tensor(tokens), 8, 3):
        logits = model(window.tokens[None, :-1]).logits[0].log_softmax(-1)
        chosen = logits.gather(1, window.tokens[1:, None]).squeeze(1)
        expected -= float(chosen[-window.counted :].sum())
    nats, characters = task.decode(model, [Passage(text)])[0]
    assert nats == pytest.approx(expected, rel=1e-5)
    assert characters == len(text)


def test_epoch_windows_start_at_an_offset_that_depends_only_on_the_seed() -> None:
    task = Generation.from_examples(GenerationSettings(size="tiny", context=4), [Passage("abcdefghijklmnop")])
    text = [Passage("abcdefghijklmnop")]

    def cut(seed: int) -> list[list[int]]:
        return [
            window.tokens.tolist() for window in task.epoch_examples(text, True, torch.Generator().manual_seed(seed))
        ]

    assert cut(1) == cut(1)
    assert len({str(cut(seed)) for seed in range(8)}) > 1
    assert all(len(row) == 5 for seed in range(8) for row in cut(seed))


def test_the_end_of_a_text_or_some_passages_are_held_out(tmp_path: Path) -> None:
    train_part, dev = Generation.split([Passage("0123456789")], 0.2, torch.Generator())
    assert (train_part, dev) == ([Passage("01234567")], [Passage("89")])
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(10)))
    passages = Generation.read([tmp_path / "a.jsonl"], GenerationSettings())
    train_part, dev = Generation.split(passages, 0.2, torch.Generator().manual_seed(1))
    assert (len(train_part), len(dev)) == (8, 2)
    assert {*train_part, *dev} == {Passage(str(n)) for n in range(10)}


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"a\.txt must hold text, got an empty file"):
        Generation.read([tmp_path / "a.txt"], GenerationSettings())
    assert [str(problem) for problem in Generation.check([tmp_path / "a.txt"], GenerationSettings())] == [
        f"{tmp_path}/a.txt: error: the file must hold text, got an empty file"
    ]


def test_a_long_prompt_shortens_the_continuation_before_it_is_truncated() -> None:
    torch.manual_seed(0)
    task = Generation.from_examples(GenerationSettings(size="tiny", context=16, new_tokens=12), [Passage("abcdef" * 9)])
    model = task.model().eval()
    for length, read, most in ((3, 4, 12), (9, 10, 6), (11, 12, 4), (30, 12, 4)):
        options = task._generation_options(("abcdef" * 9)[:length])
        assert len(options["prompt"][0]) == read
        assert 0 < len(foci.generate(model, **options)[0].tokens) <= most
        assert task.is_truncated(Passage(("abcdef" * 9)[:length])) == (length == 30)
    assert task.describe_read_part(Passage("abcdef" * 5)) == "the last 12 of 30 characters"


@pytest.mark.parametrize("tokenizer", ["characters", "bytes", "words"])
def test_the_streamed_parts_are_the_answer(tokenizer: str) -> None:
    torch.manual_seed(0)
    passage = Passage("größer als zwei Häuser")
    settings = GenerationSettings(size="tiny", tokenizer=tokenizer, context=64, new_tokens=20)  # type: ignore[arg-type]
    task = Generation.from_examples(settings, [passage])
    model = task.model().eval()
    first, *parts = task.stream(model, passage)
    assert first == passage.text
    assert len(parts) > 2
    assert first + "".join(parts) == task.answer(model, [passage])[0]
