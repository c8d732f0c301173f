"""The source tree: packages and modules, the direction of imports, CONTRIBUTING's tree, and the public names."""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import foci

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "foci"
MAX_TOP_MODULES = 12

# A room is a module or a package directly in foci/. A room may reach only rooms of earlier lines, also through others.
ORDER = (
    {"kernels", "runtime", "positions", "cache"},
    {"scores", "masks"},
    {"biases"},
    {"arguments"},
    {"gpu"},
    {"backends"},
    {"statistics"},
    {"weights"},
    {"sharding"},
    {"call", "losses", "record"},
    {"nn", "view", "kernel_warmup"},
    {"decoding", "inputs", "bertviz"},
    {"tasks"},
    {"models"},
    {"capture"},
    {"training"},
    {"files", "hf"},
    {"foci"},
    {"explore"},
    {"cli"},
    {"__main__"},
)
# Rooms that a room may not import directly, although they come earlier.
FORBIDDEN = {"nn": {"backends", "gpu", "kernels", "statistics"}, "view": {"call", "capture", "nn"}}
# `show`, `save` and the notebook display of these rooms import the views locally: the one import against the direction.
SHOWN_BY_VIEWS = {"masks", "weights", "record"}

Graph = dict[str, set[str]]


def module_name(path: Path) -> str:
    """foci/backends/sdpa/__init__.py -> foci.backends.sdpa."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """foci.backends.sdpa -> backends, foci -> foci."""
    return module.split(".")[1] if "." in module else module


def walk_without_type_checking(node: ast.AST) -> list[ast.AST]:
    """All nodes below a node, except those under `if TYPE_CHECKING:`."""
    nodes = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        nodes += [child, *walk_without_type_checking(child)]
    return nodes


def imported_modules(source: str, modules: set[str]) -> set[str]:
    """The modules of foci that a file imports, including local imports."""
    found = set()
    for node in walk_without_type_checking(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # The version is defined in foci itself and imports nothing.
            full = {f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__"}
            found |= {name if name in modules else node.module or "" for name in full}
    return {name for name in found if name.split(".")[0] == "foci"}


def module_graph() -> Graph:
    """Which module imports which; foci itself imports the modules of its public names on first use."""
    files = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
    graph = {name: imported_modules(path.read_text(), set(files)) - {name} for name, path in files.items()}
    graph["foci"] |= set(foci.EXPORTS)
    for name, imports in graph.items():
        if room_of(name) in SHOWN_BY_VIEWS:
            graph[name] = {other for other in imports if room_of(other) != "view"}
    return graph


def room_graph(graph: Graph) -> Graph:
    """Which room imports which."""
    rooms: Graph = {}
    for name, imports in graph.items():
        rooms.setdefault(room_of(name), set()).update({room_of(other) for other in imports} - {room_of(name)})
    return rooms


def reached(graph: Graph, start: str) -> set[str]:
    """Everything that a node imports, directly or through others."""
    found: set[str] = set()
    ahead = set(graph.get(start, ()))
    while ahead:
        found |= ahead
        ahead = set().union(*(graph.get(other, set()) for other in ahead)) - found
    return found


def wrong_directions(rooms: Graph) -> list[str]:
    """Imports between rooms against ORDER and FORBIDDEN."""
    level = {room: number for number, line in enumerate(ORDER) for room in line}
    found = [
        f"{room} reaches {other}"
        for room in rooms
        for other in sorted(reached(rooms, room))
        if other != room and level[other] >= level[room]
    ]
    return found + [
        f"{room} imports {other}" for room in FORBIDDEN for other in sorted(rooms.get(room, set()) & FORBIDDEN[room])
    ]


def submodules(package: Path) -> list[str]:
    """The modules and packages directly in a package."""
    modules = [path.stem for path in package.glob("*.py") if path.stem not in {"__init__", "__main__"}]
    return sorted(modules + [path.parent.name for path in package.glob("*/__init__.py")])


def packages() -> list[Path]:
    return [path.parent for path in sorted(SOURCE.rglob("__init__.py")) if path.parent != SOURCE]


def test_few_modules_are_directly_in_foci() -> None:
    modules = [path.stem for path in SOURCE.glob("*.py") if path.stem not in {"__init__", "__main__"}]
    assert len(modules) <= MAX_TOP_MODULES, modules


@pytest.mark.parametrize("package", packages(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_package_docstring_names_its_modules(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    lines = re.findall(r"^ *([\w/, ]+): ", docstring, re.MULTILINE)
    named = {name.strip(" /") for line in lines for name in line.split(",")}
    assert [name for name in submodules(package) if name not in named] == []


def test_no_module_imports_itself_through_others() -> None:
    graph = module_graph()
    assert {name: graph[name] for name in graph if name in reached(graph, name)} == {}


def test_imports_go_one_way() -> None:
    rooms = room_graph(module_graph())
    assert {"backends", "weights", "call"} <= reached(rooms, "foci")
    assert sorted(rooms) == sorted(set().union(*ORDER))
    assert wrong_directions(rooms) == []
    assert rooms["kernels"] == set()


@pytest.mark.parametrize(
    ("rooms", "found"),
    [
        ({"call": {"weights"}, "weights": {"backends"}, "backends": {"arguments"}}, []),
        (
            {"backends": {"statistics"}, "statistics": {"weights"}},
            ["backends reaches statistics", "backends reaches weights", "statistics reaches weights"],
        ),
        ({"nn": {"backends", "call"}}, ["nn imports backends"]),
    ],
)
def test_a_wrong_direction_is_found(rooms: Graph, found: list[str]) -> None:
    assert wrong_directions(rooms) == found


def test_imports_are_found_anywhere_in_a_file_but_not_for_types() -> None:
    source = """
