import json
from typing import Any

import pytest

from foci.inputs.bpe import import_tokenizers
from foci.inputs.text import (
    START,
    STOP,
    BPETokenizer,
    Tokenizer,
    tokenizer_from_json,
    tokenizer_to_json,
    train_tokenizer,
)

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


def change_bpe(**changes: Any) -> str:
    """The saved text of a bpe tokenizer with some parts of it, or of its model, replaced."""
    content = json.loads(train_tokenizer("bpe", ["ab ab"], 300).save()["model"])
    for name, value in changes.items():
        part = content["model"] if name in content["model"] else content
        part[name] = value(part[name]) if callable(value) else value
    return json.dumps({"kind": "bpe", "model": json.dumps(content)})


TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": []}
PADDING = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"post_processor": TEMPLATE}, "post_processor of the bpe tokenizer must be None, as foci writes it, got"),
        ({"padding": PADDING}, "padding of the bpe tokenizer must be None"),
        ({"truncation": {"max_length": 0}}, "truncation of the bpe tokenizer must be None"),
        ({"pre_tokenizer": SPLIT}, "pre_tokenizer of the bpe tokenizer must be {'type': 'ByteLevel'"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}}, "normalizer of the bpe"),
        ({"decoder": SPLIT}, "decoder of the bpe tokenizer must be"),
        ({"added_tokens": []}, "added_tokens of the bpe tokenizer must be"),
        ({"type": "Unigram"}, "type of the bpe tokenizer must be 'BPE', as foci writes it, got 'Unigram'"),
        ({"dropout": 0.5}, "dropout of the bpe tokenizer must be None, as foci writes it, got 0.5"),
        ({"byte_fallback": True}, "byte_fallback of the bpe tokenizer must be None"),
        ({"vocab": None}, "must have a vocabulary of at most 1048576 tokens"),
        ({"vocab": {"a": 0}}, "must begin with the special tokens and contain every byte"),
        ({"vocab": lambda old: old | {"ab": 2**32}}, "ids of the bpe tokenizer must be the integers from 0 to"),
        ({"vocab": lambda old: old | {"ab": "7"}}, "ids of the bpe tokenizer must be the integers"),
        (
            {"vocab": lambda old: old | {"漢": len(old)}},
            "the tokens of the bpe tokenizer must be made of bytes, got '漢'",
        ),
        ({"vocab": lambda old: old | {"\ud800": len(old)}}, "must be made of bytes"),
        ({"merges": [["a", "z"]]}, r"a merge of the bpe tokenizer must join two of its tokens, got \['a', 'z'\]"),
        ({"merges": [["a", 3]]}, "a merge of the bpe tokenizer must join two of its tokens"),
        ({"merges": [[["a"], "b"]]}, "a merge of the bpe tokenizer must join two of its tokens"),
        ({"merges": {}}, "must have a list of merges"),
    ],
)
def test_only_the_parts_of_a_bpe_tokenizer_that_foci_writes_are_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        tokenizer_from_json(change_bpe(**changes))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


def test_merges_of_earlier_versions_are_read() -> None:
    again = tokenizer_from_json(change_bpe(merges=lambda merges: [" ".join(pair) for pair in merges]))
    assert again.encode("ab ab") == train_tokenizer("bpe", ["ab ab"], 300).encode("ab ab")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "the tokenizer must be valid JSON"),
        ("[" * 100_000, "the tokenizer must have at most 200 levels of nested JSON, got more"),
        ('{"kind": ["bpe"]}', "a tokenizer must be of the kind"),
        ('{"kind": "bpe", "model": "null"}', "added_tokens of the bpe tokenizer must be"),
        ('{"kind": "bpe", "model": "{"}', "the bpe tokenizer must be valid JSON"),
        ('{"kind": "words", "listed": ["a", 3]}', "the tokens of a tokenizer must be texts, got 3"),
        ('{"kind": "words", "listed": ["a", "a"]}', "the tokens of a tokenizer must be different, got one twice"),
        ('{"kind": "words", "listed": "abc"}', "a tokenizer must be of the kind"),
        ('{"kind": "characters", "listed": ["a", "bc"]}', "must be single characters, got longer ones"),
        (json.dumps({"kind": "words", "listed": [str(n) for n in range(2**20 + 1)]}), "at most 1048576 tokens"),
    ],
)
def test_a_damaged_tokenizer_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_from_json(text)


def test_a_panic_of_the_package_becomes_an_error() -> None:
    package = import_tokenizers()
    tokenizer = train_tokenizer("bpe", ["ab ab"], 300)
    assert isinstance(tokenizer, BPETokenizer)
    # The package checks a template when it is built in Python, but not one that it reads.
    content = json.loads(tokenizer.model.to_str()) | {"post_processor": TEMPLATE | {"special_tokens": {}}}
    tokenizer.model = package.Tokenizer.from_str(json.dumps(content))
    with pytest.raises(ValueError, match="the tokenizer cannot process a text"):
        tokenizer.encode("ab")
