"""Worker processes that prefetch batches from a source, or read all of it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkContext
from multiprocessing.queues import Queue
from types import TracebackType
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError, describe_error
from paceline.core.ordered_map import num_cores
from paceline.core.registry import fault_of_plugin
from paceline.core.watch import die_with_parent
from paceline.data.source import Sample, Source, bytes_needed, has_one_size, sizes_of, stack
from paceline.data.stream import Tickets, in_order, windows

SECONDS_UNTIL_NOTICED = 0.2  # time within which torch notices a dead child process
SPARE_QUEUES = 16  # each opens two files; fewer files cannot hold the first batches
BATCHES_PER_WORKER = 2  # number of batches that each worker prefetches

# Hide torch's warning about more workers than cores: with the default of two workers, one core is enough to cause it.
warnings.filterwarnings("ignore", message="This DataLoader will create")


class WorkerPool:
    """Worker processes, reused for every sequence of requests; with 0 workers, samples are read in this process."""

    def __init__(self, source: Source, num_workers: int, crop: int = 0, *, pin_memory: bool = False) -> None:
        _pools.add(self)
        self._current = _Current(source.lookahead, max(1, num_workers))
        self._loader: DataLoader[Batch | UserError] = DataLoader(
            _Reading(source, crop),
            batch_size=None,
            sampler=self._current,
            num_workers=num_workers,
            prefetch_factor=BATCHES_PER_WORKER if num_workers else None,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            multiprocessing_context=_Context() if num_workers else None,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            generator=torch.Generator(),  # a separate generator, so that reading does not advance the global one
        )

    def read(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield the batch for each request, in order, in host memory, with images [n, h, w, c]."""
        self._current.requests = requests
        try:
            for result in self._results():
                if isinstance(result, UserError):
                    raise result
                yield result
        finally:
            if dead := self.describe_dead():
                _dead.append(dead)  # this pool may no longer exist when the error is reported

    def _results(self) -> Iterator[Batch | UserError]:
        """Return torch's iterator; raise UserError if the workers, or what they share with this process, cannot start.

        torch's iterator would print tracebacks about its missing parts. Therefore, its queues are created first, with
        further ones in place of the files that processes and batches will need.
        """
        try:
            if num_workers := self._loader.num_workers:
                shared = [_Context().Queue() for _ in range(2 * num_workers + SPARE_QUEUES)], _Context().Event()
                del shared
            return iter(self._loader)
        except OSError as error:
            raise UserError(f"loader processes cannot start: {_why_not_shared(error)}") from error

    def describe_dead(self) -> str:
        """Return a message about a killed worker process; empty if none was killed."""
        processes = getattr(getattr(self._loader, "_iterator", None), "_workers", ())
        for process in processes:
            if process.exitcode is not None and process.exitcode < 0:
                return f"loader process {process.pid} was killed by signal {-process.exitcode}"
        return ""


def describe_dead_worker() -> str:
    """Return a message about a killed loader process; empty if none was killed.

    If a process was killed, torch raises RuntimeError in the main thread at an arbitrary point, possibly while a
    connection error caused by the dead process is being handled. This function waits for that error and suppresses it.
    """
    if _pools or _dead:
        with suppress(RuntimeError):
            time.sleep(SECONDS_UNTIL_NOTICED)
    dead = next(filter(None, (*_dead, *(pool.describe_dead() for pool in _pools))), "")
    _dead.clear()
    return f"{dead}, perhaps because memory ran out; use a lower --workers value" if dead else ""


