"""A large trace does not stop training while it is summarised."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import has_ended, wait_until

from paceline.core.heartbeat import is_child
from paceline.training.trace import TraceTimes, compressed_path, read_trace
from paceline.training.trace_process import TraceError, summarise_trace


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


START = """import sys; from pathlib import Path; from paceline.training.trace_process import summarise_trace
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


def open_if_read(pipe: Path) -> int | None:
    """Open a named pipe for writing if a process has opened it for reading."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
