"""A rank whose own work takes longer than that of the others is named, but not after one slow interval or by chance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from paceline.parallel.batchnorm import waiting
from paceline.parallel.place import Place
from paceline.parallel.world import World
from paceline.training import pace as stopwatch
from paceline.training.pace import MAX_STEPS, MIN_STEPS, Pace, StepTimes, StragglerWatch, Work, slowest_rank


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


def test_a_rank_that_works_thirty_percent_longer_is_found() -> None:
    found = slowest_rank(ranks(10, 10, 13, 10))
    assert found and found.rank == 2 and abs(found.slowdown - 0.3) < 0.01


def test_ranks_of_similar_speed_have_no_straggler() -> None:
    assert slowest_rank(ranks(10, 11)) is None
    assert slowest_rank(ranks(10)) is None


def test_a_difference_that_hardly_delays_a_step_is_ignored() -> None:
    assert slowest_rank([Work(0.001, 0, 0.1), Work(0.0013, 0, 0.1)]) is None


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


def test_the_work_of_a_rank_is_measured_in_the_last_steps_before_a_log_line(pace: Pace) -> None:
    for seconds, steps in ((2.0, 3 * MAX_STEPS), (1.0, MAX_STEPS)):
        run_steps(pace, steps, seconds)
    assert pace.own_work().work == pytest.approx(1.0)


def test_short_log_intervals_are_pooled_until_there_are_enough_steps(pace: Pace) -> None:
    counts = []
    for steps in (1, 9, 10, 10, 45):
        run_steps(pace, steps, 1.0)
        counts.append(pace.own_work().num_steps)
        pace.take(0, [])
    assert counts == [1, 10, 20, 10, 55]


def test_waits_before_a_step_are_not_subtracted_from_the_work_on_the_step(pace: Pace) -> None:
    run_steps(pace, 1, 1.0)
    waiting.seconds += 5.0  # in an evaluation
    run_steps(pace, 1, 1.0)
    assert pace.own_work().work == pytest.approx(1.0)


def test_waits_within_a_step_are_not_work(pace: Pace) -> None:
    with pace.step():
        pace.stopwatch("step").seconds += 1.0
        waiting.seconds += 0.75
    assert pace.own_work().work == pytest.approx(0.25)


def run_steps(pace: Pace, count: int, seconds: float) -> None:
    """Time steps that take this long."""
    for _ in range(count):
        with pace.step():
            pace.stopwatch("step").seconds += seconds


def test_a_rank_that_is_three_times_slower_in_a_third_of_the_steps_is_found_after_three_intervals() -> None:
    watch = StragglerWatch()
    interval = interval_of([10.0] * 30, [30.0 if number % 10 < 3 else 10.0 for number in range(30)])
    lines = [watch.add(interval) for _ in range(5)]
    assert [bool(line) for line in lines] == [False, False, False, True, False]
    assert "rank 1 is slow in some steps" in lines[3] and "(median 10 ms)" in lines[3]
    assert watch.straggler and 0.3 < watch.straggler.slowdown < 0.6


def test_a_few_delayed_steps_do_not_make_a_straggler() -> None:
    delayed = [100.0 if number in (3, 17, 29) else 10.0 for number in range(30)]
    assert slowest_rank(interval_of([10.0] * 30, delayed)) is None
    assert slowest_rank(interval_of([10.0] * 6, [10.0, 10.0, 10.0, 30.0, 30.0, 10.0])) is None  # too few steps to tell


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


def test_a_rank_that_is_slow_in_a_fifth_of_its_steps_by_chance_does_not_seem_to_recover() -> None:
    slow_at_times: Noise = lambda chance: 100 if chance.random() < 0.2 else 10  # noqa: E731
    (line,) = watch_lines((lambda chance: 10, slow_at_times), 2 * MIN_STEPS, intervals=100)
    assert "rank 1 is slow in some steps" in line
