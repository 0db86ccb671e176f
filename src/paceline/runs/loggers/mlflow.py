"""MLflow: sends metrics, settings and samples to a tracking server, or to a database in the run folder."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.text import print_line, redact
from paceline.runs.logger import Logger, LogLine, Pixels, describe_run, read_run_id, write_run_id

NAME = "mlflow"
FOLDER = "mlflow"  # in the run folder, used if no tracking server is set
EXPERIMENT = "paceline"  # used if MLFLOW_EXPERIMENT_NAME is not set
SAMPLES = "samples"
WEIGHTS_TAG = "paceline.weights"
FOLDER_TAG = "paceline.folder"
# MLflow itself waits minutes for a server that does not answer. Paceline repeats requests, so it needs no long waits.
REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # MLflow's word for each state
MAX_METRICS = 1000  # per request
MAX_PARAMS = 100  # per request
MAX_PARAM_LENGTH = 500  # older servers reject longer values
TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500  # HTTP status codes
_INVALID = re.compile(r"[^\w\-./ ]")

Item = TypeVar("Item")


class MLflow(Logger):
    """Logs a run to MLflow. Points that the server already has are not sent again after a resume."""

    package = "mlflow"
    extra = "mlflow"

    def __init__(self, folder: Path, images: int) -> None:
        import mlflow

        for name, value in REQUEST_LIMITS.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # a printed URL may contain credentials
        self._folder, self._images = folder, images
        self._is_local = not mlflow.is_tracking_uri_set()
        self._uri = _local_database(folder) if self._is_local else mlflow.get_tracking_uri()
        self._service = "" if self._is_local else self._uri  # a run folder, and its database with it, may be moved
        self._client: Any = mlflow.MlflowClient(tracking_uri=self._uri)
        self._run = ""  # the run's ID, known once the server has answered
        self._params: dict[str, str] = {}  # settings that are not sent yet
        self._sent: dict[str, set[int]] = defaultdict(set)  # the steps of each metric that the server already has

    def connect(self) -> None:
        from mlflow.entities import Param

        with _server_errors():
            self._run = self._run or self._resume() or self._create()
            for part in _parts(list(self._params.items()), MAX_PARAMS):
                self._client.log_batch(self._run, params=[Param(*item) for item in part], synchronous=True)
            self._params = {}
            if not self._is_local:
                experiment = self._client.get_run(self._run).info.experiment_id
                print_line(redact(f"MLflow run: {self._uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}"))

    def _resume(self) -> str:
        """Return the ID of the run to resume; empty if there is none."""
        run_id = read_run_id(self._folder, NAME, self._service)
        run = self._find_run(run_id) if run_id else None
        if run is None or run.info.lifecycle_stage != "active":
            return ""
        if not self._images:  # the run starts over, and MLflow cannot remove the points of the first attempt
            self._client.set_terminated(run_id, STATES["failed"])
            return ""
        for key in run.data.metrics:
            self._sent[key] = {point.step for point in self._client.get_metric_history(run_id, key)}
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _find_run(self, run_id: str) -> Any | None:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if _is_temporary(error):
                raise
            return None  # the server has no such run

    def _create(self) -> str:
        tags = {FOLDER_TAG: str(self._folder.absolute())}
        created = self._client.create_run(self._experiment(), tags=tags, run_name=self._folder.absolute().name)
        run_id: str = created.info.run_id
        write_run_id(self._folder, NAME, run_id, self._service)
        described = describe_run(self._folder)
        self._params = {_key(name): str(value)[:MAX_PARAM_LENGTH] for name, value in described.items()}
        return run_id

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        artifacts = (self._folder / FOLDER / "artifacts").absolute().as_uri() if self._is_local else None
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def write_lines(self, lines: Sequence[LogLine]) -> None:
        from mlflow.entities import Metric

        points = [
            # The time is that of the line, so a server ignores a point that is sent twice.
            Metric(_key(name), value, round(line.time * 1000), line.images)
            for line in lines
            for name, value in line.values.items()
            if line.images not in self._sent[_key(name)]
        ]
        with _server_errors():
            for part in _parts(points, MAX_METRICS):
                self._client.log_batch(self._run, metrics=part, synchronous=True)

    def write(self, images: int, values: Mapping[str, float]) -> None:
        self.write_lines([LogLine(images, values, time.time())])

    def image(self, name: str, images: int, pixels: Pixels) -> None:
        with _server_errors():  # a resumed run replaces files with the same name
            self._client.log_image(self._run, pixels, artifact_file=f"{SAMPLES}/{name}-{images:012}.png")

    def end(self, state: str, weights: Path | None) -> None:
        with _server_errors():
            if weights:
                self._client.set_tag(self._run, WEIGHTS_TAG, str(weights))
            self._client.set_terminated(self._run, STATES[state])


@contextmanager
def _server_errors() -> Iterator[None]:
    """Raise Unreachable for an error that may disappear, such as a server that is down or overloaded."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if _is_temporary(error):
            raise Logger.Unreachable(str(error)) from error
        raise
    except OSError as error:  # includes the connection errors of requests
        raise Logger.Unreachable(str(error)) from error


def _is_temporary(error: Any) -> bool:
    status: int = error.get_http_status_code()
    return status >= SERVER_ERROR or status == TOO_MANY_REQUESTS


def _key(name: str) -> str:
    """Return a name that MLflow accepts: `validation/psnr[y]` becomes `validation/psnr.y`."""
    return _INVALID.sub("_", name.replace("[", ".").replace("]", ""))


def _parts(items: list[Item], length: int) -> Iterator[list[Item]]:
    return (items[start : start + length] for start in range(0, len(items), length))


def _local_database(folder: Path) -> str:
    database = (folder / FOLDER).absolute() / "mlflow.db"
    database.parent.mkdir(exist_ok=True)
    return f"sqlite:///{database}"
