"""Stages of a pipeline, and calls in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from paceline.core.background import Background
from paceline.core.ordered_map import ByteBudget, ordered_map


def test_results_keep_the_order_of_the_items() -> None:
    def work(number: int) -> int:
        time.sleep(0.02 * (number % 3 == 0))
        return number * number

    assert list(ordered_map(work, range(20), 4)) == [number * number for number in range(20)]


def test_the_size_of_the_items_in_progress_is_limited() -> None:
    held, most, lock = 0, 0, threading.Lock()

    def work(size: int) -> int:
        nonlocal held, most
        with lock:
            held += size
            most = max(most, held)
        time.sleep(0.01)
        with lock:
            held -= size
        return size

    sizes = [5, 5, 5, 30, 5, 5]
    assert list(ordered_map(work, sizes, 8, num_bytes=lambda size: size, max_bytes=10)) == sizes
    assert most == 30  # an item above the limit is processed alone


def test_an_error_is_raised_when_its_turn_comes_and_ends_the_threads() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    found = []
    with pytest.raises(ValueError, match="three"):
        for result in ordered_map(work, range(9), 2):
            found.append(result)
    assert found == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipeline")]


def test_threads_reserve_a_budget_in_turn() -> None:
    budget, order = ByteBudget(10), list[int]()

    def take(turn: int) -> None:
        budget.take(8, turn)
        order.append(turn)

    threads = [threading.Thread(target=take, args=(turn,)) for turn in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for count in range(3):
        while len(order) <= count:
            time.sleep(0.001)
        assert order == list(range(count + 1))
        budget.give_back(8)
    for thread in threads:
        thread.join()


def test_an_error_in_an_earlier_stage_ends_threads_that_wait_for_a_later_one() -> None:
    budget, interrupted, started = ByteBudget(10), list[bool](), threading.Event()

    def take(turn: int) -> int:
        if turn == 1:
            started.set()
        budget.take(8, turn)
        return turn

    def items() -> Iterator[int]:
        yield 0
        yield 1  # waits for the bytes of item 0, which are never returned
        started.wait(60)
        raise KeyboardInterrupt

    def consume() -> None:
        try:
            list(ordered_map(take, items(), 2, stop=budget.close))
        except KeyboardInterrupt:
            interrupted.append(True)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    consumer.join(60)
    has_ended = bool(interrupted)
    budget.close()  # so that a failure leaves no thread behind
    assert has_ended


def test_calls_run_in_order_in_another_thread_although_one_fails_and_its_error_is_raised_once() -> None:
    background, seen, main = Background("test"), list[tuple[int, bool]](), threading.get_ident()

    def call(number: int) -> None:
        seen.append((number, threading.get_ident() == main))
        if number == 1:
            raise OSError(28, "No space left on device")

    background.add(lambda: call(1))
    with pytest.raises(OSError, match="No space left"):
        background.wait()
    for number in range(2, 20):
        background.add(lambda number=number: call(number))  # type: ignore[misc]
    background.wait()
    assert seen == [(number, False) for number in range(1, 20)]
    background.close()


def test_closing_waits_for_the_calls_that_are_waiting_and_for_at_most_the_given_time() -> None:
    background, may_run, seen = Background("test"), threading.Event(), list[str]()
    background.add(lambda: may_run.wait(60) and None)
    background.add(lambda: seen.append("last"))
    threading.Timer(0.1, may_run.set).start()
    background.close()
    assert seen == ["last"]
    hanging = Background("test")
    hanging.add(lambda: threading.Event().wait(60) and None)
    hanging.close(0.01)
    assert not hanging.is_running
