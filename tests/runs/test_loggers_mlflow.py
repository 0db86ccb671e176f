"""MLflow, with a real server: what arrives, what a resumed run sends, and what happens when the server dies."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from running import run_fork, start_fork, wait_until

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.extras

from logged import lines_of, run_id  # noqa: E402
from mlflow_server import MlflowServer  # noqa: E402

from paceline.core.registry import load_class  # noqa: E402
from paceline.runs.logger import LOGGER_RUNS, Logger, LogLine  # noqa: E402

TINY_GAN = str(Path(__file__).parents[1] / "tiny_gan.py")
OFTEN = ("--set", "log_every=1 steps", "--set", "save_every=10 steps", "--set", "pause=0.03")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    started = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    yield started
    started.kill()


def client_of(server: MlflowServer) -> Any:
    return mlflow.MlflowClient(tracking_uri=server.address)


def points(server: MlflowServer, run: str) -> list[tuple[str, int, float]]:
    """Return the name, step and value of every stored point."""
    client = client_of(server)
    keys = client.get_run(run).data.metrics
    return [(key, point.step, point.value) for key in keys for point in client.get_metric_history(run, key)]


def without_times(found: list[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    return sorted(point for point in found if not point[0].startswith("time/"))


def secrets_in(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if b"hunter2" in path.read_bytes()]


def test_a_finished_run_is_complete_in_mlflow(tmp_path: Path, server: MlflowServer) -> None:
    command = ("train", TINY_GAN, "--images", "640", "--out", "gan", "--loggers", "mlflow")
    done = run_fork(tmp_path, *command, environment=server.environment)
    folder = tmp_path / "gan"
    assert done.wait() == 0 and done.stderr == "", done.stderr
    assert "logger mlflow" not in done.stdout
    run = client_of(server).get_run(run_id(folder, "mlflow"))
    expected = [(name.replace("[", ".").replace("]", ""), at, value) for name, at, value in lines_of(folder)]
    assert sorted(points(server, run.info.run_id)) == sorted(expected)
    assert run.info.status == "FINISHED" and run.info.run_name == folder.name
    assert run.data.params["lr"] == "0.01" and run.data.params["recipe"] == TINY_GAN
    assert "provenance.torch" in run.data.params
    assert Path(run.data.tags["paceline.weights"]).is_relative_to(folder)
    assert Path(run.data.tags["paceline.weights"]).is_file()
    samples = [file.path for file in client_of(server).list_artifacts(run.info.run_id, "samples")]
    names = ("real-000000000000", "samples-000000000000", "samples-000000000640")
    assert samples == [f"samples/{name}.png" for name in names]
    copy = mlflow.artifacts.download_artifacts(
        run_id=run.info.run_id, artifact_path=samples[1], tracking_uri=server.address, dst_path=str(tmp_path)
    )
    original = np.asarray(Image.open(folder / samples[1]))
    assert np.array_equal(np.asarray(Image.open(copy)), original)
    assert not secrets_in(folder)


def test_a_killed_run_resumes_under_its_id_without_duplicate_points(
    tmp_path: Path, server: MlflowServer, tiny: str
) -> None:
    command = ("train", tiny, "--images", "960", "--out", "run", "--loggers", "mlflow", *OFTEN)
    killed = start_fork(tmp_path, *command, environment=server.environment)
    folder = tmp_path / "run"
    checkpoint = wait_until(lambda: list(folder.glob("checkpoints/0*/manifest.json")), killed)
    seen = int(checkpoint[0].parent.name)
    first = run_id(folder, "mlflow")
    wait_until(lambda: any(step > seen for _, step, _ in points(server, first)), killed)
    killed.kill()
    killed.wait()
    done = run_fork(tmp_path, *command, environment=server.environment)
    assert done.wait() == 0 and "resuming from" in done.stdout, done.stderr
    assert run_id(folder, "mlflow") == first
    stored = points(server, first)
    assert len({(name, step) for name, step, _ in stored}) == len(stored), "no step of a metric is stored twice"
    assert without_times(stored) == without_times(lines_of(folder))
    assert client_of(server).get_run(first).info.status == "FINISHED"


def test_a_server_that_dies_and_returns_receives_every_point_once(
    tmp_path: Path, server: MlflowServer, tiny: str
) -> None:
    command = ("train", tiny, "--images", "1600", "--out", "run", "--loggers", "mlflow", *OFTEN)
    running = start_fork(tmp_path, *command, environment=server.environment)
    folder = tmp_path / "run"
    wait_until(lambda: (folder / LOGGER_RUNS).exists() and points(server, run_id(folder, "mlflow")), running)
    server.kill()
    wait_until(lambda: "logger mlflow cannot be reached" in running.stdout, running)
    server.start()
    assert running.wait() == 0, running.stderr
    assert "logger mlflow can be reached again" in running.stdout and "dropped" not in running.stdout
    assert "hunter2" not in running.stdout + running.stderr and not secrets_in(folder)
    assert sorted(points(server, run_id(folder, "mlflow"))) == sorted(lines_of(folder))


def test_a_run_that_starts_over_gets_a_new_id(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    ids = []
    for start in (0, 0, 100):
        logger = load_class("logger", "mlflow", Logger)(tmp_path, start)
        logger.connect()
        logger.write_lines([LogLine(images, {"a/loss": images + 0.5}, 1.0) for images in range(50, 250, 50)])
        ids.append(run_id(tmp_path, "mlflow"))
    assert ids[0] != ids[1] and ids[1] == ids[2]
    client = client_of(server)
    assert client.get_run(ids[0]).info.status == "FAILED" and client.get_run(ids[2]).info.status == "RUNNING"
    assert points(server, ids[2]) == [("a/loss", images, images + 0.5) for images in range(50, 250, 50)]


def test_values_that_are_not_finite_are_accepted(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    logger = load_class("logger", "mlflow", Logger)(tmp_path, 0)
    logger.connect()
    logger.write(1, {"a/nan": math.nan, "a/inf": math.inf, "a/psnr[y]": 2.0})
    stored = {name: value for name, _, value in points(server, run_id(tmp_path, "mlflow"))}
    assert math.isnan(stored["a/nan"]) and stored["a/inf"] > 1e308 and stored["a/psnr.y"] == 2.0


def test_the_environment_of_the_user_limits_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    load_class("logger", "mlflow", Logger)(tmp_path, 0)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"
