"""A rank whose own work takes longer than that of the others is named, but not after a single slow interval."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from paceline.parallel.world import Place, World
from paceline.training.pace import MAX_STEPS, Pace
from paceline.training.stragglers import StragglerWatch, Work, slowest_rank, trimmed_mean


def ranks(*milliseconds: float) -> list[Work]:
    """Return ranks that all need the time of the slowest one per step."""
    longest = max(milliseconds)
    return [Work(own / 1000, 0.0, longest / 1000) for own in milliseconds]


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
    interval = [Work(0.010, 0.001, 0.020), Work(0.020, 0.012, 0.020)]
    assert "60% of it waiting for data" in [watch.add(interval) for _ in range(3)][2]


@pytest.mark.parametrize(("device", "is_compared"), [("cpu", True), ("cuda", False)])
def test_waits_of_the_hosts_of_gpus_are_logged_but_never_make_a_straggler(
    device: str, is_compared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = Pace(World(Place(), torch.device(device)), images=0, epoch_images=100)
    interval = [Work(0.0003, 0.0003, 0.0005), Work(0.0001, 0.0001, 0.0003)]
    values = [pace.take(images, interval) for images in (10, 20, 30)][-1]
    assert values["ranks/seconds_0"] == 0.0003
    assert ("ranks/straggler" in values) == is_compared and ("straggler" in capsys.readouterr().out) == is_compared


def test_the_work_of_a_rank_is_measured_in_the_last_steps_before_a_log_line() -> None:
    pace = Pace(World(Place(), torch.device("cpu")), images=0, epoch_images=100)
    for seconds, steps in ((2.0, 3 * MAX_STEPS), (1.0, MAX_STEPS)):
        for _ in range(steps):
            pace.stopwatch("step").seconds += seconds
            pace.count_step()
    assert pace.own_work().work == 1.0


def interval_of(*steps: list[float]) -> list[Work]:
    """Return the work of each rank, given its milliseconds in every step; all ranks wait for the slowest one."""
    whole = [max(together) for together in zip(*steps, strict=True)]
    return [
        Work(median(own) / 1000, 0.0, median(whole) / 1000, trimmed_mean([one / 1000 for one in own])) for own in steps
    ]


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
