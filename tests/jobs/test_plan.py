"""What more devices would bring, from what one step and one exchange cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_fork

from paceline.cli import run
from paceline.errors import UserError
from paceline.jobs._prediction import Link, Measurement, predict, stops_paying_at
from paceline.jobs.plan import parse_bandwidth, parse_seconds

SEEN = Measurement(
    step_seconds={16: 0.010, 32: 0.020, 64: 0.040},
    images_per_sample=1,
    gradient_bytes={"generator": 10_000_000, "discriminator": 5_000_000},
    exchanges=10,
    overlap=0.0,
    bucket_bytes=1_000_000,
    networks=["generator", "discriminator"],
    rounds=7,
)
PERFECT = Link(0.0, 1e18, 2)


def test_without_costs_of_exchange_n_devices_are_n_times_as_fast() -> None:
    assert predict(SEEN, PERFECT, 1, 64).images_per_second == pytest.approx(1600)
    assert predict(SEEN, PERFECT, 4, 64).images_per_second == pytest.approx(6400)
    assert predict(SEEN, PERFECT, 8, 512).images_per_second == pytest.approx(8 * 1600)


def test_an_exchange_costs_its_bytes_around_the_ring_and_its_small_ones() -> None:
    link = Link(latency_seconds=1e-4, bytes_per_second=1e9, devices=2)
    assert link.all_reduce_seconds(10_000_000, 2) == pytest.approx(1e-4 + 0.010)
    assert link.all_reduce_seconds(10_000_000, 4) == pytest.approx(2e-4 + 0.015)
    assert link.all_reduce_seconds(10_000_000, 1) == 0
    step = predict(SEEN, link, 2, 64)
    assert step.exchange_seconds == pytest.approx(0.015 + 2 * 1e-4 + 10 * 1e-4)
    assert step.images_per_second == pytest.approx(64 / (0.020 + step.exchange_seconds))


def test_overlap_hides_all_but_the_last_bucket() -> None:
    link = Link(0.0, 1e9, 2)
    hidden = replace(SEEN, overlap=1.0, step_seconds={32: 1.0, 64: 2.0})
    assert predict(hidden, link, 2, 64).exchange_seconds == pytest.approx(2 * 0.001)


def test_it_says_where_more_devices_stop_paying() -> None:
    assert stops_paying_at(SEEN, PERFECT, 64) is None
    slow = Link(0.0, 1e9, 2)  # 15 ms of exchange against a step of 40 ms
    assert stops_paying_at(SEEN, slow, 64) == 2
    assert stops_paying_at(SEEN, Link(0.0, 1e6, 2), 64) == 1


def test_a_step_between_two_measured_batches_lies_between_them() -> None:
    assert SEEN.seconds_of_step(48) == pytest.approx(0.030)
    assert SEEN.seconds_of_step(128) == pytest.approx(0.080)
    assert 0 < SEEN.seconds_of_step(1) < 0.010


@pytest.mark.parametrize(
    ("text", "value"), [("25GB/s", 25e9), ("200Gbit/s", 25e9), ("900 MB/s", 9e8), ("1e9", 1e9), ("10gbit/s", 1.25e9)]
)
def test_bandwidth_is_said_in_bytes_or_bits(text: str, value: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(value)


def test_latency_has_a_unit() -> None:
    assert parse_seconds("20us") == pytest.approx(2e-5) and parse_seconds("0.1 ms") == pytest.approx(1e-4)
    with pytest.raises(UserError, match="--latency soon"):
        parse_seconds("soon")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--bandwidth", "fast"], "--bandwidth fast: expected something like 25GB/s"),
        (["--devices", "8", "--nodes", "3"], "--nodes 3: does not divide --devices 8"),
        (["--devices", "8", "--nodes", "4"], "--nodes 4: the link between devices cannot be measured here"),
        (["--devices", "none"], "--devices none: is not a whole number"),
        (["--devices", "64", "--check"], "--check: only as many devices as this machine has"),
    ],
)
def test_a_mistake_ends_in_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "classification", "--preset", "quick", "--accelerator", "cpu", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_plan_over_a_given_link_needs_one_device(tmp_path: Path) -> None:
    words = ["plan", "classification", "--preset", "quick", "--set", "width=2", "--accelerator", "cpu"]
    done = run_fork(tmp_path, *words, "--devices", "4", "--nodes", "4", "--bandwidth", "25GB/s")
    assert done.wait() == 0, done.stderr
    assert "measured here, one process" in done.stdout and "link, as said: 25 GB/s" in done.stdout
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[:3] == ["4", "256", "64"])
    assert row[-2:] == ["0.4", "0.2"]  # the learning rates for four devices: linear, square root
