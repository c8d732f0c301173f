"""The images of a record in the page: grids, pictures, blocks of weights, and denoising steps."""

import pytest
import torch

from foci.record.labels import Labels
from foci.record.record import Record
from foci.view.page import document, images, payload, requests
from tests.view import records
from tests.view.pages import decode_array, lazy, read_payload


def test_the_grids_and_pictures_of_a_text_with_images() -> None:
    record = records.words_and_images(images=2)
    header, arrays = read_payload(document.render_html(record))
    (found,) = header["labels"]
    first, second = found["images"][0]
    assert first["segments"][0] | {"start": 1, "rows": 2, "columns": 3, "stride": 3} == first["segments"][0]
    assert second["segments"][0]["start"] == 7
    picture = decode_array(header, arrays, second["segments"][0]["picture"])
    assert torch.equal(picture.byte(), record.labels["input"].pictures[1])
    assert header["initial"]["query"] == 15
    assert not read_payload(document.render_html(records.jane()))[0]["labels"][0]["images"][0]


def test_pictures_are_shrunk_to_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PICTURE_BYTES", 2 * 32 * 32 * 3)
    labels = Labels.patches(2, 2, image=torch.zeros(3, 700, 700, 3, dtype=torch.uint8))
    record = Record.from_tensors([torch.full((3, 1, 4, 4), 0.25)], labels)
    header, _ = read_payload(document.render_html(record))
    drawn = [image["segments"][0]["picture"] for (image,) in header["labels"][0]["images"]]
    assert drawn == ["picture.0.0", "picture.0.1", None]
    assert header["arrays"]["picture.0.1"]["shape"] == [32, 32, 3]


@pytest.mark.parametrize("by_head", [True, False])
def test_a_long_record_has_the_weights_between_text_and_image(by_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_EXACT_LENGTH", 1)
    monkeypatch.setattr(payload, "MAX_EXACT_ENTRIES", 1)
    record = records.words_and_images(heads=3)
    size = 6 * 6 * 2 * (3 if by_head else 1)
    monkeypatch.setattr(images, "MAX_BLOCK_NUMBERS", size)
    header, arrays = read_payload(document.render_html(record))
    block = decode_array(header, arrays, "1.block")
    rows, columns = [0, 7, 8, 9, 10, 11], list(range(1, 7))
    exact = record["L1"].dense()[:, :, rows][..., columns]
    assert header["layers"][1]["block"] == {"rows": rows, "columns": {"start": 1, "count": 6}}
    torch.testing.assert_close(
        block, exact if by_head else exact.mean(1, keepdim=True), rtol=3e-4, atol=1e-9, check_dtype=False
    )
    monkeypatch.setattr(images, "MAX_BLOCK_NUMBERS", 40)
    header, _ = read_payload(document.render_html(record))
    assert [layer["block"] is None for layer in header["layers"]] == [True, False] or header["layers"][1][
        "block"
    ] is None


def test_denoising_steps_are_stored_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    record = records.denoising(steps=5)
    header, arrays = read_payload(document.render_html(record))
    assert (header["steps"], header["totalSteps"]) == ([0, 1, 2, 3, 4], 5)
    found = decode_array(header, arrays, "0@3.block")
    torch.testing.assert_close(found, record.at(step=3)["cross.L0"].dense(), rtol=3e-4, atol=0, check_dtype=False)
    # The mean of two heads at three steps.
    monkeypatch.setattr(images, "MAX_STEP_NUMBERS", 16 * 3 * 3)
    header, _ = read_payload(document.render_html(record))
    assert header["steps"] == [0, 2, 4]
    assert header["arrays"]["0@2.block"]["shape"] == [1, 1, 16, 3]


def test_the_page_asks_for_a_step_and_for_all_heads() -> None:
    record = records.denoising()
    asked = {"layer": "0", "seq": "0", "head": "1", "query": "2"}
    row = torch.frombuffer(
        bytearray(requests.handle_row(requests.PageRequest(record, asked | {"denoising": "2"}))), dtype=torch.float32
    )
    assert row.tolist() == pytest.approx([0.1, 0.1, 0.8])
    with pytest.raises(ValueError, match=r"denoising must be an integer from 0 to 3, got '9'"):
        requests.handle_row(requests.PageRequest(record, asked | {"denoising": "9"}))
    for one, many in (
        (requests.handle_rows, {"query": "3"}),
        (requests.handle_columns, {"key": "2"}),
    ):
        seen = lazy(6)
        found = torch.frombuffer(
            bytearray(one(requests.PageRequest(seen, {"layer": "1", "seq": "0"} | many))), dtype=torch.float32
        )
        dense = seen["L1"].dense()[0]
        wanted = dense[:, 3] if "query" in many else dense[..., 2]
        torch.testing.assert_close(found.view(4, 6), wanted)


def test_where_images_attend_to_text_the_page_opens_with_a_word() -> None:
    header, _ = read_payload(document.render_html(records.denoising()))
    assert header["initial"] == {"head": "cross.L0", "query": 2, "direction": "from"}