import torch, foci.scores
if TYPE_CHECKING:
    from foci.view import page
def f():
    from foci import masks, attention
    from foci.nn.scores import x
"""
    modules = {"foci.masks", "foci.scores", "foci.nn.scores", "foci.view.page"}
    assert imported_modules(source, modules) == {"foci", "foci.masks", "foci.scores", "foci.nn.scores"}


def documented_tree() -> dict[str, set[str]]:
    """The tree in CONTRIBUTING: the names in each package; lines are `name/  module (comment), module, ...`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"^```text\nfoci/\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block, "CONTRIBUTING.md has no tree"
    texts: dict[str, str] = {}
    package = ""
    for line in block[1].splitlines():
        if start := re.match(r"^  ([\w./]+)  +(?=\S)", line):
            package, line = start[1].rstrip("/"), line[start.end() :]
        texts[package] = f"{texts.get(package, '')} {line.strip()}"
    without_comments = {package: re.sub(r"\([^()]*\)", "", text) for package, text in texts.items()}
    return {package: {name.strip(" /") for name in text.split(",")} for package, text in without_comments.items()}


def test_the_tree_in_contributing_is_the_real_one() -> None:
    tree = documented_tree()
    top = {name.removesuffix(".py") for name in tree if name.endswith(".py")}
    assert top == {path.stem for path in SOURCE.glob("*.py")}
    real = {str(package.relative_to(SOURCE)): set(submodules(package)) for package in packages()}
    documented = {name: names for name, names in tree.items() if not name.endswith(".py")}
    assert documented == real


def test_dir_shows_the_public_names_and_namespaces_only() -> None:
    namespaces = {"bertviz", "decoding", "losses", "nn", "sharding"} | ({"hf"} if find_spec("transformers") else set())
    assert set(dir(foci)) == {*foci.__all__, *namespaces}
    assert foci.__all__ == sorted(foci.__all__)


def test_every_public_name_is_that_of_its_module() -> None:
    assert set(foci.MODULE_OF) == set(foci.__all__)
    for name, module in foci.MODULE_OF.items():
        # Importing a module must not replace a public function of the same name.
        assert getattr(foci, name) is getattr(import_module(module), name)
    assert foci.masks is import_module("foci.masks")
    with pytest.raises(AttributeError, match=r"^module 'foci' has no attribute 'nothing'$"):
        foci.nothing  # noqa: B018
