"""Bundles the page's JavaScript modules into one script, without a build step.

A module imports names from its neighbors at its top and exports functions, classes and constants at their declaration;
no other form of import or export is supported.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
IMPORT_LINE = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
EXPORT_KEYWORD = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


def read_module(name: str) -> str:
    """Read the source of a module."""
    return (ASSETS / f"{name}.js").read_text("utf-8")


def order_modules(start: str) -> list[str]:
    """Order the modules that `start` needs, each after its own imports."""
    ordered: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"modules must not import each other in a cycle, got {' -> '.join((*above, name))}")
        for _, other in IMPORT_LINE.findall(read_module(name)):
            if other not in ordered:
                visit(other, (*above, name))
        ordered.append(name)

    visit(start, ())
    return ordered


def bundle_script(start: str = "main") -> str:
    """Return one script in which each module is a function that returns its exports."""
    return "\n".join(["'use strict';", *(wrap_module(name) for name in order_modules(start))])


def wrap_module(name: str) -> str:
    """Wrap a module in a function: `import {a} from "./x.js"` becomes `const {a} = module_x`, exports are returned."""
    text = read_module(name)
    exported = [match[1] for match in EXPORT_KEYWORD.findall(text)]
    text = IMPORT_LINE.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = module_{match[2]};\n", text)
    text = EXPORT_KEYWORD.sub(r"\1 \2", text)
    if left := re.search(r"^(?:import|export)\b.*", text, re.MULTILINE):
        raise ValueError(f"imports and exports must have the forms described in this module, got {left.group()!r}")
    return f"const module_{name} = (() => {{\n{text}\nreturn {{{', '.join(exported)}}};\n}})();"


def bundle_widget() -> str:
    """Return the page as one ES module for notebooks: `runPage` inside a frame, and the frame's host."""
    style = (ASSETS / "page.css").read_text("utf-8")
    page = f"function runPage() {{\n{bundle_script('widget')}\n}}"
    return "\n".join([f"const STYLE = {json.dumps(style)};", page, read_module("notebook")])
