"""The speed of the loop, and the rank whose own work takes longer than that of the others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.benchmarking import self_test as timing_module
from paceline.benchmarking.self_test import measure
from paceline.parallel.batchnorm import waiting
from paceline.parallel.group import Place
from paceline.parallel.world import World
from paceline.runs.profile_summary import with_other, with_whole_steps
from paceline.training import log as stopwatch
from paceline.training import step as training_step
from paceline.training.log import MAX_STEPS, MIN_STEPS, Pace, StepTimes, Stopwatch, StragglerWatch, Work, slowest_rank
from paceline.training.step import GradientWait


def ranks(*milliseconds: float) -> list[Work]:
    """Return ranks that all need the time of the slowest one per step, and the same time in each step."""
    return interval_of(*([own] * MIN_STEPS for own in milliseconds))


def interval_of(*steps: list[float]) -> list[Work]:
    """Return the work of each rank, given its milliseconds in every step; all ranks wait for the slowest one."""
    whole = [max(together) for together in zip(*steps, strict=True)]
    return [
        Work.of([StepTimes(one / 1000, 0.0, longest / 1000) for one, longest in zip(own, whole, strict=True)])
        for own in steps
    ]


def test_only_a_rank_that_works_noticeably_longer_and_delays_the_steps_is_a_straggler() -> None:
    found = slowest_rank(ranks(10, 10, 13, 10))
    assert found and found.rank == 2 and abs(found.slowdown - 0.3) < 0.01
    assert slowest_rank(ranks(10, 11)) is None
    assert slowest_rank(ranks(10)) is None
    assert slowest_rank([Work(0.001, 0, 0.1), Work(0.0013, 0, 0.1)]) is None  # hardly delays a step


def test_a_straggler_is_reported_once_and_again_when_it_is_gone() -> None:
    watch = StragglerWatch()
    slow, even = ranks(10, 14), ranks(10, 10)
    lines = [watch.add(interval) for interval in (slow, slow, slow, slow, even, even)]
    assert lines[:2] == ["", ""] and lines[3:5] == ["", ""]
    assert "rank 1 needs 14 ms" in lines[2] and "rank 1 is as fast as the others again" in lines[5]


def test_a_single_slow_interval_is_not_reported() -> None:
    watch = StragglerWatch()
    lines = [watch.add(interval) for interval in (ranks(9, 9), ranks(10, 20), ranks(10, 10), ranks(20, 10))]
    assert lines == [""] * 4 and watch.straggler is None


def test_the_line_reports_how_much_of_the_work_is_waiting_for_data() -> None:
    watch = StragglerWatch()
    interval = [Work.of([StepTimes(*times)] * 20) for times in ((0.010, 0.001, 0.020), (0.020, 0.012, 0.020))]
    assert "60% of it waiting for data" in [watch.add(interval) for _ in range(3)][2]


@pytest.mark.parametrize(("device", "is_compared"), [("cpu", True), ("cuda", False)])
def test_waits_of_the_hosts_of_gpus_are_logged_but_never_make_a_straggler(
    device: str, is_compared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = Pace(World(Place(), torch.device(device)), images=0, epoch_images=100)
    interval = [Work.of([StepTimes(*times)] * 20) for times in ((0.0003, 0.0003, 0.0005), (0.0001, 0.0001, 0.0003))]
    values = [pace.take(images, interval) for images in (10, 20, 30)][-1]
    assert values["ranks/seconds_0"] == 0.0003
    assert ("ranks/straggler" in values) == is_compared and ("straggler" in capsys.readouterr().out) == is_compared


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Pace:
    """The pace of a rank whose steps take only the time that a test adds."""
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: 0.0)
    return Pace(World(Place(), torch.device("cpu")), images=0, epoch_images=100)


def test_the_work_of_a_rank_is_measured_in_the_last_steps_and_short_intervals_are_pooled(pace: Pace) -> None:
    for seconds, steps in ((2.0, 3 * MAX_STEPS), (1.0, MAX_STEPS)):
        run_steps(pace, steps, seconds)
    assert pace.own_work().work == pytest.approx(1.0)
    pace.take(0, [])
    counts = []
    for steps in (1, 9, 10, 10, 45):
        run_steps(pace, steps, 1.0)
        counts.append(pace.own_work().num_steps)
        pace.take(0, [])
    assert counts == [1, 10, 20, 10, 55]


def test_only_waits_within_a_step_are_subtracted_from_its_work(pace: Pace) -> None:
    run_steps(pace, 1, 0.25)
    waiting.seconds += 5.0  # in an evaluation
    with pace.step():
        pace.stopwatch.seconds["step"] += 1.0
        waiting.seconds += 0.75
    assert pace.own_work().work == pytest.approx(0.25)


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_the_time_after_the_last_gradient_is_a_wait(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.0]
    monkeypatch.setattr(training_step, "perf_counter", lambda: now[0])
    layer = nn.Linear(2, 2)
    wait = GradientWait(layer.parameters())
    for _ in range(2):
        before = waiting.seconds
        now[0] += 3.0  # this process's own work
        layer(torch.ones(1, 2)).sum().backward()
        now[0] += seconds
        wait.end_backward()
        assert waiting.seconds - before == pytest.approx(seconds)


def run_steps(pace: Pace, count: int, seconds: float) -> None:
    """Time steps that take this long."""
    for _ in range(count):
        with pace.step():
            pace.stopwatch.seconds["step"] += seconds


def test_a_few_delayed_steps_do_not_make_a_straggler() -> None:
    delayed = [100.0 if number in (3, 17, 29) else 10.0 for number in range(30)]
    assert slowest_rank(interval_of([10.0] * 30, delayed)) is None


def test_intervals_that_are_too_short_neither_report_a_straggler_nor_its_recovery() -> None:
    watch = StragglerWatch()
    short = interval_of([10.0] * 9, [30.0] * 9)
    assert [watch.add(short) for _ in range(5)] == [""] * 5
    lines = [watch.add(ranks(10, 14)) for _ in range(3)]
    short = interval_of([10.0] * 9, [10.0] * 9)
    assert lines[2] and [watch.add(short) for _ in range(5)] == [""] * 5 and watch.straggler


Noise = Callable[[random.Random], float]  # returns the milliseconds that a rank works on one step
NOISES: dict[str, Noise] = {
    "uniform": lambda chance: chance.uniform(1, 21),
    "lognormal": lambda chance: 10 * math.exp(chance.gauss(0, 0.3)),
    "delayed": lambda chance: 50 if chance.random() < 0.2 else chance.uniform(9, 11),
}


def watch_lines(noises: tuple[Noise, ...], steps: int, intervals: int) -> list[str]:
    """Return the lines about stragglers in a simulated run; each log interval has this many steps."""
    chance, watch = random.Random(3), StragglerWatch()
    times = [[[noise(chance) for _ in range(steps)] for noise in noises] for _ in range(intervals)]
    return [line for interval in times if (line := watch.add(interval_of(*interval)))]


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_ranks_that_are_equally_noisy_have_no_straggler(noise: Noise, size: int) -> None:
    assert watch_lines((noise,) * size, steps=MIN_STEPS, intervals=300) == []


def test_a_rank_that_is_thirty_percent_slower_is_found_despite_noise_and_does_not_seem_to_recover() -> None:
    slower: Noise = lambda chance: 1.3 * 10 * math.exp(chance.gauss(0, 0.15))  # noqa: E731
    noises = (lambda chance: 10 * math.exp(chance.gauss(0, 0.15)), slower)
    assert any("rank 1 needs" in line for line in watch_lines(noises, MIN_STEPS, intervals=6))
    assert len(watch_lines(noises, MIN_STEPS, intervals=200)) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list with the time that the stopwatch and measurements read."""
    now = [0.0]
    for module in (stopwatch, timing_module):
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
    assert taken == {"data": 8, "step": 6, "inner": 2, "total": 14}
    with pytest.raises(KeyError), stopwatch("data"):
        clock[0] += 3
        raise KeyError
    clock[0] += 5
    assert stopwatch.take() == {"data": 3, "step": 0, "inner": 0, "total": 8}


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
