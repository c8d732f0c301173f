"""The examples in the docstrings of the package run and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import foci

ROOT = Path(__file__).parent.parent


def examples() -> list[doctest.DocTest]:
    """Every docstring with an example; `foci` and `torch` are already imported for it."""
    found = []
    for path in sorted((ROOT / "foci").rglob("*.py")):
        if ">>> " in path.read_text():
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            module = importlib.import_module(name)
            found += doctest.DocTestFinder().find(module, extraglobs={"foci": foci, "torch": torch})
    return [test for test in found if test.examples]


def failures(test: doctest.DocTest) -> str:
    """The differences between the output of an example and its docstring."""
    report: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(optionflags=options, verbose=False).run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_example(test: doctest.DocTest) -> None:
    if test.name == "foci.view.widget.widget":
        pytest.importorskip("anywidget")
    torch.manual_seed(0)
    assert failures(test) == ""


@pytest.mark.parametrize(("text", "wrong"), [(">>> 1 + 1\n2\n", False), (">>> 1 + 1\n3\n", True), (">>> x\n", True)])
def test_a_wrong_example_is_found(text: str, wrong: bool) -> None:
    test = doctest.DocTestParser().get_doctest(text, {}, "example", None, None)
    assert bool(failures(test)) == wrong
