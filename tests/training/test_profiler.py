"""Training continues while a trace is written and summarised, even if the disk is full."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks import make_config
from running import has_ended, wait_until

from paceline.core.watch import is_child
from paceline.runs.profile_summary import PROFILE
from paceline.training.build import assemble
from paceline.training.pace import Stopwatch
from paceline.training.profiler import MAX_STEPS_UNTIL_WRITTEN, StepProfiler, TraceError, summarise_trace
from paceline.training.trace import TraceTimes, compressed_path, read_trace


def write_trace(path: Path) -> dict[str, object]:
    common = {"ph": "X", "pid": 1, "tid": 1}
    events = [
        {**common, "cat": "user_annotation", "name": "paceline/section/step", "ts": 0, "dur": 100},
        {**common, "cat": "user_annotation", "name": "paceline/phase/net/forward", "ts": 0, "dur": 60},
        {**common, "cat": "cpu_op", "name": "aten::mm", "ts": 10, "dur": 50},
    ]
    trace: dict[str, object] = {"traceEvents": events}
    path.write_text(json.dumps(trace))
    return trace


def test_another_process_summarises_and_compresses_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    trace = write_trace(path)
    times = summarise_trace(path)
    assert times == read_trace(trace) and isinstance(times, TraceTimes) and times.kernels["aten::mm"][1] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.json.gz"]
    assert json.loads(gzip.decompress(compressed_path(path).read_bytes())) == trace


def test_a_trace_that_cannot_be_read_is_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text("{")
    with pytest.raises(TraceError, match=r"^[^\n]+$"):
        summarise_trace(path)
    assert path.exists()


START = """import sys; from pathlib import Path; from paceline.training.profiler import summarise_trace
summarise_trace(Path(sys.argv[1]))"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process when its parent dies")
def test_the_process_that_summarises_a_trace_dies_with_a_killed_worker(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    os.mkfifo(path)
    worker = subprocess.Popen([sys.executable, "-c", START, str(path)])
    try:
        writer = wait_until(lambda: open_if_read(path))  # the summary reads, and nothing is ever written
        child = int(Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text())
        assert is_child(child, worker.pid)
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: has_ended(child), seconds=10)
    os.close(writer)


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


@pytest.mark.parametrize("steps_until_log", [3, MAX_STEPS_UNTIL_WRITTEN])
def test_on_a_gpu_a_trace_is_written_at_the_next_log_or_after_some_steps(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, steps_until_log: int
) -> None:
    profiler, stopwatch = start_profiler(tmp_path, tiny)
    monkeypatch.setattr(profiler, "_may_delay_log", True)
    for _ in range(2):
        assert not profiler.delays_log
        run_step(profiler, stopwatch)
    for _ in range(steps_until_log):
        assert profiler.delays_log and not (tmp_path / PROFILE).exists()
        run_step(profiler, stopwatch)
    if steps_until_log < MAX_STEPS_UNTIL_WRITTEN:
        profiler.write_trace()
    assert not profiler.delays_log
    profiler.finish()
    assert "profile of 2 training steps" in (tmp_path / PROFILE / "summary.txt").read_text()


def test_on_a_cpu_a_trace_is_written_at_once(tmp_path: Path, tiny: str) -> None:
    profiler, stopwatch = start_profiler(tmp_path, tiny)
    for _ in range(2):
        run_step(profiler, stopwatch)
    wait_until(compressed_path(tmp_path / PROFILE / "rank-0.json").exists)
    profiler.finish()


def test_a_profile_of_one_step_is_in_the_singular(
    tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler, stopwatch = start_profiler(tmp_path, tiny, steps=1)
    run_step(profiler, stopwatch)
    profiler.finish()
    assert capsys.readouterr().out.startswith("profile of 1 step: ")
    assert (tmp_path / PROFILE / "summary.txt").read_text().startswith("profile of 1 training step on ")


def test_a_trace_that_fills_the_disk_is_reported_and_leaves_no_files(
    tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler, stopwatch = start_profiler(tmp_path, tiny)
    with full_disk(4096):
        for _ in range(2):
            run_step(profiler, stopwatch)
        profiler.finish()
    (line,) = capsys.readouterr().out.splitlines()
    trace, reason = tmp_path / PROFILE / "rank-0.json", os.strerror(errno.EFBIG)
    assert line == f"profile: the trace {trace} could not be written: {reason}"
    assert list((tmp_path / PROFILE).iterdir()) == []


def test_the_next_command_removes_what_a_killed_profiler_left_behind(tmp_path: Path, tiny: str) -> None:
    folder = tmp_path / PROFILE
    folder.mkdir()
    for name in ("rank-0.json.tmp", "rank-3.json.gz.partial", "rank-1.json.gz", "summary.txt"):
        (folder / name).write_text("")
    assert StepProfiler.of(assemble(make_config(tiny)), Stopwatch(), tmp_path, 0) is None
    assert sorted(file.name for file in folder.iterdir()) == ["rank-1.json.gz", "summary.txt"]


def test_a_profile_replaces_the_traces_of_an_earlier_profile_with_more_ranks(tmp_path: Path, tiny: str) -> None:
    folder = tmp_path / PROFILE
    folder.mkdir()
    for name in ("rank-1.json.gz", "rank-10.json.gz", "rank-notes.json.gz"):
        (folder / name).write_text("")
    profiler, stopwatch = start_profiler(tmp_path, tiny)
    for _ in range(2):
        run_step(profiler, stopwatch)
    profiler.finish()
    assert sorted(file.name for file in folder.glob("rank-*")) == ["rank-0.json.gz", "rank-notes.json.gz"]


def test_a_finished_run_has_no_steps_to_profile(tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = assemble(make_config(tiny, profile=10))
    assert StepProfiler.of(parts, Stopwatch(), tmp_path, parts.total_images) is None
    assert capsys.readouterr().out == "--profile 10: no steps are left to profile\n"


def test_the_shares_in_a_summary_add_up_to_the_whole_time(tmp_path: Path, tiny: str) -> None:
    profiler, stopwatch = start_profiler(tmp_path, tiny)
    for _ in range(2):
        run_step(profiler, stopwatch)
    profiler.finish()
    summary = json.loads((tmp_path / PROFILE / "summary.json").read_text())
    assert sum(summary["sections"].values()) == pytest.approx(1)
    assert (tmp_path / PROFILE / "summary.txt").read_text().count("%  other") == 1


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


def open_if_read(pipe: Path) -> int | None:
    """Open a named pipe for writing if a process has opened it for reading."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
