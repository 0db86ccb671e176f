"""Worker processes pass their measurements to the command in a JSON file with fixed keys."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from paceline.benchmarking.self_test import AllReduce, DeviceTest, ReplayCheck, measure_devices
from paceline.commands.configure import configure
from paceline.contracts.step_ladder import MeasuredRung, StepLadder
from paceline.core.files import read_json, write_json
from paceline.launch.tasks import Task, run_in_processes

TINY = str(Path(__file__).resolve().parent.parent / "tiny.py")
RUNG = {"name": "one", "images_per_second": 100.0, "low": 90.0, "high": 110.0, "n": 7}


def test_saved_throughput_measurements_have_the_keys_that_reports_read(tmp_path: Path) -> None:
    ladder = StepLadder(
        devices=2, batch=64, rungs=(MeasuredRung("one", 100.0, 90.0, 110.0, 7),), gradient_bytes={"g": 8}
    )
    write_json(tmp_path / "ladder.json", ladder.to_json())
    found = read_json(tmp_path / "ladder.json")
    assert found == {"devices": 2, "batch": 64, "rungs": [RUNG], "gradient_bytes": {"g": 8}}
    assert StepLadder.from_json(found) == ladder


def test_a_device_test_can_be_saved_as_json_and_read_back(tmp_path: Path) -> None:
    all_reduce = AllReduce(1.5, 1.0, 2.0, 10, "nccl", 2)
    for graph in (None, ReplayCheck(True, "a captured step", 0.0, 2, "nccl")):
        tested = DeviceTest(all_reduce, graph)
        write_json(tmp_path / "tested.json", asdict(tested))
        assert DeviceTest.from_json(read_json(tmp_path / "tested.json")) == tested


def test_cpu_processes_measure_all_reduce_and_capture_no_cuda_graph(tmp_path: Path) -> None:
    config = configure(TINY, {"devices": "2", "strategy": "ddp", "accelerator": "cpu"})
    path = tmp_path / "tested.json"
    assert run_in_processes(Task.of(measure_devices, str(path)), config) == 0
    tested = DeviceTest.from_json(read_json(path))
    assert tested.graph is None
    assert tested.all_reduce.backend == "gloo" and tested.all_reduce.processes == 2
    assert 0 < tested.all_reduce.low <= tested.all_reduce.milliseconds <= tested.all_reduce.high
