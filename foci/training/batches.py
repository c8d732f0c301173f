"""Batches by token budget, sorted by length, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Queue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from foci.inputs.padding import LENGTH_MULTIPLE
from foci.tasks.task import Task

PrefetchedT = TypeVar("Item")


class BatchPosition(NamedTuple):
    """Where a training stands in its data."""

    epoch: int
    batch: int  # in the epoch


class StepBatch(NamedTuple):
    """The micro-batches of one process for one update, and what they were made of."""

    place: BatchPosition
    parts: list[tuple[dict[str, Tensor], bool]]  # False: it stands in for an empty one, and counts nothing
    examples: int


@dataclass
class Batches:
    """The batches of a training, of which each process takes its parts.

    A batch is made for all processes and micro-batches together and then dealt out, so that two processes see what one
    with twice the budget sees.
    """

    task: Task[Any, Any]
    examples: Sequence[Any]
    budget: int  # of each part
    accumulate: int
    rank: int
    world: int
    seed: int
    _sizes: list[int] = field(default_factory=list)

    @property
    def parts(self) -> int:
        return self.world * self.accumulate

    def epoch(self, number: int) -> tuple[Sequence[Any], list[list[int]]]:
        """The examples of an epoch, and which of them make each batch."""
        generator = seeded_generator(self.seed, "epoch", number)
        examples = self.task.epoch(self.examples, True, generator)
        if examples is self.examples:
            # They are the same in every epoch, and there may be many.
            self._sizes = self._sizes or self._measured(examples)
            return examples, group_by_length(self._sizes, self.budget, self.parts, generator)
        return examples, group_by_length(self._measured(examples), self.budget, self.parts, generator)

    def _measured(self, examples: Sequence[Any]) -> list[int]:
        return [self.task.size(example) for example in examples]

    def updates(self, start: BatchPosition, turn: int = 0, turns: int = 1) -> Generator[StepBatch]:
        """From a place on, without end; where several take turns, one's own alone."""
        epoch, first = start
        passed = 0
        while True:
            examples, batches = self.epoch(epoch)
            for index in range(first, len(batches)):
                if passed % turns == turn:
                    yield self._update(BatchPosition(epoch, index), [examples[i] for i in batches[index]])
                passed += 1
            epoch, first = epoch + 1, 0

    def _update(self, place: BatchPosition, examples: list[Any]) -> StepBatch:
        found = []
        for part in range(self.rank * self.accumulate, (self.rank + 1) * self.accumulate):
            own = examples[part :: self.parts]
            generator = seeded_generator(self.seed, "batch", *place, part)
            # Every process takes part in every update, so one that is left without examples takes one that counts not.
            found.append((self.task.batch(own or examples[:1], True, generator), bool(own)))
        return StepBatch(place, found, len(examples))


def group_by_length(sizes: Sequence[int], budget: int, parts: int, generator: torch.Generator) -> list[list[int]]:
    """Which examples make each batch: of similar length, by chance among those, and in an order by chance."""
    lengths = (torch.tensor(sizes) + LENGTH_MULTIPLE - 1) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
    order = torch.randperm(len(sizes), generator=generator)
    order = order[lengths[order].argsort(descending=True, stable=True)]
    ordered, longest = order.tolist(), lengths[order].tolist()
    batches, first = [], 0
    while first < len(ordered):
        count = max(budget // longest[first], 1) * parts
        batches.append(ordered[first : first + count])
        first += count
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def derive_seed(*parts: object) -> int:
    """A number below 2**63 that depends on all parts: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def seeded_generator(*parts: object) -> torch.Generator:
    """A source of chance of its own for everything that is done: nothing depends on what was drawn before."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def prefetch(items: Iterator[PrefetchedT], count: int) -> Generator[PrefetchedT]:
    """The same items, made by a thread while earlier ones are used."""
    queue: Queue[tuple[PrefetchedT | None, BaseException | None]] = Queue(maxsize=count)
    closed = False

    def work() -> None:
        try:
            for item in items:
                if closed:
                    return
                queue.put((item, None))
        except BaseException as error:  # noqa: BLE001 - it is raised again where the items are used
            queue.put((None, error))

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item, error = queue.get()
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        closed = True
        # A place in the queue is what the thread may be waiting for.
        while thread.is_alive() and not queue.empty():
            queue.get_nowait()


def iterate_in_workers(source: Batches, start: BatchPosition, workers: int, ahead: int) -> Generator[StepBatch]:
    """The same updates as `source.updates(start)`, made by several processes that take turns."""
    turns = WorkerBatches(source, start)
    loader = DataLoader(
        turns, batch_size=None, num_workers=workers, prefetch_factor=max(ahead, 1), collate_fn=keep_unchanged
    )
    for found in loader:
        if isinstance(found, Exception):
            raise found
        yield found


class WorkerBatches(IterableDataset[StepBatch | Exception]):
    """What one worker makes: every so many-th update. An error is passed on as it is, not as a report of a process."""

    def __init__(self, source: Batches, start: BatchPosition) -> None:
        self.source, self.start = source, start

    def __iter__(self) -> Iterator[StepBatch | Exception]:
        worker = get_worker_info()
        assert worker is not None
        try:
            yield from self.source.updates(self.start, worker.id, worker.num_workers)
        except Exception as error:  # noqa: BLE001 - it is raised again where the updates are used
            yield error


def keep_unchanged(item: PrefetchedT) -> PrefetchedT:
    return item
