"""The house: imports go one way, files speak only of the project, and the README's code runs."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import foci

ROOT = Path(__file__).parent.parent

# From the ground up: nothing reaches what stands behind it here, not even through others. What is not named may stand
# anywhere, as long as no import leads back to it.
ORDER = (
    "kernels",
    "arguments",
    "backends",
    "statistics",
    "weights",
    "layer",
    "record",
    "view",
    "call",
    "nn",
    "capture",
    "foci",
    "explain",
    "cli",
    "__main__",
)

# What a room may not import itself.
APART = {"nn": {"backends", "kernels", "statistics"}, "view": {"call", "capture", "nn"}}

# `record.show()` and `record.save("page.html")` reach the views: the one way back, by local imports.
BACK = ("record", "view")

Graph = dict[str, set[str]]

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


def room_of(path: Path) -> str:
    """foci/backends/sdpa/__init__.py -> backends, foci/masks/kinds.py -> masks, foci/__init__.py -> foci."""
    first = path.relative_to(ROOT / "foci").parts[0].removesuffix(".py")
    return "foci" if first == "__init__" else first


def imported(source: str, rooms: set[str]) -> set[str]:
    """The rooms of foci that a file imports, local imports included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = {f"foci.{alias.name}" if alias.name in rooms else "foci" for alias in node.names}
            found |= names if node.module == "foci" else {node.module or ""}
    parts = [name.split(".") for name in found]
    return {part[1] if len(part) > 1 else "foci" for part in parts if part[0] == "foci"}


def house() -> Graph:
    """Which room imports which."""
    files = sorted((ROOT / "foci").rglob("*.py"))
    graph: Graph = {room_of(path): set() for path in files}
    for path in files:
        graph[room_of(path)] |= imported(path.read_text(), set(graph)) - {room_of(path)}
    graph[BACK[0]].discard(BACK[1])
    return graph


def reached(graph: Graph, room: str) -> set[str]:
    """All that a room imports, and what that imports, and so on."""
    found: set[str] = set()
    ahead = set(graph.get(room, ()))
    while ahead:
        found |= ahead
        ahead = set().union(*(graph.get(other, set()) for other in ahead)) - found
    return found


def wrong_ways(graph: Graph) -> list[str]:
    found = [f"{room} reaches itself" for room in graph if room in reached(graph, room)]
    for place, room in enumerate(ORDER):
        found += [f"{room} reaches {other}" for other in ORDER[place + 1 :] if other in reached(graph, room)]
    found += [f"kernels imports {other}" for other in graph.get("kernels", ())]
    return found + [f"{room} imports {other}" for room in APART for other in graph.get(room, set()) & APART[room]]


def test_imports_go_one_way() -> None:
    graph = house()
    assert {"backends", "weights", "call"} <= reached(graph, "foci")
    assert wrong_ways(graph) == []


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"call": {"weights"}, "weights": {"backends"}, "backends": {"arguments"}}, []),
        ({"backends": {"entries"}, "entries": {"weights"}}, ["backends reaches weights"]),
        ({"masks": {"spans"}, "spans": {"masks"}}, ["masks reaches itself", "spans reaches itself"]),
        ({"kernels": {"where"}}, ["kernels imports where"]),
        ({"nn": {"backends", "call"}}, ["nn imports backends"]),
    ],
)
def test_a_wrong_way_is_found(graph: Graph, found: list[str]) -> None:
    assert wrong_ways(graph) == found


def test_imports_are_read_wherever_they_stand() -> None:
    source = (
        "import torch, foci.scores\ndef f():\n    from foci import masks, attention\n    from foci.nn.scores import x"
    )
    assert imported(source, {"masks", "scores", "nn"}) == {"foci", "masks", "scores", "nn"}
    assert imported("from foci import attention", {"masks"}) == {"foci"}


def test_naming_the_call_brings_it_and_no_compiler() -> None:
    code = "foci.attention; print(*(name for name in sys.modules if name.startswith(('torch._dynamo', 'foci'))))"
    code = f"import sys, foci; {code}"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    brought = {name.partition(".")[2].partition(".")[0] for name in printed.split() if name.startswith("foci.")}
    assert "call" in brought
    assert not {"nn", "record", "capture", "view", "decoding"} & brought
    assert "torch._dynamo" not in printed.split()


def test_the_command_line_is_there_before_torch_is() -> None:
    code = "import sys, foci.cli.main; foci.cli.main.parser(); print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "torch" not in printed.split()


def test_every_public_name_is_found_and_no_other() -> None:
    listed = {name for names in foci.PARTS.values() for name in names}
    assert listed == {*foci.__all__}
    assert all(getattr(foci, name) is getattr(import_module(foci.PLACES[name]), name) for name in listed)
    assert foci.masks.kinds is import_module("foci.masks")
    with pytest.raises(AttributeError, match=r"^module 'foci' has no attribute 'nothing'$"):
        foci.nothing  # noqa: B018


@pytest.mark.parametrize("module", ["nn", "record", "capture", "decoding", "tasks", "training", "cli"])
def test_no_part_brings_a_compiler_or_what_is_optional(module: str) -> None:
    code = f"import sys, foci.{module}; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not {"torch._dynamo", "triton", "transformers", "matplotlib"} & set(printed.split())


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
