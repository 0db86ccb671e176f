"""Worker processes that prefetch batches from a source."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.heartbeat import die_with_parent
from paceline.data.crop import windows
from paceline.data.source import Sample, Source, sizes_of
from paceline.data.tickets import Tickets

SECONDS_UNTIL_NOTICED = 0.2  # time within which torch notices a dead child process
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
            multiprocessing_context="fork" if num_workers else None,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            generator=torch.Generator(),  # a separate generator, so that reading does not advance the global one
        )

    def read(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield the batch for each request, in order, in host memory, with images [n, h, w, c]."""
        self._current.requests = requests
        try:
            for result in self._loader:
                if isinstance(result, UserError):
                    raise result
                yield result
        finally:
            if dead := self.describe_dead():
                _dead.append(dead)  # this pool may no longer exist when the error is reported

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
        except UserError as error:
            return error
        arrays = samples | request._asdict()
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def _windows(self, request: Tickets) -> Sample:
        found = windows(request.uniforms, self.sizes[request.index], self.crop, self.source.spec.scale)
        samples = [
            self.source.read_window(int(index), window) for index, window in zip(request.index, found, strict=True)
        ]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _begin_worker(parent: int, worker: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    # A signal to the entire job must not stop the workers, because training needs them until it has stopped.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _print_unless_orphaned


def _print_unless_orphaned(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception, unless it only shows that the parent has exited; the parent reports why it exited."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
