"""Weights & Biases in offline mode, and with a server that does not answer."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import metrics_without_times, run_fork, start_command, start_fork, wait_until, weights_of

pytest.importorskip("wandb")
pytestmark = pytest.mark.extras

from logged import lines_of, run_id  # noqa: E402
from wandb_file import config, history, summary  # noqa: E402

from paceline.core.registry import load_class  # noqa: E402
from paceline.runs.logger import Logger  # noqa: E402

TINY_GAN = str(Path(__file__).parents[1] / "tiny_gan.py")
OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}


def files_of(folder: Path) -> list[Path]:
    """Return the `.wandb` file of each offline folder, oldest first."""
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def logged(file: Path) -> list[tuple[str, int, float]]:
    return sorted((name, step, value) for name, step, value in history(file) if not name.startswith("samples/"))


def test_a_finished_run_is_complete_in_its_offline_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**OFFLINE, "TMPDIR": str(tmp_path / "temporary")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "temporary").mkdir()
    done = start_command(tmp_path, "train", TINY_GAN, "--images", "640", "--out", "gan", "--loggers", "wandb")
    assert done.wait() == 0 and done.stderr == "", done.stderr
    assert not list((tmp_path / "temporary").glob("*wandb-[am]*")), "artifacts and media are removed"
    assert "wandb:" not in done.stdout, "W&B prints nothing"
    folder = tmp_path / "gan"
    (file,) = files_of(folder)
    assert logged(file) == lines_of(folder)
    samples = [entry for entry in history(file) if entry[0].startswith("samples/")]
    assert sorted((name, step) for name, step, _ in samples) == [
        ("samples/real", 0),
        ("samples/samples", 0),
        ("samples/samples", 640),
    ]
    for name, step, path in samples:
        original = np.asarray(Image.open(folder / f"{name}-{step:012}.png"))
        assert np.array_equal(np.asarray(Image.open(file.parent / "files" / path)), original)
    assert config(file)["lr"] == 0.01 and config(file)["recipe"] == TINY_GAN
    assert Path(summary(file)["weights"]).is_file() and summary(file)["state"] == "finished"
    assert not [path for path in folder.rglob("*") if path.is_symlink()], "a link would break if the folder is moved"


def test_a_killed_run_keeps_its_id_and_its_newest_offline_folder_is_complete(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--images", "640", "--out", "run", "--loggers", "wandb", "--set", "log_every=1 steps")
    command += ("--set", "save_every=10 steps", "--set", "pause=0.03")
    killed = start_fork(tmp_path, *command, environment=OFFLINE)
    folder = tmp_path / "run"
    wait_until(lambda: list(folder.glob("checkpoints/0*/manifest.json")), killed)
    wait_until(lambda: files_of(folder), killed)
    killed.kill()
    killed.wait()
    first = run_id(folder, "wandb")
    done = run_fork(tmp_path, *command, environment=OFFLINE)
    assert done.wait() == 0 and "resuming from" in done.stdout, done.stdout + done.stderr
    assert run_id(folder, "wandb") == first
    old, new = files_of(folder)
    assert old.name == new.name == f"run-{first}.wandb"
    assert logged(new) == lines_of(folder), "metrics before the checkpoint are written again, each step once"


def test_samples_and_values_that_are_not_finite_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    rows = [{"images": 10, "seconds": 1.0, "time": 2.0, "a/x": None}, {"images": 20, "seconds": 1.0, "a/x": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "samples").mkdir()
    Image.fromarray(np.zeros((4, 6), np.uint8)).save(tmp_path / "samples" / "grid-000000000010.png")
    logger = load_class("logger", "wandb", Logger)(tmp_path, 10)
    logger.connect()
    logger.write(15, {"a/x": 3.5})
    logger.image("grid", 15, np.zeros((4, 6, 3), np.uint8))
    logger.end("stopped", None)
    logger.close()
    (file,) = files_of(tmp_path)
    (first, second), images = logged(file), [entry for entry in history(file) if entry[0] == "samples/grid"]
    assert first[:2] == ("a/x", 10) and math.isnan(float(first[2])) and second == ("a/x", 15, 3.5)
    assert [step for _, step, _ in images] == [10, 15]


def test_a_run_that_starts_over_gets_a_new_id(tmp_path: Path) -> None:
    ids = []
    for start in (0, 0, 100):
        load_class("logger", "wandb", Logger)(tmp_path, start)
        ids.append(run_id(tmp_path, "wandb"))
    assert ids[0] != ids[1] and ids[1] == ids[2]


def test_without_an_api_key_the_run_is_logged_offline(tmp_path: Path, tiny: str) -> None:
    environment = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path)}
    done = run_fork(
        tmp_path, "train", tiny, "--images", "96", "--out", "run", "--loggers", "wandb", environment=environment
    )
    assert done.wait() == 0 and "logger wandb works offline (no API key was found)" in done.stdout, done.stderr
    (file,) = files_of(tmp_path / "run")
    assert logged(file) == lines_of(tmp_path / "run")


def test_a_server_that_never_answers_does_not_stop_a_run(tmp_path: Path, tiny: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        environment = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WANDB_API_KEY": "0123456789" * 4,
            "WANDB_ERROR_REPORTING": "false",
        }
        command = ("train", tiny, "--images", "96", "--set", "logger_wait=0.5")
        for out, loggers in (("silent", "wandb"), ("none", "")):
            done = run_fork(tmp_path, *command, "--out", out, "--loggers", loggers, environment=environment)
            assert done.wait() == 0 and done.stderr == "", done.stderr
            assert ("logger wandb dropped" in done.stdout) == (out == "silent"), done.stdout
    assert weights_of(tmp_path / "silent") == weights_of(tmp_path / "none")
    assert metrics_without_times(tmp_path / "silent") == metrics_without_times(tmp_path / "none")
    found = [path for path in (tmp_path / "silent").rglob("*") if path.is_file()]
    assert not [path for path in found if b"0123456789" * 4 in path.read_bytes()], "the key is stored nowhere"
