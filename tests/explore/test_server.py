import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.explore import jobs, model_runner, server
from foci.explore.access import SECURITY_HEADERS, Guard
from foci.explore.server import Explorer, serve
from foci.record.record import Record
from foci.view.page import payload, requests
from tests.view import records
from tests.view.pages import decode_array, decode_payload, lazy

pytest.importorskip("starlette")
anyio = pytest.importorskip("anyio")
httpx = pytest.importorskip("httpx")

SECRET, PORT = "s3cret", 8765
HOME = f"http://127.0.0.1:{PORT}"


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(["./offered"])


class Client:
    """Sends requests to the application without a network."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def get(self, path: str, **options: Any) -> Any:
        return anyio.run(self._send, "GET", path, options)

    def post(self, path: str, **options: Any) -> Any:
        return anyio.run(self._send, "POST", path, options)

    async def _send(self, verb: str, path: str, options: dict[str, Any]) -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url=HOME) as client:
            return await client.request(verb, path, **options)


@pytest.fixture
def client(explorer: Explorer) -> Client:
    return Client(Guard(explorer.app(), SECRET, PORT, 2**16))


def finished(client: Any, started: Any) -> dict[str, Any]:
    """Wait until a job has ended and return its state."""
    assert started.status_code == 200, started.text
    for _ in range(400):
        state: dict[str, Any] = client.get(f"/{SECRET}/api/jobs/{started.json()['job']}").json()
        if state["error"] or state["record"]:
            return state
        time.sleep(0.05)
    raise AssertionError("the job did not end")


def keep(explorer: Explorer, record: Record) -> str:
    return f"/{SECRET}/api/records/{explorer.jobs.store(record)}"


def floats(response: Any) -> Tensor:
    assert response.status_code == 200, response.text
    return torch.tensor(struct.unpack(f"<{len(response.content) // 4}f", response.content))


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (f"/{SECRET}/", {}, 200),
        (f"/{SECRET}", {}, 200),
        (f"/{SECRET}/", {"host": f"localhost:{PORT}"}, 200),
        (f"/{SECRET}/", {"origin": HOME}, 200),
        ("/", {}, 404),
        ("/other/", {}, 404),
        (f"/{SECRET}x/", {}, 404),
        (f"/{SECRET}/", {"host": "evil.example"}, 421),
        (f"/{SECRET}/", {"host": f"127.0.0.1:{PORT + 1}"}, 421),
        (f"/{SECRET}/", {"origin": "http://evil.example"}, 403),
        (f"/{SECRET}/", {"origin": "null"}, 403),
        (f"/{SECRET}/", {"sec-fetch-site": "cross-site"}, 403),
        (f"/{SECRET}/", {"sec-fetch-site": "same-site"}, 403),
        (f"/{SECRET}/", {"sec-fetch-site": "same-origin"}, 200),
        (f"/{SECRET}/nothing", {}, 404),
    ],
)
def test_access_is_restricted(client: Any, path: str, headers: dict[str, str], status: int) -> None:
    response = client.get(path, headers=headers)
    assert response.status_code == status
    for name, value in SECURITY_HEADERS.items():
        assert response.headers[name] == value


@pytest.mark.parametrize("name", ["x" * 300 + ".js", "%00.js", "..%2Fserver.py", "no.js", "..%5Cx.js"])
def test_only_assets_are_served(client: Any, name: str) -> None:
    assert client.get(f"/{SECRET}/assets/{name}").status_code == 404
    assert client.get(f"/{SECRET}/assets/page.css").headers["content-type"].startswith("text/css")


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(100):
        yield b"x" * 1000


def test_uploads_are_bounded(client: Any) -> None:
    too_large = {"error": "the request must have at most 0 MiB"}
    announced = client.post(f"/{SECRET}/api/file", content=b"x" * (2**16 + 1))
    assert (announced.status_code, announced.json()) == (413, too_large)
    # Sent in chunks, without a content length.
    unannounced = client.post(f"/{SECRET}/api/file", content=pieces())
    assert (unannounced.status_code, unannounced.json()) == (413, too_large)
    lied = client.post(f"/{SECRET}/api/file", content=b"x", headers={"content-length": "nonsense"})
    assert lied.status_code == 413


@pytest.mark.parametrize(
    "name", ["..%2f..%2fblob.py", "..%2f__init__.py", "%2e%2e/page.py", "page.py", "nothing.js", ""]
)
def test_other_files_are_not_served(client: Any, name: str) -> None:
    assert client.get(f"/{SECRET}/assets/{name}").status_code == 404


def test_assets_have_content_types(client: Any) -> None:
    assert client.get(f"/{SECRET}/assets/app.js").headers["content-type"].startswith("text/javascript")
    assert client.get(f"/{SECRET}/assets/page.css").headers["content-type"].startswith("text/css")


def test_models_are_listed(client: Any) -> None:
    found = client.get(f"/{SECRET}/api/models").json()
    assert found["models"][:2] == [model_runner.UNTRAINED, "./offered"]
    assert (found["takes"]["vision"], found["takes"][model_runner.UNTRAINED]) == ("images", "texts")


def test_a_text_becomes_a_record(client: Any, explorer: Explorer) -> None:
    given = {"text": "Jane is hungry.", "model": model_runner.UNTRAINED}
    state = finished(client, client.post(f"/{SECRET}/api/text", json=given))
    assert (state["message"], state["fraction"], state["error"]) == ("done", 1.0, None)
    header, arrays = decode_payload(client.get(f"/{SECRET}/api/records/{state['record']}/data").content)
    assert header["labels"][0]["texts"][0] == ["Jane", " is", " hungry", " ."]
    record = explorer.jobs.records[state["record"]].record
    assert torch.equal(decode_array(header, arrays, "0.entries"), record["L0"].dense())
    page = client.get(f"/{SECRET}/records/{state['record']}").text
    assert f'data-record="{state["record"]}"' in page


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"text": "a b", "model": "./nowhere"}, "got ./nowhere: no such path"),
        ({"text": "  ", "model": model_runner.UNTRAINED}, "text must have at least one word"),
        (
            {"text": "nosuch.txt", "model": model_runner.UNTRAINED},
            "text must be a text, got the file name nosuch.txt: open",
        ),
    ],
)
def test_errors_of_jobs_are_reported(client: Any, given: dict[str, str], error: str) -> None:
    state = finished(client, client.post(f"/{SECRET}/api/text", json=given))
    assert error in state["error"]
    assert state["record"] is None


@pytest.mark.parametrize("body", [b"[" * 60_000, b"", b"[]", b"{}", b'{"text": 3, "model": "x"}', b"\xff"])
def test_bad_requests(client: Any, body: bytes) -> None:
    response = client.post(f"/{SECRET}/api/text", content=body)
    assert (response.status_code, response.json()) == (400, {"error": "the request must have a text and a model"})


def test_a_file_is_opened(client: Any, tmp_path: Path) -> None:
    records.jane().save(tmp_path / "x.foci")
    state = finished(client, client.post(f"/{SECRET}/api/file", content=(tmp_path / "x.foci").read_bytes()))
    assert state["error"] is None
    header, _ = decode_payload(client.get(f"/{SECRET}/api/records/{state['record']}/data").content)
    assert header["model"] == "BertModel"


@pytest.mark.parametrize("file", [b"", b"nonsense", b"PK\x03\x04", b"\x80" * 100])
def test_a_broken_file_is_refused(client: Any, file: bytes) -> None:
    state = finished(client, client.post(f"/{SECRET}/api/file", content=file))
    assert state["error"].startswith("file must be a .foci file: ")
    assert "upload" not in state["error"]
    assert "/" not in state["error"].split(":")[0]


def test_a_file_with_too_many_entries_is_refused(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_COMPUTED_ENTRIES", 2 * 4 * 50 * 50 - 1)
    lazy(50).save(tmp_path / "x.foci")
    state = finished(client, client.post(f"/{SECRET}/api/file", content=(tmp_path / "x.foci").read_bytes()))
    assert "the record must have at most 19,999 entries to compute, got 20,000: record with" in state["error"]
    monkeypatch.setattr(server, "MAX_COMPUTED_ENTRIES", 2 * 4 * 50 * 50)
    state = finished(client, client.post(f"/{SECRET}/api/file", content=(tmp_path / "x.foci").read_bytes()))
    assert state["error"] is None


def test_a_broken_image_is_refused(client: Any) -> None:
    state = finished(client, client.post(f"/{SECRET}/api/image?model=./x", content=b"no image"))
    assert state["error"].startswith("image must be a file that Pillow can read")


def test_an_image_is_recorded(client: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    image.new("RGB", (40, 30), "red").save(tmp_path / "x.png")
    sent = client.post(f"/{SECRET}/api/image?model={tmp_path}", content=(tmp_path / "x.png").read_bytes())
    state = finished(client, sent)
    assert state["error"] is None
    header, _ = decode_payload(client.get(f"/{SECRET}/api/records/{state['record']}/data").content)
    grids = [(part["rows"], part["columns"]) for part in header["labels"][0]["images"][0][0]["segments"]]
    assert grids == [(4, 4)]
    assert header["layers"][0]["Tk"] == 17


def test_exact_weights_on_demand(client: Any, explorer: Explorer) -> None:
    record = lazy(50, heads=4, kv_heads=2)
    base = keep(explorer, record)
    dense = record["L1"].dense()[0]
    row = floats(client.get(f"{base}/row?layer=1&head=3&query=40&seq=0"))
    torch.testing.assert_close(row, dense[3, 40])
    column = floats(client.get(f"{base}/column?layer=1&head=2&key=7&seq=0"))
    torch.testing.assert_close(column, dense[2, :, 7])
    flow = floats(client.get(f"{base}/rollout?stack=&query=30&seq=0"))
    torch.testing.assert_close(flow, record.rollout(30))


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_tiles(client: Any, explorer: Explorer, reduce: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "TILE_CELLS", 8)
    monkeypatch.setattr(requests, "MAX_STRIP_ENTRIES", 60)
    record = lazy(50)
    base = keep(explorer, record)
    tile = floats(client.get(f"{base}/tile?layer=0&heads=1.2&seq=0&y=24&x=12&step={step}&reduce={reduce}"))
    part = record["L0"].dense()[0, 1:3, 24 : 24 + 8 * step, 12 : 12 + 8 * step]
    rows, columns = (-(-size // step) for size in part.shape[1:])
    expected = torch.empty(2, rows, columns)
    for r in range(rows):
        for c in range(columns):
            block = part[:, r * step : (r + 1) * step, c * step : (c + 1) * step]
            expected[:, r, c] = block.mean((1, 2)) if reduce == "mean" else block.amax((1, 2))
    torch.testing.assert_close(tile.view(rows, columns), expected.mean(0))


def test_the_arithmetic_of_a_row(client: Any, explorer: Explorer) -> None:
    record = lazy(20)
    base = keep(explorer, record)
    found = client.get(f"{base}/arithmetic?layer=0&head=1&query=15&seq=0&keys=3.9").json()
    layer = record["L0"]
    assert layer.weights is not None
    assert layer.values is not None
    call = layer.weights.call
    assert found["q"] == pytest.approx(call.q[0, 1, 15].tolist())
    assert found["k"][1] == pytest.approx(call.k[0, 1, 9].tolist())
    assert found["weights"] == pytest.approx(layer.row(0, 1, 15)[[3, 9]].tolist())
    assert found["out"] == pytest.approx((layer.row(0, 1, 15) @ layer.values[0, 1]).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("question", "error"),
    [
        ("row?layer=9&head=0&query=0&seq=0", "layer must be an integer from 0 to 1, got '9'"),
        ("row?layer=0&head=0&query=-1&seq=0", "query must be an integer from 0 to 9, got '-1'"),
        ("row?layer=0&head=0&query=0", "seq must be an integer from 0 to 0, got ''"),
        ("column?layer=0&head=0&key=10&seq=0", "key must be an integer from 0 to 9, got '10'"),
        ("tile?layer=0&heads=x&seq=0&y=0&x=0&step=1", "heads must be numbers from 0 to 3, got 'x'"),
        ("tile?layer=0&heads=0.1.2.3.0&seq=0&y=0&x=0&step=1", "heads must be numbers from 0 to 3, got '0.1.2.3.0'"),
        ("tile?layer=0&heads=0&seq=0&y=0&x=0&step=1000", "step must be an integer from 1 to 64, got '1000'"),
        ("tile?layer=0&heads=0&seq=0&y=0&x=0&step=1&reduce=sum", "reduce must be mean or max, got 'sum'"),
        ("arithmetic?layer=0&head=0&query=0&seq=0&keys=99", "keys must be at most 64 integers below 10, got '99'"),
        ("rollout?stack=encoder&query=0&seq=0", "stack must be one of '', got 'encoder'"),
    ],
)
def test_bad_questions(client: Any, explorer: Explorer, question: str, error: str) -> None:
    response = client.get(f"{keep(explorer, lazy(10))}/{question}")
    assert (response.status_code, response.json()) == (400, {"error": error})


def test_a_record_without_entries_has_no_rows(client: Any, explorer: Explorer) -> None:
    response = client.get(f"{keep(explorer, records.kept())}/row?layer=0&head=0&query=0&seq=0")
    assert (response.status_code, response.json()["error"]) == (
        400,
        "L0 has only statistics, no entries",
    )


def test_the_oldest_records_are_dropped(explorer: Explorer, client: Any) -> None:
    first = keep(explorer, records.jane())
    for _ in range(jobs.MAX_RECORDS):
        keep(explorer, records.jane())
    assert client.get(f"{first}/data").json() == {"error": "this record is no longer available: run the model again"}
    assert len(explorer.jobs.records) == jobs.MAX_RECORDS


def test_an_unknown_record_opens_the_start_page(client: Any) -> None:
    page = client.get(f"/{SECRET}/records/%22%3E%3Cscript%3E")
    assert page.status_code == 200
    assert 'data-record=""' in page.text


def test_progress_never_decreases() -> None:
    job = jobs.Job()
    job.report("running", 0.5)
    job.report("encoding", 0.2)
    assert job.to_json() == {"message": "encoding", "fraction": 0.5, "error": None, "record": None}


def test_progress_counts_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2), torch.nn.ReLU())
    job, seen = jobs.Job(), []
    model[2].register_forward_hook(lambda *_: seen.append(job.fraction))
    with model_runner.report_progress(model, job):
        model(torch.zeros(1, 2))
    assert seen == [pytest.approx(jobs.LOADED_FRACTION + (jobs.RUN_FRACTION - jobs.LOADED_FRACTION) / 2)]
    assert job.fraction == pytest.approx(jobs.RUN_FRACTION)
    model(torch.zeros(1, 2))
    assert job.fraction == pytest.approx(jobs.RUN_FRACTION)


@pytest.mark.parametrize("port", [None, 70_000])
def test_a_port_in_use_is_refused(port: int | None) -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        taken = door.getsockname()[1] if port is None else port
        with pytest.raises(ValueError, match=f"port must be free, got {taken}: "):
            serve([], port=taken, browse=False)


def test_the_printed_address_accepts_connections() -> None:
    command = [sys.executable, "-m", "foci", "explore", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
    assert found
    with socket.create_connection(("127.0.0.1", int(found[1]))):
        process.terminate()
    process.communicate(timeout=20)


def test_ctrl_c_stops_the_server_without_output() -> None:
    command = [sys.executable, "-m", "foci", "explore", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("foci explore: http://127.0.0.1:")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


def test_long_records_have_no_entries_in_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_EXACT_ENTRIES", 0)
    header, _ = decode_payload(payload.encode_payload(lazy(150, layers=1)))
    assert not header["layers"][0]["exact"]
    assert header["layers"][0]["hasEntries"]
