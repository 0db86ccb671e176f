"""Stages of a pipeline: functions that run in threads, whose results keep the order of their inputs.

Stages are generators, so they can be chained: each one pulls items from the stage before it. Codecs and the operations
of NumPy and PyTorch on large arrays release the GIL, so threads use all cores.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
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
