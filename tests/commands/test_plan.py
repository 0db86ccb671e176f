"""`paceline plan` predicts the speedup from more devices, using the times that a step and a gradient exchange take."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from running import run_fork, start_fork

from paceline.benchmarking.scaling import (
    Checked,
    Link,
    LinkOverride,
    Measurement,
    one_device,
    one_of_several,
    parse_bandwidth,
    predict,
)
from paceline.commands.configure import configure
from paceline.core.errors import UserError
from paceline.core.files import read_json, write_json
from paceline.parallel.batchnorm import SynchronizedBatchNorm
from paceline.parallel.group import Place
from paceline.parallel.torch_internals import AnyBatchNorm
from paceline.parallel.world import World

SEEN = Measurement(
    alone_seconds={64: 0.040},
    step_seconds={16: 0.010, 32: 0.020, 64: 0.040},
    images_per_sample=1,
    gradient_bytes={"generator": 10_000_000, "discriminator": 5_000_000},
    exchanges=10,
    overlap=0.0,
    bucket_bytes=1_000_000,
    networks=("generator", "discriminator"),
    rounds=7,
    threads=1,
)
PERFECT = Link(0.0, 1e18, 2)


def test_n_devices_without_communication_costs_are_n_times_as_fast() -> None:
    assert predict(SEEN, PERFECT, 1, 64).images_per_second == pytest.approx(1600)
    assert predict(SEEN, PERFECT, 4, 64).images_per_second == pytest.approx(6400)
    assert predict(SEEN, PERFECT, 8, 512).images_per_second == pytest.approx(8 * 1600)


def test_the_gradient_exchange_time_is_the_transfer_time_plus_the_latencies_in_a_ring() -> None:
    link = Link(latency_seconds=1e-4, bytes_per_second=1e9, devices=2)
    assert link.all_reduce_seconds(10_000_000, 2) == pytest.approx(1e-4 + 0.010)
    assert link.all_reduce_seconds(10_000_000, 4) == pytest.approx(2e-4 + 0.015)
    assert link.all_reduce_seconds(10_000_000, 1) == 0
    step = predict(SEEN, link, 2, 64)
    assert step.exchange_seconds == pytest.approx(0.015 + 2 * 1e-4 + 10 * 1e-4)
    assert step.images_per_second == pytest.approx(64 / (0.020 + step.exchange_seconds))


def test_overlap_hides_the_exchange_of_all_but_the_last_gradient_bucket() -> None:
    link = Link(0.0, 1e9, 2)
    hidden = replace(SEEN, overlap=1.0, step_seconds={32: 1.0, 64: 2.0})
    assert predict(hidden, link, 2, 64).exchange_seconds == pytest.approx(2 * 0.001)


def test_a_step_time_between_two_measured_batch_sizes_is_interpolated() -> None:
    assert SEEN.seconds_of_step(48) == pytest.approx(0.030)
    assert SEEN.seconds_of_step(128) == pytest.approx(0.080)
    assert 0 < SEEN.seconds_of_step(1) < 0.010


def test_a_measurement_can_be_saved_as_json_and_read_back(tmp_path: Path) -> None:
    whole = replace(SEEN, link=Link(1e-4, 1e9, 2), checked=(Checked(predicted=90.0, measured=100.0),))
    for one in (SEEN, whole):
        write_json(tmp_path / "measured.json", asdict(one))
        assert Measurement.from_json(read_json(tmp_path / "measured.json")) == one


def test_the_prediction_for_one_device_uses_the_step_time_measured_on_one_device() -> None:
    crowded = replace(SEEN, alone_seconds={64: 0.025})
    assert predict(crowded, PERFECT, 1, 64).images_per_second == pytest.approx(64 / 0.025)
    assert predict(crowded, PERFECT, 2, 64).images_per_second == pytest.approx(64 / 0.020)


def test_a_single_device_is_measured_with_plain_batchnorm() -> None:
    config = configure("classification", {"preset": "quick", "accelerator": "cpu"}, assignments=["width=8"])
    here = World(Place(), torch.device("cpu"))
    kinds = [
        {type(module) for module in parts.recipe.modules() if isinstance(module, AnyBatchNorm)}
        for parts in (one_device(config, 4, here), one_of_several(config, 4, here))
    ]
    assert kinds == [{torch.nn.BatchNorm2d}, {SynchronizedBatchNorm}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("25GB/s", 25e9), ("100GBps", 100e9), ("900 MB/s", 9e8), ("5KB/s", 5e3), ("5kB", 5e3), ("1TB/s", 1e12)),
        *(("100Gbps", 12.5e9), ("100Gb/s", 12.5e9), ("100Gb", 12.5e9), ("8Kb/s", 1e3), ("8Mbps", 1e6), ("8Tb/s", 1e12)),
        *(("200Gbit/s", 25e9), ("80 Gbits/s", 1e10), ("2 Gbyte/s", 2e9), ("1e9B/s", 1e9)),
    ],
)
def test_bandwidth_may_be_given_in_bytes_or_bits(text: str, value: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["100gb", "100GBPS", "25G", "25", "25e9", "0GB/s", "1e999B/s"])
def test_a_bandwidth_that_is_ambiguous_zero_or_infinite_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match=rf"--bandwidth {text}: expected something like 25GB/s \(bytes\)"):
        parse_bandwidth(text)


def test_latency_is_parsed_with_its_unit() -> None:
    for text, seconds in (("20us", 2e-5), ("0.1 ms", 1e-4)):
        assert LinkOverride.parse("", text).latency_seconds == pytest.approx(seconds)
    for text in ("soon", "1e999s", "20"):
        with pytest.raises(UserError, match=f"--latency {text}: expected something like 20us"):
            LinkOverride.parse("", text)


def test_given_bandwidth_and_latency_are_used_and_missing_values_are_measured_or_assumed() -> None:
    measured = Link(3e-4, 4e9, 2)
    neither, slow, wide = LinkOverride.parse("", ""), LinkOverride.parse("", "5ms"), LinkOverride.parse("100Gbps", "")
    assert neither.apply(measured) == measured
    assert neither.describe(measured) == (
        "bandwidth 4 GB/s (measured between 2 processes); latency 300 µs per exchange (measured between 2 processes)"
    )
    assert slow.apply(measured) == Link(5e-3, 4e9, 2)
    assert slow.describe(Link(5e-3, 4e9, 2)) == (
        "bandwidth 4 GB/s (measured between 2 processes); latency 5,000 µs per exchange (as given)"
    )
    link = wide.apply(measured)
    assert link and link.bytes_per_second == 12.5e9
    assert wide.describe(link) == "bandwidth 12.5 GB/s (as given); latency 20 µs per exchange (assumed)"
    both = LinkOverride.parse("25GB/s", "0.5us").apply(None)
    assert both == Link(5e-7, 25e9, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bandwidth", "fast"], "--bandwidth fast: expected something like 25GB/s"),
        (["--devices", "8", "--nodes", "3"], "--devices 8: must be a multiple of --nodes 3"),
        (["--devices", "8", "--nodes", "4"], "--nodes 4: the link between devices cannot be measured on this machine"),
        (["--devices", "none"], "--devices none: must be a whole number"),
        (["--devices", "64", "--check"], "--check: only "),
        (["--devices", "1", "--check", "--latency", "5ms"], "--latency 5ms: cannot be combined with --check"),
        (["--memory", "--check"], "--check: predicts the speed, so it cannot be combined with --memory"),
    ],
)
def test_a_user_error_prints_one_line(words: list[str], message: str, rejected: Callable[..., str]) -> None:
    assert message in rejected("plan", "classification", "--preset", "quick", "--accelerator", "cpu", *words)


def test_a_step_that_does_not_fit_in_the_memory_is_rejected_before_it_is_measured(tmp_path: Path, tiny: str) -> None:
    command = ("plan", tiny, "--accelerator", "cpu", "--devices", "1", "--batch-size", "10000000")
    rejected = run_fork(tmp_path, *command, "--set", "width=10000")
    (line,) = rejected.stderr.splitlines()
    assert rejected.wait() == 2 and line.startswith("paceline: a step with batch 10000000 needs about ")
    assert "; use --accumulate " in line


def test_a_thread_count_that_is_not_a_number_is_reported_in_one_line(
    rejected: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    line = rejected("plan", "classification", "--preset", "quick", "--accelerator", "cpu", "--devices", "2")
    assert "OMP_NUM_THREADS=many: not a valid number of threads" in line


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of `paceline plan` in a narrow terminal, for two nodes and for two local processes."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("measures two processes at once")
    small = ("plan", "classification", "--preset", "quick", "--set", "width=8", "--batch-size", "4", "--devices", "2")
    given = ("--accelerator", "cpu", "--nodes", "2", "--bandwidth", "100Gbps")
    here = ("--accelerator", "cpu", "--latency", "1s")
    odd = {"COLUMNS": "40", "OMP_NUM_THREADS": "1,2"}  # OMP_NUM_THREADS may list one count per nesting level
    folder = tmp_path_factory.mktemp("plans")
    running = [start_fork(folder, *small, *words, environment=odd) for words in (given, here)]
    assert [plan.wait() for plan in running] == [0, 0], [plan.stderr for plan in running]
    return [plan.stdout for plan in running]


def _rows(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_plan_with_given_bandwidth_and_latency_needs_only_one_device(plans: list[str]) -> None:
    given, _ = plans
    assert "one of several devices (one process), excluding communication: 2:" in given
    assert "link: bandwidth 12.5 GB/s (as given); latency 20 µs per exchange (assumed);" in given


def test_numbers_are_not_truncated_in_a_narrow_terminal(plans: list[str]) -> None:
    for text in plans:
        assert "…" not in text
        assert "devices batch images/s efficiency images/day" in _rows(text)


def test_a_plan_measures_one_device_alone_and_uses_the_given_latency(plans: list[str]) -> None:
    _, here = plans
    assert "one of several devices (2 processes in parallel), excluding communication: 2:" in here
    assert "GB/s (measured between 2 processes)" in here and "latency 1,000,000 µs per exchange (as given)" in here
    alone = re.search(r"one device alone \(1 thread\): 4: ([\d.]+) ms", here)
    assert alone
    one, two = (next(row for row in _rows(here) if row.startswith(start)).split() for start in ("1 4 ", "2 2 "))
    assert float(one[2].replace(",", "")) == pytest.approx(4000 / float(alone[1]), rel=0.05)
    assert one[3] == "100%"
    assert two[2:4] == ["0", "0%"]  # latency dominates, so throughput rounds to zero