@contextmanager
def reporting_dead_workers() -> Iterator[None]:
    """If a killed loader process caused an exception, raise a UserError instead."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if dead := describe_dead_worker():
            raise UserError(dead) from error
        raise


_pools: WeakSet[WorkerPool] = WeakSet()
_dead: list[str] = []  # messages about killed worker processes whose pools are now closed


class _Queue(Queue):  # type: ignore[type-arg]  # at runtime, the class has no type parameters
    """A queue that delivers a UserError instead of an item that cannot be sent; its base class drops the item.

    Without this, the receiver would wait forever. An item is a number and a batch or request with this number.
    """

    def _on_queue_feeder_error(self, error: Exception, item: object) -> None:
        if not isinstance(item, tuple):  # the end of a queue that is already closed
            return
        self.put((item[0], UserError(f"a loader process cannot send a batch: {_why_not_shared(error)}")))


class _Context(ForkContext):
    """Creates the objects that a pool shares with its workers."""

    def Queue(self, maxsize: int = 0) -> _Queue:
        return _Queue(maxsize, ctx=self)


def _why_not_shared(error: Exception) -> str:
    """Return why processes cannot start or share memory and sockets, and what to do about it."""
    folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")  # for the sockets of multiprocessing
    return (
        f"{describe_error(error)}: make /dev/shm larger (docker run --shm-size=2g), set TMPDIR to a shorter path than "
        f"{folder}, raise the limit of open files (ulimit -n), use fewer --workers, or use --workers 0"
    )


class _Current:
    """A pool's current requests. This is a separate object, so that no reference cycle keeps the workers alive."""

    requests: Iterable[Tickets] = ()

    def __init__(self, lookahead: int, num_workers: int) -> None:
        self.lookahead, self.num_workers = lookahead, num_workers

    def __iter__(self) -> Iterator[_Request]:
        """Yield each request with the samples to prefetch.

        Batch b is read by worker b modulo num_workers, so a worker prefetches only batches that it will read. The first
        request to a worker lists all batches up to `lookahead`; each later request lists one more.
        """
        if not self.lookahead:
            yield from (_Request(tickets, ()) for tickets in self.requests)
            return
        requests, waiting, last = iter(self.requests), deque[Tickets](), self.lookahead * self.num_workers
        for number in itertools.count():
            waiting.extend(itertools.islice(requests, last + 1 - len(waiting)))
            if not waiting:
                return
            first = 0 if number < self.num_workers else last
            ahead = tuple(tickets.index for tickets in itertools.islice(waiting, first, None, self.num_workers))
            yield _Request(waiting.popleft(), ahead)


class _Request(NamedTuple):
    """The tickets of a batch, and the samples to prefetch, one array per batch."""

    tickets: Tickets
    ahead: tuple[NDArray[np.int64], ...]


class _Reading(Dataset[Batch | UserError]):
    """Reads batches. Returns a UserError instead of raising it, since workers report exceptions as long tracebacks."""

    def __init__(self, source: Source, crop: int) -> None:
        self.source, self.crop = source, crop
        self.sizes = sizes_of(source)

    def __getitem__(self, asked: _Request) -> Batch | UserError:
        request, ahead = asked
        try:
            for indices in ahead:
                self.source.prefetch(indices)
            samples = self._windows(request) if self.crop else self.source.read_many(request.index)
        except Exception as error:
            if fault := fault_of_plugin(error):
                return fault
            raise
        arrays = samples | request._asdict()
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def _windows(self, request: Tickets) -> Sample:
        boxes = windows(request.uniforms, self.sizes[request.index], self.crop, self.source.spec.scale)
        pairs = zip(request.index, boxes, strict=True)
        return stack([self.source.read_window(int(index), window) for index, window in pairs])


def _begin_worker(parent: int, worker: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    # A signal to the entire job must not stop the workers, because training needs them until it has stopped.
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _print_unless_orphaned


def _print_unless_orphaned(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception, unless it only shows that the parent has exited; the parent reports why it exited."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


MAX_READERS = 16
BYTES_WAITING = 256 * 2**20  # maximum size of the samples that worker processes have read ahead, for any number of them
LARGE_BYTES_WAITING = 2**30  # the same for samples so large that a batch has only one; fewer processes read them


def num_readers(settings: RunSettings) -> int:
    """Return how many processes or threads read files at the start of a run: this process's share of the cores.

    Training does not run yet, so `workers`, which must leave cores for training, is only the minimum. With `workers=0`,
    everything is read in this process.
    """
    if not settings.workers:
        return 0
    return max(settings.workers, min(MAX_READERS, num_cores() // max(1, settings.devices)))


def read_in_order(
    source: Source, num_workers: int, bytes_per_batch: int, start: int = 0
) -> Generator[Batch, None, None]:
    """Yield all samples from `start` on, in batches with images [n, h, w, c].

    If image sizes differ, each batch has one sample. Worker processes prefetch if samples have to be decoded; close the
    generator to stop them early. `bytes_per_batch` is reduced for many workers, and the number of workers for large
    samples, so that they do not need more memory.
    """
    needed, count = bytes_needed(source), len(source)
    num_workers = num_workers if source.decodes else 0
    if num_workers:
        share = 1 / count if source.sizes is None else float((pixels := source.sizes.prod(axis=1)).max() / pixels.sum())
        largest = max(1, int(needed * share))  # size of the largest sample in bytes, approximately
        num_workers = max(1, min(num_workers, LARGE_BYTES_WAITING // (BATCHES_PER_WORKER * largest)))
        bytes_per_batch = min(bytes_per_batch, BYTES_WAITING // (num_workers * BATCHES_PER_WORKER))
    rows = max(1, bytes_per_batch * count // needed) if has_one_size(source) else 1
    requests = (in_order(low, min(low + rows, count)) for low in range(start, count, rows))
    yield from WorkerPool(source, num_workers).read(requests)
