"""The threads in which the `dp` strategy (DataParallel) runs its replicas."""

from __future__ import annotations

import threading

import pytest

from paceline.parallel.strategies.dp import ReplicaThreads


def test_a_replica_runs_in_the_same_thread_in_every_step() -> None:
    threads = ReplicaThreads(2)
    both = threading.Barrier(2, timeout=30)

    def name() -> str:
        both.wait()  # passes only if two threads run concurrently
        return threading.current_thread().name

    steps = [threads.run([name, name]) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2] and len(set(steps[0])) == 2
    assert threading.current_thread().name not in steps[0]


def test_fewer_replicas_than_devices_use_the_first_threads() -> None:
    threads = ReplicaThreads(2)
    first = threads.run([threading.get_ident, threading.get_ident])[0]
    assert threads.run([threading.get_ident]) == [first]


def test_an_error_in_one_replica_is_raised_after_the_others_have_finished() -> None:
    done, released = threading.Event(), threading.Event()

    def fails() -> None:
        released.set()
        raise ValueError("replica 0")

    def works() -> None:
        assert released.wait(30)
        done.set()

    with pytest.raises(ValueError, match="replica 0"):
        ReplicaThreads(2).run([fails, works])
    assert done.is_set()
