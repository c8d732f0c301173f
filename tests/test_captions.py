"""The example of a vision-language model: its pictures and captions fit, it trains, and its words point at clothes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
CLOTHES_OF_THE_PICTURE = {"dress", "boot", "bag", "trousers"}


@pytest.fixture(scope="module")
def captions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("captions", EXAMPLES / "captions.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["captions"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def items(captions: ModuleType) -> object:
    """Noise in place of clothes, twice in each class."""
    torch.manual_seed(0)
    pixels = torch.randint(256, (20, 28, 28), dtype=torch.uint8)
    pixels[-1] = 0
    classes = torch.cat([torch.arange(19) % 10, torch.tensor([captions.EMPTY])])
    return captions.Items(captions.encode_items(pixels / 255), pixels, classes)


def test_captions_name_the_clothes_and_their_places(captions: ModuleType, items: object) -> None:
    pictures = captions.make_pictures(items, torch.full((50,), 4), torch.Generator().manual_seed(0))
    assert pictures.captions.shape == (50, 17)
    assert torch.equal(items.classes[pictures.items], pictures.classes)  # type: ignore[attr-defined]
    for classes, caption in zip(pictures.classes, pictures.captions.tolist(), strict=True):
        texts = captions.to_texts(caption)
        assert texts[0] == "<start>"
        assert texts[-1] == "."
        named = captions.parse_caption(texts[1:])
        assert [place for place, *_ in named] == [1, 5, 9, 13]
        assert sorted(quarter for *_, quarter in named) == [0, 1, 2, 3]
        assert all(classes[quarter] == number for _, number, quarter in named)
    assert (
        len({tuple(captions.parse_caption(captions.to_texts(c)[1:])[0][1:]) for c in pictures.captions.tolist()}) > 20
    )


def test_pictures_of_fewer_clothes(captions: ModuleType, items: object) -> None:
    counts = torch.tensor([1, 2, 3, 4])
    pictures = captions.make_pictures(items, counts, torch.Generator().manual_seed(0))
    assert torch.equal((pictures.classes != captions.EMPTY).sum(-1), counts)
    patches = captions.find_item_patches(pictures.captions)
    for classes, caption, keys in zip(pictures.classes, pictures.captions.tolist(), patches, strict=True):
        named = captions.parse_caption(captions.to_texts(caption)[1:])
        assert len(named) == (classes != captions.EMPTY).sum()
        assert (keys >= 0).all(-1).nonzero().flatten().tolist() == [place for place, *_ in named]
        for place, number, quarter in named:
            assert classes[quarter] == number
            assert captions.find_quarter(torch.zeros(196).index_fill(0, keys[place], 1.0).view(14, 14)) == quarter


def test_quarters_lie_where_they_are_in_the_picture(captions: ModuleType) -> None:
    pixels = torch.zeros(56, 56)
    pixels[30, 5] = 1
    quarters = captions.split_quarters(pixels[None])
    assert [bool(quarter.any()) for quarter in quarters] == [False, False, True, False]
    assert quarters[2, 2, 5] == 1
    assert torch.equal(captions.join_quarters(quarters), pixels)
    model = captions.Captioner(captions.SIZES).eval()
    with torch.no_grad():
        change = (model.encode(pixels[None]).states - model.encode(torch.zeros(1, 56, 56)).states).norm(dim=-1)
    assert captions.find_quarter(change.view(14, 14)) == 2


@pytest.mark.slow
def test_a_model_is_trained_saved_and_recorded(captions: ModuleType, items: object, tmp_path: Path) -> None:
    model = captions.train(items, steps=2, batch=2)
    model.half().save(tmp_path / "model.safetensors")
    loaded = captions.load_captioner(tmp_path / "model.safetensors")
    pixels = torch.rand(56, 56)
    seen = captions.record_caption(loaded, pixels, [1, 11, 13, 16])
    assert seen.answer == "t-shirt top left."
    assert seen.image_map("t-shirt").shape == (14, 14)
    assert [word for word, _ in seen.words_for((0, 0, 0.5, 0.5))] != []
    written = captions.record_caption(loaded, pixels)
    assert len(written.labels["input"]) <= 18
    found = captions.score(loaded, items, 2)
    assert all(0 <= percent <= 100 for percent in found)


def test_wrong_input(captions: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pixels must have shape \(B, 56, 56\), got \(1, 28, 28\)"):
        captions.Captioner(captions.SIZES).encode(torch.zeros(1, 28, 28))
    with pytest.raises(FileNotFoundError, match="must hold Fashion-MNIST"):
        captions.read_items(tmp_path, "train", 10)
    seen = captions.record_caption(captions.Captioner(captions.SIZES).eval(), torch.zeros(56, 56), [1, 11, 13])
    with pytest.raises(ValueError, match="must be a word of the text"):
        seen.image_map("boot")


def test_words_of_the_shipped_model_point_at_their_clothes(captions: ModuleType) -> None:
    seen = captions.record_caption(captions.load_captioner(), captions.read_picture(captions.PICTURE))
    named = captions.parse_caption(seen.labels["input"].texts[0][1:])
    assert sorted(quarter for *_, quarter in named) == [0, 1, 2, 3]
    assert {captions.CLOTHES[number] for _, number, _ in named} == CLOTHES_OF_THE_PICTURE
    for _, number, quarter in named:
        assert captions.find_quarter(seen.image_map(captions.CLOTHES[number])) == quarter
    top, left = divmod(named[0][2], 2)
    words = seen.words_for((top / 2, left / 2, top / 2 + 0.5, left / 2 + 0.5))
    assert captions.CLOTHES[named[0][1]] in dict(words[:4])


@pytest.mark.data
@pytest.mark.slow
def test_the_score_of_the_shipped_model(captions: ModuleType, data: Path) -> None:
    items = captions.read_items(data / "fashion_mnist", "test", 500)
    found = captions.score(captions.load_captioner(), items, 200)
    assert found.pointing_given >= 95
    assert found.pointing >= 95
