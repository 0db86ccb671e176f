"""Every logger logs all of a run; one that is slow, hangs or fails delays nothing, and what it missed is counted."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from logged import CALLS, write_logger
from running import metrics_without_times, run_fork, wait_until, weights_of

from paceline.core.errors import UserError
from paceline.core.registry import KINDS, load_class, names
from paceline.runs import logger as logger_module
from paceline.runs.logger import End, Logger, LoggerThread, LogLine, SampleImage, check_loggers
from paceline.runs.loggers.tensorboard import FOLDER, TensorBoard
from paceline.runs.metrics import MetricsWriter


def pixels(channels: int) -> np.ndarray:
    return np.arange(4 * 6 * channels, dtype=np.uint8).reshape(4, 6, channels)


@pytest.mark.parametrize("name", names("logger"))
def test_a_logger_accepts_everything_that_a_run_logs_and_resumes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger_class = load_class("logger", name, Logger)
    if logger_class.package:
        pytest.importorskip(logger_class.package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for start in (0, 100):
        (tmp_path / "run").mkdir(exist_ok=True)
        logger = logger_class(tmp_path / "run", start)
        logger.connect()
        for images in (start, start + 50, start + 150):
            logger.write(images, {"network/loss": 0.5, "time/nan": math.nan, "validation/psnr[y]": math.inf})
            for channels in (1, 3):
                logger.image(f"samples{channels}", images, pixels(channels))
            logger.flush()
        logger.end("stopped", tmp_path / "run" / "weights.safetensors")
        logger.close()
    assert [entry.name for entry in tmp_path.iterdir()] in ([], ["run"]), "a logger may write only into the run folder"


def test_loggers_import_no_large_packages_before_they_are_used() -> None:
    modules = ", ".join(f"{KINDS['logger'].package}.{name}" for name in names("logger"))
    code = f"import sys, {modules}; sys.exit(bool({{'torch', *{names('logger')}}} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("where", [call for call in CALLS if call != "end"])
def test_a_logger_that_fails_is_reported_once_and_disabled(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logger_module, "FLUSH_SECONDS", 60.0)  # on a slow machine, too, every flush ends
    monkeypatch.setattr(logger_module, "SILENT_SECONDS", math.inf)
    failing, own = write_logger(tmp_path / "failing.py", fails=where), write_logger(tmp_path / "own.py")
    writer = MetricsWriter(tmp_path / "run", loggers=f"{failing}, {own}")
    for images in (10, 20):
        writer.write(images, {"a/loss": 1.0})
        writer.image("samples", images, lambda: pixels(3))
        writer.flush()
    writer.close()
    printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("running the code")]
    problem = "ConnectionError: the server went away, token=***; training continues without it"
    assert printed == [f"logger {failing} is switched off: {problem}"]
    each = [line for n in (10, 20) for line in (f"write {n}", f"image samples {n} (4, 6, 3) uint8", "flush")]
    lines = (tmp_path / "run" / "own.txt").read_text().splitlines()
    assert lines == ["open 0", "connect", *each, "end finished None", "close"], "the other loggers must continue"


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
    hanging = write_logger(tmp_path / "hanging.py", hangs=where)
    writer = MetricsWriter(tmp_path / "run", loggers=f"{hanging},tensorboard")
    for images in (10, 20, 30):
        writer.write(images, {"a/loss": 1.0})
        writer.image("samples", images, lambda: pixels(3))
        writer.flush()
    writer.close(logger_wait=0.1)
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["images"] for row in rows] == [10, 20, 30]
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 3
    printed = capsys.readouterr().out
    assert f"logger {hanging} did not finish in time" in printed
    assert (f"logger {hanging} dropped" in printed) == (where not in ("end", "close"))
    assert "logger tensorboard did" not in printed and "logger tensorboard dropped" not in printed


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
        self.calls.append(("line", images))

    def image(self, name: str, images: int, pixels: np.ndarray) -> None:
        self.calls.append(("image", images))

    def end(self, state: str, weights: Path | None) -> None:
        self.calls.append(("end", state))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    for name, value in (("gate", threading.Event()), ("outage", 0), ("calls", [])):
        monkeypatch.setattr(Recorder, name, value)
    monkeypatch.setattr(logger_module, "SILENT_SECONDS", math.inf)  # on a slow machine, too
    monkeypatch.setattr(logger_module, "FIRST_RETRY_SECONDS", 0.001)
    return Recorder


def line(images: int) -> LogLine:
    return LogLine(images, {"a/loss": images / 3}, 0.0)


def test_a_checkpoint_waits_only_once_for_a_logger_that_hangs(tmp_path: Path, recorder: type[Recorder]) -> None:
    thread = LoggerThread("slow", recorder, tmp_path, 0)
    first = thread.request_flush()
    assert first is not None and thread.request_flush() is None
    recorder.gate.set()
    assert first.wait(60)
    again = thread.request_flush()
    assert again is not None and again.wait(60), "checkpoints wait again once the logger has caught up"


def test_entries_that_do_not_fit_into_the_queue_are_dropped_and_counted(
    tmp_path: Path, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logger_module, "MAX_WAITING", {LogLine: 4, SampleImage: 1})
    thread = LoggerThread("slow", recorder, tmp_path, 0)
    images = [SampleImage("samples", number, pixels(1)) for number in (3, 2)]
    for entry in (line(1), *images, *map(line, range(2, 7))):
        thread.add(entry)
    thread.add(End("finished", None))
    recorder.gate.set()
    thread.join(math.inf)
    assert recorder.calls == [("line", 1), ("image", 3), ("line", 2), ("line", 3), ("line", 4), ("end", "finished")]
    assert capsys.readouterr().out.splitlines() == [
        "logger slow is too slow: its queue is full, so entries are dropped; the run folder contains all of them",
        "logger slow dropped 2 lines and 1 image",
    ]


def test_lines_are_delivered_once_and_in_order_after_the_server_was_unreachable(
    tmp_path: Path, recorder: type[Recorder], capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.gate.set()
    recorder.outage = 4
    thread = LoggerThread("remote", recorder, tmp_path, 0)
    for images in range(250):
        thread.add(line(images))
    thread.add(End("stopped", None))
    thread.join(math.inf)
    assert recorder.calls == [*(("line", images) for images in range(250)), ("end", "stopped")]
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
    for entry in (*map(line, range(3)), End("finished", None)):
        thread.add(entry)
    wait_until(lambda: recorder.outage < 10**9)
    thread.join(0.0)
    assert capsys.readouterr().out.splitlines()[-1] == "logger remote dropped 3 lines and 0 images"
    assert recorder.calls == []


def test_a_logger_that_cannot_be_used_is_rejected_before_training(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "own.py").write_text("from paceline import Logger\nclass Own(Logger):\n    package = 'not_installed'\n")
    extra = "from paceline import Logger\nclass Own(Logger):\n    package, extra = 'not.here', 'wandb'\n"
    (tmp_path / "extra.py").write_text(extra)
    (tmp_path / "empty.py").write_text("answer = 42\n")
    for loggers, message in (
        (str(tmp_path / "own.py"), "own.py: package not_installed is not installed"),
        (str(tmp_path / "extra.py"), "package not.here is not installed: pip install 'paceline[wandb]'"),
        (str(tmp_path / "empty.py"), "defines no subclass of Logger"),
        ("tensorbord", "unknown logger 'tensorbord'; did you mean 'tensorboard'?"),
    ):
        with pytest.raises(UserError) as caught:
            check_loggers(loggers)
        assert message in str(caught.value)
    rejected = run_fork(tmp_path, "train", tiny, "--out", "run", "--loggers", "./empty.py")
    assert rejected.wait() == 2 and "defines no subclass of Logger" in rejected.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_trains_the_same_weights_whatever_its_loggers_do(tmp_path: Path, tiny: str) -> None:
    write_logger(tmp_path / "own.py")
    write_logger(tmp_path / "failing.py", fails="write")
    write_logger(tmp_path / "hanging.py", hangs="write")
    command = ("train", tiny, "--images", "96", "--set", "logger_wait=0.2")
    problems = {"failing": "failing.py is switched off", "hanging": "hanging.py did not finish in time"}
    for out in ("own", "failing", "hanging", "none", "usual"):
        chosen = () if out == "usual" else ("--loggers", "" if out == "none" else f"./{out}.py")
        done = run_fork(tmp_path, *command, "--out", out, *chosen)
        assert done.wait() == 0 and done.stderr == "", done.stderr
        assert [name for name, problem in problems.items() if problem in done.stdout] == [out] * (out in problems)
        assert weights_of(tmp_path / out) == weights_of(tmp_path / "own")
        assert metrics_without_times(tmp_path / out) == metrics_without_times(tmp_path / "own")
        assert (tmp_path / out / "tensorboard").exists() == (out == "usual")
    _, state, weights, last = (tmp_path / "own" / "own.txt").read_text().rsplit(maxsplit=3)
    assert (state, last) == ("finished", "close") and Path(weights).name == "weights.safetensors"
    assert Path(weights).is_relative_to(tmp_path / "own" / "checkpoints") and Path(weights).exists()
    longer = run_fork(tmp_path, *command, "--images", "112", "--out", "none", "--loggers", "tensorboard")
    assert longer.wait() == 0, "a resumed run may have different loggers"
    bad = run_fork(tmp_path, *command, "--out", "bad", "--loggers", "./own.py", "--set", "not_finite_at=2")
    assert bad.wait() == 2 and "\nend failed None\n" in (tmp_path / "bad" / "own.txt").read_text()


def test_an_error_in_the_thread_of_tensorboard_is_raised_but_not_printed_by_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    for name in ("first", "second"):
        logger = TensorBoard(tmp_path / name, 0)
        shutil.rmtree(tmp_path / name / FOLDER)
        with pytest.raises(FileNotFoundError):
            logger.write(1, {"loss": 1.0})
            logger.flush()
    assert not printed
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    assert [failed.exc_type for failed in printed] == [ZeroDivisionError]
