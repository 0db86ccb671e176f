"""The speed of a run is computed from the intervals between its log lines."""

from __future__ import annotations

import pytest

from paceline.report.reader import Line, log_intervals, speed_of


def line(images: int, at: float, total: float, length: int = 100, *, clock: float = 0.0, **more: float) -> Line:
    """Return a log line for an interval of `total` seconds: 0.1 s of loading, 0.5 s of steps, and the rest."""
    values = {"time": 1000 + at + clock, "epoch": images / 100, "time/images_per_second": length / total}
    values |= {"time/data_seconds": 0.1, "time/step_seconds": 0.5, "time/log_seconds": 0.0}
    return Line(images, at, values | {f"time/{name}_seconds": value for name, value in more.items()})


def test_speed_includes_time_between_steps_but_not_evaluation_and_saving() -> None:
    lines = [line(100, 5.0, 5.0), line(200, 6.0, 1.0), line(300, 9.0, 3.0, evaluate=1.0, save=0.5, sample=0.5)]
    speed = speed_of(log_intervals(lines))
    assert speed.images_per_second == pytest.approx(100) and not speed.includes_warmup
    assert speed.images_per_second_without_loading == pytest.approx(200 / 1.8)


def test_a_run_logs_the_speed_of_training_which_the_report_shows() -> None:
    evaluated = {"training": 1.0, "evaluate": 20.0, "save": 0.5, "sample": 0.5}
    lines = [line(100, 5.0, 5.0), line(200, 6.0, 1.0, training=1.0), line(300, 28.0, 1.0, **evaluated)]
    assert speed_of(log_intervals(lines)).images_per_second == pytest.approx(100)


def test_a_single_log_interval_includes_the_warm_up() -> None:
    only = [line(100, 5.0, 5.0)]
    speed = speed_of(log_intervals(only))
    assert speed.includes_warmup and speed.images_per_second == pytest.approx(100 / 0.6)
    assert speed.std_over_log_intervals is None


def test_log_intervals_after_a_resume_or_a_malformed_line_are_ignored() -> None:
    lines = [line(100, 5.0, 5.0), line(200, 6.0, 1.0), line(300, 10.0, 4.0, clock=60.0), line(400, 11.0, 1.0, clock=60)]
    assert [one.line.images for one in log_intervals(lines)] == [200, 400]
    assert [one.line.images for one in log_intervals(lines, {1})] == [400]
    assert speed_of(log_intervals(lines)).std_over_log_intervals == pytest.approx(0.0)


def test_speed_is_measured_only_after_the_last_change_of_devices() -> None:
    lines = [line(100, 5.0, 5.0), line(200, 6.0, 1.0, save=0.3), line(300, 8.0, 2.0), line(400, 10.0, 2.0, save=0.5)]
    assert [one.line.images for one in log_intervals(lines, since=200)] == [400], (
        "the first interval includes the warm-up"
    )
    assert [one.line.images for one in log_intervals(lines, since=300)] == [400]
    assert [one.line.images for one in log_intervals(lines, {2}, since=200)] == [400]
    assert speed_of(log_intervals(lines, since=200)).images_per_second == pytest.approx(100 / 1.5)


def test_a_run_without_log_lines_has_no_speed() -> None:
    assert speed_of(log_intervals([])) is None
