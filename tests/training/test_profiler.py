"""A trace is split into sections, phases, kernels, gaps and communication; a full disk does not end the run."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import make_config

from paceline.runs.profile_summary import PROFILE, KernelTime
from paceline.training.build import assemble
from paceline.training.log import Stopwatch
from paceline.training.profiler import StepProfiler
from paceline.training.trace import Profiled, intersect, merge, read_trace, subtract

TRACE = """import sys, torch, torch.distributed as dist; from paceline.parallel.torch_internals import start_trace
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
trace = start_trace(torch.device("cpu"))
torch.ones(2) + 1
trace.__exit__(None, None, None)
trace.export_chrome_trace(sys.argv[1])
assert "torch._inductor" not in sys.modules"""


def test_a_trace_does_not_import_the_compiler_and_contains_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    subprocess.run([sys.executable, "-c", TRACE, str(path)], check=True, env={**os.environ, "KINETO_LOG_LEVEL": "99"})
    trace = json.loads(path.read_bytes())
    assert trace["distributedInfo"]["backend"] == "gloo" and trace["distributedInfo"]["world_size"] == 1
    assert "aten::add" in {event["name"] for event in trace["traceEvents"]}


def test_a_trace_is_compressed_and_its_summary_adds_up_to_the_whole_time(
    tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / PROFILE
    profiler, stopwatch = start_profiler(tmp_path, tiny, steps=1)
    run_step(profiler, stopwatch)
    profiler.finish()
    assert "profile of 1 step: " in capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} == {"rank-0.json.gz", "summary.json", "summary.txt"}
    assert "traceEvents" in json.loads(gzip.decompress((folder / "rank-0.json.gz").read_bytes()))
    summary, text = json.loads((folder / "summary.json").read_text()), (folder / "summary.txt").read_text()
    assert text.startswith("profile of 1 training step on ") and text.count("%  other") == 1
    assert sum(summary["sections"].values()) == pytest.approx(1)


def test_a_trace_that_fills_the_disk_is_reported_and_leaves_no_files(
    tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler, stopwatch = start_profiler(tmp_path, tiny)
    with full_disk(4096):
        for _ in range(2):
            run_step(profiler, stopwatch)
        profiler.finish()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"profile: the trace {tmp_path / PROFILE / 'rank-0.json'} could not be written: ")
    assert list((tmp_path / PROFILE).iterdir()) == []


@contextmanager
def full_disk(largest_file: int) -> Iterator[None]:
    """Let this process write only small files, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def start_profiler(folder: Path, recipe: str, steps: int = 2) -> tuple[StepProfiler, Stopwatch]:
    """Return a profiler that traces the first steps of a run, and the stopwatch of its loop."""
    parts = assemble(make_config(recipe, profile=steps))
    stopwatch = Stopwatch()
    return StepProfiler(parts, stopwatch, folder, parts.total_images - steps * parts.feed.images_per_step), stopwatch


def run_step(profiler: StepProfiler, stopwatch: Stopwatch) -> None:
    profiler.before_step()
    with stopwatch("step"):
        torch.ones(2).add(1)
    profiler.after_step()


ONE_STEP = Profiled("CPU", num_steps=1, images_per_step=8, note="")


def event(kind: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": 1, **more}


def span(name: str, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"paceline/{name}", start, end)


def launched(name: str, at: float, start: float, end: float, number: int) -> list[dict[str, Any]]:
    """Return a launch on the host and the kernel on the GPU."""
    arguments = {"args": {"correlation": number}}
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, at + 1, **arguments),
        event("kernel", name, start, end, **arguments),
    ]


def gpu_trace() -> dict[str, Any]:
    """A step of 100 µs after 20 µs of waiting for data; the GPU works from 30 to 60 and from 70 to 120."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            span("section/data", 0, 20),
            span("section/step", 20, 100),
            span("phase/generator/forward", 20, 40),
            span("phase/generator/backward", 40, 70),
            *launched("gemm", 25, 30, 60, 1),
            *launched("vectorized_elementwise_kernel", 45, 70, 90, 2),
            *launched("ncclDevKernel_AllReduce", 60, 85, 110, 3),
            *launched("Memcpy HtoD", 90, 110, 120, 4),
        ]
    }


def test_kernels_in_a_gpu_trace_belong_to_the_phase_that_launched_them() -> None:
    times = read_trace(gpu_trace(), ONE_STEP)
    assert times.step_seconds == pytest.approx(120e-6) and times.images_per_second == pytest.approx(8 / 120e-6)
    assert times.phases == pytest.approx({"generator: forward": 30 / 120, "generator: backward": 45 / 120})
    assert KernelTime("gemm", 30 / 120, 1) in times.kernels
    assert times.gaps == pytest.approx(20 / 120)  # from 20 to 30 and from 60 to 70, not while it waits for data
    assert times.communication == pytest.approx(25 / 120)
    assert times.exposed_communication == pytest.approx(10 / 120)  # from 90 to 100, the end of the step


def test_a_cpu_trace_subtracts_called_operators_and_finds_the_wait_for_gloo() -> None:
    trace = {
        "traceEvents": [
            span("section/step", 0, 100),
            event("cpu_op", "aten::conv2d", 10, 50),
            event("cpu_op", "aten::mkldnn_convolution", 20, 45),
            event("cpu_op", "_Exchange", 50, 90),  # a function that waits for a collective
            event("user_annotation", "gloo:all_reduce", 40, 80, tid=2),
        ]
    }
    times = read_trace(trace, ONE_STEP)
    assert times.kernels == (
        KernelTime("aten::mkldnn_convolution", pytest.approx(0.25), 1),
        KernelTime("aten::conv2d", pytest.approx(0.15), 1),
    )
    assert times.communication == pytest.approx(0.4) and times.exposed_communication == pytest.approx(0.3)
    assert times.gaps == pytest.approx(0.3)


def test_unions_differences_and_intersections_of_ranges_are_correct() -> None:
    assert merge([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert subtract([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert intersect([(0, 4), (6, 8)], [(3, 7)]) == [(3, 4), (6, 7)]
