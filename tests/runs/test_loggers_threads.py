"""A logger that is slow, hangs, fails or has no server never stops or delays a run, and what it missed is counted."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from running import metrics_without_times, run_fork, wait_until, weights_of

from paceline.core.errors import UserError
from paceline.runs import logger as logger_module
from paceline.runs.logger import End, Logger, LoggerThread, LogLine, SampleImage, check_loggers
from paceline.runs.metrics import MetricsWriter

HANGING = """
import time
from pathlib import Path
from paceline import Logger


class Hanging(Logger):
    def __init__(self, folder, images):
        self.hang("open")

    def hang(self, where):
        while where == {where!r}:
            Path("hangs").touch()
            time.sleep(3600)

    def connect(self):
        self.hang("connect")

    def write(self, images, values):
        self.hang("write")

    def image(self, name, images, pixels):
        self.hang("image")

    def flush(self):
        self.hang("flush")

    def end(self, state, weights):
        self.hang("end")

    def close(self):
        self.hang("close")
"""
CALLS = ("open", "connect", "write", "image", "flush", "end", "close")


class Recorder(Logger):
    """Records every call; waits in `connect` while the gate is closed."""

    gate = threading.Event()
    outage = 0  # number of calls to `write` that fail before the server answers
    calls: list[tuple] = []

    def connect(self) -> None:
        self.gate.wait()

    def write(self, images: int, values: Mapping[str, float]) -> None:
        if type(self).outage:
            type(self).outage -= 1
            raise self.Unreachable("connection refused at http://user:secret@host")
        self.calls.append(("line", images, dict(values)))

    def image(self, name: str, images: int, pixels: np.ndarray) -> None:
        self.calls.append(("image", name, images, pixels.tolist()))

    def end(self, state: str, weights: Path | None) -> None:
        self.calls.append(("end", state, weights))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(Recorder, "gate", threading.Event())
    monkeypatch.setattr(Recorder, "outage", 0)
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(logger_module, "SILENT_SECONDS", math.inf)  # on a slow machine, too
    return Recorder


def line(images: int) -> LogLine:
    return LogLine(images, {"a/loss": images / 3}, 0.0)


def image(side: int) -> SampleImage:
    return SampleImage("samples", side, np.full((side, side, 1), side, np.uint8))


@pytest.mark.parametrize("where", CALLS)
def test_a_logger_that_hangs_in_any_call_delays_neither_metrics_nor_other_loggers(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logger_module, "FLUSH_SECONDS", 0.05)
    wait = LoggerThread.join

    def join(thread: LoggerThread, until: float) -> None:
        if thread.name != "tensorboard":
            wait_until(Path("hangs").exists)
        wait(thread, math.inf if thread.name == "tensorboard" else until)

    monkeypatch.setattr(LoggerThread, "join", join)
    Path("hanging.py").write_text(HANGING.format(where=where))
    writer = MetricsWriter(tmp_path / "run", loggers="./hanging.py,tensorboard")
    for images in (10, 20, 30):
        writer.write(images, {"a/loss": 1.0})
        writer.image("samples", images, lambda: np.zeros((2, 2, 3), np.uint8))
        writer.flush()
    writer.close(logger_wait=0.1)
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["images"] for row in rows] == [10, 20, 30]
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 3
    printed = capsys.readouterr().out
    assert "logger ./hanging.py did not finish in time" in printed
    assert ("logger ./hanging.py dropped" in printed) == (where not in ("end", "close"))
    assert "logger tensorboard did" not in printed and "logger tensorboard dropped" not in printed


def test_a_checkpoint_waits_only_once_for_a_logger_that_hangs(tmp_path: Path, recorder: type[Recorder]) -> None:
    thread = LoggerThread("slow", recorder, tmp_path, 0)
    first = thread.request_flush()
    assert first is not None and thread.request_flush() is None
    recorder.gate.set()
    assert first.done.wait(60)
    again = thread.request_flush()
    assert again is not None and again.done.wait(60), "checkpoints wait again once the logger has caught up"


def test_entries_that_do_not_fit_into_the_queue_are_dropped_and_counted(
    tmp_path: Path, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logger_module, "MAX_LINES", 5)
    monkeypatch.setattr(logger_module, "MAX_IMAGES", 1)
    thread = LoggerThread("slow", recorder, tmp_path, 0)
    for entry in (line(1), image(3), image(2), line(2), line(3), line(4), line(5), line(6)):
        thread.add(entry)
    thread.add(End("finished", None))
    recorder.gate.set()
    thread.join(math.inf)
    delivered = [("line", 1, {"a/loss": 1 / 3}), ("image", "samples", 3, image(3).pixels.tolist())]
    delivered += [("line", images, {"a/loss": images / 3}) for images in (2, 3, 4)]
    assert recorder.calls == [*delivered, ("end", "finished", None)]
    assert capsys.readouterr().out.splitlines() == [
        "logger slow is too slow: its queue is full, so entries are dropped; the run folder contains all of them",
        "logger slow dropped 2 lines and 1 image",
    ]


def test_lines_are_delivered_once_and_in_order_after_the_server_was_unreachable(
    tmp_path: Path, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logger_module, "FIRST_RETRY_SECONDS", 0.001)
    recorder.gate.set()
    recorder.outage = 4
    thread = LoggerThread("remote", recorder, tmp_path, 0)
    for images in range(250):
        thread.add(line(images))
    thread.add(End("stopped", tmp_path / "weights"))
    thread.join(math.inf)
    expected = [("line", images, {"a/loss": images / 3}) for images in range(250)]
    assert recorder.calls == [*expected, ("end", "stopped", tmp_path / "weights")]
    assert capsys.readouterr().out.splitlines() == [
        "logger remote cannot be reached: Unreachable: connection refused at http://***@host; "
        "retrying while training continues",
        "logger remote can be reached again",
    ]


def test_a_server_that_never_answers_is_given_up_at_the_end_of_the_run(
    tmp_path: Path, recorder: type[Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.gate.set()
    recorder.outage = 10**9
    thread = LoggerThread("remote", recorder, tmp_path, 0)
    for images in range(3):
        thread.add(line(images))
    thread.add(End("finished", None))
    wait_until(lambda: recorder.outage < 10**9)
    thread.join(0.0)
    assert capsys.readouterr().out.splitlines()[-1] == "logger remote dropped 3 lines and 0 images"
    assert recorder.calls == []


def test_a_logger_whose_package_is_missing_is_rejected_before_training(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("from paceline import Logger\nclass Own(Logger):\n    package = 'not_installed_at_all'\n")
    with pytest.raises(UserError, match=r"own\.py: package not_installed_at_all is not installed$"):
        check_loggers(str(own))
    own = tmp_path / "with_extra.py"
    own.write_text("from paceline import Logger\nclass Own(Logger):\n    package, extra = 'not.here', 'wandb'\n")
    with pytest.raises(UserError, match=r"package not\.here is not installed: pip install 'paceline\[wandb\]'$"):
        check_loggers(str(own))


def test_a_run_with_a_hanging_logger_trains_the_same_weights(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "hanging.py").write_text(HANGING.format(where="write"))
    command = ("train", tiny, "--images", "96", "--set", "logger_wait=0.2")
    for out, loggers in (("hanging", "./hanging.py"), ("none", "")):
        done = run_fork(tmp_path, *command, "--out", out, "--loggers", loggers)
        assert done.wait() == 0 and done.stderr == "", done.stderr
        assert ("logger ./hanging.py did not finish in time" in done.stdout) == (out == "hanging")
    assert weights_of(tmp_path / "hanging") == weights_of(tmp_path / "none")
    assert metrics_without_times(tmp_path / "hanging") == metrics_without_times(tmp_path / "none")


def test_loggers_receive_the_final_state_and_the_path_to_the_weights(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "ends.py").write_text(
        "from paceline import Logger\n\n\nclass Ends(Logger):\n"
        "    def __init__(self, folder, images):\n        self.folder = folder\n\n"
        "    def write(self, images, values):\n        pass\n\n"
        "    def end(self, state, weights):\n        (self.folder / 'end.txt').write_text(f'{state} {weights}')\n"
    )
    command = ("train", tiny, "--images", "96", "--loggers", "./ends.py")
    assert run_fork(tmp_path, *command, "--out", "good").wait() == 0
    state, weights = (tmp_path / "good" / "end.txt").read_text().split()
    assert state == "finished" and Path(weights).is_relative_to(tmp_path / "good" / "checkpoints")
    assert Path(weights).name == "weights.safetensors" and Path(weights).exists()
    assert run_fork(tmp_path, *command, "--out", "bad", "--set", "not_finite_at=2").wait() == 2
    assert (tmp_path / "bad" / "end.txt").read_text() == "failed None"
