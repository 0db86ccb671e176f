"""Threads: stages of a pipeline, whose results keep the order of their inputs, and calls in the background.

Stages are generators, so they can be chained: each one pulls items from the stage before it. Codecs and the operations
of NumPy and PyTorch on large arrays release the GIL, so threads use all cores.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int,
    *,
    num_bytes: Callable[[Item], int] = lambda item: 0,
    max_bytes: int = 0,
    stop: Callable[[], None] = lambda: None,
) -> Generator[Result, None, None]:
    """Yield the result of `work` for each item, in order, while threads work on the next items.

    At most two items per thread are in progress. `max_bytes` limits their total size, unless a single item is larger.
    An error in `work` is raised when its item's turn comes. At the end, also after an error in an earlier stage or
    Ctrl-C, `stop` is called before the threads are awaited; it must end `work` that waits for a later stage.
    """
    waiting: deque[Future[Result]] = deque()
    sizes: deque[int] = deque()
    executor = ThreadPoolExecutor(threads, thread_name_prefix="pipeline")
    try:
        for item in items:
            size = num_bytes(item)
            while waiting and (len(waiting) >= 2 * threads or (max_bytes and sum(sizes) + size > max_bytes)):
                sizes.popleft()
                yield waiting.popleft().result()
            sizes.append(size)
            waiting.append(executor.submit(work, item))
            del item  # so that it is freed as soon as the work on it is done
            while waiting and waiting[0].done():
                sizes.popleft()
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        stop()
        executor.shutdown(wait=True, cancel_futures=True)


class ByteBudget:
    """Limits the total size of what several threads hold; a single holder may exceed the limit.

    Threads take their shares in turn. Otherwise, a thread could wait for one whose work comes later in a pipeline.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._turn, self._closed = limit, 0, 0, False
        self._changed = threading.Condition()

    def take(self, size: int, turn: int) -> None:
        """Wait until it is this caller's turn (0, 1, …) and this many bytes are free, then reserve them."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (turn == self._turn and self._has_room(size)))
            if self._closed:
                raise RuntimeError("the pipeline was stopped")
            self._used += size
            self._turn += 1
            self._changed.notify_all()

    def give_back(self, size: int) -> None:
        """Return reserved bytes."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Stop all threads that are waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return not self._used or self._used + size <= self._limit


MAX_WAITING = 256  # calls; adding one more waits


class Background:
    """Runs calls in a thread. An error in a call is raised at the next `add` or `wait`; later calls still run.

    The thread starts with the first call, and does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Queue[Callable[[], None] | None] = Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.is_closed = False

    def add(self, call: Callable[[], None]) -> None:
        """Run a call after those that were added before it; wait if too many are waiting."""
        assert not self.is_closed, f"{self._name}: the thread has ended"
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(call)

    @property
    def is_running(self) -> bool:
        """Whether the thread has started and not ended, so that calls may be waiting."""
        return self._thread is not None and not self.is_closed

    def wait(self) -> None:
        """Wait until every call that was added before has ended; raise the first error, if any."""
        if self.is_running:
            reached = threading.Event()
            self._calls.put(reached.set)
            reached.wait()
        self.check()

    def check(self) -> None:
        """Raise the first error in the thread, once."""
        if self._error:
            error, self._error = self._error, None
            raise error

    def close(self, seconds: float = math.inf) -> None:
        """End the thread after the waiting calls; wait for at most `seconds`. Errors are not raised."""
        if self.is_running:
            assert self._thread
            self.is_closed = True
            self._calls.put(None)
            self._thread.join(seconds if math.isfinite(seconds) else None)
        self.is_closed = True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                self._error = self._error or error
            del call  # so that what the call holds is freed now, not with the next call
