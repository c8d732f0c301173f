"""The explorer's web application: its pages, background jobs, and exact weights on demand."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from foci.capture.model_loading import TASK_INPUTS, list_pretrained_by_input, locate_model, resolve_device
from foci.explore.access import App, Guard
from foci.explore.jobs import Job, JobQueue, StoredRecord
from foci.explore.model_runner import UNTRAINED, ModelRunner
from foci.record.record import Record
from foci.view.page import requests
from foci.view.page.bundle import ASSETS

MAX_UPLOAD_BYTES = 512 * 2**20
# Number of matrix entries that a CPU computes in a few minutes.
MAX_COMPUTED_ENTRIES = 2**35
# The page draws and sorts every key of a row.
MAX_RECORD_LENGTH = 2**20
# A connection that does not send a whole request header in this time is closed.
MAX_HEADER_SECONDS = 10.0
SHELL_TEMPLATE = """\
<!doctype html>
<html lang="en" data-root="{root}" data-record="{record}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>foci explore</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{root}assets/page.css">
<link rel="stylesheet" href="{root}assets/explorer.css">
<script type="module" src="{root}assets/explorer.js"></script>
</head>
<body></body>
</html>
"""
ASSET_TYPES = {".js": "text/javascript", ".css": "text/css"}


class Explorer:
    """The request handlers, with the models, jobs and records behind them."""

    def __init__(self, models: list[str], device: str = "cpu") -> None:
        self.jobs, self.runner, self.model_names = JobQueue(), ModelRunner(device), models

    async def shell(self, request: Any) -> Any:
        from starlette.responses import HTMLResponse

        name = request.path_params.get("name", "")
        # An unknown name opens the start page and is not written into the HTML.
        known = name if name in self.jobs.records else ""
        return HTMLResponse(SHELL_TEMPLATE.format(root=f"{request.scope['root_path']}/", record=known))

    async def asset(self, request: Any) -> Any:
        from starlette.responses import Response

        there = {path.name: path for path in ASSETS.iterdir() if path.suffix in ASSET_TYPES}
        path = there.get(request.path_params["name"])
        if path is None:
            return error_response(404, "no such file")
        return Response(path.read_bytes(), media_type=ASSET_TYPES[path.suffix])

    async def list_models(self, _request: Any) -> Any:
        models = [*dict.fromkeys([UNTRAINED, *self.model_names, *list_pretrained_by_input(), *list_cached_models()])]
        takes = {name: TASK_INPUTS.get(name, "texts") for name in (UNTRAINED, *list_pretrained_by_input())}
        return json_response({"models": models, "takes": takes})

    async def record_text(self, request: Any) -> Any:
        try:
            content = json.loads(await request.body())
            text, model = content["text"], content["model"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return error_response(400, "the request must have a text and a model")
        if not isinstance(text, str) or not isinstance(model, str):
            return error_response(400, "the request must have a text and a model")
        return self.start(lambda job: self.runner.record_text(model.strip(), text, job))

    async def record_image(self, request: Any) -> Any:
        image, model = await request.body(), request.query_params.get("model", "").strip()
        return self.start(lambda job: self.runner.record_image(model, image, job))

    async def record_sound(self, request: Any) -> Any:
        sound, model = await request.body(), request.query_params.get("model", "").strip()
        return self.start(lambda job: self.runner.record_sound(model, sound, job))

    async def open_file(self, request: Any) -> Any:
        file = await request.body()
        return self.start(lambda job: load_upload(file, job))

    def start(self, work: Callable[[Job], Record]) -> Any:
        """Start a job and answer with its name."""
        try:
            return json_response({"job": self.jobs.submit(work)})
        except ValueError as problem:
            return error_response(429, str(problem))

    async def job(self, request: Any) -> Any:
        job = self.jobs.jobs.get(request.path_params["name"])
        return json_response(job.to_json()) if job else error_response(404, "no such job")

    async def data(self, request: Any) -> Any:
        from starlette.responses import Response

        stored = self.jobs.records.get(request.path_params["name"])
        return (
            Response(stored.payload, media_type="application/octet-stream")
            if stored
            else error_response(404, RECORD_GONE)
        )

    async def ask(self, request: Any) -> Any:
        from starlette.concurrency import run_in_threadpool

        stored = self.jobs.records.get(request.path_params["name"])
        handler = requests.REQUEST_HANDLERS.get(request.path_params["question"])
        if stored is None or handler is None:
            return error_response(404, RECORD_GONE)
        return await run_in_threadpool(handle_page_request, stored, handler, dict(request.query_params))

    def app(self) -> App:
        """Build the web application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes: list[tuple[str, str, Callable[[Any], Awaitable[Any]]]] = [
            ("GET", "/", self.shell),
            ("GET", "/records/{name}", self.shell),
            ("GET", "/assets/{name}", self.asset),
            ("GET", "/api/models", self.list_models),
            ("POST", "/api/text", self.record_text),
            ("POST", "/api/image", self.record_image),
            ("POST", "/api/sound", self.record_sound),
            ("POST", "/api/file", self.open_file),
            ("GET", "/api/jobs/{name}", self.job),
            ("GET", "/api/records/{name}/data", self.data),
            ("GET", "/api/records/{name}/{question}", self.ask),
        ]
        app: App = Starlette(routes=[Route(path, work, methods=[verb]) for verb, path, work in routes])
        return app


