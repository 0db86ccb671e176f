"""TensorBoard writes its files in a thread of its own, whose errors are reported in one line."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from paceline.runs.loggers.tensorboard import FOLDER, TensorBoard


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
