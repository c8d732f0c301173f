"""Makes batches by token budget, of similar length, in an order that depends only on the seed and the epoch."""

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

PrefetchedT = TypeVar("PrefetchedT")


class BatchPosition(NamedTuple):
    """The position of a batch in the training data."""

    epoch: int
    batch: int  # index within the epoch


class StepBatch(NamedTuple):
    """The micro-batches of one process for one optimizer step."""

    position: BatchPosition
    micro_batches: list[tuple[dict[str, Tensor], bool]]  # False: replaces an empty micro-batch, with loss weight 0
    examples: int  # in the batch of all processes


@dataclass
class Batches:
    """The batches of a run; each process takes its own micro-batches of every batch.

    A batch is formed for all processes and micro-batches together and then split, so two processes train on the same
    batches as one process with twice the budget.
    """

    task: Task[Any, Any]
    examples: Sequence[Any]
    budget: int  # tokens of each micro-batch, padding included
    accumulate: int
    rank: int
    world: int
    seed: int
    _sizes: list[int] = field(default_factory=list)

    @property
    def micro_batch_count(self) -> int:
        """Micro-batches of one step, over all processes."""
        return self.world * self.accumulate

    def epoch_batches(self, number: int) -> tuple[Sequence[Any], list[list[int]]]:
        """Returns the examples of an epoch, and the indices of the examples in each batch."""
        generator = seeded_generator(self.seed, "epoch", number)
        examples = self.task.epoch_examples(self.examples, True, generator)
        return examples, group_by_length(self._example_sizes(examples), self.budget, self.micro_batch_count, generator)

    def first_epoch_sizes(self) -> list[int]:
        """Returns the sizes of the examples of the first epoch."""
        generator = seeded_generator(self.seed, "epoch", 0)
        return self._example_sizes(self.task.epoch_examples(self.examples, True, generator))

    def _example_sizes(self, examples: Sequence[Any]) -> list[int]:
        if examples is not self.examples:
            return [self.task.size(example) for example in examples]
        # The examples are the same in every epoch, so their sizes are computed once.
        self._sizes = self._sizes or [self.task.size(example) for example in examples]
        return self._sizes

    def iterate(self, start: BatchPosition, worker: int = 0, workers: int = 1) -> Generator[StepBatch]:
        """Yields batches from a position on, without end; of several workers, each yields every `workers`-th batch."""
        epoch, first = start
        count = 0
        while True:
            examples, batches = self.epoch_batches(epoch)
            for index in range(first, len(batches)):
                if count % workers == worker:
                    yield self._step_batch(BatchPosition(epoch, index), [examples[i] for i in batches[index]])
                count += 1
            epoch, first = epoch + 1, 0

    def _step_batch(self, position: BatchPosition, examples: list[Any]) -> StepBatch:
        micro_batches = []
        for part in range(self.rank * self.accumulate, (self.rank + 1) * self.accumulate):
            own = examples[part :: self.micro_batch_count]
            generator = seeded_generator(self.seed, "batch", *position, part)
            # Every process takes part in every step: without examples of its own it computes one with loss weight 0.
            micro_batches.append((self.task.batch(own or examples[:1], True, generator), bool(own)))
        return StepBatch(position, micro_batches, len(examples))


def group_by_length(
    sizes: Sequence[int], budget: int, micro_batches: int, generator: torch.Generator
) -> list[list[int]]:
    """Groups examples of similar length into batches, shuffled within equal lengths, in random order."""
    lengths = (torch.tensor(sizes) + LENGTH_MULTIPLE - 1) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
    order = torch.randperm(len(sizes), generator=generator)
    order = order[lengths[order].argsort(descending=True, stable=True)]
    ordered, longest = order.tolist(), lengths[order].tolist()
    batches, first = [], 0
    while first < len(ordered):
        count = max(budget // longest[first], 1) * micro_batches
        batches.append(ordered[first : first + count])
        first += count
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def derive_seed(*parts: object) -> int:
    """Hashes the parts to an integer below 2**63, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def seeded_generator(*parts: object) -> torch.Generator:
    """Returns a generator seeded by the parts alone, so no draw depends on earlier draws."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def prefetch(items: Iterator[PrefetchedT], count: int) -> Generator[PrefetchedT]:
    """Yields the same items, produced up to `count` ahead by a thread."""
    queue: Queue[tuple[PrefetchedT | None, BaseException | None]] = Queue(maxsize=count)
    closed = False

    def work() -> None:
        try:
            for item in items:
                if closed:
                    return
                queue.put((item, None))
        except BaseException as error:  # noqa: BLE001 - raised again in the consumer
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
        # The thread may be blocked on a full queue.
        while thread.is_alive() and not queue.empty():
            queue.get_nowait()


def iterate_in_workers(source: Batches, start: BatchPosition, workers: int, ahead: int) -> Generator[StepBatch]:
    """Yields the same batches as `source.iterate(start)`, made by several worker processes in turn."""
    dataset = WorkerBatches(source, start)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, prefetch_factor=max(ahead, 1), collate_fn=keep_unchanged
    )
    for item in loader:
        if isinstance(item, Exception):
            raise item
        yield item


class WorkerBatches(IterableDataset[StepBatch | Exception]):
    """The batches of one worker. An error is yielded, not raised, so that the DataLoader does not wrap it."""

    def __init__(self, source: Batches, start: BatchPosition) -> None:
        self.source, self.start = source, start

    def __iter__(self) -> Iterator[StepBatch | Exception]:
        worker = get_worker_info()
        assert worker is not None
        try:
            yield from self.source.iterate(self.start, worker.id, worker.num_workers)
        except Exception as error:  # noqa: BLE001 - raised again by iterate_in_workers
            yield error


def keep_unchanged(item: PrefetchedT) -> PrefetchedT:
    return item
