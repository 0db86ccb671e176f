"""A large trace does not stop training while it is summarised."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

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
