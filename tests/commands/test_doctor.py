"""`paceline doctor` saves measurements of this machine, and runs use them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.benchmarking import self_test as loader_throughput
from paceline.benchmarking.self_test import ReplayCheck, check_replay
from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.core.registry import load_class, names
from paceline.data import loader
from paceline.data.loader import Loader, StepData
from paceline.parallel.group import Place
from paceline.parallel.strategy import Strategy
from paceline.parallel.world import World
from paceline.runs import provenance
from paceline.runs.provenance import SELF_TEST, cache_file, graph_obstacle
from paceline.training.graph import RunStep, eager_steps
from paceline.training.log import Entry
from paceline.training.step import Step

TWO_GPUS = {"host": "here", "gpus": "2 × Some GPU", "driver": "1.0", "torch": "2.15.0"}
PASSED = {"passed": True, "result": "", "difference": 0.0, "processes": 2, "backend": "nccl"}
GOOD = {"summary": "", "verified": True, "machine": TWO_GPUS, "graph": PASSED}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def save_self_test(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Save a self-test result and simulate a machine with two GPUs."""
    monkeypatch.setattr(provenance, "identity", lambda: TWO_GPUS)

    def save(result: Any) -> None:
        cache_file(SELF_TEST).parent.mkdir(parents=True, exist_ok=True)
        cache_file(SELF_TEST).write_text(result if isinstance(result, str) else json.dumps(result))

    return save


def test_what_this_machine_lacks_is_listed_with_the_reason_or_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_class("loader", "dali", Loader), "package", "a_package_that_is_not_there")
    monkeypatch.setattr(load_class("strategy", "lightning", Strategy), "package", "no_such_package.inside")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "pip install 'paceline[dali]'" in printed and "paceline doctor --self-test" in printed
    rows = [re.match(r"\W+strategy\W+(\w+)\W+(yes|no)\W+(.*)", line) for line in printed.splitlines()]
    found = {row[1]: (row[2], row[3]) for row in rows if row}
    missing = "package no_such_package.inside is not installed: pip install 'paceline[lightning]'"
    assert found["lightning"][0] == "no" and missing in found["lightning"][1]
    for name, strategy in ((name, load_class("strategy", name, Strategy)) for name in found.keys() - {"lightning"}):
        obstacle = strategy.why_not("cpu")
        assert found[name][0] == ("no" if obstacle else "yes") and obstacle in found[name][1]
    assert found.keys() == set(names("strategy"))


def test_a_passed_self_test_allows_cuda_graphs_on_the_tested_gpus(save_self_test: Callable[[Any], None]) -> None:
    save_self_test(GOOD)
    assert graph_obstacle(processes=2, hosts=1) == ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"machine": TWO_GPUS | {"torch": "2.14.0"}}, r"torch: 2.14.0, now 2.15.0"),
        ({"machine": TWO_GPUS | {"gpus": "4 × Some GPU"}}, "gpus: 4 × Some GPU, now "),
        ({"machine": TWO_GPUS | {"host": "there"}}, "host: there, now "),
        ({"machine": TWO_GPUS | {"driver": "0.9"}}, "driver: 0.9, now "),
        ({"machine": {}}, "host: unknown, now "),
        ({"verified": False}, "self-test failed"),
        ({"graph": None}, "used fewer than two GPUs"),
        ({"graph": PASSED | {"passed": False, "result": "the step could not be captured"}}, "could not be captured"),
        ({"graph": PASSED | {"processes": 1}}, r"fewer GPUs \(1, not 2\)"),
    ],
)
def test_a_failed_or_outdated_self_test_disables_cuda_graphs_with_a_reason(
    changed: dict[str, Any], reason: str, save_self_test: Callable[[Any], None]
) -> None:
    save_self_test(GOOD | changed)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(graph_obstacle(processes=2, hosts=1))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"verified": true, "machine": {}, "graph": {}}'])
def test_a_missing_or_damaged_self_test_file_counts_as_no_self_test(
    content: str, save_self_test: Callable[[Any], None]
) -> None:
    save_self_test(content)
    assert "paceline doctor --self-test" in graph_obstacle(processes=2, hosts=1)


def test_cuda_graphs_are_never_used_on_several_hosts(save_self_test: Callable[[Any], None]) -> None:
    save_self_test(GOOD)
    assert "several hosts" in graph_obstacle(processes=2, hosts=2)


class Wrong:
    """A training step that skips one of its weight updates."""

    def __init__(self, step: Step) -> None:
        self.step, self.calls = step, 0

    def __call__(self, data: StepData) -> list[Entry]:
        self.calls += 1
        return [] if self.calls == eager_steps(self.step.strategy) + 4 else self.step(data)


def check(capture: Callable[[Step], RunStep]) -> ReplayCheck:
    config = configure("classification", {"batch_size": "8", "accelerator": "cpu", "width": "8"}, small=True)
    world = World(Place(), torch.device("cpu"))
    before = torch.are_deterministic_algorithms_enabled()
    try:
        return check_replay(config, world, capture)
    finally:
        torch.use_deterministic_algorithms(before)


def test_the_cuda_graph_check_passes_when_the_weights_are_equal() -> None:
    result = check(lambda step: step)
    assert result.passed and result.difference == 0.0 and result.processes == 1


def test_the_cuda_graph_check_fails_when_a_weight_update_is_lost() -> None:
    result = check(Wrong)
    assert not result.passed and result.difference > 1e-6 and "differ by" in result.result


def test_loader_speeds_are_measured_where_a_run_would_use_the_loader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader_throughput, "BLOCK_SECONDS", 0.02)
    monkeypatch.setattr(loader, "free_bytes", lambda device: 100_000)
    assert run(["doctor", "--loaders", "--workers", "0", "--accelerator", "cpu"]) == 0
    printed = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for line in printed.splitlines() if len(cells := line.strip("│ ").split(" │ ")) > 3}
    rows = {name.strip(): [cell.strip() for cell in cells] for name, cells in rows.items()}
    low, high = (float(number.replace(",", "")) for number in rows["workers"][1].split(" – "))
    assert low <= float(rows["workers"][0].replace(",", "")) <= high
    assert rows["workers"][2] == str(loader_throughput.BLOCKS) and rows["resident"][0] == rows["dali"][0] == "–"
    assert "not measured: --loader dali" in printed
    assert "not measured: --loader resident: 1.5 MB of samples do not fit in 0.025 MB" in printed


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--loaders", "--self-test"], "--self-test: cannot be combined with --loaders; run them separately"),
        (["--data", "digits"], "--data: only used with --loaders; add --loaders"),
        (["--loaders", "--data", "photos", "--crop", "9999"], "--crop 9999: larger than some images: "),
        (["--loaders", "--data", "nothing"], "unknown source 'nothing'"),
        (["--loaders", "--workers", "-1"], "--workers -1: must be at least 0"),
        (["--loaders", "--data", "folder", "--data-root", "none"], "--data-root none: no such folder"),
    ],
)
def test_user_errors_print_one_line(words: list[str], line: str, rejected: Callable[..., str]) -> None:
    assert line in rejected("doctor", *words)
