"""Writes a Record as one HTML file with script, style and data inside; the explorer's page runs the same script."""

from __future__ import annotations

import base64
import hashlib
import html as markup
import os
from pathlib import Path

from foci.record.record import Record
from foci.view.page.bundle import ASSETS, bundle_script
from foci.view.page.payload import SURROGATES, encode_payload

PAGE_TEMPLATE = """\
<!doctype html>
<html lang="en"{state}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript, which is disabled.</noscript>
<script type="text/plain" id="payload">{payload}</script>
<script>{script}</script>
</body>
</html>
"""

MAX_TITLE_CHARACTERS = 200

FRAME_TEMPLATE = """\
<iframe srcdoc="{page}" title="{title}" width="100%" height="{height}" loading="lazy" allow="clipboard-write" \
style="border: 1px solid rgba(128, 128, 128, 0.35); border-radius: 8px; background: transparent"></iframe>"""


def render_html(record: Record, title: str | None = None, state: str = "") -> str:
    """Render the page. Texts of the model and the tokenizer are only in the payload, never in the markup.

    `state` is the initial view, in the form of the page's URL fragment: "v=lines&h=L0H1".
    """
    return render_payload(encode_payload(record, title), title or record.model, state)


def render_payload(payload: bytes, title: str, state: str = "") -> str:
    """Render the page of an encoded record."""
    style = (ASSETS / "page.css").read_text("utf-8")
    script = bundle_script()
    return PAGE_TEMPLATE.format(
        state=f' data-state="{markup.escape(state)}"' if state else "",
        policy=build_security_policy(script, style),
        title=markup.escape(f"{clean_title(title)} · foci"),
        style=style,
        payload=base64.b64encode(payload).decode("ascii"),
        script=script,
    )


def write_html(record: Record, path: str | os.PathLike[str], title: str | None = None, state: str = "") -> None:
    """Write the page to a file, which opens in any browser at the view `state`."""
    Path(path).write_text(render_html(record, title, state), "utf-8")


def render_frame(record: Record, title: str | None = None, height: int = 720) -> str:
    """Render the page inside an iframe, for notebooks; nbconvert and VS Code keep it."""
    return render_payload_frame(encode_payload(record, title), title or record.model, height)


def render_payload_frame(payload: bytes, title: str, height: int = 720) -> str:
    """Render the page of an encoded record inside an iframe."""
    return wrap_in_frame(render_payload(payload, title), f"attention of {clean_title(title)}", height)


def clean_title(text: str) -> str:
    """Shorten a title and replace surrogates, which UTF-8 cannot encode."""
    return SURROGATES.sub(
        "\ufffd", text if len(text) <= MAX_TITLE_CHARACTERS else text[: MAX_TITLE_CHARACTERS - 1] + "…"
    )


def wrap_in_frame(page: str, title: str, height: int = 720) -> str:
    """Wrap a page in an iframe."""
    # Inside double quotes only these two characters need escaping.
    inner = page.replace("&", "&amp;").replace('"', "&quot;")
    return FRAME_TEMPLATE.format(page=inner, title=markup.escape(title), height=height)


def build_security_policy(script: str, style: str) -> str:
    """Build a policy that allows only this script and this style, and no network."""
    rules = {
        "default-src": "'none'",
        "script-src": hash_source(script),
        "style-src": hash_source(style),
        "img-src": "data: blob:",
        "media-src": "blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
