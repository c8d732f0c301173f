"""Slow connections, slow jobs, large inputs, and stopping the explorer."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from foci.explore import access, jobs, server
from foci.explore.access import Guard
from foci.explore.jobs import Job, JobQueue
from foci.explore.server import Explorer
from foci.record.record import Record
from tests.explore.test_server import SECRET, Client, finished
from tests.view import records
from tests.view.pages import decode_payload, lazy

uvicorn = pytest.importorskip("uvicorn")
# Serves an explorer whose jobs compute without an end.
ENDLESS = """
import torch
from foci.explore import model_runner, server
def compute(*arguments):
    while True:
        torch.ones(500, 500) @ torch.ones(500, 500)
model_runner.ModelRunner.record_text = compute
server.serve([], browse=False, say=lambda text: print(text, flush=True))
"""


@pytest.fixture
def explorer() -> Explorer:
    return Explorer([])


@pytest.fixture
def client(explorer: Explorer) -> Client:
    return Client(Guard(explorer.app(), SECRET, 8765, 2**20))


def test_port_80_answers_without_a_port_in_the_host() -> None:
    client = Client(Guard(Explorer([]).app(), SECRET, 80, 2**16))
    for host in ("127.0.0.1", "localhost", "127.0.0.1:80"):
        headers = {"host": host, "origin": f"http://{host}"}
        assert client.get(f"/{SECRET}/", headers=headers).status_code == 200
    assert client.get(f"/{SECRET}/", headers={"host": "127.0.0.1:8000"}).status_code == 421


def test_a_slow_body_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x"
            await asyncio.sleep(0.02)

    monkeypatch.setattr(access, "MAX_BODY_SECONDS", 0.1)
    response = client.post(f"/{SECRET}/api/file", content=trickle())
    assert (response.status_code, response.json()["error"]) == (408, "the request must be sent within 0.1 seconds")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a running server that waits 0.3 seconds for a request header."""
    monkeypatch.setattr(server, "MAX_HEADER_SECONDS", 0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()[1]
        guard = Guard(Explorer([]).app(), SECRET, address, 2**16)
        own = uvicorn.Server(uvicorn.Config(guard, http=server.create_protocol(), log_level="critical"))
        thread = threading.Thread(target=own.run, args=([listener],))
        thread.start()
        yield address
        own.should_exit = True
        thread.join()


@pytest.mark.parametrize("answered", [0, 2])
def test_a_slow_header_is_cut_off(port: int, answered: int) -> None:
    request = f"GET /{SECRET}/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as door:
        for _ in range(answered):
            door.sendall(request)
            answer = b""
            while not answer.endswith(b"</html>\n"):
                answer += door.recv(2**16)
        start = time.monotonic()
        for byte in request:
            try:
                door.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() - start < 2


def test_a_slow_job_does_not_block_another(client: Any, explorer: Explorer) -> None:
    release = threading.Event()

    def wait(_: Job) -> Record:
        release.wait(20)
        return records.jane()

    slow = explorer.jobs.submit(wait)
    state = finished(client, client.post(f"/{SECRET}/api/text", json={"text": "a b", "model": "untrained vectors"}))
    assert state["record"]
    assert not explorer.jobs.jobs[slow].is_finished
    release.set()


def test_the_number_of_unfinished_jobs_is_bounded(client: Any, explorer: Explorer) -> None:
    release = threading.Event()
    for _ in range(jobs.MAX_UNFINISHED_JOBS):
        explorer.jobs.submit(lambda _: release.wait(20) and records.jane())
    refused = client.post(f"/{SECRET}/api/file", content=b"x")
    assert refused.status_code == 429
    assert refused.json()["error"].startswith("at most 16 jobs can wait")
    release.set()


def test_every_exception_ends_a_job() -> None:
    class Panic(BaseException):
        pass

    def fail(_: Job) -> Record:
        raise Panic("a library panicked")

    queue = JobQueue()
    job = queue.jobs[queue.submit(fail)]
    for _ in range(100):
        if not job.is_finished:
            time.sleep(0.02)
    assert job.error == "Panic: a library panicked (fail)"


def test_a_record_with_too_many_keys_is_refused(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_RECORD_LENGTH", 49)
    lazy(50).save(tmp_path / "x.foci")
    state = finished(client, client.post(f"/{SECRET}/api/file", content=(tmp_path / "x.foci").read_bytes()))
    assert "the record must have at most 49 queries and keys, got 50" in state["error"]


def test_a_long_text_for_untrained_vectors_is_cut_with_a_note(client: Any, explorer: Explorer) -> None:
    given = {"text": "word " * 10_000, "model": "untrained vectors"}
    state = finished(client, client.post(f"/{SECRET}/api/text", json=given))
    header, _ = decode_payload(explorer.jobs.records[state["record"]].payload)
    assert header["notes"] == ["the text is cut: the first 512 of 10,000 words are shown"]


def test_ctrl_c_stops_a_running_job_without_output() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[2]
    asked = urllib.request.Request(f"{address}api/text", b'{"text": "a", "model": "x"}')
    urllib.request.urlopen(asked).close()
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert time.monotonic() - start < 2
    assert process.returncode == 0
