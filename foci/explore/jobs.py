"""Runs models in the background, a few jobs at a time, and keeps the records."""

from __future__ import annotations

import secrets
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from foci.record.record import Record
from foci.view.page.payload import encode_payload

MAX_JOBS = 64
# Several jobs run at once, so that a slow one does not block the others.
MAX_RUNNING_JOBS = 4
MAX_UNFINISHED_JOBS = 16
MAX_RECORDS = 8
# The progress after loading and after running the model; encoding the payload takes the rest.
LOADED_FRACTION, RUN_FRACTION = 0.35, 0.75


@dataclass
class Job:
    """A job: what it does now, its progress from 0 to 1, its error, and the name of its record."""

    message: str = "waiting"
    fraction: float = 0.0
    error: str | None = None
    record: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.error is not None or self.record is not None

    def report(self, message: str, fraction: float | None = None) -> None:
        """Set the message and the progress, which never decreases."""
        self.message = message
        self.fraction = max(self.fraction, fraction or 0.0)

    def to_json(self) -> dict[str, Any]:
        return {"message": self.message, "fraction": self.fraction, "error": self.error, "record": self.record}


@dataclass
class StoredRecord:
    """A record and its payload for the page."""

    record: Record
    payload: bytes
    lock: threading.Lock = field(default_factory=threading.Lock)


class JobQueue:
    """Jobs and the records that they produced; the oldest are dropped."""

    def __init__(self) -> None:
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.records: OrderedDict[str, StoredRecord] = OrderedDict()
        self.slots = threading.Semaphore(MAX_RUNNING_JOBS)
        self.lock = threading.Lock()

    def count_unfinished(self) -> int:
        return sum(not job.is_finished for job in self.jobs.values())

    def submit(self, work: Callable[[Job], Record]) -> str:
        """Start a job and return its name."""
        if self.count_unfinished() >= MAX_UNFINISHED_JOBS:
            raise ValueError(f"at most {MAX_UNFINISHED_JOBS} jobs can wait: try again when one has ended")
        name, job = secrets.token_urlsafe(9), Job()
        self.jobs[name] = job
        while len(self.jobs) > MAX_JOBS:
            self.jobs.popitem(last=False)
        # A daemon thread does not keep the process alive after Ctrl+C.
        threading.Thread(target=self._run, args=(job, work), daemon=True, name="foci-explore").start()
        return name

    def _run(self, job: Job, work: Callable[[Job], Record]) -> None:
        with self.slots:
            try:
                record = work(job)
                job.report("preparing the page", RUN_FRACTION)
                name = self.store(record)
                job.report("done", 1.0)
                job.record = name
            except BaseException as problem:  # noqa: BLE001
                # Any error of a model or a file is shown on the page; a panic of a Rust library is a BaseException.
                job.error = describe_problem(problem)

    def store(self, record: Record) -> str:
        """Store a record and its payload, and return its name."""
        name, stored = secrets.token_urlsafe(9), StoredRecord(record, encode_payload(record))
        with self.lock:
            self.records[name] = stored
            while len(self.records) > MAX_RECORDS:
                self.records.popitem(last=False)
        return name


def describe_problem(problem: BaseException) -> str:
    """Describe an exception in one line."""
    text = " ".join(str(problem).split())[:400]
    if isinstance(problem, ValueError | ImportError | OSError | KeyError) and text:
        return text
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {text or 'no message'} ({frame.name})"
