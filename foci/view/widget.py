"""Shows a record in a notebook as a widget: the page in a frame, connected to the record in the kernel.

What is selected in the page can be read and set in Python. Short records are embedded in the widget; of long ones only
the labels are, and rows and tiles of the lazy weights are sent when the page draws them.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import cache
from html import escape
from importlib.util import find_spec
from threading import Thread
from typing import Any

import torch

from foci.record.layer import Layer
from foci.record.record import Record
from foci.view.display import build_view_record, count_entries, is_fast_to_embed
from foci.view.page import requests
from foci.view.page.arrays import PackedArrays
from foci.view.page.bundle import bundle_widget
from foci.view.page.document import render_frame, render_payload_frame
from foci.view.page.payload import build_header, compress_payload
from foci.weights.weights import Weights

DEFAULT_HEIGHT = 720


def widget(
    shown: Record | Weights | Layer,
    *,
    height: int = DEFAULT_HEIGHT,
    embed: bool | None = None,
    title: str | None = None,
) -> Any:
    """Show a record, weights or a layer in a notebook, and read and set there what is selected.

    >>> _, weights = foci.attention(*torch.randn(3, 1, 4, 6, 8), mask=foci.causal, return_weights=True)
    >>> view = foci.widget(weights)  # the last line of a cell displays it
    >>> view.head, view.query = 2, 5  # moves the view; after a click, the same names have what was clicked
    >>> view.selection
    [5]
    >>> view.close()  # removes the view and frees the tensors

    Traits, which `observe` reports: `layer` and `head` (None: the mean of the layer's heads), `query` (None: none is
    selected), `selection` (all selected positions), `direction` ("to": they are queries, "from": keys), `view` ("text",
    "map", ...) and `height`. Layers and heads are numbers in the order of the record.

    Args:
        shown: a Record, Weights or a layer of a record.
        height: the height in pixels, which does not change.
        embed: True: embed all that the page shows, so that it also works without a kernel. False: send labels only, and
            rows and tiles when they are drawn. None: embed records that take seconds at most.
        title: the title of the page; None: the name of the model.
    """
    record = build_view_record(shown)
    return make_widget(record, lambda: record, height, embed, title)


def make_widget(
    record: Record, get_record: Callable[[], Record | None], height: int, embed: bool | None, title: str | None
) -> Any:
    """Make a widget; `get_record` is called for each request, so that a display need not keep the record alive."""
    kind, arrays = create_widget_class(), PackedArrays()
    embedded = is_fast_to_embed(record) if embed is None else embed
    header = build_header(record, title, arrays, on_demand=not embedded)
    layer, head = find_initial_head(header)
    return kind(
        get_record,
        record,
        embedded,
        payload=compress_payload(header, arrays),
        height=height,
        layer=layer,
        head=head,
        selection=[header["initial"]["query"]],
        direction=header["initial"]["direction"],
    )


def find_initial_head(header: dict[str, Any]) -> tuple[int, int | None]:
    """Return the numbers of the layer and the head that the page shows first; None: the mean of the heads."""
    name = header["initial"]["head"]
    layer = next(i for i, one in enumerate(header["layers"]) if name == one["label"] or name in one["names"])
    names = header["layers"][layer]["names"]
    return layer, names.index(name) if name in names else None


def can_show_widgets() -> bool:
    """Tell whether this is a notebook kernel with anywidget installed."""
    if find_spec("anywidget") is None or find_spec("IPython") is None:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def render_in_notebook(shown: Record | Weights | Layer) -> dict[str, Any]:
    """Render what a notebook displays: the widget, the page for programs without widgets, and a line of text.

    An empty matrix is only text. A large one has no page, which would take many seconds.
    """
    text = repr(shown)
    is_empty = not shown.layers or shown.filling if isinstance(shown, Record) else not count_entries(shown)
    if is_empty:
        return {"text/plain": text}
    record = build_view_record(shown)
    if can_show_widgets():
        shown_widget: dict[str, Any] = make_display_widget(shown, record)._repr_mimebundle_()[0]
        return shown_widget | {"text/plain": text}
    if is_fast_to_embed(record):
        return {"text/plain": text, "text/html": add_text_fallback(render_frame(record), text)}
    advice = "save('page.html') writes the page, and with anywidget installed the cell shows a widget"
    return {"text/plain": f"{text}\n{count_entries(shown):,} entries are too many for a notebook cell: {advice}"}


def add_text_fallback(frame: str, text: str) -> str:
    """Add a text that only programs show which remove frames and styles, such as GitHub."""
    return f'<pre style="display: none">{escape(text)}</pre>{frame}'


def make_display_widget(shown: Record | Weights | Layer, record: Record) -> Any:
    """Make the widget of a notebook's output; it does not keep what it shows alive."""
    # A record of kept weights has its matrices once, as long as it is alive itself.
    matrices = [record] if isinstance(shown, Record) and record is not shown else []
    held = weakref.ref(shown, lambda _: matrices.clear())

    def get_record() -> Record | None:
        alive = held()
        return matrices[0] if matrices else None if alive is None else build_view_record(alive)

    return make_widget(record, get_record, DEFAULT_HEIGHT, None, None)


