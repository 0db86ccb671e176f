"""Calls in a background thread run in order, and their errors reach the thread that adds calls."""

from __future__ import annotations

import threading

import pytest

from paceline.runs.metrics import Background


def test_calls_run_in_the_order_in_which_they_were_added_and_not_in_the_caller() -> None:
    background, seen = Background("test"), list[tuple[int, bool]]()
    main = threading.get_ident()
    for number in range(20):
        background.add(lambda number=number: seen.append((number, threading.get_ident() == main)))  # type: ignore[misc]
    background.wait()
    assert seen == [(number, False) for number in range(20)]
    background.close()


def test_an_error_is_raised_once_and_later_calls_still_run() -> None:
    background, seen = Background("test"), list[str]()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    background.add(fail)
    with pytest.raises(OSError, match="No space left"):
        background.wait()
    background.add(lambda: seen.append("later"))
    background.wait()
    background.close()
    assert seen == ["later"]


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
