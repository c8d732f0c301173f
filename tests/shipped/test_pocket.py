from pathlib import Path

import pytest
import torch

from foci import shipped
from foci.tasks.pairs import Pair
from foci.tasks.trained import save
from foci.tasks.translation import Translation, TranslationSettings


def test_a_model_that_ships_answers_and_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert shipped.names() == []
    (tmp_path / "translation").mkdir()
    torch.manual_seed(0)
    settings = TranslationSettings(size="tiny", width=32, heads=2, tokenizer="words", beam=1)
    task = Translation.start(settings, [Pair("a dog sleeps", "ein Hund schläft")])
    save(
        tmp_path / "translation" / "model.safetensors",
        task,
        task.model(),
        {"licence": "x"},
        storage="int8",
        largest=9000,
    )
    model = shipped.pocket("translation")
    one, other = model(["a dog", "sleeps"])
    assert (model("a dog"), model("sleeps")) == (one, other)
    assert model.about == {"licence": "x"}
    assert model.show("a dog").answer == one
    with pytest.raises(ValueError, match=r"expected one of the models that ship \(translation\), but got 'flying'"):
        shipped.pocket("flying")


@pytest.mark.parametrize("name", shipped.names() or [None])
def test_what_ships_says_where_it_comes_from(name: str | None) -> None:
    if name is None:
        pytest.skip("no model ships yet")
    about = shipped.pocket(name).about
    assert about["source"]
    assert about["licence"]
    assert about["score"]


def test_what_ships_stays_small() -> None:
    sizes = [path.stat().st_size for path in shipped.FOLDER.rglob("*") if path.is_file()]
    assert sum(sizes) <= 30 * 10**6
    assert max(sizes) < 15 * 2**20
