"""Writes a History as one HTML file: the heads of a training over its steps, without network."""

from __future__ import annotations

import base64
import html as markup
import json

from foci.record.head_totals import HEAD_STATISTICS
from foci.record.history import History, to_json_number
from foci.view.page.bundle import ASSETS, bundle_script
from foci.view.page.document import PAGE_TEMPLATE, build_security_policy, clean_title


def render_history_page(history: History, title: str = "attention") -> str:
    """Renders the page; names of layers are only in the payload, never in the markup."""
    style = "\n".join((ASSETS / name).read_text("utf-8") for name in ("page.css", "history.css"))
    script = bundle_script("history")
    payload = json.dumps(collect_payload(history, clean_title(title)))
    return PAGE_TEMPLATE.format(
        state="",
        policy=build_security_policy(script, style),
        title=markup.escape(f"{clean_title(title)} · foci"),
        style=style,
        payload=base64.b64encode(payload.encode()).decode("ascii"),
        script=script,
    )


def collect_payload(history: History, title: str) -> dict[str, object]:
    """Steps, layers and, of each statistic, one row per head: numbers, or None where there is none."""
    rows = {name: history.values(name).T.tolist() for name in history.statistics}
    return {
        "title": title,
        "steps": history.steps,
        "layers": list(history.layers.items()),
        "about": {name: HEAD_STATISTICS[name] for name in rows},
        "values": {name: [[to_json_number(value) for value in row] for row in each] for name, each in rows.items()},
    }
