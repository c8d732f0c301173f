"""Configuration of the documentation: `make docs` executes every page and writes HTML to docs/build/html."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

import foci

sys.path.insert(0, str(Path(__file__).parent))

from error_messages import ErrorMessages

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
exclude_patterns = ["build"]

# Pages with code cells run in the build; a page runs again only if its code changed.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent / "build" / "cache")
nb_execution_timeout = 180
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
# The page, which needs no kernel, in place of the widget.
nb_mime_priority_overrides = [("html", "text/html", 1)]
# The widget is not used here: no scripts from a network.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
default_role = "code"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


# README files of folders, and the pages that include them.
README_PAGES = {
    "benchmarks/README.md": "benchmarks/method.md",
    "benchmarks/training/README.md": "benchmarks/trainings.md",
    "foci/models/README.md": "reference/pretrained.md",
}


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


def link_readmes(app: Any, name: str, source: list[str]) -> None:
    """Point links to the README files of folders, which work on GitHub, to the pages that include them."""
    for path, page in README_PAGES.items():
        source[0] = source[0].replace(f"(../{path})", f"({page})")


def write_llms_txt(app: Any, exception: Exception | None) -> None:
    """Write llms.txt, which lists every page with its first sentence, and the source of each page beside its HTML."""
    if exception is not None or app.builder.name != "html":
        return
    lines = [f"# foci {release}\n", f"> {read_first_sentence(app, 'index')}\n"]
    children = app.env.toctree_includes
    # Sections first, then the pages that are in none.
    for page in sorted(children["index"], key=lambda page: page not in children):
        if page in children or "\n## Guides\n" not in lines:
            lines.append(f"\n## {app.env.titles[page].astext() if page in children else 'Guides'}\n")
        for name in [page, *children.get(page, [])]:
            sentence = read_first_sentence(app, name)
            lines.append(f"- [{app.env.titles[name].astext()}]({name}.md)" + (f": {sentence}" if sentence else ""))
            copy = Path(app.outdir) / f"{name}.md"
            copy.write_text(Path(app.env.doc2path(name)).read_text())
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")


def read_first_sentence(app: Any, name: str) -> str:
    """The first sentence of the first paragraph of a page."""
    paragraphs = app.env.get_doctree(name).findall(nodes.paragraph)
    paragraph = next((found for found in paragraphs if isinstance(found.parent, nodes.section)), None)
    text = "" if paragraph is None else " ".join(paragraph.astext().split())
    return re.split(r"(?<=[.?!]) ", text)[0].rstrip(":")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)
    app.add_directive("error-messages", ErrorMessages)
    app.connect("source-read", link_readmes)
    app.connect("build-finished", write_llms_txt)