RECORD_GONE = "this record is no longer available: run the model again"


def handle_page_request(
    stored: StoredRecord, handler: Callable[[requests.PageRequest], Any], parameters: dict[str, str]
) -> Any:
    """Handle a request of the page; each record handles one at a time, because they share tensors and cores."""
    import torch
    from starlette.responses import Response

    try:
        with stored.lock, torch.no_grad():
            result = handler(requests.PageRequest(stored.record, parameters))
    except ValueError as problem:
        return error_response(400, str(problem))
    if isinstance(result, bytes):
        return Response(result, media_type="application/octet-stream")
    return json_response(result)


def load_upload(file: bytes, job: Job) -> Record:
    """Load the record in an uploaded file; nothing in it is executed."""
    job.report("opening the file", 0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "upload.foci"
        path.write_bytes(file)
        try:
            return check_computable(Record.load(path))
        except Exception as problem:
            # The temporary path means nothing to the user.
            reason = str(problem).replace(str(path), "the file")
            raise ValueError(f"file must be a .foci file: {reason}") from problem


def check_computable(record: Record) -> Record:
    """Refuse a record that is too long or has too many entries to compute: even a small file may need hours."""
    longest = max((max(layer.shape[2:]) for layer in record.layers.values()), default=0)
    if longest > MAX_RECORD_LENGTH:
        raise ValueError(f"the record must have at most {MAX_RECORD_LENGTH:,} queries and keys, got {longest:,}")
    entries = sum(math.prod(layer.shape) for layer in record.layers.values() if layer.kept is None)
    if entries > MAX_COMPUTED_ENTRIES:
        raise ValueError(
            f"the record must have at most {MAX_COMPUTED_ENTRIES:,} entries to compute, got {entries:,}: record with"
            " keep=foci.Keep() to save statistics instead"
        )
    return record


def json_response(content: Any) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(content)


def error_response(status: int, reason: str) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": reason}, status_code=status)


def list_cached_models() -> list[str]:
    """List the Hugging Face models in the local cache."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(repo.repo_id for repo in repos if repo.repo_type == "model")


def serve(
    models: list[str],
    record: Record | None = None,
    *,
    port: int = 0,
    device: str = "cpu",
    browse: bool = True,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until Ctrl+C; with a record, open its page."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ImportError("the explorer needs starlette and uvicorn: pip install 'foci[view]'") from error

    for name in models:
        locate_model(name)
    explorer = Explorer(models, resolve_device(device))
    page = f"records/{explorer.jobs.store(record)}" if record is not None else ""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind_port(listener, port)
        port, secret = listener.getsockname()[1], secrets.token_urlsafe(24)
        address = f"http://127.0.0.1:{port}/{secret}/{page}"
        say(f"foci explore: {address}  (Ctrl+C to stop)")
        if browse:
            webbrowser.open(address)
        guard = Guard(explorer.app(), secret, port, MAX_UPLOAD_BYTES)
        config = uvicorn.Config(
            guard, http=create_protocol(), log_level="critical", access_log=False, timeout_graceful_shutdown=1
        )
        # Ctrl+C is the normal way to stop.
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    if explorer.jobs.count_unfinished():
        # A running model cannot be interrupted, and the interpreter aborts if a thread of it runs at the exit.
        sys.stdout.flush()
        os._exit(0)


def create_protocol() -> type[asyncio.Protocol]:
    """Create uvicorn's HTTP protocol with a time limit for request headers, which uvicorn does not have."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.deadline = self.loop.call_later(MAX_HEADER_SECONDS, transport.close)

        def data_received(self, data: bytes) -> None:
            was_idle = self.conn.their_state is h11.IDLE
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self.deadline.cancel()
            elif not was_idle or self.deadline.cancelled():
                # The header of the next request has begun.
                self.deadline = self.loop.call_later(MAX_HEADER_SECONDS, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self.deadline.cancel()
            super().connection_lost(exc)

    return TimedProtocol


def bind_port(listener: socket.socket, port: int) -> None:
    try:
        listener.bind(("127.0.0.1", port))
        # Connections queue from here on, before the server is up.
        listener.listen()
    except (OSError, OverflowError) as problem:
        raise ValueError(f"port must be free, got {port}: {problem}") from problem
