import pytest

from foci.inputs.text import START, STOP, Tokenizer, tokenizer_from_json, tokenizer_to_json, train_tokenizer

TEXTS = ["a man sleeps.", "ein Mann schläft.", "jane's dog, <stop>!"]


@pytest.mark.parametrize("kind", ["bpe", "words", "characters", "bytes"])
def test_texts_and_tokenizers_round_trip(kind: str) -> None:
    tokenizer = train_tokenizer(kind, TEXTS, 300)  # type: ignore[arg-type]
    again = tokenizer_from_json(tokenizer_to_json(tokenizer))
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert min(tokens) > STOP, "a text that spells a special token is a text"
        assert again.encode(text) == tokens
        if kind != "words":
            assert tokenizer.decode([START, *tokens, STOP, 0]) == text
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert max(max(tokenizer.encode(text)) for text in TEXTS) < tokenizer.vocabulary == again.vocabulary


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("words", ("<start>", " a", " man", " sleeps", " .", "<stop>")),
        ("bpe", ("<start>", " a", " man", " sleeps", ".", "<stop>")),
        ("characters", ("<start>", *"a man sleeps.", "<stop>")),
    ],
)
def test_labels_spell_the_text_and_group_words(kind: str, pieces: tuple[str, ...]) -> None:
    tokenizer = train_tokenizer(kind, TEXTS * 9, 400)  # type: ignore[arg-type]
    labels = tokenizer.labels([START, *tokenizer.encode("a man sleeps."), STOP])
    assert labels.texts[0] == pieces
    assert labels.words is not None
    words = labels.words[0]
    assert words[0] != words[1], "what stands for no text is a word of its own"
    assert words[-1] != words[-2]


def test_a_character_split_over_tokens_has_one_label() -> None:
    for kind in ("bytes", "bpe"):
        tokenizer = train_tokenizer(kind, ["abc"], 300)  # type: ignore[arg-type]
        assert "".join(tokenizer.labels(tokenizer.encode("ä漢")).texts[0]).strip() == "ä漢"


def test_unknown_tokens_are_shown_as_unknown() -> None:
    for kind in ("words", "characters"):
        tokenizer = train_tokenizer(kind, ["a b"], 300)  # type: ignore[arg-type]
        assert tokenizer.decode(tokenizer.encode("a z")).replace(" ", "") == "a�"
        assert tokenizer.labels(tokenizer.encode("z")).texts[0] == ("<unknown>",)


def test_a_bpe_vocabulary_includes_all_bytes() -> None:
    with pytest.raises(ValueError, match="must be at least 260, which includes all bytes, got 100"):
        train_tokenizer("bpe", TEXTS, 100)
    with pytest.raises(ValueError, match="a tokenizer must be of the kind bpe, words, characters or bytes"):
        tokenizer_from_json('{"kind": "runes"}')


def test_training_a_tokenizer_is_deterministic() -> None:
    def made() -> Tokenizer:
        return train_tokenizer("bpe", TEXTS * 50, 290)

    assert tokenizer_to_json(made()) == tokenizer_to_json(made())
