"""`paceline plan --memory` prints the memory of each strategy and the largest batch that fits, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import run_fork

from paceline.benchmarking.scaling import parse_amount
from paceline.commands.plan import UNITS
from paceline.core.errors import UserError

SYNCING = str(Path(__file__).parents[1] / "syncing.py")
WIDE = ("--set", "width=4096", "--set", "size=64")


def rows(stdout: str) -> dict[tuple[str, int], list[str]]:
    """Return the cells of the printed table by strategy and number of devices."""
    found = re.findall(r"^ +(\w+) +(\d+) +(.+)$", stdout, re.MULTILINE)
    return {(strategy, int(devices)): cells.split() for strategy, devices, cells in found}


def test_the_table_lists_every_strategy_and_the_largest_batch_that_fits(tmp_path: Path) -> None:
    size = ("--batch-size", "64", "--devices", "4", "--device-memory", "2GiB")
    done = run_fork(tmp_path, "plan", SYNCING, *WIDE, "--memory", *size)
    assert done.wait() == 0, done.stderr
    found = rows(done.stdout)
    strategies = {"single", "dp", "ddp", "fsdp", "lightning"}
    assert found.keys() == {(name, n) for name in strategies for n in (1, 2, 4) if name != "single" or n == 1}
    assert [found["ddp", n][0] for n in (1, 2, 4)] == ["64", "32", "16"]
    weights = {key: float(cells[1]) for key, cells in found.items()}
    assert weights["single", 1] == pytest.approx(4096 * (4096 + 10 + 1) * 4 / 2**20, rel=0.01)
    assert weights["ddp", 4] == weights["single", 1]
    assert weights["fsdp", 4] == pytest.approx(weights["single", 1] / 4, rel=0.01)
    largest = {key: int(cells[-2].replace(",", "")) for key, cells in found.items()}
    assert largest["ddp", 4] > 3.5 * largest["single", 1] > 1000
    assert "recomputed in the backward pass" not in done.stdout


def test_strategies_that_recompute_activations_by_default_are_named(tmp_path: Path) -> None:
    small = ("--preset", "quick", "--set", "width=8", "--batch-size", "8", "--devices", "2")
    done = run_fork(tmp_path, "plan", "classification", *small, "--memory")
    assert done.wait() == 0, done.stderr
    assert "activations: recomputed in the backward pass under fsdp\n" in done.stdout


def test_a_strategy_in_one_process_is_listed_only_for_the_devices_of_one_node(tmp_path: Path) -> None:
    size = ("--set", "width=8", "--set", "size=8", "--batch-size", "8", "--devices", "4")
    done = run_fork(tmp_path, "plan", SYNCING, *size, "--memory", "--nodes", "2")
    assert done.wait() == 0, done.stderr
    found = rows(done.stdout)
    assert {n for name, n in found if name == "dp"} == {1, 2} and {n for name, n in found if name == "ddp"} == {1, 2, 4}
    uneven = run_fork(tmp_path, "plan", SYNCING, *size, "--memory", "--nodes", "3")
    assert uneven.wait() == 2 and "--devices 4: must be a multiple of --nodes 3" in uneven.stderr


def test_device_counts_that_the_batch_cannot_be_divided_among_are_reported(tmp_path: Path) -> None:
    size = ("--set", "width=8", "--set", "size=8", "--batch-size", "3", "--devices", "8")
    done = run_fork(tmp_path, "plan", SYNCING, *size, "--memory")
    assert done.wait() == 0, done.stderr
    assert {n for _, n in rows(done.stdout)} == {1, 2}
    assert "4 or more devices: not shown, because --batch-size 3 is too small\n" in done.stdout


@pytest.mark.parametrize("problem", ["item", "shape"])
def test_a_loss_that_needs_the_values_of_tensors_is_reported_with_its_line(tmp_path: Path, problem: str) -> None:
    done = run_fork(tmp_path, "plan", SYNCING, "--memory", "--set", f"problem={problem}")
    assert done.wait() == 2
    (line,) = done.stderr.splitlines()
    assert "phase 'classifier' needs the values of tensors at classifier_loss" in line and "syncing.py:" in line


def test_too_little_memory_for_one_image_is_reported_with_the_largest_part(tmp_path: Path) -> None:
    done = run_fork(tmp_path, "plan", SYNCING, *WIDE, "--memory", "--devices", "1", "--device-memory", "100MiB")
    assert done.wait() == 2
    (line,) = done.stderr.splitlines()
    assert "--device-memory 100MiB: one image per device needs 0." in line
    assert "of which optimizer 0.13 GiB" in line and "fsdp" in line


def test_a_run_that_is_out_of_memory_ends_with_the_phase_and_settings_that_fit(tmp_path: Path) -> None:
    done = run_fork(tmp_path, "train", SYNCING, "--set", "problem=memory", "--accelerator", "cpu", "--out", "run")
    assert done.wait() == 2
    (line,) = done.stderr.splitlines()
    assert "out of memory in phase 'classifier' (network 'classifier'): a step with batch 16 needs about" in line
    assert "--accumulate 2" in line


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "0GiB", "24 apples", "nanGB"])
def test_an_unknown_size_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match=f"--device-memory {text}: expected something like 24GiB or 80GB"):
        parse_amount("--device-memory", text, UNITS, "24GiB or 80GB")


def test_sizes_are_read_in_decimal_and_binary_units() -> None:
    for text, size in (("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("1.5MiB", 1.5 * 2**20)):
        assert parse_amount("--device-memory", text, UNITS, "") == size
