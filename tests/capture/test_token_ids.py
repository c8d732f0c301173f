"""Token ids are collected from embeddings, pass by pass."""

import pytest
import torch

import foci
from foci.capture.token_ids import TokenIds, sequence_of_embedding


@pytest.mark.parametrize(
    ("stack", "is_encoder_decoder", "sequence"),
    [
        (["", "wte"], False, "input"),
        (["", "encoder", "encoder.embed"], True, "source"),
        (["", "decoder", "encoder.embed"], True, "target"),  # a shared table has the name of one side
        (["encoder", "shared"], True, "source"),
        (["", "shared"], True, "target"),
        (["source_words"], False, "source"),
    ],
)
def test_which_sequence_an_embedding_reads(stack: list[str], is_encoder_decoder: bool, sequence: str) -> None:
    assert sequence_of_embedding(stack, is_encoder_decoder) == sequence


def test_tokens_of_a_generation_are_appended() -> None:
    token_ids = TokenIds()
    for number, ids in enumerate(([[1, 2, 3]], [[4]], [[5]]), 1):
        token_ids.add_embedded(["", "wte"], torch.tensor(ids), number, False)
        token_ids.add_embedded(["", "wte"], torch.tensor([[9, 9]]), number, False)
    assert token_ids.label_name_for("input", [1, 2, 3]) == "input"
    assert token_ids.build_labels()["input"].texts == (("1", "2", "3", "4", "5"),)


def test_another_text_has_its_own_labels() -> None:
    token_ids = TokenIds(lambda ids: "".join(chr(96 + i) for i in ids))
    for number, ids in enumerate(([[1, 2]], [[3, 4]]), 1):
        token_ids.add_embedded(["", "wte"], torch.tensor(ids), number, False)
    assert [token_ids.label_name_for("input", [1]), token_ids.label_name_for("input", [2])] == ["input", "input#2"]
    assert token_ids.label_name_for("input", [1]) == "input"
    assert {name: labels.text(0) for name, labels in token_ids.build_labels().items()} == {
        "input": "ab",
        "input#2": "cd",
    }


def test_a_source_is_read_once_for_all_steps() -> None:
    token_ids = TokenIds()
    token_ids.add_embedded(["encoder", "embed"], torch.tensor([[7, 8]]), 1, True)
    for number in (2, 3):
        token_ids.add_embedded(["decoder", "embed"], torch.tensor([[number]]), number, True)
    assert token_ids.label_name_for("source", [2, 3]) == "source"
    assert token_ids.label_name_for("target", [2, 3]) == "target"
    assert {name: labels.texts for name, labels in token_ids.build_labels().items()} == {
        "source": (("7", "8"),),
        "target": (("2", "3"),),
    }


def test_explicit_ids_replace_embedded_ids() -> None:
    token_ids = TokenIds()
    token_ids.add_embedded(["", "wte"], torch.tensor([[1]]), 1, False)
    token_ids.add_explicit("input", torch.tensor([5, 6]), 1)
    token_ids.add_embedded(["", "wte"], torch.tensor([[1]]), 2, False)
    token_ids.add_embedded(["", "wte"], torch.rand(1, 2), 3, False)
    token_ids.label_name_for("input", [1, 2])
    assert token_ids.build_labels()["input"].texts == (("5", "6"),)
    token_ids.ready_labels["input"] = foci.Record.from_tensors([torch.rand(1, 1, 1, 1)], tokens=["x"]).labels["input"]
    assert token_ids.build_labels()["input"].text(0) == "x"
    assert token_ids.label_name_for("nothing", [1]) == "nothing"
