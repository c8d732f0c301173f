"""The tokens of a record: read where they are looked up, pass by pass."""

import pytest
import torch

import foci
from foci.capture.token_ids import TokenIds, sequence_of_embedding


@pytest.mark.parametrize(
    ("stack", "paired", "sequence"),
    [
        (["", "wte"], False, "input"),
        (["", "encoder", "encoder.embed"], True, "source"),
        (["", "decoder", "encoder.embed"], True, "target"),  # a shared table has the name of one side
        (["encoder", "shared"], True, "source"),
        (["", "shared"], True, "target"),
        (["source_words"], False, "source"),
    ],
)
def test_which_sequence_an_embedding_reads(stack: list[str], paired: bool, sequence: str) -> None:
    assert sequence_of_embedding(stack, paired) == sequence


def test_the_tokens_of_a_generation_go_on() -> None:
    reading = TokenIds()
    for number, ids in enumerate(([[1, 2, 3]], [[4]], [[5]]), 1):
        reading.seen(["", "wte"], torch.tensor(ids), number, False)
        reading.seen(["", "wte"], torch.tensor([[9, 9]]), number, False)
    assert reading.name_for("input", [1, 2, 3]) == "input"
    assert reading.labels()["input"].texts == (("1", "2", "3", "4", "5"),)


def test_another_text_has_labels_of_its_own() -> None:
    reading = TokenIds(lambda ids: "".join(chr(96 + i) for i in ids))
    for number, ids in enumerate(([[1, 2]], [[3, 4]]), 1):
        reading.seen(["", "wte"], torch.tensor(ids), number, False)
    assert [reading.name_for("input", [1]), reading.name_for("input", [2])] == ["input", "input#2"]
    assert reading.name_for("input", [1]) == "input"
    assert {name: labels.text(0) for name, labels in reading.labels().items()} == {"input": "ab", "input#2": "cd"}


def test_a_source_is_read_once_and_looked_at_by_all_steps() -> None:
    reading = TokenIds()
    reading.seen(["encoder", "embed"], torch.tensor([[7, 8]]), 1, True)
    for number in (2, 3):
        reading.seen(["decoder", "embed"], torch.tensor([[number]]), number, True)
    assert reading.name_for("source", [2, 3]) == "source"
    assert reading.name_for("target", [2, 3]) == "target"
    assert {name: labels.texts for name, labels in reading.labels().items()} == {
        "source": (("7", "8"),),
        "target": (("2", "3"),),
    }


def test_what_is_told_counts_and_not_what_is_seen() -> None:
    reading = TokenIds()
    reading.seen(["", "wte"], torch.tensor([[1]]), 1, False)
    reading.told("input", torch.tensor([5, 6]), 1)
    reading.seen(["", "wte"], torch.tensor([[1]]), 2, False)
    reading.seen(["", "wte"], torch.rand(1, 2), 3, False)
    reading.name_for("input", [1, 2])
    assert reading.labels()["input"].texts == (("5", "6"),)
    reading.ready["input"] = foci.Record.from_tensors([torch.rand(1, 1, 1, 1)], tokens=["x"]).labels["input"]
    assert reading.labels()["input"].text(0) == "x"
    assert reading.name_for("nothing", [1]) == "nothing"
