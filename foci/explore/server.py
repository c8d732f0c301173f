"""The explorer's server: pages, work that is begun and watched, and exact numbers on demand."""

from __future__ import annotations

import json
import math
import secrets
import socket
import tempfile
import webbrowser
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from foci.capture.look import list_shipped_models, locate_model, resolve_device
from foci.explore import answers
from foci.explore.access import App, Guard
from foci.explore.jobs import Job, JobQueue, StoredRecord
from foci.explore.models import TASK_INPUTS, UNTRAINED, ModelRunner
from foci.record.record import Record
from foci.view.page.bundle import ASSETS

MAX_UPLOAD_BYTES = 512 * 2**20
# So many entries take a CPU some minutes.
MAX_COMPUTED_ENTRIES = 2**35
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
QUESTION_HANDLERS: dict[str, Callable[[answers.Question], Any]] = {
    "row": answers.answer_row,
    "column": answers.answer_column,
    "tile": answers.answer_tile,
    "worked": answers.answer_arithmetic,
    "rollout": answers.answer_rollout,
}


class Explorer:
    """What stands behind the addresses: models, jobs and records."""

    def __init__(self, models: list[str], device: str = "cpu") -> None:
        self.desk, self.shelf, self.models = JobQueue(), ModelRunner(device), models

    async def shell(self, request: Any) -> Any:
        from starlette.responses import HTMLResponse

        name = request.path_params.get("name", "")
        # A name that is not known opens the front door, which can do no harm with it.
        known = name if name in self.desk.records else ""
        return HTMLResponse(SHELL_TEMPLATE.format(root=f"{request.scope['root_path']}/", record=known))

    async def asset(self, request: Any) -> Any:
        from starlette.responses import Response

        there = {path.name: path for path in ASSETS.iterdir() if path.suffix in ASSET_TYPES}
        path = there.get(request.path_params["name"])
        if path is None:
            return error_response(404, "there is no such file")
        return Response(path.read_bytes(), media_type=ASSET_TYPES[path.suffix])

    async def choices(self, _request: Any) -> Any:
        models = [*dict.fromkeys([UNTRAINED, *self.models, *list_shipped_models(), *list_cached_models()])]
        takes = {name: TASK_INPUTS.get(name, "texts") for name in (UNTRAINED, *list_shipped_models())}
        return json_response({"models": models, "takes": takes})

    async def look(self, request: Any) -> Any:
        try:
            given = json.loads(await request.body())
            text, model = given["text"], given["model"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return error_response(400, "expected a text and a model")
        if not isinstance(text, str) or not isinstance(model, str):
            return error_response(400, "expected a text and a model")
        return json_response({"job": self.desk.start(lambda job: self.shelf.look(model.strip(), text, job))})

    async def view(self, request: Any) -> Any:
        image, model = await request.body(), request.query_params.get("model", "").strip()
        return json_response({"job": self.desk.start(lambda job: self.shelf.view(model, image, job))})

    async def hear(self, request: Any) -> Any:
        sound, model = await request.body(), request.query_params.get("model", "").strip()
        return json_response({"job": self.desk.start(lambda job: self.shelf.hear(model, sound, job))})

    async def open(self, request: Any) -> Any:
        file = await request.body()
        return json_response({"job": self.desk.start(lambda job: load_upload(file, job))})

    async def job(self, request: Any) -> Any:
        job = self.desk.jobs.get(request.path_params["name"])
        return json_response(job.described()) if job else error_response(404, "there is no such work")

    async def data(self, request: Any) -> Any:
        from starlette.responses import Response

        kept = self.desk.records.get(request.path_params["name"])
        return (
            Response(kept.payload, media_type="application/octet-stream") if kept else error_response(404, RECORD_GONE)
        )

    async def ask(self, request: Any) -> Any:
        from starlette.concurrency import run_in_threadpool

        kept = self.desk.records.get(request.path_params["name"])
        question = QUESTION_HANDLERS.get(request.path_params["question"])
        if kept is None or question is None:
            return error_response(404, RECORD_GONE)
        return await run_in_threadpool(answer_question, kept, question, dict(request.query_params))

    def app(self) -> App:
        """The addresses."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes: list[tuple[str, str, Callable[[Any], Awaitable[Any]]]] = [
            ("GET", "/", self.shell),
            ("GET", "/records/{name}", self.shell),
            ("GET", "/assets/{name}", self.asset),
            ("GET", "/api/models", self.choices),
            ("POST", "/api/look", self.look),
            ("POST", "/api/view", self.view),
            ("POST", "/api/hear", self.hear),
            ("POST", "/api/open", self.open),
            ("GET", "/api/jobs/{name}", self.job),
            ("GET", "/api/records/{name}/data", self.data),
            ("GET", "/api/records/{name}/{question}", self.ask),
        ]
        app: App = Starlette(routes=[Route(path, work, methods=[verb]) for verb, path, work in routes])
        return app


RECORD_GONE = "this record is no longer here: look again"


def answer_question(kept: StoredRecord, question: Callable[[answers.Question], Any], given: dict[str, str]) -> Any:
    """One question at a time of each record: they share its tensors and the cores."""
    import torch
    from starlette.responses import Response

    try:
        with kept.lock, torch.no_grad():
            found = question(answers.Question(kept.record, given))
    except ValueError as problem:
        return error_response(400, str(problem))
    return Response(found, media_type="application/octet-stream") if isinstance(found, bytes) else json_response(found)


def load_upload(file: bytes, job: Job) -> Record:
    """The record in an uploaded file; nothing in it is executed."""
    job.say("opening the file", 0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "upload.foci"
        path.write_bytes(file)
        try:
            return check_computable(Record.load(path))
        except Exception as problem:
            # The path is this side's own and says nothing to who sent the file.
            reason = str(problem).replace(str(path), "the file")
            raise ValueError(f"expected a .foci file: {reason}") from problem


def check_computable(record: Record) -> Record:
    """A record that can be drawn before whoever waits for it gives up; a small file may ask for any amount of work."""
    entries = sum(math.prod(layer.shape) for layer in record.layers.values() if layer.kept is None)
    if entries > MAX_COMPUTED_ENTRIES:
        raise ValueError(
            f"its matrices have {entries:,} entries to be computed, more than {MAX_COMPUTED_ENTRIES:,}: watch with"
            " keep=foci.Keep() to save statistics instead"
        )
    return record


def json_response(found: Any) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(found)


def error_response(status: int, reason: str) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": reason}, status_code=status)


def list_cached_models() -> list[str]:
    """Hugging Face models that are on this machine already."""
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
    """Serves until it is stopped; with a record, its page is opened first."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ImportError("the explorer needs starlette and uvicorn: pip install 'foci[view]'") from error

    for name in models:
        locate_model(name)
    explorer = Explorer(models, resolve_device(device))
    page = f"records/{explorer.desk.keep(record)}" if record is not None else ""
    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind_port(door, port)
        port, secret = door.getsockname()[1], secrets.token_urlsafe(24)
        address = f"http://127.0.0.1:{port}/{secret}/{page}"
        say(f"foci explore: {address}  (Ctrl+C stops it)")
        if browse:
            webbrowser.open(address)
        guard = Guard(explorer.app(), secret, port, MAX_UPLOAD_BYTES)
        # Ctrl+C is how it is meant to end.
        with suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(guard, log_level="warning", access_log=False)).run(sockets=[door])


def bind_port(door: socket.socket, port: int) -> None:
    try:
        door.bind(("127.0.0.1", port))
        # From here on whoever has the address is heard, even before the server is up.
        door.listen()
    except (OSError, OverflowError) as problem:
        raise ValueError(f"expected a free port, received {port}: {problem}") from problem
