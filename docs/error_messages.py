"""The directive `error-messages`: the messages of the exceptions that packages of foci raise, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).parent.parent
# What stands where a message has a value.
VALUE = "…"


def read_messages(path: Path) -> set[tuple[str, str]]:
    """Exception and message of every `raise` of a module, or of the modules of a package."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = read_text(node.exc.args[0])
                # A message that is made elsewhere, or of values only, says nothing here.
                if any(character.isalpha() for character in message):
                    found.add((ast.unparse(node.exc.func), message))
    return found


def read_text(node: ast.expr) -> str:
    """The text of a string expression, with values replaced."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return read_text(node.left) + read_text(node.right)
    return VALUE


class ErrorMessages(Directive):
    """Lists the messages of modules or packages, named relative to foci, in alphabetical order."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        messages = {message for name in self.arguments[0].split() for message in read_messages(ROOT / "foci" / name)}
        items = []
        for exception, message in sorted(messages, key=lambda found: found[1].lstrip(VALUE + " ").lower()):
            paragraph = nodes.paragraph("", "", nodes.literal("", exception), nodes.Text(f" {message}"))
            items.append(nodes.list_item("", paragraph))
        return [nodes.bullet_list("", *items)]
