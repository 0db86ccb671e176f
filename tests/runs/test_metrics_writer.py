"""metrics.jsonl, TensorBoard events and sample images: what is written, and what is kept on resume."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from logged import write_logger
from PIL import Image
from running import start_function_in_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.core.errors import UserError
from paceline.runs import logger as logger_module
from paceline.runs.metrics import MAX_WAITING_IMAGES, MetricsWriter, read_metrics


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def date_back(folder: Path) -> None:
    """Rename event files as if they were a second older: TensorBoard sorts them by the second in their names."""
    for path in folder.iterdir():
        words = path.name.split(".")
        path.rename(path.with_name(".".join([*words[:3], str(int(words[3]) - 1), *words[4:]])))


def test_a_line_contains_the_image_count_the_time_and_the_values_or_null_if_they_are_not_finite(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, loggers="tensorboard")
    writer.write(128, {"a/nan": math.nan, "a/inf": math.inf, "a/fine": 2.5})
    text = (tmp_path / "metrics.jsonl").read_text()  # on disk although the writer is not closed yet
    writer.close()
    (line,) = [json.loads(row, parse_constant=pytest.fail) for row in text.splitlines()]
    assert line.pop("seconds") >= 0 and line.pop("time") > 0
    assert line == {"images": 128, "a/nan": None, "a/inf": None, "a/fine": 2.5}
    assert events(tmp_path).Scalars("a/inf")[0].value == math.inf


def test_metrics_after_the_checkpoint_are_removed_when_a_run_resumes(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    writer = MetricsWriter(tmp_path, loggers="tensorboard")
    for images in (100, 200, 300):
        writer.write(images, {"a/loss": float(images)})
        writer.image("fakes", images, lambda: pixels)
    writer.close()
    date_back(tmp_path / "tensorboard")
    writer = MetricsWriter(tmp_path, images=200, loggers="tensorboard")
    writer.write(250, {"a/loss": -1.0})
    writer.close()
    assert [line["images"] for line in lines(tmp_path)] == [100, 200, 250]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "fakes-000000000100.png",
        "fakes-000000000200.png",
    ]
    seen = events(tmp_path)
    assert [(event.step, event.value) for event in seen.Scalars("a/loss")] == [(100, 100), (200, 200), (250, -1)]
    assert [event.step for event in seen.Images("samples/fakes")] == [100, 200]


def test_a_run_killed_before_its_first_checkpoint_restarts_with_empty_metrics(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, loggers="tensorboard")
    writer.write(0, {"a/loss": 1.0})
    writer.image("fakes", 0, lambda: np.zeros((2, 2, 3), np.uint8))
    writer.close()
    (tmp_path / "samples" / ".0123456789abcdef.writing").write_bytes(b"half a PNG")
    writer = MetricsWriter(tmp_path, loggers="tensorboard")
    writer.write(0, {"a/loss": 2.0})
    writer.close()
    assert [line["a/loss"] for line in lines(tmp_path)] == [2.0]
    assert not list((tmp_path / "samples").iterdir())
    assert [event.value for event in events(tmp_path).Scalars("a/loss")] == [2.0]


def test_malformed_metrics_lines_are_skipped_by_readers_and_removed_on_resume(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    good = [b'{"images": 1, "seconds": 5.0, "a/b": 1.0}', b'{"images": 2, "seconds": 7.5, "a/b": null}']
    bad = [
        b'{"images": 3, "a/b": NaN}',
        b'{"images": 3, "a/b": "high"}',
        b"[1]",
        b'{"a/b": 1}',
        b"\xff\xfe",
        b'{"images": 4, "sec',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good[0], *bad[:-1], good[1], bad[-1]]))
    assert [row["images"] for row in read_metrics(tmp_path)] == [1, 2]
    MetricsWriter(tmp_path, images=10).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"\n".join(good) + b"\n"


def test_the_elapsed_time_of_a_resumed_run_continues_from_its_last_metrics_line(tmp_path: Path) -> None:
    rows = ['{"images": 1, "seconds": 100.0}', '{"images": 2, "seconds": 200.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    writer = MetricsWriter(tmp_path, images=1)
    writer.write(2, {})
    writer.close()
    assert 100 <= lines(tmp_path)[-1]["seconds"] < 200


@pytest.mark.parametrize("channels", [1, 3])
def test_a_sample_image_is_saved_as_a_png(tmp_path: Path, channels: int) -> None:
    pixels = np.arange(5 * 7 * channels, dtype=np.uint8).reshape(5, 7, channels)
    writer = MetricsWriter(tmp_path)
    writer.image("grid", 1234567, lambda: pixels)
    writer.close()
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "grid-000001234567.png"
    assert np.array_equal(np.asarray(Image.open(path)).reshape(pixels.shape), pixels)


def write_and_die() -> None:
    logger_module.FLUSH_SECONDS = 60.0  # on a slow machine, too, the flush ends
    writer = MetricsWriter(Path(), loggers="tensorboard")
    writer.write(1, {"a/loss": 1.0})
    writer.flush()
    writer.write(2, {"a/loss": 2.0})
    os.kill(os.getpid(), signal.SIGKILL)


def test_written_lines_and_flushed_events_survive_a_kill(tmp_path: Path) -> None:
    assert start_function_in_ranks(tmp_path, 1, write_and_die)[0].wait() == -signal.SIGKILL
    assert [line["images"] for line in lines(tmp_path)] == [1, 2]
    assert events(tmp_path).Scalars("a/loss")[0].value == 1.0


def test_reading_metrics_imports_no_tensorboard() -> None:
    code = "import sys, paceline.runs.metrics; sys.exit('tensorboard' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_metrics_file_that_is_a_symlink_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("not metrics")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"metrics\.jsonl: is a symbolic link, which is not followed"):
        MetricsWriter(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    MetricsWriter(tmp_path / "run").close()
    assert (tmp_path / "elsewhere").read_text() == "not metrics"
    assert not (tmp_path / "run" / "metrics.jsonl").is_symlink(), "a regular file replaces the symlink"


def test_a_sample_image_is_written_while_training_continues_and_before_a_checkpoint(tmp_path: Path) -> None:
    writer, may_arrange = MetricsWriter(tmp_path), threading.Event()

    def arrange() -> np.ndarray:
        may_arrange.wait(60)
        return np.zeros((4, 6, 3), np.uint8)

    writer.image("samples", 100, arrange)
    writer.write(150, {"a/loss": 1.0})
    assert [line["images"] for line in lines(tmp_path)] == [150], "a line does not wait for an image"
    assert not (tmp_path / "samples").exists()
    threading.Timer(0.1, may_arrange.set).start()
    writer.flush()  # called before a checkpoint is written
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["samples-000000000100.png"]
    writer.close()


def test_loggers_receive_lines_and_images_in_order_although_images_take_longer(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run", loggers=write_logger(tmp_path / "ordered.py"))
    may_arrange = threading.Event()
    writer.write(1, {"a/loss": 1.0})
    writer.image("samples", 2, lambda: np.full((2, 2, 3), may_arrange.wait(60), np.uint8))
    writer.write(3, {"a/loss": 1.0})
    may_arrange.set()
    writer.close()
    calls = [line.split()[:3] for line in (tmp_path / "run" / "ordered.txt").read_text().splitlines()]
    assert calls[2:5] == [["write", "1"], ["image", "samples", "2"], ["write", "3"]]


def test_a_sample_image_that_cannot_be_written_is_an_error_in_the_training_loop(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    writer = MetricsWriter(tmp_path)
    writer.image("samples", 1, lambda: np.zeros((2, 2, 3), np.uint8))
    with pytest.raises(OSError):
        writer.flush()
    writer.close()


def test_only_a_few_sample_images_wait_in_memory(tmp_path: Path) -> None:
    writer, may_arrange, num_added = MetricsWriter(tmp_path), threading.Event(), 0
    waiting = []

    def arrange() -> np.ndarray:
        may_arrange.wait(60)
        waiting.append(num_added - len(waiting))
        return np.zeros((2, 2, 3), np.uint8)

    threading.Timer(0.1, may_arrange.set).start()
    for number in range(3 * MAX_WAITING_IMAGES):
        writer.image("samples", number, arrange)
        num_added = number + 1
    writer.close()
    assert len(list((tmp_path / "samples").iterdir())) == 3 * MAX_WAITING_IMAGES
    assert max(waiting) <= MAX_WAITING_IMAGES


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "its end is missing"),
        (b'{"images": 8}\n', "its end is missing"),
        (b'{"images": 8}\n{"ima', "its end is missing"),
        (b'{"images": 8}\n\xff\n{"images": 16}\n', "1 lines cannot be read"),
        (b"\0\0\n\xfe\n", "2 lines cannot be read"),
    ],
)
def test_a_resumed_run_reports_that_metrics_from_before_its_checkpoint_are_lost(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    writer = MetricsWriter(tmp_path, images=16)
    writer.close()
    assert writer.note == f"{tmp_path / 'metrics.jsonl'}: some metrics from before 16 images are lost ({problem})"


@pytest.mark.parametrize("end", ['{"images": 24}\n', '{"images": 24}\n{"ima', "\0\0\0"])
def test_a_last_line_that_a_kill_cut_off_is_removed_without_a_note(tmp_path: Path, end: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"images": 8}\n{"images": 16}\n' + end)
    writer = MetricsWriter(tmp_path, images=16)
    writer.close()
    assert writer.note == "" and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
