"""Configuration of the documentation: `make docs` executes every page and writes HTML to docs/build/html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foci

project = "foci"
author = "the foci developers"
version = release = foci.__version__
html_title = "foci"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
]
exclude_patterns = ["build", "numbers.md"]

# Pages with code cells run in the build; a page runs again only if its code changed.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent / "build" / "cache")
nb_execution_timeout = 180
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
# The page, which needs no kernel, in place of the widget.
nb_mime_priority_overrides = [("html", "text/html", 1)]
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def prepare_docstring(app: Any, what: str, name: str, target: object, options: Any, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText: absolute values are not substitutions, indented blocks are drawings."""
    for i, line in enumerate(lines):
        if not line.startswith((" ", ">>>")):
            lines[i] = line.replace("|", "\\|")
    for i, line in enumerate(lines[:-2]):
        indent = len(line) - len(line.lstrip())
        follows = lines[i + 2]
        is_block = line.rstrip().endswith((":", ",", ".")) and not lines[i + 1].strip() and follows.strip()
        if is_block and len(follows) - len(follows.lstrip()) >= indent + 4 and not line.rstrip().endswith("::"):
            lines[i] = line.rstrip().removesuffix(":") + ("::" if line.rstrip().endswith(":") else " ::")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)
