"""MLflow and Weights & Biases in a run with two processes: values are logged once, and a resumed run keeps its id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import run_fork

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("wandb")
pytestmark = pytest.mark.extras

from logged import Point, lines_of, run_id  # noqa: E402
from wandb_file import history  # noqa: E402

OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
PROBLEM = r"logger \w+ (is switched off|dropped|cannot be reached|did not finish)"


def points_in_mlflow(folder: Path) -> list[Point]:
    """Return every point of the only run in the run folder's MLflow database."""
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paceline")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == run_id(folder, "mlflow") and run.info.status == "FINISHED"
    histories = [client.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
    return sorted((point.key, point.step, point.value) for points in histories for point in points)


def points_in_wandb(folder: Path) -> list[Point]:
    """Return every point in the newest offline folder of W&B."""
    newest = max(folder.glob(f"wandb/offline-run-*-{run_id(folder, 'wandb')}/*.wandb"))
    return sorted(point for point in history(newest) if not point[0].startswith("samples/"))


def test_two_processes_log_each_value_once_and_resume_under_the_same_ids(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    command = ("train", tiny, "--devices", "2", "--strategy", "ddp", "--accelerator", "cpu", "--out", "run")
    command += ("--loggers", "mlflow,wandb", "--set", "log_every=1 steps", "--set", "logger_wait=100")
    folder, ids = tmp_path / "run", []
    for images in ("96", "192"):
        done = run_fork(tmp_path, *command, "--images", images, environment=OFFLINE)
        assert done.wait() == 0, done.stdout + done.stderr
        assert not re.search(PROBLEM, done.stdout), done.stdout
        assert points_in_mlflow(folder) == points_in_wandb(folder) == lines_of(folder)
        ids.append([run_id(folder, name) for name in ("mlflow", "wandb")])
    assert "resuming from 96 images" in done.stdout and ids[0] == ids[1]
    assert max(step for _, step, _ in lines_of(folder)) == 192
