"""The stopwatch adds up the time spent in named sections, and a measurement returns the median and the spread."""

from __future__ import annotations

import pytest
import torch

from paceline.benchmarking import self_test as timing_module
from paceline.benchmarking.self_test import measure
from paceline.parallel.place import Place
from paceline.parallel.world import World
from paceline.training import pace as stopwatch_module
from paceline.training.pace import Pace, Stopwatch, with_other, with_whole_steps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list with the time that the stopwatch and measurements read."""
    now = [0.0]
    for module in (stopwatch_module, timing_module):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def test_section_times_accumulate_until_they_are_read(clock: list[float]) -> None:
    stopwatch = Stopwatch()
    for _ in range(2):
        with stopwatch("data"):
            clock[0] += 4
        with stopwatch("step"):
            clock[0] += 2
            with stopwatch("inner"):
                clock[0] += 1
    taken = stopwatch.take()
    assert list(taken.items()) == [("data", 8), ("step", 6), ("inner", 2), ("total", 14)]
    clock[0] += 5
    assert stopwatch.take() == {"data": 0, "step": 0, "inner": 0, "total": 5}


def test_waiting_for_the_losses_counts_as_training(clock: list[float]) -> None:
    stopwatch = Stopwatch()
    for name, seconds in {"step": 1, "log": 6, "evaluate": 3}.items():
        with stopwatch(name):
            clock[0] += seconds
    assert with_whole_steps(stopwatch.shares()) == {"step": pytest.approx(0.7), "evaluate": 0.3}
    assert with_whole_steps({"data": 1.0}) == {"data": 1.0}
    assert with_other({"step": 1.01})["other"] == 0.0


def test_time_in_no_section_before_the_first_step_is_start_up(clock: list[float]) -> None:
    stopwatch = Stopwatch()
    assert "start_up" not in stopwatch.shares()
    with stopwatch("sample"):
        clock[0] += 1
    clock[0] += 5
    stopwatch.end_start_up()
    with stopwatch("step"):
        clock[0] += 3
    clock[0] += 1
    stopwatch.end_start_up()
    assert with_other(stopwatch.shares()) == pytest.approx({"sample": 0.1, "step": 0.3, "start_up": 0.5, "other": 0.1})


def test_the_logged_speed_is_that_of_training(clock: list[float]) -> None:
    pace = Pace(World(Place(), torch.device("cpu")), images=0, epoch_images=100)
    clock[0] += 30  # start-up
    for images in (10, 20):
        for section, seconds in {"evaluate": 8.0, "data": 1.0, "save": 2.0, "sample": 3.0}.items():
            with pace.stopwatch(section):
                clock[0] += seconds
        with pace.step():
            clock[0] += 3
        clock[0] += 1  # between the steps
        values = pace.take(images, [])
        assert values["time/images_per_second"] == 10 / 5
        assert values["time/images_per_second_without_loading"] == 10 / 4
        assert (values["time/data_wait"], values["time/training_seconds"]) == (1 / 5, 5)


def test_a_section_that_raises_an_exception_is_still_timed(clock: list[float]) -> None:
    stopwatch = Stopwatch()
    with pytest.raises(KeyError), stopwatch("data"):
        clock[0] += 3
        raise KeyError
    assert stopwatch.take()["data"] == 3


def test_a_measurement_returns_the_median_and_the_spread(clock: list[float]) -> None:
    calls: list[int] = []

    def function() -> None:
        calls.append(1)
        # The warm-up steps are slow, and so is one of the ten timed steps.
        clock[0] += 30.0 if len(calls) in (1, 2, 5) else 5.0

    timing = measure(function, device=torch.device("cpu"), warmup=2, repeats=10)
    assert len(calls) == 12 and timing.n == 10
    assert timing.low == timing.median == pytest.approx(5.0) and 5.0 < timing.high < 30.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_measurement_on_a_gpu_includes_the_execution_on_the_gpu() -> None:
    device = torch.device("cuda")
    matrix = torch.ones(4096, 4096, device=device)

    def function() -> None:
        for _ in range(10):
            matrix @ matrix

    timing = measure(function, device=device, warmup=3, repeats=10)
    assert timing.median > 10 * 2 * 4096**3 / 1e15  # no GPU is faster than 10¹⁵ float32 operations per second
