"""Work that takes a while, one piece at a time, and how far it is."""

from __future__ import annotations

import secrets
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from foci.record.record import Record
from foci.view.page.payload import encode_payload

MAX_JOBS = 64
MAX_RECORDS = 8
# The shares of the bar that loading, running and packing take.
LOADED_FRACTION, RUN_FRACTION = 0.35, 0.75


@dataclass
class Job:
    """One piece of work. `told` is what it does now, `fraction` how far it is, `error` what went wrong."""

    told: str = "waiting"
    fraction: float = 0.0
    error: str | None = None
    record: str | None = None

    def say(self, told: str, fraction: float | None = None) -> None:
        """What is done now; the bar never goes back."""
        self.told = told
        self.fraction = max(self.fraction, fraction or 0.0)

    def described(self) -> dict[str, Any]:
        return {"told": self.told, "fraction": self.fraction, "error": self.error, "record": self.record}


@dataclass
class StoredRecord:
    """A record that can be asked, and what the page needs of it at first."""

    record: Record
    payload: bytes
    lock: threading.Lock = field(default_factory=threading.Lock)


class JobQueue:
    """Jobs and the records that came of them; the oldest make room."""

    def __init__(self) -> None:
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.records: OrderedDict[str, StoredRecord] = OrderedDict()
        # One after the other: two models at once would only be slower.
        self.worker = ThreadPoolExecutor(1, "foci-explore")

    def start(self, work: Callable[[Job], Record]) -> str:
        """Begins a piece of work; gives its name."""
        name, job = secrets.token_urlsafe(9), Job()
        self.jobs[name] = job
        while len(self.jobs) > MAX_JOBS:
            self.jobs.popitem(last=False)
        self.worker.submit(self._run, job, work)
        return name

    def _run(self, job: Job, work: Callable[[Job], Record]) -> None:
        try:
            record = work(job)
            job.say("drawing", RUN_FRACTION)
            name = self.keep(record)
            job.say("done", 1.0)
            job.record = name
        except Exception as problem:  # noqa: BLE001
            # Whatever a model or a file does wrong belongs into the page, not into a log that nobody reads.
            job.error = describe_problem(problem)

    def keep(self, record: Record) -> str:
        """Makes a record ready to be looked at; gives its name."""
        name = secrets.token_urlsafe(9)
        self.records[name] = StoredRecord(record, encode_payload(record))
        while len(self.records) > MAX_RECORDS:
            self.records.popitem(last=False)
        return name


def describe_problem(problem: Exception) -> str:
    """One sentence about a problem."""
    text = " ".join(str(problem).split())[:400]
    if isinstance(problem, ValueError | ImportError | OSError | KeyError) and text:
        return text
    where = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {text or 'no reason was given'} ({where.name})"
