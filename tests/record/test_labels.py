"""Labels read as the text they came from, also where tokens split characters."""

from typing import Any

import pytest
import torch

from foci.record.labels import Labels
from foci.record.token_texts import decode_each_token, number_words_by_spaces

BYTES = "Hé 🙂!"


def by_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


class Tokenizer:
    """One token per byte; records the options it was called with."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    def decode(self, ids: list[int], **options: Any) -> str:
        if set(options) - set(self.allowed):
            raise TypeError(f"unknown {options}")
        self.options = options
        return by_bytes(ids)


def test_a_character_that_is_split_over_tokens_stays_whole() -> None:
    ids = list(BYTES.encode())
    found = decode_each_token(ids, by_bytes)
    assert found == ["H", "é", "", " ", "🙂", "", "", "", "!"]
    assert "".join(found) == BYTES


def test_invalid_bytes_do_not_join_all_later_tokens() -> None:
    assert decode_each_token([72, 0xF0, 0x9F], by_bytes) == ["H", "�", ""]
    found = decode_each_token([0xFF] * 12 + [72], by_bytes)
    assert len(found) == 13
    assert "".join(found) == "�" * 12 + "H"


def test_labels_from_token_ids() -> None:
    labels = Labels.from_ids(torch.tensor([list(b"a bc")]), Tokenizer())
    assert labels.texts == (("a", " ", "b", "c"),)
    assert labels.words == ((0, None, 1, 1),)
    assert Labels.from_ids([97, 98], by_bytes).texts == (("a", "b"),)


@pytest.mark.parametrize(
    "allowed", [(), ("skip_special_tokens",), ("skip_special_tokens", "clean_up_tokenization_spaces")]
)
def test_special_tokens_are_shown_where_a_tokenizer_can(allowed: tuple[str, ...]) -> None:
    tokenizer = Tokenizer(*allowed)
    assert Labels.from_ids([[97]], tokenizer).texts == (("a",),)
    assert tokenizer.options == dict.fromkeys(allowed, False)


def test_a_tokenizer_without_decode_is_refused() -> None:
    with pytest.raises(TypeError, match="a tokenizer with a decode method, or a function, got int"):
        Labels.from_ids([[1]], 3)


def test_offsets_slice_the_source_text() -> None:
    source = "Jane's  café 🙂"
    offsets = [(0, 0), (0, 4), (4, 6), (8, 12), (13, 14), (13, 14), (0, 0)]
    names = ["[CLS]", "jane", "'s", "cafe", "a", "b", "[SEP]"]
    labels = Labels.from_offsets([source], [offsets], [names], [[None, 0, 0, 1, 2, 2, None]])
    assert labels.texts[0] == ("[CLS]", "Jane", "'s", "  café", " 🙂", "", "[SEP]")
    assert labels.text(0) == f"[CLS]{source}[SEP]"
    assert labels.words == ((None, 0, 0, 1, 2, 2, None),)
    assert Labels.from_offsets(["ab"], [[(0, 0), (0, 2)]]).texts == (("", "ab"),)


def test_a_byte_level_tokenizer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["ab"], trainer)
    encoded = tokenizer.encode(BYTES)
    assert len(encoded.ids) == 9
    by_offsets = Labels.from_offsets([BYTES], [encoded.offsets], [encoded.tokens], [encoded.word_ids])
    decoded = Labels.from_ids([encoded.ids], tokenizer)
    assert by_offsets.text(0) == decoded.text(0) == BYTES
    assert by_offsets.texts == decoded.texts


def test_words_begin_at_spaces() -> None:
    assert number_words_by_spaces(["un", "seen", " by", " ", "x", "", "y ", "z"]) == [0, 0, 1, None, 2, 2, 2, 3]
    assert number_words_by_spaces([]) == []


def test_shorter_sequences_are_padded() -> None:
    labels = Labels.tokens([["a"], ["b", "c"]], words=[[0], [0, 1]])
    assert labels.texts == (("a", ""), ("b", "c"))
    assert labels.words == ((0, None), (0, 1))
    assert (len(labels), labels.batch) == (2, 2)
    assert labels.select([1]).texts == (("",), ("c",))
    assert labels.select([1]).words == ((None,), (1,))
    assert labels.select([0, 1]) is labels


def test_positions() -> None:
    assert Labels.positions(2, 3).texts == (("0", "1", "2"),) * 2
    assert len(Labels.positions(0, 3)) == 0


@pytest.mark.parametrize("texts", ["abc", ["abc"], ["a", "b"]])
def test_bare_strings_are_refused_as_sequences(texts: Any) -> None:
    with pytest.raises(TypeError, match=r"^texts must be a list of token texts for each sequence, got .*: write"):
        Labels.tokens(texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "words"}, "kind must be one of .*, got 'words'"),
        ({"texts": (("a",), ("b", "c"))}, r"the same number of positions, got \[1, 2\]"),
        ({"words": ((0, 1),)}, "one number per token"),
        ({"grid": (2, 3), "leading": 1}, "2 x 3 patches after 1 positions must have 7 positions, got 1"),
        ({"images": torch.zeros(1, 2, 2, 3)}, r"images must be uint8 \(B, height, width, 3\), got torch.float32"),
    ],
)
def test_inconsistent_labels_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Labels(**{"kind": "tokens", "texts": (("a",),)} | options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extra": -1}, "extra must be an int of at least 0 or a list of names, got -1"),
        ({"extra": 1.5}, "extra must be an int of at least 0 or a list of names, got 1.5"),
        ({"extra": "class"}, "extra must be an int of at least 0 or a list of names, got 'class'"),
        ({"columns": 2.5}, "columns must be an int of at least 1, got 2.5"),
        ({"image": "shoe.png"}, r"image must be a PIL image, or an array .*, got a str"),
        ({"image": object()}, r"image must be a PIL image, or an array .*, got an? object"),
    ],
)
def test_wrong_grids_of_patches_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Labels.patches(**{"rows": 2, "columns": 2} | arguments)


def test_token_ids_are_not_taken_for_texts() -> None:
    with pytest.raises(
        TypeError, match=r"^texts must be texts, got 1: foci\.Labels\.from_ids\(ids, tokenizer\) decodes"
    ):
        Labels.tokens([[1, 2]])  # type: ignore[list-item]
