"""Labels: what stands at each position reads as the text it came from, also where tokens cut through characters."""

from typing import Any

import pytest
import torch

from foci.record.labels import Labels, decode_each_token, number_words_by_spaces

BYTES = "Hé 🙂!"


def by_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


class Tokenizer:
    """One token per byte; tells what it was asked with."""

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


def test_broken_bytes_at_the_end_and_in_the_middle_end() -> None:
    assert decode_each_token([72, 0xF0, 0x9F], by_bytes) == ["H", "�", ""]
    found = decode_each_token([0xFF] * 12 + [72], by_bytes)
    assert len(found) == 13
    assert "".join(found) == "�" * 12 + "H"


def test_tokens_by_their_numbers() -> None:
    labels = Labels.decoded(torch.tensor([list(b"a bc")]), Tokenizer())
    assert labels.texts == (("a", " ", "b", "c"),)
    assert labels.words == ((0, None, 1, 1),)
    assert Labels.decoded([97, 98], by_bytes).texts == (("a", "b"),)


@pytest.mark.parametrize(
    "allowed", [(), ("skip_special_tokens",), ("skip_special_tokens", "clean_up_tokenization_spaces")]
)
def test_special_tokens_are_shown_where_a_tokenizer_can(allowed: tuple[str, ...]) -> None:
    tokenizer = Tokenizer(*allowed)
    assert Labels.decoded([[97]], tokenizer).texts == (("a",),)
    assert tokenizer.options == dict.fromkeys(allowed, False)


def test_what_cannot_decode_is_refused() -> None:
    with pytest.raises(TypeError, match="a tokenizer with decode, or a function, but got int"):
        Labels.decoded([[1]], 3)


def test_offsets_cut_the_text_itself() -> None:
    source = "Jane's  café 🙂"
    offsets = [(0, 0), (0, 4), (4, 6), (8, 12), (13, 14), (13, 14), (0, 0)]
    names = ["[CLS]", "jane", "'s", "cafe", "a", "b", "[SEP]"]
    labels = Labels.by_offsets([source], [offsets], [names], [[None, 0, 0, 1, 2, 2, None]])
    assert labels.texts[0] == ("[CLS]", "Jane", "'s", "  café", " 🙂", "", "[SEP]")
    assert labels.text(0) == f"[CLS]{source}[SEP]"
    assert labels.words == ((None, 0, 0, 1, 2, 2, None),)
    assert Labels.by_offsets(["ab"], [[(0, 0), (0, 2)]]).texts == (("", "ab"),)


def test_a_real_tokenizer_of_bytes() -> None:
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
    by_offsets = Labels.by_offsets([BYTES], [encoded.offsets], [encoded.tokens], [encoded.word_ids])
    decoded = Labels.decoded([encoded.ids], tokenizer)
    assert by_offsets.text(0) == decoded.text(0) == BYTES
    assert by_offsets.texts == decoded.texts


def test_words_begin_at_spaces() -> None:
    assert number_words_by_spaces(["un", "seen", " by", " ", "x", "", "y ", "z"]) == [0, 0, 1, None, 2, 2, 2, 3]
    assert number_words_by_spaces([]) == []


def test_unequal_sequences_are_filled_up() -> None:
    labels = Labels.tokens([["a"], ["b", "c"]], words=[[0], [0, 1]])
    assert labels.texts == (("a", ""), ("b", "c"))
    assert labels.words == ((0, None), (0, 1))
    assert (len(labels), labels.batch) == (2, 2)
    assert labels.at([1]).texts == (("",), ("c",))
    assert labels.at([1]).words == ((None,), (1,))
    assert labels.at([0, 1]) is labels


def test_positions() -> None:
    assert Labels.positions(2, 3).texts == (("0", "1", "2"),) * 2
    assert len(Labels.positions(0, 3)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "words"}, "kind must be one of .* but got 'words'"),
        ({"texts": (("a",), ("b", "c"))}, r"one number of positions, but got \[1, 2\]"),
        ({"words": ((0, 1),)}, "one number per token"),
        ({"grid": (2, 3), "leading": 1}, "2 x 3 patches after 1 positions must have 7 positions, but got 1"),
        ({"images": torch.zeros(1, 2, 2, 3)}, r"images must be uint8 \(B, height, width, 3\), but got torch.float32"),
    ],
)
def test_labels_that_do_not_fit_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Labels(**{"kind": "tokens", "texts": (("a",),)} | options)
