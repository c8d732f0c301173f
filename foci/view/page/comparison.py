"""Writes a Comparison as one HTML file: the page of both records, with a view that compares them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from foci.record.compare import Comparison
from foci.view.page.arrays import PackedArrays
from foci.view.page.document import clean_title, render_payload, wrap_in_frame
from foci.view.page.payload import build_header, compress_payload, truncate_with_length


def encode_comparison(comparison: Comparison, title: str | None = None) -> bytes:
    """Encode both records as one payload, whose header says which layers are compared and how they are aligned."""
    arrays, record = PackedArrays(), comparison.joint_record()
    header = build_header(record, title or name_comparison(comparison), arrays)
    changes = comparison.changes()
    best = next(iter(changes))
    pair, index = comparison.pair(best)
    head = pair.first.heads[index or 0]
    shown = f"{comparison.names[0]}: {pair.first.name}"
    is_key = comparison.is_read_by_image(best)
    header["initial"] = {
        "head": record.name_of(record.layers[shown], head),
        "query": comparison.find_most_changed(best)[0],
        "direction": "from" if is_key else "to",
    }
    header["compare"] = {
        "names": [truncate_with_length(name) for name in comparison.names],
        "pairs": describe_pairs(comparison, changes),
    }
    return compress_payload(header, arrays)


def name_comparison(comparison: Comparison) -> str:
    return f"{comparison.names[0]} and {comparison.names[1]}"


def describe_pairs(comparison: Comparison, changes: dict[str, float]) -> list[dict[str, Any]]:
    """Describe each pair of layers: their numbers in the payload, the change of each head, and the alignment."""
    count, described = len(comparison.pairs), []
    for number, pair in enumerate(comparison.pairs):
        queries, keys = comparison.align(pair.name)
        described.append(
            {
                "layers": [number, count + number],
                "names": list(pair.heads),
                "changes": [changes[head] for head in pair.heads],
                "queries": queries,
                "keys": keys if keys != queries else None,
            }
        )
    return described


def render_comparison_page(comparison: Comparison, title: str | None = None) -> str:
    """Render the page, which opens with the view that compares."""
    shown = title or name_comparison(comparison)
    return render_payload(encode_comparison(comparison, title), shown, "v=compare")


def write_comparison(comparison: Comparison, path: str | os.PathLike[str], title: str | None = None) -> None:
    """Write the page to a file."""
    Path(path).write_text(render_comparison_page(comparison, title), "utf-8")


def render_comparison_frame(comparison: Comparison, height: int = 720) -> str:
    """Render the page inside an iframe, for notebooks."""
    title = f"comparison of {clean_title(name_comparison(comparison))}"
    return wrap_in_frame(render_comparison_page(comparison), title, height)
