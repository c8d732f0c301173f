"""The house: imports go one way, files speak only of the project, and the README's code runs."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up. A file may import what stands below its own floor, and its own package.
FLOORS = (
    ("kernels", "terminal", "positions", "cache", "grouping", "where"),
    ("spans",),
    ("masks", "scores"),
    ("biases",),
    ("arguments", "saving"),
    ("backends", "held"),
    ("statistics",),
    ("entries", "products"),
    ("weights",),
    ("call",),
    ("foci",),
    ("explain", "doctor"),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# What belongs to somebody's machine or to how the work is organised, not to the project.
FOREIGN = {
    "a path on somebody's machine": r"(?<![\w.~/-])/(?:home|root|work|farm|Users|opt|mnt)/\w",
    "a package registry": r"index-url|find-links|pypi\.org/simple|pythonhosted",
    "how the work is organised": r"(?i)\b(?:tickets?|workplace|sub-?agents?|helpers?|this session|issue #?\d+)\b",
}
TEXT = {
    "",
    ".cfg",
    ".cff",
    ".css",
    ".csv",
    ".html",
    ".js",
    ".json",
    ".md",
    ".py",
    ".sh",
    ".toml",
    ".txt",
    ".typed",
    ".yaml",
    ".yml",
}


def module_of(path: Path) -> str:
    """foci/backends/sdpa.py -> backends, foci/masks.py -> masks, foci/__init__.py -> foci."""
    first = path.relative_to(ROOT / "foci").parts[0].removesuffix(".py")
    return "foci" if first == "__init__" else first


def imported(tree: ast.AST) -> set[str]:
    """The parts of foci that a file imports, local imports included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            below = [f"foci.{alias.name}" for alias in node.names if alias.name in FLOOR_OF]
            found |= set(below) if node.module == "foci" and below else {node.module or ""}
    parts = [name.split(".") for name in found]
    return {part[1] if len(part) > 1 else "foci" for part in parts if part[0] == "foci"}


def upward(path: Path, source: str) -> list[str]:
    """The imports of a file that do not go down."""
    own = module_of(path)
    others = imported(ast.parse(source)) - {own}
    homeless = ({own} | others) - set(FLOOR_OF)
    assert not homeless, f"{sorted(homeless)} stand on no floor: give them one in FLOORS"
    return sorted(f"{own} imports {other}" for other in others if own == "kernels" or FLOOR_OF[other] >= FLOOR_OF[own])


def package_files() -> list[Path]:
    return sorted((ROOT / "foci").rglob("*.py"))


@pytest.mark.parametrize("path", package_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    assert upward(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("kernels/decode.py", "import triton", []),
        ("kernels/decode.py", "from foci.where import Where", ["kernels imports where"]),
        ("masks.py", "from foci.spans import Spans", []),
        ("masks.py", "def f():\n    from foci.call import attention", ["masks imports call"]),
        ("weights.py", "import foci", ["weights imports foci"]),
        ("backends/sdpa.py", "from foci.backends import reference", []),
        ("scores.py", "from foci import masks", ["scores imports masks"]),
    ],
)
def test_an_import_that_goes_up_is_found(file: str, source: str, found: list[str]) -> None:
    assert upward(ROOT / "foci" / file, source) == found


def text_files() -> list[Path]:
    folders = ("foci", "tests", "benchmarks", "docs", "examples", ".ci")
    found = [path for path in ROOT.iterdir() if path.is_file()]
    found += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(path for path in found if path.suffix in TEXT and path.name != Path(__file__).name)


def foreign(text: str) -> list[str]:
    return [f"{what}: {match.group()}" for what, rule in FOREIGN.items() for match in re.finditer(rule, text)]


def test_files_speak_only_of_the_project() -> None:
    files = text_files()
    assert len(files) > 20
    assert {str(path.relative_to(ROOT)): found for path in files if (found := foreign(path.read_text()))} == {}


@pytest.mark.parametrize("text", ["see /home/jane/x", "pip --index-url x", "fixes issue #12", "in this session"])
def test_foreign_words_are_found(text: str) -> None:
    assert len(foreign(text)) == 1


def test_the_code_in_the_readme_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:^```text\n(.*?)^```)?", readme, re.DOTALL | re.MULTILINE)
    assert any(printed for _, printed in blocks)
    names: dict[str, object] = {}
    for code, printed in blocks:
        exec(compile(code, "README.md", "exec"), names)
        out = capsys.readouterr().out
        assert not printed or out == printed
