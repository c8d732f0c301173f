"""The pairs of sentences that the translator is trained on: German that is right, and no sentence of a test set."""

import argparse
import lzma
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import foci
import foci.nn
from foci.inputs.text import PAD
from foci.tasks.model_file import load_trained_model
from foci.tasks.parallel_text import Pair
from foci.tasks.translation import Translation, TranslationSettings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDER = BENCHMARKS / "training" / "pairs"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("noun_phrases", "slots", "translation_pairs", "continue_translation", "back_translation"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("template", "german", "english"),
    [
        ("{the.n}", "der Junge", "the boy"),
        ("{The.a}", "Den Jungen", "The boy"),
        ("{a~.d}", "einem kleinen Jungen", "a small boy"),
        ("{a~.n}", "ein kleiner Junge", "a small boy"),
        ("{the~+.n}", "die kleinen Jungen", "the small boys"),
        ("{bare+.d}", "Jungen", "boys"),
        ("{my+.n}", "meine Jungen", "my boys"),
        ("{this.n}", "dieser Junge", "this boy"),
    ],
)
def test_noun_phrases_are_declined(template: str, german: str, english: str) -> None:
    import noun_phrases

    noun = noun_phrases.Noun("boy", "boys", "m", "Junge", "Jungen", "person", weak=True)
    small = noun_phrases.Adjective("small", "klein", frozenset({"any"}))
    match = noun_phrases.PLACEHOLDER.fullmatch(template)
    assert noun_phrases.german_phrase(match, noun, small) == german
    assert noun_phrases.english_phrase(match, noun, small) == english


def test_dative_plurals_and_neuter_adjectives() -> None:
    import noun_phrases

    child = noun_phrases.Noun("child", "children", "n", "Kind", "Kinder", "person", weak=False)
    assert child.decline("d", plural=True) == "Kindern"
    assert noun_phrases.decline_adjective("alt", "a", "n", "n") == "altes"
    assert noun_phrases.decline_adjective("teuer", "the", "n", "n") == "teure"


def test_numbers_and_times_in_words() -> None:
    import slots

    assert (slots.english_words(73), slots.german_words(73)) == ("seventy-three", "dreiundsiebzig")
    assert slots.german_words(121) == "einhunderteinundzwanzig"
    rng = random.Random(1)
    times = dict(slots.make_spoken_time(rng, 3) for _ in range(200))
    assert times["half past three"] == "halb vier"
    assert times["quarter to four"] == "Viertel vor vier"
    assert times["twenty-five to four"] == "fünf nach halb vier"
    assert slots.make_ordinal(21) == ("twenty-first", "einundzwanzigsten")


def test_slots_hold_the_same_values_on_both_sides() -> None:
    import slots

    found = slots.Slots(FOLDER)
    rng = random.Random(1)
    for _ in range(500):
        english, german = found.draw(rng)
        assert "{" not in english + german
    assert slots.replace_german_slot("{name}s Haus", "{name}", "Anna") == "Annas Haus"
    assert slots.replace_german_slot("{name}s Haus", "{name}", "Hans") == "Hans' Haus"


def test_names_are_replaced_on_both_sides() -> None:
    import translation_pairs

    new = translation_pairs.replace_name("Tom's dog likes Tom.", "Toms Hund mag Tom.", "Tom", ("Tom",), "Max")
    assert new == ("Max's dog likes Max.", "Max’ Hund mag Max.")


def test_an_encoder_with_more_layers_computes_the_same() -> None:
    import continue_translation

    torch.manual_seed(0)
    config = foci.nn.EncoderDecoder.sizes["tiny"].replace(vocabulary=20, shared=True, width=32)
    model = foci.nn.EncoderDecoder(config.replace(encoder=config.encoder.replace(layers=4))).eval()
    larger = continue_translation.grow_encoder(model, 6).eval()
    assert len(larger.encoder.blocks) == 6
    tokens = torch.randint(20, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(larger(tokens, tokens).logits, model(tokens, tokens).logits)


def test_a_stopped_training_of_a_translator_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import continue_translation

    monkeypatch.setattr(continue_translation, "MASK_POOL", 2**20)
    # The training replaces it.
    monkeypatch.setattr(torch.nn.functional, "dropout", torch.nn.functional.dropout)
    pairs = [Pair("a dog", "ein Hund"), Pair("a cat", "eine Katze")]
    task = Translation.from_examples(TranslationSettings(size="tiny"), pairs)
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / name).write_text("")
    options = argparse.Namespace(
        start=tmp_path, out=tmp_path / "out", pairs=50_000, minutes=None, rate=1e-3, dropout=0.1, storage="float32"
    )
    training = continue_translation.Training(task, task.model(), options)
    for _ in range(3):
        training.step(continue_translation.build_batch(task, pairs))
    training.save()
    again = continue_translation.Training(task, task.model(), options)
    again.resume()
    assert (again.steps, again.pairs_seen) == (3, 6)
    again.log({"dev_loss": again.evaluate(pairs)})
    again.finish({})
    _, model, _ = load_trained_model(tmp_path / "out" / "model.safetensors")
    for parameter, average in zip(model.parameters(), training.average, strict=True):
        assert torch.equal(parameter, average)


