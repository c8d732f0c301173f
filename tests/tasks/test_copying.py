"""Names that a translator misspells are copied from the source."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foci.decoding import Answer
from foci.nn.model import Model
from foci.tasks import translation
from foci.tasks.copying import copy_names, find_respelled_words, parse_names, parse_respelled_words, translate_names
from foci.tasks.model_file import load_trained_model, save_trained_model
from foci.tasks.parallel_text import Pair
from foci.tasks.translation import Translation, TranslationSettings


def split(text: str) -> list[str]:
    """Tokens of three characters at most; a space begins one."""
    return [
        word[i : i + 3] if i or not number else f" {word[:3]}"
        for number, word in enumerate(text.split(" "))
        for i in range(0, len(word), 3)
    ]


def copy(source: str, answer: str, links: dict[int, int], *seen: str) -> str:
    """Copy names where each word of the answer attends to the source word of the same number, or of `links`."""
    tokens = [[number for number, word in enumerate(text.split(" ")) for _ in split(word)] for text in (source, answer)]
    weights = torch.tensor([[float(links.get(row, row) == column) for column in tokens[0]] for row in tokens[1]])
    return copy_names(split(source), split(answer), lambda word: word not in seen, lambda: weights)


@pytest.mark.parametrize(
    ("source", "answer", "expected"),
    [
        ("We love Poughkeepsie!", "Wir lieben Parteepsie!", "Wir lieben Poughkeepsie!"),
        ("Ottoline is here.", "Otoline ist hier.", "Ottoline ist hier."),
        ("Havardur waits.", "Ha\ufffdur wartet.", "Havardur wartet."),
        ("We love Tilly-Mae.", "Wir lieben Till-Mae.", "Wir lieben Tilly-Mae."),
        ("Llewelyn waits.", "Llewelyne wartet.", "Llewelyn wartet."),
        ("This is Hyunjoo's dog.", "Das ist Hyunjus Hund.", "Das ist Hyunjoos Hund."),
        ("This is Lucas's dog.", "Das ist Lukas’ Hund.", "Das ist Lucas’ Hund."),
        # A number, a word in lower case, a short one, another word, and one that is not spelled stay.
        ("We need shampoo.", "Wir brauchen Schampon.", "Wir brauchen Schampon."),
        ("We see Ada.", "Wir sehen Ade.", "Wir sehen Ade."),
        ("We love Hastings.", "Wir lieben Grüße.", "Wir lieben Grüße."),
        ("We love Mary-Kate.", "Wir lieben Mar.", "Wir lieben Mar."),
        ("We love Prague.", "Wir lieben Pragau.", "Wir lieben Pragau."),
    ],
)
def test_a_misspelled_name_is_replaced(source: str, answer: str, expected: str) -> None:
    assert copy(source, answer, {}, "Prague") == expected


def test_a_name_that_was_split_is_replaced_as_a_whole() -> None:
    links = {2: 2, 3: 2, 4: 2, 5: 2}
    new = copy("We love Lossiemouth.", "Wir lieben Stadt Lossiem Süden und.", links)
    assert new == "Wir lieben Stadt Lossiemouth und."


def test_only_the_word_that_attends_to_the_name_is_replaced() -> None:
    answer = "Wir lieben Parteepsie."
    assert copy("We love Poughkeepsie.", answer, {2: 1}) == answer


@pytest.mark.parametrize(
    "answer", ["Kestrel ruft.", "Kestrels Hund.", "Die Kestreler.", "Die Kestrel-Bande.", "Ein Kestrelflug."]
)
def test_a_name_that_is_there_needs_no_weights(answer: str) -> None:
    def refuse() -> Tensor:
        raise AssertionError("the name is there")

    assert copy_names(split("Kestrel calls."), split(answer), bool, refuse) == answer


def test_words_that_most_targets_spell_in_their_own_way_are_learned() -> None:
    pairs = [
        Pair("Prague in October.", "Prag im Oktober."),
        Pair("We love Prague.", "Wir lieben Prag."),
        Pair("A Prague festival", "Ein Prague-Fest"),
        Pair("Anna's brother is in Dublin.", "Annas Bruder ist in Dublin."),
        Pair("Anna runs.", "Anne rennt."),
        Pair("Museums", "Museen"),
    ]
    frequent = {"Museums"}
    # Words in lower case are no names: most targets translate them.
    expected = {"prague", "october", "brother", "love", "runs", "festival"}
    assert find_respelled_words(pairs, lambda word: word not in frequent) == expected


@pytest.mark.parametrize(
    ("source", "answer", "expected"),
    [
        ("Is Vienna far?", "Ist Vienna weit?", "Ist Wien weit?"),
        ("From Vienna to Rome.", "Von Vienna nach Rom.", "Von Wien nach Rom."),
        ("Rome, Vienna and us", "Rome, Vienna und wir", "Rom, Wien und wir"),
        ("Vienna's zoo", "Viennas Zoo", "Wiens Zoo"),
        ("It's in Vienna's centre.", "Es ist in Viennas Zentrum.", "Es ist in Wiens Zentrum."),
        # Names of other things, words that only contain a name, and names that the answer translates stay.
        ("We like Hotel Vienna.", "Wir mögen Hotel Vienna.", "Wir mögen Hotel Vienna."),
        ("The Vienna Hospital", "Das Vienna Hospital", "Das Vienna Hospital"),
        ("We met Mr. Rome.", "Wir trafen Herrn Rome.", "Wir trafen Herrn Rome."),
        ("To Vienna", "Die Vienna-Reise der Viennaer", "Die Vienna-Reise der Viennaer"),
        ("In Rome", "In Rom", "In Rom"),
    ],
)
def test_names_of_the_table_are_translated(source: str, answer: str, expected: str) -> None:
    assert translate_names(source, answer, {"Vienna": "Wien", "Rome": "Rom"}) == expected


def test_decoding_and_recording_copy_alike_and_the_model_file_keeps_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [Pair("Prague is here.", "Prag ist hier.")]
    settings = TranslationSettings(size="tiny", vocabulary=260, alignment=(0,))
    plain = Translation.from_examples(settings, pairs)
    with pytest.raises(ValueError, match=r"task\.copy_names must be set before training"):
        Translation.from_learned_state(TranslationSettings(copy_names=True), plain.learned_state())
    task = plain.learn_respelled_words(pairs, {"Vienna": "Wien"})
    save_trained_model(tmp_path / "model.safetensors", task, task.model())
    loaded, model, _ = load_trained_model(tmp_path / "model.safetensors")
    assert isinstance(loaded, Translation)
    assert loaded.respelled == {"prague", "here"}
    assert loaded.names == {"Vienna": "Wien"}

    def answer(model: Model, sources: list[list[int]], **_: object) -> list[Answer]:
        return [Answer(loaded.tokenizer.encode("Ottilie ist hier."), -1.0, True) for _ in sources]

    def attend(self: Translation, model: Model, source: list[int], answer: list[int]) -> Tensor:
        return torch.eye(len(answer), len(source))

    monkeypatch.setattr(translation, "generate", answer)
    monkeypatch.setattr(Translation, "_read_alignment", attend)
    example = Pair("Ottoline is here.", "")
    assert plain.decode(model, [example]) == ["Ottilie ist hier."]
    assert loaded.decode(model, [example]) == ["Ottoline ist hier."]
    record = loaded.record_attention(model, example)
    assert record.answer == "Ottoline ist hier."
    assert [loaded._is_unseen(word) for word in ("Ottoline", "Prague", "Vienna", "O")] == [True, False, False, True]
    assert record.labels["translation"].text(0).strip() == "Ottoline ist hier.<stop>"


def test_the_alignment_is_the_mean_over_heads_of_the_chosen_layers() -> None:
    task = Translation.from_examples(TranslationSettings(size="tiny", alignment=(1,)), [Pair("a dog", "ein Hund")])
    model = task.model().eval()
    source, answer = task._encode_source("a dog"), task.tokenizer.encode("ein Hund")
    expected = model(torch.tensor([source]), torch.tensor([[1, *answer]]), return_weights=True).weights["cross.L1"]
    found = task._read_alignment(model, source, answer)
    torch.testing.assert_close(found, expected.dense()[0].mean(0).detach())


@pytest.mark.parametrize("text", ["{}", "[1]", "3"])
def test_other_contents_of_the_file_of_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"respelled\.json must be a list of words"):
        parse_respelled_words(text)


@pytest.mark.parametrize("text", ["[]", '{"Vienna": 1}', "3"])
def test_other_contents_of_the_table_of_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names\.json must be a table of names"):
        parse_names(text)
