"""`paceline compare --jobs N` trains runs side by side, does not report their speed, and can be interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from holds import Holds
from running import processes_naming, run_fork, start_fork, wait_until

from paceline.commands.configure import configure
from paceline.compare.training import Places
from paceline.config.resolve import Config

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TINY = ["compare", str(Path(__file__).parents[1] / "tiny.py"), "--accelerator", "cpu", "--set", "norm=none"]
TINY += ["--set", "holds=holds", "--strategies", "single", "--no-verify", "--no-step-ladder", "--out", "table"]
TWO = [*TINY, "--seeds", "0,1", "--jobs", "2"]


def cell(folder: Path, seed: int) -> Path:
    return folder / f"table/cells/tiny-single-1-batch16-seed{seed}"


def log_of(folder: Path, seed: int) -> str:
    return (folder / f"table/logs/{cell(folder, seed).name}.txt").read_text()


def record(folder: Path, seed: int) -> dict[str, Any]:
    return json.loads((cell(folder, seed) / "cell.json").read_text())


def both_have_begun(folder: Path) -> bool:
    files = [cell(folder, seed) / "metrics.jsonl" for seed in (0, 1)]
    return all(file.is_file() and file.stat().st_size > 0 for file in files)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_comparison_with_several_jobs_resumes(tmp_path: Path, number: signal.Signals) -> None:
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=8)
    running = start_fork(tmp_path, *TWO, environment=ONE_THREAD)
    wait_until(lambda: both_have_begun(tmp_path), running)
    if number == signal.SIGINT:
        running.interrupt_group()
        wait_until(lambda: all("saving a checkpoint" in log_of(tmp_path, seed) for seed in (0, 1)), running)
        holds.release("loss")
        assert running.wait() == 130
        for seed in (0, 1):
            assert "images and saved; run the same command again to resume" in log_of(tmp_path, seed)
    else:
        running.kill()
        assert running.wait() == -signal.SIGKILL
        holds.release("loss")
    wait_until(lambda: not processes_naming(f"{tmp_path}/"))
    assert not any(record(tmp_path, seed)["finished"] for seed in (0, 1))
    again = run_fork(tmp_path, *TWO, environment=ONE_THREAD)
    assert again.wait() == 0, again.stdout + again.stderr
    assert all(record(tmp_path, seed)["finished"] and record(tmp_path, seed)["side_by_side"] for seed in (0, 1))
    report = json.loads((tmp_path / "table/report.json").read_text())
    (only,) = report["groups"].values()
    assert only["n"] == 2 and only["images_per_second"] is None and report["recommendation"] is None
    assert sum("was trained at the same time" in line for line in report["not_measured"]) == 2
    _check_that_nothing_is_repeated(tmp_path)
    if number == signal.SIGKILL:
        _check_that_one_job_gives_the_same_metrics(tmp_path, only)


def _check_that_nothing_is_repeated(folder: Path) -> None:
    files = [*folder.glob("table/cells/*/metrics.jsonl")]
    before = [file.stat().st_mtime_ns for file in files]
    third = run_fork(folder, *TWO, environment=ONE_THREAD)
    assert third.wait() == 0 and third.stdout.count("(already finished)") == 2
    assert len(files) == 2 and before == [file.stat().st_mtime_ns for file in files]


def _check_that_one_job_gives_the_same_metrics(folder: Path, group: dict[str, Any]) -> None:
    (folder / "one").mkdir()
    one = run_fork(folder / "one", *TWO[:-2], "--seeds", "1", environment=ONE_THREAD)
    assert one.wait() == 0, one.stderr
    (alone,) = json.loads((folder / "one/table/report.json").read_text())["groups"].values()
    assert alone["images_per_second"]["n"] == 1
    assert {name: values["values"][1] for name, values in group["quality"].items()} == {
        name: values["values"][0] for name, values in alone["quality"].items()
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores")
def test_a_failing_run_does_not_stop_the_run_beside_it(tmp_path: Path) -> None:
    (cell(tmp_path, 0) / "metrics.jsonl").mkdir(parents=True)  # the run cannot write its metrics to a folder
    done = run_fork(tmp_path, *TWO, "--images", "64", environment=ONE_THREAD)
    assert done.wait() == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "table/report.json").read_text())
    assert [one["state"] for one in report["cells"]] == ["failed", "done"]
    assert "metrics.jsonl" in report["cells"][0]["reason"]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return configure("classification", {"accelerator": "cpu"})


@pytest.fixture
def on_gpus(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    return config.with_run(accelerator="cuda")


def test_eight_runs_use_eight_gpus_and_the_ninth_run_waits(on_gpus: Config) -> None:
    places = Places(16)
    taken = [places.take(on_gpus) for _ in range(8)]
    assert [place.arguments for place in taken if place] == [["--gpus", str(number)] for number in range(8)]
    assert places.take(on_gpus) is None
    for place in (taken[2], taken[5]):
        assert place
        places.give_back(place)
    assert places.take(on_gpus.with_run(devices=3)) is None
    pair = places.take(on_gpus.with_run(devices=2))
    assert pair and pair.gpus == ("2", "5")


def test_runs_use_only_the_gpus_that_the_user_listed(on_gpus: Config) -> None:
    places = Places(4, "6,3")
    first, second = places.take(on_gpus.with_run(gpus="6")), places.take(on_gpus.with_run(gpus="6"))
    assert first and second and (first.gpus, second.gpus) == (("6",), ("3",))
    shared = Places(4, "0,0")
    pair = shared.take(on_gpus.with_run(gpus="0,0", devices=2))
    assert pair and pair.gpus == ("0", "0") and shared.take(on_gpus.with_run(gpus="0")) is None


def test_runs_on_a_cpu_share_its_cores(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(2)
    single, pair = places.take(config), places.take(config.with_run(devices=2))
    assert single and single.environment == {"OMP_NUM_THREADS": "4"}
    assert pair and pair.environment == {"OMP_NUM_THREADS": "2"} and pair.cores == 4
    assert places.take(config) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    given = Places(8)
    assert [place and place.environment for place in (given.take(config), given.take(config))] == [{}, {}]
    assert given.take(config) is None, "nine threads would need more than eight cores"
