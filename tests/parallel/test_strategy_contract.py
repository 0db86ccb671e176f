"""Every strategy declares its limits, and on one device it produces the same weights as a single process."""

from __future__ import annotations

import threading
from typing import get_args

import pytest

from paceline.commands.configure import configure
from paceline.commands.verify import differences
from paceline.core.registry import load_class, names
from paceline.parallel.strategies.dp import ReplicaThreads
from paceline.parallel.strategy import Feature, Strategy, strategy_name, why_unavailable

NAMES = names("strategy")


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_declares_its_limits(name: str) -> None:
    strategy = load_class("strategy", name, Strategy)
    reasons = [strategy.why_not(feature) for feature in get_args(Feature)]
    assert all(isinstance(reason, str) and not reason.endswith(".") for reason in reasons)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "single"])
def test_a_strategy_on_one_device_produces_the_same_weights_as_a_single_process(name: str, tiny: str) -> None:
    strategy = load_class("strategy", name, Strategy)
    if why := why_unavailable(strategy, on_gpus=False):
        pytest.skip(why)
    config = configure(tiny, {"accelerator": "cpu", "batch_size": "16"}, small=True)
    found = differences(config, ["single", name], steps=3, tolerance=1e-12)
    assert found and all(one.ok for one in found)


@pytest.mark.parametrize(
    ("requested", "accelerator", "found"),
    [
        (("auto", 1), "cpu", ("single", 1)),
        (("auto", 2), "cpu", ("ddp", 2)),
        (("dp", 2), "cpu", ("single", 1)),
        (("dp", 2), "cuda", ("dp", 2)),
        (("lightning", 2), "cpu", ("lightning", 2)),
    ],
)
def test_auto_chooses_a_strategy_and_dp_on_a_cpu_is_replaced_by_single(
    requested: tuple[str, int], accelerator: str, found: tuple[str, int]
) -> None:
    assert strategy_name(*requested, accelerator) == found


def test_a_replica_runs_in_the_same_thread_in_every_step() -> None:
    threads = ReplicaThreads(2)
    both = threading.Barrier(2, timeout=30)

    def name() -> str:
        both.wait()  # passes only if two threads run concurrently
        return threading.current_thread().name

    steps = [threads.run([name, name]) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2] and len(set(steps[0])) == 2
    assert threading.current_thread().name not in steps[0]
    assert threads.run([lambda: threading.current_thread().name]) == steps[0][:1], "a small batch has fewer replicas"


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