def handle_message(record: Record | None, content: Any) -> tuple[bytes, str]:
    """Handle a request of the page: bytes, and an error or an empty text."""
    if record is None:
        return b"", "this record is no longer available: assign it to a variable and run the cell again"
    try:
        handler = requests.REQUEST_HANDLERS[content["question"]]
        parameters = {str(name): str(value) for name, value in content["parts"].items()}
        with torch.no_grad():
            result = handler(requests.PageRequest(record, parameters))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        return b"", str(problem)
    return result if isinstance(result, bytes) else json.dumps(result).encode(), ""


@cache
def create_widget_class() -> Any:
    """Create the class on first use: anywidget is optional."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError("widgets need anywidget: pip install 'foci[notebook]'") from error

    class AttentionWidget(anywidget.AnyWidget):  # type: ignore[misc]
        """The page of a record in a notebook; made by `foci.widget`."""

        _esm = bundle_widget()
        payload = traitlets.Bytes().tag(sync=True)
        height = traitlets.Int(DEFAULT_HEIGHT, min=100).tag(sync=True)
        layer = traitlets.Int(0).tag(sync=True)
        head = traitlets.Int(None, allow_none=True).tag(sync=True)
        query = traitlets.Int(None, allow_none=True).tag(sync=False)
        selection = traitlets.List(traitlets.Int()).tag(sync=True)
        direction = traitlets.Enum(["to", "from"], default_value="to").tag(sync=True)
        view = traitlets.Unicode("").tag(sync=True)

        def __init__(
            self, get_record: Callable[[], Record | None], record: Record, embedded: bool, **traits: Any
        ) -> None:
            self.get_record, self.embedded = get_record, embedded
            self.name, self.text = record.model, repr(record)
            self.sizes = [layer.shape[1:] for layer in record.layers.values()]
            super().__init__(**traits)
            self.on_msg(self._receive)
            self._follow_selection(None)
            self.observe(self._follow_selection, ["selection", "direction"])
            self.observe(self._follow_query, ["query"])

        @traitlets.validate("layer")  # type: ignore[untyped-decorator]
        def _check_layer(self, proposal: Any) -> Any:
            return check_index("layer", proposal["value"], len(self.sizes))

        @traitlets.validate("head")  # type: ignore[untyped-decorator]
        def _check_head(self, proposal: Any) -> Any:
            return check_index("head", proposal["value"], max(heads for heads, _, _ in self.sizes))

        @traitlets.validate("selection")  # type: ignore[untyped-decorator]
        def _check_selection(self, proposal: Any) -> Any:
            longest = max(max(lengths) for _, *lengths in self.sizes)
            return [check_index("selection", position, longest) for position in proposal["value"]]

        def _follow_selection(self, _change: Any) -> None:
            self.query = self.selection[0] if self.selection and self.direction == "to" else None

        def _follow_query(self, change: Any) -> None:
            if change["new"] is not None and (self.direction != "to" or self.selection[:1] != [change["new"]]):
                self.direction, self.selection = "to", [change["new"]]

        def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
            # The picture of a long matrix takes seconds: the kernel stays free meanwhile.
            if content.get("question") == "picture":
                Thread(target=self._handle, args=(content,), daemon=True).start()
            else:
                self._handle(content)

        def _handle(self, content: Any) -> None:
            result, error = handle_message(self.get_record(), content)
            self.send({"id": content.get("id"), "error": error}, buffers=[error.encode() if error else result])

        def _repr_mimebundle_(self, **options: Any) -> Any:
            """Return the widget, and the page and the text for programs without widgets."""
            shown = super()._repr_mimebundle_(**options)
            if shown is None:
                return None
            data, metadata = shown
            if self.embedded:
                frame = render_payload_frame(self.payload, self.name, self.height)
                data = data | {"text/html": add_text_fallback(frame, self.text)}
            return data | {"text/plain": self.text}, metadata

        def close(self) -> None:
            """Remove the view and free the tensors."""
            self.get_record = lambda: None
            super().close()
            self.payload = b""

    return AttentionWidget


def check_index(name: str, value: int | None, count: int) -> int | None:
    """Return the index if it is None or below `count`."""
    if value is not None and not 0 <= value < count:
        raise ValueError(f"{name} must be an integer from 0 to {count - 1}, got {value}")
    return value