def test_batches_hold_sources_of_one_length() -> None:
    import continue_translation

    pairs = [Pair(" ".join("a" * (1 + n % 3)), " ".join("b" * (1 + n % 5))) for n in range(300)]
    task = Translation.from_examples(TranslationSettings(size="tiny", tokenizer="words"), pairs)
    groups = list(continue_translation.group_pairs(task, pairs, 40))
    assert sum(map(len, groups)) > 200
    for group in groups:
        assert len({len(pair.source) for pair in group}) == 1
        batch = continue_translation.build_batch(task, group)
        assert bool((batch["source"] != PAD).all())
        assert bool((batch["targets"] != PAD).any(0).all())


def test_a_batch_without_padding_has_the_same_loss() -> None:
    import continue_translation

    pairs = [Pair("a dog", "ein Hund"), Pair("a cat", "eine kleine Katze")]
    task = Translation.from_examples(TranslationSettings(size="tiny", tokenizer="words"), pairs)
    model = task.model().eval()
    padded = task.batch(pairs, False, torch.Generator())
    losses = [task.loss(model, batch)[0] for batch in (padded, continue_translation.build_batch(task, pairs))]
    torch.testing.assert_close(*losses)


def test_workers_draw_batches_ahead() -> None:
    import continue_translation

    def stream(name: str) -> Iterator[dict[str, torch.Tensor]]:
        yield {"source": torch.full((2, 3), int(name))}

    batches = continue_translation.start_workers(stream, ["4", "7"])
    found = sorted(int(next(batches)["source"][0, 0]) for _ in range(2))
    assert found == [4, 7]


def test_synthetic_pairs_join_when_their_file_is_there(tmp_path: Path) -> None:
    import translation_pairs

    file = tmp_path / "back.tsv"
    source = translation_pairs.PairSource.__new__(translation_pairs.PairSource)
    source.synthetic_file, source.synthetic = file, []
    assert source.sample_synthetic(random.Random(1)) == []
    file.write_text("a dog\tein Hund\n")
    assert source.sample_synthetic(random.Random(1)) == [Pair("a dog", "ein Hund")]


@pytest.mark.parametrize(
    ("english", "german", "plausible"),
    [
        ("The dog is big.", "Der Hund ist groß.", True),
        ("Wampuik is the capital.", "Wampuik ist die Hauptstadt.", True),
        ("The dog.", "Der Hund ist gestern mit uns nach Hause gelaufen.", False),
        ("The the dog.", "Der Hund.", False),
        ("It is in the it is in the house.", "Es ist in dem Haus nebenan.", False),
        ("Der Hund ist groß und alt.", "Der Hund ist groß und alt.", False),
    ],
)
def test_implausible_translations_are_left_out(english: str, german: str, plausible: bool) -> None:
    import back_translation

    assert back_translation.is_plausible(Pair(english, german)) == plausible


def test_written_pairs_are_whole_and_far_from_the_tests() -> None:
    import noun_phrases
    import translation_pairs

    pairs = translation_pairs.read_written_pairs()
    assert len(pairs) > 80_000
    assert all(isinstance(pair, Pair) and pair.source.strip() and pair.target.strip() for pair in pairs)
    assert len(noun_phrases.read_lines(FOLDER / "everyday-test.tsv")) == 200
    assert len(noun_phrases.read_lines(FOLDER / "kept-test.tsv")) == 160


def test_german_names_of_places_leave_out_names_of_people_and_other_words(data: Path) -> None:
    import continue_translation

    (data / "tatoeba_en_de" / "train.tsv.xz").write_bytes(lzma.compress(b"It is nice.\tEs ist sch\xc3\xb6n.\n"))
    plain = Translation.from_examples(TranslationSettings(size="tiny", tokenizer="words"), [Pair("a", "b")])
    task = continue_translation.learn_names(plain, data)
    assert task.settings.copy_names
    assert {task.names["Vienna"], task.names["Spain"]} == {"Wien", "Spanien"}
    assert not {"Berlin", "Milan", "Nice", "New York"} & task.names.keys()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of datasets with a test sentence."""
    folder = tmp_path / "tatoeba_en_de"
    folder.mkdir()
    for part, text in (("dev", "Say it.\tSag es."), ("test", "Live and let live.\tLeben und leben lassen.")):
        (folder / f"{part}.tsv.xz").write_bytes(lzma.compress(f"{text}\n".encode()))
    return tmp_path


@pytest.mark.parametrize(
    ("english", "german"),
    [
        ("Live and let live!", "Leben lassen!"),
        ("Let others live.", "Leben und leben lassen!"),
        ("The printer is out of paper.", "Es fehlt Papier."),
        ("There is no paper.", "Der Drucker hat wieder kein Papier."),
        ("My friend Anna lives there.", "Anna, eine Freundin, wohnt dort."),
        ("We met Tilly-Mae.", "Wir haben Tilly-Mae getroffen."),
    ],
)
def test_pairs_that_resemble_a_test_sentence_are_left_out(data: Path, english: str, german: str) -> None:
    import translation_pairs

    tests = translation_pairs.TestSentences(data)
    other = Pair("A dog sleeps on the mat.", "Ein Hund schläft auf der Matte.")
    assert tests.filter_pairs([Pair(english, german), other]) == [other]


def test_tatoeba_is_far_from_the_everyday_sentences(data: Path) -> None:
    import translation_pairs

    other = Pair("Live and let others live.", "Leben und leben lassen.")
    pairs = [Pair("The printer is out of paper.", "Es fehlt Papier."), other]
    assert translation_pairs.TestSentences(data).filter_tatoeba(pairs) == [other]
