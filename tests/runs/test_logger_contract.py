"""Requirements for every logger. A logger that fails is disabled, and a user's file can define a logger."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from running import metrics_without_times, run_fork, weights_of

from paceline.core.errors import UserError
from paceline.core.registry import KINDS, load_class, names
from paceline.runs import logger as logger_module
from paceline.runs.logger import Logger, check_loggers
from paceline.runs.metrics import MetricsWriter

OWN = """
from paceline.runs.logger import Logger


class Lines(Logger):
    def __init__(self, folder, images):
        self.file = (folder / "lines.txt").open("a")
        self.line(f"open {images}")

    def line(self, text):
        print(text, file=self.file, flush=True)

    def write(self, images, values):
        self.line(f"write {images}")

    def image(self, name, images, pixels):
        self.line(f"image {name} {images} {pixels.shape} {pixels.dtype}")

    def flush(self):
        self.line("flush")

    def close(self):
        self.line("close")
"""
FAILING = """
from paceline.runs.logger import Logger


class Failing(Logger):
    def __init__(self, folder, images):
        self.where = {where!r}
        self.fail("open")

    def fail(self, where):
        if where == self.where:
            raise ConnectionError("the server went away, token=abcdef")

    def write(self, images, values):
        self.fail("write")

    def image(self, name, images, pixels):
        self.fail("image")

    def flush(self):
        self.fail("flush")

    def close(self):
        self.fail("close")
"""


def pixels(channels: int) -> np.ndarray:
    return np.arange(4 * 6 * channels, dtype=np.uint8).reshape(4, 6, channels)


def log_something(logger: Logger, images: int) -> None:
    values: Mapping[str, float] = {"network/loss": 0.5, "time/nan": math.nan, "validation/psnr[y]": math.inf}
    logger.write(images, values)
    for channels in (1, 3):
        logger.image(f"samples{channels}", images, pixels(channels))
    logger.flush()


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
            log_something(logger, images)
        logger.end("stopped", tmp_path / "run" / "weights.safetensors")
        logger.close()
    assert [entry.name for entry in tmp_path.iterdir()] in ([], ["run"]), "a logger may write only into the run folder"


@pytest.mark.parametrize("name", names("logger"))
def test_a_logger_imports_no_large_packages_before_it_is_used(name: str) -> None:
    code = f"import sys, {KINDS['logger'].package}.{name}; sys.exit('torch' in sys.modules or {name!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("where", ["open", "write", "image", "flush", "close"])
def test_a_logger_that_fails_is_reported_once_and_disabled(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logger_module, "FLUSH_SECONDS", 60.0)  # on a slow machine, too, every flush ends
    monkeypatch.setattr(logger_module, "SILENT_SECONDS", math.inf)
    Path("failing.py").write_text(FAILING.format(where=where))
    Path("own.py").write_text(OWN)
    writer = MetricsWriter(tmp_path / "run", loggers="./failing.py, ./own.py")
    for images in (10, 20):
        writer.write(images, {"a/loss": 1.0})
        writer.image("samples", images, lambda: pixels(3))
        writer.flush()
    writer.close()
    printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("running the code")]
    assert printed == [
        "logger ./failing.py is switched off: ConnectionError: the server went away, token=***; "
        "training continues without it"
    ]
    lines = (tmp_path / "run" / "lines.txt").read_text().splitlines()
    each = [f"write {{}},image samples {{}} {(4, 6, 3)} uint8,flush".replace("{}", str(n)) for n in (10, 20)]
    assert ",".join(lines) == ",".join(["open 0", *each, "close"]), "the other loggers must continue"


def test_an_unknown_logger_or_a_file_without_a_logger_is_rejected_before_training(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "empty.py").write_text("answer = 42\n")
    for loggers, message in (
        ("tensorbord", "unknown logger 'tensorbord'; did you mean 'tensorboard'?"),
        ("./empty.py", "logger './empty.py': defines no subclass of Logger"),
    ):
        rejected = run_fork(tmp_path, "train", tiny, "--out", "run", "--loggers", loggers)
        assert rejected.wait() == 2 and message in rejected.stderr
        with pytest.raises(UserError):
            check_loggers(str(tmp_path / loggers) if loggers.startswith(".") else loggers)
    assert not (tmp_path / "run").exists()


def test_a_run_trains_with_a_user_logger_a_failing_logger_and_no_logger(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "failing.py").write_text(FAILING.format(where="write"))
    command = ("train", tiny, "--images", "96")
    for out, loggers in (("own", "./own.py"), ("failing", "./failing.py"), ("none", ""), ("usual", None)):
        chosen = () if loggers is None else ("--loggers", loggers)
        done = run_fork(tmp_path, *command, "--out", out, *chosen)
        assert done.wait() == 0 and done.stderr == "", done.stderr
        assert ("logger ./failing.py is switched off" in done.stdout) == (out == "failing")
    assert "close" in (tmp_path / "own" / "lines.txt").read_text()
    assert [out for out in ("own", "failing", "none", "usual") if (tmp_path / out / "tensorboard").exists()] == [
        "usual"
    ]
    for out in ("failing", "none", "usual"):
        assert weights_of(tmp_path / out) == weights_of(tmp_path / "own")
        assert metrics_without_times(tmp_path / out) == metrics_without_times(tmp_path / "own")
    longer = run_fork(tmp_path, *command[:-1], "112", "--out", "none", "--loggers", "tensorboard")
    assert longer.wait() == 0, "a resumed run may have different loggers"
