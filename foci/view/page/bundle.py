"""The page's modules as one script.

A module of the page imports names from its neighbours at its top and exports functions, classes and constants where it
declares them; nothing else of the module system is used, so a few lines join them and there is no build step.
"""

from __future__ import annotations

import re
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
IMPORT_LINE = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
EXPORT_KEYWORD = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)


def read_module(name: str) -> str:
    """The text of a module."""
    return (ASSETS / f"{name}.js").read_text("utf-8")


def order_modules(start: str) -> list[str]:
    """The modules that `start` needs, each after those that it imports itself."""
    found: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"the page's modules must not import in a circle, but got {' -> '.join((*above, name))}")
        for _, other in IMPORT_LINE.findall(read_module(name)):
            if other not in found:
                visit(other, (*above, name))
        found.append(name)

    visit(start, ())
    return found


def bundle_script(start: str = "main") -> str:
    """One script: each module a function of its own, which gives what it exports."""
    return "\n".join(["'use strict';", *(wrap_module(name) for name in order_modules(start))])


def wrap_module(name: str) -> str:
    """`import {a} from "./x.js"` becomes `const {a} = module_x`, and exports what the function returns."""
    text = read_module(name)
    exported = [match[1] for match in EXPORT_KEYWORD.findall(text)]
    text = IMPORT_LINE.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = module_{match[2]};\n", text)
    text = EXPORT_KEYWORD.sub(r"\1 \2", text)
    if left := re.search(r"^(?:import|export)\b.*", text, re.MULTILINE):
        raise ValueError(f"expected imports and exports of the forms that are joined here, received {left.group()!r}")
    return f"const module_{name} = (() => {{\n{text}\nreturn {{{', '.join(exported)}}};\n}})();"
