"""The README and the documents: their code runs, prints what they say and imports public names only; images are small.

Blocks marked python run; those marked py need a model or data of the reader. The commands of console blocks are valid,
and those of the tour run in their order.
"""

import ast
import importlib
import inspect
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

import foci
from foci.cli import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:^```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)
ANY_BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CELL = re.compile(r"^```\{code-cell\} python\n(?::tags:[^\n]*\n)?(.*?)^```", re.DOTALL | re.MULTILINE)
# `make docs` executes these.
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*/*.md") if "{code-cell}" in path.read_text()
)
SECTION_PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*/*.md"))
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
WITH_CODE = [name for name in DOCUMENTS if BLOCK.search((ROOT / name).read_text())]
PUBLIC_MODULES = {"foci", "foci.nn", "foci.hf", "foci.decoding", "foci.bertviz", "foci.losses", "foci.sharding"}
MAX_IMAGE_BYTES = 200_000


def private_names(code: str) -> list[str]:
    """Modules and names of foci in a block of code that are not public."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "foci"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "foci":
            found += [f"foci.{alias.name}" for alias in node.names] if node.module == "foci" else [node.module or ""]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "foci":
            found.append(f"foci.{node.attr}")
    public = PUBLIC_MODULES | {f"foci.{name}" for name in foci.__all__}
    return [name for name in found if name not in public]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_examples_use_public_names_only(document: str) -> None:
    blocks = ANY_BLOCK.findall((ROOT / document).read_text())
    assert [name for code in blocks for name in private_names(code)] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import foci, torch\nfoci.attention(q, k, v)\nfrom foci import causal, nn\nimport foci.hf", []),
        ("from foci.view import figures", ["foci.view"]),
        ("from foci import masks\nfoci.record.record.Record", ["foci.masks", "foci.record"]),
    ],
)
def test_private_names_are_found(code: str, found: list[str]) -> None:
    assert sorted(private_names(code)) == found


def test_every_public_name_is_in_the_reference_and_in_a_page() -> None:
    docs = ROOT / "docs"
    reference = "\n".join(path.read_text() for path in (docs / "reference").glob("*.md"))
    pages = "\n".join(
        path.read_text() for folder in ("learn", "howto", "coming_from") for path in (docs / folder).glob("*.md")
    )
    assert [name for name in foci.__all__ if not re.search(rf"^\.\. auto\w+:: {name}$", reference, re.MULTILINE)] == []
    assert [name for name in foci.__all__ if not re.search(rf"foci\.{name}\b", pages)] == []


def test_the_docstring_of_every_public_function_and_class_has_an_example() -> None:
    modules = [importlib.import_module(name) for name in sorted(PUBLIC_MODULES)]
    named = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in dir(module)}
    own = {
        name: value.__doc__ or ""
        for name, value in named.items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("foci.")
        and not name.split(".")[-1].startswith("_")
    }
    assert len(own) > 80
    assert [name for name, text in own.items() if ">>> " not in text] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_public_names_only_and_are_valid_python(page: str) -> None:
    cells = CELL.findall((ROOT / page).read_text())
    assert cells
    assert [name for code in cells for name in private_names(code)] == []


def test_some_documents_show_the_output_of_their_code() -> None:
    assert {"README.md", "docs/tour.md", "docs/views.md"} <= set(WITH_CODE)
    for document in ("docs/tour.md", "docs/views.md"):
        assert any(printed for _, printed in BLOCK.findall((ROOT / document).read_text()))


@pytest.mark.parametrize("document", WITH_CODE)
def test_the_code_runs_and_prints_what_the_document_says(
    document: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code, printed in BLOCK.findall((ROOT / document).read_text()):
        exec(compile(code, document, "exec"), names)
        out = capsys.readouterr().out
        assert not printed or out == printed
    pyplot.close("all")


def foci_commands(document: str) -> list[list[str]]:
    """The arguments of the `foci` commands in the console blocks, without comments and redirections."""
    lines = [line for block in CONSOLE.findall((ROOT / document).read_text()) for line in block.splitlines()]
    commands = [line.removeprefix("$ foci ") for line in lines if line.startswith("$ foci ")]
    return [shlex.split(re.split(" [<>] ", command)[0], comments=True) for command in commands]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_have_known_options(document: str) -> None:
    for arguments in foci_commands(document):
        assert main.parse_arguments(arguments).command == arguments[0]


def test_files_that_the_tour_names_are_written_by_an_earlier_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = {"runs/translation"}
    for arguments in foci_commands("docs/tour.md"):
        paths = {word for word in arguments[1:] if re.fullmatch(r"\S*\.\w+|\S+/\S+", word)}
        is_out = {after for word, after in pairwise(arguments) if word == "--out"}
        assert paths - is_out <= written
        written |= is_out
        if arguments[0] == "samples":
            assert main.main(arguments) == 0
            written |= {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert "samples/shirt.png" in written


@pytest.mark.slow
def test_the_commands_of_the_tour_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    served = []
    monkeypatch.setattr("foci.explore.server.serve", lambda *_, **options: served.append(options["port"]))
    printed = {}
    for arguments in foci_commands("docs/tour.md"):
        assert main.main(arguments) == 0
        printed[" ".join(arguments[:2])] = capsys.readouterr().out
    # `foci view` and `foci explore` open a browser.
    assert served == [0, 0]
    assert "Wo ist der Bahnhof?" in printed["run translation"]
    assert "t-shirt (91%)" in printed["run vision"]
    assert re.fullmatch(r"seven \(9\d%\)\n", printed["run speech"])
    assert float(printed["evaluate runs/translation"].split()[1]) > 97


def test_the_readme_is_one_screen() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 45


@pytest.mark.parametrize("document", [*DOCUMENTS, *SECTION_PAGES])
def test_links_exist_and_images_are_small(document: str) -> None:
    folder = (ROOT / document).parent
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text())
    paths = [folder / target.partition("#")[0] for target in targets if "://" not in target and target[0] != "#"]
    assert [path for path in paths if not path.exists()] == []
    images = [path for path in paths if path.suffix == ".png"]
    assert {path.name: path.stat().st_size for path in images if path.stat().st_size > MAX_IMAGE_BYTES} == {}


@pytest.mark.parametrize("section", ["learn", "howto", "coming_from", "reference"])
def test_an_index_links_to_every_page_of_its_section(section: str) -> None:
    text = (ROOT / "docs" / section / "index.md").read_text()
    tree = re.search(r"^```\{toctree\}\n(?::.*\n)*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    pages = sorted(path.stem for path in (ROOT / "docs" / section).glob("*.md") if path.stem != "index")
    assert tree is not None
    assert sorted(tree[1].split()) == pages
    assert sorted(re.findall(r"\]\((\w+)\.md\)", text)) == pages
