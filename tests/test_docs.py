"""The documents: their code runs and prints what they say, and their pictures are there and small.

Blocks marked python run; those marked py need a model or data of the reader's.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
WITH_CODE = [name for name in DOCUMENTS if "```python\n" in (ROOT / "docs" / name).read_text()]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:^```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
LARGEST = 200_000


def test_there_are_documents_whose_code_says_what_it_prints() -> None:
    assert "views.md" in WITH_CODE
    assert any(printed for _, printed in BLOCK.findall((ROOT / "docs" / "views.md").read_text()))


@pytest.mark.parametrize("document", WITH_CODE)
def test_the_code_runs_and_prints_what_it_says(
    document: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((ROOT / "docs" / document).read_text())
    assert blocks
    names: dict[str, object] = {}
    for code, printed in blocks:
        exec(compile(code, document, "exec"), names)
        out = capsys.readouterr().out
        assert not printed or out == printed
    pyplot.close("all")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_pictures_and_links_are_there_and_pictures_are_small(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (ROOT / "docs" / target).exists()] == []
    pictures = [ROOT / "docs" / target for target in targets if target.endswith(".png")]
    assert {path.name: path.stat().st_size for path in pictures if path.stat().st_size > LARGEST} == {}
